"""Attention over a long prefix and a chunk, and merging of partials."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from gyre_kernels import _blocks, _check
from gyre_kernels.attention import run


def merge(
  outs: Sequence[Float[Array, "B T N H"]],
  lses: Sequence[Float[Array, "B N T"]],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
  """Merges attention of the same queries over disjoint sets of keys.

  `lse = log sum_i exp(lse_i)`, `out = sum_i exp(lse_i - lse) out_i`, which is
  attention over the union of the keys. Sinks, if any, belong in one partial.
  Where all partials are empty the result is (0, -inf), with zero gradients.

  Args:
    outs: outputs; the result has the type of the first.
    lses: natural log-sum-exps, f32 or f64, -inf where a partial is empty.

  Returns:
    The output and the log-sum-exp of the whole.

  Raises:
    ValueError: if there is nothing to merge, or not one lse an output.
  """
  if not outs or len(outs) != len(lses):
    raise ValueError(f"merge: {len(outs)} outs and {len(lses)} lses")
  stacked = jnp.stack(list(lses))
  top = lax.stop_gradient(stacked.max(0))
  top = jnp.where(top == -jnp.inf, 0.0, top)
  weights = jnp.exp(stacked - top)
  total = weights.sum(0)
  some = total > 0
  total = jnp.where(some, total, 1.0)
  shares = (weights / total).swapaxes(2, 3)[..., None]
  out = sum(o * share for o, share in zip(outs, shares, strict=True))
  lse = jnp.where(some, top + jnp.log(total), -jnp.inf)
  return out.astype(outs[0].dtype), lse


def prefix_attention(
  q: Float[Array, "BG T N H"],
  k: Float[Array, "BG S K H"],
  v: Float[Array, "BG S K H"],
  prefix_k: Float[Array, "B P K H"],
  prefix_v: Float[Array, "B P K H"],
  *,
  prefix_length: Int[Array, "B"] | None = None,
  prefix_positions: Int[Array, "B P"] | None = None,
  prefix_grad: bool = True,
  subtree_end: Int[Array, "BG S"] | None = None,
  q_positions: Int[Array, "BG T"] | None = None,
  k_positions: Int[Array, "BG S"] | None = None,
  causal: bool = True,
  window: int | tuple[int | None, int | None] | None = None,
  softcap: float | None = None,
  sinks: Float[Array, "N"] | None = None,
  scale: float | None = None,
  return_lse: bool = False,
  implementation: str | None = None,
) -> Float[Array, "BG T N H"] | tuple[Array, Array]:
  """Attends a chunk to a prefix and to itself, as if they were one sequence.

  The batch of the chunk may be G times that of the prefix: chunks b * G + g
  then all continue prefix b (branches of one prompt), whose keys are read once
  for all of them. Every query sees the whole prefix, as far as a window lets
  it; inside the chunk the rules are those of `attention`, by the chunk's own
  indices.

  Args:
    q: queries of the chunk; T = S, or fewer, aligned with the end.
    k: keys of the chunk.
    v: values of the chunk.
    prefix_k: keys of the prefix.
    prefix_v: values of the prefix.
    prefix_length: how many of the P are real; default all.
    prefix_positions: for the window; default 0, 1, ...
    prefix_grad: False detaches the prefix and skips its backward work.
    subtree_end: as in `attention`, indices inside the chunk.
    q_positions: for the window; default: prefix_length + index.
    k_positions: for the window; default: prefix_length + index.
    causal: of the chunk.
    window: as in `attention`.
    softcap: as in `attention`.
    sinks: as in `attention`.
    scale: as in `attention`.
    return_lse: as in `attention`.
    implementation: None or "xla".

  Returns:
    As `attention`.

  Raises:
    ValueError: for shapes that do not fit together.
    NotImplementedError: for an implementation that lacks what is asked.
  """
  _check.check_implementation(implementation, "prefix_attention")
  batch, num_q, num_heads, head = q.shape
  num_k = k.shape[1]
  rows, size = prefix_k.shape[:2]
  _check.check_keys(q, k, v, (batch, num_k))
  _check.check_shape("prefix_k", prefix_k, (rows, size, *k.shape[2:]))
  _check.check_shape("prefix_v", prefix_v, (rows, size, *v.shape[2:]))
  if rows == 0 or batch % rows:
    raise ValueError(
      f"batch {batch} must be a multiple of the prefix's batch {rows}"
    )
  branches = batch // rows
  first = jnp.full((rows,), size, jnp.int32)
  prefix_end = None
  if prefix_length is not None:
    _check.check_shape("prefix_length", prefix_length, (rows,))
    first = prefix_length.astype(jnp.int32)
    real = jnp.arange(size) < first[:, None]
    # A query of this part may have a negative index: hide below them all.
    ints = jnp.iinfo(jnp.int32)
    prefix_end = jnp.where(real, ints.max, ints.min)
  offset = jnp.repeat(first, branches)[:, None]
  if k_positions is None:
    k_positions = offset + jnp.arange(num_k, dtype=jnp.int32)
  if q_positions is None:
    index = jnp.arange(num_q, dtype=jnp.int32) + (num_k - num_q)
    q_positions = offset + index
  shared = {"window": window, "softcap": softcap, "scale": scale}
  own = run(
    q,
    k,
    v,
    rules=_blocks.Rules(subtree_end, q_positions, k_positions),
    causal=causal,
    sinks=sinks,
    **shared,
  )
  out, lse = run(
    q.reshape(rows, branches * num_q, num_heads, head),
    prefix_k,
    prefix_v,
    rules=_blocks.Rules(
      prefix_end,
      q_positions.reshape(rows, branches * num_q),
      prefix_positions,
    ),
    causal=False,
    sinks=None,
    kv_grad=prefix_grad,
    **shared,
  )
  lse = lse.reshape(rows, num_heads, branches, num_q).swapaxes(1, 2)
  out, lse = merge(
    [out.reshape(*q.shape[:-1], v.shape[-1]), own[0]],
    [lse.reshape(batch, num_heads, num_q), own[1]],
  )
  return (out, lse) if return_lse else out
