"""Checks and normal forms of arguments that several kernels share."""

import jax.numpy as jnp
from jax import Array

Window = int | tuple[int | None, int | None] | None


def check_implementation(implementation: str | None, function: str) -> None:
  """Accepts None and "xla"; "triton" is refused by name, never replaced.

  Raises:
    NotImplementedError: for "triton".
    ValueError: for any other name.
  """
  if implementation == "triton":
    raise NotImplementedError(
      f"{function}: implementation='triton' is not supported; use 'xla' or None"
    )
  if implementation not in (None, "xla"):
    raise ValueError(
      f"implementation {implementation!r} must be None, 'xla' or 'triton'"
    )


def check_heads(num_heads: int, num_kv_heads: int) -> None:
  """Query heads must divide evenly among key heads."""
  if num_kv_heads == 0 or num_heads % num_kv_heads:
    raise ValueError(
      f"num_heads {num_heads} must be a multiple of num_kv_heads {num_kv_heads}"
    )


def check_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
  """The shape must be exactly the one that the other arguments imply."""
  if x.shape != shape:
    raise ValueError(f"{name} has shape {x.shape}, expected {shape}")


def check_keys(
  q: Array,
  k: Array,
  v: Array,
  lead: tuple[int, ...],
  names: tuple[str, str] = ("k", "v"),
) -> None:
  """Keys and values must fit the queries and each other.

  Args:
    q: queries `[..., N, H]`.
    k: keys, which must be `[*lead, K, H]` with K dividing N.
    v: values, which must be `[*lead, K, any]`.
    lead: every axis before the heads.
    names: of k and v in messages.

  Raises:
    ValueError: naming what does not fit, and what would.
  """
  num_kv = k.shape[-2]
  check_heads(q.shape[-2], num_kv)
  check_shape(names[0], k, (*lead, num_kv, q.shape[-1]))
  check_shape(names[1], v, (*lead, num_kv, v.shape[-1]))


def both_sides(window: Window) -> tuple[int | None, int | None]:
  """Returns `(left, right)`; an int bounds both sides, None neither.

  Raises:
    ValueError: for a negative bound or a tuple that is no pair.
  """
  sides = window if isinstance(window, tuple) else (window, window)
  if len(sides) != 2:
    raise ValueError(f"window {window} must be an int or (left, right)")
  for side in sides:
    if side is not None and side < 0:
      raise ValueError(f"window {window} must not be negative")
  return sides


def wide_dtype(dtype) -> jnp.dtype:
  """The type of scores, sums and log-sum-exps: f32, or f64 for f64."""
  return jnp.promote_types(dtype, jnp.float32)
