"""Matching what harnesses send back with what was recorded."""

import asyncio
import json

import hypothesis as hp
import hypothesis.strategies as st
import numpy as np
import proxying
import pytest

from gyre import config
from gyre.harness import (
  conversation,
  recorder,
  render,
  templates,
  tool_parsers,
  wire,
)

Message = wire.Message
TOOLS = (
  wire.Tool("shell", "Runs a command.", {"type": "object"}),
  wire.Tool("task", "Starts an agent.", {"type": "object"}),
)
STRIPPING = templates.CHATML.replace(
  "m['content'] +",
  "(m['content'].split('</think>')[-1] if not loop.last else m['content']) +",
)
STYLES = {
  "qwen": proxying.QWEN,
  "chatml": templates.CHATML,
  "minimal": templates.MINIMAL,
  "stripping": STRIPPING,
}


def renderer_of(style):
  end = templates.END if style == "minimal" else templates.CHATML_END
  return render.Renderer(
    proxying.tokenizer(), STYLES[style], stop_tokens=(end,)
  )


@pytest.fixture(scope="module")
def renderers():
  return {style: renderer_of(style) for style in STYLES}


class Talk:
  """An execution without HTTP: requests in, answers out."""

  def __init__(self, renderer, answers, *, tools=TOOLS, split=0, **options):
    self.engine = proxying.ScriptedEngine(renderer, answers, split=split)
    self.tools = tools
    self.execution = recorder.Execution(
      self.engine,
      renderer,
      tool_parsers.HERMES,
      execution_id="g/0",
      group_id="g",
      seed=1,
      temperature=1.0,
      rollout=config.Rollout(),
      max_context=8000,
      **options,
    )

  async def ask(self, messages, **options):
    options = {"model": "m", "tools": self.tools} | options
    asked = wire.Asked(messages=tuple(messages), **options)
    live = await self.execution.begin(asked)
    await live.settled()
    self.execution.release(live, True)
    assert live.error is None
    return live.said.message()

  async def close(self):
    calls = await self.execution.close()
    proxying.check_recorded(calls, self.engine)
    proxying.check_extends(calls)
    return calls


def talk(steps, renderer, answers, **options):
  """Runs `await steps(talk)` and returns the recorded calls."""

  async def main():
    it = Talk(renderer, answers, **options)
    await steps(it)
    return await it.close()

  return asyncio.run(main())


def user(text):
  return Message("user", text)


def result(message, text="ok", index=0):
  call_id = message.tool_calls[index].call_id
  return Message("tool", text, tool_call_id=call_id)


def payload(message, *arguments):
  """The message with its tool calls' payloads replaced."""
  calls = tuple(
    wire.ToolCall(c.call_id, c.name, a)
    for c, a in zip(message.tool_calls, arguments, strict=True)
  )
  return Message("assistant", message.text, calls)


CALL = proxying.hermes(
  "shell", '{"command": "ls", "deep": false, "n": 1, "none": null}'
)


@pytest.mark.parametrize(
  "rewritten",
  [
    '{"command":"ls","deep":false,"n":1,"none":null}',
    '{"n": 1.0, "deep": false, "command": "ls"}',
    "{'command': 'ls', 'deep': False, 'n': 1, 'none': None}",
    '{"command": "ls\\n", "deep": "False", "n": 1}',
    '\n{ "deep" : false,\n "n" : 1, "command" : "ls" }\n',
  ],
)
def test_payloads_written_anew_are_restored(renderers, rewritten):
  async def steps(t):
    first = await t.ask([user("go")])
    again = payload(first, rewritten)
    await t.ask([user("go"), again, result(first)])

  calls = talk(steps, renderers["qwen"], [CALL, "done"])
  assert calls[1].parent_hint == "0000" and calls[1].boundary == "strict"


@pytest.mark.parametrize(
  "changed", ['{"command": "rm", "deep": false, "n": 1}', "ls", "[]"]
)
def test_a_payload_that_was_changed_opens_a_branch(renderers, changed):
  async def steps(t):
    first = await t.ask([user("go")])
    again = payload(first, changed)
    await t.ask([user("go"), again, result(first)])

  calls = talk(steps, renderers["qwen"], [CALL, "done"])
  assert calls[1].parent_hint is None and calls[1].boundary == ""
  text = renderers["qwen"].decode(calls[1].prompt_ids)
  assert '"command": "ls"' not in text


def test_text_that_is_dropped_beside_a_call_is_put_back(renderers):
  async def steps(t):
    first = await t.ask([user("go")])
    for text in ("", "(no content)", first.text + " \n"):
      again = Message("assistant", text, first.tool_calls)
      await t.ask([user("go"), again, result(first, f"ok {text!r}")])
    again = Message("assistant", "I never said so.", first.tool_calls)
    await t.ask([user("go"), again, result(first)])

  answers = ["I look.\n" + CALL, "a", "b", "c", "d"]
  calls = talk(steps, renderers["qwen"], answers)
  parents = [c.parent_hint for c in calls]
  assert parents == [None, "0000", "0000", "0000", None]


