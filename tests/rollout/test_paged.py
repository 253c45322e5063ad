"""Paged attention against plain softmax over a dense copy of the keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gyre.rollout import paged

SIZE, N, K, H = 4, 6, 2, 8


def _paged(rng, lengths, block):
  """Random pages, a table of scattered pages, and the dense rows."""
  B, longest = len(lengths), max(lengths)
  width = (longest // (SIZE * block) + 1) * block
  order = rng.permutation(B * width) + 1
  table = order.reshape(B, width).astype(np.int32)
  shape = (B * width + 1, SIZE, K, H)
  pages = [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)]
  dense = [p[table].reshape(B, width * SIZE, K, H) for p in pages]
  return pages, table, dense


def _dense(
  q, k, v, positions, window=None, softcap=None, sinks=None, scale=H**-0.5
):
  """Float64, one query and head at a time."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros(q.shape)
  for b, t, n in np.ndindex(q.shape[:3]):
    last = positions[b, t]
    first = 0 if window is None else max(0, last - window)
    seen = slice(first, last + 1)
    s = scale * k[b, seen, n // (N // K)] @ q[b, t, n]
    s = softcap * np.tanh(s / softcap) if softcap else s
    p = np.exp(s)
    total = p.sum() + (0 if sinks is None else np.exp(float(sinks[n])))
    out[b, t, n] = p @ v[b, seen, n // (N // K)] / total
  return out


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize(
  "options",
  [{}, {"window": 5}, {"softcap": 3.0}, {"sinks": True, "scale": 0.7}],
)
def test_equals_dense_attention(T, block, options):
  rng = np.random.default_rng(0)
  options = dict(options)
  if options.get("sinks"):
    options["sinks"] = jnp.asarray(rng.normal(size=N), jnp.float32)
  lengths = [3, 30, 11]
  pages, table, dense = _paged(rng, lengths, block)
  q = rng.normal(size=(3, T, N, H)).astype(np.float32)
  positions = np.array(lengths)[:, None] - T + np.arange(T)
  f = functools.partial(paged.attention, block=block, **options)
  out = jax.jit(f)(q, tuple(pages), table, positions)
  expected = _dense(q, *dense, positions, **options)
  np.testing.assert_allclose(out, expected, atol=3e-6)


def test_blocks_that_a_row_does_not_see_change_no_bit():
  rng = np.random.default_rng(1)
  pages, table, _ = _paged(rng, [9, 120], 2)
  q = rng.normal(size=(2, 1, N, H)).astype(np.float32)
  f = jax.jit(paged.attention, static_argnames=("window", "block"))
  for window in (None, 6):
    out = [
      f(q, tuple(pages), table, np.array([[8], [p]]), block=2, window=window)
      for p in (8, 119)
    ]
    np.testing.assert_array_equal(out[0][0], out[1][0])


def test_padding_gives_zero_and_writes_to_the_padding_page():
  rng = np.random.default_rng(2)
  pages, table, _ = _paged(rng, [9, 9], 1)
  new = rng.normal(size=(2, 1, K, H)).astype(np.float32)
  at = np.array([[5], [-1]])
  written = paged.write(pages[0], new, table, at)
  changed = np.unique(np.argwhere(np.asarray(written != pages[0]))[:, 0])
  assert changed.tolist() == [0, table[0, 1]]
  q = rng.normal(size=(2, 1, N, H)).astype(np.float32)
  out = paged.attention(q, tuple(pages), table, at, block=1)
  assert not np.asarray(out[1]).any()


def test_bf16_pages_hold_the_rounded_values():
  x = np.random.default_rng(3).normal(size=(1, 2, K, H)).astype(np.float32)
  pages = jnp.zeros((3, SIZE, K, H), paged.storage_dtype(jnp.bfloat16))
  table = np.array([[2]], np.int32)
  pages = paged.write(pages, x, table, np.array([[0, 1]]))
  held = jax.lax.bitcast_convert_type(pages[2, :2], jnp.bfloat16)
  np.testing.assert_array_equal(held, x[0].astype(jnp.bfloat16))
