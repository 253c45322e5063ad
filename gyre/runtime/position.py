"""Where a run stands, and the names of what it trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

#: Of the groups that are trained, in the store.
PHASE = "train"


@dataclasses.dataclass
class Position:
  """Where a run stands; a checkpoint's meta holds it as JSON.

  Attributes:
    phase: "warm" or "train".
    step: steps taken in that phase.
    published: the version that engines serve; at most `step`.
    consumed: group_id -> step that trained it; every group of the run.
    row: metrics of `step`, without its evaluation.
    evaluated: the step last evaluated, before `step`'s own evaluation.
    best: {"step", "reward"} before the evaluation of `step`.
    lengths: of the files of `Record`, before the line of `step`.
    wall_s: seconds taken, over all resumes.
  """

  phase: str = "warm"
  step: int = 0
  published: int = 0
  consumed: dict[str, int] = dataclasses.field(default_factory=dict)
  row: dict[str, Any] = dataclasses.field(default_factory=dict)
  evaluated: int = -1
  best: dict[str, Any] | None = None
  lengths: dict[str, int] = dataclasses.field(default_factory=dict)
  wall_s: float = 0.0


def group_id(number: int) -> str:
  """Returns the id of a group of training."""
  return f"{PHASE}-{number:06d}"


def flat(rewards: Sequence[float | None], size: int) -> bool:
  """Whether a group is whole and teaches nothing: its rewards are equal.

  Args:
    rewards: of its executions that ended; None where there is none.
    size: executions a group, N.
  """
  scored = {r for r in rewards if r is not None}
  return len(rewards) == size and len(scored) == 1
