"""The launcher "local": a process a cell, supervised and restarted.

A process is connected by a socket pair, which nobody else can reach and which
leaves nothing in the file system. Its death is seen at once, by the end of the
socket or of the process; a frozen one by its heartbeat, and it is killed. What
was asked of it raises WorkerDown, and it is started again, later each time,
until it has died too often. It comes back as an idle cell.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import pathlib
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from gyre.envs.spawn import spawn, to_its_end
from gyre.rollout.engine import EngineError
from gyre.runtime import exchange, frames
from gyre.runtime.cell import CellError
from gyre.runtime.remote import (
  Link,
  RemoteCell,
  RemoteCore,
  WorkerDown,
  WorkerError,
)
from gyre.runtime.specs import Spec

__all__ = ("Supervision", "WorkerDown", "WorkerError", "Workers")

_log = logging.getLogger(__name__)
_REAP_S = 10.0
_PREFIX = "gyre-exchange-"

# Called with (cell, why) in the event loop.
Watch = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True)
class Supervision:
  """When a process is given up, and started again.

  Attributes:
    heartbeat_s: between two pings.
    frozen_s: without any answer for so long, it is killed.
    start_s: that it may take to build its cell.
    backoff_s: before the first new start; twice as long each time.
    backoff_max_s: the longest.
    restarts: in a row; another death then is final.
    stable_s: up for so long, it counts as not having died before.
  """

  heartbeat_s: float = 2.0
  frozen_s: float = 30.0
  start_s: float = 300.0
  backoff_s: float = 0.25
  backoff_max_s: float = 30.0
  restarts: int = 8
  stable_s: float = 120.0


class _Process:
  """One cell's process, over all its lives."""

  def __init__(
    self,
    spec: Spec,
    link: Link,
    supervision: Supervision,
    *,
    shared: pathlib.Path,
    log: pathlib.Path,
    on_up: Callable[[dict[str, Any]], None],
    on_down: Callable[[str, bool], None],
  ):
    self.spec, self.link, self.pid = spec, link, 0
    self.final = ""  # why it is not started again
    self._supervision, self._shared, self._log_path = supervision, shared, log
    self._on_up, self._on_down = on_up, on_down
    self._process: asyncio.subprocess.Process | None = None
    self._closing = False
    self._killed = False  # by someone else, in its last life
    self._life: asyncio.Task | None = None
    self.first = asyncio.get_running_loop().create_future()

  def start(self) -> None:
    """Begins its first life."""
    self._life = asyncio.ensure_future(self._live())

  async def _live(self) -> None:
    s, deaths, loop = self._supervision, 0, asyncio.get_running_loop()
    while True:
      begun = loop.time()
      why = await self._one_life()
      if self._closing:
        return
      if loop.time() - begun > s.stable_s:
        deaths = 0
      deaths += 1
      # One that cannot start would not the next time either.
      hopeless = not (self.first.done() or self._killed)
      if deaths > s.restarts or hopeless:
        self.final = f"{why}; died {deaths} times, not started again"
        self.link.lost(self.final)
        if not self.first.done():
          self.first.set_exception(WorkerError(why))
        else:
          self._on_down(self.final, True)
        return
      self._on_down(why, False)
      wait = min(s.backoff_s * 2 ** (deaths - 1), s.backoff_max_s)
      _log.warning("%s; starting again in %.2g s", why, wait)
      await asyncio.sleep(wait)

  async def _one_life(self) -> str:
    """Runs the process until it ends; returns why it did."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
      self._process = await self._spawn(theirs.fileno())
    except OSError as error:
      ours.close()
      return f"{self.spec.name} cannot be started: {error.strerror}"
    finally:
      theirs.close()
    self.pid, why = self._process.pid, ""
    tasks: list[asyncio.Task] = []
    writer: asyncio.StreamWriter | None = None
    try:
      reader, writer = await asyncio.open_unix_connection(sock=ours)
      work = (self._receive(reader, writer), self._process.wait())
      tasks = [asyncio.ensure_future(x) for x in (*work, self._begin())]
      why = await self._until_one_fails(tasks)
    finally:
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)
      # Nobody hears of its death before it is dead, and its devices free.
      status = self._process.returncode
      self._killed = not why and status is not None and status < 0
      await self._kill()
      why = f"{self.spec.name}: {why or self._exit_status()}"
      self.link.lost(why)
      (writer or ours).close()
    return why

  async def _spawn(self, fd: int) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "gyre.runtime.worker"]
    command += ["--name", self.spec.name, "--fd", str(fd)]
    command += ["--directory", str(self._shared), "--parent", str(os.getpid())]
    with open(self._log_path, "ab") as log:
      return await spawn(
        *command,
        pass_fds=(fd,),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, **self.spec.env},
        start_new_session=True,
      )

  async def _until_one_fails(self, tasks: list[asyncio.Task]) -> str:
    """Waits for the first that tells the process's end; what it told."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    errors = [e for e in (t.exception() for t in done) if e is not None]
    if len(errors) < len(done):
      return ""  # the process has ended, and its status says more
    return " ".join(str(errors[0]).split()) or type(errors[0]).__name__

  async def _receive(self, reader, writer) -> None:
    """Reads until the socket ends, which is an error."""
    with contextlib.suppress(EOFError):
      hello = await frames.read(reader)
      if not isinstance(hello, frames.Hello) or hello.pid != self.pid:
        raise frames.FrameError(f"began with {hello}")
      if hello.protocol != frames.PROTOCOL:
        raise frames.FrameError(
          f"speaks protocol {hello.protocol}, not {frames.PROTOCOL}"
        )
      self.link.connect(writer)
      while True:
        self.link.receive(await frames.read(reader))
    # The status tells more than the end of the socket.
    with contextlib.suppress(TimeoutError):
      await asyncio.wait_for(asyncio.shield(self._process.wait()), 1.0)
    raise EOFError("the connection ended")

  async def _begin(self) -> None:
    """Builds the cell, then listens to the heart; an error ends the life."""
    s = self._supervision
    try:
      async with asyncio.timeout(s.start_s):
        while not self.link.connected:
          await asyncio.sleep(0.01)
        about = await self.link.build(self.spec.kind, self.spec.options)
    except TimeoutError:
      raise WorkerDown(f"did not start within {s.start_s} s") from None
    if not self.first.done():
      self.first.set_result(None)
    self._on_up(about)
    loop, beat = asyncio.get_running_loop(), 0
    while True:
      before = loop.time()
      self.link.send(frames.Ping(beat := beat + 1))
      await asyncio.sleep(s.heartbeat_s)
      now = loop.time()
      if now - before > 2 * s.heartbeat_s + 0.1:
        self.link.heard = now  # it was this process that stood still
      if now - self.link.heard > s.frozen_s:
        raise WorkerDown(f"frozen: silent for {now - self.link.heard:.1f} s")

  def _exit_status(self) -> str:
    status = self._process.returncode
    if status is None:
      return "cannot be killed"
    if status < 0:
      try:
        return f"killed by {signal.Signals(-status).name}"
      except ValueError:
        return f"killed by signal {-status}"
    return f"ended with status {status}"

  async def _kill(self) -> None:
    """Ends the process, whatever it does, and reaps it."""
    if self._process.returncode is None:
      # Popen's own kill may reap it, and leave asyncio without its status.
      with contextlib.suppress(ProcessLookupError):
        os.kill(self.pid, signal.SIGKILL)
    work = asyncio.ensure_future(self._process.wait())
    await to_its_end(
      asyncio.ensure_future(asyncio.wait({work}, timeout=_REAP_S))
    )
    work.cancel()

  async def close(self, timeout_s: float) -> None:
    """Asks it to end, then makes it end."""
    self._closing = True
    if self._life is None:
      return
    with contextlib.suppress(EngineError, CellError, TimeoutError):
      async with asyncio.timeout(timeout_s):
        if self.link.up:
          await self.link.call("close")
          await asyncio.shield(self._life)
    self._life.cancel()
    with contextlib.suppress(asyncio.CancelledError):
      await self._life


