"""What a sandbox may use, and the thread that ends what uses more.

Two layers. Resource limits (`ulimit`) bind each process in the kernel: address
space in use, one file's size, open files, processes, CPU. The watchdog bounds
what they cannot: the sums over a process tree. It is a thread of its own, so
that it acts while the event loop is busy compiling or training.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable

from gyre import config

_TICK_S = 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")
_HERTZ = os.sysconf("SC_CLK_TCK")
MAX_INODES = 65536
MIB = 1 << 20
_UNSEEN = -1


@dataclasses.dataclass(frozen=True)
class Caps:
  """A sandbox's limits, resolved from the configuration and the task.

  Attributes:
    cpu_s: CPU seconds of the whole sandbox, over its life.
    wall_s: seconds that commands may run, summed over the sandbox's life;
      waiting for a model between turns does not count.
    memory_mib: resident memory of all processes together; also the private
      writable memory of any one.
    disk_mib: bytes in the workspace; as much again in /tmp.
    max_inodes: files in the workspace, and in /tmp.
    max_processes: processes and threads.
    max_files: open files a process.
    max_output_bytes: output kept of one command; 16 times as much ends it.
  """

  cpu_s: float
  wall_s: float
  memory_mib: int
  disk_mib: int
  max_inodes: int
  max_processes: int
  max_files: int
  max_output_bytes: int


def caps(options: config.Sandbox, memory_mib: int = 0, disk_mib: int = 0):
  """The limits of a sandbox; a task may ask for less, never for more."""
  return Caps(
    cpu_s=options.cpu_s,
    wall_s=options.wall_s,
    memory_mib=min(memory_mib or options.memory_mib, options.memory_mib),
    disk_mib=min(disk_mib or options.disk_mib, options.disk_mib),
    max_inodes=MAX_INODES,
    max_processes=options.max_processes,
    max_files=max(options.max_files, 128),
    max_output_bytes=options.max_output_bytes,
  )


def ulimits(limit: Caps, *, processes: bool = True) -> str:
  """Shell text that sets the limits, hard and soft, of what follows.

  RLIMIT_DATA counts private writable memory, so one process that allocates
  more than memory_mib is refused at once, while runtimes that only reserve
  address space (Java, Node, Go) still start; RLIMIT_AS backs it up for
  mappings that RLIMIT_DATA leaves out.
  """
  cpu = int(limit.cpu_s) + 2
  lines = [
    "ulimit -c 0",
    f"ulimit -d {limit.memory_mib * 1024}",
    f"ulimit -v {limit.memory_mib * 1024 * 16}",
    f"ulimit -f {limit.disk_mib * 1024}",
    f"ulimit -n {limit.max_files}",
    f"ulimit -t {cpu}",
    "ulimit -l 64",
    "ulimit -q 65536",
    "ulimit -i 512",
  ]
  if processes:
    lines.append(f"ulimit -u {limit.max_processes}")
  return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Process:
  """What /proc says of one process: CPU in seconds, memory in bytes."""

  pid: int
  ppid: int
  cpu_s: float
  rss: int
  state: str
  threads: int
  start: int
  session: int


def read_process(pid: int) -> Process | None:
  """The process as /proc shows it, or None when it is gone."""
  try:
    with open(f"/proc/{pid}/stat", "rb") as f:
      text = f.read()
  except OSError:
    return None
  fields = text[text.rindex(b")") + 2 :].split()
  return Process(
    pid=pid,
    ppid=int(fields[1]),
    cpu_s=sum(map(int, fields[11:15])) / _HERTZ,
    rss=int(fields[21]) * _PAGE,
    state=fields[0].decode(),
    threads=int(fields[17]),
    start=int(fields[19]),
    session=int(fields[3]),
  )


def _children(process: Process) -> Iterable[int]:
  base = f"/proc/{process.pid}/task"
  try:
    tasks = os.listdir(base) if process.threads > 1 else [str(process.pid)]
    for task in tasks:
      with open(f"{base}/{task}/children", "rb") as f:
        yield from map(int, f.read().split())
  except OSError:
    return


def tree(root: int) -> dict[int, Process]:
  """The live processes under `root`, itself included, by pid.

  When `root` is the init of a process namespace nothing in it can hide:
  orphans become its children.
  """
  out: dict[int, Process] = {}
  todo = [root]
  while todo:
    process = read_process(todo.pop())
    if process is not None and process.pid not in out:
      out[process.pid] = process
      todo += _children(process)
  return out


def owned_by(uid: int) -> dict[int, Process]:
  """The live processes of user `uid`, by pid."""
  out = {}
  for name in os.listdir("/proc"):
    if not name.isdigit():
      continue
    try:
      if os.stat(f"/proc/{name}").st_uid != uid:
        continue
    except OSError:
      continue
    process = read_process(int(name))
    if process is not None:
      out[process.pid] = process
  return out


def send_signal(process: Process, number: int) -> None:
  """Signals exactly that process: a reused pid is left alone."""
  try:
    fd = os.pidfd_open(process.pid)
  except OSError:
    return
  try:
    now = read_process(process.pid)
    if now is not None and now.start == process.start:
      signal.pidfd_send_signal(fd, number)
  except OSError:
    return
  finally:
    os.close(fd)


class CommandClock:
  """Decides when a command has run for too long.

  By the wall clock; in deterministic mode by CPU seconds, and by the seconds
  in which none of its processes could run: a slow machine then changes
  nothing, and `sleep 1000` still ends.
  """

  def __init__(self, timeout_s: float, cpu_s: float, deterministic: bool):
    self._timeout_s = timeout_s
    self._deterministic = deterministic
    self._cpu_start = cpu_s
    self._start = self._last = time.monotonic()
    self._idle_s = 0.0

  def elapsed(self, cpu_s: float, runnable: bool) -> float:
    """Seconds on the clock that this mode counts."""
    now = time.monotonic()
    if not runnable:
      self._idle_s += now - self._last
    self._last = now
    if self._deterministic:
      return max(cpu_s - self._cpu_start, 0.0) + self._idle_s
    return now - self._start

  def expired(self, cpu_s: float, runnable: bool) -> bool:
    """True once the command's time is up."""
    return self.elapsed(cpu_s, runnable) >= self._timeout_s


