"""The ladder after the fact: calls of a log that was recorded elsewhere.

Our own calls are repaired before sampling (harness/render.py). A log holds
what an engine received and sampled while nobody kept histories append-only:
every prompt was encoded again from text. Here each turn's prompt is aligned
with the earlier turn that it goes on from, by the steps of ladder.py, so that
a history forms one path where it can.

What follows a boundary that was repaired was sampled under other tokens than
those it now stands after. Such tokens are counted in tito/context_drift and,
unless the caller says otherwise, masked: they stay in the tree as context. A
turn that splits off stands after its own recorded prompt and is exact again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from gyre.trajectory import ladder
from gyre.trajectory.prefixes import Prefixes, common
from gyre.types import Call, FinishReason, Sample

# Tokens looked at on each side of a first difference.
_NEAR = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
  """One model call of a log.

  Attributes:
    call_id: unique in its execution, in order of start.
    prompt: text or ids, as the engine received it.
    sampled: int32 [C], as the engine sampled them.
    logprobs: float32 [C]; versions: int32 [C].
    finish_reason, role, t_start, t_end: as of types.Call.
  """

  call_id: str
  prompt: str | Sequence[int] | np.ndarray
  sampled: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  finish_reason: FinishReason = "stop"
  role: str = "main"
  t_start: float = 0.0
  t_end: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Alignment:
  """Calls whose prompts are repaired.

  Attributes:
    calls: one a turn, for trajectory/tree.py. The call of a masked turn has
      its sampled tokens at the end of its prompt, where they are context.
    drifted: call_ids of the turns that follow a repaired boundary.
    stats: tito/strict, normalized, retokenized, split (boundaries) and
      tito/context_drift (sampled tokens of the drifted turns).
  """

  calls: tuple[Call, ...]
  drifted: frozenset[str]
  stats: Mapping[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class _Placed:
  """A turn in its place: recorded ids, and those of the path it is on."""

  turn: Turn
  recorded: np.ndarray
  sampled: np.ndarray
  prompt: np.ndarray
  parent: str | None
  drifted: bool


class _Aligner:
  """The turns of one execution so far."""

  def __init__(self, codec: ladder.Codec, special_ids: Collection[int]):
    self._codec = codec
    self._special = np.asarray(sorted(special_ids), np.int32)
    self._placed: list[_Placed] = []
    self._prompts, self._sequences = Prefixes(), Prefixes()

  def _candidates(self, following: np.ndarray) -> set[int]:
    """Turns that a prompt may go on from."""
    found = {len(self._placed) - 1, *self._prompts.whole(following)}
    found.update(self._sequences.whole(following))
    nearest, _ = self._sequences.match(following)
    found.update([] if nearest is None else [nearest])
    return found - {-1}

  def _climb(
    self, before: _Placed, following: np.ndarray
  ) -> tuple[ladder.Repair, int] | None:
    """The repair, and how many tokens it keeps; None for a split."""
    shared = common(before.recorded, following)
    end = len(before.recorded) + len(before.sampled)
    if shared == len(before.recorded) and np.array_equal(
      before.sampled, following[shared:end]
    ):
      return ladder.Repair("strict", following[end:].tolist()), end
    # Compare from the last token that text can be cut at.
    cuts = np.flatnonzero(np.isin(before.recorded[:shared], self._special))
    start = int(cuts[-1]) if len(cuts) else 0
    if self._parts(before.recorded, following, start, shared):
      return None
    repair = ladder.climb(
      before.recorded[start:].tolist(),
      before.sampled.tolist(),
      following[start:].tolist(),
      self._codec,
    )
    s, kept = repair.prompt_drop, len(before.recorded) - repair.prompt_drop
    end = len(before.prompt)
    if repair.step == "split" or not np.array_equal(
      before.prompt[end - s : end], before.recorded[kept:]
    ):
      return None
    return repair, kept + len(before.sampled) - repair.sampled_drop

  def _parts(
    self, prompt: np.ndarray, following: np.ndarray, start: int, shared: int
  ) -> bool:
    """Whether their texts part before what may be dropped of the prompt.

    A look at what stands near their first difference, which spares reading
    long prompts that have nothing to do with each other.
    """
    end = shared + _NEAR
    if shared - start > _NEAR or end > len(prompt) - ladder.MAX_PROMPT_DROP:
      return False
    text = self._codec.decode(prompt[start:end].tolist())
    # A token of one text may be several of the other's.
    goal = self._codec.decode(following[start : end + 8 * _NEAR].tolist())
    sure = min(len(text), len(goal)) - 8
    return sure > 0 and text[:sure] != goal[:sure]

  def place(self, turn: Turn) -> tuple[_Placed, str]:
    """Puts a turn where it goes on; returns it and the step taken."""
    if isinstance(turn.prompt, str):
      recorded = np.asarray(self._codec.encode(turn.prompt), np.int32)
    else:
      recorded = np.asarray(turn.prompt, np.int32)
    sampled = np.asarray(turn.sampled, np.int32)
    best: tuple[int, int, ladder.Repair] | None = None
    for number in sorted(self._candidates(recorded), reverse=True):
      before = self._placed[number]
      if best and best[0] >= len(before.recorded) + len(before.sampled):
        continue
      found = self._climb(before, recorded)
      if found is not None and (best is None or found[1] > best[0]):
        best = found[1], number, found[0]
    if best is None:
      step = "split" if self._placed else ""
      placed = _Placed(turn, recorded, sampled, recorded, None, False)
    else:
      _, number, repair = best
      before, step = self._placed[number], repair.step
      placed = _Placed(
        turn=turn,
        recorded=recorded,
        sampled=sampled,
        prompt=np.concatenate(
          [
            before.prompt[: len(before.prompt) - repair.prompt_drop],
            before.sampled[: len(before.sampled) - repair.sampled_drop],
            np.asarray(repair.suffix, np.int32),
          ]
        ),
        parent=None if step == "normalized" else before.turn.call_id,
        drifted=before.drifted or step != "strict",
      )
    self._prompts.add(len(self._placed), recorded)
    whole = np.concatenate([recorded, sampled])
    self._sequences.add(len(self._placed), whole)
    self._placed.append(placed)
    return placed, step


def align(
  turns: Iterable[Turn],
  codec: ladder.Codec,
  *,
  execution_id: str,
  group_id: str,
  special_ids: Collection[int] = (),
  mask_drift: bool = True,
) -> Alignment:
  """Aligns the turns of one execution.

  Args:
    turns: in order of start. A turn goes on from the earlier one of which the
      ladder keeps the most tokens, whichever that is.
    codec: of the ids; encodes prompts that are text.
    execution_id, group_id: of the calls made.
    special_ids: tokens before which text can always be cut. No drop reaches
      past one that stands, and the comparison of long prompts is short.
    mask_drift: tokens that follow a repaired boundary are not trained.

  Raises:
    ValueError: a turn's arrays differ in length, or its prompt is empty.
  """
  aligner = _Aligner(codec, special_ids)
  calls, steps, drifted, drift = [], [], set(), 0
  for turn in turns:
    placed, step = aligner.place(turn)
    if not len(placed.recorded):
      raise ValueError(
        f"turn {turn.call_id} of {execution_id} has an empty prompt and "
        f"{len(placed.sampled)} sampled ids"
      )
    call = Call(
      execution_id=execution_id,
      group_id=group_id,
      call_id=turn.call_id,
      prompt_ids=placed.prompt,
      completion_ids=placed.sampled,
      logprobs=turn.logprobs,
      versions=turn.versions,
      finish_reason=turn.finish_reason,
      parent_hint=placed.parent,
      role=turn.role,
      t_start=turn.t_start,
      t_end=turn.t_end,
      boundary=step,
    )
    steps.append(step)
    if placed.drifted:
      drifted.add(turn.call_id)
      drift += len(placed.sampled)
      if mask_drift:
        call = as_context(call)
    calls.append(call)
  return Alignment(
    calls=tuple(calls),
    drifted=frozenset(drifted),
    stats={**ladder.counts(steps), "tito/context_drift": drift},
  )


def as_context(call: Call) -> Call:
  """The same call with nothing sampled: all its tokens are prompt."""
  return dataclasses.replace(
    call,
    prompt_ids=np.concatenate([call.prompt_ids, call.completion_ids]),
    completion_ids=[],
    logprobs=[],
    versions=[],
  )


@dataclasses.dataclass(frozen=True)
class Audit:
  """Sampled spans looked up in the training samples again.

  Attributes:
    sampled: tokens that the calls sampled.
    located: of these, how many a loss mask has, with their logprob and
      version, under exactly the context they were sampled in.
    drift_in_loss: tokens in a loss mask that no call sampled so; must be 0.
  """

  sampled: int
  located: int
  drift_in_loss: int


def _bits(x: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(x, np.float32).view(np.int32)


def audit(calls: Iterable[Call], samples: Sequence[Sample]) -> Audit:
  """Re-locates every sampled span of one execution in its samples.

  It compares bits and trusts nothing that made the samples. Linear in the
  tokens of calls and samples, but for a digest of a sample at the length of
  each prompt.

  Args:
    calls: as recorded (or as `align` made them); may be a generator.
    samples: chosen for training.
  """
  by_prompt: dict[tuple[int, bytes], list[Call]] = {}
  sampled = 0
  for call in calls:
    if len(call.completion_ids):
      sampled += len(call.completion_ids)
      digest = hashlib.blake2b(call.prompt_ids.tobytes()).digest()
      # The prompt itself is known by its digest; it need not be kept.
      small = dataclasses.replace(call, prompt_ids=[])
      by_prompt.setdefault((len(call.prompt_ids), digest), []).append(small)
  located: dict[str, np.ndarray] = {}
  drift = 0
  for sample in samples:
    ids, trained = np.ascontiguousarray(sample.ids), sample.trained
    found, running, done = np.zeros(len(trained), bool), hashlib.blake2b(), 0
    for length in sorted({n for n, _ in by_prompt if n <= len(ids)}):
      running.update(ids[done:length].tobytes())
      done = length
      for call in by_prompt.get((length, running.digest()), ()):
        n = common(call.completion_ids, ids[length:])
        own = slice(*np.searchsorted(trained, [length, length + n]))
        token = trained[own] - length
        same = sample.versions[own] == call.versions[token]
        same &= _bits(sample.logprobs[own]) == _bits(call.logprobs[token])
        found[own] |= same
        seen = located.setdefault(
          call.call_id, np.zeros(len(call.completion_ids), bool)
        )
        seen[token] |= same
    drift += int((~found).sum())
  return Audit(
    sampled=sampled,
    located=sum(int(x.sum()) for x in located.values()),
    drift_in_loss=drift,
  )
