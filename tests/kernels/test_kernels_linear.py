"""The product of rows with a weight, and its gradients."""

import gyre_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

ORDERS = pytest.mark.parametrize("order", ["oi", "io"])
SIZES = pytest.mark.parametrize("size", [(24, 40), (40, 24), (8, 8)], ids=str)


def _case(size, order, dtype, lead=(4, 6)):
  """(x, weight, cotangent) and the same numbers in f64."""
  rng = np.random.default_rng(0)
  inner, out = size
  shapes = (*lead, inner), size[::-1] if order == "oi" else size, (*lead, out)
  arrays = [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]
  return arrays, [np.asarray(a.astype(jnp.float32), float) for a in arrays]


def _wanted(x, weight, dy, order):
  """(y, dx, dweight) in f64."""
  w = weight if order == "oi" else weight.T
  x2, dy2 = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
  dw = dy2.T @ x2
  return x @ w.T, dy @ w, dw if order == "oi" else dw.T


def _got(x, weight, dy, order):
  y, pull = jax.vjp(
    lambda x, w: gyre_kernels.linear(x, w, order=order), x, weight
  )
  return y, *pull(dy)


def _assert_near(got, wanted, dtype, tolerance=2.0**-8):
  tolerance = 1e-5 if dtype == jnp.float32 else tolerance
  for a, b in zip(got, wanted, strict=True):
    assert a.dtype == dtype and a.shape == b.shape
    a = np.asarray(a.astype(jnp.float32), float)
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@ORDERS
@SIZES
@pytest.mark.parametrize("rows", [1, 2, 24, 100])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_product_and_gradients(size, order, dtype, rows):
  arrays, wide = _case(size, order, dtype, (rows,))
  got = jax.jit(_got, static_argnums=3)(*arrays, order)
  _assert_near(got, _wanted(*wide, order), dtype)


@ORDERS
@pytest.mark.parametrize("rows", [1, 8, 24, 100])
def test_a_wider_product_of_16_bits_is_not_rounded(order, rows):
  (x, weight, _), (wide_x, w, dy) = _case(
    (24, 40), order, jnp.bfloat16, (rows,)
  )
  y, pull = jax.vjp(
    lambda *a: gyre_kernels.linear(*a, order=order, out_dtype=jnp.float32),
    x,
    weight,
  )
  wanted, dx, dw = _wanted(wide_x, w, dy, order)
  _assert_near([y], [wanted], jnp.float32)
  _assert_near(pull(jnp.asarray(dy, jnp.float32)), (dx, dw), jnp.bfloat16)


@ORDERS
@SIZES
def test_gradients_over_a_mesh_in_16_bits(size, order):
  arrays, wide = _case(size, order, jnp.bfloat16)
  mesh = jax.make_mesh(
    (2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2
  )
  rows = PartitionSpec("data", None, None)
  out_axis = order.index("o")
  weight = PartitionSpec(*("tensor" if i == out_axis else None for i in (0, 1)))
  placed = [
    jax.device_put(a, NamedSharding(mesh, spec))
    for a, spec in zip(arrays, (rows, weight, rows), strict=True)
  ]
  got = jax.jit(_got, static_argnums=3)(*placed, order)
  # Partial sums of four devices, of size 16 or so, are rounded and added.
  _assert_near(got, _wanted(*wide, order), jnp.bfloat16, 2.0**-4)


@ORDERS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_gradient_of_a_replicated_weight_in_shard_map(order, dtype):
  (x, weight, dy), wide = _case((24, 40), order, dtype)
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
  P = PartitionSpec

  def part(x, weight, dy):
    return gyre_kernels.linear(x, weight, order=order) * dy

  sharded = jax.shard_map(
    part, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P("data")
  )
  grad = jax.grad(lambda *args: sharded(*args).sum(), (0, 1))
  _, *wanted = _wanted(*wide, order)
  _assert_near(jax.jit(grad)(x, weight, dy), wanted, dtype, 2.0**-4)


@ORDERS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_a_batch_of_weights(order, dtype):
  (x, weight, dy), wide = _case((24, 40), order, dtype)
  many = (jnp.stack([a, -a]) for a in (x, weight, dy))
  got = jax.jit(jax.vmap(lambda *args: _got(*args, order)))(*many)
  y, dx, dw = _wanted(*wide, order)
  wanted = [np.stack(pair) for pair in ((y, y), (dx, dx), (dw, dw))]
  _assert_near(got, wanted, dtype)


def test_a_policy_finds_the_product_by_its_name():
  x, w = jnp.ones((100, 3)), jnp.ones((5, 3))
  keep = jax.checkpoint_policies.save_only_these_names("linear")

  def products(policy):
    def f(x, w):
      return jnp.sin(gyre_kernels.linear(x, w)).sum()

    grad = jax.grad(jax.checkpoint(f, policy=policy), (0, 1))
    return str(jax.make_jaxpr(grad)(x, w)).count("dot_general[")

  assert products(keep) + 1 == products(None)


@pytest.mark.parametrize(
  "call,words",
  [
    (
      lambda: gyre_kernels.linear(jnp.ones((2, 3)), jnp.ones((5, 4))),
      r"\(5, 4\).*\(5, 3\)",
    ),
    (
      lambda: gyre_kernels.linear(
        jnp.ones((2, 3)), jnp.ones((5, 4)), order="io"
      ),
      r"\(5, 4\).*\(3, 4\)",
    ),
    (
      lambda: gyre_kernels.linear(
        jnp.ones((2, 3)), jnp.ones((5, 3), jnp.bfloat16)
      ),
      "float32.*bfloat16",
    ),
    (
      lambda: gyre_kernels.linear(
        jnp.ones((2, 3)), jnp.ones((5, 3)), order="x"
      ),
      "'x'",
    ),
  ],
)
def test_what_does_not_fit_is_refused(call, words):
  with pytest.raises(ValueError, match=words):
    call()
