"""Oracles: each kernel written for reading, in f32 (f64 for f64 inputs).

Nothing here is fast or frugal: every score and every logit is materialised,
and gradients come from JAX's own differentiation. The kernels are tested
against these functions, and these against other libraries.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def _wide(x: Array) -> Array:
  """Casts to f32, leaving f64 as it is."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def visibility(
  num_queries: int,
  num_keys: int,
  *,
  subtree_end: Int[Array, "B S"] | None = None,
  q_positions: Int[Array, "B T"] | None = None,
  k_positions: Int[Array, "B S"] | None = None,
  causal: bool = True,
  window: int | tuple[int | None, int | None] | None = None,
) -> Array:
  """Returns which query sees which key, as a boolean `[B or 1, T, S]`.

  The arguments are those of `gyre_kernels.attention`.
  """
  q_index = jnp.arange(num_queries)[:, None] + num_keys - num_queries
  k_index = jnp.arange(num_keys)[None, :]
  mask = jnp.ones((1, num_queries, num_keys), bool)
  if causal:
    mask &= k_index <= q_index
  if subtree_end is not None:
    mask &= q_index < subtree_end[:, None, :]
  if window is not None:
    left, right = (window, window) if isinstance(window, int) else window
    q_pos = q_index if q_positions is None else q_positions[:, :, None]
    k_pos = k_index if k_positions is None else k_positions[:, None, :]
    if left is not None:
      mask &= q_pos - k_pos <= left
    if right is not None:
      mask &= k_pos - q_pos <= right
  return mask


def attention(
  q: Float[Array, "B T N H"],
  k: Float[Array, "B S K H"],
  v: Float[Array, "B S K H"],
  *,
  subtree_end: Int[Array, "B S"] | None = None,
  q_positions: Int[Array, "B T"] | None = None,
  k_positions: Int[Array, "B S"] | None = None,
  causal: bool = True,
  window: int | tuple[int | None, int | None] | None = None,
  softcap: float | None = None,
  sinks: Float[Array, "N"] | None = None,
  scale: float | None = None,
  return_lse: bool = False,
):
  """Attention by the definition; arguments as in `gyre_kernels.attention`."""
  num_groups = q.shape[2] // max(k.shape[2], 1)
  scale = q.shape[-1] ** -0.5 if scale is None else scale
  k, v = (jnp.repeat(_wide(x), num_groups, axis=2) for x in (k, v))
  s = scale * jnp.einsum("BTNH,BSNH->BNTS", _wide(q), k, precision="highest")
  if softcap is not None:
    s = softcap * jnp.tanh(s / softcap)
  mask = visibility(
    q.shape[1],
    k.shape[1],
    subtree_end=subtree_end,
    q_positions=q_positions,
    k_positions=k_positions,
    causal=causal,
    window=window,
  )[:, None]
  s = jnp.where(mask, s, -jnp.inf)
  top = jax.lax.stop_gradient(jnp.max(s, axis=-1, initial=-jnp.inf))
  if sinks is not None:
    sinks = _wide(sinks)[:, None]
    top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
  top = jnp.where(top == -jnp.inf, 0.0, top)
  p = jnp.exp(s - top[..., None])
  total = jnp.sum(p, axis=-1)
  if sinks is not None:
    total += jnp.exp(sinks - top)
  some = total > 0
  total = jnp.where(some, total, 1.0)
  out = jnp.einsum(
    "BNTS,BSNH->BTNH", p / total[..., None], v, precision="highest"
  )
  out = out.astype(q.dtype)
  if not return_lse:
    return out
  return out, jnp.where(some, top + jnp.log(total), -jnp.inf)


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
  window: int | tuple[int | None, int | None] | None = None,
  **kwargs,
):
  """Attention over the prefix, repeated for each branch, and the chunk."""
  branches = q.shape[0] // prefix_k.shape[0]
  batch, size, length = q.shape[0], prefix_k.shape[1], k.shape[1]
  if not prefix_grad:
    prefix_k, prefix_v = map(jax.lax.stop_gradient, (prefix_k, prefix_v))

  def every_branch(x):
    return jnp.repeat(x, branches, axis=0)

  if prefix_length is None:
    prefix_length = jnp.full((prefix_k.shape[0],), size)
  if prefix_positions is None:
    prefix_positions = jnp.broadcast_to(
      jnp.arange(size), (prefix_k.shape[0], size)
    )
  first = every_branch(prefix_length)[:, None]
  if k_positions is None:
    k_positions = first + jnp.arange(length)
  if q_positions is None:
    q_positions = first + jnp.arange(q.shape[1]) + length - q.shape[1]
  own_end = (
    jnp.full((batch, length), length) if subtree_end is None else subtree_end
  )
  prefix_end = jnp.where(jnp.arange(size) < first, size + length, 0)
  return attention(
    q,
    jnp.concatenate([every_branch(prefix_k), k], axis=1),
    jnp.concatenate([every_branch(prefix_v), v], axis=1),
    subtree_end=jnp.concatenate([prefix_end, own_end + size], axis=1),
    q_positions=q_positions,
    k_positions=jnp.concatenate(
      [every_branch(prefix_positions), k_positions], axis=1
    ),
    window=window,
    **kwargs,
  )


def merge(outs, lses):
  """Merges attention over disjoint sets of keys; see `gyre_kernels.merge`."""
  lse = jax.nn.logsumexp(jnp.stack([_wide(l) for l in lses]), axis=0)
  safe = jnp.where(lse == -jnp.inf, 0.0, lse)
  out = sum(
    _wide(o) * jnp.exp(l - safe).swapaxes(1, 2)[..., None]
    for o, l in zip(outs, lses, strict=True)
  )
  return out.astype(outs[0].dtype), lse


def paged_decode(
  q: Float[Array, "B N H"],
  k_pages: Float[Array, "P C K H"],
  v_pages: Float[Array, "P C K H"],
  page_table: Int[Array, "B M"],
  lengths: Int[Array, "B"],
  *,
  window: int | None = None,
  softcap: float | None = None,
  sinks: Float[Array, "N"] | None = None,
  scale: float | None = None,
  return_lse: bool = False,
):
  """One query a sequence over its pages, put together row by row."""
  size = page_table.shape[1] * k_pages.shape[1]
  k, v = (
    x[jnp.maximum(page_table, 0)].reshape(q.shape[0], size, *x.shape[2:])
    for x in (k_pages, v_pages)
  )
  out, lse = attention(
    q[:, None],
    k,
    v,
    subtree_end=jnp.where(jnp.arange(size) < lengths[:, None], size, 0),
    q_positions=lengths[:, None] - 1,
    k_positions=jnp.broadcast_to(jnp.arange(size), (q.shape[0], size)),
    causal=False,
    window=None if window is None else (window, None),
    softcap=softcap,
    sinks=sinks,
    scale=scale,
    return_lse=True,
  )
  return (out[:, 0], lse[..., 0]) if return_lse else out[:, 0]


def linear_logprob(
  hidden: Float[Array, "M D"],
  weight: Float[Array, "V D"],
  targets: Int[Array, "M"],
  *,
  temperature: float = 1.0,
  return_entropy: bool = False,
):
  """Log-probability of each target, from all logits `[M, V]`."""
  logits = jnp.einsum(
    "MD,VD->MV", _wide(hidden), _wide(weight), precision="highest"
  )
  logp = jax.nn.log_softmax(logits / temperature, axis=-1)
  chosen = jnp.take_along_axis(logp, targets[:, None], axis=-1)[:, 0]
  if not return_entropy:
    return chosen
  return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)
