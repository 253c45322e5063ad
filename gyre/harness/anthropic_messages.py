"""Anthropic Messages and count_tokens: their JSON to and from `wire`."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gyre.harness import conversation, tool_parsers, wire

_SAMPLING = (
  "temperature",
  "top_p",
  "top_k",
  "max_tokens",
  "stop_sequences",
  "thinking",
  "output_config",
  "tool_choice",
)
_TYPES = {
  "invalid": "invalid_request_error",
  "context": "invalid_request_error",
  "authentication": "authentication_error",
  "not_found": "not_found_error",
  "timeout": "timeout_error",
  "too_large": "request_too_large",
  "busy": "rate_limit_error",
  "internal": "api_error",
  "unavailable": "api_error",
}
# Tools that run at the API, not in the harness: the policy has none of them.
_OF_SERVER = ("web_search_", "web_fetch_", "code_execution_", "tool_search_")
# Claude Code's accounting, which differs from call to call.
_BILLING = "x-anthropic-billing-header:"
_REASONS = {
  "stop": "end_turn",
  "length": "max_tokens",
  "abort": "max_tokens",
  "tool_calls": "tool_use",
}


def error(e: wire.ApiError, request_id: str) -> dict[str, Any]:
  """The body of an error."""
  message = f"{e.param}: {e.message}" if e.param else e.message
  if e.kind == "authentication":
    message = f"invalid x-api-key: {e.message}"
  if e.kind == "context":
    message = e.message
  return {
    "type": "error",
    "error": {"type": _TYPES[e.kind], "message": message},
    "request_id": request_id,
  }


def _blocks(content: Any, where: str) -> list[Mapping[str, Any]]:
  if content is None:
    return []
  if isinstance(content, str):
    return [{"type": "text", "text": content}]
  wire.require(isinstance(content, list), f"{where} must be text or blocks")
  for i, block in enumerate(content):
    wire.require(
      isinstance(block, Mapping), f"{where}[{i}] must be an object", where
    )
  return content


def _system(value: Any) -> list[wire.Message]:
  texts = [
    wire.texts([b], "system", ("text",)) for b in _blocks(value, "system")
  ]
  text = "\n".join(t for t in texts if not t.startswith(_BILLING))
  return [wire.Message("system", text)] if text else []


def _result(block: Mapping[str, Any], where: str) -> wire.Message:
  """A tool's output; what is no text in it is named, not shown."""
  content = block.get("content")
  if isinstance(content, list):
    content = [
      f"[{b.get('type')}: this model reads text only]"
      if isinstance(b, Mapping) and b.get("type") != "text"
      else b
      for b in content
    ]
  return wire.Message(
    "tool",
    wire.texts(content, f"{where}.content", ("text",)),
    tool_call_id=wire.field(block, "tool_use_id", str, ""),
  )


def _user(
  blocks: Sequence[Mapping[str, Any]], where: str
) -> Iterator[wire.Message]:
  """Results of tools and texts, in order; texts in a row are one message."""
  said: list[str] = []
  for i, block in enumerate(blocks):
    here = f"{where}.{i}"
    if block.get("type") == "tool_result":
      if said:
        yield wire.Message("user", "\n".join(said))
        said = []
      yield _result(block, here)
    else:
      said.append(wire.texts([block], here, ("text",)))
  if said:
    yield wire.Message("user", "\n".join(said))


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> wire.Message:
  said, thought, calls = [], [], []
  for i, block in enumerate(blocks):
    here, kind = f"{where}.{i}", block.get("type")
    if kind == "thinking":
      thought.append(wire.field(block, "thinking", str, ""))
    elif kind == "redacted_thinking":
      continue
    elif kind == "tool_use":
      name = wire.field(block, "name", str, "")
      wire.require(bool(name), "has no name", here)
      arguments = tool_parsers.dumps(wire.field(block, "input", dict, {}))
      call_id = wire.field(block, "id", str, "")
      calls.append(wire.ToolCall(call_id, name, arguments))
    else:
      said.append(wire.texts([block], here, ("text",)))
  return wire.Message(
    "assistant", "\n".join(said), tuple(calls), "", "\n".join(thought)
  )


