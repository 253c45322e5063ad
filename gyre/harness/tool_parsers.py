"""Tool calls in the text of the model families served.

  hermes      <tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes,
              Qwen2.5, Qwen3 and most others
  qwen_coder  <tool_call><function=NAME><parameter=KEY>value</parameter>…:
              Qwen3-Coder; values are plain text, typed by the tool's schema
  llama       {"name": …, "parameters": {…}}, after <|python_tag|> or alone,
              several with ";" between them: Llama 3
  json        the same alone or in one ```json block, or a list of them

A completion is text, then calls. What looks like a call but is malformed
stays text: the harness shows it, the model reads it, nothing is lost.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gyre.harness import wire

THINK, END_THINK = "<think>", "</think>"

_DECODER = json.JSONDecoder(strict=False)


@dataclasses.dataclass(frozen=True)
class Found:
  """A call in a text: text[start:stop] makes it; arguments are JSON text."""

  start: int
  stop: int
  name: str
  arguments: str


def dumps(value: Any) -> str:
  """JSON text as models write it."""
  return json.dumps(value, ensure_ascii=False)


def _call(value: Any) -> tuple[str, str] | None:
  """(name, arguments) of a decoded JSON call, or None if it is none."""
  if not isinstance(value, dict) or not isinstance(value.get("name"), str):
    return None
  if not value["name"]:
    return None
  arguments = value.get("arguments", value.get("parameters", {}))
  if isinstance(arguments, str):
    try:
      arguments = _DECODER.decode(arguments or "{}")
    except (ValueError, RecursionError):
      return None
  if arguments is None:
    arguments = {}
  if not isinstance(arguments, dict):
    return None
  return value["name"], dumps(arguments)


def _decode(text: str, at: int) -> tuple[Any, int] | None:
  """JSON value at `at` and where it ends, or None."""
  try:
    return _DECODER.raw_decode(text, at)
  except (ValueError, RecursionError):
    return None


def _skip(text: str, at: int, also: str = "") -> int:
  while at < len(text) and (text[at].isspace() or text[at] in also):
    at += 1
  return at


def _hermes(text: str, tools: Sequence[wire.Tool], cut: bool) -> list[Found]:
  found, at = [], 0
  opening, closing = "<tool_call>", "</tool_call>"
  while (start := text.find(opening, at)) >= 0:
    at = start + len(opening)
    decoded = _decode(text, _skip(text, at))
    call = _call(decoded[0]) if decoded else None
    if call is None:
      continue
    end = _skip(text, decoded[1])
    if text.startswith(closing, end):
      end += len(closing)
    elif end < len(text) and not text.startswith(opening, end):
      continue  # something that is no call follows the JSON
    elif cut:
      continue
    found.append(Found(start, end, *call))
    at = end
  return found


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.S)
_PARAMETER = re.compile(
  r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"
  r"(?=\s*(?:<parameter=|\Z))",
  re.S,
)


def _typed(text: str, schema: Any) -> Any:
  """`text` as the type that a parameter's JSON schema names."""
  kind = schema.get("type") if isinstance(schema, dict) else None
  kinds = kind if isinstance(kind, list) else [kind]
  if "string" in kinds or not any(kinds):
    return text
  try:
    return _DECODER.decode(text)
  except (ValueError, RecursionError):
    pass
  try:
    value = ast.literal_eval(text.strip())
    json.dumps(value)
    return value
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    return text


def _properties(tool: wire.Tool) -> Mapping[str, Any]:
  """The schemas of a tool's arguments, if it names any."""
  value = tool.parameters.get("properties")
  return value if isinstance(value, Mapping) else {}


def _qwen_coder(
  text: str, tools: Sequence[wire.Tool], cut: bool
) -> list[Found]:
  del cut  # a function is closed or it is none
  schemas = {t.name: _properties(t) for t in tools}
  found = []
  for match in _FUNCTION.finditer(text):
    name, body = match[1].strip(), match[2]
    arguments, last = {}, 0
    for parameter in _PARAMETER.finditer(body):
      key = parameter[1].strip()
      schema = schemas.get(name, {}).get(key)
      arguments[key] = _typed(parameter[2], schema)
      last = parameter.end()
    if body[last:].strip() or not name:
      continue
    start, end = match.span()
    before = text[:start].rstrip()
    if before.endswith("<tool_call>"):
      start = len(before) - len("<tool_call>")
    after = _skip(text, end)
    if text.startswith("</tool_call>", after):
      end = after + len("</tool_call>")
    found.append(Found(start, end, name, dumps(arguments)))
  return found


