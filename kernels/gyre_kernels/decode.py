"""One new query a sequence over keys and values kept in pages."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from gyre_kernels import _check
from gyre_kernels._blockwise import dot
from gyre_kernels._manual import vary_as

# Keys a step. It fixes the order of the sums: a row's bits depend on neither
# the other rows nor the width of the table.
_KEYS = 256


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
  implementation: str | None = None,
) -> Float[Array, "B N H"] | tuple[Array, Array]:
  """Attends the last token of each sequence to all of its tokens.

  Key s of row b is `k_pages[page_table[b, s // C], s % C]`, for s below
  `lengths[b]`; the query stands at `lengths[b] - 1`. Pages are visited in
  steps, as many as the longest row needs, and each row's result is the same
  bit for bit whatever the other rows hold.

  Args:
    q: queries; K divides N.
    k_pages: pages of keys.
    v_pages: pages of values.
    page_table: int32, the pages of each row in order; entries past the row's
      length, such as -1, are not read.
    lengths: int32, tokens of each row, the query's own included.
    window: how many tokens before the query it sees; default all. Hugging
      Face's `sliding_window` W is `window=W - 1`.
    softcap: cap of the scores.
    sinks: one logit a query head.
    scale: factor of the scores; default `H ** -0.5`.
    return_lse: whether to return the log-sum-exp `[B, N]`, f32, too.
    implementation: None or "xla".

  Returns:
    The output `[B, N, H]` in the type of q; a row of length 0 gives 0 and -inf.

  Raises:
    ValueError: for shapes that do not fit together.
    NotImplementedError: for an implementation that lacks what is asked.
  """
  _check.check_implementation(implementation, "paged_decode")
  batch, num_heads, head = q.shape
  pages, page, num_kv, _ = k_pages.shape
  names = ("k_pages", "v_pages")
  _check.check_keys(q, k_pages, v_pages, (pages, page), names)
  head_v = v_pages.shape[-1]
  _check.check_shape("page_table", page_table, (batch, page_table.shape[-1]))
  _check.check_shape("lengths", lengths, (batch,))
  groups = num_heads // num_kv
  wide = _check.wide_dtype(q.dtype)
  scale = head**-0.5 if scale is None else scale
  left, _ = _check.both_sides(window)
  each = max(1, _KEYS // page)
  steps = max(1, -(-page_table.shape[1] // each))
  page_table = jnp.pad(
    jnp.maximum(page_table, 0),
    ((0, 0), (0, steps * each - page_table.shape[1])),
  )
  q = q.reshape(batch, num_kv, groups, head)
  rows = (batch, num_kv, groups)
  top, total = jnp.full(rows, -jnp.inf, wide), jnp.zeros(rows, wide)
  if sinks is not None:
    _check.check_shape("sinks", sinks, (num_heads,))
    sink = sinks.astype(wide).reshape(num_kv, groups)
    top, total = jnp.broadcast_to(sink, rows), jnp.ones(rows, wide)
  init = (top, total, jnp.zeros((*rows, head_v), wide))
  everything = (q, k_pages, v_pages, page_table, lengths, sinks)

  def add(n, state):
    top, total, acc = state
    table = lax.dynamic_slice_in_dim(page_table, n * each, each, 1)
    k, v = (
      x[table].reshape(batch, each * page, *x.shape[2:])
      for x in (k_pages, v_pages)
    )
    back = lengths[:, None] - 1 - (n * each * page + jnp.arange(each * page))
    mask = back >= 0
    if left is not None:
      mask &= back <= left
    s = dot("BKGH,BCKH->BKGC", q, k) * scale
    if softcap is not None:
      s = softcap * jnp.tanh(s / softcap)
    s = jnp.where(mask[:, None, None, :], s, -jnp.inf)
    new = jnp.maximum(top, s.max(-1))
    safe = jnp.where(new == -jnp.inf, 0.0, new)
    p = jnp.exp(s - safe[..., None])
    shrink = jnp.exp(top - safe)
    # What lies past a row's length may be anything, even NaN: 0 * NaN is NaN.
    v = jnp.where(mask[:, :, None, None], v, 0)
    pv = dot("BKGC,BCKH->BKGH", p, v)
    return new, total * shrink + p.sum(-1), acc * shrink[..., None] + pv

  if steps == 1:
    top, total, acc = add(0, init)
  else:
    # A step in which a row sees nothing changes none of its bits.
    last = jnp.minimum(-(-lengths.max() // (each * page)), steps)
    first = 0
    if left is not None:
      first = jnp.maximum(lengths.min() - 1 - left, 0) // (each * page)
    init = vary_as(init, everything)
    top, total, acc = lax.fori_loop(first, last, add, init)
  some = total > 0
  total = jnp.where(some, total, 1.0)
  out = (acc / total[..., None]).astype(q.dtype)
  out = out.reshape(batch, num_heads, head_v)
  if not return_lse:
    return out
  lse = jnp.where(some, top + jnp.log(total), -jnp.inf)
  return out, lse.reshape(batch, num_heads)
