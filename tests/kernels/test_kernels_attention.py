"""Attention against its oracle and against other libraries."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gyre_kernels import attention, merge, reference
from jax.sharding import AxisType
from jax.test_util import check_grads

# The package exports a function of the module's name.
module = importlib.import_module("gyre_kernels.attention")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
  """Blocks small enough that small shapes have several, and tails."""
  for name in ("_PLAIN", "_TREE"):
    monkeypatch.setattr(module, name, (8, 16, 2**19))
  monkeypatch.setattr(module, "_MIN_BLOCK", 8)


def _qkv(seed, b, t, s, n, k, h, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(seed), 3)
  shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, h))
  return tuple(
    jax.random.normal(key, shape, dtype)
    for key, shape in zip(keys, shapes, strict=True)
  )


def random_tree(seed, size, branch=0.25):
  """Depth-first parents, subtree ends and depths of a random forest."""
  rng = np.random.default_rng(seed)
  parent, stack = [], []
  for index in range(size):
    while stack and rng.random() < branch:
      stack.pop()
    parent.append(stack[-1] if stack else -1)
    stack.append(index)
  end = np.arange(size) + 1
  depth = np.zeros(size, np.int32)
  for index in reversed(range(size)):
    if parent[index] >= 0:
      end[parent[index]] = max(end[parent[index]], end[index])
  for index in range(size):
    if parent[index] >= 0:
      depth[index] = depth[parent[index]] + 1
  return np.array(parent), end.astype(np.int32), depth


def _results(fn, args, sinks, kwargs):
  """Values and gradients of a loss that reads the output and the lse."""

  def loss(q, k, v, sinks):
    out, lse = fn(q, k, v, sinks=sinks, return_lse=True, **kwargs)
    weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
    seen = jnp.where(lse > -jnp.inf, jnp.sin(lse), 0.0)
    return (out * weights).sum() + seen.sum(), (out, lse)

  argnums = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
  return jax.jit(jax.grad(loss, argnums, has_aux=True))(*args, sinks)


def _assert_equal(got, wanted, tolerance=2e-5):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


CASES = {
  "causal": {},
  "bidirectional": {"causal": False},
  "window and sinks": {"window": 5},
  "two-sided window": {"causal": False, "window": (3, 7)},
  "one-sided window": {"causal": False, "window": (None, 2)},
  "softcap, scale and sinks": {"softcap": 1.5, "scale": 0.7},
}


@pytest.mark.parametrize("name", CASES)
def test_matches_oracle_with_gradients(name):
  args = _qkv(0, 2, 37, 37, 6, 2, 16)
  sinks = None
  if "sinks" in name:
    sinks = jax.random.normal(jax.random.key(9), (6,))
  _assert_equal(
    _results(attention, args, sinks, CASES[name]),
    _results(reference.attention, args, sinks, CASES[name]),
  )


@pytest.mark.parametrize(
  "shape",
  [
    (1, 5, 43, 4, 1, 80),
    (2, 43, 5, 4, 4, 96),
    (1, 33, 65, 9, 3, 64),
    (1, 17, 17, 2, 1, 256),
  ],
  ids=str,
)
def test_tails_head_sizes_and_ratios(shape):
  args = _qkv(1, *shape)
  kwargs = {"window": (20, 3)}
  _assert_equal(
    _results(attention, args, None, kwargs),
    _results(reference.attention, args, None, kwargs),
  )


@pytest.mark.parametrize("causal", [True, False])
def test_matches_torch(causal):
  torch = pytest.importorskip("torch")
  args = _qkv(2, 2, 50, 50, 9, 3, 64)
  theirs = [
    torch.tensor(np.asarray(x).swapaxes(1, 2), requires_grad=True) for x in args
  ]
  out = torch.nn.functional.scaled_dot_product_attention(
    *theirs, is_causal=causal, enable_gqa=True
  )
  ours, pull = jax.vjp(lambda *a: attention(*a, causal=causal), *args)
  np.testing.assert_allclose(
    ours, out.detach().numpy().swapaxes(1, 2), atol=2e-5
  )
  out.sin().sum().backward()
  for mine, their in zip(pull(jnp.cos(ours)), theirs, strict=True):
    np.testing.assert_allclose(
      mine, their.grad.numpy().swapaxes(1, 2), atol=5e-5
    )


def test_oracle_matches_jax():
  q, k, v = _qkv(3, 2, 24, 24, 6, 2, 16)
  np.testing.assert_allclose(
    reference.attention(q, k, v, window=(4, 0)),
    jax.nn.dot_product_attention(
      q, k, v, is_causal=True, local_window_size=(4, 0)
    ),
    atol=1e-5,
  )


def test_gradients_match_finite_differences_in_f64():
  with jax.enable_x64(True):
    args = _qkv(4, 1, 11, 19, 2, 1, 4, jnp.float64)
    sinks = jnp.array([0.3, -0.2])
    end = jnp.asarray(random_tree(4, 19)[1])[None]

    def f(q, k, v, sinks):
      out, lse = attention(
        q, k, v, sinks=sinks, subtree_end=end, softcap=2.0, return_lse=True
      )
      assert out.dtype == lse.dtype == jnp.float64
      return out, jnp.tanh(lse)

    check_grads(f, (*args, sinks), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_tree_equals_each_branch_alone(window):
  seed, size = 0, 35
  parent, end, depth = random_tree(seed, size)
  q, k, v = _qkv(seed, 1, size, size, 4, 2, 8)
  paths = np.zeros((size, size), np.int32)
  lengths = depth + 1
  for index in range(size):
    node = index
    for place in reversed(range(lengths[index])):
      paths[index, place], node = node, parent[node]

  def tree(q, k, v):
    out = attention(
      q,
      k,
      v,
      subtree_end=jnp.asarray(end)[None],
      q_positions=jnp.asarray(depth)[None],
      k_positions=jnp.asarray(depth)[None],
      window=window,
    )[0]
    return jnp.sin(out).sum(), out

  def branches(q, k, v):
    """A plain causal softmax over each node's own path, padded."""
    k, v = (jnp.repeat(x[0][paths], 2, axis=2) for x in (k, v))
    s = jnp.einsum("INH,IPNH->INP", q[0], k) / np.sqrt(8)
    place = np.arange(size)
    seen = place < lengths[:, None]
    if window is not None:
      seen &= place >= lengths[:, None] - 1 - window
    p = jax.nn.softmax(jnp.where(seen[:, None], s, -1e30))
    out = jnp.einsum("INP,IPNH->INH", p, v)
    return jnp.sin(out).sum(), out

  _assert_equal(
    jax.grad(tree, (0, 1, 2), has_aux=True)(q, k, v),
    jax.grad(branches, (0, 1, 2), has_aux=True)(q, k, v),
  )