def _messages(values: Sequence[Any]) -> list[wire.Message]:
  out: list[wire.Message] = []
  for i, value in enumerate(values):
    where = f"messages.{i}"
    wire.require(isinstance(value, Mapping), "must be an object", where)
    role = value.get("role")
    blocks = _blocks(value.get("content"), f"{where}.content")
    if role == "user":
      out.extend(_user(blocks, f"{where}.content"))
    elif role == "system":
      out.extend(_system(blocks))
    else:
      wire.require(role == "assistant", f"role {role!r} is unknown", where)
      message = _assistant(blocks, f"{where}.content")
      if out and out[-1].role == "assistant":
        message = _joined(out.pop(), message)
      out.append(message)
  return out


def _joined(a: wire.Message, b: wire.Message) -> wire.Message:
  """Messages in a row are one, as in the API."""
  return wire.Message(
    "assistant",
    "\n".join(t for t in (a.text, b.text) if t),
    a.tool_calls + b.tool_calls,
    "",
    "\n".join(t for t in (a.reasoning, b.reasoning) if t),
  )


def _tools(values: Sequence[Any]) -> Iterator[wire.Tool]:
  for i, value in enumerate(values):
    where = f"tools.{i}"
    wire.require(isinstance(value, Mapping), "must be an object", where)
    kind = value.get("type") or "custom"
    if str(kind).startswith(_OF_SERVER):
      continue
    wire.require(
      kind == "custom", f"tools of type {kind!r} are not supported", where
    )
    name = wire.field(value, "name", str, "")
    wire.require(bool(name), "has no name", where)
    yield wire.Tool(
      name,
      wire.field(value, "description", str, ""),
      wire.field(value, "input_schema", dict, {}),
    )


def parse(body: Mapping[str, Any]) -> wire.Asked:
  """Reads a request.

  Raises:
    ApiError: malformed, or it asks for what is not served.
  """
  asked = parse_count(body)
  wire.require(
    asked.messages[-1].role != "assistant",
    "this model does not support assistant message prefill; the conversation "
    "must end with a user message",
    "messages",
  )
  most = wire.limit(body, "max_tokens")
  wire.require(most is not None, "Field required", "max_tokens")
  choice = wire.field(body, "tool_choice", dict, {})
  thinking = wire.field(body, "thinking", dict, {})
  form = wire.field(body, "output_config", dict, {}).get("format")
  wire.require(
    not form, "a format cannot be enforced; ask in the prompt", "output_config"
  )
  return wire.Asked(
    model=asked.model,
    messages=asked.messages,
    tools=asked.tools,
    stream=wire.field(body, "stream", bool, False),
    max_tokens=most,
    stop=wire.stops(body, "stop_sequences"),
    sampling=wire.sampling(body, _SAMPLING),
    call_tools=choice.get("type") != "none",
    parallel=not choice.get("disable_parallel_tool_use"),
    show_reasoning=thinking.get("type") in ("enabled", "adaptive"),
    call_prefix="toolu_",
  )


def parse_count(body: Mapping[str, Any]) -> wire.Asked:
  """Reads a request of count_tokens, of which only the prompt counts.

  Raises:
    ApiError: malformed.
  """
  values = wire.field(body, "messages", list, [])
  wire.require(bool(values), "at least one message is required", "messages")
  messages = _messages(values)
  wire.require(bool(messages), "the messages have no content", "messages")
  return wire.Asked(
    model=wire.field(body, "model", str, ""),
    messages=(*_system(body.get("system")), *messages),
    tools=tuple(_tools(wire.field(body, "tools", list, []))),
  )


def render_count(tokens: int) -> dict[str, Any]:
  """The body of an answer of count_tokens."""
  return {"input_tokens": tokens}


def _signature(answer_id: str) -> str:
  return base64.b64encode(answer_id.encode()).decode()


def _usage(prompt: int, completion: int) -> dict[str, Any]:
  return {
    "input_tokens": prompt,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": completion,
  }


