"""Runs the scheduler's decisions under a virtual clock.

The same `decide` that a controller executes, in a world in which executions
and updates are fluids (fluids.py), and switches and publications take fixed
times.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from gyre.elastic import policies, scheduler
from gyre.elastic.cells import Cell, Layout
from gyre.elastic.dispatch import Law
from gyre.sim.fluids import Costs, Pool, SimulationError, Trainer
from gyre.sim.workload import ExecutionId, Workload


@dataclasses.dataclass(frozen=True)
class Span:
  """A cell in one role. Times in seconds."""

  cell: str
  role: str
  start: float
  end: float


@dataclasses.dataclass(frozen=True)
class Result:
  """What a simulated run did. Times in seconds.

  Attributes:
    seconds: when the last update was applied.
    applied: when each update was.
    staleness: one (update, group, d) a group trained, in order.
    spans: roles of the cells, in order of start.
    switches: transfers done.
    migrations: executions moved between cells.
    executions: executions that ended.
    dropped: groups dropped.
    durations: wall seconds of each execution that ended.
    group_durations: of each group that became whole: its first start to its
      last end.
    rollout_busy: share of the slots of serving cells that held an execution.
    train_busy: share of the node-seconds in training that trained.
    decisions: (event, actions) of every decision, where asked for.
  """

  seconds: float
  applied: tuple[float, ...]
  staleness: tuple[tuple[int, int, int], ...]
  spans: tuple[Span, ...]
  switches: int
  migrations: int
  executions: int
  dropped: int
  durations: tuple[float, ...]
  group_durations: tuple[float, ...]
  rollout_busy: float
  train_busy: float
  decisions: tuple[tuple[Any, tuple[Any, ...]], ...] = ()

  @property
  def hours(self) -> float:
    """`seconds` in hours."""
    return self.seconds / 3600

  @property
  def mean_staleness(self) -> float:
    """Mean d over the groups trained."""
    return sum(d for *_, d in self.staleness) / max(len(self.staleness), 1)

  @property
  def max_staleness(self) -> int:
    """The largest d of a group trained."""
    return max((d for *_, d in self.staleness), default=0)


class _Clock:
  """One run: the world that the decisions act on."""

  def __init__(self, layout, law, workload, costs, steps, record):
    self.cells: dict[str, Cell] = {c.name: c for c in layout.cells}
    self.law, self.costs, self.steps = law, costs, steps
    self.pool = Pool(workload, costs)
    self.trainer = Trainer(law, costs)
    self.workload = workload
    self.now = 0.0
    self.role: dict[str, str] = {}
    self.since: dict[str, float] = {}
    self.spans: list[Span] = []
    self.timed: list[tuple[float, int, Any]] = []
    self.order = itertools.count()
    self.stopped = False
    self.version: dict[int, int] = {}
    self.first_start: dict[int, float] = {}
    self.unfinished: collections.Counter[int] = collections.Counter()
    self.applied: list[float] = []
    self.staleness: list[tuple[int, int, int]] = []
    self.durations: list[float] = []
    self.group_durations: list[float] = []
    self.switches = self.migrations = self.dropped = 0
    self.slot_s = self.held_s = self.train_s = self.trained_s = 0.0
    self.decisions: list[tuple[Any, tuple[Any, ...]]] | None = (
      [] if record else None
    )
    for cell in layout.cells:
      self.role[cell.name] = "train" if cell.kind == "trainer" else "rollout"
      self.since[cell.name] = 0.0
    for name in self.cells:
      self._set_role(name, self.role[name])

  def _set_role(self, name: str, role: str) -> None:
    old = self.role[name]
    if self.now > self.since[name]:
      self.spans.append(Span(name, old, self.since[name], self.now))
    self.role[name], self.since[name] = role, self.now
    serving = [c for n, c in self.cells.items() if self.role[n] == "rollout"]
    self.pool.nodes = sum(cell.nodes for cell in serving)
    self.pool.slots = sum(cell.slots for cell in serving)
    self.trainer.nodes = sum(
      c.nodes for n, c in self.cells.items() if self.role[n] == "train"
    )

  def advance(self, t: float) -> None:
    dt = t - self.now
    if dt > 0:
      self.slot_s += dt * self.pool.slots
      self.held_s += dt * len(self.pool.runs)
      self.train_s += dt * self.trainer.nodes
      self.trained_s += self.trainer.advance(dt) * self.trainer.nodes
      self.pool.advance(dt)
      self.now = t

  def next_event(self) -> Any:
    """Moves the clock to the next event and returns it."""
    end, execution = self.pool.next_end(self.now)
    drained = self.trainer.next_drained(self.now)
    timed = self.timed[0][0] if self.timed else math.inf
    t = min(end, drained, timed)
    if t == math.inf:
      raise SimulationError(
        f"nothing can happen after {self.now:.0f} s: "
        f"{len(self.applied)} of {self.steps} updates applied, "
        f"{len(self.pool.runs)} executions run on {self.pool.nodes:g} nodes"
      )
    self.advance(t)
    if t == timed:
      event = heapq.heappop(self.timed)[2]
      if isinstance(event, scheduler.SwitchDone):
        to = {"to_train": "train", "to_rollout": "rollout"}
        self._set_role(event.cell, to[self.role[event.cell]])
      return event
    if t == drained:
      self.trainer.left = 0.0
      self.trainer.drained = True
      return scheduler.Drained(t, self.trainer.update)
    return self._end(execution)

  def _end(self, execution: ExecutionId) -> Any:
    run = self.pool.remove(execution)
    self.durations.append(self.now - run.start)
    group = execution[0]
    self.unfinished[group] -= 1
    if not self.unfinished[group]:
      self.group_durations.append(self.now - self.first_start[group])
    scored = self.workload.work(execution).scored
    return scheduler.Finished(self.now, execution, scored)

  def after(self, seconds: float, make: Callable[[float], Any]) -> None:
    """Something will have happened in `seconds`."""
    t = self.now + seconds
    heapq.heappush(self.timed, (t, next(self.order), make(t)))

  def _check_place(self, execution: ExecutionId, name: str) -> None:
    cell = self.cells[name]
    if self.role[name] != "rollout":
      raise SimulationError(
        f"execution {execution} placed on {name}, whose role is "
        f"{self.role[name]}"
      )
    if self.pool.held[name] >= cell.slots:
      raise SimulationError(
        f"execution {execution} placed on {name}, whose {cell.slots} slots "
        "are taken"
      )

  def execute(self, action: Any) -> None:
    """Carries out one action."""
    kind = type(action).__name__
    method = getattr(self, f"_do_{kind.lower()}", None)
    if method is None:
      raise SimulationError(f"the clock has no {kind}")
    method(action)

  def _do_admit(self, a) -> None:
    self.version[a.group] = a.version
    self.unfinished[a.group] = self.law.group_size

  def _do_start(self, a) -> None:
    self._check_place(a.execution, a.cell)
    self.first_start.setdefault(a.execution[0], self.now)
    self.pool.place(a.execution, a.cell, self.now)

  def _do_migrate(self, a) -> None:
    run = self.pool.runs[a.execution]
    if run.cell != a.source:
      raise SimulationError(
        f"execution {a.execution} runs on {run.cell}, not {a.source}"
      )
    self._check_place(a.execution, a.target)
    self.pool.move(a.execution, a.target)
    self.migrations += 1

  def _do_switch(self, a) -> None:
    before = {"train": "rollout", "rollout": "train"}[a.role]
    if self.role[a.cell] != before:
      raise SimulationError(
        f"switch of {a.cell} to {a.role}, whose role is {self.role[a.cell]}"
      )
    if self.pool.held[a.cell]:
      raise SimulationError(
        f"{a.cell} leaves with {self.pool.held[a.cell]} executions"
      )
    self._set_role(a.cell, f"to_{a.role}")
    seconds = getattr(self.costs, f"to_{a.role}")
    self.after(
      seconds, lambda t: scheduler.SwitchDone(t, a.cell, ticket=a.ticket)
    )
    self.switches += 1

  def _do_consume(self, a) -> None:
    if self.unfinished[a.group]:
      raise SimulationError(
        f"group {a.group} consumed with {self.unfinished[a.group]} executions "
        "unfinished"
      )
    # Version of the trainer just before update u: u - 1.
    d = a.update - 1 - self.version.pop(a.group)
    self.staleness.append((a.update, a.group, d))
    self.trainer.consume(a.update)

  def _do_apply(self, a) -> None:
    if not self.trainer.drained or a.update != self.trainer.update:
      raise SimulationError(f"update {a.update} applied before it is drained")
    self.trainer.applied()
    self.applied.append(self.now)
    self.after(0.0, lambda t: scheduler.Applied(t, a.update))

  def _do_publish(self, a) -> None:
    self.after(self.costs.publish, lambda t: scheduler.Published(t, a.version))

  def _do_drop(self, a) -> None:
    del self.version[a.group]
    for index in range(self.law.group_size):
      self.pool.remove((a.group, index))
    self.dropped += 1

  def _do_stop(self, a) -> None:
    self.stopped = True

  def result(self) -> Result:
    end = self.applied[-1]
    for name in self.cells:
      self._set_role(name, self.role[name])
    spans = [
      dataclasses.replace(s, end=min(s.end, end))
      for s in sorted(self.spans, key=lambda s: (s.start, s.cell))
      if s.start < end
    ]
    return Result(
      seconds=end,
      applied=tuple(self.applied),
      staleness=tuple(self.staleness),
      spans=tuple(spans),
      switches=self.switches,
      migrations=self.migrations,
      executions=len(self.durations),
      dropped=self.dropped,
      durations=tuple(self.durations),
      group_durations=tuple(self.group_durations),
      rollout_busy=self.held_s / self.slot_s if self.slot_s else 0.0,
      train_busy=self.trained_s / self.train_s if self.train_s else 0.0,
      decisions=tuple(self.decisions or ()),
    )


def simulate(
  layout: Layout,
  law: Law,
  workload: Workload,
  costs: Costs,
  *,
  steps: int,
  streaming: bool = True,
  policy: str | policies.Policy = "waterlevel",
  record: bool = False,
) -> Result:
  """Runs `steps` updates under the scheduler's rule.

  Args:
    layout: the cells; `Cell.nodes` and `Cell.slots` are what count here.
    law: of dispatch.
    workload: what executions need.
    costs: what things cost.
    steps: optimizer updates.
    streaming: train a group as soon as it is whole.
    policy: of the scheduler.
    record: keep every event and its actions in `Result.decisions`.

  Returns:
    The run, until its last update is applied.

  Raises:
    SimulationError: the scheduler asked for what cannot be, or waits for what
      will not come.
    ValueError: an argument is refused by the scheduler.
  """
  state = scheduler.begin(
    layout,
    law,
    streaming=streaming,
    policy=policy,
    steps=steps,
  )
  clock = _Clock(layout, law, workload, costs, steps, record)
  event: Any = scheduler.Begin(0.0)
  while True:
    state, actions = scheduler.decide(state, event)
    if clock.decisions is not None:
      clock.decisions.append((event, actions))
    for action in actions:
      clock.execute(action)
    if clock.stopped or len(clock.applied) >= steps:
      break
    event = clock.next_event()
  return clock.result()


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
  """Mean and sample standard deviation (0 for one value)."""
  mean = sum(values) / len(values)
  if len(values) < 2:
    return mean, 0.0
  var = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
  return mean, math.sqrt(var)
