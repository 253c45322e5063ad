"""Watches a run's cells: event log, time line, roles on the console, perf/*."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gyre.elastic import scheduler as sched
from gyre.runtime import event_log
from gyre.runtime.record import Record
from gyre.store.rollouts import RolloutStore


def engine_of(cell: str) -> str:
  """Returns the name of a cell's engine, which is its track's too."""
  return cell.replace("cell", "engine")


class _Busy:
  """How long something is going on, over all of its parts and any of them."""

  def __init__(self, clock: Callable[[], float]):
    self._clock, self._at = clock, clock()
    self._now = self.parts = self.any = 0.0

  def set(self, count: float) -> None:
    """So many are going on from now on."""
    at = self._clock()
    self.parts += self._now * (at - self._at)
    self.any += (at - self._at) * (self._now > 0)
    self._at, self._now = at, count

  def add(self, count: float) -> None:
    """So many more are going on from now on."""
    self.set(self._now + count)

  def take(self) -> tuple[float, float]:
    """(cell-seconds, seconds with any) since the last call."""
    self.add(0)
    out, self.parts, self.any = (self.parts, self.any), 0.0, 0.0
    return out


class Watch:
  """See work.Observer."""

  def __init__(
    self,
    record: Record,
    store: RolloutStore,
    *,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Nothing is going on.

    Args:
      record: its time line has a track for each cell and engine.
      store: where events go.
      clock: seconds.
    """
    self._record, self._store = record, store
    self._clock, self._since = clock, clock()
    self._roles: dict[str, tuple[str, float]] = {}
    names = ("serving", "rollout", "training", "train", "switching")
    self._busy = {name: _Busy(clock) for name in names}
    self._switches = 0
    self._tokens = 0

  # What the conductor says.

  def decided(
    self,
    state: sched.State,
    event: sched.Event,
    actions: Sequence[sched.Action],
  ) -> None:
    """See work.Observer."""
    self._store.put_event(
      event_log.EVENT,
      event_log.record(event, actions),
      step=state.trainer.version,
      t=event.time,
    )
    serving = state.fleet.serving
    self._busy["rollout"].set(
      sum(bool(state.work.load.get(c)) for c in serving)
    )
    done, total = _progress(state)
    self._record.progress.phase("rollout", done, total)

  def role(self, cell: str, role: str) -> None:
    """See work.Observer."""
    before, since = self._roles.get(cell, ("", 0.0))
    if before == role:
      return
    now = time.time()
    if before in ("rollout", "train"):
      track = engine_of(cell) if before == "rollout" else cell
      self._record.timeline.complete(track, before, since, now)
    if role == "down":
      self._record.timeline.instant(cell, "down")
    self._roles[cell] = (role, now)
    self._record.progress.role(cell, role.replace("_", " "))
    for name, of in (
      ("serving", "rollout"),
      ("training", "train"),
      ("switching", "to "),
    ):
      self._busy[name].add(role.startswith(of) - before.startswith(of))
    self._switches += role.startswith("to ")

  def close(self) -> None:
    """The run ends, and with it the roles that cells still have."""
    for cell in self._roles:
      self.role(cell, "")

  @contextlib.contextmanager
  def span(self, cell: str, name: str, **args: Any) -> Iterator[None]:
    """See work.Observer."""
    trains = name not in ("to train", "to rollout", "resize")
    if trains:
      self._busy["train"].add(1)
    try:
      with self._record.timeline.span(cell, name, **args):
        yield
    finally:
      if trains:
        self._busy["train"].add(-1)

  def published(self, version: int) -> None:
    """Engines serve a version; those that do not now will, when they do."""
    serving = [c for c, (role, _) in self._roles.items() if role == "rollout"]
    for cell in serving or self._roles:
      self._record.timeline.instant(engine_of(cell), "publish", version=version)

  @contextlib.contextmanager
  def evaluating(self, step: int) -> Iterator[None]:
    """Is around an evaluation."""
    cells = [c for c, (role, _) in self._roles.items() if role == "rollout"]
    with contextlib.ExitStack() as stack:
      for cell in cells:
        stack.enter_context(
          self._record.timeline.span(engine_of(cell), "evaluation", step=step)
        )
      yield

  # What a line says.

  def take(
    self, generated_tokens: int, trained_tokens: int
  ) -> dict[str, float]:
    """Returns perf/* and elastic/* since the last call.

    Args:
      generated_tokens: by all engines, since they started.
      trained_tokens: of this step.
    """
    now = self._clock()
    busy = {name: b.take() for name, b in self._busy.items()}
    rollout_s, train_s = busy["rollout"][1], busy["train"][1]
    # The counts of an engine that died are lost with it.
    tokens = max(0, generated_tokens - self._tokens)
    step_s, self._since, self._tokens = now - self._since, now, generated_tokens
    switches, self._switches = self._switches, 0
    return {
      "perf/rollout_s": rollout_s,
      "perf/rollout_tokens_per_s": tokens / max(rollout_s, 1e-9),
      "perf/train_s": train_s,
      "perf/train_tokens_per_s": trained_tokens / max(train_s, 1e-9),
      "perf/step_s": step_s,
      "perf/rollout_idle": _idle(busy["rollout"][0], busy["serving"][0]),
      "perf/train_idle": _idle(busy["train"][0], busy["training"][0]),
      "elastic/switches": switches,
      "elastic/switch_s": busy["switching"][0],
    }


def _idle(busy: float, there: float) -> float:
  """Share of cell-seconds in a role in which the cell had nothing to do."""
  return max(0.0, 1 - busy / there) if there > 0 else 0.0


def _progress(state: sched.State) -> tuple[int, int]:
  """Executions of unconsumed groups that ended, and all of them."""
  size = state.law.group_size
  total = len(state.queue) * size
  return total - state.work.unfinished, total
