"""The process backend: a plain process group. It isolates nothing.

For hosts that refuse namespaces (many containers, Colab). Chosen only where
`sandbox.backends` names it. Where we are root, the shell is a user of its own,
so that it can neither signal nor overwrite what is ours; otherwise it is us.
It reads what that user can read, reaches the network, and writes wherever that
user may. What holds here too: resource limits, the watchdog, time limits, and
the verifier's fresh start from the kept workspace. At its end every process of
its user ends; where it has no user of its own, those of its process tree, its
session and its environment do, and one that left all three escapes.

Nothing can be mounted here: /app, /tests, /logs and /solution are directories
elsewhere. Commands, mounted texts and outputs are rewritten to and fro, which
no path that a program composes by itself is.

Processes end with this one, however it ends: another, which outlives it for a
moment, kills them once this one's end of a pipe has closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pathlib
import re
import shlex
import signal
import subprocess
import threading

from gyre.envs import (
  bubblewrap,
  image,
  limits,
  local,
  sandbox,
  shell,
  shown,
  snapshot,
  spawn,
)
from gyre.envs import task as task_lib

_LOG = logging.getLogger(__name__)
_MARK = "GYRE_SANDBOX"
_ROUNDS = 100
_WAIT_S = 2.0  # for another thread that is killing


@functools.cache
def _warn(root: bool) -> None:
  _LOG.warning(
    "sandbox backend 'process' isolates nothing: agents run as %s, with this "
    "host's files and network in reach",
    "users of their own" if root else "you",
  )


class ProcessSandbox(local.LocalSandbox):
  """See the module."""

  name = "process"

  def __init__(self, request: sandbox.Request, directory: pathlib.Path):
    super().__init__(request, directory)
    self._uid = bubblewrap.sandbox_uid()
    self._root = directory / "root"
    self._process: asyncio.subprocess.Process | None = None
    self._waiter: asyncio.Task | None = None
    self._env: dict[str, str] = {}
    self._seen: set[tuple[int, int]] = set()
    self._session = -1
    self._killing = threading.Lock()
    self._reaper: asyncio.subprocess.Process | None = None
    self._lifeline = -1
    self._moved = re.compile(r"(?!)")

  async def start(self) -> None:
    """Lays the files out and starts the first shell."""
    request = self._request
    layout = image.host_layout(request.task)
    self.workdir = layout.workdir
    self._start_dir = str(self._root) + layout.workdir
    names = {layout.workdir, "/logs", *request.mounts, *request.sockets}
    names |= {t for t, p in request.binds.items() if t != str(p)}
    self._moved = re.compile(
      rf"(?<![\w./~}}-])(?={'|'.join(map(re.escape, sorted(names)))})"
      r"(/[^\s\"';:)]*)"
    )
    for name in (layout.workdir, "/tmp", "/home", "/logs/verifier"):
      path = self._root / name.strip("/")
      path.mkdir(parents=True)
      while path != self._root:
        self._own(path)
        path = path.parent
    if self._uid is not None:
      os.chown(self._dir, 0, self._uid)
      self._dir.chmod(0o750)
      # So that /dev/stdout and /dev/stderr can be opened.
      os.fchown(self._shell.output_w, self._uid, self._uid)
    self._mount()
    self._show()
    tmp = str(self._root / "tmp")
    env = local.environment(request, str(self._root / "home"), self._start_dir)
    env |= dict(layout.env) | {"TMPDIR": tmp, _MARK: self._dir.name}
    if request.deterministic:
      local.write_date(self._dir / "bin")
      env["PATH"] = f"{self._dir / 'bin'}:{env['PATH']}"
    self._env = {k: self._to_host(v) for k, v in env.items()}
    await self._fill(layout)
    folders = {"workdir": layout.workdir, "tmp": "/tmp"}
    if request.logs:
      folders["logs"] = "/logs"
    for name, path in folders.items():
      self._fds[name] = os.open(
        f"{self._root}{path}", os.O_RDONLY | os.O_DIRECTORY
      )
    self._watch(disk_bytes=self._disk_use)
    await self._start_reaper()
    await self._start_shell(self._start_dir)

  def _own(self, path: pathlib.Path) -> None:
    if self._uid is not None:
      os.chown(path, self._uid, self._uid, follow_symlinks=False)

  def _to_host(self, text: str) -> str:
    return self._moved.sub(lambda m: f"{self._root}{m[1]}", text)

  def _from_host(self, text: str) -> str:
    return text.replace(str(self._root), "")

  def _mount(self) -> None:
    """Writes the read-only trees, their texts rewritten."""
    for target, files in self._request.mounts.items():
      moved = {}
      for path, spec in files.items():
        if not spec.directory and not spec.link:
          with contextlib.suppress(UnicodeDecodeError):
            text = self._to_host(spec.read().decode())
            spec = task_lib.FileSpec(text.encode(), spec.mode)
        moved[path] = spec
      base = self._root / target.strip("/")
      task_lib.write_files(moved, base)
      for folder, dirs, names in os.walk(base):
        for path in (pathlib.Path(folder, n) for n in (*dirs, *names)):
          if not path.is_symlink():
            readable = 0o555 if path.is_dir() else 0o444
            path.chmod(path.stat().st_mode & 0o755 | readable)

  def _show(self) -> None:
    """Links to what the request shows; what keeps its path needs none."""
    shows = self._request.binds | self._request.sockets
    for target, path in shows.items():
      if not path.exists():
        raise sandbox.SandboxError(f"cannot show {path}: it does not exist")
      where = path.parent if path.is_socket() else path.resolve()
      if self._uid is not None and not shown.reachable(where):
        raise sandbox.SandboxError(f"process: {path} is closed to other users")
      if target != str(path):
        link = self._root / target.strip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)

  async def _fill(self, layout: image.Layout) -> None:
    if self._request.workspace is not None:
      fd = os.open(self._request.workspace, os.O_RDONLY | os.O_CLOEXEC)
    elif layout.files:
      fd = bubblewrap.data_fd(snapshot.pack_files(layout.files))
    else:
      return
    try:
      process = await spawn.spawn(
        *bubblewrap.as_user(self._uid),
        *("tar", "-xpf", "-", "-C", self._start_dir),
        stdin=fd,
        stderr=asyncio.subprocess.PIPE,
        env=self._env,
      )
      _, error = await process.communicate()
    finally:
      os.close(fd)
    if process.returncode:
      raise sandbox.SandboxError(f"process: {error.decode().strip()[:200]}")

  async def _start_reaper(self) -> None:
    """Starts the process that kills the others should this one be killed.

    It is none of theirs: with a user of its own it is not of that user, and
    it becomes it only to kill; without, it finds them by their environment.
    """
    read_end, self._lifeline = os.pipe()
    if self._uid is not None:
      kill = ["exec", *bubblewrap.as_user(self._uid), "/bin/sh", "-c"]
      script = f"read _; {shlex.join([*kill, 'kill -KILL -1'])}"
    else:
      mark = shlex.quote(f"{_MARK}={self._dir.name}")
      script = (
        "read _; for p in /proc/[0-9]*; do "
        f"grep -qsxzF {mark} $p/environ && kill -KILL ${{p#/proc/}}; done"
      )
    try:
      self._reaper = await spawn.spawn(
        "/bin/sh",
        "-c",
        script,
        stdin=read_end,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PATH": local.PATH},
        cwd="/",
        start_new_session=True,
      )
    finally:
      os.close(read_end)

  async def _spawn_shell(self, cwd: str) -> limits.Process:
    # The watchdog may still be ending the last shell's processes.
    await asyncio.to_thread(self._killing.acquire)
    self._killing.release()
    own = self._uid is not None
    script = (
      f"umask 022\n{limits.ulimits(self._caps, processes=own)}\n"
      f'cd -- "$1" 2>/dev/null || cd {self._start_dir}\n'
      f"{shell.EXEC.format('bash')} {self._shell.redirections()}"
    )
    self._process = await spawn.spawn(
      *bubblewrap.as_user(self._uid),
      *("/bin/bash", "-c", script, "bash", cwd),
      stdin=asyncio.subprocess.DEVNULL,
      stdout=asyncio.subprocess.DEVNULL,
      stderr=asyncio.subprocess.DEVNULL,
      env=self._env,
      cwd="/",
      pass_fds=self._shell.fds,
      start_new_session=True,
    )
    found = limits.read_process(self._process.pid)
    if found is None:
      raise sandbox.SandboxError("process: the shell is gone")
    self._session = found.pid
    self._waiter = asyncio.create_task(self._wait(self._process))
    return found

  async def _wait(self, process: asyncio.subprocess.Process) -> None:
    status = await process.wait()
    await asyncio.to_thread(self._kill_all)
    self._shell_ended(128 - status if status < 0 else status)

  def _processes(self) -> dict[int, limits.Process]:
    if self._uid is not None:
      return limits.owned_by(self._uid)
    return self._related(limits.owned_by(os.geteuid()))

  def _related(self, everyone) -> dict[int, limits.Process]:
    """Those in the shell's session, and descendants of any once seen."""
    found: dict[int, limits.Process] = {}
    for process in sorted(everyone.values(), key=lambda p: p.start):
      if (
        process.session == self._session
        or process.ppid in found
        or (process.pid, process.start) in self._seen
      ):
        found[process.pid] = process
    self._seen = {(p.pid, p.start) for p in found.values()}
    return found

  def _marked(self) -> dict[int, limits.Process]:
    """Our own processes that carry this sandbox's environment."""
    mark = f"{_MARK}={self._dir.name}\0".encode()
    out = {}
    for pid, process in limits.owned_by(os.geteuid()).items():
      with contextlib.suppress(OSError):
        if mark in pathlib.Path(f"/proc/{pid}/environ").read_bytes() + b"\0":
          out[pid] = process
    return out

  def _kill_all(self) -> None:
    # Another thread at it kills the same; one that is stuck is not awaited.
    mine = self._killing.acquire(timeout=_WAIT_S)
    try:
      self._kill_rounds()
    finally:
      if mine:
        self._killing.release()

  def _kill_rounds(self) -> None:
    for _ in range(_ROUNDS):
      found = self._processes()
      if self._uid is None:
        found |= self._marked()
      alive = [p for p in found.values() if p.state not in "ZX"]
      if not alive:
        return
      if self._uid is not None:
        # As that user, whose processes are all of this sandbox: one call
        # that no fork can outrun.
        subprocess.run(
          [*bubblewrap.as_user(self._uid), "/bin/sh", "-c", "kill -KILL -1"],
          check=False,
          env={},
          stderr=subprocess.DEVNULL,
        )
        continue
      for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in alive:
          limits.send_signal(process, number)

  async def _end(self) -> None:
    await asyncio.to_thread(self._kill_all)
    if self._waiter is not None:
      await self._waiter
    if self._reaper is not None:
      with contextlib.suppress(ProcessLookupError):
        self._reaper.kill()
      await self._reaper.wait()
      self._reaper = None
    if self._lifeline >= 0:
      os.close(self._lifeline)
      self._lifeline = -1

  def _disk_use(self) -> tuple[int, int]:
    """(bytes, entries) under the sandbox's own directories."""
    used = count = 0
    todo = [str(self._root)]
    while todo and count <= self._caps.max_inodes:
      try:
        with os.scandir(todo.pop()) as entries:
          for entry in entries:
            count += 1
            used += entry.stat(follow_symlinks=False).st_blocks * 512
            if entry.is_dir(follow_symlinks=False):
              todo.append(entry.path)
      except OSError:
        continue
    return used, count


async def start(request: sandbox.Request) -> ProcessSandbox:
  """Opens a process sandbox, with a warning.

  Raises:
    sandbox.SandboxError: it cannot be set up.
    image.ImageRefused: the task needs an image.
  """
  image.host_layout(request.task)
  _warn(os.geteuid() == 0)
  box = ProcessSandbox(request, sandbox.new_directory())
  try:
    await box.start()
  except BaseException:
    await box.close()
    raise
  return box
