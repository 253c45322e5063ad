"""The bootstrap interval of a mean."""

import math

import numpy as np
import pytest

from gyre.trajectory.statistics import bootstrap_ci


def test_equal_values_have_no_width():
  assert bootstrap_ci([0.25] * 9, resamples=50, seed=1) == (0.25, 0.25)


def test_no_values():
  assert all(math.isnan(x) for x in bootstrap_ci([], resamples=9, seed=0))


@pytest.mark.parametrize("level,z", [(0.95, 1.96), (0.8, 1.2816)])
def test_close_to_the_normal_interval(level, z):
  x = np.random.default_rng(0).normal(2, 3, 400)
  low, high = bootstrap_ci(x, resamples=20_000, seed=0, level=level)
  half = z * x.std() / 20
  np.testing.assert_allclose(
    [low, high], [x.mean() - half, x.mean() + half], atol=0.02
  )


def test_the_seed_decides():
  x = np.random.default_rng(0).normal(size=30)
  one, again = (bootstrap_ci(x, resamples=99, seed=4) for _ in range(2))
  assert one == again != bootstrap_ci(x, resamples=99, seed=5)