def test_packed_equals_separate_and_padding_is_zero():
  lengths = [13, 1, 22]
  size = 48
  end = np.zeros(size, np.int32)
  starts = np.cumsum([0, *lengths])
  for start, length in zip(starts, lengths, strict=False):
    end[start : start + length] = start + length
  q, k, v = _qkv(5, 1, size, size, 4, 2, 8)

  def f(q, k, v):
    return attention(
      q, k, v, subtree_end=jnp.asarray(end)[None], return_lse=True
    )

  (out, lse), pull = jax.vjp(f, q, k, v)
  grads = pull((jnp.cos(out), jnp.zeros_like(lse)))
  for start, length in zip(starts, lengths, strict=False):
    part = slice(start, start + length)
    alone, pull = jax.vjp(
      reference.attention, q[:, part], k[:, part], v[:, part]
    )
    np.testing.assert_allclose(out[:, part], alone, atol=1e-5)
    for whole, own in zip(grads, pull(jnp.cos(alone)), strict=True):
      np.testing.assert_allclose(whole[:, part], own, atol=2e-5)
  rest = slice(sum(lengths), size)
  assert not np.any(out[:, rest])
  assert np.all(lse[..., rest] == -np.inf)
  assert not any(np.any(g[:, rest]) for g in grads)


def test_hidden_keys_change_no_bit():
  size = 40
  end = jnp.asarray(random_tree(11, size, 0.4)[1])[None]
  q, k, v = _qkv(6, 1, size, size, 2, 1, 8)
  mask = np.asarray(reference.visibility(size, size, subtree_end=end)[0])
  f = jax.jit(lambda k, v: attention(q, k, v, subtree_end=end))
  before = np.asarray(f(k, v))
  for key in (0, 7, 20):
    after = f(k.at[:, key].mul(-3.0), v.at[:, key].set(1e30))
    changed = np.any(before != after, axis=(0, 2, 3))
    np.testing.assert_array_equal(changed, mask[:, key])


