"""OpenAI Responses: its JSON to and from `wire`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gyre.harness import conversation, openai_chat, tool_parsers, wire

_SAMPLING = (
  "temperature",
  "top_p",
  "max_output_tokens",
  "reasoning",
  "text",
  "tool_choice",
)
_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text")
_TEXTS += ("reasoning_text",)
# Tools that run at the API, not in the harness: the policy has none of them.
_OF_SERVER = (
  "web_search",
  "file_search",
  "code_interpreter",
  "image_generation",
  "mcp",
  "tool_search",
  "local_shell",
)
_INPUT = {
  "type": "object",
  "properties": {"input": {"type": "string"}},
  "required": ["input"],
}

error = openai_chat.error


def _flat(namespace: str, name: str) -> str:
  return f"{namespace}__{name}" if namespace else name


def _tools(values: Sequence[Any], space: str = "") -> Iterator[wire.Tool]:
  for i, value in enumerate(values):
    where = f"tools[{i}]"
    wire.require(isinstance(value, Mapping), f"{where} must be an object")
    kind = str(value.get("type"))
    name = wire.field(value, "name", str, "")
    if kind.startswith(_OF_SERVER):
      continue
    if kind == "namespace":
      yield from _tools(wire.field(value, "tools", list, []), name)
      continue
    wire.require(
      kind in ("function", "custom") and bool(name),
      f"{where} has type {kind!r}; only named functions are supported",
      where,
    )
    custom = kind == "custom"
    yield wire.Tool(
      _flat(space, name),
      wire.field(value, "description", str, ""),
      _INPUT if custom else wire.field(value, "parameters", dict, {}),
      custom=custom,
    )


def _spaces(values: Sequence[Any]) -> dict[str, tuple[str, str]]:
  """Flat name -> (namespace, name) of the tools in a namespace."""
  out = {}
  for value in values:
    if value.get("type") == "namespace":
      space = value.get("name", "")
      for tool in value.get("tools") or []:
        name = tool.get("name", "")
        out[_flat(space, name)] = (space, name)
  return out


def _output(item: Mapping[str, Any], where: str) -> wire.Message:
  output = item.get("output")
  if isinstance(output, list):
    output = [
      f"[{p.get('type')}: this model reads text only]"
      if isinstance(p, Mapping) and p.get("type") not in _TEXTS
      else p
      for p in output
    ]
  return wire.Message(
    "tool",
    wire.texts(output, f"{where}.output", _TEXTS),
    tool_call_id=wire.field(item, "call_id", str, ""),
  )


def _item(item: Any, where: str) -> wire.Message:
  """One item as a message; items of one assistant turn are joined later."""
  wire.require(isinstance(item, Mapping), f"{where} must be an object", where)
  kind = item.get("type") or "message"
  if kind in ("function_call", "custom_tool_call"):
    name = wire.field(item, "name", str, "")
    wire.require(bool(name), f"{where} has no name", where)
    if kind == "custom_tool_call":
      given = wire.field(item, "input", str, "")
      arguments = tool_parsers.dumps({"input": given})
    else:
      arguments = wire.field(item, "arguments", str, "")
    name = _flat(wire.field(item, "namespace", str, ""), name)
    call_id = wire.field(item, "call_id", str, "")
    return wire.Message(
      "assistant", "", (wire.ToolCall(call_id, name, arguments),)
    )
  if kind in ("function_call_output", "custom_tool_call_output"):
    return _output(item, where)
  if kind == "reasoning":
    parts = item.get("content") or item.get("summary")
    thought = wire.texts(parts, f"{where}.content", _TEXTS)
    return wire.Message("assistant", "", reasoning=thought)
  wire.require(
    kind == "message", f"{where} has type {kind!r}, which is unknown", where
  )
  text = wire.texts(item.get("content"), f"{where}.content", _TEXTS)
  role = item.get("role")
  if role in ("system", "developer"):
    return wire.Message("system", text)
  wire.require(
    role in ("user", "assistant"), f"{where}.role {role!r} is unknown", where
  )
  return wire.Message(role, text)


def _join(a: wire.Message, b: wire.Message) -> wire.Message:
  return dataclasses.replace(
    a,
    text="\n".join(t for t in (a.text, b.text) if t),
    tool_calls=a.tool_calls + b.tool_calls,
    reasoning="\n".join(t for t in (a.reasoning, b.reasoning) if t),
  )


def _messages(value: Any) -> list[wire.Message]:
  if isinstance(value, str):
    return [wire.Message("user", value)]
  out: list[wire.Message] = []
  for i, item in enumerate(value):
    message = _item(item, f"input[{i}]")
    if message.role == "assistant" and out and out[-1].role == "assistant":
      message = _join(out.pop(), message)
    out.append(message)
  return out


def parse(body: Mapping[str, Any]) -> wire.Asked:
  """Reads a request.

  Raises:
    ApiError: malformed, or it asks for what is not served.
  """
  value = wire.field(body, "input", (str, list), [])
  wire.require(bool(value), "input must not be empty", "input")
  for name in ("background", "conversation", "prompt"):
    wire.require(not body.get(name), f"{name} is not supported", name)
  form = wire.field(wire.field(body, "text", dict, {}), "format", dict, {})
  wire.require(
    form.get("type", "text") == "text",
    f"text.format {form.get('type')!r} cannot be enforced; ask in the prompt",
    "text",
  )
  instructions = wire.field(body, "instructions", str, "")
  head = [wire.Message("system", instructions)] if instructions else []
  tools = wire.field(body, "tools", list, [])
  previous = wire.field(body, "previous_response_id", str, "")
  return wire.Asked(
    model=wire.field(body, "model", str, ""),
    messages=(*head, *_messages(value)),
    tools=tuple(_tools(tools)),
    stream=wire.field(body, "stream", bool, False),
    max_tokens=wire.limit(body, "max_output_tokens"),
    sampling=wire.sampling(body, _SAMPLING),
    call_tools=body.get("tool_choice") != "none",
    parallel=wire.field(body, "parallel_tool_calls", bool, True),
    previous=previous.removeprefix("resp_"),
    echo={
      "instructions": instructions or None,
      "metadata": wire.field(body, "metadata", dict, {}),
      "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
      "previous_response_id": previous or None,
      "reasoning": body.get("reasoning"),
      "store": wire.field(body, "store", bool, True),
      "temperature": wire.field(body, "temperature", (int, float), 1.0),
      "text": body.get("text") or {"format": {"type": "text"}},
      "tool_choice": body.get("tool_choice") or "auto",
      "tools": tools,
      "top_p": wire.field(body, "top_p", (int, float), 1.0),
      "truncation": body.get("truncation") or "disabled",
      "max_output_tokens": body.get("max_output_tokens"),
    },
  )


def _usage(answer: wire.Answer) -> dict[str, Any]:
  return {
    "input_tokens": answer.prompt_tokens,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": answer.completion_tokens,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": answer.prompt_tokens + answer.completion_tokens,
  }


def _response(
  asked: wire.Asked, answer_id: str, created: float, **fields: Any
) -> dict[str, Any]:
  return {
    "id": f"resp_{answer_id}",
    "object": "response",
    "created_at": int(created),
    "status": "in_progress",
    "background": False,
    "error": None,
    "incomplete_details": None,
    "model": asked.model,
    "output": [],
    "usage": None,
    **asked.echo,
    **fields,
  }


def _done(answer: wire.Answer) -> dict[str, Any]:
  """Status of a finished response."""
  if answer.finish in ("stop", "tool_calls"):
    return {"status": "completed", "usage": _usage(answer)}
  details = {"reason": "max_output_tokens"}
  return {
    "status": "incomplete",
    "incomplete_details": details,
    "usage": _usage(answer),
  }


class _Items:
  """Output items of one answer, by the ids that a stream announces."""

  def __init__(self, asked: wire.Asked, answer_id: str):
    self._id = answer_id
    self._custom = {t.name for t in asked.tools if t.custom}
    self._spaces = _spaces(asked.echo.get("tools") or [])

  def reasoning(self, text: str, status: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {
      "id": f"rs_{self._id}",
      "type": "reasoning",
      "summary": [],
      "content": content,
      "encrypted_content": None,
      "status": status,
    }

  def message(self, text: str | None, status: str) -> dict[str, Any]:
    return {
      "id": f"msg_{self._id}",
      "type": "message",
      "role": "assistant",
      "status": status,
      "content": [] if text is None else [part(text)],
    }

  def call(self, call: wire.ToolCall, status: str) -> dict[str, Any]:
    """Its arguments are empty until it is completed."""
    done = status == "completed"
    space, name = self._spaces.get(call.name, ("", call.name))
    item = {
      "id": f"fc_{call.call_id}",
      "type": "function_call",
      "call_id": call.call_id,
      "name": name,
      "status": status,
    }
    if space:
      item["namespace"] = space
    if call.name in self._custom:
      given = self.given(call) if done else ""
      return item | {"type": "custom_tool_call", "input": given}
    return item | {"arguments": call.arguments if done else ""}

  def is_custom(self, call: wire.ToolCall) -> bool:
    return call.name in self._custom

  def given(self, call: wire.ToolCall) -> str:
    """The text that a custom tool takes."""
    value = conversation.decoded(call.arguments)
    given = value.get("input") if isinstance(value, dict) else None
    return given if isinstance(given, str) else call.arguments

  def all(self, said: wire.Said) -> list[dict[str, Any]]:
    out = []
    if said.reasoning:
      out.append(self.reasoning(said.reasoning, "completed"))
    if said.text or not said.tool_calls:
      out.append(self.message(said.text, "completed"))
    return out + [self.call(c, "completed") for c in said.tool_calls]


def part(text: str) -> dict[str, Any]:
  """A text as a part of a message's content."""
  return {"type": "output_text", "text": text, "annotations": []}


