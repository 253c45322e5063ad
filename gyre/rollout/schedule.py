"""Which requests run, and which pages they hold. Pure Python, no clock.

A request's last token is always fed by a decode step, which samples the next;
prefill computes what comes before it. So a fresh prompt, one found in the
prefix cache, a preempted request and one resumed from a partial are one case.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np

from gyre.rollout import engine, pages


@dataclasses.dataclass(eq=False)
class Live:
  """A request being served.

  Attributes:
    request: as asked.
    name: its request id.
    ids: prompt and sampled tokens.
    prompt: how many of them are the prompt.
    arrival: order of submission.
    stops: stop ids.
    logprobs, versions: of the sampled tokens.
    pages: that it holds, in order of position.
    keys: of its full pages from the beginning, under `root`.
    computed: tokens whose keys and values are in its pages.
    seen: most tokens ever computed (recomputing below it is re-prefill).
    sink: where the answer goes (the engine's business).
  """

  request: engine.Request
  name: str
  ids: list[int]
  prompt: int
  arrival: int
  stops: frozenset[int]
  sink: Any = None
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  pages: list[int] = dataclasses.field(default_factory=list)
  keys: list[bytes] = dataclasses.field(default_factory=list)
  root: bytes = b""
  computed: int = 0
  seen: int = 0

  @property
  def pending(self) -> int:
    """Context tokens to prefill before the next decode step."""
    return len(self.ids) - 1 - self.computed

  @property
  def remaining(self) -> int:
    """Tokens that it may still sample."""
    return self.request.max_new_tokens - (len(self.ids) - self.prompt)

  def completion(self, finish_reason: str) -> engine.Completion:
    """What was sampled so far."""
    return engine.Completion(
      ids=np.asarray(self.ids[self.prompt :], np.int32),
      logprobs=np.asarray(self.logprobs, np.float32),
      versions=np.asarray(self.versions, np.int32),
      finish_reason=finish_reason,
    )


class Scheduler:
  """Waiting and running requests over a page pool."""

  def __init__(self, pool: pages.PagePool, max_slots: int):
    self.pool = pool
    self.max_slots = max_slots
    self.version = 0
    self.waiting: collections.deque[Live] = collections.deque()
    self.running: list[Live] = []
    self.preemptions = 0
    self.hit_tokens = 0
    self._flying: dict[bytes, Live] = {}

  def pages_for(self, tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // self.pool.page_size)

  def fits(self, tokens: int) -> bool:
    """Whether a request alone could ever hold that many tokens."""
    return self.pages_for(tokens) < self.pool.num_pages

  def prefilling(self) -> list[Live]:
    """Running requests with context left to compute, oldest first."""
    return [live for live in self.running if live.pending > 0]

  def decoding(self) -> list[Live]:
    """Running requests ready for a decode step, oldest first."""
    return [live for live in self.running if live.pending == 0]

  def admit(self) -> list[tuple[int, int]]:
    """Moves waiting requests into slots while pages last.

    A request whose next page another is computing waits for it, so that a
    group's shared prompt is prefilled once.

    Returns:
      (source, target) pages to copy before the next step.
    """
    copies, held_back = [], []
    while self.waiting and len(self.running) < self.max_slots:
      live = self.waiting.popleft()
      self._find_keys(live)
      size = self.pool.page_size
      usable = live.keys[: (len(live.ids) - 1) // size]
      tail = self._tail_key(live)
      matched = self.pool.match(usable)
      missing = [*usable, tail][len(matched)]
      if missing in self._flying:
        self.pool.release(matched)
        held_back.append(live)
        continue
      need = self.pages_for(len(live.ids)) - len(matched)
      # A page to grow into for each that runs, so that nobody is let in only
      # to be preempted at once.
      spare = self.pool.available - need
      fresh = self.pool.take(need) if spare >= len(self.running) else None
      if fresh is None:
        self.pool.release(matched)
        held_back.append(live)
        break
      live.pages = matched + fresh
      live.computed = len(matched) * size
      copies += self._copy_partial(live, usable, len(matched), fresh)
      self.hit_tokens += live.computed
      if live.pending:
        for key in filter(None, [*usable, tail][len(matched) :]):
          self._flying.setdefault(key, live)
      self.running.append(live)
    self.waiting.extendleft(reversed(held_back))
    return copies

  def _find_keys(self, live: Live) -> None:
    root = pages.root_key(self.version, live.request.cache_salt)
    size = self.pool.page_size
    if live.root != root or len(live.keys) < len(live.ids) // size:
      ids = np.asarray(live.ids, np.int32)
      live.root, live.keys = root, pages.page_keys(ids, size, root)

  def _tail_key(self, live: Live) -> bytes:
    """Names the context after the last full page before the last token."""
    full = (len(live.ids) - 1) // self.pool.page_size
    tail = np.asarray(live.ids[full * self.pool.page_size : -1], np.int32)
    root = live.keys[full - 1] if full else live.root
    if not len(tail):
      return b""
    return pages.page_keys(tail, len(tail), root + b"tail")[0]

  def _copy_partial(self, live, usable, matched, fresh):
    """Copies a page that begins as this request's next one does."""
    if matched < len(usable) or not live.pending:
      return []
    key = usable[-1] if usable else live.root
    found = self.pool.match_partial(key, live.ids[live.computed : -1])
    if found is None:
      return []
    live.computed += found[1]
    return [(found[0], fresh[0])]

  def reserve(self, lives: list[Live], steps: int) -> tuple[list[Live], int]:
    """Takes pages for up to `steps` more tokens of each request.

    Fewer steps are planned before anyone is preempted; then the youngest
    running request gives up its pages, and is computed again later.

    Returns:
      Those of `lives` that still run, and the steps that fit.
    """
    lives = list(lives)
    while True:
      needs = [self._need(live, steps) for live in lives]
      if sum(needs) <= self.pool.available:
        break
      if steps > 1:
        steps = 1
        continue
      victim = self.running[-1]
      self.preempt(victim)
      lives = [live for live in lives if live is not victim]
    for live, need in zip(lives, needs, strict=True):
      live.pages += self.pool.take(need) if need else []
    return lives, steps

  def _need(self, live: Live, steps: int) -> int:
    tokens = live.computed + min(steps, live.remaining)
    return max(0, self.pages_for(tokens) - len(live.pages))

  def advance(self, live: Live, tokens: int) -> None:
    """Notes that `tokens` more are computed, and shares full pages."""
    live.computed += tokens
    live.seen = max(live.seen, live.computed)
    size = self.pool.page_size
    full = live.computed // size
    first = (live.computed - tokens) // size
    if len(live.keys) < full:
      start = len(live.keys)
      root = live.keys[-1] if start else live.root
      ids = np.asarray(live.ids[start * size : full * size], np.int32)
      live.keys += pages.page_keys(ids, size, root)
    for i in range(first, full):
      self.pool.publish(live.pages[i], live.keys[i])
      self._flying.pop(live.keys[i], None)
    if not live.pending:
      self._land(live)
    if not live.pending and live.computed % size:
      key = live.keys[full - 1] if full else live.root
      ids = live.ids[full * size : live.computed]
      self.pool.publish_partial(live.pages[full], key, ids)

  def preempt(self, live: Live) -> None:
    """Takes a running request's pages; it waits, first in line."""
    self._drop_pages(live)
    self.running.remove(live)
    self.waiting.appendleft(live)
    self.preemptions += 1

  def remove(self, live: Live) -> None:
    """Forgets a request, running or waiting."""
    if live in self.running:
      self._drop_pages(live)
      self.running.remove(live)
    else:
      self.waiting.remove(live)

  def restart(self, version: int) -> None:
    """Everything is computed again, under `version`; nothing is cached."""
    for live in reversed(self.running):
      self._drop_pages(live)
      self.waiting.appendleft(live)
    self.running.clear()
    self.pool.flush()
    self.version = version

  def _drop_pages(self, live: Live) -> None:
    self.pool.release(live.pages)
    live.pages = []
    live.computed = 0
    self._land(live)

  def _land(self, live: Live) -> None:
    for key in [k for k, owner in self._flying.items() if owner is live]:
      del self._flying[key]
