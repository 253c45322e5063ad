"""Roles deduced from what conversations look like."""

import dataclasses

import pytest

from gyre.harness import roles

TOOLS = ("shell", "task")
SUMMARY = "The user wants a report.\nThe files are a.txt and b.txt.\nNext: wc."


class Script:
  """Notes of an execution, built call by call."""

  def __init__(self):
    self.notes = []

  def call(self, parent=None, *, told="", said="ok", system="main", **more):
    """One call; returns its id."""
    before = next((n for n in self.notes if n.call_id == parent), None)
    first = before.opening if before else tuple(told.split("\n\n"))
    last = told or (before.last_user if before else "")
    options = {"tools": TOOLS} | more
    note = roles.Note(
      call_id=f"{len(self.notes):04d}",
      parent=parent,
      system=before.system if before else system,
      told=f"{system}\n{told}" if before is None else told,
      opening=first,
      last_user=last,
      said=said,
      **options,
    )
    self.notes.append(note)
    return note.call_id

  def roles(self, **options):
    return roles.of_all(self.notes, **options)


def test_one_conversation_is_main():
  s = Script()
  a = s.call(told="Summarize the report.")
  b = s.call(a)
  s.call(b, told="And now compact it.", said="Half of it, as you wanted.")
  s.call(b, told="Thanks.")
  assert s.roles() == ["main"] * 4
  assert roles.deduce([]) == []


def test_sub_agents_by_prompt_tools_or_arguments():
  s = Script()
  prompt = "Count the lines of every file and tell the sum."
  a = s.call(told="Do it.", arguments=("count", prompt))
  b = s.call(told=f"{prompt}\n<reminder>be quick</reminder>")
  s.call(b)
  s.call(a)
  s.call(told="Look around.", system="You explore.")
  s.call(told="Look again.", tools=("read",))
  s.call(told="count")
  # The setting is told in a message before it, to every agent.
  s.call(told=f"Do it.\n\n{prompt}")
  # A summary that speaks of it is none.
  s.call(told=f"I said: {prompt}")
  assert s.roles() == [
    "main",
    "sub_agent",
    "sub_agent",
    "main",
    "sub_agent",
    "sub_agent",
    "sub_agent",
    "sub_agent",
    "main",
  ]


def test_a_title_asked_for_before_all_else_is_not_the_main_conversation():
  s = Script()
  s.call(told="Do it.", system="Write a title.", tools=())
  s.call(told="Hello?", system="Are you there", tools=())
  s.call(told="Do it.")
  assert s.roles() == ["main", "sub_agent", "main"]


@pytest.mark.parametrize("separate", [False, True])
def test_a_summary_is_one_when_a_conversation_opens_with_it(separate):
  s = Script()
  a = s.call(told="Write a report.")
  b = s.call(a)
  asked = "Please summarize our conversation so far."
  if separate:
    s.call(
      told=f"Write a report.\nok\n{asked}",
      system="You summarise conversations.",
      tools=(),
      said=SUMMARY,
    )
    s.notes[-1] = dataclasses.replace(
      s.notes[-1], opening=("Write a report.",), last_user=asked
    )
  else:
    s.call(b, told=asked, said=SUMMARY)
  assert s.roles() == ["main"] * 3
  d = s.call(told=f"This session goes on from another:\n{SUMMARY}")
  s.call(d)
  assert s.roles() == ["main", "main", "main_summary", "main", "main"]


def test_a_summary_told_within_a_conversation():
  """Harnesses that keep the head of a history and replace the rest."""
  s = Script()
  a = s.call(told="Write a report.")
  b = s.call(a)
  s.call(b, told="Compact the history.", said=SUMMARY)
  s.call(a, told=f"So far:\n{SUMMARY}")
  assert s.roles() == ["main", "main", "main_summary", "main"]


def test_a_sub_agents_summary_goes_on_as_the_sub_agent():
  s = Script()
  prompt = "Count the lines of every file and tell the sum."
  s.call(told="Do it.", arguments=(prompt,))
  b = s.call(told=prompt, system="agent")
  s.call(b, told="Summarise what you have done.", said=SUMMARY)
  d = s.call(told=f"Summary:\n{SUMMARY}", system="agent")
  s.call(d)
  assert s.roles() == [
    "main",
    "sub_agent",
    "sub_agent_summary",
    "sub_agent",
    "sub_agent",
  ]


def test_a_second_summary_is_asked_for_in_the_same_words():
  s = Script()
  asked, task = "Summarise the work so far.", "Write a report for me."
  a = s.call(told=f"It is Monday.\n\n{task}")
  s.call(a, told=asked, said=SUMMARY)
  opened = f"It is Tuesday.\n\n{task}\n\n{SUMMARY}"
  c = s.call(told=opened)
  s.call(told=f"{opened}\n\n{asked}", tools=(), said="And more.\n" + SUMMARY)
  s.notes[-1] = dataclasses.replace(s.notes[-1], last_user=asked)
  s.call(told=f"It is Friday.\n\n{task}\n\nAnd more.\n{SUMMARY}")
  s.call(c)
  assert s.roles() == [
    "main",
    "main_summary",
    "main",
    "main_summary",
    "main",
    "main",
  ]


def test_a_history_that_is_told_again_makes_no_summary():
  s = Script()
  a = s.call(told="Summarize the report.", said=SUMMARY)
  s.call(told=f"Summarize the report.\n{SUMMARY}\nGo on.")
  s.call(a)
  assert s.roles() == ["main"] * 3


def test_a_word_that_is_told_again_makes_no_summary():
  s = Script()
  s.call(told="Summarize the report.", said="ok")
  s.call(told="Count the books. ok", system="agent")
  assert s.roles() == ["main", "sub_agent"]


def test_a_harness_can_say_it_itself():
  s = Script()
  a = s.call(told="Do it.")
  s.call(a)

  def second_is_other(notes, index):
    return "critic" if notes[index].parent else None

  assert s.roles(role_of=second_is_other) == ["main", "critic"]
