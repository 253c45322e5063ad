"""Carries out what the scheduler decides, and tells it what came of it.

The loop takes one event at a time, asks `scheduler.decide` and starts a task
for each action; a task answers with an event. So no decision waits for an
effect, and whatever takes time runs beside the rest: executions, transfers of
cells (transfers), updates (training), publications (publication). Which cells
there are, and which are dead, is in roster.

What an execution is, how a group becomes micro-steps and what is written down
is the business of a `Work` (work): a run's, or an emulated one's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from gyre.elastic import scheduler as sched
from gyre.rollout.engine import EngineDown
from gyre.rollout.router import Router
from gyre.runtime.cell import CELL_ERRORS, Worker
from gyre.runtime.publication import Publication
from gyre.runtime.roster import Roster
from gyre.runtime.training import Training
from gyre.runtime.transfers import Transfers
from gyre.runtime.work import Observer, Work

log = logging.getLogger(__name__)


class Conductor:
  """One run of the scheduler over real cells."""

  def __init__(
    self,
    state: sched.State,
    workers: Mapping[str, Worker],
    work: Work,
    router: Router,
    observer: Observer,
    *,
    clock: Callable[[], float] = time.time,
  ):
    """Nothing happens before `run`.

    Args:
      state: of the scheduler, from `scheduler.begin`.
      workers: by cell name; the core holds its state. Those that may have to
        take its place are cell.Core too.
      work: what is done.
      router: finds executions their engines; its `on_down` should be
        `cell_down`.
      observer: told of everything.
      clock: seconds, for the events.
    """
    self.state = state
    self._work, self._router, self._observer = work, router, observer
    self._roster, self._clock = Roster(workers), clock
    self._events: asyncio.Queue[sched.Event] = asyncio.Queue()
    self._tasks: set[asyncio.Task] = set()
    self._running: dict[sched.Execution, asyncio.Task] = {}
    self._fallen: set[str] = set()  # before the beginning
    self._begun = False
    self._failure: asyncio.Future | None = None
    self._training = Training(
      work,
      observer,
      batch=state.law.batch,
      version=state.trainer.version,
      drained=lambda n: self._tell(sched.Drained(self._clock(), n)),
      start=self._start,
    )
    self._publication = Publication(
      work,
      router,
      self._roster,
      state=lambda: self.state,
      start=self._start,
    )
    self._transfers = Transfers(
      work,
      router,
      observer,
      self._roster,
      self._training,
      self._publication,
      state=lambda: self.state,
      tell=self._tell,
      start=self._start,
      clock=clock,
    )

  # The loop.

  async def run(self) -> sched.State:
    """Runs until the scheduler stops.

    Returns:
      The scheduler's last state.

    Raises:
      Exception: what a task failed with, other than the loss of a cell.
    """
    self._failure = asyncio.get_running_loop().create_future()
    try:
      await self._first_roles()
      self._begin()
      while not self.state.stopped:
        event = await self._unless_failed(self._events.get())
        self.state, actions = sched.decide(self.state, event)
        self._observer.decided(self.state, event, actions)
        if isinstance(event, sched.Finished):
          # Not before it is known there: what ended may still be placed.
          self._running.pop(event.execution, None)
        for action in actions:
          self._perform(action)
      await self._last()
      return self.state
    finally:
      await self._end()

  def _begin(self) -> None:
    """The scheduler hears of the beginning before all that came earlier."""
    early = [self._events.get_nowait() for _ in range(self._events.qsize())]
    self._begun = True
    for event in (sched.Begin(self._clock()), *early):
      self._tell(event)

  async def _last(self) -> None:
    """What is still under way when the scheduler has stopped."""
    for name, post in self.state.fleet.posts.items():
      if post.role == "down" and name not in self._roster.down:
        self._start(self._serve_late(name))
    await self._unless_failed(self._publication.followed())

  async def _serve_late(self, cell: str) -> None:
    """A cell that is there again, for what follows the last publication."""
    try:
      await self._transfers.serve(cell, self.state.trainer.published)
      self._observer.role(cell, "rollout")
    except CELL_ERRORS as error:
      log.warning("%s does not serve again: %s", cell, error)

  async def _unless_failed(self, work: Coroutine[Any, Any, Any]) -> Any:
    """What the work returns, or at once the error of the run."""
    waited = asyncio.ensure_future(work)
    try:
      await asyncio.wait(
        {waited, self._failure}, return_when=asyncio.FIRST_COMPLETED
      )
      if self._failure.done():
        self._failure.result()
      return waited.result()
    finally:
      waited.cancel()

  async def _end(self) -> None:
    while tasks := [t for t in self._tasks if not t.done()]:
      for task in tasks:
        task.cancel()
      await asyncio.wait(tasks)
    self._failure.cancel()

  def _tell(self, event: sched.Event) -> None:
    self._events.put_nowait(event)

  def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task:
    """Runs beside the loop; its failure is the run's."""
    task = asyncio.ensure_future(work)
    self._tasks.add(task)
    task.add_done_callback(self._ended)
    return task

  def _ended(self, task: asyncio.Task) -> None:
    self._tasks.discard(task)
    if task.cancelled() or task.exception() is None:
      return
    if not self._failure.done():
      self._failure.set_exception(task.exception())

  async def _first_roles(self) -> None:
    """Every cell takes its first role; the weights served are evaluated.

    One that dies meanwhile is waited for.
    """
    version, posts = self.state.trainer.published, self.state.fleet.posts
    await self._publication.prepare(version)
    waiting = set(posts)
    while waiting:
      roles = [self._start(self._first_role(name)) for name in waiting]
      await self._unless_failed(asyncio.wait(roles))
      waiting = set(self._fallen)
    for name, post in posts.items():
      if post.role == "train":
        self._training.enter(name)
      self._observer.role(name, post.role)
    self._publication.follow(version)

  async def _first_role(self, cell: str) -> None:
    """A cell serves, or trains if it is a trainer; over all its lives."""
    role = self.state.fleet.posts[cell].role
    while True:
      await self._roster.alive(cell)
      again = cell in self._fallen
      self._fallen.discard(cell)
      try:
        if again and cell == self.state.fleet.core:
          await self._work.rehost(self._roster.workers[cell])
        if role == "train":
          await self._transfers.train(cell)
        else:
          await self._transfers.serve(cell, self.state.trainer.published)
        return
      except CELL_ERRORS as error:
        if not await self._roster.gone(cell, error):
          raise

  # Actions.

  def _perform(self, action: sched.Action) -> None:
    match action:
      case sched.Admit(group=group, version=version):
        self._work.admit(group, version)
      case sched.Start(execution=execution, cell=cell):
        self._place(execution, cell)
      case sched.Migrate(execution=execution, target=target):
        self._place(execution, target)
      case sched.Switch() | sched.Rehost() | sched.Resize():
        self._transfers.begin(action)
      case sched.Consume(group=group, update=update):
        self._training.consume(group, update)
      case sched.Apply(update=update):
        self._start(self._apply(update))
      case sched.Publish(version=version):
        self._start(self._publish(version))
      case sched.Drop(group=group, reason=reason):
        self._drop(group, reason)
      case sched.Stop():
        pass
      case _:
        raise TypeError(f"the scheduler asks for {action}")

  def _place(self, execution: sched.Execution, cell: str) -> None:
    """An execution starts, or goes on, on a cell."""
    name = self._work.name(execution)
    if execution in self._running:
      if not self._running[execution].done():
        self._router.place(name, cell)
      return
    version = self.state.queue.groups[execution[0]].version
    self._router.place(name, cell, version=version)
    self._running[execution] = self._start(self._execution(execution))

  async def _execution(self, execution: sched.Execution) -> None:
    try:
      scored = await self._work.run(execution)
    finally:
      self._router.forget(self._work.name(execution))
    flat = self._work.flat(execution[0])
    self._tell(sched.Finished(self._clock(), execution, scored, flat))

  def _drop(self, group: int, reason: str) -> None:
    for execution in [e for e in self._running if e[0] == group]:
      self._running.pop(execution).cancel()
    self._work.drop(group, reason)

  async def _apply(self, number: int) -> None:
    await self._publication.followed()
    if await self._training.apply(number):
      self._tell(sched.Applied(self._clock(), number))

  async def _publish(self, version: int) -> None:
    await self._publication.publish(version)
    self._tell(sched.Published(self._clock(), version))

  def ask_resize(self, devices: int) -> None:
    """The core is to train on so many of its devices, the rest to serve.

    Raises:
      ValueError: it has not as many, or the layout does not allow it.
    """
    self._tell(sched.ask_resize(self.state, self._clock(), devices))

  # Cells that die and come back.

  def cell_down(self, cell: str, error: Exception) -> None:
    """A cell died, with all that it held.

    Args:
      cell: its name.
      error: why; it is not raised, the run goes on without the cell.
    """
    post = self.state.fleet.posts.get(cell)
    if cell in self._roster.down or post is None:
      return
    self._roster.down.add(cell)
    if cell in self._router.serving:
      down = error if isinstance(error, EngineDown) else EngineDown(str(error))
      self._router.fail(cell, down)
    self._transfers.cancel(cell)
    self._training.lost(cell)
    self._observer.role(cell, "down")
    self._start(self._roster.notify())
    if self._begun:
      # Of its present life, whatever the scheduler has yet to hear of it.
      self._tell(sched.CellDown(self._clock(), cell))
    else:
      self._fallen.add(cell)

  @property
  def begun(self) -> bool:
    """Whether every cell has had its first role."""
    return self._begun

  def fail(self, error: Exception) -> None:
    """The run cannot go on: `run` raises the error."""
    if self._failure is not None and not self._failure.done():
      self._failure.set_exception(error)

  def cell_up(self, cell: str, worker: Worker) -> None:
    """A dead cell is there again.

    Args:
      cell: its name.
      worker: holds nothing.
    """
    self._roster.back(cell, worker)
    self._start(self._roster.notify())
    if self.state.stopped:
      self._start(self._serve_late(cell))
    elif self._begun:
      self._tell(sched.CellUp(self._clock(), cell))