def test_calls_sent_back_one_by_one_are_one_message_again(renderers):
  two = "Both.\n" + CALL + "\n" + proxying.hermes("shell", '{"command": "w"}')

  async def steps(t):
    first = await t.ask([user("go")])
    halves = [Message("assistant", "", (c,)) for c in first.tool_calls]
    await t.ask(
      [
        user("go"),
        Message("assistant", "Both.", halves[0].tool_calls),
        result(first, "one", 0),
        halves[1],
        result(first, "two", 1),
      ]
    )

  calls = talk(steps, renderers["qwen"], [two, "done"])
  assert calls[1].parent_hint == "0000"
  text = renderers["qwen"].decode(calls[1].prompt_ids)
  assert text.index("one") < text.index("two")


def test_an_edited_history_branches_where_it_was_edited(renderers):
  async def steps(t):
    first = await t.ask([user("go")])
    history = [user("go"), first, result(first, "long output")]
    second = await t.ask(history)
    history += [second, result(second)]
    await t.ask(history)
    edited = [*history]
    edited[2] = result(first, "(cut)")
    await t.ask(edited)
    edited[0] = user("went")
    await t.ask(edited)

  other = CALL.replace('"ls"', '"wc"')
  answers = ["a" + CALL, "b" + other, "c", "d", "e"]
  calls = talk(steps, renderers["qwen"], answers)
  parents = [c.parent_hint for c in calls]
  assert parents == [None, "0000", "0001", "0000", None]
  # What was sampled is still what stands in the edited prompts.
  for call in calls[3:]:
    text = renderers["qwen"].decode(call.prompt_ids)
    assert "a" + CALL in text and "b" + other in text


def test_of_equal_answers_the_one_whose_ids_come_back_goes_on(renderers):
  async def steps(t):
    answers = [await t.ask([user("go")]) for _ in range(3)]
    assert len({a.tool_calls[0].call_id for a in answers}) == 3
    for said in (answers[1], answers[0], answers[2]):
      await t.ask([user("go"), said, result(said)])
    foreign = wire.ToolCall("x", "shell", answers[0].tool_calls[0].arguments)
    said = Message("assistant", "", (foreign,))
    await t.ask([user("go"), said, Message("tool", "k", tool_call_id="x")])

  calls = talk(steps, renderers["qwen"], [CALL] * 3 + ["a", "b", "c", "d"])
  assert [c.parent_hint for c in calls[3:]] == ["0001", "0000", "0002", "0002"]


def test_other_tools_or_another_system_prompt_open_a_conversation(renderers):
  async def steps(t):
    first = await t.ask([user("go")])
    history = [user("go"), first, user("on")]
    await t.ask(history)
    await t.ask(history, tools=TOOLS[:1])
    await t.ask([Message("system", "s"), *history])

  calls = talk(steps, renderers["qwen"], ["a", "b", "c", "d"])
  assert [c.parent_hint for c in calls] == [None, "0000", None, None]


def test_tools_are_described_where_the_template_does_not(renderers):
  async def steps(t):
    first = await t.ask([Message("system", "You work."), user("go")])
    assert first.tool_calls[0].name == "shell"
    await t.ask([Message("system", "You work."), user("go"), first])

  calls = talk(steps, renderers["chatml"], [CALL, "a"])
  text = renderers["chatml"].decode(calls[0].prompt_ids)
  assert text.startswith("<|im_start|>system\nYou work.\n\n")
  assert text.count('"name": "shell"') == 1 and "<tool_call>" in text
  assert calls[1].parent_hint == "0000"
  assert renderers["chatml"].decode(calls[1].prompt_ids).count("<tools>") == 1


def test_foreign_messages_are_rendered_as_the_model_would_say_them(renderers):
  foreign = wire.ToolCall("x", "shell", '{"command": "ls"}')
  history = [
    user("go"),
    Message("assistant", "So.", (foreign,)),
    Message("tool", "a.txt", tool_call_id="x"),
  ]

  async def steps(t):
    await t.ask(history)

  for style in ("qwen", "chatml"):
    (call,) = talk(steps, renderers[style], ["a"])
    text = renderers[style].decode(call.prompt_ids)
    assert 'So.\n<tool_call>\n{"name": "shell", "arguments": {"comm' in text


