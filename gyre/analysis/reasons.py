"""Why a call left the history of an earlier one, as far as records tell.

Harnesses do not say. What can be seen: the ids of both, their roles, where in
them they part, how each call ended, when it ran, and, with a tokenizer, what
is written there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from gyre.analysis.pieces import Pieces
from gyre.types import Call

SUB_AGENT = "sub-agent"
COMPACTION = "compaction"
RETRY = "retry"
LENGTH = "length"
NORMALIZED = "turn's end rewritten"
RETOKENIZED = "retokenised"
THINKING = "thinking stripped"
DROPPED = "history dropped"
EDITED = "history edited"
PARALLEL = "parallel"
OTHER_WAY = "rolled back"
NEW = "new conversation"

#: Every kind of reason, with what it means.
KINDS = {
  SUB_AGENT: "one side was sampled for a sub-agent",
  COMPACTION: "the history was replaced by a summary of it",
  RETRY: "the same prompt was sampled again",
  LENGTH: "a turn was cut by the token limit and closed differently",
  NORMALIZED: "the template ends a turn otherwise than it was sampled",
  RETOKENIZED: "the same text in other tokens",
  THINKING: "earlier thinking is left out of the later prompt",
  DROPPED: "a part of the history is left out of the later prompt",
  EDITED: "a part of the history was rewritten",
  PARALLEL: "the same history went on in two calls at the same time",
  OTHER_WAY: "the history went on once more from an earlier point",
  NEW: "nothing of the earlier history is left",
}

_GRAM = 8  # tokens that must agree for two histories to meet again
_LOOK = 8192  # tokens after the split in which that is looked for
_NEAR = 16  # tokens between a cut turn's end and where it was closed
_QUOTE = 24  # tokens of a completion that are looked for elsewhere
_TEXT = 48  # tokens compared as text
_AGAIN = 32  # tokens of context that tell a history that was kept
_LINE = 32  # characters that must agree of texts in other tokens


@dataclasses.dataclass(frozen=True)
class Reason:
  """Why two calls part.

  Attributes:
    kind: one of KINDS.
    detail: one line for people.
  """

  kind: str
  detail: str


def _whole(call: Call) -> np.ndarray:
  return np.concatenate([call.prompt_ids, call.completion_ids])


def _find(needle: np.ndarray, hay: np.ndarray) -> int:
  """Index of the first occurrence of int32 `needle` in `hay`, or -1."""
  if not len(needle):
    return -1
  a, b = (np.ascontiguousarray(x, "<i4").tobytes() for x in (needle, hay))
  at = b.find(a)
  while at >= 0 and at % 4:
    at = b.find(a, at + 1)
  return at // 4 if at >= 0 else -1


def _meet(old: np.ndarray, new: np.ndarray) -> tuple[int, int] | None:
  """Where two continuations agree again: tokens passed over in each.

  The first place in `new` that stands anywhere in `old` decides.
  """
  old, new = old[:_LOOK], new[:_LOOK]
  n = min(_GRAM, len(old), len(new))
  if n < 2:
    return None
  first: dict[tuple[int, ...], int] = {}
  o, w = old.tolist(), new.tolist()
  for i in range(len(o) - n, -1, -1):
    first[tuple(o[i : i + n])] = i
  for j in range(len(w) - n + 1):
    i = first.get(tuple(w[j : j + n]))
    if i is not None:
      return i, j
  return None


def _quoted(calls: Sequence[Call], later: Call, depth: int) -> Call | None:
  """The newest of `calls` whose words stand in `later`, little before them.

  Words that still follow what they followed, or most of it, are history that
  was kept, edited or not.
  """
  prompt = later.prompt_ids[depth:]
  for call in reversed(calls):
    middle = call.completion_ids[2:-2][:_QUOTE]
    at = _find(middle, prompt) if len(middle) >= _GRAM else -1
    if at < 0 or 2 * (depth + at) >= len(call.prompt_ids):
      continue
    context = [call.prompt_ids[-_AGAIN:], call.completion_ids[:4]]
    if _find(np.concatenate(context), prompt) < 0:
      return call
  return None


def _by_role(
  older: Call, newer: Call, between: Sequence[Call], depth: int
) -> Reason | None:
  """What the roles tell: sub-agents and summaries."""
  subs = [c for c in (older, newer) if c.role.startswith("sub_agent")]
  if len(subs) == 1:
    how = "starts" if subs[0] is newer else "ran"
    return Reason(
      SUB_AGENT, f"a sub-agent {how} in call {subs[0].call_id} from here"
    )
  if newer.role.endswith("summary") and not older.role.endswith("summary"):
    return Reason(
      COMPACTION, f"call {newer.call_id} asks for a summary of what was said"
    )
  family = newer.role.partition("_summary")[0]
  summaries = [c for c in between if c.role == f"{family}_summary"]
  if summaries and not newer.role.endswith("summary"):
    return Reason(
      COMPACTION,
      f"call {newer.call_id} goes on from the summary of call "
      f"{summaries[-1].call_id}",
    )
  source = _quoted(between, newer, depth)
  if source is not None and depth < len(source.prompt_ids):
    return Reason(
      COMPACTION,
      f"call {newer.call_id} goes on from what call {source.call_id} wrote, "
      "without the history before it",
    )
  return None


def _went_on(older: Call, newer: Call, depth: int) -> Reason | None:
  """Both sides keep every token before the split: nothing was rewritten."""
  if depth >= len(newer.prompt_ids) and depth >= len(older.prompt_ids):
    return Reason(
      RETRY,
      f"call {newer.call_id} samples the prompt of call {older.call_id} again",
    )
  if newer.t_start < older.t_end and older.t_start < newer.t_end:
    return Reason(
      PARALLEL, f"calls {older.call_id} and {newer.call_id} ran side by side"
    )
  return None


def _cut_turn(
  older: Call, newer: Call, before: Sequence[Call], depth: int
) -> Reason | None:
  """A completion that the token limit ended near the split."""
  for call in reversed(before):
    end = len(call.prompt_ids) + len(call.completion_ids)
    cut = call.finish_reason == "length" and abs(end - depth) <= _NEAR
    if cut and len(newer.prompt_ids) > depth:
      same = min(len(call.prompt_ids), depth)
      if np.array_equal(call.prompt_ids[:same], newer.prompt_ids[:same]):
        return Reason(
          LENGTH,
          f"call {call.call_id} was cut at its token limit; the prompt of call "
          f"{newer.call_id} closes it",
        )
  return None


def _normalized(
  newer: Call, before: Sequence[Call], depth: int
) -> Reason | None:
  """The ladder dropped the last tokens of the call that this goes on from."""
  source = next((c for c in before if c.call_id == newer.parent_hint), None)
  if source is None or newer.boundary != "normalized":
    return None
  dropped = len(source.prompt_ids) + len(source.completion_ids) - depth
  if dropped < 1:
    return None
  return Reason(
    NORMALIZED,
    f"the prompt of call {newer.call_id} goes on from call {source.call_id} "
    f"without its last {dropped:,} tokens",
  )


def _same_text(
  old: np.ndarray, new: np.ndarray, pieces: Pieces
) -> tuple[str, str] | None:
  """The pieces of both where they read the same but for where they are cut."""
  if not pieces.known:
    return None
  a, b = pieces.text(old[:_TEXT]), pieces.text(new[:_TEXT])
  n = min(len(a), len(b))
  if n > 1 and a[: min(n, _LINE)] == b[: min(n, _LINE)]:
    return pieces.of(old[:1])[0], pieces.of(new[:1])[0]
  return None


def _stripped(
  older: Call, newer: Call, depth: int, pieces: Pieces
) -> int | None:
  """Tokens that a sampled message lost at its front, or None.

  What follows them in the completion is what follows the split in the later
  prompt, in the same tokens or, where a tokenizer tells, in others.
  """
  first = depth - len(older.prompt_ids)
  said = older.completion_ids[max(first, 0) :]
  new = newer.prompt_ids[depth:][: len(said)]
  if first < 0 or len(new) < 2:
    return None
  for lost in range(1, len(said) - 1):
    if said[lost] == new[0] and np.array_equal(
      said[lost:], new[: len(said) - lost]
    ):
      return lost
  if not pieces.known:
    return None
  kept = pieces.message(new).strip()
  words = pieces.message(said).rstrip()
  if not kept or not words.endswith(kept):
    return None
  share = len(words) - len(kept)
  return round(len(said) * share / len(words)) or None


def _is_thinking(lost: np.ndarray, sampled: bool, pieces: Pieces) -> bool:
  if pieces.known:
    text = pieces.text(lost).lower()
    return "think>" in text or "thinking" in text or "reasoning" in text
  return sampled


def _rewritten(older: Call, newer: Call, depth: int, pieces: Pieces) -> Reason:
  """What of the older history the later prompt lacks, and has instead."""
  old, new = _whole(older)[depth:], newer.prompt_ids[depth:]
  who = f"the prompt of call {newer.call_id}"
  if (cut := _same_text(old, new, pieces)) is not None:
    return Reason(
      RETOKENIZED, f"{who} has {cut[1]!r} where {cut[0]!r} had been, same text"
    )
  lost = _stripped(older, newer, depth, pieces)
  met = _meet(old, new) if lost is None else (lost, 0)
  if met is None:
    if not len(new):
      return Reason(OTHER_WAY, f"{who} ends here, short of what came after")
    kept = "nothing" if depth == 0 else f"its first {depth:,} tokens"
    kind = NEW if depth < _GRAM else OTHER_WAY
    return Reason(
      kind, f"{who} keeps {kept} of call {older.call_id} and goes on otherwise"
    )
  lost, put = met
  sampled = depth + lost > len(older.prompt_ids)
  what = "tokens of which some were sampled" if sampled else "tokens"
  if lost and _is_thinking(old[:lost], sampled and put <= lost, pieces):
    return Reason(THINKING, f"{who} leaves out {lost:,} tokens of thinking")
  if not put:
    return Reason(DROPPED, f"{who} leaves out {lost:,} {what}")
  if not lost:
    return Reason(EDITED, f"{who} has {put:,} more tokens here")
  return Reason(EDITED, f"{who} has {put:,} tokens in place of {lost:,} {what}")


def explain(
  older: Call,
  newer: Call,
  depth: int,
  *,
  calls: Sequence[Call],
  pieces: Pieces | None = None,
) -> Reason:
  """Says why two calls part.

  Args:
    older, newer: calls that share exactly their first `depth` tokens.
    depth: tokens before the split.
    calls: the execution's, in order of start.
    pieces: reads ids; default none.

  Returns:
    The first reason that what is recorded bears out: sub-agent, summary, retry
    or parallel calls, a cut turn, a repaired boundary, and else how the ids
    differ.
  """
  pieces = pieces or Pieces()
  names = [c.call_id for c in calls]
  i, j = names.index(older.call_id), names.index(newer.call_id)
  return (
    _by_role(older, newer, calls[min(i, j) : max(i, j)], depth)
    or _went_on(older, newer, depth)
    or _cut_turn(older, newer, calls[:j], depth)
    or _normalized(newer, calls[:j], depth)
    or _rewritten(older, newer, depth, pieces)
  )
