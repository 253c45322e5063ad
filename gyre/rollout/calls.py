"""One model call, whatever the engine does to it meanwhile. JAX-free."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib

import numpy as np

from gyre.rollout import engine as engine_lib

MAX_FRUITLESS = 64
_PAUSE_S = 0.01
_ABORT_AGAIN_S = 0.25


def call_seed(seed: int, group_id: str, execution_id: str, call: int) -> int:
  """Seed of one model call, in [0, 2^32): a hash of all that names it."""
  key = f"{seed}\0{group_id}\0{execution_id}\0{call}".encode()
  return int.from_bytes(hashlib.sha256(key).digest()[:4], "big")


def _joined(
  parts: list[engine_lib.Completion], reason: str
) -> engine_lib.Completion:
  def joined(field: str, dtype: type) -> np.ndarray:
    arrays = [np.asarray(getattr(p, field), dtype) for p in parts]
    return np.concatenate([np.zeros(0, dtype), *arrays])

  return engine_lib.Completion(
    ids=joined("ids", np.int32),
    logprobs=joined("logprobs", np.float32),
    versions=joined("versions", np.int32),
    finish_reason=reason,
    routing=parts[-1].routing if parts else None,
  )


async def generate(
  engine: engine_lib.Engine,
  request: engine_lib.Request,
  *,
  timeout_s: float | None = None,
  until: asyncio.Event | None = None,
  on_token: engine_lib.OnToken | None = None,
) -> engine_lib.Completion:
  """One completion; a call that an engine gave up is sent again.

  An engine that is paused, gets new weights or leaves with its cell aborts its
  requests. Prompt and partial go out again, with the same seed, until the
  completion is whole: it is one call, and nobody else notices.

  Args:
    engine: may be a router over several.
    request: request_id must be set, for abort.
    timeout_s: the call is cancelled after so long.
    until: the call is cancelled when this is set.
    on_token: as for Engine.generate; told of each token once.

  Returns:
    The completion; finish_reason "abort" when the timeout or `until` ended
    it, with what was sampled until then.

  Raises:
    EngineDown: the engine failed, or aborts without end.
    Rejected, StaleVersion: of the engine.
  """
  loop = asyncio.get_running_loop()
  deadline = None if timeout_s is None else loop.time() + timeout_s
  parts: list[engine_lib.Completion] = []
  waiter = asyncio.ensure_future(until.wait()) if until is not None else None
  try:
    fruitless = 0
    while fruitless < MAX_FRUITLESS:
      sampled = [i for p in parts for i in p.ids]
      ids = np.concatenate([np.asarray(request.ids), np.asarray(sampled)])
      resent = dataclasses.replace(
        request,
        ids=ids.astype(np.int32),
        max_new_tokens=request.max_new_tokens - len(sampled),
      )
      left = None if deadline is None else deadline - loop.time()
      if (left is not None and left <= 0) or (until and until.is_set()):
        return _joined(parts, "abort")
      part, ours = await _attempt(engine, resent, left, waiter, on_token)
      parts.append(part)
      reason = part.finish_reason
      if reason == "abort" and sum(len(p.ids) for p in parts) == (
        request.max_new_tokens
      ):
        reason = "length"
      if reason != "abort" or ours:
        return _joined(parts, reason)
      # The engine gave the slot away: go on from there.
      fruitless = 0 if len(part.ids) else fruitless + 1
      await asyncio.sleep(_PAUSE_S)
  finally:
    if waiter is not None:
      waiter.cancel()
  raise engine_lib.EngineDown(
    f"{request.request_id} was aborted {MAX_FRUITLESS} times in a row, with "
    "no token sampled"
  )


async def _attempt(
  engine: engine_lib.Engine,
  request: engine_lib.Request,
  left: float | None,
  waiter: asyncio.Future | None,
  on_token: engine_lib.OnToken | None,
) -> tuple[engine_lib.Completion, bool]:
  """Sends a request once.

  Returns:
    The completion, and whether it was we who ended it.
  """
  work = asyncio.ensure_future(engine.generate(request, on_token))
  try:
    ends = {work} if waiter is None else {work, waiter}
    await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    ours = not work.done()
    while not work.done():
      # A router may not have placed it yet: said until it is heard.
      await engine.abort(request.request_id)
      await asyncio.wait({work}, timeout=_ABORT_AGAIN_S)
    return await work, ours
  finally:
    if not work.done():
      work.cancel()
      await engine.abort(request.request_id)
