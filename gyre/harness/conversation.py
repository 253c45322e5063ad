"""Which recorded conversation a request extends, and its prompt as ids.

A harness re-sends its whole history as text. Here every message is known by
a key that survives what harnesses do to it (JSON written anew, spaces, text
dropped beside a tool call), and the keys of a conversation by a chain of
hashes: the longest recorded conversation that a request begins with gives the
ids, as they were sampled, and only what is new is rendered.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gyre import types
from gyre.harness import render, tool_parsers, wire

# Text that harnesses write where an assistant said nothing.
_NOTHING = {"", "(nocontent)"}


@dataclasses.dataclass(eq=False)
class Prompt:
  """A request's prompt.

  Attributes:
    ids: int32 [P].
    text: what the chat template wrote, of which ids are the tokens; None once
      another call has gone on from here.
    messages: the conversation as the chat template reads it.
    sent: the same as the harness sent it, tool calls restored.
    tools: offered.
    chain: hash of the whole conversation.
    parent: call_id of the call whose ids the prompt goes on from, or None.
    boundary: the step of the ladder that led here; "" opens a conversation.
    follows: call_id of the call whose messages it goes on from, or None.
    known: messages of `sent` that lie in that call's conversation.
    opened: the prompt ends inside the thinking.
  """

  ids: np.ndarray
  text: str | None
  messages: tuple[dict[str, Any], ...]
  sent: tuple[wire.Message, ...]
  tools: tuple[wire.Tool, ...]
  chain: bytes
  parent: str | None
  boundary: types.Boundary
  follows: str | None
  known: int
  opened: bool


@dataclasses.dataclass(frozen=True, eq=False)
class _Recorded:
  """A call's conversation, what it sampled included."""

  call_id: str
  prompt: Prompt
  completion_ids: np.ndarray
  sent: tuple[wire.Message, ...]
  messages: tuple[dict[str, Any], ...]
  call_ids: tuple[str, ...]


def _plain(value: Any) -> Any:
  """A payload without what serialisers change."""
  if isinstance(value, Mapping):
    return {
      str(k): _plain(v) for k, v in sorted(value.items()) if v is not None
    }
  if isinstance(value, list | tuple):
    return [_plain(v) for v in value]
  if isinstance(value, float) and value.is_integer():
    return int(value)
  if isinstance(value, str):
    text = value.replace("\r\n", "\n").strip()
    return {"true": True, "false": False}.get(text.lower(), text)
  return value


