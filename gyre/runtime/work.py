"""What the conductor asks of whoever knows what is trained, and who it tells.

A run's `Work` is in run_work, an emulated one's in emulation; the `Observer` of
a run is in watch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gyre.elastic import scheduler as sched
from gyre.runtime.cell import Core, Worker
from gyre.types import Batch

# Each with the ids of the groups in it.
MicroSteps = Sequence[tuple[Batch, tuple[str, ...]]]


class Work(Protocol):
  """What the cells work on.

  Attributes:
    passes: optimizer steps an update takes over its micro-steps.
    ordered: sums are added in the order of micro-steps, so that their bits do
      not depend on which cell took which.
  """

  passes: int
  ordered: bool

  def worker(self, cell: sched.Cell) -> Worker:
    """Makes the worker of a cell that a resize has brought about."""

  def admit(self, group: int, version: int) -> None:
    """A group exists from now on, with the version of its admission."""

  def name(self, execution: sched.Execution) -> str:
    """The execution's id, as its requests carry it."""

  async def run(self, execution: sched.Execution) -> bool:
    """Runs an execution to its end and keeps it; whether it was scored."""

  def flat(self, group: int) -> bool:
    """Whether every execution of a group ended, all with one reward."""

  def drop(self, group: int, reason: str) -> None:
    """A group will not be trained; what ran of it is cancelled."""

  async def compose(self, update: int, group: int) -> MicroSteps:
    """Takes a group into an update; one at a time, in order of consumption.

    Returns:
      The micro-steps that are whole now.
    """

  def rest(self, update: int) -> MicroSteps:
    """As `compose`, of what was not yet whole when no group is to come."""

  async def keep(self, update: int) -> None:
    """Writes down what an update trains, while it is trained.

    It needs no cell, and ends before `commit` begins.
    """

  async def training_weights(self, core: Core, version: int) -> Any:
    """What a satellite joins with: the core's, valid until its next step."""

  async def commit(
    self, core: Core, update: int, metrics: Sequence[Mapping[str, Any]]
  ) -> None:
    """Makes the core's state and what was consumed durable, together.

    Args:
      core: holds the state.
      update: number of the update, and version of the state.
      metrics: of each pass.
    """

  async def publishable(self, core: Core | None, version: int) -> Any:
    """Weights of a version for engines, valid until the next call of this.

    Args:
      core: holds the newest; None: it is lost, and they are those committed.
      version: the core's, or an earlier one.
    """

  async def deliver(self, weights: Any, version: int) -> None:
    """Gives the cells that serve what `publishable` returned.

    One that does not take it is failed at the router.
    """

  async def published(self, version: int) -> None:
    """Every cell that serves has a version: does what follows.

    An evaluation, say. Until it returns, no update is applied and a cell
    serves that version.
    """

  async def rehost(self, core: Core) -> int:
    """Gives a cell the last committed state, to train; the version of it."""


class Observer(Protocol):
  """Who watches: the event log, the time line, the console."""

  def decided(
    self,
    state: sched.State,
    event: sched.Event,
    actions: Sequence[sched.Action],
  ) -> None:
    """What was decided on an event, before any of it is done.

    Args:
      state: after the decision.
      event: that came in.
      actions: that are to be carried out.
    """

  def role(self, cell: str, role: str) -> None:
    """A cell has a role from now on."""

  def span(
    self, cell: str, name: str, **args: Any
  ) -> contextlib.AbstractContextManager[None]:
    """Is around what a cell does."""
