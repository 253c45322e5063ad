"""What the APIs have in common: messages, tools, a request, an answer.

Each translation module turns the JSON of its API into an `Asked` and a
`Said` into the JSON of its API; everything between knows no API.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
ErrorKind = Literal[
  "invalid",
  "context",
  "authentication",
  "not_found",
  "timeout",
  "too_large",
  "busy",
  "internal",
  "unavailable",
]

STATUS: Mapping[ErrorKind, int] = {
  "invalid": 400,
  "context": 400,
  "authentication": 401,
  "not_found": 404,
  "timeout": 408,
  "too_large": 413,
  "busy": 429,
  "internal": 500,
  "unavailable": 503,
}


class ApiError(Exception):
  """What a client is told, in its API's own shape.

  Attributes:
    kind: decides the HTTP status and the API's name for it.
    message: one line.
    param: the parameter at fault, or "".
  """

  def __init__(self, kind: ErrorKind, message: str, param: str = ""):
    super().__init__(message)
    self.kind, self.message, self.param = kind, message, param


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """call_id: unique in an execution; arguments: JSON text of an object."""

  call_id: str
  name: str
  arguments: str


@dataclasses.dataclass(frozen=True)
class Message:
  """One message of a conversation, as the harness sends it.

  Attributes:
    role: of the speaker.
    text: all text of it; of a tool, its output.
    tool_calls: of an assistant.
    tool_call_id: of a tool: the call that it answers.
    reasoning: of an assistant, where the API carries it back.
  """

  role: Role
  text: str
  tool_calls: tuple[ToolCall, ...] = ()
  tool_call_id: str = ""
  reasoning: str = ""


@dataclasses.dataclass(frozen=True)
class Said:
  """A completion as a harness reads it."""

  text: str = ""
  reasoning: str = ""
  tool_calls: tuple[ToolCall, ...] = ()

  def message(self) -> Message:
    """The message that a harness sends back for it."""
    return Message("assistant", self.text, self.tool_calls, "", self.reasoning)


@dataclasses.dataclass(frozen=True)
class Tool:
  """parameters: JSON schema. custom: its API passes one text, not JSON; the
  model then calls it with {"input": text}.
  """

  name: str
  description: str = ""
  parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  custom: bool = False

  def schema(self) -> dict[str, Any]:
    """As chat templates take it."""
    return {
      "type": "function",
      "function": {
        "name": self.name,
        "description": self.description,
        "parameters": dict(self.parameters),
      },
    }


@dataclasses.dataclass(frozen=True)
class Asked:
  """A request for a completion, in no API's terms.

  Attributes:
    model: as the harness names it; echoed.
    messages: the conversation, system prompt first where there is one.
    tools: those that the model may call.
    stream: whether the answer is streamed.
    max_tokens: most tokens to sample, or None.
    stop: texts that end the completion.
    sampling: the parameters of sampling as the harness sent them.
    call_tools: False where the harness forbids tool calls.
    parallel: False where at most one call may be made at a time.
    show_reasoning: whether the API's answer has a place for it.
    include_usage: whether a stream ends with usage (Chat Completions).
    previous: answer_id of the answer that the messages follow (Responses).
    call_prefix: how the API's ids of tool calls begin.
    echo: parameters that the API's answer repeats.
  """

  model: str
  messages: tuple[Message, ...]
  tools: tuple[Tool, ...] = ()
  stream: bool = False
  max_tokens: int | None = None
  stop: tuple[str, ...] = ()
  sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  call_tools: bool = True
  parallel: bool = True
  show_reasoning: bool = True
  include_usage: bool = False
  previous: str = ""
  call_prefix: str = "call_"
  echo: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Answer:
  """A finished completion, for the translation modules.

  Attributes:
    answer_id: unique; the API's own ids are made of it.
    created: seconds since the epoch.
    said: what was said.
    finish: "stop", "length", "tool_calls" or "abort".
    stop_sequence: the stop text that ended it, or None.
    prompt_tokens, completion_tokens: counts.
  """

  answer_id: str
  created: float
  said: Said
  finish: str
  stop_sequence: str | None
  prompt_tokens: int
  completion_tokens: int


def require(ok: bool, message: str, param: str = "") -> None:
  """Raises the API's error for a malformed request unless `ok`."""
  if not ok:
    raise ApiError("invalid", message, param)


def field(
  body: Mapping[str, Any], name: str, kinds: type | tuple, default: Any = None
) -> Any:
  """`body[name]` if it is of one of `kinds`; `default` if absent or null.

  Raises:
    ApiError: it is something else.
  """
  value = body.get(name)
  if value is None:
    return default
  wanted = kinds if isinstance(kinds, tuple) else (kinds,)
  wrong = isinstance(value, bool) and bool not in wanted
  if wrong or not isinstance(value, kinds):
    names = " or ".join(k.__name__ for k in wanted)
    raise ApiError(
      "invalid", f"{name} must be {names}, got {value!r:.60}", name
    )
  return value


def sampling(body: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
  """Parameters of sampling, as they were sent.

  Raises:
    ApiError: one of the numbers is none.
  """
  for name in ("temperature", "top_p", "seed"):
    field(body, name, (int, float))
  return {k: body[k] for k in names if body.get(k) is not None}


def stops(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
  """Stop sequences.

  Raises:
    ApiError: not one text or a list of them.
  """
  stop = field(body, name, (str, list), [])
  stop = [stop] if isinstance(stop, str) else stop
  require(
    all(isinstance(s, str) for s in stop), f"{name} must hold texts", name
  )
  return tuple(s for s in stop if s)


def limit(body: Mapping[str, Any], *names: str) -> int | None:
  """The least of the limits given.

  Raises:
    ApiError: one is not a positive number.
  """
  given = {n: field(body, n, int) for n in names}
  for name, value in given.items():
    require(value is None or value >= 1, f"{name} must be at least 1", name)
  return min((v for v in given.values() if v is not None), default=None)


def texts(content: Any, where: str, types: tuple[str, ...]) -> str:
  """Text of a message's content: a text, or parts of the given types.

  Raises:
    ApiError: an image, or anything else that is no text.
  """
  if content is None:
    return ""
  if isinstance(content, str):
    return content
  require(isinstance(content, list), f"{where} must be text or parts", where)
  parts = []
  for i, part in enumerate(content):
    if isinstance(part, str):
      parts.append(part)
      continue
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text", part.get("refusal")) if kind in types else None
    require(
      isinstance(text, str),
      f"{where}[{i}] has type {kind!r}; this model reads text only",
      where,
    )
    parts.append(text)
  return "\n".join(parts)


def squeeze(text: str) -> str:
  """`text` without white space, which harnesses change."""
  return "".join(text.split())


def encode(value: Any) -> bytes:
  """JSON bytes."""
  return msgspec.json.encode(value)


def event(data: Any, name: str = "") -> bytes:
  """A server-sent event."""
  head = f"event: {name}\n".encode() if name else b""
  return head + b"data: " + encode(data) + b"\n\n"


class Shown:
  """What of an answer has been streamed."""

  def __init__(self):
    self._reasoning = self._text = 0

  def advance(self, reasoning: str, text: str) -> tuple[str, str]:
    """What is new of (thinking, text), which only grow."""
    new = reasoning[self._reasoning :], text[self._text :]
    self._reasoning = max(self._reasoning, len(reasoning))
    self._text = max(self._text, len(text))
    return new
