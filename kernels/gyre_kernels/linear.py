"""The product of rows with a weight, whose gradient is fast on a CPU too."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Float

from gyre_kernels import _check
from gyre_kernels._manual import vary_as

# By bytes of a number: how many rows XLA's CPU multiplies faster with the
# weight on the left.
_FEW_ROWS = {2: range(12, 65), 4: range(2, 65)}
_PRODUCT = {"oi": "mi,oi->mo", "io": "mi,io->mo"}
_D_ROWS = {"oi": "mo,oi->mi", "io": "mo,io->mi"}
_D_WEIGHT = {"oi": "mi,mo->oi", "io": "mi,mo->io"}


def linear(
  x: Float[Array, "... I"],
  weight: Float[Array, "O I"],
  *,
  order: str = "oi",
  out_dtype: DTypeLike | None = None,
) -> Float[Array, "... O"]:
  """Returns `x @ weight.T`, or `x @ weight` for a weight stored [in, out].

  The rows of x are multiplied as one flat matrix: XLA's CPU would transpose
  the cotangent, slowly, for a weight's gradient summed over two axes. Under
  `jax.checkpoint` the result is named "linear".

  Args:
    x: rows, of any leading shape.
    weight: of x's type; `[O, I]`, or `[I, O]` for order "io".
    order: "oi" or "io".
    out_dtype: of the product, in which it is summed too; None: x's.

  Returns:
    The product.

  Raises:
    ValueError: for shapes or types that do not fit together.
  """
  if order not in _PRODUCT:
    raise ValueError(f"order {order!r} must be 'oi' or 'io'")
  if x.dtype != weight.dtype:
    raise ValueError(f"x is {x.dtype} but weight is {weight.dtype}")
  out = weight.shape[order.index("o")]
  shape = (out, x.shape[-1])
  _check.check_shape("weight", weight, shape if order == "oi" else shape[::-1])
  args = x.reshape(-1, x.shape[-1]), weight
  out_dtype = jnp.dtype(out_dtype or x.dtype)
  y = _linear(order, out_dtype, *vary_as(args, args))
  return checkpoint_name(y, "linear").reshape(*x.shape[:-1], out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linear(order, out_dtype, x, weight):
  def plain(x, weight):
    return jnp.einsum(
      _PRODUCT[order], x, weight, preferred_element_type=out_dtype
    )

  rows, size = x.shape[0], x.dtype.itemsize
  on_cpu = plain
  if rows == 1 and size == 2:
    on_cpu = functools.partial(_two_rows, plain)
  elif order == "oi" and rows in _FEW_ROWS.get(size, ()):
    on_cpu = functools.partial(_weight_left, out_dtype)
  return lax.platform_dependent(x, weight, cpu=on_cpu, default=plain)


def _two_rows(plain, x, weight):
  """A matrix-vector product in 16 bits, for which XLA's CPU has no product."""
  return plain(jnp.concatenate((x, x)), weight)[:1]


def _weight_left(out_dtype, x, weight):
  """The product for few rows; the other way XLA's CPU repacks the weight."""
  y = jnp.einsum(
    "oi,im->om", weight, by_rows(x.T), preferred_element_type=out_dtype
  )
  return by_rows(y).T


def _save(order, out_dtype, x, weight):
  return _linear(order, out_dtype, x, weight), (x, weight)


def _backward(order, out_dtype, saved, dy):
  x, weight = saved
  dx = jnp.einsum(_D_ROWS[order], dy, weight).astype(x.dtype)

  def plain(x, dy):
    return jnp.einsum(_D_WEIGHT[order], x, dy).astype(weight.dtype)

  if x.dtype.itemsize >= 4 or out_dtype != x.dtype:
    return dx, plain(x, dy)
  narrow = functools.partial(_narrow_gradient, order)
  return dx, lax.platform_dependent(x, dy, cpu=narrow, default=plain)


def _narrow_gradient(order, x, dy):
  """The weight's gradient in 16 bits on a CPU.

  The narrower factor is transposed, for the reason that `by_rows` names, and
  by itself: fused with what computes it that would be slow.
  """
  x, dy = lax.optimization_barrier((x, dy))
  if x.shape[1] <= dy.shape[1]:
    dw = by_rows(jnp.einsum("im,mo->io", by_rows(x.T), dy))
    return dw.T if order == "oi" else dw
  dw = by_rows(jnp.einsum("om,mi->oi", by_rows(dy.T), x))
  return dw if order == "oi" else dw.T


def by_rows(x: Array) -> Array:
  """A matrix that lies by rows in memory too, a transposed one copied.

  XLA's CPU multiplies 16 bits only where both sides lie by rows and the sum
  runs over those of the left one; it would rather relabel axes than copy, and
  then widens both sides to f32, at half the speed.
  """
  return with_layout_constraint(x, Layout(major_to_minor=(0, 1)))


_linear.defvjp(_save, _backward)
