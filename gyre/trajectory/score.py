"""Rewards from outcomes: dense by the number of assertions, or binary.

A legitimate 0 is a reward; a failure of the sandbox or the verifier is not: it
has none, enters no group statistic, and its execution leaves training.
"""

from __future__ import annotations

from typing import Literal

from gyre.types import Outcome

ScoreKind = Literal["fraction", "count20", "binary"]


def reward(
  outcome: Outcome | None, kind: ScoreKind = "fraction"
) -> float | None:
  """The reward of one execution.

  Args:
    outcome: what the verifier found; None before verification.
    kind: "fraction" is passed / total; "count20" is T1's absolute count,
      passed / 20 (2609.11042), fixed for a run; "binary" is 1 when every
      expected assertion passed. When the per-assertion report is missing
      (total 0) each falls back to the verifier's binary score, so that a
      solved task is never 0.

  Returns:
    The reward, or None when the execution must not be trained.

  Raises:
    ValueError: an unknown kind, a count that exceeds its total, or a scored
      outcome that has neither assertions nor a score.
  """
  if kind not in ("fraction", "count20", "binary"):
    raise ValueError(
      f"score kind {kind!r} is not one of fraction, count20, binary"
    )
  if outcome is None or outcome.status in ("eval_failed", "discarded"):
    return None
  if outcome.timeout == "overall":
    return None
  if outcome.status == "no_artifact":
    return 0.0
  if not 0 <= outcome.passed <= outcome.total:
    raise ValueError(
      f"outcome has {outcome.passed} passed of {outcome.total} assertions"
    )
  if outcome.total == 0:
    if outcome.score is None:
      raise ValueError("outcome is scored but has no assertions and no score")
    return float(outcome.score)
  if kind == "fraction":
    return outcome.passed / outcome.total
  if kind == "count20":
    return outcome.passed / 20
  return float(outcome.passed == outcome.total)
