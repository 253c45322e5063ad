"""Serves an ASGI app on a unix socket that sandboxes can connect to.

The socket lies in a directory of its own with a name that cannot be guessed,
open to every user of this machine, since a sandbox's user is none of ours: who
may ask for what is the app's to decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import shutil
import socket
from collections.abc import AsyncIterator, Callable

import uvicorn

from gyre.envs import sandbox, spawn

#: Bytes of a unix socket's path on Linux, without the final NUL.
MAX_PATH = 107
# A harness may run a command for long between two calls, and a connection
# that the server closes in the moment of the next one fails that call.
_KEEP_ALIVE_S = 3600
_SHUTDOWN_S = 1
_BACKLOG = 1024


class _Server(uvicorn.Server):
  """Leaves the signals to the program."""

  @contextlib.contextmanager
  def capture_signals(self):
    yield


def _listen(path: pathlib.Path) -> socket.socket:
  length = len(os.fsencode(path))
  if length > MAX_PATH:
    raise sandbox.SandboxError(
      f"the socket {path} has a path of {length} bytes, the system allows "
      f"{MAX_PATH}: set TMPDIR to a shorter directory"
    )
  listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
  try:
    listener.bind(str(path))
    path.chmod(0o666)
    listener.listen(_BACKLOG)
  except OSError as e:
    listener.close()
    raise sandbox.SandboxError(f"cannot listen at {path}: {e}") from e
  return listener


async def _stop(server: _Server, work: asyncio.Task) -> None:
  server.should_exit = True
  await spawn.to_its_end(work)
  work.result()


@contextlib.asynccontextmanager
async def served(app: Callable) -> AsyncIterator[pathlib.Path]:
  """Serves `app` until the end of the block.

  Args:
    app: an ASGI application.

  Yields:
    The socket's path.

  Raises:
    sandbox.SandboxError: the socket cannot be made.
  """
  directory = sandbox.new_directory()
  try:
    directory.chmod(0o711)
    path = directory / "api.sock"
    with _listen(path) as listener:
      server = _Server(
        uvicorn.Config(
          app,
          log_config=None,
          log_level="warning",
          access_log=False,
          ws="none",
          timeout_keep_alive=_KEEP_ALIVE_S,
          timeout_graceful_shutdown=_SHUTDOWN_S,
          backlog=_BACKLOG,
        )
      )
      work = asyncio.ensure_future(server.serve(sockets=[listener]))
      try:
        while not server.started and not work.done():
          await asyncio.sleep(0.002)
        if work.done():
          work.result()
          raise sandbox.SandboxError(f"the server at {path} did not start")
        yield path
      finally:
        await _stop(server, work)
  finally:
    shutil.rmtree(directory, ignore_errors=True)
