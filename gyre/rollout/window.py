"""Dense copies of decode rows' keys and values, and attention over them.

Reading pages row by row costs more than the products with them, so the rows
that decode together keep a copy laid out for the products: keys [B, K, H, S],
values [B, K, S, H], from the first token that not all of them share. What all
share stays in its pages and is multiplied with every row's query at once.
A dispatch only reads both; its own tokens lie in a short buffer, the same
index for every row, and go to the copy and the pages when it ends.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gyre.rollout import paged

# Keys of the shared prefix multiplied at a time.
_SHARED_KEYS = 256
# Equations of the scores and of the mix, over what all rows share in its pages
# and over the rows' own copies.
_SHARED = ("BKGH,SKH->BKGS", "BKGS,SKH->BKGH")
_OWN = ("BKGH,BKHS->BKGS", "BKGS,BKSH->BKGH")

Window = tuple[Array, Array]
Recent = tuple[Array, Array]


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


def no_recent(
  window: Window, steps: int
) -> tuple[Float[Array, "T B K H"], Float[Array, "T B K H"]]:
  """Room for the keys and values of a dispatch's steps."""
  B, K, _, H = window[1].shape
  room = jnp.zeros((steps, B, K, H), window[1].dtype)
  return room, room


def append(
  window: Window,
  recent: Recent,
  first: Int[Array, "B"],
  fed: Bool[Array, "B T"],
) -> Window:
  """Writes a dispatch's tokens behind what each row holds.

  Args:
    window: of the rows.
    recent: of the dispatch.
    first: each row's index of its first token.
    fed: which steps of the dispatch a row took.

  Returns:
    The window.
  """
  k, v = window
  new_k, new_v = (x.swapaxes(0, 1) for x in recent)
  at = first[:, None] + jnp.arange(fed.shape[1])
  # Out of range is dropped.
  at = jnp.where(fed, at, k.shape[-1])
  rows = jnp.arange(k.shape[0])[:, None]
  k = k.at[rows, :, :, at].set(new_k, mode="drop")
  return k, v.at[rows, :, at].set(new_v, mode="drop")


def _add_products(seen, q, keys, values, sees, softcap, equations):
  """Folds keys of one layout: equations of the scores and of the mix."""
  score, mix = equations
  s = jnp.einsum(score, q, keys, preferred_element_type=jnp.float32)

  def mixed(p):
    p = p.astype(values.dtype)
    return jnp.einsum(mix, p, values, preferred_element_type=jnp.float32)

  return paged.fold(seen, s, sees, softcap, mixed)


def _add_recent(seen, q, recent, step, window, softcap):
  """Folds the dispatch's own tokens: too few for a product to pay."""
  k, v = (x.astype(jnp.float32)[:, :, :, None] for x in recent)
  s = jnp.sum(q.astype(jnp.float32) * k, -1)
  back = step - jnp.arange(len(k))
  sees = back >= 0
  if window is not None:
    sees &= back <= window
  return paged.fold(
    seen,
    jnp.moveaxis(s, 0, -1),
    sees,
    softcap,
    lambda p: jnp.sum(jnp.moveaxis(p, -1, 0)[..., None] * v, 0),
  )


def attend(
  step: Int[Array, ""],
  base: Int[Array, ""],
  common: Int[Array, "W"],
  positions: Int[Array, "B 1"],
) -> Callable:
  """The forward pass's attention of one token a row.

  Args:
    step: of the dispatch.
    base: tokens that all rows share, in full pages; the window's first token
      stands there.
    common: the pages of the shared tokens.
    positions: absolute position of each row's token; -1 marks padding.

  Returns:
    attend(q, k, v, (recent, window, pages), *, window, softcap, sinks, scale)
    -> (out [B, 1, N, H], the same with the new token in recent).
  """

  def attend(q, k, v, state, *, window, softcap, sinks, scale):
    recent, (keys, values), pages = state
    B, _, N, H = q.shape
    K, page = k.shape[2], pages[0].shape[1]
    size = -(-_SHARED_KEYS // page) * page
    table = jnp.pad(common, (0, -len(common) % (size // page)))
    recent = tuple(
      jax.lax.dynamic_update_index_in_dim(x, new[:, 0].astype(x.dtype), step, 0)
      for x, new in zip(recent, (k, v), strict=True)
    )
    q = (q[:, 0] * scale).reshape(B, K, N // K, H).astype(keys.dtype)

    def sees(first, count, end):
      at = first + jnp.arange(count)
      return paged.visible(positions, at, window) & (at < end)

    def add_shared(j, seen):
      at = jax.lax.dynamic_slice_in_dim(table, j * (size // page), size // page)
      k, v = (paged.loaded(x[at]).reshape(size, K, H) for x in pages)
      some = sees(j * size, size, base)
      return _add_products(seen, q, k, v, some, softcap, _SHARED)

    seen = paged.nothing_seen((B, K, N // K), H, sinks)
    seen = jax.lax.fori_loop(0, -(-base // size), add_shared, seen)
    some = sees(base, keys.shape[-1], (positions - step)[:, :, None, None])
    seen = _add_products(seen, q, keys, values, some, softcap, _OWN)
    seen = _add_recent(seen, q, recent, step, window, softcap)
    out = paged.normalised(seen).reshape(B, 1, N, H)
    return out.astype(k.dtype), (recent, (keys, values), pages)

  return attend
