"""What the bubblewrap and process backends share: a shell on this machine."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal

from gyre.envs import limits, sandbox, shell, snapshot

_START_TIMEOUT_S = 30.0
_KILL_TIMEOUT_S = 5.0
_INIT = (
  "PS1=; PS2=; set +o histexpand +o history; unset HISTFILE; "
  "shopt -u checkwinsize"
)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DATE = f"""#!/bin/bash
for word; do
  case $word in
    -[dfrs]*|--d*|--f*|--r*|--s*) exec /usr/bin/date "$@" ;;
  esac
done
exec /usr/bin/date -d @{snapshot.EPOCH} "$@"
"""
_NEW = "a new shell was started: variables, functions and jobs are gone"
_WHY = {
  "memory": "it used more memory than the sandbox has",
  "processes": "it started more processes than the sandbox allows",
  "inodes": "it made more files than the sandbox allows",
  "disk": "it wrote more than the sandbox's disk holds",
  "output": "it printed too much",
  "cpu": "the sandbox's CPU time is used up",
  "wall": "the sandbox's time is used up",
}


def environment(request: sandbox.Request, home: str, workdir: str) -> dict:
  """The variables of a sandbox: fixed ones and the task's, never the host's."""
  env = {
    "PATH": PATH,
    "HOME": home,
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "PWD": workdir,
    "PYTHONDONTWRITEBYTECODE": "1",
  }
  if request.deterministic:
    env |= {"PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": str(snapshot.EPOCH)}
  if request.logs:
    env |= {"GYRE_WORKSPACE": workdir, "GYRE_VERIFIER_DIR": "/logs/verifier"}
  return env | dict(request.task.env) | dict(request.env)


def write_date(directory: pathlib.Path) -> None:
  """The `date` of deterministic mode, which starts at the fixed time."""
  directory.mkdir(mode=0o755, exist_ok=True)
  path = directory / "date"
  path.write_text(_DATE)
  path.chmod(0o755)


class LocalSandbox(abc.ABC):
  """A persistent shell in processes of this machine.

  A subclass starts shells, lists and ends processes, and opens directories.
  """

  name = ""

  def __init__(self, request: sandbox.Request, directory: pathlib.Path):
    self._request = request
    self._dir = directory
    task = request.task.limits
    self._caps = limits.caps(request.options, task.memory_mib, task.storage_mib)
    self._shell = shell.Shell(self._caps.max_output_bytes)
    self._shell_process: limits.Process | None = None
    self._shell_exit: asyncio.Future | None = None
    self._stop = asyncio.Event()
    self._loop = asyncio.get_running_loop()
    self._limit = ""
    self._timed_out = False
    self._turn = 0
    self._status = 0
    self._ended = False
    self._watchdog: limits.Watchdog | None = None
    self._fds: dict[str, int] = {}
    self._turn_lock = asyncio.Lock()
    self.workdir = self._start_dir = "/app"
    self.workspace = directory / "workspace.tar"
    self.kept_without: list[str] = []

  # What a backend provides.

  @abc.abstractmethod
  async def _spawn_shell(self, cwd: str) -> limits.Process:
    """Starts a shell in `cwd` on the pipes of `self._shell`."""

  @abc.abstractmethod
  def _processes(self) -> dict[int, limits.Process]:
    """The live processes, without a supervisor; callable from any thread."""

  @abc.abstractmethod
  def _kill_all(self) -> None:
    """Ends every process but a supervisor; callable from any thread."""

  @abc.abstractmethod
  async def _end(self) -> None:
    """Ends every process, supervisor included."""

  def _to_host(self, text: str) -> str:
    """Paths of the sandbox as the host knows them."""
    return text

  def _from_host(self, text: str) -> str:
    """The opposite of _to_host."""
    return text

  # The turn.

  @property
  def cpu_s(self) -> float:
    return self._watchdog.cpu_s if self._watchdog else 0.0

  def _watch(self, **options) -> None:
    self._watchdog = limits.Watchdog(
      self._caps,
      self._processes,
      on_limit=self._on_limit,
      on_timeout=self._on_timeout,
      deterministic=self._request.deterministic,
      **options,
    )

  def _set_stop(self) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has closed
      self._loop.call_soon_threadsafe(self._stop.set)

  def _on_limit(self, reason: str) -> None:
    self._limit = self._limit or reason
    self._kill_all()
    self._set_stop()

  def _on_timeout(self) -> None:
    self._timed_out = True
    self._set_stop()

  def _shell_ended(self, status: int) -> None:
    """A backend reports that the shell is gone."""
    self._shell_process = None
    if self._shell_exit is not None and not self._shell_exit.done():
      self._shell_exit.set_result(status)
    self._stop.set()

  async def _start_shell(self, cwd: str) -> None:
    self._shell.reset()
    await self._settle()
    self._stop = asyncio.Event()
    self._shell_exit = self._loop.create_future()
    self._shell_process = await self._spawn_shell(cwd)
    seed = "; RANDOM=1" if self._request.deterministic else ""
    start = self._shell.run(_INIT + seed, self._stop)
    try:
      code, _, _ = await asyncio.wait_for(start, _START_TIMEOUT_S)
    except TimeoutError:
      code = None
    if code is None:
      raise sandbox.SandboxError(f"{self.name}: the shell does not start")
    self._shell.drain()

  def _cwd(self) -> str:
    if self._shell_process is None:
      return self._start_dir
    try:
      return os.readlink(f"/proc/{self._shell_process.pid}/cwd")
    except OSError:
      return self._start_dir

  async def _interrupt(self, before: set[tuple[int, int]]) -> bool:
    """Ends what a command started; True when the shell lives on."""
    target = self._shell_process
    for attempt in range(8):
      if target is None or self._shell_process is not target:
        return False
      started = self._since(before, target)
      # The shell first: it must know of the interrupt when its child dies.
      limits.send_signal(target, signal.SIGINT)
      for process in started:
        limits.send_signal(
          process, signal.SIGINT if attempt == 0 else signal.SIGKILL
        )
      if await self._shell.back(0.08):
        for process in self._since(before, target):
          limits.send_signal(process, signal.SIGKILL)
        return True
    return False

  def _since(self, before, target) -> list[limits.Process]:
    return [
      p
      for p in self._processes().values()
      if (p.pid, p.start) not in before and p.pid != target.pid
    ]

  async def _settle(self) -> None:
    """Waits until what was killed is gone, memory and all."""
    end = self._loop.time() + _KILL_TIMEOUT_S
    while any(p.state not in "ZX" for p in self._processes().values()):
      if self._loop.time() > end:
        raise sandbox.SandboxError(f"{self.name}: processes do not end")
      await asyncio.sleep(0.002)

  async def _drop_shell(self) -> None:
    self._kill_all()
    if self._shell_exit is not None:
      await self._await_exit()

  async def _await_exit(self) -> int:
    try:
      return await asyncio.wait_for(
        asyncio.shield(self._shell_exit), _KILL_TIMEOUT_S
      )
    except TimeoutError:
      raise sandbox.SandboxError(
        f"{self.name}: the shell does not end"
      ) from None

  async def run(
    self, command: str, timeout_s: float | None = None
  ) -> shell.CommandResult:
    """See sandbox.Sandbox.run."""
    async with self._turn_lock:
      return await self._run(command, timeout_s or self._caps.wall_s)

  async def _run(self, command: str, timeout_s: float) -> shell.CommandResult:
    if self._ended:
      raise sandbox.SandboxError(f"{self.name}: the sandbox is closed")
    if self._limit in ("cpu", "wall"):
      return shell.CommandResult(
        "",
        None,
        killed=self._limit,
        exhausted=True,
        notice=f"[not run: {_WHY[self._limit]}]",
      )
    late = await self._recover()
    self._stop = asyncio.Event()
    self._limit, self._timed_out = "", False
    before = {(p.pid, p.start) for p in self._processes().values()}
    self._watchdog.begin(timeout_s)
    try:
      code, output, why = await self._shell.run(
        self._to_host(command), self._stop, self._status
      )
    finally:
      await self._unwatched()
    self._turn += 1
    if self._limit:
      why = "stop"
    result = await self._conclude(code, output, why, before, timeout_s)
    if late:
      notice = f"{late} {result.notice}".strip()
      result = dataclasses.replace(result, restarted=True, notice=notice)
    self._watchdog.resume()
    self._status = result.exit_code or 0
    if self._request.deterministic and "workdir" in self._fds:
      for fd in self._fds.values():
        await asyncio.to_thread(
          snapshot.set_times, fd, snapshot.EPOCH + self._turn
        )
    return result

  async def _unwatched(self) -> None:
    """Ends the watch; returns when it does nothing more to what it saw."""
    self._watchdog.end()
    while self._watchdog.acting:
      await asyncio.sleep(0.002)

  async def _recover(self) -> str:
    """A new shell where the last one ended between turns; a line about it."""
    await self._unwatched()
    why = "the shell had ended"
    if self._limit:
      why = f"background jobs were ended: {_WHY[self._limit]}"
      await self._drop_shell()
    if self._shell_process is not None:
      return ""
    await self._start_shell(self._start_dir)
    return f"[{why}; {_NEW}]"

  async def _conclude(self, code, output, why, before, timeout_s):
    killed = self._limit or ("output" if why == "output" else "")
    timed_out = self._timed_out and not killed and why == "stop"
    restarted, notice, cwd = False, "", self._start_dir
    if why and not killed and not timed_out:
      # The command ended the shell itself: exit, exec, kill.
      code = await self._await_exit()
      restarted = True
      notice = f"the shell exited with status {code}"
    elif why:
      notice = (
        f"ended after {timeout_s:g} s"
        if timed_out
        else f"ended: {_WHY[killed]}"
      )
      if not self._limit:
        cwd = self._cwd()
      if self._limit or not await self._interrupt(before):
        await self._drop_shell()
        restarted = True
    if restarted:
      notice += f"; {_NEW}"
      if self._limit not in ("cpu", "wall"):
        await self._start_shell(cwd)
    return shell.CommandResult(
      output=self._from_host(output.text()),
      exit_code=code,
      timed_out=timed_out,
      truncated=output.truncated,
      killed=killed,
      restarted=restarted,
      notice=f"[{notice}]" if notice else "",
      exhausted=killed in ("cpu", "wall"),
    )

  # The end.

  async def close_shell(self) -> pathlib.Path:
    """See sandbox.Sandbox.close_shell."""
    if not self._ended:
      self._ended = True
      if self._watchdog is not None:
        await asyncio.to_thread(self._watchdog.close)
      await self._end()
      if "workdir" in self._fds:
        self.kept_without = await asyncio.to_thread(
          snapshot.pack_directory,
          self._fds["workdir"],
          self.workspace,
          2 * self._caps.disk_mib * limits.MIB,
        )
    return self.workspace

  async def read(self, path: str, max_bytes: int) -> tuple[bytes | None, str]:
    """See sandbox.Sandbox.read."""
    if "logs" not in self._fds or not path.startswith("/logs/"):
      return None, f"{path} is not below /logs"
    return snapshot.read_file(
      self._fds["logs"], path.removeprefix("/logs/"), max_bytes
    )

  async def close(self) -> None:
    """See sandbox.Sandbox.close."""
    if not self._ended:
      self._ended = True
      if self._watchdog is not None:
        await asyncio.to_thread(self._watchdog.close)
      await self._end()
    self._shell.close()
    while self._fds:
      os.close(self._fds.popitem()[1])
    await asyncio.to_thread(shutil.rmtree, self._dir, True)
