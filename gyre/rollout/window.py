"""Dense copies of decode rows' keys and values, and attention over them.

Reading pages row by row costs more than the products with them, so the rows
that decode together keep a copy laid out for the products: keys [B, K, H, S],
values [B, K, S, H], from the first token that not all of them share. What all
share stays in its pages and is multiplied with every row's query at once.
New tokens go to the copy and to the pages.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gyre.rollout import paged

# Keys of the shared prefix multiplied at a time.
_SHARED_KEYS = 256
# Equations of the scores and of the mix, over what all rows share in its pages
# and over the rows' own copies.
_SHARED = ("BKGH,SKH->BKGS", "BKGS,SKH->BKGH")
_OWN = ("BKGH,BKHS->BKGS", "BKGS,BKSH->BKGH")

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


def _add_products(seen, q, keys, values, sees, softcap, equations):
  """Folds keys of one layout: equations of the scores and of the mix."""
  score, mix = equations
  s = jnp.einsum(score, q, keys, preferred_element_type=jnp.float32)

  def mixed(p):
    p = p.astype(values.dtype)
    return jnp.einsum(mix, p, values, preferred_element_type=jnp.float32)

  return paged.fold(seen, s, sees, softcap, mixed)


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

    def sees(first, count, end):
      at = first + jnp.arange(count)
      return paged.visible(positions, at, window) & (at < end)

    def add_shared(j, seen):
      count = size // page
      at = jax.lax.dynamic_slice_in_dim(shared, j * count, count)
      k, v = (paged.loaded(x[at]).reshape(size, K, H) for x in pages)
      some = sees(j * size, size, base)
      return _add_products(seen, q, k, v, some, softcap, _SHARED)

    seen = paged.nothing_seen((B, K, N // K), H, sinks)
    seen = jax.lax.fori_loop(0, -(-base // size), add_shared, seen)
    some = sees(base, keys.shape[-1], positions[:, :, None, None] + 1)
    seen = _add_products(seen, q, keys, values, some, softcap, _OWN)
    out = paged.normalised(seen).reshape(B, 1, N, H)
    return out.astype(k.dtype), (copy, pages)

  return attend
