"""What part a model call plays in its execution: main, sub-agent, summary.

A harness does not say; its conversations do. Roles are deduced from all calls
of an execution together, since what a call was for may show only later: a
summary is one because a new conversation opens with it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from gyre.harness import wire

_SHORTEST = 20
# Characters of a system prompt that say what an agent is for.
_PURPOSE = 300
_ASKS = re.compile(
  r"\b(summar(y|ies|i[sz]\w*)|compact\w*|recap\w*|condens\w*|distill?\w*)\b",
  re.I,
)


@dataclasses.dataclass(frozen=True)
class Note:
  """What is known of a call's part.

  Attributes:
    call_id: of the call.
    parent: call_id of the call whose messages it goes on from, whether or not
      its ids do; None opens a conversation.
    system: the system prompt.
    tools: names of the tools offered, sorted.
    told: what the harness says that it had not said to the parent; what tools
      and the model say excepted.
    opening: all messages of the user, in order; where the call opens a
      conversation they lie before the model's first word.
    last_user: the last message of the user.
    said: what the model said.
    arguments: texts in the arguments of its tool calls.
  """

  call_id: str
  parent: str | None = None
  system: str = ""
  tools: tuple[str, ...] = ()
  told: str = ""
  opening: tuple[str, ...] = ()
  last_user: str = ""
  said: str = ""
  arguments: tuple[str, ...] = ()


# (the calls in order of start, the index of one) -> its role, or None for
# what `deduce` says.
RoleOf = Callable[[Sequence[Note], int], str | None]


def _quoted(text: str, said: str) -> tuple[float, int]:
  """How much of what was said `text` takes over.

  Returns:
    (the share of its lines, where the first of them stands).
  """
  lines = [
    s for x in said.splitlines() if len(s := wire.squeeze(x)) >= _SHORTEST
  ]
  if not lines:
    whole = wire.squeeze(said)
    lines = [whole] if len(whole) >= _SHORTEST else []
  places = [at for line in lines if (at := text.find(line)) >= 0]
  return (len(places) / len(lines), min(places)) if places else (0.0, -1)


def _lines(text: str) -> str:
  stripped = "\n".join(line.strip() for line in text.strip().splitlines())
  return f"\n{stripped}\n"


def _from_arguments(note: Note, before: Sequence[Note]) -> bool:
  """Whether the user's first words are a tool call's argument.

  A short argument must be a whole message, a longer one whole lines of it:
  harnesses add reminders around it.
  """
  opening = [_lines(text) for text in note.opening if text.strip()]
  for earlier in before:
    for argument in earlier.arguments:
      lines = _lines(argument)
      short = len(lines) < _SHORTEST
      if any(lines == text if short else lines in text for text in opening):
        return True
  return False


def _main(notes: Sequence[Note]) -> Note:
  """The call that shows what the main conversation looks like.

  Harnesses ask for a title and the like beside it, without tools.
  """
  return next((n for n in notes if n.tools), notes[0])


def deduce(notes: Sequence[Note]) -> list[str]:
  """The role of each call: main, main_summary, sub_agent, sub_agent_summary.

  A call that goes on with a conversation has its role. A new conversation
  that opens with a summary goes on with what was summarised. Another is a
  sub-agent's if the user's first words came from a tool call's arguments, or
  if its system prompt or tools are not those of the main one, nor the task
  that the user sets. A call is a summary if it asks for one and the harness
  later tells its answer.

  Args:
    notes: in order of start.
  """
  base: dict[str, str] = {}
  summaries: set[int] = set()
  asked: list[int] = []
  for i, note in enumerate(notes):
    told = _summary(notes, i, asked)
    if _ASKS.search(note.last_user) or _ASKS.search(note.system[:_PURPOSE]):
      asked.append(i)
    if told is not None:
      summaries.add(told)
    if note.parent in base:
      role = base[note.parent]
    elif told is not None:
      role = base[notes[told].call_id]
    else:
      role = _opens(notes, i)
    base[note.call_id] = role
  return [
    base[n.call_id] + ("_summary" if i in summaries else "")
    for i, n in enumerate(notes)
  ]


def _summary(
  notes: Sequence[Note], index: int, asked: Sequence[int]
) -> int | None:
  """The summary among the calls that asked for one that is told now.

  At least half of its lines are; of several the one with most, then the
  latest.
  """
  told = wire.squeeze(notes[index].told)
  if not told:
    return None
  best, most = None, 0.5
  for i in asked:
    share, place = _quoted(told, notes[i].said)
    # Where the request stands before it, a history is told again.
    again = 0 <= told.find(wire.squeeze(notes[i].last_user)) < place
    if share >= most and not again:
      best, most = i, share
  return best


def _opens(notes: Sequence[Note], index: int) -> str:
  """Role of a call that opens a conversation of its own."""
  note, main = notes[index], _main(notes)
  if _from_arguments(note, notes[:index]):
    return "sub_agent"
  if (note.system, note.tools) == (main.system, main.tools):
    return "main"
  same = bool(main.opening) and main.opening[-1] in note.opening
  return "main" if same else "sub_agent"


def of_all(notes: Sequence[Note], role_of: RoleOf | None = None) -> list[str]:
  """`deduce`, but where `role_of` says otherwise."""
  roles = deduce(notes)
  if role_of is None:
    return roles
  return [role_of(notes, i) or role for i, role in enumerate(roles)]
