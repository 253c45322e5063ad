"""Starting processes so that no cancellation loses one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

_REAP_TIMEOUT_S = 5.0


async def to_its_end(work: asyncio.Future) -> None:
  """Waits until `work` is done, however often the waiter is cancelled.

  Raises:
    asyncio.CancelledError: afterwards, where it was.
  """
  cancelled = None
  while not work.done():
    try:
      await asyncio.wait({work})
    except asyncio.CancelledError as e:
      cancelled = e
  if cancelled is not None:
    raise cancelled


async def spawn(*command: str, **options: Any) -> asyncio.subprocess.Process:
  """asyncio.create_subprocess_exec, whole even where the caller is cancelled.

  Cancelled between the start of the process and that of its pipes, asyncio's
  own call can wait for ever; here the process is started, and ended again.

  Args:
    *command: program and arguments.
    **options: as for asyncio.create_subprocess_exec.

  Raises:
    OSError: it cannot be started.
    asyncio.CancelledError: after its end, where the caller was cancelled.
  """
  work = asyncio.ensure_future(
    asyncio.create_subprocess_exec(*command, **options)
  )
  try:
    await to_its_end(work)
  except asyncio.CancelledError:
    if not work.cancelled() and work.exception() is None:
      process = work.result()
      with contextlib.suppress(ProcessLookupError):
        process.kill()
      await asyncio.wait(
        {asyncio.ensure_future(process.wait())}, timeout=_REAP_TIMEOUT_S
      )
    raise
  return work.result()
