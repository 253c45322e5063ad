"""A branch's tokens as messages, with what can be folded in them.

Chat templates write a special token before each message. Where a tokenizer
tells which, a block is a message; else blocks change where sampling does.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections.abc import Sequence

import numpy as np

_ROLE = r"system|user|assistant|tool|observation|developer|model"
_BEFORE_ROLE = re.compile(
  r"<\|(im_start|start_header_id|start)\|>|<start_of_turn>"
)
_IS_ROLE = re.compile(rf"<[|｜]({_ROLE})[|｜]>", re.I)
_HEADER = 8  # tokens of a message's opening, before what was sampled
_TAIL = 4  # tokens after a sampled message that close it
_TITLE = 80
_SHOWN = 100  # tokens that a title is made of

_FOLDS = (
  ("thinking", re.compile(r"<think>.*?(?:</think>|\Z)", re.S)),
  (
    "tool call",
    re.compile(
      r"<tool_call>.*?(?:</tool_call>|\Z)"
      r"|<function=.*?(?:</function>|\Z)"
      r"|<\|python_tag\|>.*?(?=<\||\Z)"
      r"|^```(?:sh|bash|shell)?[ \t]*\n.*?(?:^```|\Z)",
      re.S | re.M,
    ),
  ),
)


@dataclasses.dataclass(frozen=True)
class Fold:
  """A part of a block shown closed.

  Attributes:
    start, stop: tokens, counted in the branch.
    kind: "tool call" or "thinking".
    title: what it is, in a line.
  """

  start: int
  stop: int
  kind: str
  title: str


@dataclasses.dataclass(frozen=True)
class Block:
  """A message, or a run of tokens of one kind.

  Attributes:
    start, stop: tokens, counted in the branch.
    role: of the message; "context" where it cannot be told.
    kind: "sampled", "tool result" or "context".
    title: its first words.
    folds: in order, apart from each other.
  """

  start: int
  stop: int
  role: str
  kind: str
  title: str
  folds: tuple[Fold, ...] = ()


def _line(text: str) -> str:
  words = " ".join(text.split())
  return words if len(words) <= _TITLE else words[: _TITLE - 1] + "…"


def _opener(pieces: Sequence[str], i: int) -> str | None:
  """The role of the message that token i opens, or None."""
  if found := _IS_ROLE.fullmatch(pieces[i]):
    return found[1].lower()
  if _BEFORE_ROLE.fullmatch(pieces[i]):
    return "".join(pieces[i + 1 : i + 2]).strip().lower() or "message"
  return None


def _starts(
  pieces: Sequence[str], sampled: np.ndarray, specials: Sequence[bool]
) -> dict[int, str]:
  """First token -> role, of every block."""
  n = len(pieces)
  out = {0: "context"}
  for i in range(n):
    # Openers a model samples itself are its text.
    if specials[i] and not sampled[i] and (role := _opener(pieces, i)):
      out[i] = role
  openers = [*sorted(out), n]
  edges = (np.flatnonzero(np.diff(sampled.astype(np.int8))) + 1).tolist()
  for edge, last, following in zip(
    edges, [0, *edges], [*edges[1:], n], strict=False
  ):
    k = bisect.bisect_right(openers, edge)
    if sampled[edge]:
      # The header that the template wrote belongs to what follows it.
      header = openers[k - 1]
      if not (
        last <= header
        and edge - header <= _HEADER
        and out[header] in ("assistant", "model")
      ):
        out[edge] = "assistant"
    else:
      following = min(following, openers[bisect.bisect_left(openers, edge)])
      if following - edge > _TAIL:
        out.setdefault(edge, "context")
  if n and sampled[0]:
    out[0] = "assistant"
  return out


def _folds(
  pieces: Sequence[str], start: int, stop: int, whole_is_call: bool
) -> tuple[Fold, ...]:
  """Tool calls and thinking of one block, by its text."""
  text = "".join(pieces[start:stop])
  ends = list(itertools.accumulate(len(p) for p in pieces[start:stop]))
  found = [
    (m.start(), m.end(), kind, m[0])
    for kind, pattern in _FOLDS
    for m in pattern.finditer(text)
  ]
  if whole_is_call and not found:
    found = [(0, len(text), "tool call", text)]
  out: list[Fold] = []
  for begin, end, kind, words in sorted(found):
    first = start + int(np.searchsorted(ends, begin, side="right"))
    last = start + int(np.searchsorted(ends, end, side="left")) + 1
    if first < last <= stop and (not out or first >= out[-1].stop):
      out.append(Fold(first, last, kind, _line(re.sub(r"<[^>]*>", "", words))))
  return tuple(out)


def cut(
  pieces: Sequence[str],
  sampled: np.ndarray,
  specials: Sequence[bool],
  *,
  lines_are_calls: bool = False,
  text: bool = True,
) -> list[Block]:
  """Cuts a branch into blocks.

  Args:
    pieces: text of each token.
    sampled: bool [n], True where the policy sampled the token.
    specials: for each token, whether the template wrote it as a mark.
    lines_are_calls: all that an agent says is a command (tool_format "line").
    text: the pieces are words; without, nothing can be folded.

  Returns:
    Blocks that cover every token once, in order.
  """
  n = len(pieces)
  if not n:
    return []
  starts = _starts(pieces, sampled, specials)
  edges = [*sorted(starts), n]
  out: list[Block] = []
  for start, stop in itertools.pairwise(edges):
    role, folds = starts[start], ()
    mine = np.flatnonzero(sampled[start:stop])
    kind = "sampled" if len(mine) else "context"
    if len(mine) and text:
      first, last = start + int(mine[0]), start + int(mine[-1]) + 1
      while last > first and specials[last - 1]:
        last -= 1
      said = "".join(pieces[first:last]).strip()
      command = lines_are_calls and said not in ("", "done")
      folds = _folds(pieces, first, last, command)
    after_call = bool(out) and any(f.kind == "tool call" for f in out[-1].folds)
    if not len(mine) and (role in ("tool", "observation") or after_call):
      kind = "tool result"
    near = slice(start, min(stop, start + _SHOWN))
    shown = itertools.compress(pieces[near], (not s for s in specials[near]))
    words = _line("".join(shown))
    words = words.removeprefix(role).lstrip() if text else words
    out.append(Block(start, stop, role, kind, words, folds))
  return out