class Watchdog:
  """Watches one sandbox: its sums, its command's clock, its disk.

  Args:
    limit: what the sandbox may use.
    processes: lists its live processes, without its supervisor's own.
    disks: open directory descriptors, one a file system that it may fill.
    disk_bytes: bytes used, for a sandbox without file systems of its own.
    on_limit: called, from the watchdog's thread, with what was exceeded:
      "memory", "inodes", "disk", "processes", "cpu" or "wall".
    on_timeout: called, from that thread, when the command's time is up.
    deterministic: see CommandClock.
  """

  def __init__(
    self,
    limit: Caps,
    processes: Callable[[], dict[int, Process]],
    *,
    disks: Iterable[int] = (),
    disk_bytes: Callable[[], tuple[int, int]] | None = None,
    on_limit: Callable[[str], None],
    on_timeout: Callable[[], None],
    deterministic: bool = False,
  ):
    self._limit = limit
    self._processes = processes
    self._disks = tuple(disks)
    self._disk_bytes = disk_bytes
    self._on_limit = on_limit
    self._on_timeout = on_timeout
    self._deterministic = deterministic
    self._clock: CommandClock | None = None
    self._timed_out = False
    self._paused = False
    self._wall_s = 0.0
    self._cpu_seen: dict[tuple[int, int], float] = {}
    self._cpu_gone = 0.0
    self._fired: dict[str, int] = {}
    self._closed = False
    self.acting = False
    self._wake = threading.Condition()
    self._thread: threading.Thread | None = None

  @property
  def cpu_s(self) -> float:
    """CPU seconds seen so far, of live and ended processes."""
    return self._cpu_gone + sum(self._cpu_seen.values())

  def begin(self, timeout_s: float) -> None:
    """A command starts; its clock runs until `end`."""
    with self._wake:
      self._timed_out = self._paused = False
      self._clock = CommandClock(timeout_s, self.cpu_s, self._deterministic)
      if self._thread is None and not self._closed:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
      self._wake.notify()

  def end(self) -> None:
    """The command is over; pauses until `begin` or `resume`.

    What was begun before still goes on while `acting` is True: nothing new may
    start meanwhile, or it would be taken for what was seen.
    """
    with self._wake:
      self._paused = True
      if self._clock is not None:
        self._wall_s += self._clock.elapsed(self.cpu_s, False)
      self._clock = None

  def resume(self) -> None:
    """Watches background jobs between commands."""
    with self._wake:
      self._paused = False

  def close(self) -> None:
    """Stops watching."""
    with self._wake:
      self._closed = True
      self._wake.notify()
    if (
      self._thread is not None
      and self._thread is not threading.current_thread()
    ):
      self._thread.join()

  def _run(self) -> None:
    while True:
      with self._wake:
        if self._closed:
          return
        # Between commands only background jobs can run: look less often.
        self._wake.wait(_TICK_S if self._clock is not None else 5 * _TICK_S)
        if self._closed:
          return
        clock = self._clock
        paused = self._paused
      if not paused:
        self._look(clock)

  def _account(self, found: dict[int, Process]) -> None:
    """CPU of live processes, plus the last reading of those that ended.

    A parent's figure includes the children that it has waited for, so what
    vanished is counted only as far as no ancestor's figure grew by it; the
    sum is kept monotone.
    """
    before = self.cpu_s
    self._cpu_seen = {(p.pid, p.start): p.cpu_s for p in found.values()}
    live = sum(self._cpu_seen.values())
    self._cpu_gone = max(self._cpu_gone, before - live)

  def _look(self, clock: CommandClock | None) -> None:
    found = self._processes()
    self._account(found)
    limit = self._limit
    reason = ""
    wall_s = self._wall_s
    if clock is not None:
      runnable = any(p.state in "RD" for p in found.values())
      wall_s += clock.elapsed(self.cpu_s, runnable)
    if sum(p.rss for p in found.values()) > limit.memory_mib * MIB:
      reason = "memory"
    elif sum(p.threads for p in found.values()) > limit.max_processes + 2:
      reason = "processes"
    elif self.cpu_s > limit.cpu_s:
      reason = "cpu"
    elif wall_s > limit.wall_s:
      reason = "wall"
    else:
      reason = self._disk_reason()
    if reason:
      self._act(lambda: self._on_limit(reason), pause=True)
    elif (
      clock is not None
      and not self._timed_out
      and clock.expired(self.cpu_s, True)
    ):
      self._timed_out = True
      self._act(self._on_timeout, pause=False)

  def _act(self, action: Callable[[], None], *, pause: bool) -> None:
    """Acts on what was seen, unless that is over; see `acting`."""
    with self._wake:
      if self._paused:
        return
      self._paused, self.acting = pause, True
    try:
      action()
    finally:
      self.acting = False

  def _disk_reason(self) -> str:
    for i, fd in enumerate(self._disks):
      info = os.fstatvfs(fd)
      inodes = info.f_files - info.f_ffree
      if self._grew(f"inodes{i}", inodes, self._limit.max_inodes):
        return "inodes"
    if self._disk_bytes is not None:
      used, inodes = self._disk_bytes()
      if self._grew("disk", used, self._limit.disk_mib * MIB):
        return "disk"
      if self._grew("inodes", inodes, self._limit.max_inodes):
        return "inodes"
    return ""

  def _grew(self, name: str, used: int, limit: int) -> bool:
    """True when `used` is above its limit and above what it was left at.

    Files stay when processes end: the agent must be able to remove them. What
    it was left at is first seen after the processes that wrote have ended.
    """
    if used <= max(limit, self._fired.get(name, 0)):
      return False
    if self._fired.get(name) == _UNSEEN:
      self._fired[name] = used
      return False
    self._fired[name] = _UNSEEN
    return True
