"""What the scheduler is told (events) and what it asks for (actions).

Times are seconds on any clock that does not go back. A `ticket` names one
transfer and a `life` one life of a cell, so that news of an earlier one is
known as such; None stands for the present one.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from gyre.elastic.placement import Execution


@dataclasses.dataclass(frozen=True)
class Begin:
  """The cells stand in their first roles."""

  time: float


@dataclasses.dataclass(frozen=True)
class Finished:
  """An execution ended; scored is False if it can't be trained on.

  flat is True if it was the last of its group, and all have the same reward:
  such a group teaches nothing.
  """

  time: float
  execution: Execution
  scored: bool = True
  flat: bool = False


@dataclasses.dataclass(frozen=True)
class SwitchDone:
  """The transfer (Switch or Rehost) of a cell is done."""

  time: float
  cell: str
  ticket: int | None = None


@dataclasses.dataclass(frozen=True)
class SwitchFailed:
  """It failed; the cell is as before it."""

  time: float
  cell: str
  ticket: int | None = None


@dataclasses.dataclass(frozen=True)
class Drained:
  """Every micro-step of every group consumed for an update is trained."""

  time: float
  update: int


@dataclasses.dataclass(frozen=True)
class Applied:
  """The optimizer step is taken and committed with the consumed groups."""

  time: float
  update: int


@dataclasses.dataclass(frozen=True)
class Published:
  """Every cell that serves serves this version."""

  time: float
  version: int


@dataclasses.dataclass(frozen=True)
class CellDown:
  """A cell died, and what it held in memory with it."""

  time: float
  cell: str
  life: int | None = None


@dataclasses.dataclass(frozen=True)
class CellUp:
  """A dead cell is there again, holding nothing."""

  time: float
  cell: str
  life: int | None = None


@dataclasses.dataclass(frozen=True)
class ResizeAsked:
  """The core is to train on this many of its devices, until asked again."""

  time: float
  devices: int


@dataclasses.dataclass(frozen=True)
class Resized:
  """The core trains on the devices of the Resize under way."""

  time: float
  cell: str
  ticket: int | None = None


@dataclasses.dataclass(frozen=True)
class ResizeFailed:
  """It trains on the devices of before."""

  time: float
  cell: str
  ticket: int | None = None


Event = (
  Begin
  | Finished
  | SwitchDone
  | SwitchFailed
  | Drained
  | Applied
  | Published
  | CellDown
  | CellUp
  | ResizeAsked
  | Resized
  | ResizeFailed
)


@dataclasses.dataclass(frozen=True)
class Admit:
  """The executions of a new group are known; its v_d is `version`."""

  group: int
  version: int


@dataclasses.dataclass(frozen=True)
class Start:
  """An execution starts, or goes on where its last cell died, on a cell."""

  execution: Execution
  cell: str


@dataclasses.dataclass(frozen=True)
class Migrate:
  """A running execution goes on on another cell."""

  execution: Execution
  source: str
  target: str


@dataclasses.dataclass(frozen=True)
class Switch:
  """A cell changes its role. Answered by SwitchDone or SwitchFailed."""

  cell: str
  role: Literal["train", "rollout"]
  ticket: int = 0


@dataclasses.dataclass(frozen=True)
class Rehost:
  """A cell becomes the core, from the last committed state, and trains.

  Answered by SwitchDone or SwitchFailed.
  """

  cell: str
  ticket: int = 0


@dataclasses.dataclass(frozen=True)
class Resize:
  """The core goes on on these devices, full state; the rest is freed.

  A cell that was lent the devices is empty and closed first. Answered by
  Resized or ResizeFailed.
  """

  cell: str
  devices: tuple[int, ...]
  ticket: int = 0


@dataclasses.dataclass(frozen=True)
class Consume:
  """A group goes into the claim queue of an update."""

  group: int
  update: int


@dataclasses.dataclass(frozen=True)
class Apply:
  """The optimizer step of an update is taken and committed."""

  update: int


@dataclasses.dataclass(frozen=True)
class Publish:
  """The cells that serve load a version. Always answered by Published."""

  version: int


@dataclasses.dataclass(frozen=True)
class Drop:
  """A group will never be consumed; what still runs of it is aborted."""

  group: int
  reason: Literal["stale", "lost", "flat"]


@dataclasses.dataclass(frozen=True)
class Stop:
  """Every update is applied, the last published, borrowed cells are back."""


Action = (
  Admit
  | Start
  | Migrate
  | Switch
  | Rehost
  | Resize
  | Consume
  | Apply
  | Publish
  | Drop
  | Stop
)
