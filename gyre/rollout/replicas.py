"""One engine on several devices: a whole one on each, which share the calls.

An execution's calls go to the replica that holds its keys, unless that one has
no free slot and another has. The replicas serve the same weights at all times
but while they are given others.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gyre.rollout import engine as engine_lib
from gyre.rollout import fingerprint as fingerprint_lib

# Executions whose replica is remembered; a forgotten one prefills again.
_REMEMBERED = 1 << 16


class Replicas:
  """An `engine.Engine` over engines that are alike."""

  def __init__(self, engines: Sequence[Any], *, slots: int, name: str):
    """Serves at once, and owns the engines.

    Args:
      engines: one or more, of the same model, settings and weights.
      slots: calls that one of them runs at once.
      name: of the engine that they are together.

    Raises:
      ValueError: no engine.
    """
    if not engines:
      raise ValueError(f"engine {name} needs at least one replica")
    self.name = name
    self._engines, self._slots = tuple(engines), slots
    self._calls = [0] * len(self._engines)
    self._held: collections.OrderedDict[str, int] = collections.OrderedDict()
    self._at: dict[str, int] = {}

  async def ready(self) -> None:
    """Returns when all are; raises EngineDown if one failed."""
    await self._each(lambda e: e.ready())

  # Calls.

  def _choose(self, execution_id: str) -> int:
    """The replica of an execution's next call."""
    lightest = self._calls.index(min(self._calls))
    chosen = self._held.pop(execution_id, lightest)
    if self._calls[chosen] >= self._slots > self._calls[lightest]:
      chosen = lightest
    if execution_id:
      self._held[execution_id] = chosen
      if len(self._held) > _REMEMBERED:
        self._held.popitem(last=False)
    return chosen

  async def generate(
    self,
    request: engine_lib.Request,
    on_token: engine_lib.OnToken | None = None,
  ) -> engine_lib.Completion:
    """See engine.Engine."""
    name = request.request_id
    if name and name in self._at:
      raise engine_lib.Rejected(f"request_id {name!r} is being served")
    chosen = self._choose(request.execution_id)
    self._calls[chosen] += 1
    if name:
      self._at[name] = chosen
    try:
      return await self._engines[chosen].generate(request, on_token)
    finally:
      self._calls[chosen] -= 1
      self._at.pop(name, None)

  async def abort(self, request_id: str) -> bool:
    """See engine.Engine."""
    if request_id in self._at:
      return await self._engines[self._at[request_id]].abort(request_id)
    return any(await self._each(lambda e: e.abort(request_id)))

  # All of them.

  async def _each(self, act: Callable[[Any], Awaitable[Any]]) -> list[Any]:
    """Acts on all at once; raises the first error once all have ended."""
    results = await asyncio.gather(
      *(act(e) for e in self._engines), return_exceptions=True
    )
    for result in results:
      if isinstance(result, BaseException):
        raise result
    return results

  async def pause(self, keep: bool = True) -> None:
    """See engine.Engine."""
    await self._each(lambda e: e.pause(keep))

  async def resume(self) -> None:
    """See engine.Engine."""
    await self._each(lambda e: e.resume())

  async def load_weights(self, weights: Any, version: int) -> None:
    """See engine.Engine."""
    await self._each(lambda e: e.load_weights(weights, version))

  async def sleep(self) -> None:
    """See engine.Engine."""
    await self._each(lambda e: e.sleep())

  async def wake(self) -> None:
    """See engine.Engine."""
    await self._each(lambda e: e.wake())

  async def fingerprint(self) -> fingerprint_lib.Fingerprint:
    """Of the weights that all of them compute with.

    Raises:
      ValueError: they differ, or have none.
    """
    first, *others = await self._each(lambda e: e.fingerprint())
    for e, one in zip(self._engines[1:], others, strict=True):
      if text := fingerprint_lib.difference(first, one):
        raise ValueError(
          f"engine {e.name} holds other weights than "
          f"{self._engines[0].name}: {text}"
        )
    return first

  def fingerprint_of(self, weights: Any) -> fingerprint_lib.Fingerprint:
    """See fingerprint.Fingerprinted."""
    return self._engines[0].fingerprint_of(weights)

  async def difference(self, expected: fingerprint_lib.Fingerprint) -> str:
    """See fingerprint.Fingerprinted; of the first replica that differs."""
    found = await self._each(lambda e: e.difference(expected))
    pairs = zip(self._engines, found, strict=True)
    return next((f"{e.name}: {text}" for e, text in pairs if text), "")

  def stats(self) -> engine_lib.EngineStats:
    """See engine.Engine; sums, and the least version."""
    each = [e.stats() for e in self._engines]
    return engine_lib.total(
      each,
      version=min(s.version for s in each),
      paused=all(s.paused for s in each),
    )

  async def close(self) -> None:
    """See engine.Engine."""
    await self._each(lambda e: e.close())
