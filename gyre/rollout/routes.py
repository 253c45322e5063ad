"""What a router knows: cells, where executions are, calls under way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterable, Mapping

from gyre.rollout import calls
from gyre.rollout import engine as engine_lib

COUNTERS = (
  "prompt_tokens",
  "hit_tokens",
  "prefilled_tokens",
  "reprefilled_tokens",
  "generated_tokens",
  "decode_steps",
  "prefill_steps",
  "preemptions",
  "finished",
  "compilations",
)
_GAUGES = ("running", "waiting", "cached_tokens", "free_pages", "total_pages")


@dataclasses.dataclass(eq=False)
class Cell:
  """An engine under a name.

  Attributes:
    name, engine: as given.
    serving: whether calls may be sent there.
    down: why it failed, or None.
    calls: that are there now.
  """

  name: str
  engine: engine_lib.Engine
  serving: bool
  down: engine_lib.EngineDown | None = None
  calls: set[Call] = dataclasses.field(default_factory=set)

  def signal(self) -> None:
    """Something that concerns the calls here has changed."""
    for call in self.calls:
      call.signal()


@dataclasses.dataclass
class Route:
  """Where an execution is (None: nowhere yet), and the version promised."""

  cell: str | None = None
  version: int = 0


class Call:
  """One generate() under way.

  Attributes:
    partial: what it has so far.
    name: its request id.
    execution_id: whose it is; empty: any cell will do.
    at: the cell that works on it, or None.
    aborted: its caller wants no more.
    waits_since: when it last lost its cell, or None.
    refused: the error of an engine that holds older weights than it said.
  """

  def __init__(self, partial: calls.Partial, name: str):
    self.partial, self.name = partial, name
    self.execution_id = partial.request.execution_id
    self.at: Cell | None = None
    self.aborted = False
    self.waits_since: float | None = None
    self.refused: engine_lib.StaleVersion | None = None
    self._attempts = 0
    self._signal: asyncio.Future | None = None

  def new_name(self) -> str:
    """Names the next attempt: no engine hears a name twice."""
    self._attempts += 1
    n = self._attempts
    return self.name if n == 1 else f"{self.name}~{n}"

  def abort(self) -> None:
    """Its caller wants no more."""
    self.aborted = True
    self.signal()

  def signal(self) -> None:
    """Something that concerns this call has changed."""
    if self._signal is not None and not self._signal.done():
      self._signal.set_result(None)

  def next_signal(self) -> asyncio.Future:
    """Is done when `signal` is next called."""
    self._signal = asyncio.get_running_loop().create_future()
    return self._signal

  async def wait(self, timeout_s: float) -> None:
    """Waits for the next signal, or so long."""
    await asyncio.wait({self.next_signal()}, timeout=timeout_s)


def stats_of(engine: engine_lib.Engine) -> engine_lib.EngineStats:
  """An engine's counts; of one that is gone, none."""
  with contextlib.suppress(engine_lib.EngineError):
    return engine.stats()
  return engine_lib.EngineStats()


def total(
  each: Iterable[engine_lib.EngineStats],
  past: Mapping[str, int],
  *,
  version: int,
  waiting: int,
  paused: bool,
) -> engine_lib.EngineStats:
  """Counts of many engines as one's.

  Args:
    each: of the engines.
    past: counters of engines that are no more.
    version, paused: of the whole.
    waiting: requests that are at no engine.

  Returns:
    Sums; asleep where all are.
  """
  each = list(each)
  sums = {k: sum(getattr(s, k) for s in each) for k in (*COUNTERS, *_GAUGES)}
  for name, count in past.items():
    sums[name] += count
  sums["waiting"] += waiting
  return engine_lib.EngineStats(
    version=version,
    paused=paused,
    asleep=bool(each) and all(s.asleep for s in each),
    **sums,
  )
