"""How a call comes to the cell that holds its execution, until it has ended.

It waits where no cell serves it, leaves a cell that fails or that its
execution has left, and goes on from what was sampled.
"""

from __future__ import annotations

import asyncio

from gyre import types
from gyre.rollout import calls, routes
from gyre.rollout import engine as engine_lib

# An engine's version may rise without a word to the router.
_LOOK_AGAIN_S = 0.1
# For a task that was cancelled to end.
_CANCELLED_S = 5.0


class Courier:
  """Takes calls to the cells of a table; see router.Router."""

  def __init__(self, table: routes.Table, *, patience_s: float, leave_s: float):
    """Has no call yet.

    Args:
      table: says where a call belongs, and is told of cells that fail.
      patience_s: a call without a cell waits so long, then EngineDown.
      leave_s: a cell that does not give a call up in this time has failed.
    """
    self._table = table
    self._patience_s, self._leave_s = patience_s, leave_s

  async def deliver(self, call: routes.Call) -> types.FinishReason:
    """Has a call served, by as many cells as it takes.

    Args:
      call: that has entered the table.

    Returns:
      Why it ended; what was sampled is in its partial.

    Raises:
      Rejected, StaleVersion, EngineDown: see router.Router.generate.
    """
    ended = call.partial.ended
    while ended is None:
      cell = await self._placed(call)
      if cell is None:
        return "abort"
      ended = await self._attempt(call, cell) or call.partial.ended
    return ended

  async def _placed(self, call: routes.Call) -> routes.Cell | None:
    """Waits for a cell that may serve the call; None once it is aborted."""
    loop, table = asyncio.get_running_loop(), self._table
    if call.waits_since is None:
      call.waits_since = loop.time()
    while not call.aborted:
      table.check_open()
      wanted = table.version_of(call)
      cell = None if table.paused else table.cell_of(call, wanted)
      serves = None if cell is None else routes.stats_of(cell.engine).version
      if serves is not None and serves >= wanted and call.refused is None:
        return cell
      if table.paused:
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
    placed = self._table.placed(call.execution_id)
    raise engine_lib.EngineDown(
      f"no cell served {where} for {self._patience_s:g} s"
      + (f": {placed.down}" if placed is not None and placed.down else "")
    )

  async def _attempt(
    self, call: routes.Call, cell: routes.Cell
  ) -> types.FinishReason | None:
    """Sends a call to a cell, until it has ended or must leave.

    Returns:
      Why the call ended, or None: it goes on elsewhere.
    """
    name, table = call.new_name(), self._table
    work = asyncio.ensure_future(
      call.partial.send(
        cell.engine, request_id=name, min_version=table.version_of(call)
      )
    )
    table.arrive(call, cell)
    leaves = False
    try:
      while not work.done():
        signal = call.next_signal()
        leaves = table.closed or table.cell_of(call) is not cell
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
        table.depart(call)

  async def _end(
    self, call: routes.Call, cell: routes.Cell, name: str, work: asyncio.Future
  ) -> None:
    """Has the engine give a call back; one that cannot has failed."""
    ending = asyncio.ensure_future(
      calls.end(cell.engine, name, work, self._leave_s)
    )
    try:
      while not ending.done() and self._table.is_up(cell):
        signal = call.next_signal()
        await asyncio.wait({ending, signal}, return_when="FIRST_COMPLETED")
    finally:
      ending.cancel()
    if not work.done():
      self._failed(
        cell,
        f"{cell.name} did not give up {name} within {self._leave_s:g} s",
      )

  def _failed(self, cell: routes.Cell, why: str) -> None:
    if self._table.is_up(cell):
      self._table.fail(cell, engine_lib.EngineDown(why))

  def _result(
    self,
    call: routes.Call,
    cell: routes.Cell,
    work: asyncio.Future,
    leaves: bool,
  ) -> types.FinishReason | None:
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