_PYTHON_TAG = "<|python_tag|>"
_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```\s*\Z", re.S)


def _whole(text: str, tools: Sequence[wire.Tool], cut: bool) -> list[Found]:
  """The text is nothing but calls as JSON."""
  del tools, cut
  start = _skip(text, 0)
  if text.startswith(_PYTHON_TAG, start):
    start += len(_PYTHON_TAG)
  match = _FENCED.match(text)
  at, end = match.span(1) if match else (start, len(text))
  calls, at = [], _skip(text, at)
  while at < end:
    decoded = _decode(text, at)
    if decoded is None:
      return []
    value, at = decoded[0], _skip(text, decoded[1], ";,")
    for one in value if isinstance(value, list) and value else [value]:
      call = _call(one)
      # A list of names is data; a call says what it is called with.
      if call is None or not {"arguments", "parameters"} & set(one):
        return []
      calls.append(call)
  return [Found(0, len(text), *c) for c in calls]


def _write_hermes(name: str, arguments: str) -> str:
  call = f'{{"name": {dumps(name)}, "arguments": {arguments}}}'
  return f"<tool_call>\n{call}\n</tool_call>"


def _write_qwen_coder(name: str, arguments: str) -> str:
  lines = [f"<tool_call>\n<function={name}>"]
  given = json.loads(arguments or "{}")
  if not isinstance(given, dict):
    given = {"input": given}  # a harness's; the model gives objects only
  for key, value in given.items():
    text = value if isinstance(value, str) else dumps(value)
    lines.append(f"<parameter={key}>\n{text}\n</parameter>")
  return "\n".join([*lines, "</function>\n</tool_call>"])


def _write_llama(name: str, arguments: str) -> str:
  return f'{{"name": {dumps(name)}, "parameters": {arguments}}}'


def _write_json(name: str, arguments: str) -> str:
  return f'{{"name": {dumps(name)}, "arguments": {arguments}}}'


@dataclasses.dataclass(frozen=True)
class Format:
  """How a family writes a call.

  Attributes:
    name: "hermes", "qwen_coder", "llama" or "json".
    markers: texts that may open a call anywhere.
    openings: texts that may open one at the very beginning only.
    find: (text, tools, cut) -> calls, in order.
    write: (name, arguments as JSON text) -> text.
    separator: between written calls.
  """

  name: str
  markers: tuple[str, ...]
  openings: tuple[str, ...]
  find: Callable[[str, Sequence[wire.Tool], bool], list[Found]]
  write: Callable[[str, str], str]
  separator: str = "\n"


HERMES = Format("hermes", ("<tool_call>",), (), _hermes, _write_hermes)
QWEN_CODER = Format(
  "qwen_coder",
  ("<tool_call>", "<function="),
  (),
  _qwen_coder,
  _write_qwen_coder,
)
LLAMA = Format(
  "llama", (), ("{", "[", "```", _PYTHON_TAG), _whole, _write_llama, "; "
)
JSON = Format("json", (), ("{", "[", "```"), _whole, _write_json)
FORMATS = {f.name: f for f in (HERMES, QWEN_CODER, LLAMA, JSON)}


def detect(chat_template: str) -> Format:
  """The format that a model's own chat template teaches; hermes if none."""
  if "<function=" in chat_template and "<parameter=" in chat_template:
    return QWEN_CODER
  if "<tool_call>" in chat_template:
    return HERMES
  if _PYTHON_TAG in chat_template or "<|start_header_id|>" in chat_template:
    return LLAMA
  return HERMES


@dataclasses.dataclass(frozen=True)
class Parsed:
  """reasoning, text and calls (name, arguments) of a completion."""

  reasoning: str = ""
  text: str = ""
  calls: tuple[tuple[str, str], ...] = ()


def split_thinking(text: str, opened: bool) -> tuple[str, str, bool]:
  """Thinking and the rest.

  Args:
    text: a completion, or its beginning.
    opened: the prompt ended inside the thinking.

  Returns:
    (thinking, rest, whether the thinking is closed or there is none).
  """
  if not opened:
    start = _skip(text, 0)
    if not text.startswith(THINK, start):
      return "", text, True
    text = text[start + len(THINK) :]
  thinking, closed, rest = text.partition(END_THINK)
  return thinking, rest, bool(closed)


