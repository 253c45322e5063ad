"""Which executions wait, and which run on which cell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

Execution = tuple[int, int]  # (group, index)


@dataclasses.dataclass(frozen=True)
class Run:
  """A started execution: where it is, and since when it runs, in seconds."""

  cell: str
  since: float


@dataclasses.dataclass(frozen=True)
class Work:
  """Unfinished executions. Mappings are never changed in place.

  Attributes:
    waiting: not placed, in the order in which they start.
    running: where each placed one runs.
    load: how many run on each cell.
    since: when those that wait though they had started did so.
  """

  waiting: tuple[Execution, ...] = ()
  running: Mapping[Execution, Run] = dataclasses.field(default_factory=dict)
  load: Mapping[str, int] = dataclasses.field(default_factory=dict)
  since: Mapping[Execution, float] = dataclasses.field(default_factory=dict)

  @property
  def unfinished(self) -> int:
    """w = d − f."""
    return len(self.waiting) + len(self.running)

  def __contains__(self, execution: Execution) -> bool:
    return execution in self.running or execution in self.waiting

  def began(self, execution: Execution, otherwise: float) -> float:
    """When an execution first started, if it did."""
    run = self.running.get(execution)
    return run.since if run else self.since.get(execution, otherwise)

  def add(self, executions: Iterable[Execution]) -> Work:
    """With more that wait, last."""
    return dataclasses.replace(self, waiting=(*self.waiting, *executions))

  def start(self, count: int, cells: Iterable[str], now: float) -> Work:
    """With the first `count` that wait placed on `cells`, one each."""
    running, load = dict(self.running), dict(self.load)
    since = self.since
    for execution, cell in zip(self.waiting[:count], cells, strict=True):
      running[execution] = Run(cell, since.get(execution, now))
      load[cell] = load.get(cell, 0) + 1
    if since:
      since = {e: t for e, t in since.items() if e not in running}
    return Work(self.waiting[count:], running, load, since)

  def move(self, moves: Iterable[tuple[Execution, str]]) -> Work:
    """With running executions moved to other cells."""
    running, load = dict(self.running), dict(self.load)
    for execution, target in moves:
      run = running[execution]
      load[run.cell] -= 1
      load[target] = load.get(target, 0) + 1
      running[execution] = Run(target, run.since)
    return dataclasses.replace(self, running=running, load=load)

  def requeue(self, executions: Iterable[Execution]) -> Work:
    """With running executions waiting again, first."""
    executions = tuple(executions)
    running, load, since = dict(self.running), dict(self.load), dict(self.since)
    for execution in executions:
      run = running.pop(execution)
      load[run.cell] -= 1
      since[execution] = run.since
    return Work(executions + self.waiting, running, load, since)

  def without(self, executions: Iterable[Execution]) -> Work:
    """Without these, ended or dropped."""
    running, load = dict(self.running), dict(self.load)
    gone = set()
    for execution in executions:
      run = running.pop(execution, None)
      if run is None:
        gone.add(execution)
      else:
        load[run.cell] -= 1
    waiting, since = self.waiting, self.since
    if gone:
      waiting = tuple(e for e in waiting if e not in gone)
      since = {e: t for e, t in since.items() if e not in gone}
    return Work(waiting, running, load, since)

  def on(self, cell: str) -> tuple[Execution, ...]:
    """What runs on a cell, in the order in which it was placed."""
    return tuple(e for e, run in self.running.items() if run.cell == cell)
