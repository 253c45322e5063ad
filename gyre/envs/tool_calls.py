"""How a completion carries its command, and how the output goes back.

Three formats, the value of `agent.tool_format`:

  line    the whole text is the command; nothing, or the word done, ends
  fenced  the first ```sh block is the command; a text without one ends
  hermes  <tool_call>{"name": "shell", "arguments": {"command": …}}</tool_call>
          (Hermes, Qwen); a text without one ends
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

DONE = "done"

SHELL_TOOL = {
  "type": "function",
  "function": {
    "name": "shell",
    "description": "Runs a command in a persistent bash shell.",
    "parameters": {
      "type": "object",
      "properties": {
        "command": {"type": "string", "description": "The command."}
      },
      "required": ["command"],
    },
  },
}

_FENCE = re.compile(r"^```(?:sh|bash|shell)?[ \t]*\n(.*?)^```", re.M | re.S)
_OPEN_FENCE = re.compile(r"^```(?:sh|bash|shell)?[ \t]*$", re.M)
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)

_PROMPTS = {
  "line": "",
  "fenced": (
    "You work in a Linux shell. Answer with one command in a block:\n"
    "```sh\ncommand\n```\n"
    "When the task is done, answer without a block."
  ),
  "hermes": (
    "You work in a Linux shell. To run a command, answer\n"
    '<tool_call>\n{"name": "shell", "arguments": {"command": "..."}}\n'
    "</tool_call>\nWhen the task is done, answer without a tool call."
  ),
}


@dataclasses.dataclass(frozen=True)
class Parsed:
  """What a completion asks for: one of a command, an error, or the end.

  Attributes:
    command: to be run, or None.
    error: told to the model when its call is malformed, else "".
  """

  command: str | None = None
  error: str = ""

  @property
  def ends(self) -> bool:
    """True when the model asked for nothing more."""
    return self.command is None and not self.error


def _parse_hermes(text: str) -> Parsed:
  match = _CALL.search(text)
  if not match:
    if "<tool_call>" in text:
      return Parsed(error="error: </tool_call> is missing")
    return Parsed()
  try:
    call = json.loads(match[1])
    arguments = call["arguments"] if isinstance(call, dict) else None
    if isinstance(arguments, str):
      arguments = json.loads(arguments)
  except json.JSONDecodeError as e:
    return Parsed(error=f"error: the tool call is not JSON: {e}")
  except KeyError:
    return Parsed(error="error: the tool call has no arguments")
  if not isinstance(call, dict) or call.get("name") != "shell":
    name = call.get("name") if isinstance(call, dict) else None
    return Parsed(error=f"error: no tool {name!r}; the only one is 'shell'")
  command = arguments.get("command") if isinstance(arguments, dict) else None
  if not isinstance(command, str) or not command.strip():
    return Parsed(error="error: the tool needs arguments {'command': text}")
  return Parsed(command)


def parse(tool_format: str, text: str, *, cut: bool = False) -> Parsed:
  """Reads the command out of a completion.

  Args:
    tool_format: "line", "fenced" or "hermes".
    text: the completion without its stop token.
    cut: a token limit ended it, so that its end may be missing. Only a call
      that is closed is then trusted.
  """
  if tool_format == "line":
    command = text.strip()
    parsed = Parsed() if command in ("", DONE) else Parsed(command)
  elif tool_format == "fenced":
    match = _FENCE.search(text)
    if match and match[1].strip():
      parsed = Parsed(match[1].rstrip("\n"))
    elif match or _OPEN_FENCE.search(text):
      what = "is empty" if match else "is not closed"
      parsed = Parsed(error=f"error: the block {what}")
    else:
      parsed = Parsed()
  elif tool_format == "hermes":
    parsed = _parse_hermes(text)
  else:
    raise ValueError(f"no tool format {tool_format!r}: line, fenced, hermes")
  if cut and (tool_format == "line" or parsed.command is None):
    return Parsed(error="error: cut, too long")
  return parsed


def write(tool_format: str, command: str) -> str:
  """A completion that asks for `command`; parse(write(c)) gives c back."""
  if tool_format == "line":
    return command
  if tool_format == "fenced":
    return f"```sh\n{command}\n```"
  call = {"name": "shell", "arguments": {"command": command}}
  body = json.dumps(call, ensure_ascii=False)
  return f"<tool_call>\n{body}\n</tool_call>"


def system_prompt(tool_format: str, own: str, template_has_tools: bool) -> str:
  """The system prompt; "" for none.

  Args:
    tool_format: "line", "fenced" or "hermes".
    own: replaces the format's default; blanks only mean none.
    template_has_tools: the chat template itself describes the tools.
  """
  if own:
    return own.strip()
  if tool_format == "hermes" and template_has_tools:
    return ""
  return _PROMPTS[tool_format]


def result_message(tool_format: str, text: str) -> dict[str, Any]:
  """The message that takes a command's output back to the model."""
  if tool_format == "line":
    return {"role": "tool", "content": text}
  role = "user" if tool_format == "fenced" else "tool"
  return {"role": role, "content": text or "(no output)"}


def middle_cut(text: str, limit: int) -> str:
  """`text` in at most `limit` characters, its middle left out.

  Where the limit leaves no room for the line that says so, only the
  beginning is kept.
  """
  if len(text) <= limit:
    return text
  note = f"\n[... {len(text)} characters, cut ...]\n"
  room = limit - len(note)
  if room < 2:
    return text[:limit]
  head = room - room // 2
  return text[:head] + note + text[len(text) - room // 2 :]
