"""The embedded engine: continuous batching over paged keys and values.

An asyncio API over one worker thread that owns the scheduler, the pages and
the weights; commands reach it between dispatches, so a request can be
interrupted at any token.

Equality. Sampling depends on nothing but a request's logits, seed and
positions. In deterministic mode the logits do too, bit for bit: every token,
of a prompt or sampled, is one row of one program of one shape. XLA's CPU
matrix products give a row the same bits whatever the other rows hold and
wherever it stands, when the shape is the same; attention reads keys in fixed
blocks of absolute positions, where blocks unseen by a row leave its sums
unchanged; the vocabulary is summed over fixed columns. So neither the other
requests, nor a prefix-cache hit, nor where a prompt was cut, preempted or
resumed changes a bit. Otherwise prefill runs in wide chunks, decode in the
smallest window that fits, else over the pages, and equality holds to rounding.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gyre import config, types
from gyre.models.config import ModelConfig
from gyre.rollout import (
  engine,
  fingerprint,
  pages,
  places,
  schedule,
  shapes,
  sink,
)
from gyre.rollout import programs as programs_lib

_DISPATCH_S = 0.4
_PREFILLS_IN_A_ROW = 8


class JaxEngine:
  """An `engine.Engine` on one JAX device of this process."""

  def __init__(
    self,
    params: Any,
    model_cfg: ModelConfig,
    *,
    version: int = 0,
    rollout: config.Rollout | None = None,
    max_context: int = 0,
    deterministic: bool = False,
    device: Any = None,
    name: str = "jax",
    programs: programs_lib.Programs | None = None,
  ):
    """Starts the worker, which copies the weights and compiles.

    Args:
      params: parameter pytree in any layout; copied.
      model_cfg: the model.
      version: of the weights.
      rollout: slots, pages, chunk and dtype.
      max_context: longest prompt and completion together; 0 means the
        model's, or what the pages hold if that is less.
      deterministic: bit-equal whatever else runs (see the module).
      device: a jax.Device; None means the first.
      name: of the engine.
      programs: compiled steps of another engine of the same settings and
        device, to share.

    Raises:
      ValueError: programs of another model, dtype or shapes.
    """
    self.name = name
    self.model_cfg = model_cfg
    self._rollout = rollout or config.Rollout()
    r = self._rollout
    capacity = r.num_pages * r.page_size
    self.max_context = min(max_context or model_cfg.context_length, capacity)
    self._shapes = shapes.choose(r, self.max_context, deterministic)
    self._deterministic = deterministic
    self._device = device or jax.devices()[0]
    self._programs = programs or programs_lib.Programs(
      model_cfg, self._shapes, r.dtype, self._device
    )
    mine = (model_cfg, self._shapes, str(r.dtype), self._device)
    if self._programs.settings != mine:
      raise ValueError(f"programs of {self._programs.settings}, not {mine}")
    self._sched = schedule.Scheduler(
      pages.PagePool(self._shapes.pages, r.page_size), r.max_slots
    )
    self._sched.version = version
    self._places = places.Places(self._shapes.windows, r.page_size)
    self._window: Any = None
    self._by_name: dict[str, schedule.Live] = {}
    self._arrivals = itertools.count()
    self._kv: Any = None
    self._params: Any = None
    self._given: Any = None  # in host memory, while asleep
    self._paused = False
    self._asleep = False
    self._closed = False
    self._error: engine.EngineDown | None = None
    self._commands: collections.deque = collections.deque()
    self._wakeup = threading.Condition()
    self._step_s = 0.0
    self._prefills = 0
    self._counts: collections.Counter = collections.Counter()
    self._ready: concurrent.futures.Future = concurrent.futures.Future()
    self._thread = threading.Thread(
      target=self._run, args=(params,), name=f"engine-{name}", daemon=True
    )
    self._thread.start()

  # The asyncio side.

  async def ready(self) -> None:
    """Returns when everything is compiled; raises EngineDown if that fails."""
    await asyncio.shield(asyncio.wrap_future(self._ready))

  async def generate(
    self,
    request: engine.Request,
    on_token: engine.OnToken | None = None,
  ) -> engine.Completion:
    """See engine.Engine."""
    ids = engine.check_request(
      request,
      vocab_size=self.model_cfg.vocab_size,
      max_context=self.max_context,
    )
    live = schedule.Live(
      request=request,
      name=request.request_id,
      ids=ids.tolist(),
      prompt=len(ids),
      arrival=0,
      stops=frozenset(int(i) for i in request.stop_ids),
      sink=sink.Sink(asyncio.get_running_loop(), on_token),
    )
    try:
      await self._call(lambda: self._submit(live))
      return await asyncio.wrap_future(live.sink.future)
    except asyncio.CancelledError:
      self._post(lambda: self._abort(live), concurrent.futures.Future())
      raise

  async def abort(self, request_id: str) -> bool:
    """See engine.Engine."""
    return await self._call(lambda: self._abort(self._by_name.get(request_id)))

  async def pause(self, keep: bool = True) -> None:
    """See engine.Engine."""
    await self._call(lambda: self._pause(keep))

  async def resume(self) -> None:
    """See engine.Engine."""
    await self._call(lambda: self._set_paused(False))

  async def load_weights(self, weights: Any, version: int) -> None:
    """See engine.Engine; takes arrays, whose reader checks what it read."""
    await self._call(lambda: self._load(weights, version))

  async def sleep(self) -> None:
    """See engine.Engine; nothing is kept but the requests' ids."""
    await self._call(self._sleep)

  async def wake(self) -> None:
    """See engine.Engine."""
    await self._call(self._wake)

  async def fingerprint(self) -> fingerprint.Fingerprint:
    """Of the weights that it computes with, on its device.

    Raises:
      ValueError: it has none: it sleeps, or slept and was given none.
    """
    return await self._call(self._fingerprint)

  def fingerprint_of(self, weights: Any) -> fingerprint.Fingerprint:
    """What `fingerprint` is when it serves these weights, a pytree."""
    return fingerprint.of(weights, self.model_cfg, self._rollout.dtype)

  async def close(self) -> None:
    """See engine.Engine."""
    with self._wakeup:
      self._closed = True
      self._wakeup.notify()
    await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

  @property
  def programs(self) -> programs_lib.Programs:
    """Its compiled steps, for another engine of this device to share."""
    return self._programs

  @property
  def device(self) -> Any:
    """Where weights, pages and programs live."""
    return self._device

  @property
  def version(self) -> int:
    """Version of the weights being served."""
    return self._sched.version

  def stats(self) -> engine.EngineStats:
    """See engine.Engine; read without stopping the worker."""
    sched, pool, counts = self._sched, self._sched.pool, self._counts
    return engine.EngineStats(
      version=sched.version,
      running=len(sched.running),
      waiting=len(sched.waiting),
      cached_tokens=pool.cached_pages * pool.page_size,
      free_pages=pool.available,
      total_pages=pool.num_pages - 1,
      paused=self._paused,
      asleep=self._asleep,
      hit_tokens=sched.hit_tokens,
      preemptions=sched.preemptions,
      compilations=self._programs.compilations,
      **{
        k: counts[k]
        for k in (
          "prompt_tokens",
          "prefilled_tokens",
          "reprefilled_tokens",
          "generated_tokens",
          "decode_steps",
          "prefill_steps",
          "finished",
        )
      },
    )

  def _down(self) -> engine.EngineDown:
    return self._error or engine.EngineDown(f"engine {self.name} is closed")

  def _post(self, command: Callable[[], Any], future) -> None:
    with self._wakeup:
      if self._closed:
        future.set_exception(self._down())
        return
      self._commands.append((command, future))
      self._wakeup.notify()

  async def _call(self, command: Callable[[], Any]) -> Any:
    """Runs a command in the worker, between dispatches."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    self._post(command, future)
    return await asyncio.shield(asyncio.wrap_future(future))

  # The worker's side.

  def _run(self, params: Any) -> None:
    try:
      self._params = self._programs.place(params)
      del params
      self._programs.compile()
      self._new_cache()
      self._ready.set_result(None)
      while self._take_commands():
        self._step()
      error = None
    except Exception as e:
      error = engine.EngineDown(
        f"engine {self.name} failed: {type(e).__name__}: {e}"
      )
      error.__cause__ = e
    self._shut(error)

  def _shut(self, error: engine.EngineDown | None) -> None:
    with self._wakeup:
      self._error = error
      self._closed = True
      commands = list(self._commands)
      self._commands.clear()
    if not self._ready.done():
      self._ready.set_exception(self._down())
    for _, future in commands:
      future.set_exception(self._down())
    for live in self._by_name.values():
      live.sink.fail(self._down())
    self._by_name.clear()
    self._places.clear()
    self._kv = self._params = self._window = self._given = None

  def _idle(self) -> bool:
    if self._paused or self._asleep or self._params is None:
      return True
    return not (self._sched.running or self._sched.waiting)

  def _take_commands(self) -> bool:
    """Runs what was posted; waits while there is nothing to do."""
    while True:
      with self._wakeup:
        while not self._closed and not self._commands and self._idle():
          self._wakeup.wait()
        if self._closed:
          return False
        if not self._commands:
          return True
        command, future = self._commands.popleft()
      try:
        result = command()
      except (engine.EngineError, ValueError, OSError) as e:
        future.set_exception(e)
      except BaseException:
        future.set_exception(
          engine.EngineDown(f"engine {self.name} failed in a command")
        )
        raise
      else:
        future.set_result(result)

  def _submit(self, live: schedule.Live) -> None:
    request, sched = live.request, self._sched
    if request.min_version > sched.version:
      raise engine.StaleVersion(
        f"engine {self.name} serves version {sched.version}, "
        f"{request.min_version} was asked for"
      )
    total = live.prompt + request.max_new_tokens
    if not sched.fits(total):
      raise engine.Rejected(
        f"{total} tokens need {sched.pages_for(total)} pages, there are "
        f"{sched.pool.num_pages - 1}"
      )
    live.arrival = next(self._arrivals)
    live.name = live.name or f"{self.name}-{live.arrival}"
    if live.name in self._by_name:
      raise engine.Rejected(f"request_id {live.name!r} is being served")
    self._by_name[live.name] = live
    self._counts["prompt_tokens"] += live.prompt
    sched.waiting.append(live)

  def _finish(self, live: schedule.Live, reason: types.FinishReason) -> None:
    self._sched.remove(live)
    del self._by_name[live.name]
    self._counts["finished"] += 1
    live.sink.answer(live.completion(reason))

  def _abort(self, live: schedule.Live | None) -> bool:
    if live is None or self._by_name.get(live.name) is not live:
      return False
    self._finish(live, "abort")
    return True

  def _set_paused(self, paused: bool) -> None:
    self._paused = paused

  def _pause(self, keep: bool) -> None:
    self._paused = True
    if not keep:
      for live in list(self._by_name.values()):
        self._abort(live)

  def _load(self, weights: Any, version: int) -> None:
    if version < self._sched.version:
      raise engine.StaleVersion(
        f"engine {self.name} serves version {self._sched.version}, not "
        f"replaced by the older {version}"
      )
    if self._asleep:
      # A copy: the giver may donate its own arrays afterwards.
      self._given = jax.tree.map(np.array, weights)
    else:
      self._params = self._programs.place(weights)
    self._restart(version)

  def _restart(self, version: int) -> None:
    self._sched.restart(version)
    self._places.clear()
    self._window = None

  def _new_cache(self) -> None:
    self._kv = programs_lib.new_cache(
      self.model_cfg, self._shapes, self._rollout.dtype, self._device
    )

  def _sleep(self) -> None:
    if not self._asleep:
      self._asleep = True
      self._restart(self._sched.version)
      self._kv = self._params = None

  def _wake(self) -> None:
    if self._asleep:
      if self._given is not None:
        self._params = self._programs.place(self._given)
        self._given = None
      self._new_cache()
      self._asleep = False

  def _fingerprint(self) -> fingerprint.Fingerprint:
    if self._params is None:
      raise ValueError(f"engine {self.name} holds no weights")
    return self.fingerprint_of(self._params)

  def _step(self) -> None:
    """One dispatch."""
    copies = self._sched.admit()
    if copies:
      self._kv = self._programs.copy(self._kv, copies)
    prefilling = self._sched.prefilling()
    decoding = self._sched.decoding()
    if self._deterministic:
      self._mixed(decoding, prefilling)
    elif prefilling and (not decoding or self._prefills < _PREFILLS_IN_A_ROW):
      self._prefills += 1
      self._prefill(prefilling)
    else:
      self._prefills = 0
      self._decode_rows(decoding, self._steps(bool(prefilling)))

  def _steps(self, prefilling: bool) -> int:
    """Decode steps a dispatch: few enough to be interruptible."""
    if prefilling:
      return 1
    if not self._step_s:
      return 2
    return int(np.clip(_DISPATCH_S / self._step_s, 1, self._shapes.steps))

  def _prefill(self, lives: list[schedule.Live]) -> None:
    """One chunk: the shape that computes most, oldest requests first."""

    def done(chunk):
      rows, tokens = chunk
      return sum(min(live.pending, tokens) for live in lives[:rows])

    B, T = max(self._shapes.chunks, key=lambda c: (done(c), c[1]))
    table = np.zeros((B, self._shapes.table_width), np.int32)
    tokens = np.zeros((B, T), np.int32)
    start, count = np.zeros(B, np.int32), np.zeros(B, np.int32)
    for i, live in enumerate(lives[:B]):
      n = min(live.pending, T)
      at = live.computed
      table[i, : len(live.pages)] = live.pages
      tokens[i, :n] = live.ids[at : at + n]
      start[i], count[i] = at, n
    self._kv = self._programs.prefill(
      self._params, self._kv, table, tokens, start, count
    )
    self._counts["prefill_steps"] += 1
    for i, live in enumerate(lives[:B]):
      self._advance_context(live, int(count[i]))

  def _advance_context(self, live: schedule.Live, n: int) -> None:
    self._counts["prefilled_tokens"] += n
    again = min(live.seen, live.computed + n) - live.computed
    self._counts["reprefilled_tokens"] += max(0, again)
    self._sched.advance(live, n)

  def _decode_rows(self, lives: list[schedule.Live], steps: int) -> None:
    """Decode steps over a window, or over pages where none is wide enough."""
    lives, steps = self._sched.reserve(lives, steps)
    if not lives:
      return
    before = self._places.now
    place, fresh = self._places.place(lives, steps)
    if place is not before:
      self._window = None  # before its successor takes memory
    if place is None:
      self._decode(lives, steps)
      return
    count = len(place.lives)
    if self._window is None:
      self._window = self._programs.new_window(self._kv, count, place.size)
    skip = place.base // self._rollout.page_size
    width = place.size // self._rollout.page_size
    for i in fresh:
      table = np.zeros(width, np.int32)
      own = place.lives[i].pages[skip : skip + width]
      table[: len(own)] = own
      self._window = self._programs.load(self._window, self._kv, table, i)
    rows = programs_lib.Rows.empty(count, self._shapes.table_width)
    for i, live in enumerate(place.lives):
      if live is not None:
        self._fill(rows, i, live)
    common = np.zeros(self._shapes.table_width, np.int32)
    common[:skip] = lives[0].pages[:skip]
    began = time.perf_counter()
    self._kv, self._window, ids, logps = self._programs.decode_window(
      self._params,
      self._kv,
      self._window,
      rows,
      place.base,
      common,
      steps,
      bool(self._sched.waiting),
    )
    self._step_s = (time.perf_counter() - began) / max(1, len(ids))
    self._counts["decode_steps"] += len(ids)
    for i, live in enumerate(place.lives):
      if live is not None:
        self._accept(live, ids[:, i], logps[:, i])

  def _mixed(self, decoding, prefilling) -> None:
    """Decode rows and context rows in one program of one shape."""
    B = self._shapes.rows[-1]
    context: list[tuple[schedule.Live, int]] = []
    spare = B - len(decoding)
    for live in prefilling:
      n = min(live.pending, spare)
      if n:
        context.append((live, n))
        spare -= n
    steps = 1 if context else self._steps(False)
    self._decode(decoding, steps, context)

  def _decode(
    self,
    lives: list[schedule.Live],
    steps: int,
    context: list[tuple[schedule.Live, int]] = (),
  ) -> None:
    lives, steps = self._sched.reserve(lives, steps)
    # Making room may have preempted a request whose context was planned.
    context = [c for c in context if c[0].pages]
    used = len(lives) + sum(n for _, n in context)
    if not used:
      return
    size = next(n for n in self._shapes.rows if n >= used)
    rows = programs_lib.Rows.empty(size, self._shapes.table_width)
    for i, live in enumerate(lives):
      self._fill(rows, i, live)
    i = len(lives)
    for live, n in context:
      rows.table[i : i + n, : len(live.pages)] = live.pages
      at = live.computed
      rows.tokens[i : i + n] = live.ids[at : at + n]
      rows.positions[i : i + n] = np.arange(at, at + n)
      i += n
    began = time.perf_counter()
    self._kv, ids, logps = self._programs.decode(
      self._params, self._kv, rows, steps, bool(self._sched.waiting)
    )
    self._step_s = (time.perf_counter() - began) / max(1, len(ids))
    self._counts["decode_steps"] += len(ids)
    for live, n in context:
      self._advance_context(live, n)
    for i, live in enumerate(lives):
      self._accept(live, ids[:, i], logps[:, i])

  def _fill(self, rows, i: int, live: schedule.Live) -> None:
    request = live.request
    rows.table[i, : len(live.pages)] = live.pages
    rows.tokens[i] = live.ids[-1]
    rows.positions[i] = len(live.ids) - 1
    rows.limits[i] = live.remaining
    rows.seeds[i] = request.seed
    rows.temperature[i] = request.temperature
    rows.top_k[i] = min(request.top_k, self.model_cfg.vocab_size)
    rows.top_p[i] = request.top_p
    stops = sorted(live.stops)[: programs_lib.MAX_STOPS]
    rows.stops[i, : len(stops)] = stops

  def _accept(self, live, ids: np.ndarray, logps: np.ndarray) -> None:
    """Takes a row's tokens up to its end, and answers if it ended."""
    n = int(np.sum(ids >= 0))
    # More stop ids than the program holds are looked for here.
    reason = None
    for j in range(n):
      if int(ids[j]) in live.stops:
        n, reason = j + 1, "stop"
        break
    live.ids.extend(ids[:n].tolist())
    live.logprobs.extend(logps[:n].tolist())
    live.versions.extend([self._sched.version] * n)
    self._counts["generated_tokens"] += n
    live.sink.tokens(ids[:n], logps[:n], self._sched.version)
    self._sched.advance(live, n)
    if reason is None and live.remaining == 0:
      reason = "length"
    if reason is not None:
      self._finish(live, reason)
