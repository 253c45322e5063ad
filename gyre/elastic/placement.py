"""Which executions wait, and which run on which cell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

Execution = tuple[int, int]  # (group, index)


@dataclasses.dataclass(frozen=True)
class Work:
  """Unfinished executions. Mappings are never changed in place.

  Attributes:
    waiting: not placed, in the order in which they start.
    running: the cell of each placed one.
    load: how many run on each cell.
  """

  waiting: tuple[Execution, ...] = ()
  running: Mapping[Execution, str] = dataclasses.field(default_factory=dict)
  load: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def unfinished(self) -> int:
    """w = d − f."""
    return len(self.waiting) + len(self.running)

  def __contains__(self, execution: Execution) -> bool:
    return execution in self.running or execution in self.waiting

  def add(self, executions: Iterable[Execution]) -> Work:
    """With more that wait, last."""
    return dataclasses.replace(self, waiting=(*self.waiting, *executions))

  def start(self, cells: Iterable[str]) -> Work:
    """With the first that wait placed on `cells`, one each."""
    cells = tuple(cells)
    running, load = dict(self.running), dict(self.load)
    for execution, cell in zip(self.waiting, cells, strict=False):
      running[execution] = cell
      load[cell] = load.get(cell, 0) + 1
    return Work(self.waiting[len(cells) :], running, load)

  def move(self, moves: Iterable[tuple[Execution, str]]) -> Work:
    """With running executions moved to other cells."""
    running, load = dict(self.running), dict(self.load)
    for execution, target in moves:
      load[running[execution]] -= 1
      load[target] = load.get(target, 0) + 1
      running[execution] = target
    return dataclasses.replace(self, running=running, load=load)

  def requeue(self, executions: Iterable[Execution]) -> Work:
    """With running executions waiting again, first."""
    executions = tuple(executions)
    running, load = dict(self.running), dict(self.load)
    for execution in executions:
      load[running.pop(execution)] -= 1
    return Work(executions + self.waiting, running, load)

  def without(self, executions: Iterable[Execution]) -> Work:
    """Without these, ended or dropped."""
    running, load = dict(self.running), dict(self.load)
    gone = set()
    for execution in executions:
      cell = running.pop(execution, None)
      if cell is None:
        gone.add(execution)
      else:
        load[cell] -= 1
    waiting = self.waiting
    if gone:
      waiting = tuple(e for e in waiting if e not in gone)
    return Work(waiting, running, load)

  def on(self, cell: str) -> tuple[Execution, ...]:
    """What runs on a cell, in the order in which it was placed."""
    return tuple(e for e, c in self.running.items() if c == cell)
