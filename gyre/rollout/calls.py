"""One model call, whatever the engine does to it meanwhile. JAX-free."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from typing import Any

import numpy as np

from gyre import types
from gyre.rollout import engine as engine_lib

MAX_FRUITLESS = 64
_PAUSE_S = 0.01
_ABORT_AGAIN_S = 0.25
_DISTANT_S = 1e9


def call_seed(seed: int, group_id: str, execution_id: str, call: int) -> int:
  """Seed of one model call, in [0, 2^32): a hash of all that names it."""
  key = f"{seed}\0{group_id}\0{execution_id}\0{call}".encode()
  return int.from_bytes(hashlib.sha256(key).digest()[:4], "big")


class Partial:
  """A request and what was sampled of it so far, by whichever engines.

  Prompt and partial, sent again with the same seed, go on identically
  anywhere. What an engine streamed before it failed counts.
  """

  def __init__(
    self,
    request: engine_lib.Request,
    on_token: engine_lib.OnToken | None = None,
  ):
    """Nothing is sampled yet.

    Args:
      request: what to continue.
      on_token: as for Engine.generate; told of each token once.
    """
    self.request = request
    self._on_token = on_token
    self._ids: list[int] = []
    self._logprobs: list[float] = []
    self._versions: list[int] = []
    self._routing: np.ndarray | None = None
    self._turn = 0

  def __len__(self) -> int:
    """Tokens sampled."""
    return len(self._ids)

  @property
  def ended(self) -> types.FinishReason | None:
    """Why no token is left to sample, or None."""
    if self._ids and self._ids[-1] in self.request.stop_ids:
      return "stop"
    if self._ids and len(self._ids) >= self.request.max_new_tokens:
      return "length"
    return None

  def rest(self, **changes: Any) -> engine_lib.Request:
    """The request for what is left, with these fields replaced."""
    if self._ids:
      ids = np.concatenate([np.asarray(self.request.ids), self._ids])
      changes["ids"] = ids.astype(np.int32)
      changes["max_new_tokens"] = self.request.max_new_tokens - len(self._ids)
    return dataclasses.replace(self.request, **changes)

  async def send(
    self, engine: engine_lib.Engine, **changes: Any
  ) -> types.FinishReason:
    """Sends an engine what is left, and takes what it samples.

    Args:
      engine: where to.
      **changes: fields of the request to replace.

    Returns:
      Why the engine ended; "abort" only where something is left.

    Raises:
      EngineError: of the engine; what it streamed before is kept.
    """
    self._turn += 1
    turn, before = self._turn, len(self._ids)

    def take(*token: Any) -> None:
      # An engine that was left behind may still speak.
      if turn == self._turn:
        self._take(*token)

    completion = await engine.generate(self.rest(**changes), take)
    streamed = len(self._ids) - before
    for token in zip(
      completion.ids[streamed:],
      completion.logprobs[streamed:],
      completion.versions[streamed:],
      strict=True,
    ):
      take(*token)
    self._routing = completion.routing
    reason = completion.finish_reason
    return (self.ended or reason) if reason == "abort" else reason

  def _take(self, token: int, logprob: float, version: int) -> None:
    self._ids.append(int(token))
    self._logprobs.append(float(logprob))
    self._versions.append(int(version))
    if self._on_token is not None:
      self._on_token(int(token), float(logprob), int(version))

  def completion(self, reason: types.FinishReason) -> engine_lib.Completion:
    """All that was sampled, ended for this reason."""
    return engine_lib.Completion(
      ids=np.asarray(self._ids, np.int32),
      logprobs=np.asarray(self._logprobs, np.float32),
      versions=np.asarray(self._versions, np.int32),
      finish_reason=reason,
      routing=self._routing,
    )


async def end(
  engine: engine_lib.Engine,
  request_id: str,
  work: asyncio.Future,
  timeout_s: float = _DISTANT_S,
) -> None:
  """Aborts a request, again until it is heard.

  Args:
    engine: that serves the request.
    request_id: its name there.
    work: its generate().
    timeout_s: for how long to try.

  Returns:
    When `work` is done, or the time is up.
  """

  async def ask() -> None:
    # What is wrong with the engine, `work` says.
    with contextlib.suppress(engine_lib.EngineError):
      await engine.abort(request_id)

  loop = asyncio.get_running_loop()
  until = loop.time() + timeout_s
  asking: asyncio.Future | None = None
  try:
    while not work.done() and (left := until - loop.time()) > 0:
      if asking is None or asking.done():
        asking = asyncio.ensure_future(ask())
      # A router may not have placed it yet.
      await asyncio.wait({work}, timeout=min(_ABORT_AGAIN_S, left))
  finally:
    if asking is not None and not asking.done():
      asking.cancel()


async def generate(
  engine: engine_lib.Engine,
  request: engine_lib.Request,
  *,
  timeout_s: float | None = None,
  until: asyncio.Event | None = None,
  on_token: engine_lib.OnToken | None = None,
) -> engine_lib.Completion:
  """One completion; a call that an engine gave up is sent again.

  An engine that is paused or leaves with its cell aborts its requests. What
  is left goes out again until the completion is whole: it is one call, and
  nobody else notices.

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
  partial = Partial(request, on_token)
  waiter = asyncio.ensure_future(until.wait()) if until is not None else None
  try:
    fruitless = 0
    while fruitless < MAX_FRUITLESS:
      left = None if deadline is None else deadline - loop.time()
      if (left is not None and left <= 0) or (until and until.is_set()):
        return partial.completion("abort")
      before = len(partial)
      reason, ours = await _attempt(engine, partial, left, waiter)
      if reason != "abort" or ours:
        return partial.completion(reason)
      # The engine gave the slot away: go on from there.
      fruitless = 0 if len(partial) > before else fruitless + 1
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
  partial: Partial,
  left: float | None,
  waiter: asyncio.Future | None,
) -> tuple[types.FinishReason, bool]:
  """Sends what is left once.

  Returns:
    Why the engine ended, and whether it was we who ended it.
  """
  name = partial.request.request_id
  work = asyncio.ensure_future(partial.send(engine))
  try:
    ends = {work} if waiter is None else {work, waiter}
    await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    ours = not work.done()
    await end(engine, name, work)
    return await work, ours
  finally:
    if not work.done():
      work.cancel()
      await engine.abort(name)
