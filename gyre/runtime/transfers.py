"""Transfers of cells from role to role, and what becomes of one that fails.

A cell that fails in a transfer goes back to its former role and the scheduler
hears of it; one that dies is no concern of its transfer any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from gyre.elastic import scheduler as sched
from gyre.rollout.engine import EngineDown
from gyre.rollout.router import Router
from gyre.runtime.cell import CELL_ERRORS
from gyre.runtime.publication import Publication
from gyre.runtime.roster import Roster
from gyre.runtime.training import Training
from gyre.runtime.work import Observer, Work

RETRY_S = 1.0
# Of the return of a cell to its former role.
_TRIES = 5

log = logging.getLogger(__name__)

Transfer = sched.Switch | sched.Rehost | sched.Resize


class Transfers:
  """Carries out Switch, Rehost and Resize."""

  def __init__(
    self,
    work: Work,
    router: Router,
    observer: Observer,
    roster: Roster,
    training: Training,
    publication: Publication,
    *,
    state: Callable[[], sched.State],
    tell: Callable[[sched.Event], None],
    start: Callable[[Coroutine[Any, Any, Any]], asyncio.Task],
    clock: Callable[[], float],
  ):
    """None is under way.

    Args:
      work: makes workers of lent cells, and gives a core its state.
      router: knows who serves.
      observer: told of roles.
      roster: the cells.
      training: those that train.
      publication: has the weights of those that serve.
      state: of the scheduler, now.
      tell: takes an event.
      start: runs a coroutine as a task of the run.
      clock: seconds, for the events.
    """
    self._work, self._router, self._observer = work, router, observer
    self._roster, self._training = roster, training
    self._publication, self._state = publication, state
    self._tell, self._start, self._clock = tell, start, clock
    self._tasks: dict[str, asyncio.Task] = {}

  @property
  def _core(self) -> str:
    return self._state().fleet.core

  def begin(self, action: Transfer) -> None:
    """Begins a transfer; the scheduler hears of its end."""
    match action:
      case sched.Switch(cell=cell, role="train"):
        work = self._to_train(cell)
      case sched.Switch(cell=cell):
        work = self._to_rollout(cell)
      case sched.Resize(cell=cell, devices=devices):
        work = self._resize(cell, devices)
      case sched.Rehost(cell=cell):
        work = self._rehost(cell)
    before = self._state().transfer.before
    self._tasks[cell] = self._start(self._timed(action, work, before))

  def cancel(self, cell: str) -> None:
    """A cell died: nobody waits for the end of its transfer."""
    if cell in self._tasks:
      self._tasks.pop(cell).cancel()

  async def _timed(
    self, action: Transfer, work: Coroutine[Any, Any, None], before: str
  ) -> None:
    """A transfer, and what came of it; one that fails leaves all as it was."""
    cell = action.cell
    if isinstance(action, sched.Resize):
      role, now = "train", "resize"
      outcomes = (sched.Resized, sched.ResizeFailed)
    else:
      role = getattr(action, "role", "train")
      now, outcomes = f"to {role}", (sched.SwitchDone, sched.SwitchFailed)
    self._observer.role(cell, now)
    outcome = outcomes[0]
    try:
      with self._observer.span(cell, now):
        await work
    except CELL_ERRORS as error:
      if await self._roster.gone(cell, error, self._core):
        return
      log.warning("%s: %s failed: %s", cell, now, error)
      outcome, role = outcomes[1], before
      await asyncio.sleep(RETRY_S)  # it is asked for again at once
      if now != "resize" and not await self._went_back(cell, role):
        return
    self._observer.role(cell, role)
    self._tell(outcome(self._clock(), cell, action.ticket))

  async def _went_back(self, cell: str, role: str) -> bool:
    """A cell whose transfer failed takes its former role; False if it died."""
    for left in reversed(range(_TRIES)):
      try:
        await self._go_back(cell, role)
        return True
      except CELL_ERRORS as error:
        if await self._roster.gone(cell, error, self._core):
          return False
        if not left:
          raise
        await asyncio.sleep(RETRY_S)
    return False

  async def _go_back(self, cell: str, role: str) -> None:
    if role == "rollout":
      await self.serve(cell, self._state().trainer.published)
    elif role == "train" and self._training.hosted:
      await self.train(cell)
      self._training.enter(cell)
    # Without a core it waits in its role; what was down still holds nothing.

  async def serve(self, cell: str, version: int) -> None:
    """A cell wakes its engine with the published weights, and is routed to."""
    workers = self._roster.workers
    if cell not in workers:
      workers[cell] = self._work.worker(self._state().fleet.posts[cell].cell)
    worker = workers[cell]
    await worker.serve(self._publication.weights, version)
    self._router.add(cell, worker.engine)

  async def train(self, cell: str) -> None:
    """A cell takes the core's weights; it has yet to claim anything."""
    worker = self._roster.workers[cell]
    await self._training.join(cell, worker, core=cell == self._core)

  async def _to_train(self, cell: str) -> None:
    if self._router.serving == (cell,):
      await self._publication.followed()
    await self._router.drain(cell)
    await self.train(cell)
    self._training.enter(cell)

  async def _to_rollout(self, cell: str) -> None:
    await self._training.leave(cell)
    await self.serve(cell, self._state().trainer.published)

  async def _rehost(self, cell: str) -> None:
    """A cell becomes the core, with what was committed last."""
    worker = self._roster.workers[cell]
    if cell in self._router.serving:
      await self._router.drain(cell)
    await self._training.leave(cell)
    version = await self._work.rehost(worker)
    if self._training.rehosted(cell, worker, version):
      # Committed by the core that died before it could say so. Told at once:
      # this one may die before it has begun.
      self._tell(sched.Applied(self._clock(), version))
    await self._training.begin_anew()
    self._training.enter(cell)

  async def _resize(self, cell: str, devices: tuple[int, ...]) -> None:
    """The core goes on on other devices; a cell that was lent some ends."""
    lent, workers = self._state().fleet.lent, self._roster.workers
    if lent is not None and lent in workers:
      if lent in self._router.cell_stats():
        self._router.remove(lent)
      with contextlib.suppress(EngineDown):  # dead: there is nothing to close
        await workers.pop(lent).close()
      self._observer.role(lent, "")
    await self._training.resize(workers[cell], devices)
