"""What a router knows: cells, where executions are, calls under way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Set

from gyre.rollout import calls
from gyre.rollout import engine as engine_lib

OnDown = Callable[[str, engine_lib.EngineDown], None]


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


class Table:
  """Cells, where executions are, and the calls under way.

  Attributes:
    name: of the engine that the cells are together.
    cells: by name.
    routes: by execution.
    calls: by request id.
    paused: no call is sent anywhere.
    closed: no call goes on.
  """

  def __init__(self, name: str, on_down: OnDown | None = None):
    """Empty.

    Args:
      name: as above.
      on_down: told (cell, why) once when a cell fails.
    """
    self.name = name
    self.cells: dict[str, Cell] = {}
    self.routes: dict[str, Route] = {}
    self.calls: dict[str, Call] = {}
    self.paused = self.closed = False
    self._on_down = on_down
    self._of: dict[str, set[Call]] = {}
    self._left = asyncio.Event()

  def check_open(self) -> None:
    """Raises EngineDown where this is closed."""
    if self.closed:
      raise engine_lib.EngineDown(f"{self.name} is closed")

  # Cells.

  def cell(self, name: str) -> Cell:
    """A cell.

    Raises:
      ValueError: no such cell.
    """
    if name not in self.cells:
      known = ", ".join(self.cells) or "none"
      raise ValueError(f"no cell {name!r}; there are: {known}")
    return self.cells[name]

  def is_up(self, cell: Cell) -> bool:
    """Whether it is still of use: known, not failed, and this not closed."""
    known = self.cells.get(cell.name) is cell
    return known and cell.down is None and not self.closed

  def fail(self, cell: Cell, error: engine_lib.EngineDown) -> None:
    """A cell has failed; only the first time counts."""
    if cell.down is not None:
      return
    cell.serving, cell.down = False, error
    cell.signal()
    if self._on_down is not None:
      self._on_down(cell.name, error)

  # Calls.

  def enter(self, call: Call) -> None:
    """A call begins.

    Raises:
      Rejected: its name is another's.
    """
    if call.name in self.calls:
      raise engine_lib.Rejected(f"request_id {call.name!r} is being served")
    self.calls[call.name] = call
    self._of.setdefault(call.execution_id, set()).add(call)

  def leave(self, call: Call) -> None:
    """A call has ended."""
    del self.calls[call.name]
    mine = self._of[call.execution_id]
    mine.discard(call)
    if not mine:
      del self._of[call.execution_id]

  def calls_of(self, execution_id: str) -> Set[Call]:
    """An execution's calls; they leave the set as they end."""
    return self._of.get(execution_id, frozenset())

  def signal_all(self) -> None:
    """Something that concerns all calls has changed."""
    for call in self.calls.values():
      call.signal()

  def arrive(self, call: Call, cell: Cell) -> None:
    """A cell works on a call."""
    cell.calls.add(call)
    call.at = cell

  def depart(self, call: Call) -> None:
    """The cell that works on a call holds it no more."""
    call.at.calls.discard(call)
    call.at = None
    self._left.set()
    self._left = asyncio.Event()

  async def until(self, holds: Callable[[], bool]) -> None:
    """Waits for what can only come true when a call leaves a cell."""
    while not holds():
      await self._left.wait()

  # Where calls belong.

  def cell_of(self, call: Call, version: int = 0) -> Cell | None:
    """Where a call should be: a cell that serves, or None."""
    if call.execution_id:
      cell = self.placed(call.execution_id)
      return cell if cell is not None and cell.serving else None
    if call.at is not None and call.at.serving:
      return call.at
    serving = [c for c in self.cells.values() if c.serving]
    fresh = [c for c in serving if stats_of(c.engine).version >= version]
    return min(fresh or serving, key=lambda c: len(c.calls), default=None)

  def placed(self, execution_id: str) -> Cell | None:
    """The cell that an execution is placed at, serving or not."""
    route = self.routes.get(execution_id)
    return self.cells.get(route.cell) if route and route.cell else None

  def version_of(self, call: Call) -> int:
    """The least version that may serve a call."""
    route = self.routes.get(call.execution_id)
    return max(call.partial.request.min_version, route.version if route else 0)


def stats_of(engine: engine_lib.Engine) -> engine_lib.EngineStats:
  """An engine's counts; of one that is gone, none."""
  with contextlib.suppress(engine_lib.EngineError):
    return engine.stats()
  return engine_lib.EngineStats()