def test_no_keys_gives_zero_and_minus_infinity():
  q, k, v = _qkv(7, 2, 9, 0, 4, 2, 8)
  (out, lse), pull = jax.vjp(lambda *a: attention(*a, return_lse=True), q, k, v)
  assert out.shape == q.shape and not np.any(out)
  assert np.all(lse == -np.inf)
  dq, dk, dv = pull((jnp.ones_like(out), jnp.ones_like(lse)))
  assert not np.any(dq) and dk.shape == k.shape and dv.shape == v.shape


def test_queries_before_all_keys_are_empty():
  q, k, v = _qkv(8, 1, 12, 5, 2, 2, 8)
  out, lse = attention(q, k, v, return_lse=True)
  assert not np.any(out[:, :7]) and np.all(lse[..., :7] == -np.inf)
  assert np.all(np.isfinite(lse[..., 7:]))


@pytest.mark.parametrize("kwargs", [{}, {"softcap": 3.0, "window": 9}])
def test_bf16_is_as_exact_as_the_type_allows(kwargs):
  args = _qkv(9, 2, 40, 40, 6, 2, 64)
  small = tuple(x.astype(jnp.bfloat16) for x in args)
  exact = tuple(x.astype(jnp.float32) for x in small)

  def with_grads(fn, args):
    out, pull = jax.vjp(lambda *a: fn(*a, **kwargs), *args)
    weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
    return out, *pull(weights.astype(out.dtype))

  def plain_bf16(q, k, v, softcap=None, window=None):
    # The definition, the operands and results of its products in bf16.
    k, v = (jnp.repeat(x, 3, axis=2) for x in (k, v))
    s = jnp.einsum("BTNH,BSNH->BNTS", q, k).astype(jnp.float32) / 8
    if softcap:
      s = softcap * jnp.tanh(s / softcap)
    mask = reference.visibility(40, 40, window=window)
    p = jax.nn.softmax(jnp.where(mask, s, -jnp.inf)).astype(q.dtype)
    return jnp.einsum("BNTS,BSNH->BTNH", p, v)

  ours = with_grads(attention, small)
  naive = with_grads(plain_bf16, small)
  truth = with_grads(reference.attention, exact)
  for mine, plain, true in zip(ours, naive, truth, strict=True):
    assert mine.dtype == jnp.bfloat16
    error = np.abs(np.asarray(mine, np.float32) - true).max()
    bound = np.abs(np.asarray(plain, np.float32) - true).max()
    assert error <= 2 * bound + np.abs(true).max() * 2**-8


@pytest.mark.parametrize("blocks", [(1, 7), (64, 64)])
def test_block_sizes_do_not_matter(blocks, monkeypatch):
  args = _qkv(10, 2, 30, 41, 4, 2, 8)
  end = jnp.asarray(np.stack([random_tree(s, 41)[1] for s in (1, 2)]))
  kwargs = {"subtree_end": end, "window": (9, None)}
  wanted = _results(reference.attention, args, None, kwargs)
  for name in ("_PLAIN", "_TREE"):
    monkeypatch.setattr(module, name, (*blocks, 2**19))
  _assert_equal(_results(attention, args, None, kwargs), wanted)


def test_vmap_and_scan():
  q, k, v = _qkv(12, 3, 20, 20, 4, 2, 8)
  end = jnp.asarray(np.stack([random_tree(s, 20)[1] for s in range(3)]))
  wanted = reference.attention(q, k, v, subtree_end=end)

  def one(q, k, v, end):
    return attention(q[None], k[None], v[None], subtree_end=end[None])[0]

  np.testing.assert_allclose(jax.vmap(one)(q, k, v, end), wanted, atol=1e-5)
  _, out = jax.lax.scan(lambda c, x: (c, one(*x)), 0, (q, k, v, end))
  np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_remat_with_saved_names_does_not_attend_again():
  args = _qkv(12, 1, 20, 20, 4, 2, 8)
  names = jax.checkpoint_policies.save_only_these_names(
    "attention_out", "attention_lse"
  )

  def grads(fn):
    def loss(q, k, v):
      return jnp.sin(fn(q, k, v)).sum()

    return jax.grad(loss, (0, 1, 2))

  def loops(fn):
    return str(jax.make_jaxpr(grads(fn))(*args)).count("scan[")

  saved = jax.checkpoint(attention, policy=names)
  again = jax.checkpoint(attention)
  wanted = grads(reference.attention)(*args)
  _assert_equal(grads(saved)(*args), wanted)
  _assert_equal(grads(again)(*args), wanted)
  assert loops(saved) == loops(attention) < loops(again)


