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

from gyre.rollout import calls, delivery, routes
from gyre.rollout import engine as engine_lib


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
    on_down: routes.OnDown | None = None,
  ):
    """No cell yet.

    Args:
      name: of the engine that this is.
      patience_s: a call without a cell waits so long, then EngineDown.
      leave_s: a cell that does not give a call up in this time has failed.
      on_down: told (cell, why) once when a cell fails.
    """
    self.name = name
    self._table = routes.Table(name, on_down)
    self._courier = delivery.Courier(
      self._table, patience_s=patience_s, leave_s=leave_s
    )
    self._past = dict.fromkeys(engine_lib.COUNTERS, 0)
    self._numbers = 0

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
    old = self._table.cells.pop(cell, None)
    self._table.cells[cell] = routes.Cell(cell, engine, serving)
    self._retire(old)
    self._table.signal_all()

  def remove(self, cell: str) -> None:
    """Forgets a cell; its executions are nowhere, its calls wait.

    Raises:
      ValueError: no such cell.
    """
    old = self._table.cell(cell)
    del self._table.cells[cell]
    for route in self._table.routes.values():
      if route.cell == cell:
        route.cell = None
    self._retire(old)

  def _retire(self, old: routes.Cell | None) -> None:
    if old is None:
      return
    old.serving = False
    stats = routes.stats_of(old.engine)
    for name in engine_lib.COUNTERS:
      self._past[name] += getattr(stats, name)
    old.signal()

  def engine(self, cell: str) -> engine_lib.Engine:
    """The engine of a cell.

    Raises:
      ValueError: no such cell.
    """
    return self._table.cell(cell).engine

  @property
  def serving(self) -> tuple[str, ...]:
    """The cells that take calls."""
    return tuple(name for name, c in self._table.cells.items() if c.serving)

  def serve(self, cell: str) -> None:
    """A cell takes calls, from now on.

    Raises:
      ValueError: no such cell.
      EngineDown: it failed, and no new engine was added under its name.
    """
    found = self._table.cell(cell)
    if found.down is not None:
      raise found.down
    found.serving = True
    self._table.signal_all()

  def fail(self, cell: str, error: engine_lib.EngineDown) -> None:
    """A cell has failed: its calls go on elsewhere, when they are placed.

    Raises:
      ValueError: no such cell.
    """
    self._table.fail(self._table.cell(cell), error)

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
    source = self._table.cell(cell)
    targets = targets or {}
    for execution_id, target in targets.items():
      if self._table.cell(target) is source:
        raise ValueError(f"{execution_id} cannot move from {cell} to {target}")
    source.serving = False
    leaving = self.executions(cell)
    for execution_id in leaving:
      self._table.routes[execution_id].cell = None
    for execution_id, target in targets.items():
      self.place(execution_id, target)
    source.signal()
    await self._table.until(lambda: source.serving or not source.calls)
    if source.down is not None:
      raise source.down
    return leaving

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
    self._table.cell(cell)
    route = self._table.routes.setdefault(execution_id, routes.Route())
    route.cell = cell
    if version is not None:
      route.version = version
    for call in self._table.calls_of(execution_id):
      call.signal()

  async def move(self, execution_id: str, cell: str) -> None:
    """As `place`; returns when no other cell holds a call of it.

    Raises:
      ValueError: no such cell.
    """
    self.place(execution_id, cell)
    mine = self._table.calls_of(execution_id)
    await self._table.until(
      lambda: all(call.at is None or call.at.name == cell for call in mine)
    )

  def forget(self, execution_id: str) -> None:
    """An execution has ended."""
    self._table.routes.pop(execution_id, None)
    for call in self._table.calls_of(execution_id):
      call.signal()

  def executions(self, cell: str) -> list[str]:
    """The executions placed there.

    Raises:
      ValueError: no such cell.
    """
    self._table.cell(cell)
    return [e for e, route in self._table.routes.items() if route.cell == cell]

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
      return call.partial.completion(await self._courier.deliver(call))
    finally:
      self._table.leave(call)

  def _enter(self, request: engine_lib.Request, on_token) -> routes.Call:
    self._table.check_open()
    self._numbers += 1
    name = request.request_id or f"{self.name}-{self._numbers}"
    call = routes.Call(calls.Partial(request, on_token), name)
    self._table.enter(call)
    return call

  async def abort(self, request_id: str) -> bool:
    """See engine.Engine."""
    call = self._table.calls.get(request_id)
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
        if self._table.cells.get(cell.name) is cell:
          self._table.fail(cell, result)
      elif isinstance(result, BaseException):
        raise result
    self._table.signal_all()

  def _up(self) -> list[routes.Cell]:
    return [c for c in self._table.cells.values() if c.down is None]

  async def pause(self, keep: bool = True) -> None:
    """See engine.Engine; cells added later are paused likewise."""
    self._table.paused = True
    if not keep:
      for call in self._table.calls.values():
        call.abort()
    await self._each(lambda e: e.pause(keep), self._up())

  async def resume(self) -> None:
    """See engine.Engine."""
    self._table.paused = False
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
    return {
      name: routes.stats_of(c.engine) for name, c in self._table.cells.items()
    }

  def stats(self) -> engine_lib.EngineStats:
    """See engine.Engine.

    Returns:
      Sums over cells, past engines' counters included; `version` is the least
      that a serving cell has, `waiting` also counts calls without a cell.
    """
    each = self.cell_stats()
    versions = [each[name].version for name in self.serving]
    return engine_lib.total(
      each.values(),
      self._past,
      version=min(versions or [s.version for s in each.values()], default=0),
      waiting=sum(call.at is None for call in self._table.calls.values()),
      paused=self._table.paused,
    )

  async def close(self) -> None:
    """Ends all calls with EngineDown; the engines are not closed."""
    self._table.closed = True
    self._table.signal_all()
    await self._table.until(
      lambda: not any(c.at for c in self._table.calls.values())
    )


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
