"""Works: the law they are drawn from, and that they never change."""

import math

import numpy as np
import pytest

from gyre.sim.workload import LogNormal, Replay, Work


def _draws(workload, groups, size):
  return np.array(
    [
      [workload.work((g, i)).seconds for i in range(size)]
      for g in range(groups)
    ]
  )


def test_moments_are_those_of_the_law():
  w = LogNormal(mean=100.0, sigma=0.4, correlation=0.3, group_size=4, seed=3)
  x = np.log(_draws(w, 8000, 4))
  # Standard errors: mean 0.4/sqrt(32000)*1.4, correlation about 0.006.
  assert np.exp(x.mean() + 0.4**2 / 2) == pytest.approx(100, rel=0.012)
  assert x.std() == pytest.approx(0.4, rel=0.02)
  pairs = np.corrcoef(x.T)[np.triu_indices(4, 1)]
  assert pairs.mean() == pytest.approx(0.3, abs=0.03)
  between = np.corrcoef(x[:-1, 0], x[1:, 0])[0, 1]
  assert abs(between) < 0.04


def test_a_work_depends_on_its_name_alone():
  a = LogNormal(mean=1.0, sigma=0.3, correlation=0.5, group_size=3, seed=5)
  b = LogNormal(mean=1.0, sigma=0.3, correlation=0.5, group_size=3, seed=5)
  names = [(g, i) for g in range(20) for i in range(3)]
  forward = {n: a.work(n) for n in names}
  backward = {n: b.work(n) for n in reversed(names)}
  assert forward == backward
  other = LogNormal(mean=1.0, sigma=0.3, correlation=0.5, group_size=3, seed=6)
  assert all(other.work(n) != forward[n] for n in names)


def test_limits_of_the_correlation():
  one = _draws(
    LogNormal(mean=1.0, sigma=0.3, correlation=1.0, group_size=3), 5, 3
  )
  np.testing.assert_allclose(one, np.repeat(one[:, :1], 3, axis=1))
  none = LogNormal(mean=7.0, sigma=0.0, group_size=3)
  np.testing.assert_allclose(_draws(none, 5, 3), 7.0)


@pytest.mark.parametrize(
  "bad",
  [
    {"mean": 0.0},
    {"sigma": -0.1},
    {"correlation": 1.5},
    {"timeout": 0.0},
    {"mean": math.nan},
  ],
)
def test_values_out_of_range_are_refused(bad):
  good = {"mean": 1.0, "sigma": 0.1, "group_size": 2}
  with pytest.raises(ValueError, match=str(next(iter(bad.values())))):
    LogNormal(**(good | bad))


def test_an_index_outside_the_group_is_refused():
  w = LogNormal(mean=1.0, sigma=0.1, group_size=2)
  with pytest.raises(ValueError, match="index 2 is not in a group of 2"):
    w.work((0, 2))


def test_replayed_groups_come_again_after_the_last():
  groups = {0: (Work(1.0), Work(2.0)), 1: (Work(3.0), Work(4.0, scored=False))}
  w = Replay(groups, timeout=9.0)
  assert w.group_size == 2 and w.timeout == 9.0
  assert w.work((1, 1)) == Work(4.0, scored=False)
  assert w.work((2, 0)) == w.work((0, 0)) == Work(1.0)


@pytest.mark.parametrize(
  "groups,match",
  [
    ({}, "0 groups"),
    ({1: (Work(1.0),)}, "up to 1"),
    ({0: (Work(1.0),), 1: (Work(1.0), Work(1.0))}, "one size"),
    ({0: ()}, "one size"),
  ],
)
def test_replays_that_are_no_groups_are_refused(groups, match):
  with pytest.raises(ValueError, match=match):
    Replay(groups)
