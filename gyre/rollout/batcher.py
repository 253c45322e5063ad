"""What the embedded engine's worker owns: requests, pages, weights.

One dispatch at a time of one device, for as many requests as fit. No locks:
all but `stats` is called from one thread.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import jax
import numpy as np

from gyre import types
from gyre.rollout import engine, pages, places, programs, schedule

_DISPATCH_S = 0.4
_PREFILLS_IN_A_ROW = 8
_COUNTED = (
  "prompt_tokens",
  "prefilled_tokens",
  "reprefilled_tokens",
  "generated_tokens",
  "decode_steps",
  "prefill_steps",
  "finished",
)


class Batcher:
  """Continuous batching over paged keys and values.

  Attributes:
    name: of the engine.
    requests: that are being served, by name.
    params: weights on the device, or None.
    kv: keys and values of all pages, or None.
  """

  def __init__(
    self,
    params: Any,
    compiled: programs.Programs,
    *,
    version: int,
    max_slots: int,
    deterministic: bool,
    name: str,
  ):
    """Holds nothing on the device before `start`.

    Args:
      params: parameter pytree in any layout; copied by `start`.
      compiled: the steps.
      version: of the weights.
      max_slots: requests that run at once.
      deterministic: every token is a row of one program of one shape.
      name: of the engine.
    """
    self.name = name
    self.requests: dict[str, schedule.Live] = {}
    self.params: Any = None
    self.kv: Any = None
    self._programs, self._shapes = compiled, compiled.shapes
    self._deterministic = deterministic
    self._sched = schedule.Scheduler(
      pages.PagePool(self._shapes.pages, self._shapes.page_size), max_slots
    )
    self._sched.version = version
    self._places = places.Places(self._shapes.windows, self._shapes.page_size)
    self._window: Any = None
    self._given: Any = params  # weights that are to be placed
    self._paused = False
    self._asleep = False
    self._arrivals = itertools.count()
    self._step_s = 0.0
    self._prefills = 0
    self._counts = dict.fromkeys(_COUNTED, 0)

  def start(self) -> None:
    """Copies the weights and compiles."""
    self._place_given()
    self._programs.compile()
    self._new_cache()

  @property
  def version(self) -> int:
    """Version of the weights."""
    return self._sched.version

  @property
  def idle(self) -> bool:
    """Whether `step` has nothing to do."""
    if self._paused or self._asleep or self.params is None:
      return True
    return not (self._sched.running or self._sched.waiting)

  def stats(self) -> engine.EngineStats:
    """Counts; read from any thread, without stopping the worker."""
    sched, pool = self._sched, self._sched.pool
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
      **self._counts,
    )

  # Requests.

  def submit(self, live: schedule.Live) -> None:
    """Takes a request; names it if it has no name.

    Raises:
      StaleVersion, Rejected: see engine.Engine.generate.
    """
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
    if live.name in self.requests:
      raise engine.Rejected(f"request_id {live.name!r} is being served")
    self.requests[live.name] = live
    self._counts["prompt_tokens"] += live.prompt
    sched.waiting.append(live)

  def _finish(self, live: schedule.Live, reason: types.FinishReason) -> None:
    self._sched.remove(live)
    del self.requests[live.name]
    self._counts["finished"] += 1
    live.sink.answer(live.completion(reason))

  def abort(self, live: schedule.Live | None) -> bool:
    """Ends a request with what it has; whether it was being served."""
    if live is None or self.requests.get(live.name) is not live:
      return False
    self._finish(live, "abort")
    return True

  def pause(self, keep: bool) -> None:
    """See engine.Engine."""
    self._paused = True
    if not keep:
      for live in list(self.requests.values()):
        self.abort(live)

  def resume(self) -> None:
    """See engine.Engine."""
    self._paused = False

  def clear(self) -> list[schedule.Live]:
    """Gives everything up; returns the requests that had not ended."""
    left = list(self.requests.values())
    self.requests.clear()
    self._places.clear()
    self.kv = self.params = self._window = self._given = None
    return left

  # Weights.

  def load(self, weights: Any, version: int) -> None:
    """Replaces the weights; all context is computed again.

    Raises:
      StaleVersion: version is older.
    """
    if version < self._sched.version:
      raise engine.StaleVersion(
        f"engine {self.name} serves version {self._sched.version}, not "
        f"replaced by the older {version}"
      )
    if self._asleep:
      # A copy: the giver may donate its own arrays afterwards.
      self._given = jax.tree.map(np.array, weights)
    else:
      self.params = self._programs.place(weights)
    self._restart(version)

  def _restart(self, version: int) -> None:
    self._sched.restart(version)
    self._places.clear()
    self._window = None

  def _place_given(self) -> None:
    self.params = self._programs.place(self._given)
    self._given = None

  def _new_cache(self) -> None:
    p = self._programs
    self.kv = programs.new_cache(p.cfg, p.shapes, p.dtype, p.device)

  def sleep(self) -> None:
    """Frees weights and pages; requests keep their ids."""
    if not self._asleep:
      self._asleep = True
      self._restart(self._sched.version)
      self.kv = self.params = None

  def wake(self) -> None:
    """Places what was loaded meanwhile, and makes new pages."""
    if self._asleep:
      if self._given is not None:
        self._place_given()
      self._new_cache()
      self._asleep = False

  # Dispatches.

  def step(self) -> None:
    """One dispatch."""
    copies = self._sched.admit()
    if copies:
      self.kv = self._programs.copy(self.kv, copies)
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
    self.kv = self._programs.prefill(
      self.params, self.kv, table, tokens, start, count
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
      self._window = self._programs.new_window(self.kv, count, place.size)
    skip = place.base // self._shapes.page_size
    width = place.size // self._shapes.page_size
    for i in fresh:
      table = np.zeros(width, np.int32)
      own = place.lives[i].pages[skip : skip + width]
      table[: len(own)] = own
      self._window = self._programs.load(self._window, self.kv, table, i)
    rows = programs.Rows.empty(count, self._shapes.table_width)
    for i, live in enumerate(place.lives):
      if live is not None:
        self._fill(rows, i, live)
    common = np.zeros(self._shapes.table_width, np.int32)
    common[:skip] = lives[0].pages[:skip]
    began = time.perf_counter()
    self.kv, self._window, ids, logps = self._programs.decode_window(
      self.params,
      self.kv,
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
    rows = programs.Rows.empty(size, self._shapes.table_width)
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
    self.kv, ids, logps = self._programs.decode(
      self.params, self.kv, rows, steps, bool(self._sched.waiting)
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
    rows.top_k[i] = min(request.top_k, self._programs.cfg.vocab_size)
    rows.top_p[i] = request.top_p
    stops = sorted(live.stops)[: programs.MAX_STOPS]
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
