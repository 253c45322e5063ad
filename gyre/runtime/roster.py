"""The cells of a run: their workers, and which of them are dead."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from gyre.rollout.engine import EngineDown
from gyre.runtime.cell import GRACE_S, Worker


class Roster:
  """Cells by name; whoever waits for news of them hears of deaths and returns.

  Attributes:
    workers: by name; a resize brings one about and ends it.
    down: names of those that are dead now.
  """

  def __init__(self, workers: Mapping[str, Worker]):
    """All are alive.

    Args:
      workers: by name.
    """
    self.workers, self.down = dict(workers), set[str]()
    self._news = asyncio.Condition()

  def back(self, cell: str, worker: Worker) -> None:
    """A dead cell is there again.

    Args:
      cell: its name.
      worker: holds nothing.
    """
    self.workers[cell] = worker
    self.down.discard(cell)

  async def notify(self) -> None:
    """Wakes who waits, after `down` has changed."""
    async with self._news:
      self._news.notify_all()

  async def alive(self, cell: str) -> None:
    """Returns once a cell is not dead."""
    async with self._news:
      await self._news.wait_for(lambda: cell not in self.down)

  async def gone(self, cell: str, error: Exception, *asked: str) -> bool:
    """Whether a cell that failed is dead, rather than one that it asked.

    Waits for the news of any.

    Args:
      cell: its name.
      error: which it failed with.
      *asked: cells that it may have asked something of.
    """
    if isinstance(error, EngineDown):
      known = {cell, *asked}
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S), self._news:
          await self._news.wait_for(lambda: known & self.down)
    return cell in self.down