def _head(asked: wire.Asked, answer_id: str, prompt: int) -> dict[str, Any]:
  return {
    "id": f"msg_{answer_id}",
    "type": "message",
    "role": "assistant",
    "model": asked.model,
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": _usage(prompt, 0),
  }


def _end(answer: wire.Answer) -> dict[str, Any]:
  """Why the answer ended."""
  if answer.stop_sequence is not None and answer.finish == "stop":
    reason = "stop_sequence"
  else:
    reason = _REASONS[answer.finish]
  sequence = answer.stop_sequence if reason == "stop_sequence" else None
  return {"stop_reason": reason, "stop_sequence": sequence}


def _input(call: wire.ToolCall) -> dict[str, Any]:
  value = conversation.decoded(call.arguments)
  return value if isinstance(value, dict) else {}


def render(asked: wire.Asked, answer: wire.Answer) -> dict[str, Any]:
  """The body of an answer that is not streamed."""
  said, content = answer.said, []
  if said.reasoning:
    content.append(
      {
        "type": "thinking",
        "thinking": said.reasoning,
        "signature": _signature(answer.answer_id),
      }
    )
  if said.text:
    content.append({"type": "text", "text": said.text})
  for call in said.tool_calls:
    content.append(
      {
        "type": "tool_use",
        "id": call.call_id,
        "name": call.name,
        "input": _input(call),
      }
    )
  head = _head(asked, answer.answer_id, answer.prompt_tokens)
  usage = _usage(answer.prompt_tokens, answer.completion_tokens)
  return head | {"content": content, "usage": usage} | _end(answer)


def _event(name: str, /, **fields: Any) -> bytes:
  return wire.event({"type": name} | fields, name)


class Stream:
  """The events of one answer: blocks of thinking, text and tool use."""

  def __init__(
    self, asked: wire.Asked, answer_id: str, created: float, prompt_tokens: int
  ):
    """Nothing sent yet."""
    del created
    self._answer_id, self._shown = answer_id, wire.Shown()
    self._head = _head(asked, answer_id, prompt_tokens)
    self._index, self._kind = -1, ""

  def open(self) -> Iterator[bytes]:
    """The first event."""
    yield _event("message_start", message=self._head)

  def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
    yield from self._end_block()
    self._index, self._kind = self._index + 1, kind
    yield _event(
      "content_block_start",
      index=self._index,
      content_block={"type": kind} | block,
    )

  def _delta(self, kind: str, **fields: Any) -> bytes:
    return _event(
      "content_block_delta",
      index=self._index,
      delta={"type": kind} | fields,
    )

  def _end_block(self) -> Iterator[bytes]:
    if self._kind == "thinking":
      yield self._delta(
        "signature_delta", signature=_signature(self._answer_id)
      )
    if self._kind:
      yield _event("content_block_stop", index=self._index)
    self._kind = ""

  def update(self, reasoning: str, text: str) -> Iterator[bytes]:
    """What has become visible."""
    thought, said = self._shown.advance(reasoning, text)
    if thought:
      if self._kind != "thinking":
        yield from self._begin("thinking", {"thinking": "", "signature": ""})
      yield self._delta("thinking_delta", thinking=thought)
    if said:
      if self._kind != "text":
        yield from self._begin("text", {"text": ""})
      yield self._delta("text_delta", text=said)

  def close(self, answer: wire.Answer) -> Iterator[bytes]:
    """The rest: calls, the reason of the end, usage."""
    yield from self.update(answer.said.reasoning, answer.said.text)
    for call in answer.said.tool_calls:
      block = {"id": call.call_id, "name": call.name, "input": {}}
      yield from self._begin("tool_use", block)
      yield self._delta(
        "input_json_delta", partial_json=tool_parsers.dumps(_input(call))
      )
    yield from self._end_block()
    yield _event(
      "message_delta",
      delta=_end(answer),
      usage=_usage(answer.prompt_tokens, answer.completion_tokens),
    )
    yield _event("message_stop")

  def fail(self, e: wire.ApiError) -> Iterator[bytes]:
    """Tells that no more will come."""
    yield wire.event(error(e, f"req_{self._answer_id}"), "error")

  def ping(self) -> bytes:
    """Shows that the connection lives."""
    return _event("ping")
