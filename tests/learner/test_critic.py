"""Critic loss and explained variance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gyre.learner import critic


def test_value_loss_is_the_clipped_maximum():
  # V, R, V_old -> by hand: max((V-R)^2, (clip-R)^2) / 2, clip 0.2
  values = jnp.array([1.0, 1.0, 0.5, -1.0])
  returns = jnp.array([1.0, 0.0, 0.6, -2.0])
  old = jnp.array([0.0, 0.9, 0.5, 0.0])
  got = critic.value_loss(values, returns, old, clip=0.2)
  want = [0.5 * 0.8**2, 0.5, 0.5 * 0.1**2, 0.5 * 1.8**2]
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_value_loss_gradient_stops_outside_the_clip():
  grad = jax.grad(
    lambda v: critic.value_loss(v, jnp.array([1.0]), jnp.array([0.0])).sum()
  )
  # At 0.9 the clipped branch (0.2 - 1)^2 is larger: no gradient.
  assert grad(jnp.array([0.9]))[0] == 0
  np.testing.assert_allclose(grad(jnp.array([-0.9])), [-1.9], rtol=1e-6)


def test_value_loss_without_old_values_is_half_the_square():
  got = critic.value_loss(jnp.array([3.0]), jnp.array([1.0]))
  np.testing.assert_allclose(got, [2.0])


@pytest.mark.parametrize("cuts", [[], [7], [1, 2, 3], [10, 40]])
def test_explained_variance_is_global(x64, cuts):
  rng = np.random.default_rng(2)
  # Parts with different means: averaging explained variances is far off.
  returns = rng.normal(size=50) + np.repeat([0, 30], 25)
  values = returns + rng.normal(size=50)
  parts = list(
    zip(np.split(returns, cuts), np.split(values, cuts), strict=True)
  )
  ones = lambda x: jnp.ones(len(x))  # noqa: E731
  error = [critic.moments(jnp.asarray(r - v), ones(r)) for r, v in parts]
  total = [critic.moments(jnp.asarray(r), ones(r)) for r, _ in parts]
  got = critic.explained_variance(
    functools.reduce(critic.combine, error),
    functools.reduce(critic.combine, total),
  )
  want = 1 - np.var(returns - values) / np.var(returns)
  np.testing.assert_allclose(got, want, rtol=1e-12)


def test_moments_ignore_entries_of_weight_zero():
  x = jnp.array([1.0, jnp.nan, 3.0, jnp.inf])
  m = critic.moments(x, jnp.array([1.0, 0, 1, 0]))
  np.testing.assert_allclose([m.count, m.mean, m.m2], [2, 2, 2])


def test_constant_returns_give_zero_not_nan():
  m = critic.moments(jnp.ones(3), jnp.ones(3))
  assert critic.explained_variance(m, m) == 0
