"""Boundary repair: how the next prompt goes on from what was sampled.

A call had the prompt p and sampled a; the harness then sends messages that
render as p'. The first step that holds decides (T1's ladder, 2609.11042):

  strict       p + a is a prefix of p'; the rest of p' follows as context.
  normalized   drop_s(p) + drop_u(a) is one, with s + u minimal, s <= 96 and
               u <= 16 tokens dropped from the ends: the template writes
               otherwise what ends the prompt or the turn.
  retokenized  the text of p + a stands in p', in other tokens: the *sampled*
               a stays, the remainder of p' follows, never the copy that was
               encoded again.
  split        none of these: a new branch under the same execution.

A token whose text stands in p' is never dropped, since that would encode again
what was sampled: where all of it stands, the boundary is retokenized and not
normalized. A drop leaves at least one sampled token and ends where a token of
p' begins. Text and tokens are related by offsets (`ends`).

The harness climbs before sampling (`harness/render.py`), so that the repaired
ids are what the engine receives; imported logs are aligned by the same steps
after the fact (`align.py`).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from gyre.types import Boundary

MAX_PROMPT_DROP = 96
MAX_SAMPLED_DROP = 16

#: What a decoder writes for bytes that are no character.
_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Codec(Protocol):
  """Text <-> ids; `harness.render.Renderer` is one."""

  def encode(self, text: str) -> list[int]:
    """Ids of `text`, special tokens in it recognised, none added."""
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`, special tokens included."""
    ...


@dataclasses.dataclass(frozen=True)
class Repair:
  """What the ladder decided.

  Attributes:
    step: the first step that held.
    prompt_drop: s, tokens dropped from the end of the prompt.
    sampled_drop: u, tokens dropped from the end of the completion.
    suffix: what follows the tokens kept; for a split the whole of p'.
  """

  step: Boundary
  suffix: list[int]
  prompt_drop: int = 0
  sampled_drop: int = 0

  def ids(self, prompt: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The next prompt: the tokens kept of p and a, and the suffix."""
    if self.step == "split":
      return list(self.suffix)
    kept = prompt[: len(prompt) - self.prompt_drop]
    said = sampled[: len(sampled) - self.sampled_drop]
    return [*kept, *said, *self.suffix]


def ends(ids: Sequence[int], codec: Codec) -> Iterator[int]:
  """Yields where each token ends, in characters of the text of all.

  -1 for a token that ends inside a character, or where the decoder's word for
  broken bytes leaves that open; the last token always has an end.
  """
  # Two tokens back, so that decoders which treat the first one apart agree.
  lead, start, done = 0, 0, 0
  for i in range(1, len(ids) + 1):
    known = len(codec.decode(ids[lead:start]))
    text = codec.decode(ids[lead:i])
    if text.endswith(_BROKEN) and i < len(ids):
      yield -1
      continue
    done += len(text) - known
    lead, start = start, i
    yield done


def _common(a: str, b: str) -> int:
  """Characters of the longest common prefix."""
  low, high = 0, min(len(a), len(b))
  while low < high:
    middle = (low + high + 1) // 2
    if a[low:middle] == b[low:middle]:
      low = middle
    else:
      high = middle - 1
  return low


def _rest(
  following: Sequence[int], goal: str, at: int, codec: Codec
) -> list[int]:
  """Tokens of p' from character `at` on; one that lies across is cut there."""
  if not at:
    return list(following)
  for i, end in enumerate(ends(following, codec), 1):
    if end == at:
      return list(following[i:])
    if end > at:
      return [*codec.encode(goal[at:end]), *following[i:]]
  return []


def _least_drop(
  prompt: Sequence[int],
  sampled: Sequence[int],
  text: str,
  following: Sequence[int],
  goal: str,
  codec: Codec,
) -> tuple[int, int, int] | None:
  """The least s + u, then the least u, and where the kept text ends.

  Args:
    prompt, sampled, following: p, a and p'.
    text: of p + a.
    goal: of p'.
    codec: theirs.

  Returns:
    (s, u, characters kept), or None beyond the limits.
  """
  n, m = len(prompt), len(sampled)
  least = codec.decode(prompt[: max(n - MAX_PROMPT_DROP, 0)])
  if not goal.startswith(least.rstrip(_BROKEN)):
    return None
  own = [0, *ends([*prompt, *sampled], codec)]
  if own[n] < 0:  # the first sampled token completes a character of p
    return None
  begins = {0}
  for end in ends(following, codec):
    begins.add(end)
    if end > len(text):
      break
  common, best = _common(text, goal), None
  for s in range(min(MAX_PROMPT_DROP, n) + 1):
    at = own[n - s]
    if not 0 <= at <= common:
      continue
    for u in range(min(MAX_SAMPLED_DROP, max(m - 1, 0)) + 1):
      if best is not None and (s + u, u) >= (best[0] + best[1], best[1]):
        continue
      end = own[n + m - u]
      said = text[own[n] : end]
      if end >= 0 and at + len(said) in begins and goal.startswith(said, at):
        best = (s, u, at + len(said))
  return best


def climb(
  prompt: Sequence[int],
  sampled: Sequence[int],
  following: Sequence[int],
  codec: Codec,
  *,
  of_text: bool = False,
) -> Repair:
  """Decides how p' goes on from p and a.

  Args:
    prompt: p. It and p' may be given from the last special token on up to
      which they agree: text can be cut there, and a drop never reaches past
      it, since a token that stands is not dropped.
    sampled: a.
    following: p'.
    codec: of the ids.
    of_text: p' is the encoding of a text with a in it as decoded. Where a ends
      inside a character that text has the decoder's word for it, whose bytes
      may begin as a ends: they are that word again, not what follows a.

  Returns:
    The repair; `Repair.ids` gives the next prompt.
  """
  whole, following = [*prompt, *sampled], list(following)
  strict = Repair("strict", following[len(whole) :])
  stands = following[: len(whole)] == whole
  if stands and not (of_text and codec.decode(whole[-4:]).endswith(_BROKEN)):
    return strict
  text, goal = codec.decode(whole), codec.decode(following)
  if goal.startswith(text):
    rest = _rest(following, goal, len(text), codec)
    if not stands or rest != strict.suffix:
      return Repair("retokenized", rest)
  if stands:
    return strict
  found = _least_drop(prompt, sampled, text, following, goal, codec)
  if found is None:
    return Repair("split", following)
  s, u, at = found
  return Repair("normalized", _rest(following, goal, at, codec), s, u)


def counts(boundaries: Iterable[str]) -> dict[str, int]:
  """Returns tito/strict, normalized, retokenized and split: boundaries each.

  Args:
    boundaries: of calls; "" (an execution's first) is not counted.
  """
  seen = collections.Counter(boundaries)
  steps = ("strict", "normalized", "retokenized", "split")
  return {f"tito/{step}": seen[step] for step in steps}
