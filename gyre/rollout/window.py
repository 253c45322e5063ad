"""Dense copies of decode rows' keys and values, and attention over them.

Reading pages row by row costs more than the products with them, so the rows
that decode together keep a copy laid out for the products: keys [B, K, H, S],
values [B, K, S, H], from the first token that not all of them share. What all
share stays in its pages and is multiplied with every row's query at once.
New tokens go to the copy and to the pages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gyre.rollout import paged

# Keys of the shared prefix multiplied at a time.
_SHARED_KEYS = 256

Window = tuple[Array, Array]


def empty(pages: paged.Pages, rows: int, size: int, dtype: jnp.dtype) -> Window:
  """A window of `rows` rows of `size` tokens for keys and values like these."""
  K, H = pages[0].shape[2:]
  return jnp.zeros((rows, K, H, size), dtype), jnp.zeros(
    (rows, K, size, H), dtype
  )


def load(
  window: Window,
  pages: paged.Pages,
  table: Int[Array, "M"],
  row: Int[Array, ""],
) -> Window:
  """Copies one row out of its pages.

  Args:
    window: of S = M * page tokens a row.
    pages: keys and values [P, page, K, H].
    table: the row's pages, from the window's first token on.
    row: which row.

  Returns:
    The window.
  """
  k, v = window
  new_k, new_v = (
    paged.loaded(x[table]).reshape(-1, *x.shape[2:]).astype(k.dtype)
    for x in pages
  )
  k = jax.lax.dynamic_update_index_in_dim(k, new_k.transpose(1, 2, 0), row, 0)
  v = jax.lax.dynamic_update_index_in_dim(v, new_v.transpose(1, 0, 2), row, 0)
  return k, v


def write(
  window: Window,
  k: Float[Array, "B K H"],
  v: Float[Array, "B K H"],
  at: Int[Array, "B"],
) -> Window:
  """Writes a token a row at its index, which must be within the window."""
  k, v = (
    new.astype(held.dtype) for new, held in zip((k, v), window, strict=True)
  )
  if len(at) == 1:
    # XLA's CPU copies all of the window for a scatter of one row.
    put = jax.lax.dynamic_update_slice
    return (
      put(window[0], k[..., None], (0, 0, 0, at[0])),
      put(window[1], v[:, :, None], (0, 0, at[0], 0)),
    )
  rows = jnp.arange(len(at))
  return (
    window[0].at[rows, :, :, at].set(k, mode="promise_in_bounds"),
    window[1].at[rows, :, at].set(v, mode="promise_in_bounds"),
  )


_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _by_head(x: Float[Array, "B K G *H"]) -> Float[Array, "K *H N"]:
  """Queries of all rows side by side, N = B * G, the last axis."""
  B, K, G, *_ = x.shape
  return jnp.moveaxis(x, 1, 0).reshape(K, B * G, *x.shape[3:]).swapaxes(1, -1)


def _by_row(x: Float[Array, "K *H N"], rows: int) -> Float[Array, "B K G *H"]:
  """The inverse of `_by_head`."""
  x = x.swapaxes(1, -1)
  return jnp.moveaxis(x.reshape(len(x), rows, -1, *x.shape[2:]), 0, 1)


def attend(
  table: Int[Array, "B W"],
  base: Int[Array, ""],
  common: Int[Array, "W"],
  positions: Int[Array, "B 1"],
) -> Callable:
  """The forward pass's attention of one token a row.

  Args:
    table: pages of each row, where its tokens are written too.
    base: tokens that all rows share, in full pages; the window's first token
      stands there.
    common: the pages of the shared tokens.
    positions: absolute position of each row's token; -1 marks padding.

  Returns:
    attend(q, k, v, (window, pages), *, window, softcap, sinks, scale)
    -> (out [B, 1, N, H], the same with the new token in both).
  """

  def attend(q, k, v, state, *, window, softcap, sinks, scale):
    copy, pages = state
    B, _, N, H = q.shape
    K, page = k.shape[2], pages[0].shape[1]
    size = -(-_SHARED_KEYS // page) * page
    shared = jnp.pad(common, (0, -len(common) % (size // page)))
    # What a row holds that is padding, or has ended, is void.
    at = jnp.maximum(positions[:, 0] - base, 0)
    keys, values = copy = write(copy, k[:, 0], v[:, 0], at)
    pages = (
      paged.write(pages[0], k, table, positions),
      paged.write(pages[1], v, table, positions),
    )
    q = (q[:, 0] * scale).reshape(B, K, N // K, H).astype(keys.dtype)

    def sees(first, count):
      return paged.visible(positions, first + jnp.arange(count), window)

    q_shared = _by_head(q)

    def add_shared(j, seen):
      count = size // page
      at = jax.lax.dynamic_slice_in_dim(shared, j * count, count)
      k, v = (paged.loaded(x[at]).reshape(size, K, H) for x in pages)
      ours = (j * size + jnp.arange(size) < base)[:, None]
      if window is not None:
        some = jnp.broadcast_to(sees(j * size, size), (B, 1, N // K, size))
        ours = ours & _by_head(some)[0]
      return paged.fold(
        seen,
        _product("SKH,KHN->KSN", k, q_shared),
        ours,
        softcap,
        lambda p: _product("SKH,KSN->KHN", v, p.astype(v.dtype)),
        axis=1,
      )

    seen = paged.nothing_seen((B, K, N // K), H, sinks)
    seen = tuple(map(_by_head, seen))
    seen = jax.lax.fori_loop(0, -(-base // size), add_shared, seen)
    seen = tuple(_by_row(x, B) for x in seen)
    seen = paged.fold(
      seen,
      _product("BKGH,BKHS->BKGS", q, keys),
      sees(base, keys.shape[-1]),
      softcap,
      lambda p: _product("BKGS,BKSH->BKGH", p.astype(values.dtype), values),
    )
    out = paged.normalised(seen).reshape(B, 1, N, H)
    return out.astype(k.dtype), (copy, pages)

  return attend