def render(asked: wire.Asked, answer: wire.Answer) -> dict[str, Any]:
  """The body of an answer that is not streamed."""
  return _response(
    asked,
    answer.answer_id,
    answer.created,
    output=_Items(asked, answer.answer_id).all(answer.said),
    **_done(answer),
  )


class Stream:
  """The events of one answer: items of reasoning, text and calls."""

  def __init__(
    self, asked: wire.Asked, answer_id: str, created: float, prompt_tokens: int
  ):
    """Nothing sent yet."""
    del prompt_tokens
    self._asked, self._answer_id, self._created = asked, answer_id, created
    self._items, self._shown = _Items(asked, answer_id), wire.Shown()
    self._sequence = self._index = -1
    self._kind, self._sofar = "", {"reasoning": "", "message": ""}

  def _event(self, name: str, /, **fields: Any) -> bytes:
    self._sequence += 1
    head = {"type": f"response.{name}", "sequence_number": self._sequence}
    return wire.event(head | fields, f"response.{name}")

  def _whole(self, **fields: Any) -> dict[str, Any]:
    return _response(self._asked, self._answer_id, self._created, **fields)

  def open(self) -> Iterator[bytes]:
    """The first events."""
    yield self._event("created", response=self._whole())
    yield self._event("in_progress", response=self._whole())

  def _begin(self, kind: str) -> Iterator[bytes]:
    """Opens the item of reasoning or text, unless it is open."""
    if self._kind == kind:
      return
    yield from self._end()
    self._kind, self._index = kind, self._index + 1
    message = kind == "message"
    if message:
      item = self._items.message(None, "in_progress")
    else:
      item = self._items.reasoning("", "in_progress")
    yield self._event("output_item.added", output_index=self._index, item=item)
    if message:
      yield self._text_event("content_part.added", part=part(""))

  def _text_event(self, name: str, /, **fields: Any) -> bytes:
    prefix = "msg" if self._kind == "message" else "rs"
    return self._event(
      name,
      item_id=f"{prefix}_{self._answer_id}",
      output_index=self._index,
      content_index=0,
      **fields,
    )

  def _end(self) -> Iterator[bytes]:
    """Closes the open item."""
    kind, self_text = self._kind, self._sofar.get(self._kind, "")
    if kind == "message":
      yield self._text_event("output_text.done", text=self_text, logprobs=[])
      yield self._text_event("content_part.done", part=part(self_text))
      item = self._items.message(self_text, "completed")
    elif kind == "reasoning":
      yield self._text_event("reasoning_text.done", text=self_text)
      item = self._items.reasoning(self_text, "completed")
    if kind:
      yield self._event("output_item.done", output_index=self._index, item=item)
    self._kind = ""

  def update(self, reasoning: str, text: str) -> Iterator[bytes]:
    """What has become visible."""
    thought, said = self._shown.advance(reasoning, text)
    if thought:
      yield from self._begin("reasoning")
      self._sofar["reasoning"] += thought
      yield self._text_event("reasoning_text.delta", delta=thought)
    if said:
      yield from self._begin("message")
      self._sofar["message"] += said
      yield self._text_event("output_text.delta", delta=said, logprobs=[])

  def _call(self, call: wire.ToolCall) -> Iterator[bytes]:
    self._index += 1
    where = {"output_index": self._index}
    item = self._items.call(call, "in_progress")
    yield self._event("output_item.added", item=item, **where)
    where["item_id"] = item["id"]
    if self._items.is_custom(call):
      given, name = self._items.given(call), "custom_tool_call_input"
      yield self._event(f"{name}.delta", delta=given, **where)
      yield self._event(f"{name}.done", input=given, **where)
    else:
      given, name = call.arguments, "function_call_arguments"
      yield self._event(f"{name}.delta", delta=given, **where)
      yield self._event(
        f"{name}.done", arguments=given, name=item["name"], **where
      )
    item = self._items.call(call, "completed")
    yield self._event("output_item.done", output_index=self._index, item=item)

  def close(self, answer: wire.Answer) -> Iterator[bytes]:
    """The rest: calls, the whole response with its status and usage."""
    said = answer.said
    yield from self.update(said.reasoning, said.text)
    if not said.text and not said.tool_calls:
      yield from self._begin("message")
    yield from self._end()
    for call in said.tool_calls:
      yield from self._call(call)
    done = _done(answer)
    name = "completed" if done["status"] == "completed" else "incomplete"
    response = self._whole(output=self._items.all(said), **done)
    yield self._event(name, response=response)

  def fail(self, e: wire.ApiError) -> Iterator[bytes]:
    """Tells that no more will come."""
    fault = {"code": "server_error", "message": e.message}
    yield self._event(
      "failed", response=self._whole(status="failed", error=fault)
    )

  def ping(self) -> bytes:
    """Shows that the connection lives."""
    return b": ping\n\n"
