"""One bash that lives over many turns, spoken to through three pipes.

Commands go in by its standard input, one `eval` a line; a command's own
standard input is /dev/null. What it prints, on both streams, comes out of one
pipe. That it has ended is said on a third: after the eval the shell prints a
random number that stood unread in its input until then, on a descriptor that
is closed while the command runs. Nothing that is printed can forge the end of
a command, and no program that it started can reach the third pipe (where the
backend also hides the shell's /proc entries: bubblewrap does). Shell code that
goes looking for the shell's own descriptors can only cut its own turn short.

The shell is interactive, without a terminal and without line editing: an
interrupt abandons the command and keeps the shell with its variables,
functions and jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import re
import secrets

CONTROL_FD = 99
MARK_FD = 98
_MARK_TIMEOUT_S = 5.0
# What bash says when a child dies of a signal and there is no terminal.
_NOISE = re.compile(rb"bash: \[\d+: \d+ \(\d+\)\] tcsetattr: [^\n]*\n")
_KILL_FACTOR = 16
_PIPE_BYTES = 1 << 18
_PLAIN = frozenset(
  b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
  b' _-+=./,:;@%^(){}[]<>|&*?~$#"'
)
# Assigning POSIXLY_CORRECT makes special builtins come before functions, so
# that `unset` cannot have been replaced; it then frees the names used here.
_FREE_NAMES = (
  "POSIXLY_CORRECT=1\n"
  "\\unset -f builtin eval printf unset exit\n"
  "\\unset POSIXLY_CORRECT\n"
)
EXEC = "exec -a bash {} --norc --noprofile --noediting -i"


@dataclasses.dataclass(frozen=True)
class CommandResult:
  """What one command did.

  Attributes:
    output: standard output and error, merged, cut in the middle if long.
    exit_code: its status, or None when it was ended from outside.
    timed_out: its own timeout ended it.
    truncated: bytes were left out of `output`.
    killed: the limit that ended it ("memory", "processes", "inodes", "disk",
      "output", "cpu", "wall"), or "".
    restarted: the shell is a new one: variables, functions, jobs are gone.
    notice: one line for the agent about the above, or "".
    exhausted: no further command can run ("cpu" or "wall" of the sandbox).
  """

  output: str
  exit_code: int | None
  timed_out: bool = False
  truncated: bool = False
  killed: str = ""
  restarted: bool = False
  notice: str = ""
  exhausted: bool = False


class OutputBuffer:
  """Keeps the first and the last half of a limit, whatever comes."""

  def __init__(self, limit: int):
    self._half = max(limit // 2, 1)
    self._head = bytearray()
    self._tail = bytearray()
    self.total = 0

  def add(self, data: bytes) -> None:
    """Appends bytes; memory stays within twice the limit."""
    self.total += len(data)
    room = self._half - len(self._head)
    if room > 0:
      self._head += data[:room]
      data = data[room:]
    self._tail += data
    if len(self._tail) > 2 * self._half:
      del self._tail[: -self._half]

  def cut_mark(self, mark: bytes) -> bool:
    """Removes `mark`, and what follows it, if it is near the end."""
    end = self._tail if self._tail else self._head
    at = end.rfind(mark)
    if at < 0 and self._head and self._tail:
      # It lies across the two halves.
      at = (self._head + self._tail).rfind(mark) - len(self._head)
      if at < -len(mark):
        return False
    if at < 0 and end is self._head:
      return False
    self.total -= len(end) - at
    if at < 0:
      del self._head[at:]
      self._tail.clear()
    else:
      del end[at:]
    return True

  @property
  def truncated(self) -> bool:
    """True when bytes were left out."""
    return self.total > 2 * self._half

  def text(self) -> str:
    """The text, with a line that says how many bytes are missing."""
    head = self._head.decode("utf-8", "replace")
    tail = bytes(self._tail[-self._half :]).decode("utf-8", "replace")
    if not self.truncated:
      whole = _NOISE.sub(b"", bytes(self._head + self._tail))
      return whole.decode("utf-8", "replace")
    return f"{head}\n[... {self.total - 2 * self._half} bytes ...]\n{tail}"


def quote(command: str) -> str:
  """`command` as one $'...' word on one line; NUL bytes are dropped."""
  out = []
  for byte in command.encode("utf-8", "surrogateescape"):
    if byte in _PLAIN or byte >= 0x80:
      out.append(bytes([byte]))
    elif byte:
      # Octal with three digits ends by itself, whatever follows.
      out.append(b"\\%03o" % byte)
  return "$'" + b"".join(out).decode("utf-8", "surrogateescape") + "'"


def high(fd: int) -> int:
  """Moves a descriptor that a shell inherits above those that it uses."""
  moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 128)
  os.close(fd)
  return moved


class Shell:
  """The host's ends of the three pipes of one sandbox.

  The ends that the shell inherits (`stdin_r`, `output_w`, `control_w`) stay
  open here too, so that a new shell can take the place of one that died.

  Args:
    max_output_bytes: kept of one command.
    marks_output: the pipes are a client's, whose two output streams may
      overtake each other: the end is marked in the output too, and waited for.
  """

  def __init__(self, max_output_bytes: int, *, marks_output: bool = False):
    self._marks_output = marks_output
    self.stdin_r, self._stdin_w = os.pipe()
    self._output_r, self.output_w = os.pipe()
    self._control_r, self.control_w = os.pipe()
    self.stdin_r = high(self.stdin_r)
    self.output_w = high(self.output_w)
    self.control_w = high(self.control_w)
    self._max_output_bytes = max_output_bytes
    for fd in (self._stdin_w, self._output_r, self._control_r):
      os.set_blocking(fd, False)
    with contextlib.suppress(OSError):
      fcntl.fcntl(self._output_r, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    self._buffer = OutputBuffer(max_output_bytes)
    self._control = b""
    self._pending = b""
    self._closed = False

  @property
  def fds(self) -> tuple[int, int, int]:
    """What the sandbox inherits: stdin, output, control."""
    return self.stdin_r, self.output_w, self.control_w

  def redirections(self) -> str:
    """Bash redirections that connect a new shell to the pipes."""
    i, o, c = self.fds
    return f"<&{i} >&{o} 2>&{o} {CONTROL_FD}>&{c} {i}<&- {o}>&- {c}>&-"

  def reset(self) -> None:
    """Forgets everything unread, for a shell that starts anew."""
    os.set_blocking(self.stdin_r, False)
    for fd in (self.stdin_r, self._control_r):
      with contextlib.suppress(BlockingIOError):
        while os.read(fd, 65536):
          pass
    os.set_blocking(self.stdin_r, True)
    self.drain()
    self._control = b""
    self._pending = b""

  def close(self) -> None:
    """Closes every end."""
    if self._closed:
      return
    self._closed = True
    for fd in (*self.fds, self._stdin_w, self._output_r, self._control_r):
      os.close(fd)

  def drain(self) -> str:
    """Takes what has been printed so far."""
    self._read_all_output()
    text = self._buffer.text()
    self._buffer = OutputBuffer(self._max_output_bytes)
    return text

  def _read_output(self) -> None:
    while True:
      try:
        data = os.read(self._output_r, _PIPE_BYTES)
      except BlockingIOError:
        return
      self._buffer.add(data)
      if len(data) < 4096 or self._buffer.total > self._flood:
        return

  @property
  def _flood(self) -> int:
    return self._max_output_bytes * _KILL_FACTOR

  async def run(
    self, command: str, stop: asyncio.Event, status: int = 0
  ) -> tuple[int | None, OutputBuffer, str]:
    """Runs one command until it ends, floods, or `stop` is set.

    Args:
      command: any text.
      stop: set it to give up on the command.
      status: what the command finds in $?.

    Returns:
      (exit code or None, its output, "" or "stop" or "output").
    """
    loop = asyncio.get_running_loop()
    nonce = secrets.token_hex(16)
    before = f"(\\exit {status});" if status else ""
    closed = f"{CONTROL_FD}>&-"
    mark = ""
    if self._marks_output:
      closed += f" {MARK_FD}>&-"
      mark = f"\\builtin printf %s {nonce} >&{MARK_FD}\n"
    self._pending += (
      f"{before}\\builtin eval {quote(command)} </dev/null {closed}\n"
      f"__gyre_status=$?\n{_FREE_NAMES}{mark}"
      f"\\builtin printf '%s %s\\n' {nonce} \"$__gyre_status\" "
      f">&{CONTROL_FD}\n"
    ).encode("utf-8", "surrogateescape")
    done: asyncio.Future = loop.create_future()

    def finish(value):
      if not done.done():
        done.set_result(value)

    def on_output():
      self._read_output()
      if self._buffer.total > self._flood:
        finish((None, "output"))

    def on_control():
      with contextlib.suppress(BlockingIOError):
        self._control += os.read(self._control_r, 4096)
      *lines, self._control = self._control.split(b"\n")
      self._control = self._control[-256:]
      for line in lines:
        number, _, status = line.partition(b" ")
        if number == nonce.encode() and status.isdigit():
          finish((int(status), ""))

    def on_writable():
      with contextlib.suppress(BlockingIOError):
        self._pending = self._pending[os.write(self._stdin_w, self._pending) :]
      if not self._pending:
        loop.remove_writer(self._stdin_w)

    waiter = asyncio.ensure_future(stop.wait())
    loop.add_reader(self._output_r, on_output)
    loop.add_reader(self._control_r, on_control)
    loop.add_writer(self._stdin_w, on_writable)
    on_writable()
    try:
      await asyncio.wait({waiter, done}, return_when=asyncio.FIRST_COMPLETED)
      code, why = done.result() if done.done() else (None, "stop")
    finally:
      waiter.cancel()
      loop.remove_reader(self._output_r)
      loop.remove_reader(self._control_r)
      loop.remove_writer(self._stdin_w)
    self._read_all_output()
    if self._marks_output and not why:
      end = loop.time() + _MARK_TIMEOUT_S
      while not self._buffer.cut_mark(nonce.encode()):
        if loop.time() > end:
          break
        await asyncio.sleep(0.002)
        self._read_all_output()
    buffer, self._buffer = self._buffer, OutputBuffer(self._max_output_bytes)
    self._nonce = nonce
    return code, buffer, why

  def _read_all_output(self) -> None:
    """Everything that the pipe holds: the command wrote it before its end."""
    budget = 2 * _PIPE_BYTES
    while budget > 0:
      try:
        data = os.read(self._output_r, _PIPE_BYTES)
      except BlockingIOError:
        return
      self._buffer.add(data)
      budget -= len(data)

  async def back(self, timeout_s: float) -> bool:
    """True once an interrupted command's end has been said."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while True:
      with contextlib.suppress(BlockingIOError):
        self._control += os.read(self._control_r, 4096)
      if self._nonce.encode() in self._control and not self._pending:
        self._control = b""
        self.drain()
        return True
      if loop.time() >= end:
        return False
      self._read_all_output()
      await asyncio.sleep(0.005)
