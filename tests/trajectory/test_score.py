"""Rewards from outcomes."""

import pytest

from gyre.trajectory import score
from gyre.types import Outcome


@pytest.mark.parametrize(
  "kind,want", [("fraction", 0.75), ("count20", 0.15), ("binary", 0.0)]
)
def test_partial_credit(kind, want):
  outcome = Outcome("scored", score=0.0, passed=3, total=4)
  assert score.reward(outcome, kind) == pytest.approx(want)


@pytest.mark.parametrize(
  "kind,want", [("fraction", 1), ("count20", 0.2), ("binary", 1)]
)
def test_all_assertions(kind, want):
  outcome = Outcome("scored", score=1.0, passed=4, total=4)
  assert score.reward(outcome, kind) == want


@pytest.mark.parametrize("kind", ["fraction", "count20", "binary"])
def test_a_solved_task_without_a_report_is_never_zero(kind):
  assert score.reward(Outcome("scored", score=1.0), kind) == 1


@pytest.mark.parametrize("kind", ["fraction", "count20", "binary"])
def test_a_legitimate_zero_is_a_reward(kind):
  assert score.reward(Outcome("scored", score=0.0, total=4), kind) == 0
  assert score.reward(Outcome("no_artifact", total=4), kind) == 0


@pytest.mark.parametrize("kind", ["fraction", "count20", "binary"])
@pytest.mark.parametrize(
  "outcome",
  [
    None,
    Outcome("eval_failed"),
    Outcome("eval_failed", score=0.0, total=4),
    Outcome("discarded"),
    Outcome("scored", score=1.0, passed=1, total=1, timeout="overall"),
  ],
)
def test_pitfall_9_a_failure_is_not_a_reward_of_zero(kind, outcome):
  assert score.reward(outcome, kind) is None


def test_a_harness_timeout_is_still_scored():
  outcome = Outcome("scored", score=0.5, passed=1, total=2, timeout="harness")
  assert score.reward(outcome) == 0.5


@pytest.mark.parametrize(
  "outcome,kind,message",
  [
    (Outcome("scored", passed=3, total=2), "fraction", "3 passed of 2"),
    (Outcome("scored"), "fraction", "no score"),
    (Outcome("scored", score=1.0), "percent", "percent"),
  ],
)
def test_what_makes_no_sense_is_refused(outcome, kind, message):
  with pytest.raises(ValueError, match=message):
    score.reward(outcome, kind)
