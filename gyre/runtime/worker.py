"""The process of one cell: `python -m gyre.runtime.worker`.

Started by workers.py with one end of a socket pair. It builds a cell of the
kind that the first call names, and then does what it is asked for; its calls
run at the same time, as their coroutines would in the controller. It ends
with the controller, however that ends: the kernel kills it when its parent
dies, and the end of the socket ends it too.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import dataclasses
import logging
import os
import pathlib
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from gyre.rollout import engine as engine_lib
from gyre.runtime import exchange, frames

_PR_SET_PDEATHSIG = 1
_EXIT_REFUSED = 3

_log = logging.getLogger("gyre.worker")

# What a call may name.
ENGINE = frozenset(
  "generate abort pause resume load_weights sleep wake ready close "
  "fingerprint".split()
)
CELL = frozenset(
  "serve join work reset init apply weights save restore resize "
  "snapshot".split()
)


def build_emulated(name: str, options: dict[str, Any]) -> Any:
  """A cell of kind "emulated".

  Args:
    name: of the cell.
    options: core (bool), profile (fields of Profile), devices, executions.
  """
  from gyre.rollout.profile import Profile
  from gyre.runtime import emulated_cell

  options = dict(options)
  core = options.pop("core", False)
  profile = Profile(**options.pop("profile", {}))
  kind = emulated_cell.EmulatedCore if core else emulated_cell.EmulatedCell
  return kind(name, profile, **options)


def build_jax(name: str, options: dict[str, Any]) -> Any:
  """A cell of kind "jax": the trainer and the embedded engine.

  Args:
    name: of the cell.
    options: core (bool), model (a Hugging Face config), config (the run's
      sections), mesh (sizes), compilation_cache (a directory).
  """
  from gyre import config as config_lib
  from gyre.learner import state
  from gyre.models.config import ModelConfig
  from gyre.runtime import launch
  from gyre.runtime.cell_worker import CellWorker
  from gyre.runtime.core_worker import CoreWorker
  from gyre.runtime.trainer import Trainer

  if options.get("compilation_cache"):
    launch.use_compilation_cache(pathlib.Path(options["compilation_cache"]))
  config = config_lib.from_config_dict(options["config"])
  mesh = state.make_mesh(config_lib.Mesh(**options["mesh"]))
  model_cfg = ModelConfig.from_hf(options["model"])
  trainer = Trainer(model_cfg, mesh, config)
  kind = CoreWorker if options.get("core", False) else CellWorker
  return kind(name, trainer, config)


BUILDERS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
  "emulated": build_emulated,
  "jax": build_jax,
}


class _Streams:
  """Tokens of live calls, sent together once an iteration of the loop."""

  def __init__(self, send: Callable[[frames.Message], None]):
    self._send = send
    self._held: dict[int, tuple[list, list, list]] = {}
    self._scheduled = False

  def sink(self, call: int) -> engine_lib.OnToken:
    def on_token(token: int, logprob: float, version: int) -> None:
      ids, logprobs, versions = self._held.setdefault(call, ([], [], []))
      ids.append(token)
      logprobs.append(logprob)
      versions.append(version)
      if not self._scheduled:
        self._scheduled = True
        asyncio.get_running_loop().call_soon(self.flush)

    return on_token

  def flush(self) -> None:
    self._scheduled = False
    if self._held:
      items = [(call, *lists) for call, lists in self._held.items()]
      self._held.clear()
      self._send(frames.Tokens(items))


class Worker:
  """Serves one connection until it ends."""

  def __init__(
    self,
    name: str,
    directory: str,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
  ):
    """Takes the socket.

    Args:
      name: of the cell.
      directory: on tmpfs, where arrays are shared from.
      reader, writer: of the socket to the controller.
    """
    self._name, self._directory = name, directory
    self._reader, self._writer = reader, writer
    self._cell: Any = None
    self._tasks: dict[int, asyncio.Task] = {}
    self._held: dict[int, exchange.Shared] = {}
    self._streams = _Streams(self._send)
    self._closed = asyncio.Event()

  def _send(self, message: frames.Message) -> None:
    self._writer.write(frames.encode(message))

  async def run(self) -> None:
    """Serves; returns when the controller has closed it or has gone.

    Raises:
      FrameError: the controller sent something that is no message.
    """
    self._send(frames.Hello(self._name, os.getpid(), frames.PROTOCOL))
    reading = asyncio.ensure_future(self._read())
    closed = asyncio.ensure_future(self._closed.wait())
    await asyncio.wait({reading, closed}, return_when=asyncio.FIRST_COMPLETED)
    if reading.done():
      reading.result()

  async def _read(self) -> None:
    while True:
      try:
        message = await frames.read(self._reader)
      except EOFError:
        return
      match message:
        case frames.Call():
          task = asyncio.ensure_future(self._answer(message))
          self._tasks[message.id] = task
        case frames.Cancel():
          if message.id in self._tasks:
            self._tasks[message.id].cancel()
        case frames.Taken():
          if message.id in self._held:
            self._held.pop(message.id).close()
        case frames.Ping():
          self._send(frames.Pong(message.id, self._stats()))
        case _:
          raise frames.FrameError(
            f"a controller does not send {type(message).__name__}"
          )

  def _stats(self) -> dict[str, Any] | None:
    engine = getattr(self._cell, "engine", None)
    return None if engine is None else dataclasses.asdict(engine.stats())

  async def _answer(self, call: frames.Call) -> None:
    role = ""
    try:
      value = await self._do(call)
      role = getattr(self._cell, "role", "")
      reply = await self._reply(call, value, role)
    except asyncio.CancelledError:
      return
    except Exception as error:
      reply = self._failure(call, error, getattr(self._cell, "role", role))
    finally:
      self._tasks.pop(call.id, None)
    self._streams.flush()
    self._send(reply)
    if call.method == "close":
      await self._writer.drain()
      self._closed.set()

  def _failure(
    self, call: frames.Call, error: Exception, role: str
  ) -> frames.Failure:
    name = type(error).__name__
    if name not in frames.ERRORS:
      _log.exception("%s: %s failed", self._name, call.method)
    line = " ".join(str(error).split())[:1000]
    return frames.Failure(call.id, name, line, role)

  async def _reply(
    self, call: frames.Call, value: Any, role: str
  ) -> frames.Reply:
    beside: dict[str, Any] = {}
    packed = frames.pack(value, beside)
    held = None
    if isinstance(value, exchange.Shared):
      held = value
    elif beside:
      held = await asyncio.to_thread(exchange.put, beside, self._directory)
    if held is not None:
      self._held[call.id] = held
    stats = self._stats() if call.method != "engine.generate" else None
    file = held.file if held is not None and beside else None
    return frames.Reply(call.id, packed, role, stats, file)

  async def _arguments(self, call: frames.Call) -> list[Any]:
    beside = {}
    if call.arrays is not None:
      beside = await asyncio.to_thread(_load, call.arrays)
    return frames.unpack(call.args, beside)

  async def _do(self, call: frames.Call) -> Any:
    args = await self._arguments(call)
    side, _, method = call.method.rpartition(".")
    if side == "engine" and method in ENGINE:
      return await self._engine(call, method, args)
    if side:
      raise frames.FrameError(f"no method {call.method!r}")
    if method == "start":
      return await self._start(*args)
    if method == "combine":
      return await asyncio.to_thread(self._combine, *args)
    if method == "close":
      return self._cell and await self._cell.close()
    if self._cell is None:
      raise engine_lib.EngineDown(f"{self._name} has not started")
    if method == "reference":
      self._cell.reference = args[0]
      return None
    if method == "sums":
      return await self._sums()
    if method == "apply":
      sums, version = args
      loaded = [await asyncio.to_thread(_sums_of, x) for x in sums]
      return await self._cell.apply(loaded, version)
    if method == "resize":
      devices, sizes, directory = args
      return await self._cell.resize(devices, sizes, directory=directory)
    if method not in CELL:
      raise frames.FrameError(f"no method {call.method!r}")
    return await getattr(self._cell, method)(*args)

  async def _start(self, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    if kind not in BUILDERS:
      raise ValueError(f"no kind of cell {kind!r}; there are {list(BUILDERS)}")
    build = BUILDERS[kind]
    self._cell = await asyncio.to_thread(build, self._name, options)
    return {"row_multiple": int(self._cell.row_multiple)}

  async def _engine(self, call: frames.Call, method: str, args: list) -> Any:
    engine = getattr(self._cell, "engine", None)
    if engine is None:
      raise engine_lib.EngineDown(f"{self._name} serves no weights yet")
    if method == "generate":
      sink = self._streams.sink(call.id) if call.stream else None
      return await engine.generate(args[0], sink)
    if method == "load_weights" and hasattr(self._cell, "publish"):
      return await self._cell.publish(*args)
    if not hasattr(engine, method):
      raise ValueError(f"an engine of this kind has no {method}")
    return await getattr(engine, method)(*args)

  async def _sums(self) -> exchange.Shared | dict[str, Any]:
    named = await self._cell.sums()
    if not named:
      return {}
    return await asyncio.to_thread(exchange.put, named, self._directory)

  def _combine(self, a: Any, b: Any) -> exchange.Shared:
    both = exchange.add(_sums_of(a), _sums_of(b), in_place=True)
    return exchange.put(both, self._directory)


def _load(file: exchange.ArrayFile) -> dict[str, Any]:
  shared = exchange.take(file)
  try:
    return shared.load()
  finally:
    shared.close()


def _sums_of(value: Any) -> dict[str, Any]:
  return _load(value) if isinstance(value, exchange.ArrayFile) else value


def _die_with(parent: int) -> None:
  """The kernel kills this process when the thread that started it ends."""
  libc = ctypes.CDLL(None, use_errno=True)
  if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
    raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
  if os.getppid() != parent:
    sys.exit(0)  # it was gone before


async def _serve(name: str, fd: int, directory: str) -> None:
  """Serves the socket, then ends the process."""
  sock = socket.socket(fileno=fd)
  reader, writer = await asyncio.open_unix_connection(sock=sock)
  status = 0
  try:
    await Worker(name, directory, reader, writer).run()
  except frames.FrameError as error:
    _log.error("%s: %s", name, error)
    status = _EXIT_REFUSED
  logging.shutdown()
  # Threads of a compiler or a device may be busy for minutes yet.
  os._exit(status)


def main() -> None:
  """The command."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--name", required=True)
  parser.add_argument("--fd", type=int, required=True)
  parser.add_argument("--directory", required=True)
  parser.add_argument("--parent", type=int, required=True)
  args = parser.parse_args()
  _die_with(args.parent)
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides
  logging.basicConfig(
    format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO
  )
  asyncio.run(_serve(args.name, args.fd, args.directory))


if __name__ == "__main__":
  main()
