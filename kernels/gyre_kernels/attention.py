"""Attention."""

from gyre_kernels import reference
from gyre_kernels._check import both_sides, check_heads, check_implementation


def attention(
  q,
  k,
  v,
  *,
  subtree_end=None,
  q_positions=None,
  k_positions=None,
  causal=True,
  window=None,
  softcap=None,
  sinks=None,
  scale=None,
  return_lse=False,
  implementation=None,
):
  """See reference. `window`: an int bounds both sides: |q_pos - k_pos| <= window;
  (left, right): q_pos - k_pos <= left and k_pos - q_pos <= right. A Hugging
  Face sliding_window W is window=W - 1."""
  check_implementation(implementation, "attention")
  check_heads(q.shape[2], k.shape[2])
  both_sides(window)
  return reference.attention(
    q,
    k,
    v,
    subtree_end=subtree_end,
    q_positions=q_positions,
    k_positions=k_positions,
    causal=causal,
    window=window,
    softcap=softcap,
    sinks=sinks,
    scale=scale,
    return_lse=return_lse,
  )