def test_shard_map_over_rows_and_heads():
  mesh = jax.make_mesh(
    (2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2
  )
  q, k, v = _qkv(13, 4, 20, 20, 4, 2, 8)
  end = jnp.asarray(np.stack([random_tree(s, 20)[1] for s in range(4)]))
  P = jax.sharding.PartitionSpec
  heads = P("data", None, "tensor")

  def loss(q, k, v):
    f = jax.shard_map(
      lambda q, k, v, e: attention(q, k, v, subtree_end=e),
      mesh=mesh,
      in_specs=(heads, heads, heads, P("data")),
      out_specs=heads,
    )
    return jnp.sin(f(q, k, v, end)).sum()

  def plain(q, k, v):
    return jnp.sin(reference.attention(q, k, v, subtree_end=end)).sum()

  _assert_equal(
    jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v),
    jax.value_and_grad(plain, (0, 1, 2))(q, k, v),
    5e-5,
  )


def test_shard_map_sums_the_cotangents_of_replicated_keys():
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
  q, k, v = _qkv(14, 4, 20, 20, 2, 1, 8)
  k, v = k[:1], v[:1]
  P = jax.sharding.PartitionSpec

  def loss(q, k, v):
    f = jax.shard_map(
      attention,
      mesh=mesh,
      in_specs=(P("data"), P(), P()),
      out_specs=P("data"),
    )
    return jnp.sin(f(q, k, v)).sum()

  def plain(q, k, v):
    k, v = (jnp.repeat(x, 4, axis=0) for x in (k, v))
    return jnp.sin(reference.attention(q, k, v)).sum()

  _assert_equal(
    jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v),
    jax.grad(plain, (0, 1, 2))(q, k, v),
  )


def test_split_keys_merge_to_the_whole_with_gradients():
  q, k, v = _qkv(15, 1, 10, 40, 4, 2, 8)

  def split(q, k, v):
    parts = [
      attention(q, k[:, a:b], v[:, a:b], causal=False, return_lse=True)
      for a, b in ((0, 3), (3, 3), (3, 40))
    ]
    return merge(*zip(*parts, strict=True))

  def whole(q, k, v):
    return reference.attention(q, k, v, causal=False, return_lse=True)

  def grads(fn):
    (out, lse), pull = jax.vjp(fn, q, k, v)
    return out, lse, pull((jnp.cos(out), jnp.sin(lse)))

  _assert_equal(grads(split), grads(whole))


def test_memory_is_linear_in_length(monkeypatch):
  for name in ("_PLAIN", "_TREE"):
    monkeypatch.setattr(module, name, (128, 128, 2**19))

  def temporary(length):
    args = _qkv(0, 1, length, length, 2, 1, 16)
    grad = jax.grad(lambda *a: attention(*a).sum(), (0, 1, 2))
    compiled = jax.jit(grad).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  short, long = temporary(4096), temporary(8192)
  assert long < 2.1 * short
  assert long < 8192 * 8192 / 2  # less than half a byte a pair


@pytest.mark.parametrize(
  "error,kwargs,words",
  [
    (NotImplementedError, {"implementation": "triton"}, "triton"),
    (ValueError, {"implementation": "cuda"}, "cuda"),
    (ValueError, {"window": -1}, "-1"),
    (ValueError, {"sinks": jnp.zeros(3)}, r"\(3,\).*\(4,\)"),
  ],
)
def test_bad_arguments_are_named(error, kwargs, words):
  with pytest.raises(error, match=words):
    attention(*_qkv(0, 1, 4, 4, 4, 2, 8), **kwargs)


def test_heads_must_divide():
  q, k, v = _qkv(0, 1, 4, 4, 5, 2, 8)
  with pytest.raises(ValueError, match=r"num_heads 5.*num_kv_heads 2"):
    attention(q, k, v)
