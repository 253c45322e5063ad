"""Streaming training with changing members.

Groups become micro-steps of an update as they come in; the cells that train
claim them. Weights are frozen inside a pass. A cell that finds nothing left to
claim hands its sums over while others still work; when all is trained the sums
of all are combined at the core, which takes one optimizer step. A cell that
dies takes with it what it claimed and has not handed over, and that is trained
again; a core that dies takes the whole update.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from gyre.runtime.cell import CELL_ERRORS, GRACE_S, CellError, Core, Worker
from gyre.runtime.claims import MicroStep
from gyre.runtime.incoming import Composer, Incoming
from gyre.runtime.work import Observer, Work

log = logging.getLogger(__name__)


class Training:
  """The updates of a run, and the cells that work on them."""

  def __init__(
    self,
    work: Work,
    observer: Observer,
    *,
    batch: int,
    version: int,
    drained: Callable[[int], None],
    start: Callable[[Coroutine[Any, Any, Any]], asyncio.Task],
  ):
    """No cell trains yet.

    Args:
      work: makes micro-steps of groups, and commits.
      observer: told what cells do.
      batch: groups an update, B.
      version: of the core's weights.
      drained: told when all of an update's last pass is trained; again where a
        death undid that.
      start: runs a coroutine as a task of the run.
    """
    self._work, self._observer = work, observer
    self._drained, self._start = drained, start
    self._composer = Composer(work, batch)
    self._applied = self._held = version
    self._updates: dict[int, Incoming] = {}
    self._workers: dict[str, Worker] = {}
    self._members: dict[str, asyncio.Task] = {}
    self._alive: set[str] = set()
    self._ready: set[str] = set()
    self._leaving: set[str] = set()
    self._core, self._losses = "", 0  # of cores
    self._news = asyncio.Condition()
    # The core's weights stand still while a satellite takes them.
    self._weights = asyncio.Lock()

  @property
  def hosted(self) -> bool:
    """Whether there is a core, which has joined once."""
    return bool(self._core)

  # Members.

  async def join(self, cell: str, worker: Worker, *, core: bool) -> None:
    """A cell takes the core's weights; its sums are empty.

    Args:
      cell: its name.
      worker: the cell.
      core: whether it is the core, which has them.
    """
    async with self._weights:
      if core:
        self._core = cell
        await worker.join(None, self._held)
      else:
        await self._take_weights(cell, worker)
      self._workers[cell] = worker
      self._alive.add(cell)
      self._ready.add(cell)

  async def _take_weights(self, cell: str, worker: Worker) -> None:
    """A satellite joins with the core's; while these stand still."""
    core, losses = self._core, self._losses
    if core:
      weights = await self._work.training_weights(
        self._workers[core], self._held
      )
      await worker.join(weights, self._held)
    if not core or losses != self._losses:
      raise CellError(f"{cell} cannot join: the core is lost")

  def enter(self, cell: str) -> None:
    """A cell that joined claims micro-steps from now on."""
    self._members[cell] = self._start(self._member(cell))

  async def leave(self, cell: str) -> None:
    """A cell claims no more, and hands over what it has added.

    Args:
      cell: its name; one that does not train is left as it is.
    """
    member = self._members.get(cell)
    if member is None:
      return
    self._leaving.add(cell)
    await self._notify()
    await asyncio.wait({member})
    self._leaving.discard(cell)
    self._members.pop(cell, None)
    self._ready.discard(cell)
    async with self._weights:
      pass  # it may be taking later weights
    update = self._updates.get(self._applied + 1)
    if update is not None:
      await self._take(update, cell)
    # What is left in its sums is of an update that began anew.
    await self._workers[cell].reset()

  def lost(self, cell: str) -> None:
    """A cell died: what it claimed and had not handed over is to do again.

    Where it was the core, every update that is not committed begins anew.

    Args:
      cell: its name.
    """
    member = self._members.pop(cell, None)
    for known in (self._alive, self._ready, self._leaving):
      known.discard(cell)
    if member is not None:
      member.cancel()
    core = cell == self._core
    if core:
      self._ready.clear()
      self._core = ""
      self._losses += 1
    for update in self._updates.values():
      if core:
        update.start_over()
      else:
        update.claims.give_back(cell)
        # The scheduler has forgotten that it was told, or soon will.
        update.told &= update.stepping
      self._start(self._settle(update))
    self._start(self._notify())

  async def resize(self, core: Core, devices: Sequence[int]) -> None:
    """The core goes on on other devices; not while its weights are read."""
    async with self._weights:
      await core.resize(devices)

  def rehosted(self, cell: str, core: Core, version: int) -> bool:
    """A cell has become the core; `begin_anew` is to follow.

    Args:
      cell: its name.
      core: the cell, with the last committed state.
      version: of the state.

    Returns:
      Whether it is of an update that nobody had heard was applied.
    """
    unheard = version > self._applied
    self._updates.pop(version, None)
    for update in self._updates.values():
      update.start_over()
    self._workers[cell], self._core = core, cell
    self._applied = self._held = version
    self._alive.add(cell)
    self._ready = {cell}
    return unheard

  async def begin_anew(self) -> None:
    """Satellites in training discard what they added, and take the weights."""
    await self._refresh()
    for update in list(self._updates.values()):
      await self._settle(update)

  async def _member(self, cell: str) -> None:
    """Works on micro-steps until the cell leaves or dies."""
    while (claimed := await self._claim(cell)) is not None:
      update, micro = claimed
      try:
        if micro is None:
          await self._take(update, cell)
        else:
          await self._micro_step(cell, update, micro)
      except CELL_ERRORS:
        if not await self._died(cell):
          raise

  async def _claim(self, cell: str) -> tuple[Incoming, MicroStep | None] | None:
    """What a cell does next; None instead of a micro-step: hands over."""
    async with self._news:
      while cell not in self._leaving:
        update = self._updates.get(self._applied + 1)
        free = update is not None and not update.stepping
        if free and cell in self._ready:
          micro = update.claims.claim(cell)
          if micro is not None or update.claims.may_hand_over(cell):
            return update, micro
        await self._news.wait()
    return None

  async def _micro_step(
    self, cell: str, update: Incoming, micro: MicroStep
  ) -> None:
    worker, lives = self._workers[cell], update.lives
    with self._observer.span(
      cell, "micro-step", update=micro.update, index=micro.index
    ):
      extras = await worker.work(micro.batch, micro.extras)
      part = await worker.sums() if self._work.ordered else None
    if update.lives != lives:
      return
    update.claims.done(cell, micro.index, extras)
    if part is not None:
      update.claims.hand_over(cell)
      update.handed[micro.index] = part
    await self._settle(update)

  async def _died(self, *cells: str) -> bool:
    """Whether one of these, on an error, is dead; waits for the news."""

    async def gone() -> None:
      async with self._news:
        await self._news.wait_for(lambda: not self._alive.issuperset(cells))

    try:
      await asyncio.wait_for(gone(), GRACE_S)
    except TimeoutError:
      return False
    return True

  async def _unless_dead(
    self, cell: str, work: Coroutine[Any, Any, None]
  ) -> None:
    """Asks something of a cell, unless it or the core dies meanwhile."""
    core = self._core
    try:
      await work
    except CELL_ERRORS as error:
      known = not self._alive.issuperset((cell, core))
      if isinstance(error, CellError) and not known:
        raise
      if not await self._died(cell, core):
        raise

  async def _notify(self) -> None:
    async with self._news:
      self._news.notify_all()

  # Updates.

  def consume(self, group: int, number: int) -> None:
    """A group's micro-steps can be claimed, once they are composed."""
    update = self._updates.get(number)
    if update is None:
      update = self._updates[number] = Incoming(number)
    composed = self._composer.consume(update, group, self._settle)
    update.composing = self._start(composed)

  async def _settle(self, update: Incoming) -> None:
    """Goes on when a pass is trained; wakes who waits for work."""
    claims = update.claims
    if claims.drained and not update.told:
      update.told = True
      if len(claims) and claims.passes < self._work.passes:
        self._start(self._next_pass(update))
      else:
        self._drained(claims.update)
    await self._notify()

  async def _take(self, update: Incoming, cell: str) -> None:
    """A cell hands its sums over; its death no longer loses them."""
    async with update.taking[cell]:
      if cell not in update.claims.members():
        return
      lives = update.lives
      try:
        sums = await self._workers[cell].sums()
      except CELL_ERRORS:
        if update.lives == lives:
          raise
        return  # the update began anew, and the cell may be joining again
      # It may have died since; what it gave back is trained again.
      if update.lives == lives and cell in update.claims.members():
        update.handed[min(update.claims.hand_over(cell))] = sums

  async def _step(self, update: Incoming) -> bool:
    """One optimizer step on the sums of all; False where a death forbids it.

    What is lost with the death is trained again, and the step taken then.
    """
    claims, lives, asked = update.claims, update.lives, ()
    if update.stepping or not (claims.drained and self._core):
      return False
    update.stepping = True
    try:
      asked = claims.members()
      await asyncio.gather(*(self._take(update, cell) for cell in asked))
      async with self._weights:
        if update.lives != lives:
          return False
        if claims.drained:
          asked = (self._core,)
          await self._apply(update, self._core)
          return update.lives == lives
    except CELL_ERRORS:
      if not await self._died(*asked):
        raise
    if update.lives == lives:
      update.stepping = update.told = False
      await self._settle(update)
    return False

  async def _apply(self, update: Incoming, core: str) -> None:
    """The core takes a step; while nobody takes its weights."""
    number, lives = update.claims.update, update.lives
    self._ready.clear()
    with self._observer.span(core, "update", update=number):
      metrics = await self._workers[core].apply(update.take(), number)
    if update.lives == lives:
      self._held = number
      self._ready.add(core)
      update.metrics.append(metrics)

  async def _refresh(self) -> None:
    """Satellites in training take the core's weights again, one by one.

    Who has them works meanwhile.
    """
    await self._notify()
    for name in [n for n in self._members if n not in self._ready]:
      try:
        await self._unless_dead(name, self._rejoin(name))
      except CellError as error:
        log.warning("%s does not help until it joins again: %s", name, error)

  async def _rejoin(self, cell: str) -> None:
    async with self._weights:
      # It may have left since, or joined; and so may the core have.
      lacks = cell in self._members and cell not in self._ready
      if lacks and self._core in self._ready:
        # What it may hold is of an update that began anew.
        await self._workers[cell].reset()
        await self._take_weights(cell, self._workers[cell])
        if cell in self._members:
          self._ready.add(cell)
    await self._notify()

  async def _next_pass(self, update: Incoming) -> None:
    if await self._step(update):
      update.claims.next_pass()
      update.told = update.stepping = False
      await self._refresh()
      await self._settle(update)

  async def apply(self, number: int) -> bool:
    """Takes the last step of an update and commits it.

    Args:
      number: of the update, drained.

    Returns:
      Whether it is committed. Otherwise a death came between, and the update
      is told to be drained again; or it is under way already.
    """
    update = self._updates.get(number)
    if update is None:
      return False
    await asyncio.shield(update.composing)
    lives, core = update.lives, self._core
    if not await self._step(update):
      return False
    try:
      with self._observer.span(core, "commit", update=number):
        await self._work.commit(self._workers[core], number, update.metrics)
    except CELL_ERRORS:
      if update.lives == lives and not await self._died(core):
        raise
      return False
    self._updates.pop(number, None)
    self._applied = number
    # Nobody waits for it: at the end of a burst the satellites are to serve.
    self._start(self._refresh())
    return True