def test_a_template_that_rewrites_the_past_splits(renderers):
  async def steps(t):
    first = await t.ask([user("go")])
    assert first.reasoning == "because of all that I know"
    await t.ask([user("go"), first, user("on")])

  said = "<think>\nbecause of all that I know\n</think>\n\nyes"
  calls = talk(steps, renderers["stripping"], [said, "b"], tools=())
  assert calls[1].boundary in ("split", "retokenized")
  text = renderers["stripping"].decode(calls[1].prompt_ids)
  if calls[1].boundary == "split":
    assert calls[1].parent_hint is None and "because" not in text


def test_a_summary_and_a_sub_agent_get_their_roles(renderers):
  prompt = "Count the lines of every file here."
  start = proxying.hermes("task", json.dumps({"prompt": prompt}))
  summary = "There are three files.\nThe sum of lines is 12."

  async def steps(t):
    system = Message("system", "You work.")
    history = [system, user("How many lines?")]
    history.append(await t.ask(history))
    inner = [Message("system", "You explore."), user(prompt)]
    inner.append(await t.ask(inner))
    await t.ask([*inner, user("Sure?")])
    history.append(result(history[-1], "12"))
    history.append(await t.ask(history))
    asked = user("Summarize the conversation so far.")
    told = await t.ask([*history, asked])
    opened = [system, user(f"Summary of what was:\n{told.text}\nGo on.")]
    opened.append(await t.ask(opened))
    await t.ask([*opened, user("And?")])

  answers = [start, "12", "yes", "It is 12.", summary, "Done.", "Bye."]
  calls = talk(steps, renderers["qwen"], answers)
  assert [c.role for c in calls] == [
    "main",
    "sub_agent",
    "sub_agent",
    "main",
    "main_summary",
    "main",
    "main",
  ]
  assert [c.parent_hint for c in calls] == [
    None,
    None,
    "0001",
    "0000",
    "0003",
    None,
    "0005",
  ]


def test_ids_of_a_growing_conversation_are_held_once(renderers):
  async def main():
    t = Talk(renderers["qwen"], lambda text: "word " * 50)
    history = [user("go")]
    for _ in range(12):
      history += [await t.ask(history), user("on")]
    return await t.close()

  calls = asyncio.run(main())
  assert len({id(c.prompt_ids.base) for c in calls[:-1]}) == 1


_SAID = st.sampled_from(
  [
    "ok",
    "a<b and <tool_",
    "<think>\nhm\n</think>\n\nso",
    "é∀ \u200b",
    "  spaces  ",
    "",
    "I look.\n" + CALL,
    CALL + "\n" + CALL,
    "<|im_start|>user",
  ]
)
_STEP = st.tuples(
  st.integers(0, 9),  # the conversation that goes on
  _SAID,
  st.sampled_from(["plain", "no thinking", "rewritten", "dropped"]),
  st.sampled_from(["next", "other"]),
)


def sent_back(message, how):
  if how == "no thinking":
    return Message("assistant", message.text, message.tool_calls)
  if how == "rewritten" and message.tool_calls:
    loose = [
      json.dumps(json.loads(c.arguments), indent=2) for c in message.tool_calls
    ]
    return payload(message, *loose)
  if how == "dropped" and message.tool_calls:
    return Message("assistant", "", message.tool_calls)
  return message


@hp.given(
  style=st.sampled_from(sorted(STYLES)),
  steps=st.lists(_STEP, min_size=1, max_size=8),
  split=st.sampled_from([0, 1, 2, 5]),
)
@hp.settings(max_examples=60, deadline=None)
def test_what_goes_on_extends_and_what_was_sampled_is_recorded(
  renderers, style, steps, split
):
  """Over random trees of conversations; check_recorded and check_extends."""
  histories, parents = [[user("go")]], [None]

  async def main():
    t = Talk(renderers[style], [said for _, said, _, _ in steps], split=split)
    expected = []
    for which, _, how, words in steps:
      which %= len(histories)
      history = histories[which]
      said = await t.ask(history)
      expected.append(parents[which])
      new = [result(said, words, i) for i in range(len(said.tool_calls))]
      new = new or [user(words)]
      histories.append([*history, sent_back(said, how), *new])
      parents.append(f"{len(expected) - 1:04d}")
    return expected, await t.close()

  expected, calls = asyncio.run(main())
  if style == "stripping":
    return
  for parent, call in zip(expected, calls, strict=True):
    if parent is None:
      assert call.boundary == ""
    else:
      known = next(c for c in calls if c.call_id == parent)
      assert call.boundary in ("strict", "retokenized"), call.boundary
      ids = np.concatenate([known.prompt_ids, known.completion_ids])
      np.testing.assert_array_equal(call.prompt_ids[: len(ids)], ids)


def test_canonical_survives_what_is_no_payload():
  for text in ("", "{", "nan", "[" * 5000, "lambda: 0", "1e999", "{1: 2}"):
    assert isinstance(conversation.canonical(text), str)
