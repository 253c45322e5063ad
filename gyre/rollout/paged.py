"""Attention over paged keys and values, as a hook of the forward pass.

Keys are read block by block of absolute positions with an online softmax, in
one order whatever the batch holds; a block that a row does not see leaves its
accumulators bit for bit as they were. The trip count follows the longest row
at run time, so no shape depends on the context length. gyre_kernels has
paged_decode for one query a row over pages of numbers; here chunks of queries
share the code, and pages may hold bf16 as bits.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_MASKED = -1e30
_WIDE_HEADS = 4

Pages = tuple[Array, Array]
Seen = tuple[Array, Array, Array]


def block_pages(page_size: int, tokens: int = 64) -> int:
  """Pages read in one block: about `tokens` tokens, at least one page."""
  return max(1, tokens // page_size)


def storage_dtype(dtype: jnp.dtype) -> jnp.dtype:
  """How a page is stored: bf16 as its bits.

  Older XLA CPU widens a whole bf16 operand to scatter into it; integers it
  updates in place.
  """
  return jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 else jnp.dtype(dtype)


def _store(x: Array, dtype: jnp.dtype) -> Array:
  if dtype == jnp.uint16:
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
  return x.astype(dtype)


def loaded(x: Array) -> Array:
  """What was stored, as numbers."""
  if x.dtype == jnp.uint16:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16)
  return x


def write(
  pages: Int[Array, "P page K H"] | Float[Array, "P page K H"],
  new: Float[Array, "B T K H"],
  table: Int[Array, "B W"],
  positions: Int[Array, "B T"],
) -> Array:
  """Puts new rows where the table says; position -1 goes to page 0."""
  size = pages.shape[1]
  slot = jnp.maximum(positions, 0)
  page = jnp.take_along_axis(table, slot // size, axis=1)
  page = jnp.where(positions >= 0, page, 0)
  return pages.at[page, slot % size].set(_store(new, pages.dtype))


def visible(
  positions: Int[Array, "B T"], keys: Int[Array, "S"], window: int | None
) -> Bool[Array, "B 1 T S"]:
  """Which keys, by absolute position, each query sees."""
  back = positions[:, None, :, None] - keys
  sees = back >= 0
  return sees if window is None else sees & (back <= window)


def nothing_seen(
  shape: tuple[int, ...], head: int, sinks: Float[Array, "N"] | None
) -> Seen:
  """The online softmax before its first key.

  Args:
    shape: of one number a query: [B, K, G, ...], K * G = N.
    head: size of a value.
    sinks: one logit a query head, or None.

  Returns:
    Largest score, sum of exponentials and weighted sum of values.
  """
  top = jnp.full(shape, _MASKED, jnp.float32)
  total = jnp.zeros(shape, jnp.float32)
  if sinks is not None:
    ones = (1,) * (len(shape) - 3)
    sink = sinks.astype(jnp.float32).reshape(1, *shape[1:3], *ones)
    top, total = jnp.broadcast_to(sink, shape), jnp.ones(shape, jnp.float32)
  return top, total, jnp.zeros((*shape, head), jnp.float32)


def fold(
  seen: Seen,
  scores: Float[Array, "*Q S"],
  sees: Bool[Array, "*Q S"],
  softcap: float | None,
  mix: Callable[[Array], Array],
  axis: int = -1,
) -> Seen:
  """Adds a block of keys to an online softmax.

  Args:
    seen: so far.
    scores: float32, scaled.
    sees: broadcasts to scores; a query that sees none keeps all its bits.
    softcap: as in gyre_kernels.attention.
    mix: weights [*Q, S] -> their sum of values [*Q, H], float32.
    axis: where S stands among the axes of scores, and H among those of the
      values; it may be elsewhere than last.

  Returns:
    seen, with the block.
  """
  top, total, out = seen

  def along(x):
    return jnp.expand_dims(x, axis)

  if softcap:
    scores = softcap * jnp.tanh(scores / softcap)
  new_top = jnp.maximum(top, jnp.max(jnp.where(sees, scores, _MASKED), axis))
  p = jnp.where(sees, jnp.exp(scores - along(new_top)), 0.0)
  shrink = jnp.exp(top - new_top)
  total = total * shrink + jnp.sum(p, axis)
  return new_top, total, out * along(shrink) + mix(p)


def normalised(seen: Seen) -> Array:
  """The attention's output; 0 for queries that saw nothing."""
  _, total, out = seen
  return out / jnp.where(total > 0, total, 1.0)[..., None]


