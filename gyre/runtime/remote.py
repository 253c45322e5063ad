"""Cells and engines of other processes, as the controller sees them.

RemoteEngine speaks engine.Engine, RemoteCell and RemoteCore speak cell.Worker
and cell.Core, over the Link that supervision (workers.py) keeps to a process.
When the process dies, what was asked of it raises WorkerDown; once it is back
it is an idle cell under the same objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.rollout import engine as engine_lib
from gyre.runtime import exchange, frames
from gyre.types import Batch, Snapshot


class WorkerDown(engine_lib.EngineDown):
  """The process of a cell has died, or is not up; what it held is lost."""


class WorkerError(engine_lib.EngineError):
  """A worker failed in a way that it does not foresee; its log tells more."""


@dataclasses.dataclass
class _Pending:
  future: asyncio.Future
  on_token: engine_lib.OnToken | None


class Link:
  """The connection to a worker's process, as long as there is one.

  Attributes:
    name: of the cell.
    role: of the cell, as its last answer said; "down" without a process.
    stats: of its engine, as last heard.
    heard: time of the event loop of the last message.
  """

  def __init__(self, name: str, directory: str | os.PathLike):
    """Is down at first.

    Args:
      name: of the cell.
      directory: on tmpfs, where arrays are shared from.
    """
    self.name, self.role = name, "down"
    self.stats = engine_lib.EngineStats()
    self.heard = 0.0
    self.incarnation = 0
    self._directory = directory
    self.up = False  # there is a process, and its cell is built
    self._why = f"{name} has not started"
    self._writer: asyncio.StreamWriter | None = None
    self._pending: dict[int, _Pending] = {}
    self._numbers = itertools.count(1)

  @property
  def connected(self) -> bool:
    """Whether there is a process to talk to; its cell may not be built."""
    return self._writer is not None

  def connect(self, writer: asyncio.StreamWriter) -> None:
    """A process is there, with nothing in it."""
    self._writer = writer
    self.stats = engine_lib.EngineStats()
    self.incarnation += 1
    self.heard = asyncio.get_running_loop().time()

  async def build(self, kind: str, options: Mapping[str, Any]) -> Any:
    """Has the process build its cell, and takes calls from then on."""
    about = await self._ask("start", (kind, dict(options)), None)
    self.up, self.role = True, "idle"
    return about

  def lost(self, why: str) -> None:
    """It is gone: everything asked of it raises WorkerDown."""
    if self._writer is not None:
      self._writer.close()
    self._writer, self.role, self._why = None, "down", why
    self.up = False
    self.stats = dataclasses.replace(self.stats, running=0, waiting=0)
    pending, self._pending = self._pending, {}
    for waiting in pending.values():
      if not waiting.future.done():
        waiting.future.set_exception(WorkerDown(why))

  def send(self, message: frames.Message) -> None:
    """Writes a message, unless the process has gone."""
    if self._writer is not None:
      self._writer.write(frames.encode(message))

  def receive(self, message: frames.Message) -> None:
    """Takes what the worker sent.

    Raises:
      FrameError: a worker does not send that.
    """
    self.heard = asyncio.get_running_loop().time()
    match message:
      case frames.Tokens():
        for call, *lists in message.items:
          pending = self._pending.get(call)
          if pending is not None and pending.on_token is not None:
            for token in zip(*lists, strict=True):
              pending.on_token(*token)
      case frames.Reply() | frames.Failure():
        if message.role and self.up:
          self.role = message.role
        if isinstance(message, frames.Reply):
          self._set_stats(message.stats)
        pending = self._pending.pop(message.id, None)
        if pending is None or pending.future.done():
          self.send(frames.Taken(message.id))
        else:
          pending.future.set_result(message)
      case frames.Pong():
        self._set_stats(message.stats)
      case _:
        raise frames.FrameError(
          f"{self.name} sent {type(message).__name__}, which is not a worker's"
        )

  def _set_stats(self, stats: Any) -> None:
    if stats is not None:
      try:
        self.stats = engine_lib.EngineStats(**stats)
      except TypeError as error:
        raise frames.FrameError(f"not statistics: {error}") from None

  async def call(
    self,
    method: str,
    *args: Any,
    on_token: engine_lib.OnToken | None = None,
  ) -> Any:
    """Asks the worker for something.

    Args:
      method: "serve", "engine.generate", ...
      *args: values that frames can hold.
      on_token: told of tokens as they come.

    Returns:
      What it returned.

    Raises:
      WorkerDown: the process is not there, or died meanwhile.
      WorkerError: it failed unforeseen.
      Exception: of frames.ERRORS, as the worker raised it.
    """
    if not self.up:
      raise WorkerDown(self._why)
    return await self._ask(method, args, on_token)

  async def _ask(
    self, method: str, args: tuple, on_token: engine_lib.OnToken | None
  ) -> Any:
    beside: dict[str, Any] = {}
    packed = frames.pack(list(args), beside)
    held = None
    if beside:
      held = await asyncio.to_thread(exchange.put, beside, self._directory)
    try:
      if self._writer is None:
        raise WorkerDown(self._why)
      number, writer = next(self._numbers), self._writer
      future = asyncio.get_running_loop().create_future()
      self._pending[number] = _Pending(future, on_token)
      self.send(
        frames.Call(
          number,
          method,
          packed,
          stream=on_token is not None,
          arrays=held.file if held else None,
        )
      )
      try:
        answer = await future
      except asyncio.CancelledError:
        waited = self._pending.pop(number, None)
        if self._writer is writer:
          # Or it has answered: what came with it is to be let go.
          end = frames.Cancel if waited else frames.Taken
          self.send(end(number))
        raise
    finally:
      if held is not None:
        held.close()
    if isinstance(answer, frames.Failure):
      raise self._error(answer)
    return await self._value(answer)

  def _error(self, failure: frames.Failure) -> Exception:
    return frames.raised(failure) or WorkerError(
      f"{self.name} failed: {failure.error}: {failure.message}"
    )

  async def _value(self, reply: frames.Reply) -> Any:
    """What a Reply holds, with the arrays that came beside it."""
    beside: Mapping[str, Any] = {}
    try:
      if reply.arrays is not None:
        shared = exchange.take(reply.arrays)
        self.send(frames.Taken(reply.id))
        beside = await asyncio.to_thread(shared.load)
        shared.close()
      value = frames.unpack(reply.value, beside)
      if isinstance(value, exchange.ArrayFile):
        value = exchange.take(value)
        self.send(frames.Taken(reply.id))
      return value
    except exchange.ExchangeError as error:
      raise WorkerDown(f"{self.name}: {error}") from None


class RemoteEngine:
  """The engine of a cell's process; see engine.Engine.

  `stats` is as last heard: with each answer, and each heartbeat.
  """

  def __init__(self, link: Link):
    """Speaks over a link, whatever process is at its other end."""
    self._link = link
    self.name = link.name.replace("cell", "engine")

  @property
  def version(self) -> int:
    """Version being served, as last heard."""
    return self._link.stats.version

  async def generate(
    self,
    request: engine_lib.Request,
    on_token: engine_lib.OnToken | None = None,
  ) -> engine_lib.Completion:
    """See engine.Engine."""
    return await self._link.call("engine.generate", request, on_token=on_token)

  async def abort(self, request_id: str) -> bool:
    """See engine.Engine."""
    return await self._link.call("engine.abort", request_id)

  async def pause(self, keep: bool = True) -> None:
    """See engine.Engine."""
    await self._link.call("engine.pause", keep)

  async def resume(self) -> None:
    """See engine.Engine."""
    await self._link.call("engine.resume")

  async def load_weights(self, weights: Any, version: int) -> None:
    """See engine.Engine."""
    await self._link.call("engine.load_weights", weights, version)

  async def sleep(self) -> None:
    """See engine.Engine."""
    await self._link.call("engine.sleep")

  async def wake(self) -> None:
    """See engine.Engine."""
    await self._link.call("engine.wake")

  async def ready(self) -> None:
    """Returns when the engine is compiled."""
    await self._link.call("engine.ready")

  async def fingerprint(self) -> dict[str, tuple[int, ...]]:
    """Of the weights that it computes with; see rollout/fingerprint.py.

    Raises:
      ValueError: an emulated engine, or one that has no weights now.
    """
    return await self._link.call("engine.fingerprint")

  def stats(self) -> engine_lib.EngineStats:
    """See engine.Engine; as last heard."""
    return self._link.stats

  async def close(self) -> None:
    """Ends the engine, not its process."""
    if self._link.up:
      await self._link.call("engine.close")


class RemoteCell:
  """A cell of a process of its own; see cell.Worker.

  Attributes:
    engine: speaks to the cell's engine, and raises EngineDown while it has
      none.
    reference: sent to the process before it works.
  """

  def __init__(self, link: Link):
    """Speaks over a link, whatever process is at its other end."""
    self.link, self.name = link, link.name
    self.engine = RemoteEngine(link)
    self.row_multiple = 1
    self.reference: Any = None
    self._referred = (0, 0)

  @property
  def role(self) -> str:
    """ "down" without a process, else as in cell.Worker."""
    return self.link.role

  async def serve(self, weights: Any, version: int) -> None:
    """See cell.Worker."""
    await self.link.call("serve", weights, version)

  async def join(self, weights: Any, version: int) -> None:
    """See cell.Worker."""
    await self.link.call("join", weights, version)

  async def work(self, batch: Batch, extras: Any = None) -> Any:
    """See cell.Worker."""
    wanted = (self.link.incarnation, id(self.reference))
    if self.reference is not None and self._referred != wanted:
      await self.link.call("reference", self.reference)
      self._referred = wanted
    return await self.link.call("work", batch, extras)

  async def sums(self) -> Mapping[str, Any]:
    """See cell.Worker; they stay in shared memory, held by this process."""
    return await self.link.call("sums")

  async def combine(
    self, a: Mapping[str, Any], b: Mapping[str, Any]
  ) -> Mapping[str, Any]:
    """Adds two sums in the cell's process; its own are not touched."""
    return await self.link.call("combine", a, b)

  async def reset(self) -> None:
    """See cell.Worker."""
    await self.link.call("reset")

  async def close(self) -> None:
    """See cell.Worker; the process ends by itself then."""
    if self.link.up:
      await self.link.call("close")


