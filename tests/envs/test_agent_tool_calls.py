"""Tool formats: what is written is read back; what is malformed is told."""

import json

import hypothesis as hp
import hypothesis.strategies as st
import pytest

from gyre.envs import tool_calls

FORMATS = ("line", "fenced", "hermes")


@pytest.mark.parametrize("tool_format", FORMATS)
@hp.given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1))
def test_a_command_written_is_read_back(tool_format, command):
  command = command.strip()
  hp.assume(command not in ("", tool_calls.DONE))
  # A fence inside a fence ends it, and a closing tag inside a tag.
  hp.assume("```" not in command and "</tool_call>" not in command)
  text = tool_calls.write(tool_format, command)
  assert tool_calls.parse(tool_format, text).command == command


@pytest.mark.parametrize(
  "tool_format,text,command",
  [
    ("line", " ls -l\n", "ls -l"),
    ("line", "a\nb", "a\nb"),
    (
      "fenced",
      "I list.\n```bash\nls\npwd\n```\nThen\n```sh\nx\n```",
      "ls\npwd",
    ),
    ("fenced", "```\nls\n```", "ls"),
    ("fenced", "```sh\r\nls\n```", None),
    (
      "hermes",
      '<think>a</think><tool_call>{"name":"shell","arguments":'
      '{"command":"ls"}}</tool_call>',
      "ls",
    ),
    (
      "hermes",
      '<tool_call>\n{"name": "shell", "arguments": '
      '"{\\"command\\": \\"ls\\"}"}\n</tool_call>',
      "ls",
    ),
  ],
)
def test_commands(tool_format, text, command):
  assert tool_calls.parse(tool_format, text).command == command


@pytest.mark.parametrize(
  "tool_format,text",
  [
    ("line", ""),
    ("line", " \n"),
    ("line", "done\n"),
    ("fenced", "All is done."),
    ("fenced", "use `ls`"),
    ("hermes", "Done."),
    ("hermes", ""),
  ],
)
def test_ends(tool_format, text):
  assert tool_calls.parse(tool_format, text).ends
  # Unless a limit cut it: then it may not have been the end.
  cut = tool_calls.parse(tool_format, text, cut=True)
  assert cut.error and not cut.ends


@pytest.mark.parametrize(
  "tool_format,text,says",
  [
    ("fenced", "```sh\nls", "not closed"),
    ("fenced", "```sh\n\n```", "empty"),
    ("hermes", '<tool_call>{"name": "shell"', "missing"),
    ("hermes", "<tool_call>ls</tool_call>", "not JSON"),
    ("hermes", "<tool_call>[1]</tool_call>", "no tool None"),
    ("hermes", '<tool_call>"shell"</tool_call>', "no tool None"),
    ("hermes", '<tool_call>{"name": "shell"}</tool_call>', "no arguments"),
    (
      "hermes",
      '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
      "no tool 'rm'",
    ),
    (
      "hermes",
      '<tool_call>{"name": "shell", "arguments": {"cmd": "ls"}}</tool_call>',
      "command",
    ),
    (
      "hermes",
      '<tool_call>{"name": "shell", "arguments": {"command": 3}}</tool_call>',
      "command",
    ),
    (
      "hermes",
      '<tool_call>{"name": "shell", "arguments": null}</tool_call>',
      "command",
    ),
  ],
)
def test_malformed_calls_are_told(tool_format, text, says):
  parsed = tool_calls.parse(tool_format, text)
  assert parsed.command is None
  assert says in parsed.error
  assert "\n" not in parsed.error


@pytest.mark.parametrize("tool_format", FORMATS)
@hp.given(st.text(max_size=60))
def test_any_text_is_one_of_command_error_end(tool_format, text):
  for said in (text, f"<tool_call>{text}</tool_call>", f"```sh\n{text}\n```"):
    p = tool_calls.parse(tool_format, said)
    assert (p.command is not None) + bool(p.error) + p.ends == 1


def test_a_closed_call_is_trusted_though_cut():
  call = tool_calls.write("hermes", "ls") + " and th"
  assert tool_calls.parse("hermes", call, cut=True).command == "ls"
  assert tool_calls.parse("line", "echo hal", cut=True).error


@hp.given(st.text(min_size=0, max_size=300), st.integers(1, 200))
def test_output_is_cut_in_the_middle(text, limit):
  cut = tool_calls.middle_cut(text, limit)
  assert len(cut) <= limit or cut == text
  if len(text) <= limit:
    assert cut == text
  else:
    assert cut[: limit // 4] == text[: limit // 4]
    if limit >= 60:
      assert str(len(text)) in cut
      assert cut.endswith(text[-10:])


def test_results_and_prompts():
  line = tool_calls.result_message("line", "")
  assert line == {"role": "tool", "content": ""}
  assert tool_calls.result_message("fenced", "x")["role"] == "user"
  assert tool_calls.result_message("hermes", "")["content"] == "(no output)"
  assert tool_calls.system_prompt("line", "", False) == ""
  assert tool_calls.system_prompt("hermes", "", True) == ""
  assert tool_calls.system_prompt("fenced", "mine", False) == "mine"
  assert tool_calls.system_prompt("fenced", " ", False) == ""
  shown = tool_calls.system_prompt("hermes", "", False)
  assert tool_calls.parse("hermes", shown).command == "..."
  fenced = tool_calls.system_prompt("fenced", "", False)
  assert tool_calls.parse("fenced", fenced).command == "command"
  json.dumps(tool_calls.SHELL_TOOL)


def test_unknown_format():
  with pytest.raises(ValueError, match="xml"):
    tool_calls.parse("xml", "ls")