def _scores(q, k):
  """[B,T,K,G,H] and [B,S,K,H] -> float32 [B,K,G,T,S]."""
  B, T, K, G, H = q.shape
  q = q.astype(k.dtype)
  if T > 1 or K > _WIDE_HEADS:
    return jnp.einsum(
      "BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32
    )
  # One query of a few heads: a product with zeros outside the head's own
  # columns takes the pages as they lie, where one a head would transpose them.
  apart = jnp.eye(K, dtype=q.dtype)[:, None, :, None]
  q = (q[:, 0, :, :, None] * apart).reshape(B, K * G, K * H)
  s = jnp.einsum(
    "BNX,BSX->BNS",
    q,
    k.reshape(B, -1, K * H),
    preferred_element_type=jnp.float32,
  )
  return s.reshape(B, K, G, 1, -1)


def _mix(p, v):
  """float32 [B,K,G,T,S] and [B,S,K,H] -> float32 [B,K,G,T,H]."""
  B, K, G, T, S = p.shape
  p = p.astype(v.dtype)
  if T > 1 or K > _WIDE_HEADS:
    return jnp.einsum(
      "BKGTS,BSKH->BKGTH", p, v, preferred_element_type=jnp.float32
    )
  out = jnp.einsum(
    "BNS,BSX->BNX",
    p.reshape(B, K * G, S),
    v.reshape(B, S, -1),
    preferred_element_type=jnp.float32,
  )
  out = out.reshape(B, K, G, K, -1)
  return jnp.einsum("BKGKH->BKGH", out)[:, :, :, None]


def attention(
  q: Float[Array, "B T N H"],
  pages: Pages,
  table: Int[Array, "B W"],
  positions: Int[Array, "B T"],
  *,
  window: int | None = None,
  softcap: float | None = None,
  sinks: Float[Array, "N"] | None = None,
  scale: float | None = None,
  block: int,
) -> Float[Array, "B T N H"]:
  """softmax(q k^T) v of each query over its row's pages, causally.

  Args:
    q: queries, rope applied.
    pages: keys and values [P, page, K, H]; those of the queries themselves
      are already written.
    table: page of each page_size tokens of a row; W a multiple of `block`.
    positions: absolute position of each query; -1 marks padding (gives 0).
    window: how many positions before its own a query sees, or None for all.
    softcap, sinks, scale: as in gyre_kernels.attention.
    block: pages read at a time.

  Returns:
    float32 [B, T, N, H].
  """
  B, T, N, H = q.shape
  size, K = pages[0].shape[1:3]
  S = block * size
  scale = H**-0.5 if scale is None else scale
  q = (q * scale).reshape(B, T, K, N // K, H)
  last = jnp.max(positions)
  stop = last // S + 1
  start = jnp.int32(0)
  if window is not None:
    first = jnp.min(jnp.where(positions >= 0, positions, last))
    start = jnp.maximum(first - window, 0) // S

  def body(j, seen):
    at = jax.lax.dynamic_slice_in_dim(table, j * block, block, 1)
    k, v = (loaded(x[at]).reshape(B, S, K, H) for x in pages)
    sees = visible(positions, j * S + jnp.arange(S), window)[:, :, None]
    return fold(seen, _scores(q, k), sees, softcap, lambda p: _mix(p, v))

  seen = nothing_seen((B, K, N // K, T), H, sinks)
  out = normalised(jax.lax.fori_loop(start, stop, body, seen))
  return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def paged_attend(
  table: Int[Array, "B W"], positions: Int[Array, "B T"], *, block: int
) -> Callable:
  """The forward pass's attention: write the new keys, then read all.

  Args:
    table: pages of each row.
    positions: absolute positions of the tokens; -1 marks padding.
    block: pages read at a time.

  Returns:
    attend(q, k, v, pages, *, window, softcap, sinks, scale) ->
    (out [B, T, N, H], pages).
  """

  def attend(q, k, v, pages, *, window, softcap, sinks, scale):
    pages = (
      write(pages[0], k, table, positions),
      write(pages[1], v, table, positions),
    )
    out = attention(
      q,
      pages,
      table,
      positions,
      window=window,
      softcap=softcap,
      sinks=sinks,
      scale=scale,
      block=block,
    )
    return out.astype(q.dtype), pages

  return attend
