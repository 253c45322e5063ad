"""OpenAI Chat Completions: its JSON to and from `wire`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gyre.harness import tool_parsers, wire

_SAMPLING = (
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "max_tokens",
  "max_completion_tokens",
  "stop",
  "seed",
  "presence_penalty",
  "frequency_penalty",
  "repetition_penalty",
  "logit_bias",
  "reasoning_effort",
  "tool_choice",
)
_TEXTS = ("text", "input_text", "output_text", "refusal")
_TYPES = {
  "not_found": "not_found_error",
  "authentication": "authentication_error",
  "busy": "rate_limit_error",
  "internal": "server_error",
  "unavailable": "server_error",
}
_CODES = {
  "context": "context_length_exceeded",
  "authentication": "invalid_api_key",
  "busy": "rate_limit_exceeded",
  "not_found": "not_found",
  "too_large": "request_too_large",
}


def error(e: wire.ApiError, request_id: str) -> dict[str, Any]:
  """The body of an error."""
  del request_id
  message = e.message
  if e.kind == "authentication":
    message = f"Incorrect API key provided: {message}"
  return {
    "error": {
      "message": message,
      "type": _TYPES.get(e.kind, "invalid_request_error"),
      "param": e.param or None,
      "code": _CODES.get(e.kind),
    }
  }


def tool_of(value: Any, where: str) -> wire.Tool:
  """A function tool.

  Raises:
    ApiError: malformed, or of another type.
  """
  wire.require(isinstance(value, Mapping), f"{where} must be an object", where)
  kind = value.get("type", "function")
  function = value.get("function")
  wire.require(
    kind == "function" and isinstance(function, Mapping),
    f"{where} has type {kind!r}; only functions are supported",
    where,
  )
  name = wire.field(function, "name", str, "")
  wire.require(bool(name), f"{where}.function has no name", where)
  return wire.Tool(
    name,
    wire.field(function, "description", str, ""),
    wire.field(function, "parameters", dict, {}),
  )


def _call(value: Any, where: str) -> wire.ToolCall:
  wire.require(isinstance(value, Mapping), f"{where} must be an object", where)
  function = wire.field(value, "function", dict, {})
  name = wire.field(function, "name", str, "")
  wire.require(bool(name), f"{where} has no function name", where)
  arguments = function.get("arguments")
  if not isinstance(arguments, str):
    arguments = tool_parsers.dumps({} if arguments is None else arguments)
  return wire.ToolCall(wire.field(value, "id", str, ""), name, arguments)


def _message(value: Any, where: str) -> wire.Message:
  wire.require(isinstance(value, Mapping), f"{where} must be an object", where)
  role = value.get("role")
  text = wire.texts(value.get("content"), f"{where}.content", _TEXTS)
  if role in ("system", "developer"):
    return wire.Message("system", text)
  if role == "user":
    return wire.Message("user", text)
  if role == "tool":
    call_id = wire.field(value, "tool_call_id", str, "")
    return wire.Message("tool", text, tool_call_id=call_id)
  wire.require(
    role == "assistant", f"{where}.role {role!r} is unknown", f"{where}.role"
  )
  calls = wire.field(value, "tool_calls", list, [])
  return wire.Message(
    "assistant",
    text,
    tuple(_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)),
    reasoning=wire.field(value, "reasoning_content", str, ""),
  )


def parse(body: Mapping[str, Any]) -> wire.Asked:
  """Reads a request.

  Raises:
    ApiError: malformed, or it asks for what is not served.
  """
  messages = wire.field(body, "messages", list, [])
  wire.require(bool(messages), "messages must not be empty", "messages")
  n = wire.field(body, "n", int, 1)
  wire.require(n == 1, f"n is {n}; only n=1 is supported", "n")
  for name in ("functions", "function_call", "audio", "logprobs"):
    wire.require(not body.get(name), f"{name} is not supported", name)
  form = wire.field(body, "response_format", dict, {}).get("type", "text")
  wire.require(
    form == "text",
    f"response_format {form!r} cannot be enforced; ask in the prompt",
    "response_format",
  )
  options = wire.field(body, "stream_options", dict, {})
  tools = wire.field(body, "tools", list, [])
  return wire.Asked(
    model=wire.field(body, "model", str, ""),
    messages=tuple(
      _message(m, f"messages[{i}]") for i, m in enumerate(messages)
    ),
    tools=tuple(tool_of(t, f"tools[{i}]") for i, t in enumerate(tools)),
    stream=wire.field(body, "stream", bool, False),
    max_tokens=wire.limit(body, "max_tokens", "max_completion_tokens"),
    stop=wire.stops(body, "stop"),
    sampling=wire.sampling(body, _SAMPLING),
    call_tools=body.get("tool_choice") != "none",
    parallel=wire.field(body, "parallel_tool_calls", bool, True),
    include_usage=bool(options.get("include_usage")),
  )


def _head(kind: str, answer_id: str, created: float, model: str) -> dict:
  return {
    "id": f"chatcmpl-{answer_id}",
    "object": kind,
    "created": int(created),
    "model": model,
    "system_fingerprint": None,
  }


def _tool_call(call: wire.ToolCall) -> dict[str, Any]:
  return {
    "id": call.call_id,
    "type": "function",
    "function": {"name": call.name, "arguments": call.arguments},
  }


def _usage(answer: wire.Answer) -> dict[str, Any]:
  return {
    "prompt_tokens": answer.prompt_tokens,
    "completion_tokens": answer.completion_tokens,
    "total_tokens": answer.prompt_tokens + answer.completion_tokens,
  }


def _reason(answer: wire.Answer) -> str:
  return {"abort": "length"}.get(answer.finish, answer.finish)


def render(asked: wire.Asked, answer: wire.Answer) -> dict[str, Any]:
  """The body of an answer that is not streamed."""
  said = answer.said
  message: dict[str, Any] = {
    "role": "assistant",
    "content": said.text if said.text or not said.tool_calls else None,
    "refusal": None,
  }
  if said.reasoning:
    message["reasoning_content"] = said.reasoning
  if said.tool_calls:
    message["tool_calls"] = [_tool_call(c) for c in said.tool_calls]
  choice = {
    "index": 0,
    "message": message,
    "logprobs": None,
    "finish_reason": _reason(answer),
  }
  head = _head("chat.completion", answer.answer_id, answer.created, asked.model)
  return head | {"choices": [choice], "usage": _usage(answer)}


class Stream:
  """The events of one answer."""

  def __init__(
    self, asked: wire.Asked, answer_id: str, created: float, prompt_tokens: int
  ):
    """Nothing sent yet."""
    del prompt_tokens
    self._asked, self._shown = asked, wire.Shown()
    self._head = _head("chat.completion.chunk", answer_id, created, asked.model)

  def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
    choice = {
      "index": 0,
      "delta": delta,
      "logprobs": None,
      "finish_reason": reason,
    }
    usage = {"usage": None} if self._asked.include_usage else {}
    return wire.event(self._head | {"choices": [choice]} | usage)

  def open(self) -> Iterator[bytes]:
    """The first event."""
    yield self._chunk({"role": "assistant", "content": ""})

  def update(self, reasoning: str, text: str) -> Iterator[bytes]:
    """What has become visible."""
    thought, said = self._shown.advance(reasoning, text)
    if thought:
      yield self._chunk({"reasoning_content": thought})
    if said:
      yield self._chunk({"content": said})

  def close(self, answer: wire.Answer) -> Iterator[bytes]:
    """The rest: calls, the reason of the end, usage."""
    yield from self.update(answer.said.reasoning, answer.said.text)
    for i, call in enumerate(answer.said.tool_calls):
      yield self._chunk({"tool_calls": [{"index": i, **_tool_call(call)}]})
    yield self._chunk({}, _reason(answer))
    if self._asked.include_usage:
      usage = {"choices": [], "usage": _usage(answer)}
      yield wire.event(self._head | usage)
    yield b"data: [DONE]\n\n"

  def fail(self, e: wire.ApiError) -> Iterator[bytes]:
    """Tells that no more will come."""
    yield wire.event(error(e, ""))

  def ping(self) -> bytes:
    """Shows that the connection lives."""
    return b": ping\n\n"
