"""Critic loss and explained variance.

Second moments are merged pairwise (Chan, Golub, LeVeque 1979), so that the
explained variance of a batch does not depend on how it is cut: averaging the
explained variances of the parts is wrong.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


def value_loss(
  values: Float[Array, "M"],
  returns: Float[Array, "M"],
  values_old: Float[Array, "M"] | None = None,
  *,
  clip: float = 0.2,
) -> Float[Array, "M"]:
  """PPO's clipped maximum, an entry (1707.06347).

  max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2

  Args:
    values: [M], the critic now.
    returns: [M], its targets.
    values_old: [M], the critic at the start of the batch; None: no clipping.
    clip: half-width of the trust interval, in units of value.

  Returns:
    [M] losses, un-aggregated.
  """
  dtype = jnp.promote_types(jnp.result_type(values), jnp.float32)
  values, returns = values.astype(dtype), returns.astype(dtype)
  loss = jnp.square(values - returns)
  if values_old is not None:
    old = values_old.astype(dtype)
    near = old + jnp.clip(values - old, -clip, clip)
    loss = jnp.maximum(loss, jnp.square(near - returns))
  return 0.5 * loss


class Moments(NamedTuple):
  """Weighted count, mean and sum of squared deviations of a scalar."""

  count: Float[Array, ""]
  mean: Float[Array, ""]
  m2: Float[Array, ""]


def moments(x: Float[Array, "M"], weight: Float[Array, "M"]) -> Moments:
  """Moments of the entries `x` under non-negative `weight`."""
  dtype = jnp.promote_types(jnp.result_type(x), jnp.float32)
  weight = weight.astype(dtype)
  x = jnp.where(weight > 0, x.astype(dtype), 0)
  count = weight.sum()
  mean = (weight * x).sum() / jnp.where(count > 0, count, 1)
  return Moments(count, mean, (weight * jnp.square(x - mean)).sum())


def combine(a: Moments, b: Moments) -> Moments:
  """Moments of the union of two disjoint parts."""
  count = a.count + b.count
  safe = jnp.where(count > 0, count, 1)
  delta = b.mean - a.mean
  mean = a.mean + delta * b.count / safe
  m2 = a.m2 + b.m2 + jnp.square(delta) * a.count * b.count / safe
  return Moments(count, mean, m2)


def explained_variance(error: Moments, returns: Moments) -> Float[Array, ""]:
  """1 - var(returns - values) / var(returns); 0 where returns are constant.

  Args:
    error: moments of returns - values, over the whole batch.
    returns: moments of the returns, over the whole batch.
  """
  safe = jnp.where(returns.m2 > 0, returns.m2, 1)
  return jnp.where(returns.m2 > 0, 1 - error.m2 / safe, 0)
