"""The engine protocol: async, token ids in, token ids out. JAX-free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from gyre import types

OnToken = Callable[[int, float, int], None]

_MAX_SEED = 1 << 32


class EngineError(RuntimeError):
  """Base of what an engine raises."""


class EngineDown(EngineError):
  """The engine failed or was closed; nothing more will come from it."""


class Rejected(EngineError, ValueError):
  """The request can never be served: wrong ids, lengths or parameters."""


class StaleVersion(EngineError):
  """The engine serves other weights than asked for."""


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """What to continue, and how to sample.

  A request interrupted anywhere continues identically anywhere else when it
  is sent again with ids = prompt + partial completion, the same seed, and
  max_new_tokens less what was sampled: keys are fold_in(seed, position).

  Attributes:
    ids: int32 [P], at least one.
    max_new_tokens: at least one.
    temperature: logits are divided by it; 0 takes the argmax, and records the
      log-probability at temperature 1.
    top_p: keep the smallest set of most likely tokens of this mass; 1 is off.
    top_k: keep the k most likely tokens (and ties with the last); 0 is off.
    stop_ids: sampling one of these ends the completion; it is kept in it.
    seed: in [0, 2^32).
    request_id: names the request for abort; empty means the engine's choice.
    want_routing: record the experts chosen (None for a dense model).
    cache_salt: requests share cached prefixes only within one salt.
    min_version: refuse (StaleVersion) under older weights.
    execution_id: whose call it is; a router sends it where the execution is
      placed. Empty: nobody's, any engine will do.
  """

  ids: Sequence[int] | np.ndarray
  max_new_tokens: int
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  stop_ids: Sequence[int] = ()
  seed: int = 0
  request_id: str = ""
  want_routing: bool = False
  cache_salt: str = ""
  min_version: int = 0
  execution_id: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
  """What was sampled.

  Attributes:
    ids: int32 [C]; a stop token is kept.
    logprobs: float32 [C], of the distribution sampled from.
    versions: int32 [C], the weights that sampled each token.
    finish_reason: "stop", "length", or "abort" (ids are then a partial).
    routing: [P + C - 1, layers, k] experts, or None.
  """

  ids: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  finish_reason: types.FinishReason
  routing: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class EngineStats:
  """A moment of an engine; counters grow from its start.

  Attributes:
    version: weights version being served.
    running, waiting: requests in slots, and admitted but not in one.
    cached_tokens: tokens whose keys and values the prefix cache holds.
    free_pages: pages that an allocation could take (cached but unused pages
      included); total_pages: all.
    paused, asleep: whether steps are taken, whether memory is held.
    prompt_tokens: tokens of prompts received.
    hit_tokens: of those, found in the prefix cache.
    prefilled_tokens: tokens computed as context, re-prefills included.
    reprefilled_tokens: tokens prefilled again after a preemption, new
      weights or a sleep.
    generated_tokens: tokens sampled and returned.
    decode_steps, prefill_steps: forward passes.
    preemptions: requests that lost their pages to others.
    finished: requests answered, by any reason.
    compilations: programs compiled.
  """

  version: int = 0
  running: int = 0
  waiting: int = 0
  cached_tokens: int = 0
  free_pages: int = 0
  total_pages: int = 0
  paused: bool = False
  asleep: bool = False
  prompt_tokens: int = 0
  hit_tokens: int = 0
  prefilled_tokens: int = 0
  reprefilled_tokens: int = 0
  generated_tokens: int = 0
  decode_steps: int = 0
  prefill_steps: int = 0
  preemptions: int = 0
  finished: int = 0
  compilations: int = 0


COUNTERS = (
  "prompt_tokens",
  "hit_tokens",
  "prefilled_tokens",
  "reprefilled_tokens",
  "generated_tokens",
  "decode_steps",
  "prefill_steps",
  "preemptions",
  "finished",
  "compilations",
)
_GAUGES = ("running", "waiting", "cached_tokens", "free_pages", "total_pages")


def total(
  each: Iterable[EngineStats],
  past: Mapping[str, int] = MappingProxyType({}),
  *,
  version: int,
  paused: bool,
  waiting: int = 0,
) -> EngineStats:
  """Counts of many engines as one's.

  Args:
    each: of the engines.
    past: counters of engines that are no more.
    version, paused: of the whole.
    waiting: requests that are at no engine.

  Returns:
    Sums; asleep where all are.
  """
  each = list(each)
  sums = {k: sum(getattr(s, k) for s in each) for k in (*COUNTERS, *_GAUGES)}
  for name, count in past.items():
    sums[name] += count
  sums["waiting"] += waiting
  return EngineStats(
    version=version,
    paused=paused,
    asleep=bool(each) and all(s.asleep for s in each),
    **sums,
  )


@runtime_checkable
class Engine(Protocol):
  """Token ids in, token ids out."""

  async def generate(
    self, request: Request, on_token: OnToken | None = None
  ) -> Completion:
    """Samples a continuation.

    Args:
      request: what to continue.
      on_token: called in the caller's event loop with (id, logprob, version)
        for each token, in order, before the completion is returned.

    Raises:
      Rejected: the request can never be served.
      StaleVersion: the weights are older than request.min_version.
      EngineDown: the engine failed or was closed.
    """
    ...

  async def abort(self, request_id: str) -> bool:
    """Ends a request; its generate() returns the partial. False if unknown."""
    ...

  async def pause(self, keep: bool = True) -> None:
    """Takes no more steps. keep=False aborts live requests (partials)."""
    ...

  async def resume(self) -> None:
    """Steps again after pause."""
    ...

  async def load_weights(self, weights: Any, version: int) -> None:
    """Serves new weights; live requests prefill again and go on.

    Legal while asleep: they take device memory when the engine wakes.

    Args:
      weights: a parameter pytree; an engine of another process, or one that
        computes with none, takes a types.Snapshot too.
      version: not below the current one.

    Raises:
      StaleVersion: version is below the one served.
    """
    ...

  async def sleep(self) -> None:
    """Frees device memory, weights included; requests wait, live and new."""
    ...

  async def wake(self) -> None:
    """Takes device memory again; goes on once it has been given weights."""
    ...

  def stats(self) -> EngineStats:
    """Counts, at this moment."""
    ...

  async def close(self) -> None:
    """Ends the engine; waiting requests raise EngineDown."""
    ...


def _reject(bad: bool, message: str) -> None:
  if bad:
    raise Rejected(message)


def check_request(
  request: Request, *, vocab_size: int, max_context: int
) -> np.ndarray:
  """Checks a request before an engine sees it.

  Args:
    request: the request.
    vocab_size: ids must lie in [0, vocab_size).
    max_context: prompt and new tokens together must not exceed it.

  Returns:
    request.ids as int32 [P].

  Raises:
    Rejected: with the value and the limit.
  """
  ids = np.asarray(request.ids)
  _reject(ids.ndim != 1 or ids.size == 0, f"ids have shape {ids.shape}")
  _reject(
    not np.issubdtype(ids.dtype, np.integer), f"ids have dtype {ids.dtype}"
  )
  low, high = int(ids.min()), int(ids.max())
  _reject(
    low < 0 or high >= vocab_size,
    f"ids span [{low}, {high}], the vocabulary has {vocab_size}",
  )
  new = request.max_new_tokens
  _reject(new < 1, f"max_new_tokens is {new}, must be at least 1")
  _reject(
    ids.size + new > max_context,
    f"{ids.size} prompt and {new} new tokens exceed the context of "
    f"{max_context}",
  )
  t = request.temperature
  _reject(not (math.isfinite(t) and t >= 0), f"temperature is {t}")
  _reject(not 0 < request.top_p <= 1, f"top_p {request.top_p} not in (0, 1]")
  _reject(request.top_k < 0, f"top_k is {request.top_k}, must not be negative")
  _reject(
    not 0 <= request.seed < _MAX_SEED, f"seed {request.seed} not in [0, 2^32)"
  )
  for i in request.stop_ids:
    _reject(
      not 0 <= i < vocab_size,
      f"stop id {i} not in the vocabulary of {vocab_size}",
    )
  return ids.astype(np.int32)