def _sweep(tmpfs: pathlib.Path) -> None:
  """Removes what controllers that were killed left: empty directories."""
  for path in tmpfs.glob(f"{_PREFIX}*-*"):
    pid = path.name[len(_PREFIX) :].partition("-")[0]
    mine = path.is_dir() and path.stat().st_uid == os.getuid()
    if mine and pid.isdigit() and not pathlib.Path("/proc", pid).exists():
      shutil.rmtree(path, ignore_errors=True)


class Workers:
  """The processes of a run's cells.

  Attributes:
    cells: RemoteCell or RemoteCore by name, in the order of the specs; the
      same objects over all lives of their processes.
    events: (event loop's time, cell, "up" | "down" | "lost", why), in order.
  """

  def __init__(
    self,
    specs: Sequence[Spec],
    directory: str | os.PathLike,
    *,
    supervision: Supervision | None = None,
    on_up: Watch | None = None,
    on_down: Watch | None = None,
    on_lost: Watch | None = None,
  ):
    """Nothing is started yet.

    Args:
      specs: of the cells.
      directory: of the run; logs are written under workers/ in it.
      supervision: default as its class says.
      on_up: a process is there, its cell idle: at first, and again.
      on_down: a process has died and will be started again.
      on_lost: it has died too often.

    Raises:
      ValueError: two cells have one name.
    """
    names = [s.name for s in specs]
    if len(set(names)) != len(names):
      raise ValueError(f"names of cells must differ, got {names}")
    self._specs, self._directory = tuple(specs), pathlib.Path(directory)
    self._supervision = supervision or Supervision()
    self._watch = {"up": on_up, "down": on_down, "lost": on_lost}
    self._shared: pathlib.Path | None = None
    self._processes: dict[str, _Process] = {}
    self.cells: dict[str, RemoteCell] = {}
    self.events: list[tuple[float, str, str, str]] = []

  async def start(self) -> None:
    """Starts all; returns when each has built its cell.

    Raises:
      WorkerError: one could not; none is left behind.
    """
    logs = self._directory / "workers"
    logs.mkdir(parents=True, exist_ok=True)
    tmpfs = exchange.TMPFS if exchange.TMPFS.is_dir() else logs
    _sweep(tmpfs)
    prefix = f"{_PREFIX}{os.getpid()}-"
    self._shared = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=tmpfs))
    for spec in self._specs:
      link = Link(spec.name, self._shared)
      core = spec.options.get("core", False)
      cell = (RemoteCore if core else RemoteCell)(link)
      self.cells[spec.name] = cell
      process = _Process(
        spec,
        link,
        self._supervision,
        shared=self._shared,
        log=logs / f"{spec.name.replace('/', '_').replace(' ', '_')}.log",
        on_up=self._up(cell),
        on_down=self._down(spec.name),
      )
      self._processes[spec.name] = process
      process.start()
    for cell in self.cells.values():
      if isinstance(cell, RemoteCore):
        cell.helpers = tuple(self.cells.values())
    firsts = [p.first for p in self._processes.values()]
    try:
      await asyncio.gather(*firsts)
    except BaseException:
      await self.close()
      raise

  def _up(self, cell: RemoteCell) -> Callable[[dict[str, Any]], None]:
    def up(about: dict[str, Any]) -> None:
      cell.row_multiple = about["row_multiple"]
      self._tell("up", cell.name, "")

    return up

  def _down(self, name: str) -> Callable[[str, bool], None]:
    def down(why: str, final: bool) -> None:
      self._tell("lost" if final else "down", name, why)

    return down

  def _tell(self, kind: str, name: str, why: str) -> None:
    at = asyncio.get_running_loop().time()
    self.events.append((at, name, kind, why))
    if self._watch[kind] is not None:
      self._watch[kind](name, why)

  @property
  def shared(self) -> pathlib.Path:
    """Directory on tmpfs of all these processes; `close` removes it."""
    return self._shared

  def pids(self) -> dict[str, int]:
    """Process ids of the cells that are up."""
    return {n: p.pid for n, p in self._processes.items() if p.link.up}

  async def close(self, timeout_s: float = 10.0) -> None:
    """Ends every process and frees what they shared.

    Args:
      timeout_s: that each may take to end by itself.
    """
    await asyncio.gather(
      *(p.close(timeout_s) for p in self._processes.values())
    )
    for process in self._processes.values():
      if process.first.done() and not process.first.cancelled():
        process.first.exception()  # looked at
    if self._shared is not None:
      shutil.rmtree(self._shared, ignore_errors=True)
      self._shared = None

  async def __aenter__(self) -> Workers:
    await self.start()
    return self

  async def __aexit__(self, *_: Any) -> None:
    await self.close()
