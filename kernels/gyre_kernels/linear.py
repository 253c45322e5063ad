"""The product of rows with a weight, whose gradient is fast on a CPU too."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Float

from gyre_kernels import _check
from gyre_kernels._manual import vary_as

_PRODUCT = {"oi": "mi,oi->mo", "io": "mi,io->mo"}
_D_ROWS = {"oi": "mo,oi->mi", "io": "mo,io->mi"}
_D_WEIGHT = {"oi": "mi,mo->oi", "io": "mi,mo->io"}


def linear(
  x: Float[Array, "... I"], weight: Float[Array, "O I"], *, order: str = "oi"
) -> Float[Array, "... O"]:
  """Returns `x @ weight.T`, or `x @ weight` for a weight stored [in, out].

  The rows of x are multiplied as one flat matrix: XLA's CPU would transpose
  the cotangent, slowly, for a weight's gradient summed over two axes. Under
  `jax.checkpoint` the result is named "linear".

  Args:
    x: rows, of any leading shape.
    weight: of x's type; `[O, I]`, or `[I, O]` for order "io".
    order: "oi" or "io".

  Returns:
    The product, of x's type.

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
  y = _linear(order, *vary_as(args, args))
  return checkpoint_name(y, "linear").reshape(*x.shape[:-1], out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(order, x, weight):
  return jnp.einsum(_PRODUCT[order], x, weight)


def _save(order, x, weight):
  return _linear(order, x, weight), (x, weight)


def _backward(order, saved, dy):
  x, weight = saved
  dx = jnp.einsum(_D_ROWS[order], dy, weight)
  plain = functools.partial(jnp.einsum, _D_WEIGHT[order])
  if x.dtype.itemsize >= 4:
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
