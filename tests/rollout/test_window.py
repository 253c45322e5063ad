"""Decode windows: where rows stand, and attention over them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gyre.rollout import engine, paged, places, schedule, window

SIZE, N, K, H = 4, 6, 2, 8


def _live(tokens, pages, new=8):
  return schedule.Live(
    request=engine.Request(ids=[0] * tokens, max_new_tokens=new),
    name="",
    ids=[0] * tokens,
    prompt=tokens,
    arrival=0,
    stops=frozenset(),
    pages=list(pages),
  )


def test_requests_stay_in_their_rows_and_new_ones_take_empty_rows():
  lives = [_live(9, range(3 * i, 3 * i + 3)) for i in range(5)]
  where = places.Places([(2, 16), (4, 16)], SIZE)
  first, fresh = where.place(lives[:4], 2)
  assert first.lives == lives[:4] and first.base == 0
  assert fresh == [0, 1, 2, 3]
  same, fresh = where.place([lives[3], lives[0], lives[1]], 2)
  assert same is first and fresh == []
  assert same.lives == [lives[0], lives[1], None, lives[3]]
  same, fresh = where.place([lives[0], lives[4], lives[2], lives[3]], 2)
  assert same is first and fresh == [1, 2]
  assert same.lives == [lives[0], lives[4], lives[2], lives[3]]
  fewer, fresh = where.place(lives[:2], 2)
  assert fewer is not first and fresh == [0, 1]
  assert fewer.lives == lives[:2]


def test_a_newcomer_that_does_not_share_the_prefix_moves_everyone():
  twins = [_live(13, [7, 8, 9, 10 + i]) for i in range(3)]
  where = places.Places([(4, 16)], SIZE)
  first, _ = where.place(twins[:2], 2)
  assert where.place(twins, 2) == (first, [2])
  assert where.place(twins[2:], 2) == (first, [])
  other, fresh = where.place([*twins[:2], _live(5, [1, 2])], 2)
  assert other.base == 0 and fresh == [0, 1, 2]


def test_a_row_that_outgrows_its_window_moves_to_a_longer_one():
  live = _live(15, range(8), new=20)
  where = places.Places([(1, 16), (1, 32)], SIZE)
  assert where.place([live], 2)[0].size == 16
  live.ids.append(0)
  longer, fresh = where.place([live], 2)
  assert longer.size == 32 and fresh == [0]
  live.ids += [0] * 17
  assert where.place([live], 2)[0] is None


def test_shared_pages_before_the_last_token_stay_out_of_the_window():
  twins = [_live(13, [7, 8, 9, 10 + i]) for i in range(3)]
  where = places.Places([(4, 16)], SIZE)
  assert where.place(twins, 4)[0].base == 12
  # A page that holds a last token is its request's own.
  where.clear()
  short = [_live(12, [7, 8, 9]), twins[0]]
  assert where.place(short, 4)[0].base == 8
  where.clear()
  assert where.place(twins[:1], 4)[0].base == 0


def _loaded(pages, table):
  copy = window.empty(pages, len(table), table.shape[1] * SIZE, jnp.float32)
  for i, row in enumerate(table):
    copy = window.load(copy, pages, row, i)
  return copy


@pytest.mark.parametrize(
  "options", [{}, {"window": 5}, {"softcap": 3.0}, {"sinks": True}]
)
@pytest.mark.parametrize("shared", [0, 12])
def test_decoding_over_a_window_equals_decoding_over_pages(options, shared):
  rng = np.random.default_rng(0)
  options = {"window": None, "softcap": None, "sinks": None} | options
  if options["sinks"]:
    options["sinks"] = jnp.asarray(rng.normal(size=N), jnp.float32)
  held, steps, B, size = np.array([13, 20, 17]), 3, 3, 16
  table = rng.permutation(24).reshape(B, 8).astype(np.int32) + 1
  table[:, : shared // SIZE] = table[0, : shared // SIZE]
  shape = (25, SIZE, K, H)
  pages = tuple(
    jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)
  )
  own = table[:, shared // SIZE :][:, : size // SIZE + 2]
  copy = _loaded(pages, own)
  state, expected = (copy, pages), pages
  call = functools.partial(dict, scale=0.3, **options)
  for i in range(steps):
    q = rng.normal(size=(B, 1, N, H)).astype(np.float32)
    k, v = rng.normal(size=(2, B, 1, K, H)).astype(np.float32)
    at = (held + i)[:, None]
    out, state = window.attend(table, shared, table[0], at)(
      q, k, v, state, **call()
    )
    by_page = paged.paged_attend(table, at, block=2)
    right, expected = by_page(q, k, v, expected, **call())
    np.testing.assert_allclose(out, right, atol=3e-6)
  # What was fed is in the window and in the pages.
  kept, written = state
  for got, want in zip(written, expected, strict=True):
    np.testing.assert_array_equal(got, want)
  again = _loaded(expected, own)
  for got, want, axis in zip(kept, again, (3, 2), strict=True):
    for b, n in enumerate(held - shared + steps):
      np.testing.assert_array_equal(
        jnp.take(got[b], jnp.arange(n), axis - 1),
        jnp.take(want[b], jnp.arange(n), axis - 1),
      )


@pytest.mark.parametrize("rows", [1, 2])
def test_an_empty_row_stays_finite_and_touches_no_other(rows):
  copy = tuple(jnp.ones(s) for s in ((rows, K, H, 8), (rows, K, 8, H)))
  pages = tuple(jnp.ones((3, SIZE, K, H)) for _ in range(2))
  q, kv = jnp.ones((rows, 1, N, H)), 2 * jnp.ones((rows, 1, K, H))
  attend = jax.jit(
    lambda at: window.attend(
      jnp.ones((rows, 4), int), 0, jnp.zeros(4, int), at
    )(
      q, kv, kv, (copy, pages), window=None, softcap=None, sinks=None, scale=1.0
    )
  )
  out, (new, written) = attend(jnp.array([[3], [-1]])[-rows:])
  assert np.isfinite(out[-1]).all()
  # A row of padding writes to page 0, which is nobody's.
  changed = np.any(np.asarray(written[0] != pages[0]), (1, 2, 3))
  assert changed.tolist() == [True, rows > 1, False]
  if rows > 1:
    assert np.all(out[0] > 1)
    assert np.all(new[1][0, :, 3] == 2) and np.sum(new[1][0] == 2) == K * H
