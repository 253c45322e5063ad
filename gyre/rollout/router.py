"""Many engines as one: an execution's requests go to the cell that holds it.

Where an execution is, the scheduler says. When it moves, its live calls are
cancelled at the source, which gives back what it sampled, and go on at the
target from prompt and partial; whoever waits for a call sees one completion,
each token with the version that sampled it. A cell that fails is left the same
way, with what it had streamed. A call for which no cell serves waits.

All of this belongs to one event loop, and each call to the task that made it:
a caller that is cancelled leaves nothing behind at any engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from gyre.rollout import calls, routes
from gyre.rollout import engine as engine_lib

OnDown = Callable[[str, engine_lib.EngineDown], None]

# An engine's version may rise without a word to the router.
_LOOK_AGAIN_S = 0.1
# For a task that was cancelled to end.
_CANCELLED_S = 5.0


class Router:
  """An `engine.Engine` over the engines of several cells.

  Engines are their givers' to close; the router only finds them work.
  """

  def __init__(
    self,
    *,
    name: str = "router",
    patience_s: float = 600.0,
    leave_s: float = 30.0,
    on_down: OnDown | None = None,
  ):
    """No cell yet.

    Args:
      name: of the engine that this is.
      patience_s: a call without a cell waits so long, then EngineDown.
      leave_s: a cell that does not give a call up in this time has failed.
      on_down: told (cell, why) once when a cell fails.
    """
    self.name = name
    self._patience_s, self._leave_s = patience_s, leave_s
    self._on_down = on_down
    self._cells: dict[str, routes.Cell] = {}
    self._routes: dict[str, routes.Route] = {}
    self._calls: dict[str, routes.Call] = {}
    self._of: dict[str, set[routes.Call]] = {}
    self._past = dict.fromkeys(routes.COUNTERS, 0)
    self._numbers = 0
    self._paused = False
    self._closed = False
    self._left = asyncio.Event()

  # Cells.

  def add(
    self, cell: str, engine: engine_lib.Engine, *, serving: bool = True
  ) -> None:
    """A cell's engine; under a known name, a new engine in its place.

    Calls at the old engine are taken from it unasked, with what it streamed.

    Args:
      cell: its name.
      engine: that cell's.
      serving: whether it takes calls already; else `serve` says so.
    """
    old = self._cells.pop(cell, None)
    self._cells[cell] = routes.Cell(cell, engine, serving)
    self._retire(old)
    self._signal_all()

  def remove(self, cell: str) -> None:
    """Forgets a cell; its executions are nowhere, its calls wait.

    Raises:
      ValueError: no such cell.
    """
    old = self._cell(cell)
    del self._cells[cell]
    for route in self._routes.values():
      if route.cell == cell:
        route.cell = None
    self._retire(old)

  def _retire(self, old: routes.Cell | None) -> None:
    if old is None:
      return
    old.serving = False
    stats = routes.stats_of(old.engine)
    for name in routes.COUNTERS:
      self._past[name] += getattr(stats, name)
    old.signal()

  def engine(self, cell: str) -> engine_lib.Engine:
    """The engine of a cell.

    Raises:
      ValueError: no such cell.
    """
    return self._cell(cell).engine

  def _cell(self, name: str) -> routes.Cell:
    if name not in self._cells:
      known = ", ".join(self._cells) or "none"
      raise ValueError(f"no cell {name!r}; there are: {known}")
    return self._cells[name]

  @property
  def serving(self) -> tuple[str, ...]:
    """The cells that take calls."""
    return tuple(name for name, c in self._cells.items() if c.serving)

  def serve(self, cell: str) -> None:
    """A cell takes calls, from now on.

    Raises:
      ValueError: no such cell.
      EngineDown: it failed, and no new engine was added under its name.
    """
    found = self._cell(cell)
    if found.down is not None:
      raise found.down
    found.serving = True
    self._signal_all()

  def fail(self, cell: str, error: engine_lib.EngineDown) -> None:
    """A cell has failed: its calls go on elsewhere, when they are placed.

    Raises:
      ValueError: no such cell.
    """
    found = self._cell(cell)
    if found.down is not None:
      return
    found.serving, found.down = False, error
    found.signal()
    if self._on_down is not None:
      self._on_down(cell, error)

  async def drain(
    self, cell: str, targets: Mapping[str, str] | None = None
  ) -> list[str]:
    """A cell takes no more calls, and gives up those that it has.

    Args:
      cell: its name.
      targets: where its executions move to; those not named are nowhere
        until they are placed. Executions of other cells may be named too.

    Returns:
      The executions that were there, once its engine holds no call of this
      router: it may sleep.

    Raises:
      ValueError: no such cell, or one that is its own target.
      EngineDown: it failed; its calls have left nevertheless.
    """
    source = self._cell(cell)
    targets = targets or {}
    for execution_id, target in targets.items():
      if self._cell(target) is source:
        raise ValueError(f"{execution_id} cannot move from {cell} to {target}")
    source.serving = False
    leaving = self.executions(cell)
    for execution_id in leaving:
      self._routes[execution_id].cell = None
    for execution_id, target in targets.items():
      self.place(execution_id, target)
    source.signal()
    await self._until(lambda: source.serving or not source.calls)
    if source.down is not None:
      raise source.down
    return leaving

  async def _until(self, holds: Callable[[], bool]) -> None:
    """Waits for what can only come true when a call leaves a cell."""
    while not holds():
      await self._left.wait()

  # Executions.

  def place(
    self, execution_id: str, cell: str, *, version: int | None = None
  ) -> None:
    """An execution's calls go to this cell; live ones leave where they are.

    Args:
      execution_id: whose.
      cell: where to; it need not serve yet.
      version: of its admission: no engine that serves less gets its calls.
        None keeps what was said before, or 0.

    Raises:
      ValueError: no such cell.
    """
    self._cell(cell)
    route = self._routes.setdefault(execution_id, routes.Route())
    route.cell = cell
    if version is not None:
      route.version = version
    for call in self._of.get(execution_id, ()):
      call.signal()

  async def move(self, execution_id: str, cell: str) -> None:
    """As `place`; returns when no other cell holds a call of it.

    Raises:
      ValueError: no such cell.
    """
    self.place(execution_id, cell)
    mine = self._of.get(execution_id, set())
    await self._until(
      lambda: all(call.at is None or call.at.name == cell for call in mine)
    )

  def forget(self, execution_id: str) -> None:
    """An execution has ended."""
    self._routes.pop(execution_id, None)
    for call in self._of.get(execution_id, ()):
      call.signal()

  def executions(self, cell: str) -> list[str]:
    """The executions placed there.

    Raises:
      ValueError: no such cell.
    """
    self._cell(cell)
    return [e for e, route in self._routes.items() if route.cell == cell]

  def anywhere(self) -> engine_lib.Engine:
    """This router, for requests that any cell may serve (evaluation)."""
    return _Anywhere(self)

  # Calls.

  async def generate(
    self,
    request: engine_lib.Request,
    on_token: engine_lib.OnToken | None = None,
  ) -> engine_lib.Completion:
    """See engine.Engine; finish_reason "abort" only by abort or pause.

    Raises:
      Rejected: of the engine; or its request_id is being served.
      StaleVersion: patience ended and the cell still served older weights.
      EngineDown: patience ended and no cell served; or this was closed.
    """
    call = self._enter(request, on_token)
    try:
      while (ended := call.partial.ended) is None:
        cell = await self._placed(call)
        if cell is None:
          return call.partial.completion("abort")
        ended = await self._attempt(call, cell)
        if ended is not None:
          break
      return call.partial.completion(ended)
    finally:
      self._leave(call)

  def _enter(self, request: engine_lib.Request, on_token) -> routes.Call:
    self._check_open()
    self._numbers += 1
    name = request.request_id or f"{self.name}-{self._numbers}"
    if name in self._calls:
      raise engine_lib.Rejected(f"request_id {name!r} is being served")
    partial = calls.Partial(request, on_token)
    call = routes.Call(partial, name)
    self._calls[name] = call
    self._of.setdefault(call.execution_id, set()).add(call)
    return call

  def _leave(self, call: routes.Call) -> None:
    del self._calls[call.name]
    mine = self._of[call.execution_id]
    mine.discard(call)
    if not mine:
      del self._of[call.execution_id]

  def _check_open(self) -> None:
    if self._closed:
      raise engine_lib.EngineDown(f"{self.name} is closed")

  def _signal_all(self) -> None:
    for call in self._calls.values():
      call.signal()

  def _cell_of(self, call: routes.Call, version: int = 0) -> routes.Cell | None:
    """Where a call should be: a cell that serves, or None."""
    if call.execution_id:
      route = self._routes.get(call.execution_id)
      cell = self._cells.get(route.cell) if route and route.cell else None
      return cell if cell is not None and cell.serving else None
    if call.at is not None and call.at.serving:
      return call.at
    serving = [c for c in self._cells.values() if c.serving]
    fresh = [c for c in serving if routes.stats_of(c.engine).version >= version]
    return min(fresh or serving, key=lambda c: len(c.calls), default=None)

  def _version_of(self, call: routes.Call) -> int:
    """The least version that may serve a call."""
    route = self._routes.get(call.execution_id)
    return max(call.partial.request.min_version, route.version if route else 0)

  async def _placed(self, call: routes.Call) -> routes.Cell | None:
    """Waits for a cell that may serve the call; None once it is aborted."""
    loop = asyncio.get_running_loop()
    if call.waits_since is None:
      call.waits_since = loop.time()
    while not call.aborted:
      self._check_open()
      wanted = self._version_of(call)
      cell = None if self._paused else self._cell_of(call, wanted)
      serves = None if cell is None else routes.stats_of(cell.engine).version
      if serves is not None and serves >= wanted and call.refused is None:
        return cell
      if self._paused:
        call.waits_since = loop.time()
      left = call.waits_since + self._patience_s - loop.time()
      if left <= 0:
        self._give_up(call, cell, serves, wanted)
      await call.wait(left if cell is None else min(left, _LOOK_AGAIN_S))
      call.refused = None
    return None

  def _give_up(self, call, cell, serves, wanted) -> None:
    if call.refused is not None:
      raise call.refused
    where = call.execution_id or call.name
    if cell is not None:
      raise engine_lib.StaleVersion(
        f"{cell.name} serves version {serves}, {where} was promised {wanted}"
      )
    route = self._routes.get(call.execution_id)
    found = self._cells.get(route.cell) if route and route.cell else None
    raise engine_lib.EngineDown(
      f"no cell served {where} for {self._patience_s:g} s"
      + (f": {found.down}" if found is not None and found.down else "")
    )

  async def _attempt(self, call: routes.Call, cell: routes.Cell) -> str | None:
    """Sends a call to a cell, until it has ended or must leave.

    Returns:
      Why the call ended, or None: it goes on elsewhere.
    """
    name, engine = call.new_name(), cell.engine
    work = asyncio.ensure_future(
      call.partial.send(
        engine, request_id=name, min_version=self._version_of(call)
      )
    )
    cell.calls.add(call)
    call.at = cell
    leaves = False
    try:
      while not work.done():
        signal = call.next_signal()
        leaves = self._closed or self._cell_of(call) is not cell
        if call.aborted or leaves:
          await self._end(call, cell, name, work)
          break
        await asyncio.wait({work, signal}, return_when="FIRST_COMPLETED")
      return self._result(call, cell, work, leaves)
    finally:
      try:
        if not work.done():
          work.cancel()
          await asyncio.wait({work}, timeout=_CANCELLED_S)
      finally:
        if work.done() and not work.cancelled():
          work.exception()  # is known, or nobody is left to know it
        cell.calls.discard(call)
        call.at = None
        self._left.set()
        self._left = asyncio.Event()

  async def _end(
    self, call: routes.Call, cell: routes.Cell, name: str, work: asyncio.Future
  ) -> None:
    """Has the engine give a call back; one that cannot has failed."""
    ending = asyncio.ensure_future(
      calls.end(cell.engine, name, work, self._leave_s)
    )
    try:
      while not ending.done() and self._is_up(cell):
        signal = call.next_signal()
        await asyncio.wait({ending, signal}, return_when="FIRST_COMPLETED")
    finally:
      ending.cancel()
    if not work.done():
      self._failed(
        cell,
        f"{cell.name} did not give up {name} within {self._leave_s:g} s",
      )

  def _is_up(self, cell: routes.Cell) -> bool:
    known = self._cells.get(cell.name) is cell
    return known and cell.down is None and not self._closed

  def _failed(self, cell: routes.Cell, why: str) -> None:
    if self._is_up(cell):
      self.fail(cell.name, engine_lib.EngineDown(why))

  def _result(
    self,
    call: routes.Call,
    cell: routes.Cell,
    work: asyncio.Future,
    leaves: bool,
  ) -> str | None:
    """As `_attempt`, of work that is done or was given up."""
    if not work.done():
      return None
    if work.cancelled():
      self._failed(cell, f"{cell.name} cancelled {call.name}")
      return None
    error = work.exception()
    if isinstance(error, engine_lib.EngineDown):
      self._failed(cell, str(error))
      return None
    if isinstance(error, engine_lib.StaleVersion):
      call.refused = error
      return None
    if error is not None:
      raise error
    call.waits_since = None
    reason = work.result()
    return None if reason == "abort" and leaves else reason

  async def abort(self, request_id: str) -> bool:
    """See engine.Engine."""
    call = self._calls.get(request_id)
    if call is None:
      return False
    call.abort()
    return True

  # All cells at once.

  async def _each(self, act: Callable[[engine_lib.Engine], Any], cells) -> None:
    """Acts on cells together; one that is down is failed, not raised."""
    cells = list(cells)
    results = await asyncio.gather(
      *(act(cell.engine) for cell in cells), return_exceptions=True
    )
    for cell, result in zip(cells, results, strict=True):
      if isinstance(result, engine_lib.EngineDown):
        if self._cells.get(cell.name) is cell:
          self.fail(cell.name, result)
      elif isinstance(result, BaseException):
        raise result
    self._signal_all()

  def _up(self) -> list[routes.Cell]:
    return [c for c in self._cells.values() if c.down is None]

  async def pause(self, keep: bool = True) -> None:
    """See engine.Engine; cells added later are paused likewise."""
    self._paused = True
    if not keep:
      for call in self._calls.values():
        call.abort()
    await self._each(lambda e: e.pause(keep), self._up())

  async def resume(self) -> None:
    """See engine.Engine."""
    self._paused = False
    await self._each(lambda e: e.resume(), self._up())

  async def load_weights(self, weights: Any, version: int) -> None:
    """See engine.Engine; all cells that serve take them, at once.

    Raises:
      StaleVersion: a cell serves newer ones; the others have taken them.
      EngineDown: no cell serves.
    """
    await self._each(
      lambda e: e.load_weights(weights, version),
      (c for c in self._up() if c.serving),
    )
    if not self.serving:
      raise engine_lib.EngineDown(f"no cell serves version {version}")

  async def sleep(self) -> None:
    """See engine.Engine."""
    await self._each(lambda e: e.sleep(), self._up())

  async def wake(self) -> None:
    """See engine.Engine."""
    await self._each(lambda e: e.wake(), self._up())

  def cell_stats(self) -> dict[str, engine_lib.EngineStats]:
    """The counts of each cell's engine."""
    return {name: routes.stats_of(c.engine) for name, c in self._cells.items()}

  def stats(self) -> engine_lib.EngineStats:
    """See engine.Engine.

    Returns:
      Sums over cells, past engines' counters included; `version` is the least
      that a serving cell has, `waiting` also counts calls without a cell.
    """
    each = self.cell_stats()
    versions = [each[name].version for name in self.serving]
    return routes.total(
      each.values(),
      self._past,
      version=min(versions or [s.version for s in each.values()], default=0),
      waiting=sum(call.at is None for call in self._calls.values()),
      paused=self._paused,
    )

  async def close(self) -> None:
    """Ends all calls with EngineDown; the engines are not closed."""
    self._closed = True
    self._signal_all()
    await self._until(lambda: not any(c.at for c in self._calls.values()))


class _Anywhere:
  """A router whose requests belong to no execution."""

  def __init__(self, router: Router):
    self._router = router
    self.name = router.name

  async def generate(
    self,
    request: engine_lib.Request,
    on_token: engine_lib.OnToken | None = None,
  ) -> engine_lib.Completion:
    return await self._router.generate(
      dataclasses.replace(request, execution_id=""), on_token
    )

  def __getattr__(self, name: str) -> Any:
    return getattr(self._router, name)
