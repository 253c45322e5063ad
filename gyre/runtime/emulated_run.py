"""A whole run of emulated cells: the real conductor, router and clock.

What takes time takes the time of a profile, and nothing is computed, so that a
schedule over many nodes can be measured on any machine, beside what the
simulator says of the same configuration. Cells are of this process, or workers
of the launcher "local". With a directory and a store the run is durable, and
goes on where it was killed. JAX-free.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gyre.elastic import scheduler as sched
from gyre.rollout import engine
from gyre.rollout.router import Router
from gyre.runtime import event_log
from gyre.runtime.cell import Worker
from gyre.runtime.conductor import Conductor
from gyre.runtime.emulated_cell import EmulatedCell, EmulatedCore
from gyre.runtime.emulation import EmulatedWork, Emulation, of_design
from gyre.runtime.specs import Spec, emulated_spec
from gyre.runtime.workers import Supervision, Workers
from gyre.sim import tables
from gyre.sim.clock import Result
from gyre.store.rollouts import RolloutStore


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a run did. Times in emulated seconds.

  Attributes:
    seconds: from its beginning, or its last resume, to the last update.
    applied: when each update of this life was.
    staleness: (update, group, d) of each group trained.
    executions: that ended, in this life.
    switches, migrations: done in this life.
    metrics: of each pass of each update, as the core gave them.
  """

  seconds: float
  applied: tuple[float, ...]
  staleness: tuple[tuple[int, int, int], ...]
  executions: int
  switches: int
  migrations: int
  metrics: tuple[tuple[int, Mapping[str, Any]], ...]

  @property
  def hours(self) -> float:
    """`seconds` in hours."""
    return self.seconds / 3600


class Log:
  """Keeps what was decided; see work.Observer."""

  def __init__(self, store: RolloutStore | None = None):
    """Empty.

    Args:
      store: written to as well.
    """
    self.records: list[tuple[int, dict[str, Any]]] = []
    self.roles: list[tuple[str, str]] = []
    self.began: float | None = None
    self._store = store

  def decided(
    self,
    state: sched.State,
    event: sched.Event,
    actions: Sequence[sched.Action],
  ) -> None:
    """See work.Observer."""
    if isinstance(event, sched.Begin):
      self.began = asyncio.get_running_loop().time()
    made, step = event_log.record(event, actions), state.trainer.version
    self.records.append((step, made))
    if self._store is not None:
      self._store.put_event(event_log.EVENT, made, step=step, t=event.time)

  def role(self, cell: str, role: str) -> None:
    """See work.Observer."""
    self.roles.append((cell, role))

  @contextlib.contextmanager
  def span(self, cell: str, name: str, **args: Any) -> Iterator[None]:
    """See work.Observer."""
    del cell, name, args
    yield


def cells(emulation: Emulation) -> dict[str, Worker]:
  """Emulated cells of this process; those that may train can be the core."""

  def made(cell: sched.Cell) -> Worker:
    kind = EmulatedCell if cell.kind == "standalone" else EmulatedCore
    profile = emulation.profile_of(cell)
    return kind(
      cell.name,
      profile,
      devices=len(cell.devices),
      executions=emulation.executions,
    )

  return {cell.name: made(cell) for cell in emulation.layout}


def specs(emulation: Emulation) -> list[Spec]:
  """The processes of the cells."""
  return [
    emulated_spec(
      cell.name,
      emulation.profile_of(cell),
      core=cell.kind != "standalone",
      devices=len(cell.devices),
      executions=emulation.executions,
    )
    for cell in emulation.layout
  ]


