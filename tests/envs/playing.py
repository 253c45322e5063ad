"""Commands played in a sandbox, and what is left of them on the host."""

import asyncio
import os
import pathlib
import time
import uuid

from gyre.envs import sandbox
from gyre.envs import task as task_lib

SECRET = "gyre-secret-" + uuid.uuid4().hex
REPO = pathlib.Path(__file__).resolve().parents[2]
TASK = task_lib.Task("abuse", "x", files={"f": task_lib.FileSpec(b"x")})
# ctypes, for system calls that have no program; prints the result and errno.
SYSCALL = (
  "python3 -c 'import ctypes, sys; c = ctypes.CDLL(None, use_errno=True); "
  "r = c.syscall(*[int(a, 0) for a in sys.argv[1:]]); "
  'print("syscall", r, ctypes.get_errno())\' '
)
EPERM, ENOSYS = 1, 38
X86_64 = os.uname().machine == "x86_64"


def play(options, *commands, task=TASK, timeout_s=10.0, during=None):
  """The results of commands in one sandbox; `during(box)` runs at the end."""

  async def main():
    box = await sandbox.open_sandbox(options, task)
    try:
      results = [await box.run(c, timeout_s) for c in commands]
      if during is not None:
        await during(box)
      return results
    finally:
      await box.close()

  return asyncio.run(main())


def output(options, command, **kwargs):
  """What one command prints; the shell must work on after it."""
  result, after = play(options, command, "echo alive", **kwargs)
  assert after.output.endswith("alive\n")
  return result.output


def host_processes(mark):
  """Processes of the host whose command line holds `mark`."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      if mark.encode() in path.read_bytes():
        found.append(int(path.parent.name))
    except OSError:
      continue
  return [p for p in found if p != os.getpid()]


def gone(mark):
  """True once no process with `mark` is left; waits a little."""
  for _ in range(100):
    if not host_processes(mark):
      return True
    time.sleep(0.02)
  return False
