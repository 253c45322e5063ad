"""Tool calls of each family are read, written, and held back in streams."""

import json

import hypothesis as hp
import hypothesis.strategies as st
import pytest

from gyre.harness import tool_parsers, wire

SCHEMA = {
  "type": "object",
  "properties": {
    "command": {"type": "string"},
    "lines": {"type": "integer"},
    "ratio": {"type": "number"},
    "deep": {"type": "boolean"},
    "names": {"type": "array"},
    "more": {"type": "object"},
  },
}
TOOLS = [wire.Tool("shell", "Runs.", SCHEMA), wire.Tool("look")]
FORMATS = list(tool_parsers.FORMATS.values())


def parse(fmt, text, **options):
  return tool_parsers.parse(
    tool_parsers.FORMATS[fmt], text, tools=TOOLS, **options
  )


def calls(fmt, text, **options):
  return [(n, json.loads(a)) for n, a in parse(fmt, text, **options).calls]


@pytest.mark.parametrize(
  "text, expected",
  [
    (
      '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n'
      "</tool_call>",
      [("shell", {"command": "ls"})],
    ),
    (  # two of them, one after the other, the closing tag forgotten
      '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
      '<tool_call>{"arguments": {"x": [1, {"y": null}]}, "name": "b"}',
      [("a", {}), ("b", {"x": [1, {"y": None}]})],
    ),
    (  # the tags themselves within an argument
      '<tool_call>{"name": "shell", "arguments": {"command": '
      "\"echo '</tool_call><tool_call>'\"}}</tool_call>",
      [("shell", {"command": "echo '</tool_call><tool_call>'"})],
    ),
    (  # arguments as a text, real newlines in a string
      '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>'
      '<tool_call>{"name": "b", "arguments": {"x": "1\n2"}}</tool_call>',
      [("a", {"x": 1}), ("b", {"x": "1\n2"})],
    ),
    ('<tool_call>{"name": "a"}</tool_call>', [("a", {})]),
  ],
)
def test_hermes(text, expected):
  assert calls("hermes", "Well.\n" + text) == expected
  assert parse("hermes", "Well.\n" + text).text == "Well."


@pytest.mark.parametrize(
  "text",
  [
    "<tool_call>ls</tool_call>",
    '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "a", "arguments": {}',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "a", "arguments": {}} and so on</tool_call>',
    '<tool_call>{"name": "a", "arguments": "{"}</tool_call>',
    "<tool_call>[" + "[" * 5000,
  ],
)
def test_a_malformed_call_stays_text(text):
  for fmt in ("hermes", "qwen_coder"):
    parsed = parse(fmt, "So: " + text)
    assert (parsed.text, parsed.calls) == ("So: " + text, ())


def test_a_call_cut_by_a_limit_counts_only_if_closed():
  whole = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
  cut = whole + '<tool_call>{"name": "b", "arguments": {}}'
  assert calls("hermes", cut, cut=True) == [("a", {})]
  assert len(calls("hermes", cut)) == 2


def test_qwen_coder_types_values_by_the_schema():
  text = (
    "I run it.\n<tool_call>\n<function=shell>\n"
    "<parameter=command>\ncat <<'E' > a\n</parameter> <b>\nE\n\n</parameter>\n"
    "<parameter=lines>\n12\n</parameter>\n"
    "<parameter=ratio>0.5</parameter>\n"
    "<parameter=deep>\nFalse\n</parameter>\n"
    "<parameter=names>\n[\"a\", 'b']\n</parameter>\n"
    '<parameter=more>\n{"x": 1}\n</parameter>\n'
    "<parameter=other>\n7\n</parameter>\n"
    "</function>\n</tool_call>\n<function=look>\n</function>"
  )
  assert calls("qwen_coder", text) == [
    (
      "shell",
      {
        "command": "cat <<'E' > a\n</parameter> <b>\nE\n",
        "lines": 12,
        "ratio": 0.5,
        "deep": False,
        "names": ["a", "b"],
        "more": {"x": 1},
        "other": "7",
      },
    ),
    ("look", {}),
  ]
  assert parse("qwen_coder", text).text == "I run it."
  # What does not fit its type is passed on as it is.
  odd = "<function=shell><parameter=lines>many</parameter></function>"
  assert calls("qwen_coder", odd) == [("shell", {"lines": "many"})]