class RemoteCore(RemoteCell):
  """The core, in a process of its own; see cell.Core.

  Attributes:
    helpers: cells whose processes add sums pairwise before `apply`, where
      they train; none: the core adds all, in the order given.
  """

  def __init__(self, link: Link):
    """As RemoteCell."""
    super().__init__(link)
    self.helpers: Sequence[RemoteCell] = ()

  async def init(self, params: Any, seed: int, version: int = 0) -> None:
    """See cell.Core."""
    await self.link.call("init", params, seed, version)

  async def apply(
    self, sums: Sequence[Mapping[str, Any]], version: int
  ) -> dict[str, Any]:
    """See cell.Core."""
    sums = list(sums)
    helpers = [c for c in self.helpers if c.role == "train"]
    if helpers and len(sums) > 2:
      # A helper that dies is no concern of the update's: the core adds then.
      with contextlib.suppress(engine_lib.EngineError):
        sums = await combine_pairwise(sums, helpers)
    metrics = await self.link.call("apply", sums, version)
    for one in sums:
      if isinstance(one, exchange.Shared):
        one.close()
    return metrics

  async def weights(self) -> Any:
    """See cell.Core; copies."""
    return await self.link.call("weights")

  async def save(self, directory: os.PathLike, meta: Mapping[str, Any]) -> None:
    """See cell.Core; the directory is the process's too."""
    await self.link.call("save", directory, meta)

  async def restore(self, directory: os.PathLike) -> Mapping[str, Any]:
    """See cell.Core."""
    return await self.link.call("restore", directory)

  async def snapshot(self, directory: os.PathLike) -> Snapshot:
    """See cell.Core."""
    return await self.link.call("snapshot", directory)

  async def resize(
    self,
    devices: Sequence[int],
    sizes: Any = None,
    *,
    directory: os.PathLike | None = None,
  ) -> None:
    """See cell.Core; devices are the process's."""
    await self.link.call("resize", list(devices), sizes, directory)


async def combine_pairwise(
  sums: Sequence[Mapping[str, Any]], cells: Sequence[RemoteCell]
) -> list[Mapping[str, Any]]:
  """Adds sums in a tree whose shape depends on their number alone.

  The additions of a level run at the same time, in the processes of the
  cells given. Each level halves the sums; what the core is left with is one.

  Args:
    sums: of cells, in a fixed order; they are used up.
    cells: whose processes may add, at least one.

  Returns:
    One sum, or none where all are of nothing.

  Raises:
    WorkerDown: a cell died; `sums` are still held and may be added again.
    ExchangeError: they do not belong together.
  """
  level = [x for x in sums if isinstance(x, exchange.Shared) or x]
  made: list[Mapping[str, Any]] = []
  while len(level) > 1:
    pairs = [level[i : i + 2] for i in range(0, len(level) - 1, 2)]
    odd = level[2 * len(pairs) :]
    added = await asyncio.gather(
      *(cells[i % len(cells)].combine(*p) for i, p in enumerate(pairs))
    )
    made += added
    level = [*added, *odd]
  kept = {id(x) for x in level}
  for one in [*sums, *made]:
    if isinstance(one, exchange.Shared) and id(one) not in kept:
      one.close()
  return level
