"""Intervals of means over tasks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def bootstrap_ci(
  values: Sequence[float], *, resamples: int, seed: int, level: float = 0.95
) -> tuple[float, float]:
  """Percentile bootstrap interval of a mean (Efron 1979).

  Args:
    values: one a task.
    resamples: how often to draw len(values) of them with replacement.
    seed: the same seed gives the same interval.
    level: of the interval.

  Returns:
    Its ends; (nan, nan) without values.
  """
  x = np.asarray(values, np.float64)
  if not len(x):
    return float("nan"), float("nan")
  rng = np.random.Generator(np.random.Philox(key=seed))
  means = x[rng.integers(0, len(x), (resamples, len(x)))].mean(axis=1)
  tail = (1 - level) / 2
  low, high = np.quantile(means, [tail, 1 - tail])
  return float(low), float(high)
