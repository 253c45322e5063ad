"""Weights on their way to the cells that serve, and what follows that.

How one engine takes weights and is checked is in publish.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from gyre.elastic import scheduler as sched
from gyre.rollout.engine import EngineDown
from gyre.rollout.router import Router
from gyre.runtime.cell import CELL_ERRORS
from gyre.runtime.roster import Roster
from gyre.runtime.work import Work


class Publication:
  """The publications of a run.

  Attributes:
    weights: of the newest, for cells that come to serve.
  """

  def __init__(
    self,
    work: Work,
    router: Router,
    roster: Roster,
    *,
    state: Callable[[], sched.State],
    start: Callable[[Coroutine[Any, Any, Any]], asyncio.Task],
  ):
    """Nothing is published yet.

    Args:
      work: makes weights publishable, and knows what follows.
      router: knows who serves.
      roster: the cells.
      state: of the scheduler, now.
      start: runs a coroutine as a task of the run.
    """
    self._work, self._router, self._roster = work, router, roster
    self._state, self._start = state, start
    self.weights: Any = None
    self._following: asyncio.Task | None = None

  async def prepare(self, version: int) -> None:
    """Cells that come to serve are given these weights from now on."""
    self.weights = await self._publishable(version)

  async def _publishable(self, version: int) -> Any:
    """Weights of a version, of the core or, where it is lost, as committed."""
    fleet = self._state().fleet
    if fleet.core not in self._roster.down and fleet.hosted:
      core = self._roster.workers[fleet.core]
      try:
        return await self._work.publishable(core, version)
      except CELL_ERRORS as error:
        if not await self._roster.gone(core.name, error):
          raise
    return await self._work.publishable(None, version)

  async def publish(self, version: int) -> None:
    """Gives a version to all that serve; what follows begins."""
    await self.prepare(version)
    if self._router.serving:
      with contextlib.suppress(EngineDown):  # the conductor hears of it
        await self._work.deliver(self.weights, version)
    await self.followed()
    self.follow(version)

  def follow(self, version: int) -> None:
    """Begins what follows the publication of a version."""
    self._following = self._start(self._work.published(version))

  async def followed(self) -> None:
    """Waits until all that follows the last publication is done."""
    if self._following is not None:
      await asyncio.wait({self._following})
