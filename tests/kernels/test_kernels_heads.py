"""Prefix attention, merging, paged decode and the linear head."""

import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gyre_kernels import (
  linear_logprob,
  merge,
  paged_decode,
  prefix_attention,
  reference,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

decode = importlib.import_module("gyre_kernels.decode")
head = importlib.import_module("gyre_kernels.logprob")


def _normal(seed, *shape, dtype=jnp.float32):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


def _assert_equal(got, wanted, tolerance=3e-5):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
  "kwargs",
  [
    {},
    {"prefix_length": jnp.array([5, 0]), "window": 6},
    {"prefix_length": jnp.array([2, 7]), "sinks": jnp.arange(4.0)},
    {"prefix_grad": False},
  ],
  ids=["whole", "length-window", "length-sinks", "detached"],
)
def test_prefix_equals_one_sequence_for_each_branch(kwargs):
  q, own = _normal(0, 6, 9, 4, 8), _normal(1, 2, 6, 9, 2, 8)
  prefix = _normal(2, 2, 2, 7, 2, 8)

  def results(fn):
    def loss(q, own, prefix):
      out, lse = fn(q, *own, *prefix, return_lse=True, **kwargs)
      return jnp.sin(out).sum() + jnp.cos(lse).sum(), (out, lse)

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, own, prefix)

  got = results(prefix_attention)
  _assert_equal(got, results(reference.prefix_attention))
  detached = not kwargs.get("prefix_grad", True)
  assert np.any(got[0][2]) != detached


def test_batch_must_be_a_multiple_of_the_prefix():
  q, k, prefix = (_normal(0, b, 2, 1, 8) for b in (3, 3, 2))
  with pytest.raises(ValueError, match=r"batch 3.*batch 2"):
    prefix_attention(q, k, k, prefix, prefix)


@settings(max_examples=8, deadline=None)
@given(
  cuts=st.lists(st.integers(0, 6), min_size=1, max_size=3),
  seed=st.integers(0, 99),
)
def test_merged_parts_equal_the_whole(cuts, seed):
  q, k, v = (_normal(seed + i, 1, 6, 2, 8) for i in range(3))
  edges = [0, *sorted(cuts), 6]
  parts = [
    reference.attention(q, k[:, a:b], v[:, a:b], causal=False, return_lse=True)
    for a, b in itertools.pairwise(edges)
  ]
  whole = reference.attention(q, k, v, causal=False, return_lse=True)
  _assert_equal(merge(*zip(*parts, strict=True)), whole)


def test_merging_two_empty_parts_is_empty_and_has_no_gradient():
  out, lse = jnp.zeros((1, 3, 2, 4)), jnp.full((1, 2, 3), -jnp.inf)
  (merged, whole), pull = jax.vjp(lambda o, l: merge([o, o], [l, l]), out, lse)
  assert not np.any(merged) and np.all(whole == -np.inf)
  grads = pull((jnp.ones_like(merged), jnp.ones_like(whole)))
  assert not any(np.any(g) for g in grads)


