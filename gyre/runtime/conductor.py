"""Carries out what the scheduler decides, and tells it what came of it.

The loop takes one event at a time, asks `scheduler.decide` and starts a task
for each action; a task answers with an event. So no decision waits for an
effect, and whatever takes time runs beside the rest: executions, transfers of
cells, updates, publications. Micro-steps are claimed by the cells that train
(training.py).

What an execution is, how a group becomes micro-steps and what is written down
is the business of a `Work`: a run's, or an emulated one's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from gyre.elastic import scheduler as sched
from gyre.rollout.engine import EngineDown
from gyre.rollout.router import Router
from gyre.runtime.cell import CELL_ERRORS, GRACE_S, Core, Worker
from gyre.runtime.training import Training
from gyre.types import Batch

RETRY_S = 1.0
# Of the return of a cell to its former role.
_TRIES = 5

log = logging.getLogger(__name__)

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
    self._workers, self._clock = dict(workers), clock
    self._weights: Any = None
    self._events: asyncio.Queue[sched.Event] = asyncio.Queue()
    self._tasks: set[asyncio.Task] = set()
    self._running: dict[sched.Execution, asyncio.Task] = {}
    self._transfers: dict[str, asyncio.Task] = {}
    self._down: set[str] = set()
    self._fallen: set[str] = set()  # before the beginning
    self._news = asyncio.Condition()
    self._begun = False
    self._following: asyncio.Task | None = None
    self._failure: asyncio.Future | None = None
    self._training = Training(
      work,
      observer,
      batch=state.law.batch,
      version=state.trainer.version,
      drained=lambda n: self._tell(sched.Drained(self._clock(), n)),
      start=self._start,
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
      if post.role == "down" and name not in self._down:
        self._start(self._serve_late(name))
    await self._unless_failed(self._followed())

  async def _serve_late(self, cell: str) -> None:
    """A cell that is there again, for what follows the last publication."""
    try:
      await self._serve(cell, self.state.trainer.published)
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
    self._weights = await self._publishable(version)
    waiting = set(posts)
    while waiting:
      roles = [self._start(self._first_role(name)) for name in waiting]
      await self._unless_failed(asyncio.wait(roles))
      waiting = set(self._fallen)
    for name, post in posts.items():
      if post.role == "train":
        self._training.enter(name)
      self._observer.role(name, post.role)
    self._following = self._start(self._work.published(version))

  async def _first_role(self, cell: str) -> None:
    """A cell serves, or trains if it is a trainer; over all its lives."""
    core, role = self._core.name == cell, self.state.fleet.posts[cell].role
    while True:
      async with self._news:
        await self._news.wait_for(lambda: cell not in self._down)
      again = cell in self._fallen
      self._fallen.discard(cell)
      try:
        if core and again:
          await self._work.rehost(self._core)
        if role == "train":
          await self._training.join(cell, self._workers[cell], core=True)
        else:
          await self._serve(cell, self.state.trainer.published)
        return
      except CELL_ERRORS as error:
        if not await self._gone(cell, error):
          raise

  async def _followed(self) -> None:
    """Waits until all that follows the last publication is done."""
    if self._following is not None:
      await asyncio.wait({self._following})

  @property
  def _core(self) -> Core:
    return self._workers[self.state.fleet.core]

  # Actions.

  def _perform(self, action: sched.Action) -> None:
    match action:
      case sched.Admit(group=group, version=version):
        self._work.admit(group, version)
      case sched.Start(execution=execution, cell=cell):
        self._place(execution, cell)
      case sched.Migrate(execution=execution, target=target):
        self._place(execution, target)
      case sched.Switch(cell=cell, role="train"):
        self._transfer(action, self._to_train(cell))
      case sched.Switch(cell=cell):
        self._transfer(action, self._to_rollout(cell))
      case sched.Resize(cell=cell, devices=devices):
        self._transfer(action, self._resize(cell, devices))
      case sched.Rehost(cell=cell):
        self._transfer(action, self._rehost(cell))
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
    await self._followed()
    if await self._training.apply(number):
      self._tell(sched.Applied(self._clock(), number))

  async def _publishable(self, version: int) -> Any:
    """Weights of a version, of the core or, where it is lost, as committed."""
    core = self._core
    if core.name not in self._down and self.state.fleet.hosted:
      try:
        return await self._work.publishable(core, version)
      except CELL_ERRORS as error:
        if not await self._gone(core.name, error):
          raise
    return await self._work.publishable(None, version)

  async def _publish(self, version: int) -> None:
    self._weights = await self._publishable(version)
    if self._router.serving:
      with contextlib.suppress(EngineDown):  # told by `cell_down`
        await self._work.deliver(self._weights, version)
    await self._followed()
    self._following = self._start(self._work.published(version))
    self._tell(sched.Published(self._clock(), version))

  # Transfers of a cell.

  def _transfer(
    self,
    action: sched.Switch | sched.Rehost | sched.Resize,
    work: Coroutine[Any, Any, None],
  ) -> None:
    before = self.state.transfer.before
    self._transfers[action.cell] = self._start(
      self._timed(action, work, before)
    )

  async def _timed(
    self,
    action: sched.Switch | sched.Rehost | sched.Resize,
    work: Coroutine[Any, Any, None],
    before: str,
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
      if await self._gone(cell, error, self._core.name):
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
        if await self._gone(cell, error, self._core.name):
          return False
        if not left:
          raise
        await asyncio.sleep(RETRY_S)
    return False

  async def _go_back(self, cell: str, role: str) -> None:
    if role == "rollout":
      await self._serve(cell, self.state.trainer.published)
    elif role == "train" and self._training.hosted:
      worker = self._workers[cell]
      await self._training.join(cell, worker, core=worker is self._core)
      self._training.enter(cell)
    # Without a core it waits in its role; what was down still holds nothing.

  async def _gone(self, cell: str, error: Exception, *asked: str) -> bool:
    """Whether a cell that failed is dead, rather than one that it asked.

    Waits for the news of any.
    """
    if isinstance(error, EngineDown):
      known = {cell, *asked}
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S), self._news:
          await self._news.wait_for(lambda: known & self._down)
    return cell in self._down

  async def _resize(self, cell: str, devices: tuple[int, ...]) -> None:
    """The core goes on on other devices; a cell that was lent some ends."""
    lent = self.state.fleet.lent
    if lent is not None and lent in self._workers:
      if lent in self._router.cell_stats():
        self._router.remove(lent)
      with contextlib.suppress(EngineDown):  # dead: there is nothing to close
        await self._workers.pop(lent).close()
      self._observer.role(lent, "")
    await self._training.resize(self._workers[cell], devices)

  def ask_resize(self, devices: int) -> None:
    """The core is to train on so many of its devices, the rest to serve.

    Raises:
      ValueError: it has not as many, or the layout does not allow it.
    """
    self._tell(sched.ask_resize(self.state, self._clock(), devices))

  async def _serve(self, cell: str, version: int) -> None:
    if cell not in self._workers:
      made = self._work.worker(self.state.fleet.posts[cell].cell)
      self._workers[cell] = made
    worker = self._workers[cell]
    await worker.serve(self._weights, version)
    self._router.add(cell, worker.engine)

  async def _to_train(self, cell: str) -> None:
    if self._router.serving == (cell,):
      await self._followed()
    await self._router.drain(cell)
    worker = self._workers[cell]
    await self._training.join(cell, worker, core=worker is self._core)
    self._training.enter(cell)

  async def _to_rollout(self, cell: str) -> None:
    await self._training.leave(cell)
    await self._serve(cell, self.state.trainer.published)

  async def _rehost(self, cell: str) -> None:
    """A cell becomes the core, with what was committed last."""
    worker = self._workers[cell]
    if cell in self._router.serving:
      await self._router.drain(cell)
    await self._training.leave(cell)
    version = await self._work.rehost(worker)
    if await self._training.rehosted(cell, worker, version):
      # Committed by the core that died before it could say so.
      self._tell(sched.Applied(self._clock(), version))
    self._training.enter(cell)

  # Cells that die and come back.

  def cell_down(self, cell: str, error: Exception) -> None:
    """A cell died, with all that it held.

    Args:
      cell: its name.
      error: why; it is not raised, the run goes on without the cell.
    """
    post = self.state.fleet.posts.get(cell)
    if cell in self._down or post is None:
      return
    self._down.add(cell)
    if cell in self._router.serving:
      down = error if isinstance(error, EngineDown) else EngineDown(str(error))
      self._router.fail(cell, down)
    if cell in self._transfers:
      self._transfers.pop(cell).cancel()
    self._training.lost(cell)
    self._observer.role(cell, "down")
    self._start(self._notify())
    if self._begun:
      # Of its present life, whatever the scheduler has yet to hear of it.
      self._tell(sched.CellDown(self._clock(), cell))
    else:
      self._fallen.add(cell)

  async def _notify(self) -> None:
    async with self._news:
      self._news.notify_all()

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
    self._workers[cell] = worker
    self._down.discard(cell)
    self._start(self._notify())
    if self.state.stopped:
      self._start(self._serve_late(cell))
    elif self._begun:
      self._tell(sched.CellUp(self._clock(), cell))
