"""An engine that takes the time of one, and computes nothing.

It consumes wall time by a profile, so that the real controller, router,
processes and clocks can be measured at the scale of many nodes on any machine.
Time is kept in emulated seconds; `speedup` of them pass in one second of the
clock on the wall (360: an hour takes 10 s). A call of n tokens is n * token_s
of work, and the calls of an engine progress at one rate

  rate = 1 / (f + (1 - f) * load / x0),   load = running calls / nodes

so that one integral of it, the progress, says how far every call is. Ids and
log-probabilities are functions of (seed, absolute position): a call that is
interrupted goes on identically elsewhere. The weights have no effect.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import itertools
import math
from typing import Any

import numpy as np

from gyre import types
from gyre.rollout import engine
from gyre.rollout.profile import Profile

_EPSILON = 1e-6  # of a token: a rounding error does not delay it
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

_COUNTED = (
  "prompt_tokens",
  "prefilled_tokens",
  "reprefilled_tokens",
  "generated_tokens",
  "finished",
)


def _hash(seed: int, positions: np.ndarray, stream: int) -> np.ndarray:
  """uint64 [n], mixed as splitmix64 does."""
  start = (seed * 2 + stream + 1) * _MIX[0] % (1 << 64)
  with np.errstate(over="ignore"):
    x = np.uint64(start) + positions.astype(np.uint64) * np.uint64(_MIX[1])
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
      x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def tokens(
  seed: int, start: int, count: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
  """What is sampled at positions start .. start + count - 1.

  Returns:
    ids int32 [count], uniform over the vocabulary; log-probabilities float32
    [count], below 0.
  """
  at = np.arange(start, start + count)
  ids = (_hash(seed, at, 0) % np.uint64(vocab_size)).astype(np.int32)
  unit = (_hash(seed, at, 1) >> np.uint64(40)).astype(np.float32)
  return ids, -(unit + 1) / np.float32(1 << 24)


class _Live:
  """A call: what it will sample, and how much of that it has."""

  def __init__(self, request, name, prompt, ids, logprobs, on_token):
    self.request, self.name, self.prompt = request, name, prompt
    self.ids, self.logprobs, self.on_token = ids, logprobs, on_token
    self.versions: list[int] = []
    self.streamed = 0
    self.base = 0.0  # the progress at which its first token began
    self.end = 0.0  # and at which its last one is sampled
    self.computed = False
    self.done = asyncio.get_running_loop().create_future()

  @property
  def left(self) -> int:
    return len(self.ids) - len(self.versions)

  @property
  def reason(self) -> types.FinishReason:
    """How it ends by itself."""
    stopped = int(self.ids[-1]) in self.request.stop_ids
    return "stop" if stopped else "length"

  def completion(self, reason: types.FinishReason) -> engine.Completion:
    n = len(self.versions)
    return engine.Completion(
      ids=self.ids[:n],
      logprobs=self.logprobs[:n],
      versions=np.asarray(self.versions, np.int32),
      finish_reason=reason,
    )


class EmulatedEngine:
  """An `engine.Engine` that consumes wall time by a profile."""

  def __init__(
    self, profile: Profile, *, version: int = 0, name: str = "emulated"
  ):
    """Serves at once; used from one event loop.

    Args:
      profile: what it costs.
      version: of the weights that it has not.
      name: of the engine.
    """
    self.profile, self.name = profile, name
    self._version = version
    self._running: dict[str, _Live] = {}
    self._waiting: collections.OrderedDict[str, _Live] = (
      collections.OrderedDict()
    )
    self._arrivals = itertools.count()
    self._progress = 0.0
    # (end, arrival, call) of the running calls, and of some that have left.
    self._ends: list[tuple[float, int, _Live]] = []
    self._streaming = 0
    self._at: float | None = None  # wall time of _progress
    self._next_stream = 0.0
    self._timer: asyncio.TimerHandle | None = None
    self._paused = self._asleep = self._closed = False
    self._loaded = True
    self._counts = dict.fromkeys(_COUNTED, 0)

  # The protocol.

  async def ready(self) -> None:
    """Returns: there is nothing to compile."""
    self._check_open()

  async def generate(
    self, request: engine.Request, on_token: engine.OnToken | None = None
  ) -> engine.Completion:
    """See engine.Engine."""
    self._check_open()
    live = self._submit(request, on_token)
    try:
      return await live.done
    finally:
      self._forget(live)

  async def abort(self, request_id: str) -> bool:
    """See engine.Engine."""
    self._check_open()
    live = self._running.get(request_id) or self._waiting.get(request_id)
    if live is None:
      return False
    self._advance()
    self._collect(live)
    self._finish(live, live.reason if not live.left else "abort")
    self._schedule()
    return True

  async def pause(self, keep: bool = True) -> None:
    """See engine.Engine."""
    self._check_open()
    self._advance()
    self._paused = True
    if not keep:
      self._collect(*self._running.values())
      for live in [*self._running.values(), *self._waiting.values()]:
        self._finish(live, "abort")
    self._schedule()

  async def resume(self) -> None:
    """See engine.Engine."""
    self._check_open()
    self._advance()
    self._paused = False
    self._schedule()

  async def load_weights(self, weights: Any, version: int) -> None:
    """See engine.Engine; takes publish_s, and serves the old ones meanwhile.

    Raises:
      ValueError: a Snapshot of another version.
    """
    self._check_open()
    await asyncio.sleep(self.profile.wall(self.profile.publish_s))
    self._check_open()
    self.take(weights, version)

  def take(self, weights: Any, version: int) -> None:
    """As load_weights, at once; what the weights are is not looked at."""
    self._check_open()
    if version < self._version:
      raise engine.StaleVersion(
        f"engine {self.name} serves version {self._version}, not replaced by "
        f"the older {version}"
      )
    if isinstance(weights, types.Snapshot) and weights.version != version:
      raise ValueError(
        f"the snapshot holds version {weights.version}, not {version}"
      )
    self._advance()
    self._collect(*self._running.values())
    self._version, self._loaded = version, True
    self._recompute()
    self._schedule()

  def become(self, profile: Profile) -> None:
    """Costs what another profile says from now on."""
    self._advance()
    self.profile = profile
    self._admit()
    self._schedule()

  async def sleep(self) -> None:
    """See engine.Engine; the weights are gone until load_weights."""
    self._check_open()
    self._advance()
    self._asleep, self._loaded = True, False
    self._schedule()

  async def wake(self) -> None:
    """See engine.Engine."""
    self._check_open()
    self._advance()
    self._asleep = False
    self._schedule()

  def stats(self) -> engine.EngineStats:
    """See engine.Engine; a page is a slot."""
    slots = self.profile.slots
    return engine.EngineStats(
      version=self._version,
      running=len(self._running),
      waiting=len(self._waiting),
      free_pages=slots - len(self._running),
      total_pages=slots,
      paused=self._paused,
      asleep=self._asleep,
      **self._counts,
    )

  async def close(self) -> None:
    """See engine.Engine."""
    self._closed = True
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None
    for live in [*self._running.values(), *self._waiting.values()]:
      if not live.done.done():
        live.done.set_exception(self._down())
    self._running.clear()
    self._waiting.clear()

  @property
  def version(self) -> int:
    """Version being served."""
    return self._version

  # Calls.

  def _down(self) -> engine.EngineDown:
    return engine.EngineDown(f"engine {self.name} is closed")

  def _check_open(self) -> None:
    if self._closed:
      raise self._down()

  def _submit(self, request: engine.Request, on_token) -> _Live:
    p = self.profile
    ids = engine.check_request(
      request, vocab_size=p.vocab_size, max_context=p.max_context
    )
    if request.min_version > self._version:
      raise engine.StaleVersion(
        f"engine {self.name} serves version {self._version}, "
        f"{request.min_version} was asked for"
      )
    name = request.request_id or f"{self.name}-{next(self._arrivals)}"
    if name in self._running or name in self._waiting:
      raise engine.Rejected(f"request_id {name!r} is being served")
    out, logprobs = tokens(
      request.seed, len(ids), request.max_new_tokens, p.vocab_size
    )
    if len(request.stop_ids):
      stops = np.flatnonzero(np.isin(out, np.asarray(request.stop_ids)))
      if len(stops):
        out, logprobs = out[: stops[0] + 1], logprobs[: stops[0] + 1]
    live = _Live(request, name, len(ids), out, logprobs, on_token)
    self._counts["prompt_tokens"] += len(ids)
    self._advance()
    self._waiting[name] = live
    self._admit()
    self._schedule()
    return live

  def _forget(self, live: _Live) -> None:
    """Drops a call whose caller has gone."""
    if live.name in self._running or live.name in self._waiting:
      self._advance()
      self._remove(live)
      self._schedule()

  def _remove(self, live: _Live) -> None:
    if self._running.pop(live.name, None):
      self._streaming -= live.on_token is not None
    self._waiting.pop(live.name, None)
    self._admit()

  def _admit(self) -> None:
    while self._waiting and len(self._running) < self.profile.slots:
      name, live = self._waiting.popitem(last=False)
      self._running[name] = live
      self._streaming += live.on_token is not None
      live.base = self._progress
      self._prefill(live)

  def _prefill(self, live: _Live) -> None:
    """Computing its context delays a call's next token."""
    n = live.prompt + len(live.versions)
    kind = "reprefilled_tokens" if live.computed else "prefilled_tokens"
    self._counts[kind] += n
    live.base += n * self.profile.prefill_s
    live.end = live.base + len(live.ids) * self.profile.token_s
    live.computed = True
    heapq.heappush(self._ends, (live.end, next(self._arrivals), live))

  def _recompute(self) -> None:
    for live in self._running.values():
      self._prefill(live)

  def _finish(self, live: _Live, reason: types.FinishReason) -> None:
    self._stream(live)
    self._counts["finished"] += 1
    if not live.done.done():
      live.done.set_result(live.completion(reason))
    self._remove(live)

  # Time.

  def _halted(self) -> bool:
    awake = self._loaded and not (self._paused or self._asleep)
    return not (awake and self._running)

  def _advance(self) -> None:
    """Brings the progress up to this moment."""
    now = asyncio.get_running_loop().time()
    before, self._at = self._at, now
    if before is None or self._halted():
      return
    p = self.profile
    elapsed = (now - before) * p.speedup
    self._progress += elapsed * p.rate(len(self._running))

  def _collect(self, *lives: _Live) -> None:
    """Gives calls the tokens that the progress brought them."""
    p = self.profile
    for live in lives:
      if live.name not in self._running:
        continue
      n = math.floor((self._progress - live.base) / p.token_s + _EPSILON)
      new = min(n, len(live.ids)) - len(live.versions)
      if new > 0:
        live.versions.extend([self._version] * new)
        self._counts["generated_tokens"] += new

  def _first_end(self) -> float:
    """The least end of a running call."""
    ends = self._ends
    while True:
      end, _, live = ends[0]
      if end == live.end and self._running.get(live.name) is live:
        return end
      heapq.heappop(ends)

  def _stream(self, live: _Live) -> None:
    if live.on_token is not None:
      for i in range(live.streamed, len(live.versions)):
        live.on_token(
          int(live.ids[i]), float(live.logprobs[i]), live.versions[i]
        )
    live.streamed = len(live.versions)

  def _schedule(self) -> None:
    """Sets the timer to the next end of a call, or the next streaming."""
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None
    if self._closed or self._halted():
      return
    p = self.profile
    wait = (self._first_end() - self._progress) / p.rate(len(self._running))
    at = self._at + p.wall(max(wait, 0.0))
    if self._streaming:
      if self._next_stream <= self._at:
        self._next_stream = self._at + p.wall(p.stream_s)
      at = min(at, self._next_stream)
    self._timer = asyncio.get_running_loop().call_at(at, self._tick)

  def _tick(self) -> None:
    self._timer = None
    self._advance()
    almost = self._progress + _EPSILON / 2 * self.profile.token_s
    while self._running and self._first_end() <= almost:
      live = self._ends[0][2]
      self._collect(live)
      self._finish(live, live.reason)
    if self._next_stream <= self._at:
      for live in self._running.values():
        self._collect(live)
        self._stream(live)
    self._schedule()