def canonical(arguments: str) -> str:
  """Equal for payloads that differ only in how they were written.

  Key order, spaces, Python's False for JSON's false, 1.0 for 1, null for
  absent, spaces around a text.
  """
  try:
    value = json.loads(arguments or "{}", strict=False)
  except (ValueError, RecursionError):
    try:
      value = ast.literal_eval(arguments.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
      value = arguments
  try:
    return json.dumps(_plain(value), sort_keys=True)
  except (TypeError, ValueError, RecursionError):
    return arguments


class Book:
  """The conversations of one execution."""

  def __init__(self, renderer: render.Renderer, fmt: tool_parsers.Format):
    """Empty; `fmt` writes tool calls where the chat template cannot."""
    self._renderer, self._fmt = renderer, fmt
    self._has_tools = "tools" in renderer.chat_template
    self._has_calls = "tool_calls" in renderer.chat_template
    self._by_chain: dict[bytes, list[_Recorded]] = {}
    self._calls: dict[str, tuple[wire.ToolCall, wire.Said]] = {}
    self._payloads: dict[str, str] = {}
    self._raw: dict[bytes, str] = {}
    self._latest: dict[str, _Recorded] = {}

  def restore(
    self, messages: Sequence[wire.Message]
  ) -> tuple[wire.Message, ...]:
    """The messages with tool calls as the model made them.

    Calls of one completion that the harness sends one by one, each with its
    result behind it, are one message again.
    """
    out: list[wire.Message] = []
    owner, place = None, -1
    for message in messages:
      if message.role in ("system", "user"):
        owner = None
      if message.role != "assistant" or not message.tool_calls:
        out.append(message)
        continue
      message, said = self._restored(message)
      if said is not None and said is owner:
        first = out[place]
        text = "\n".join(t for t in (first.text, message.text) if t)
        calls = first.tool_calls + message.tool_calls
        out[place] = dataclasses.replace(first, text=text, tool_calls=calls)
      else:
        owner, place = said, len(out)
        out.append(message)
    return tuple(self._completed(m) for m in out)

  def _restored(
    self, message: wire.Message
  ) -> tuple[wire.Message, wire.Said | None]:
    """Payloads by id, and the completion that all of them come from."""
    calls, sources = [], []
    for call in message.tool_calls:
      known, said = self._calls.get(call.call_id, (call, None))
      same = known.name == call.name and (
        known.arguments == call.arguments
        or self._canonical(known) == self._canonical(call)
      )
      calls.append(known if same else call)
      sources.append(said if same else None)
    said = sources[0] if all(s is sources[0] for s in sources) else None
    return dataclasses.replace(message, tool_calls=tuple(calls)), said

  def _completed(self, message: wire.Message) -> wire.Message:
    """Text that the harness dropped beside the tool calls is put back."""
    if not message.tool_calls or wire.squeeze(message.text) not in _NOTHING:
      return message
    _, said = self._restored(message)
    if said is None or len(said.tool_calls) != len(message.tool_calls):
      return message
    return dataclasses.replace(message, text=said.text)

  def _canonical(self, call: wire.ToolCall) -> str:
    known = self._payloads.get(call.arguments)
    return canonical(call.arguments) if known is None else known

  def _key(self, message: wire.Message) -> bytes:
    if message.role == "assistant":
      calls = [(c.name, self._canonical(c)) for c in message.tool_calls]
      text = wire.squeeze(message.text)
      parts = ["assistant", "" if text in _NOTHING else text, calls]
    else:
      parts = [message.role, message.text]
    return wire.encode(parts)

  def _chain(
    self, messages: Sequence[wire.Message], tools: Sequence[wire.Tool]
  ) -> list[bytes]:
    """Hashes of the first 0, 1, … n messages."""
    start = wire.encode([t.schema() for t in tools])
    chain = [hashlib.blake2b(start, digest_size=16).digest()]
    for message in messages:
      chain.append(self._link(chain[-1], message))
    return chain

  def _link(self, chain: bytes, message: wire.Message) -> bytes:
    link = chain + self._key(message)
    return hashlib.blake2b(link, digest_size=16).digest()

  def _schemas(self, tools: Sequence[wire.Tool]) -> list[dict] | None:
    if tools and self._has_tools:
      return [t.schema() for t in tools]
    return None

  def _one(
    self, message: wire.Message, names: Mapping[str, str]
  ) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.role == "tool":
      out["tool_call_id"] = message.tool_call_id
      if message.tool_call_id in names:
        out["name"] = names[message.tool_call_id]
    if message.role != "assistant":
      return out
    raw = self._raw.get(self._key(message))
    if raw is not None:
      return {"role": "assistant", "content": raw}
    if message.reasoning:
      out["reasoning_content"] = message.reasoning
    calls = message.tool_calls
    if calls and self._has_calls:
      out["tool_calls"] = [
        {
          "id": c.call_id,
          "type": "function",
          "function": {"name": c.name, "arguments": decoded(c.arguments)},
        }
        for c in calls
      ]
    elif calls:
      written = [(c.name, json.dumps(decoded(c.arguments))) for c in calls]
      out["content"] = tool_parsers.write(self._fmt, message.text, written)
    return out

  def _with_tools(
    self, messages: list[dict[str, Any]], tools: Sequence[wire.Tool]
  ) -> list[dict[str, Any]]:
    """Describes the tools where the chat template does not."""
    if not tools or self._has_tools:
      return messages
    text = tool_parsers.describe(self._fmt, tools)
    if messages and messages[0]["role"] == "system":
      first, *rest = messages
      joined = f"{first['content']}\n\n{text}"
      return [{**first, "content": joined}, *rest]
    return [{"role": "system", "content": text}, *messages]

  def prompt(
    self, messages: Sequence[wire.Message], tools: Sequence[wire.Tool]
  ) -> Prompt:
    """The prompt of a request.

    Raises:
      ApiError: the chat template refuses the messages.
    """
    sent, tools = self.restore(messages), tuple(tools)
    chain = self._chain(sent, tools)
    names = {c.call_id: c.name for m in sent for c in m.tool_calls}
    schemas = self._schemas(tools)
    found, known = self._longest(sent, chain)
    if found is not None:
      # The same texts are kept once, however often they are sent.
      sent = (*found.sent, *sent[known:])
    boundary: types.Boundary = ""
    try:
      if found is not None:
        whole = [*found.messages, *(self._one(m, names) for m in sent[known:])]
        following = self._renderer.next_prompt(
          found.prompt.ids,
          found.completion_ids,
          whole,
          prompt_text=found.prompt.text,
          tools=schemas,
        )
        ids, text = following.ids, following.text
        boundary = following.step
      else:
        whole = self._with_tools([self._one(m, names) for m in sent], tools)
        text = self._renderer.text(whole, tools=schemas)
        ids = np.asarray(self._renderer.encode(text), np.int32)
    except render.TemplateError as e:
      raise wire.ApiError("invalid", str(e), "messages") from e
    tail = self._renderer.decode(ids[-8:]).rstrip()
    follows = found.call_id if found else None
    return Prompt(
      ids=ids,
      text=text,
      messages=tuple(whole),
      sent=sent,
      tools=tools,
      chain=chain[-1],
      parent=None if boundary == "split" else follows,
      boundary=boundary,
      follows=follows,
      known=known,
      opened=tail.endswith(tool_parsers.THINK),
    )

  def _longest(
    self, sent: Sequence[wire.Message], chain: Sequence[bytes]
  ) -> tuple[_Recorded | None, int]:
    """The longest recorded conversation that `sent` begins with."""
    for length in range(len(sent), 0, -1):
      candidates = self._by_chain.get(chain[length])
      if candidates:
        ids = [c.call_id for m in sent[:length] for c in m.tool_calls]

        # Of equal answers the one whose call ids came back, else the last.
        def agreeing(r: _Recorded, ids=ids) -> int:
          return sum(a == b for a, b in zip(r.call_ids, ids, strict=False))

        best = max(reversed(candidates), key=agreeing)
        return best, length
    return None, 0

  def add(
    self,
    prompt: Prompt,
    call_id: str,
    said: wire.Said,
    completion_ids: np.ndarray,
  ) -> None:
    """Records what was sampled after a prompt."""
    message = said.message()
    raw = self._renderer.completion_text(completion_ids)
    for call in said.tool_calls:
      self._calls[call.call_id] = (call, said)
      self._payloads[call.arguments] = canonical(call.arguments)
    self._raw[self._key(message)] = raw
    conversation = (*prompt.sent, message)
    chain = self._link(prompt.chain, message)
    before = self._by_chain.setdefault(chain, [])
    before[:] = [r for r in before if r.call_id != call_id]
    self._share(prompt)
    recorded = _Recorded(
      call_id=call_id,
      prompt=prompt,
      sent=conversation,
      completion_ids=completion_ids,
      messages=(*prompt.messages, {"role": "assistant", "content": raw}),
      call_ids=tuple(c.call_id for m in conversation for c in m.tool_calls),
    )
    before.append(recorded)
    self._latest[call_id] = recorded

  def _share(self, prompt: Prompt) -> None:
    """A conversation that grows keeps its ids once, not once a call."""
    ids, known = prompt.ids, self._latest.get(prompt.follows or "")
    if known is not None:
      known.prompt.text = None
    while known is not None and prompt.boundary in ("strict", "retokenized"):
      prompt = known.prompt
      prompt.ids = ids[: len(prompt.ids)]
      known = self._latest.get(prompt.follows or "")


def decoded(arguments: str) -> Any:
  """Arguments as an object where they are one, else as they came."""
  try:
    return json.loads(arguments or "{}", strict=False)
  except (ValueError, RecursionError):
    return arguments