def _pages(seed, rows, tokens, page, pages):
  """Random pages, a table without a page used twice, and lengths."""
  rng = np.random.default_rng(seed)
  width = -(-tokens // page)
  table = rng.permutation(pages)[: rows * width].reshape(rows, width)
  lengths = rng.integers(1, tokens + 1, rows)
  k, v = _normal(seed, 2, pages, page, 2, 16)
  return k, v, jnp.asarray(table), jnp.asarray(lengths)


@pytest.mark.parametrize(
  "kwargs",
  [{}, {"window": 9, "sinks": jnp.arange(6.0)}, {"softcap": 2.0, "window": 0}],
  ids=["plain", "window-sinks", "softcap-self"],
)
@pytest.mark.parametrize("keys", [8, 256])
def test_paged_decode_matches_oracle(kwargs, keys, monkeypatch):
  monkeypatch.setattr(decode, "_KEYS", keys)
  k, v, table, lengths = _pages(0, 5, 37, 4, 60)
  q = _normal(1, 5, 6, 16)
  lengths = lengths.at[2].set(0)
  table = jnp.where(jnp.arange(10) * 4 < lengths[:, None], table, -1)
  args = (q, k, v, table, lengths)
  _assert_equal(
    jax.jit(lambda *a: paged_decode(*a, return_lse=True, **kwargs))(*args),
    reference.paged_decode(*args, return_lse=True, **kwargs),
  )


def test_rows_of_decode_do_not_touch_each_other(monkeypatch):
  """Bits depend on neither the other rows, nor pages unread, nor the width."""
  monkeypatch.setattr(decode, "_KEYS", 16)
  k, v, table, lengths = _pages(3, 8, 64, 4, 160)
  q = _normal(4, 8, 6, 16)
  lengths = lengths.at[0].set(23)
  f = jax.jit(paged_decode)
  alone = f(q, k, v, table, lengths)[0]
  used = np.asarray(table[0, :6])
  other = np.setdiff1d(np.arange(160), used)
  k, v = (x.at[other].set(jnp.nan) for x in (k, v))
  lengths = lengths.at[1:].set(64)
  np.testing.assert_array_equal(f(q, k, v, table, lengths)[0], alone)
  order = np.array([5, 0, 3, 1, 2, 4, 6, 7])
  wide = jnp.pad(table, ((0, 0), (0, 32)), constant_values=-1)
  moved = f(q[order], k, v, wide[order], lengths[order])
  np.testing.assert_array_equal(moved[1], alone)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("keep", [0, 2**20], ids=["recomputed", "kept"])
@pytest.mark.parametrize("blocks", [(7, 11), (64, 64)], ids=str)
def test_linear_logprob_matches_oracle(blocks, keep, entropy, monkeypatch):
  monkeypatch.setattr(head, "_KEEP", keep)
  monkeypatch.setattr(head, "_TOKENS", blocks[0])
  monkeypatch.setattr(head, "_VOCAB", blocks[1])
  hidden, weight = _normal(0, 23, 12), _normal(1, 53, 12)
  targets = jax.random.randint(jax.random.key(2), (23,), 0, 53)

  def results(fn):
    def loss(hidden, weight):
      out = fn(hidden, weight, targets, temperature=0.7, return_entropy=entropy)
      return sum(jnp.sin(x).sum() for x in jax.tree.leaves(out)), out

    grad = jax.grad(loss, (0, 1), has_aux=True)
    return jax.jit(grad)(hidden, weight)

  _assert_equal(results(linear_logprob), results(reference.linear_logprob))


def test_linear_logprob_matches_torch():
  torch = pytest.importorskip("torch")
  hidden, weight = _normal(0, 9, 12), _normal(1, 53, 12)
  targets = np.arange(9) * 5
  x, w = (
    torch.tensor(np.asarray(a), requires_grad=True) for a in (hidden, weight)
  )
  loss = torch.nn.functional.cross_entropy(
    x @ w.T / 1.3, torch.tensor(targets), reduction="sum"
  )
  loss.backward()
  mine, grads = jax.value_and_grad(
    lambda x, w: (
      -linear_logprob(x, w, jnp.asarray(targets), temperature=1.3).sum()
    ),
    (0, 1),
  )(hidden, weight)
  np.testing.assert_allclose(mine, loss.item(), rtol=1e-5)
  _assert_equal(grads, (x.grad.numpy(), w.grad.numpy()))


@pytest.mark.parametrize("keep", [0, 2**20], ids=["recomputed", "kept"])
def test_linear_logprob_in_bf16_sums_in_f32(keep, monkeypatch):
  monkeypatch.setattr(head, "_KEEP", keep)
  hidden = _normal(0, 16, 256, dtype=jnp.bfloat16)
  weight = _normal(1, 300, 256) / 16
  targets = jnp.arange(16)

  def f(fn, hidden, weight):
    return jax.value_and_grad(lambda *a: fn(*a, targets).sum(), (0, 1))(
      hidden, weight
    )

  rounded = weight.astype(jnp.bfloat16)
  _, (dx, dw) = f(linear_logprob, hidden, weight)
  wide = (hidden.astype(jnp.float32), rounded.astype(jnp.float32))
  _, (rx, rw) = f(reference.linear_logprob, *wide)
  assert dx.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
  got = linear_logprob(hidden, weight, targets)
  np.testing.assert_allclose(
    got, reference.linear_logprob(*wide, targets), atol=1e-4
  )
  np.testing.assert_allclose(dx.astype(jnp.float32), rx, atol=2e-2)
  np.testing.assert_allclose(dw, rw, atol=2e-2)


def test_linear_logprob_holds_no_more_logits_than_it_may_keep():
  def temporary(tokens):
    args = (_normal(0, tokens, 8), _normal(1, 16384, 8))
    targets = jnp.zeros(tokens, jnp.int32)
    grad = jax.grad(lambda *a: linear_logprob(*a, targets).sum(), (0, 1))
    compiled = jax.jit(grad).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  logits = 8192 * 16384 * 4
  assert logits // 4 < temporary(2048) < logits
  short, long = temporary(8193), temporary(16384)
  assert long < 1.2 * short
  assert long < logits / 4


@pytest.mark.parametrize("keep", [0, 2**20], ids=["recomputed", "kept"])
def test_head_in_shard_map(keep, monkeypatch):
  monkeypatch.setattr(head, "_KEEP", keep)
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
  P = jax.sharding.PartitionSpec
  hidden, weight = _normal(0, 24, 12), _normal(1, 53, 12)
  targets = jnp.arange(24)

  def sharded(hidden, weight):
    f = jax.shard_map(
      linear_logprob,
      mesh=mesh,
      in_specs=(P("data"), P(), P("data")),
      out_specs=P("data"),
    )
    return jnp.sin(f(hidden, weight, targets)).sum()

  def plain(hidden, weight):
    return jnp.sin(reference.linear_logprob(hidden, weight, targets)).sum()

  _assert_equal(
    jax.jit(jax.grad(sharded, (0, 1)))(hidden, weight),
    jax.grad(plain, (0, 1))(hidden, weight),
  )


@pytest.mark.parametrize(
  "call,words",
  [
    (
      lambda: linear_logprob(jnp.ones((2, 3)), jnp.ones((5, 4)), jnp.ones(2)),
      r"\(5, 4\).*\(5, 3\)",
    ),
    (
      lambda: linear_logprob(
        jnp.ones((2, 3)), jnp.ones((5, 3)), jnp.ones(2, int), temperature=0.0
      ),
      "temperature 0.0",
    ),
    (lambda: merge([], []), "0 outs and 0 lses"),
    (
      lambda: prefix_attention(
        *(jnp.ones((1, 2, n, 8)) for n in (4, 2, 2, 1, 1))
      ),
      r"prefix_k.*\(1, 2, 1, 8\).*\(1, 2, 2, 8\)",
    ),
    (
      lambda: prefix_attention(
        *(jnp.ones((1, 2, 2, n)) for n in (8, 8, 8, 8, 4))
      ),
      r"prefix_v.*\(1, 2, 2, 4\).*\(1, 2, 2, 8\)",
    ),
    (
      lambda: paged_decode(
        jnp.ones((1, 4, 8)),
        *(jnp.ones((3, 2, n, 8)) for n in (2, 1)),
        jnp.ones((1, 2), int),
        jnp.ones(1, int),
      ),
      r"v_pages.*\(3, 2, 1, 8\).*\(3, 2, 2, 8\)",
    ),
  ],
)
def test_bad_arguments_are_named(call, words):
  with pytest.raises(ValueError, match=words):
    call()
