"""An update whose groups are coming in, and how they become micro-steps."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gyre.runtime.cell import Sums
from gyre.runtime.claims import Claims
from gyre.runtime.work import Work


class Incoming:
  """An update under way.

  Attributes:
    claims: its micro-steps.
    groups: consumed so far.
    handed: sums that cells handed over, by the first micro-step in them; in
      ordered mode each is of one.
    metrics: of each pass taken.
    told: that this pass is trained was told.
    stepping: its sums are being combined and applied; nothing is claimed.
    lives: how often it began anew.
    taking: held, by cell, while it hands its sums over.
    composing: makes the micro-steps of the group that came in last.
  """

  def __init__(self, number: int):
    """No group yet.

    Args:
      number: of the update.
    """
    self.claims = Claims(number)
    self.groups = self.lives = 0
    self.handed: dict[int, Sums] = {}
    self.metrics: list[Mapping[str, Any]] = []
    self.told = self.stepping = False
    self.taking: dict[str, asyncio.Lock] = collections.defaultdict(asyncio.Lock)
    self.composing: asyncio.Task | None = None

  def start_over(self) -> None:
    """Nothing has been computed."""
    self.handed.clear()
    self.metrics.clear()
    self.claims.start_over()
    self.told = self.stepping = False
    self.lives += 1

  def take(self) -> list[Sums]:
    """The sums handed over, in an order that no time decides."""
    out = [self.handed[i] for i in sorted(self.handed)]
    self.handed.clear()
    return out


class Composer:
  """Composes groups one after the other, in the order of consumption.

  Deaths meanwhile are no concern of it: nothing of it is inside a cell.
  """

  def __init__(self, work: Work, batch: int):
    """Nothing is composed yet.

    Args:
      work: makes the micro-steps.
      batch: groups an update, B.
    """
    self._work, self._batch = work, batch
    self._turn = asyncio.Lock()

  def consume(
    self,
    update: Incoming,
    group: int,
    composed: Callable[[Incoming], Awaitable[None]],
  ) -> Awaitable[None]:
    """Takes a group into an update.

    Args:
      update: not yet whole.
      group: its number.
      composed: told when the update has the group's micro-steps.

    Returns:
      What makes them, and keeps what the update is if the group is its last;
      to be started in the order of consumption.
    """
    update.groups += 1
    whole = update.groups == self._batch
    return self._compose(update, group, whole, composed)

  async def _compose(self, update, group, whole, composed) -> None:
    claims = update.claims
    async with self._turn:
      for batch, groups in await self._work.compose(claims.update, group):
        claims.add(batch, groups)
      if whole:
        for batch, groups in self._work.rest(claims.update):
          claims.add(batch, groups)
        claims.seal()
    await composed(update)
    if whole:
      await self._work.keep(claims.update)