@pytest.mark.parametrize(
  "text, expected",
  [
    ('{"name": "a", "parameters": {"x": 1}}', [("a", {"x": 1})]),
    (
      '<|python_tag|>{"name": "a", "parameters": {}}; '
      '{"name": "b", "parameters": {"y": "z"}}',
      [("a", {}), ("b", {"y": "z"})],
    ),
    ("<|python_tag|>print(1)", []),
    ('I say {"name": "a", "parameters": {}}', []),
    ('{"name": "a"}', []),
    ('{"name": "a", "parameters": {}} yes', []),
  ],
)
def test_llama(text, expected):
  assert calls("llama", text) == expected
  assert parse("llama", text).text == ("" if expected else text)


@pytest.mark.parametrize(
  "text, expected",
  [
    ('\n{"name": "a", "arguments": {"x": 1}}\n', [("a", {"x": 1})]),
    (
      '```json\n[{"name": "a", "arguments": {}}, '
      '{"name": "b", "arguments": {}}]\n```',
      [("a", {}), ("b", {})],
    ),
    (
      '{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {}}',
      [("a", {}), ("b", {})],
    ),
    ("[]", []),
    ('[{"name": "a"}, {"name": "b"}]', []),
    ('{"answer": 3}', []),
    ("12", []),
    ("", []),
  ],
)
def test_plain_json(text, expected):
  assert calls("json", text) == expected


def test_thinking_is_apart():
  text = "<think>\nlook <tool_call>\n</think>\n\nIt is 3."
  parsed = parse("hermes", text)
  assert (parsed.reasoning, parsed.text) == ("look <tool_call>", "It is 3.")
  opened = parse("hermes", "so\n</think>yes", opened=True)
  assert (opened.reasoning, opened.text) == ("so", "yes")
  assert parse("hermes", "<think>never ends").text == ""
  assert parse("hermes", "so <think> is text").reasoning == ""


def test_detected_from_the_template():
  assert tool_parsers.detect("{<|start_header_id|>}").name == "llama"
  assert tool_parsers.detect("<tool_call>").name == "hermes"
  coder = "<tool_call><function=x><parameter=y>"
  assert tool_parsers.detect(coder).name == "qwen_coder"
  assert tool_parsers.detect("nothing").name == "hermes"


_NAMES = st.sampled_from(["shell", "look", "other"])
_VALUES = st.one_of(
  st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\n\r<"),
    max_size=20,
  ).map(str.strip),
  st.sampled_from(["</tool_call>", "a;b", '{"x"}', "[1]", "é∀", "```"]),
)
_CALLS = st.lists(
  st.tuples(
    _NAMES,
    st.dictionaries(st.sampled_from(["command", "path", "k"]), _VALUES),
  ),
  min_size=1,
  max_size=3,
)
_PLAIN = st.sampled_from(["", "I do it.", "a\nb <b>c</b>", "{ no"])


@hp.given(fmt=st.sampled_from(FORMATS), made=_CALLS, text=_PLAIN)
def test_what_is_written_is_read(fmt, made, text):
  if fmt.openings:
    text = ""  # these formats mix calls with no text
  pairs = [(n, tool_parsers.dumps(a)) for n, a in made]
  written = tool_parsers.write(fmt, text, pairs)
  parsed = tool_parsers.parse(fmt, written, tools=TOOLS)
  assert [(n, json.loads(a)) for n, a in parsed.calls] == made
  assert parsed.text == text


_PIECES = """\
<think> </think> <tool_call> </tool_call> {"name":"a","arguments":{}}
{"name":"b","parameters":{}} <function=a> </function> <|python_tag|> ```json ```
< fun STOP ST { [ ; a word""".split()
_TEXT = st.lists(
  st.sampled_from([*_PIECES, " ", "\n", "two words"]), max_size=12
).map("".join)


@hp.given(
  fmt=st.sampled_from(FORMATS),
  text=_TEXT,
  opened=st.booleans(),
  cut=st.booleans(),
  call_tools=st.booleans(),
)
@hp.settings(max_examples=400)
def test_what_is_shown_only_grows_into_the_whole(
  fmt, text, opened, cut, call_tools
):
  options = {"opened": opened, "call_tools": call_tools}
  whole = tool_parsers.parse(fmt, text, cut=cut, **options)
  shown = ("", "")
  for n in range(len(text) + 1):
    now = tool_parsers.settled(fmt, text[:n], stop=("STOP",), **options)
    assert now[0].startswith(shown[0]) and now[1].startswith(shown[1])
    shown = now
  assert whole.reasoning.startswith(shown[0])
  assert whole.text.startswith(shown[1])


def test_plain_text_is_shown_at_once():
  for fmt in FORMATS:
    shown = [
      tool_parsers.settled(fmt, "Hello there"[:n])[1] for n in range(1, 12)
    ]
    assert shown == [("Hello there"[:n]).strip() for n in range(1, 12)]