def parse(
  fmt: Format,
  text: str,
  *,
  tools: Sequence[wire.Tool] = (),
  opened: bool = False,
  cut: bool = False,
  call_tools: bool = True,
) -> Parsed:
  """Reads a whole completion.

  Args:
    fmt: the family's format.
    text: without the stop token.
    tools: give the types of plain-text arguments.
    opened: the prompt ended inside the thinking.
    cut: a limit ended the completion; only closed calls count.
    call_tools: False leaves everything text.
  """
  thinking, rest, _ = split_thinking(text, opened)
  found = fmt.find(rest, tools, cut) if call_tools else []
  if not found:
    return Parsed(thinking.strip(), rest.strip())
  # What follows a call goes after what was said before it, so that text
  # already streamed stays a beginning of the whole.
  pieces, at = [], 0
  for call in found:
    pieces.append(rest[at : call.start].strip())
    at = call.stop
  pieces.append(rest[at:].strip())
  said = "\n".join(p for p in pieces if p)
  return Parsed(
    thinking.strip(), said, tuple((c.name, c.arguments) for c in found)
  )


def _unfinished(text: str, marks: Sequence[str]) -> int:
  """Characters at the end of `text` that may yet become one of `marks`."""
  longest = max((len(m) for m in marks), default=0)
  for n in range(min(longest - 1, len(text)), 0, -1):
    if any(m.startswith(text[-n:]) for m in marks):
      return n
  return 0


def settled(
  fmt: Format,
  text: str,
  *,
  opened: bool = False,
  call_tools: bool = True,
  stop: Sequence[str] = (),
) -> tuple[str, str]:
  """What of an unfinished completion is known to be thinking and to be text.

  Both only grow, and parse() of the whole begins with them.

  Args:
    fmt: the family's format.
    text: sampled so far.
    opened, call_tools: as for parse.
    stop: texts that end the completion and are not shown.
  """
  if stop:
    text = text[: len(text) - _unfinished(text, stop)]
  if not opened:
    head = text.lstrip()
    if not head or (len(head) < len(THINK) and THINK.startswith(head)):
      return "", ""
  thinking, rest, closed = split_thinking(text, opened)
  if not closed:
    held = _unfinished(thinking, (END_THINK,))
    return thinking[: len(thinking) - held].strip(), ""
  if call_tools:
    head = rest.lstrip()
    if any(head.startswith(o) or o.startswith(head) for o in fmt.openings):
      return thinking.strip(), ""
    marks = [i for m in fmt.markers if (i := rest.find(m)) >= 0]
    end = min(marks) if marks else len(rest) - _unfinished(rest, fmt.markers)
    rest = rest[:end]
  return thinking.strip(), rest.strip()


_ASKING = {
  "hermes": (
    "answer with one block a call:\n<tool_call>\n"
    '{"name": "NAME", "arguments": {"KEY": VALUE}}\n</tool_call>'
  ),
  "qwen_coder": (
    "answer with one block a call:\n<tool_call>\n<function=NAME>\n"
    "<parameter=KEY>\nvalue\n</parameter>\n</function>\n</tool_call>"
  ),
  "llama": (
    "answer with nothing but\n"
    '{"name": "NAME", "parameters": {"KEY": VALUE}}\n'
    'and with "; " between several'
  ),
  "json": (
    'answer with nothing but\n{"name": "NAME", "arguments": {"KEY": VALUE}}\n'
    "one a line"
  ),
}


def describe(fmt: Format, tools: Sequence[wire.Tool]) -> str:
  """Tools for the system prompt, where the chat template tells none."""
  lines = "\n".join(dumps(t.schema()["function"]) for t in tools)
  return (
    f"You can call these tools:\n<tools>\n{lines}\n</tools>\n"
    f"To call some, {_ASKING[fmt.name]}"
  )


def write(fmt: Format, text: str, calls: Sequence[tuple[str, str]]) -> str:
  """A completion that says `text` and makes the calls; parse gives both."""
  written = fmt.separator.join(fmt.write(*c) for c in calls)
  return "\n".join(p for p in (text, written) if p)
