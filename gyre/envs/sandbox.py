"""The Sandbox protocol, and the choice of a backend.

A sandbox holds a copy of a task's files and one bash that lives over many
turns. `close_shell` ends every process and keeps the workspace as a tar file;
the verifier opens a fresh sandbox over it. Backends:

  bubblewrap  namespaces of an unprivileged user; the host's own programs
  docker      the docker or podman command line; the task's image
  podman
  remote      an HTTP service (remote.py says which)
  process     a plain process group; isolates nothing
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from gyre import config
from gyre.envs import errors, shell, spawn
from gyre.envs import task as task_lib

CommandResult = shell.CommandResult
SandboxError = errors.SandboxError
SandboxUnavailable = errors.SandboxUnavailable
FileTree = Mapping[str, task_lib.FileSpec]
_PREFIX = "gyre-sandboxes"
#: Backends that can show paths of this machine: Request.binds and sockets.
SHOW_PATHS = ("bubblewrap", "process")


@dataclasses.dataclass(frozen=True)
class Request:
  """What a backend needs to know to open a sandbox.

  Attributes:
    task: the task; its files are laid out unless `workspace` is given.
    options: the configuration's section.
    deterministic: fixed clock and times, limits in CPU seconds.
    workspace: a tar to lay out instead of the task's files.
    mounts: absolute path -> files, shown read-only.
    env: further environment variables.
    logs: True gives the sandbox an empty, writable /logs/verifier.
    binds: absolute path -> a directory or file of the host, shown read-only.
    sockets: absolute path -> a unix socket of the host, to be connected to:
      all that the sandbox can reach of the network.
  """

  task: task_lib.Task
  options: config.Sandbox
  deterministic: bool = False
  workspace: pathlib.Path | None = None
  mounts: Mapping[str, FileTree] = dataclasses.field(default_factory=dict)
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  logs: bool = False
  binds: Mapping[str, pathlib.Path] = dataclasses.field(default_factory=dict)
  sockets: Mapping[str, pathlib.Path] = dataclasses.field(default_factory=dict)


class Sandbox(Protocol):
  """A task's files and one persistent bash, apart from the host.

  Attributes:
    name: the backend.
    workdir: absolute path, in the sandbox, of the workspace.
    workspace: the tar that close_shell writes.
    kept_without: what close_shell left out of it, one line each.
    cpu_s: CPU seconds used so far, where the backend can tell.
  """

  name: str
  workdir: str
  workspace: pathlib.Path
  kept_without: list[str]

  @property
  def cpu_s(self) -> float: ...

  async def run(
    self, command: str, timeout_s: float | None = None
  ) -> CommandResult:
    """Runs one command in the persistent shell.

    Args:
      command: any text; bash reads it as one `eval`.
      timeout_s: seconds (CPU and idle seconds in deterministic mode).

    Raises:
      SandboxError: the sandbox itself failed.
    """

  async def close_shell(self) -> pathlib.Path:
    """Ends every process and keeps the workspace; returns its tar."""

  async def read(self, path: str, max_bytes: int) -> tuple[bytes | None, str]:
    """After close_shell, a regular file below /logs: (bytes or None, why)."""

  async def close(self) -> None:
    """Ends and removes everything. May be called twice."""


def base_directory() -> pathlib.Path:
  """The private directory under the system's temporary one, created."""
  base = pathlib.Path(tempfile.gettempdir(), f"{_PREFIX}-{os.geteuid()}")
  with contextlib.suppress(FileExistsError):
    base.mkdir(mode=0o711)
  found = base.lstat()
  if not base.is_dir() or base.is_symlink() or found.st_uid != os.geteuid():
    raise SandboxError(f"{base} is not a directory of user {os.geteuid()}")
  return base


def new_directory() -> pathlib.Path:
  """A fresh directory for one sandbox, named after this process."""
  return pathlib.Path(
    tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=base_directory())
  )


def _prune(base: pathlib.Path) -> int:
  count = 0
  for path in base.iterdir():
    pid = path.name.partition("-")[0]
    if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
      shutil.rmtree(path, ignore_errors=True)
      count += 1
  return count


async def prune() -> int:
  """Removes what sandboxes of ended processes left; returns how many."""
  return await asyncio.to_thread(_prune, base_directory())


def _backends() -> Mapping[str, Callable]:
  # Here, not above: each backend imports this module for its types.
  from gyre.envs import bubblewrap, container, process, remote

  return {
    "bubblewrap": bubblewrap.start,
    "docker": container.start_docker,
    "podman": container.start_podman,
    "remote": remote.start,
    "process": process.start,
  }


def _stop_ignoring_interrupts() -> None:
  """Lets commands of sandboxes be interrupted.

  A script's background job starts with SIGINT ignored, its children inherit
  that and no shell can undo it. A handler that does nothing is not inherited.
  """
  if threading.current_thread() is threading.main_thread():
    for number in (signal.SIGINT, signal.SIGQUIT):
      if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


async def start_backend(request: Request) -> Sandbox:
  """Opens a sandbox with the first backend of the request that works.

  Raises:
    config.ConfigError: a backend's name is unknown.
    SandboxUnavailable: none works; the message has each one's reason.
  """
  _stop_ignoring_interrupts()
  known = _backends()
  reasons = []
  for name in request.options.backends:
    if name not in known:
      raise config.ConfigError(
        f"sandbox.backends names {name!r}; there are {sorted(known)}"
      )
    if name not in SHOW_PATHS and (request.binds or request.sockets):
      reasons.append(f"{name}: shows no paths of this machine")
      continue
    try:
      return await known[name](request)
    except (SandboxError, task_lib.TaskError, OSError) as e:
      reasons.append(f"{name}: {e}")
  raise SandboxUnavailable(
    f"no sandbox for task {request.task.task_id}: " + "; ".join(reasons)
  )


async def _close(box: Sandbox) -> None:
  """Takes a sandbox down whole, however often its owner is cancelled."""
  work = asyncio.ensure_future(box.close())
  await spawn.to_its_end(work)
  work.result()


@contextlib.asynccontextmanager
async def opened(request: Request) -> AsyncIterator[Sandbox]:
  """A sandbox that is taken down at the end, whatever happens.

  A cancelled opening is completed, then taken down.

  Raises:
    as start_backend.
  """
  work = asyncio.ensure_future(start_backend(request))
  try:
    await spawn.to_its_end(work)
  except asyncio.CancelledError:
    if not work.cancelled() and work.exception() is None:
      await _close(work.result())
    raise
  box = work.result()
  try:
    yield box
  finally:
    await _close(box)


async def open_sandbox(
  options: config.Sandbox,
  task: task_lib.Task,
  *,
  deterministic: bool = False,
) -> Sandbox:
  """Opens and starts a sandbox for one execution of `task`.

  Args:
    options: the configuration's section; its backends are tried in order.
    task: its files become the workspace.
    deterministic: fixed clock and times, limits in CPU seconds.

  Returns:
    A started Sandbox. Close it.

  Raises:
    SandboxUnavailable: no backend can serve the task on this host.
    config.ConfigError: options.backends has an unknown name.
  """
  return await start_backend(
    Request(task, options, deterministic=deterministic)
  )