class EmulatedRun:
  """A run: made of its parts, then awaited.

  Attributes:
    router, work, log, conductor: of the run.
    workers: of its cells, by name.
  """

  def __init__(
    self,
    emulation: Emulation,
    workers: Mapping[str, Worker] | None = None,
    *,
    directory: pathlib.Path | None = None,
    store: RolloutStore | None = None,
    make_work: type[EmulatedWork] = EmulatedWork,
    restart: Callable[[str], None] | None = None,
  ):
    """Goes on from what the directory and the store hold.

    Args:
      emulation: what is run.
      workers: of its cells; None: emulated ones of this process.
      directory: of the commits; None: the run is not durable.
      store: of the executions; needed where the run is to be resumed.
      make_work: what it works on.
      restart: called with a cell whose engine failed; None: it stays down.
    """
    self.emulation = emulation
    self.router = Router(on_down=self._engine_down)
    self._restart = restart
    self.work = make_work(
      emulation, self.router, directory=directory, store=store
    )
    self.log = Log(store)
    self.workers = dict(workers or cells(emulation))
    self._first = self.work.position.step
    state = sched.begin(
      emulation.layout,
      emulation.law,
      streaming=emulation.streaming,
      policy=emulation.policy,
      steps=emulation.steps,
      resume=self.work.resumed(),
    )
    self.conductor = Conductor(
      state, self.workers, self.work, self.router, self.log
    )

  def down(self, cell: str, error: Exception | str) -> None:
    """A cell died."""
    if not isinstance(error, Exception):
      error = engine.EngineDown(error)
    self.conductor.cell_down(cell, error)

  def _engine_down(self, cell: str, error: engine.EngineDown) -> None:
    self.down(cell, error)
    if self._restart is not None:
      self._restart(cell)

  def up(self, cell: str) -> None:
    """It is there again, idle."""
    self.conductor.cell_up(cell, self.workers[cell])

  async def run(self) -> Outcome:
    """Runs to the last update.

    Raises:
      Exception: what the run failed with, other than the loss of a cell.
    """
    core = self.workers[self.emulation.layout.core.name]
    # A core that dies here is known to be down, and re-hosted.
    with contextlib.suppress(engine.EngineDown):
      await self.work.restore(core)
    try:
      await self.conductor.run()
    finally:
      await self.router.close()
    return self._outcome()

  def _outcome(self) -> Outcome:
    log, speedup = self.log, self.emulation.profile.speedup
    applied = tuple((t - log.began) * speedup for t in self.work.applied)
    books = self.audit()
    return Outcome(
      seconds=applied[-1] if applied else 0.0,
      applied=applied,
      staleness=tuple(self.work.position.consumed),
      executions=len(self.work.executions),
      switches=books.switches,
      migrations=books.migrations,
      metrics=tuple(self.work.metrics),
    )

  def audit(self) -> event_log.Audit:
    """Books over what was decided in this life of the run."""
    e = self.emulation
    return event_log.audit(e.layout, e.law, self.log.records)


async def run_local(
  emulation: Emulation,
  directory: pathlib.Path,
  *,
  supervision: Supervision | None = None,
  store: RolloutStore | None = None,
  durable: bool = True,
) -> Outcome:
  """Runs over a process a cell, which are started again when they die.

  Args:
    emulation: what is run.
    directory: of the run; logs of the workers are written there.
    supervision: of the processes.
    store: of the executions.
    durable: whether updates are committed there.

  Returns:
    What the run did.
  """
  run: EmulatedRun | None = None
  gone: dict[str, str] = {}

  def down(cell: str, why: str) -> None:
    gone[cell] = why
    if run is not None:
      run.down(cell, why)

  def up(cell: str, _: str) -> None:
    if gone.pop(cell, None) is not None and run is not None:
      run.up(cell)

  def restart(cell: str) -> None:
    if pid := group.pids().get(cell):
      os.kill(pid, signal.SIGKILL)

  group = Workers(
    specs(emulation),
    directory,
    supervision=supervision,
    on_up=up,
    on_down=down,
    on_lost=down,
  )
  async with group:
    run = EmulatedRun(
      emulation,
      group.cells,
      directory=directory if durable else None,
      store=store,
      restart=restart,
    )
    for cell, why in gone.items():
      run.down(cell, why)
    return await run.run()


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A design: what the simulator says of it, and what was measured."""

  design: tables.Design
  predicted: Result
  measured: Outcome


async def compare(
  designs: Sequence[tables.Design],
  calibration: tables.Calibration,
  directory: pathlib.Path,
  *,
  seed: int,
  steps: int,
  speedup: float,
  calls: int = 6,
) -> list[Comparison]:
  """Runs designs over local processes, side by side: they mostly sleep.

  Args:
    designs: rows of the simulator's tables.
    calibration: costs and works.
    directory: for the workers' logs.
    seed: of the works, the same for all.
    steps: updates.
    speedup: emulated seconds a second of the wall.
    calls: of an execution.
  """

  async def measured(design: tables.Design) -> Outcome:
    made = of_design(
      design, calibration, seed=seed, steps=steps, speedup=speedup
    )
    made = dataclasses.replace(made, calls=calls)
    return await run_local(made, directory / design.id, durable=False)

  outcomes = await asyncio.gather(*(measured(d) for d in designs))
  return [
    Comparison(d, tables.run_design(d, calibration, seed, steps=steps), outcome)
    for d, outcome in zip(designs, outcomes, strict=True)
  ]


def speed_ups(
  compared: Sequence[Comparison],
) -> dict[str, tuple[float, float]]:
  """Returns how much faster the last design is than each other one.

  Returns:
    {id: (predicted, measured)}.
  """
  *others, mine = compared
  return {
    c.design.id: (
      c.predicted.hours / mine.predicted.hours,
      c.measured.hours / mine.measured.hours,
    )
    for c in others
  }
