"""What moves between events: the rollout pool and the update in training.

Executions share one pool: all that run progress at the same rate
1/(f + (1-f)*load/x0), load = executions a serving node, so one number V, the
work done by an execution that always ran, orders all their ends: an event
costs O(log n) whatever the rate does. Cells in training share the micro-steps
of one update, n nodes at rate n^alpha.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math

from gyre.elastic.dispatch import Law
from gyre.sim.workload import ExecutionId, Workload

#: Work below this many node-seconds is done: rounding, not training.
_EPS = 1e-6


class SimulationError(RuntimeError):
  """The scheduler asked for what cannot be; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Costs:
  """What things cost.

  Attributes:
    serial: f, the part of an execution that more nodes do not speed up.
    load: x0, executions a node at which an execution runs at rate 1.
    update_work: W, node-seconds of a training update on one node.
    alpha: an update takes W / n^alpha on n nodes.
    to_train, to_rollout: seconds that a switch takes.
    publish: seconds from the end of an update to the published version.
  """

  serial: float = 1.0
  load: float = 16.0
  update_work: float = 0.0
  alpha: float = 1.0
  to_train: float = 8.52
  to_rollout: float = 3.46
  publish: float = 0.0

  def __post_init__(self):
    if not 0 <= self.serial <= 1:
      raise ValueError(f"serial part must be from 0 to 1, got {self.serial}")
    if not self.load > 0:
      raise ValueError(f"load must be positive, got {self.load}")
    if not 0 < self.alpha <= 1:
      raise ValueError(f"alpha must be in (0, 1], got {self.alpha}")
    for name in ("update_work", "to_train", "to_rollout", "publish"):
      if not getattr(self, name) >= 0:
        raise ValueError(
          f"{name} must not be negative, got {getattr(self, name)}"
        )

  def slowdown(self, load: float) -> float:
    """Seconds a unit of work takes at `load` executions a node."""
    return self.serial + (1 - self.serial) * load / self.load


@dataclasses.dataclass
class Run:
  """An execution under way: where, and since when."""

  cell: str
  start: float


class Pool:
  """Executions on the serving cells, in virtual work."""

  def __init__(self, workload: Workload, costs: Costs):
    self.workload, self.costs = workload, costs
    self.nodes = 0.0
    self.slots = 0
    self.v = 0.0
    self.runs: dict[ExecutionId, Run] = {}
    self.held: collections.Counter[str] = collections.Counter()
    self._by_work: list[tuple[float, ExecutionId]] = []
    self._by_wall: list[tuple[float, ExecutionId]] = []

  def _slowdown(self) -> float:
    return self.costs.slowdown(len(self.runs) / self.nodes)

  def advance(self, dt: float) -> None:
    if self.runs and self.nodes:
      self.v += dt / self._slowdown()

  def place(self, execution: ExecutionId, cell: str, now: float) -> None:
    """Starts an execution."""
    if execution in self.runs:
      raise SimulationError(f"execution {execution} started twice")
    end_v = self.v + self.workload.work(execution).seconds
    self.runs[execution] = Run(cell, now)
    self.held[cell] += 1
    heapq.heappush(self._by_work, (end_v, execution))
    if math.isfinite(self.workload.timeout):
      wall = now + self.workload.timeout
      heapq.heappush(self._by_wall, (wall, execution))

  def move(self, execution: ExecutionId, cell: str) -> None:
    """Moves a running execution."""
    run = self.runs[execution]
    self.held[run.cell] -= 1
    self.held[cell] += 1
    run.cell = cell

  def remove(self, execution: ExecutionId) -> Run | None:
    """Takes an execution out, ended or dropped; None if it did not run."""
    run = self.runs.pop(execution, None)
    if run:
      self.held[run.cell] -= 1
    return run

  def next_end(self, now: float) -> tuple[float, ExecutionId | None]:
    """The next execution to end, and when if nothing changes."""
    for heap in (self._by_work, self._by_wall):
      while heap and heap[0][1] not in self.runs:
        heapq.heappop(heap)
    t, execution = math.inf, None
    if self._by_work and self.nodes:
      end_v, execution = self._by_work[0]
      t = now + max(end_v - self.v, 0.0) * self._slowdown()
    if self._by_wall and self._by_wall[0][0] < t:
      t, execution = self._by_wall[0]
    return t, execution


class Trainer:
  """The micro-steps of one update, shared by the cells in training."""

  def __init__(self, law: Law, costs: Costs):
    self.law, self.costs = law, costs
    self.nodes = 0.0
    self.update = 1
    self.left = 0.0
    self.drained = False
    self.counts: collections.Counter[int] = collections.Counter()

  def _rate(self) -> float:
    return self.nodes**self.costs.alpha

  def advance(self, dt: float) -> float:
    """Trains; returns the seconds in which there was something to train."""
    if not (self.nodes and self.left):
      return 0.0
    busy = min(dt, self.left / self._rate())
    self.left -= busy * self._rate()
    if self.left < _EPS:
      self.left = 0.0
    return busy

  def consume(self, update: int) -> None:
    self.counts[update] += 1
    if self.counts[update] > self.law.batch:
      raise SimulationError(
        f"update {update} was given more than {self.law.batch} groups"
      )
    if update == self.update:
      self.left += self.costs.update_work / self.law.batch

  def next_drained(self, now: float) -> float:
    """When the update in training will have trained all its B groups."""
    if self.drained or self.counts[self.update] < self.law.batch:
      return math.inf
    if not self.left:
      return now
    return now + self.left / self._rate() if self.nodes else math.inf

  def applied(self) -> None:
    self.update += 1
    self.drained = False
    share = self.costs.update_work / self.law.batch
    self.left = share * self.counts[self.update]
