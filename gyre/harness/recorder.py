"""One execution's model calls: begun, joined, resumed, recorded.

A call belongs to the request and not to the connection. A client that leaves
cancels it at the engine, and the partial stays; one that asks the same again
gets the rest of it, or the answer that it never received. Either way there
is one call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gyre import config, types
from gyre.harness import (
  conversation,
  reading,
  render,
  roles,
  tool_parsers,
  wire,
)
from gyre.rollout import calls as calls_lib
from gyre.rollout import engine as engine_lib

_LOG = logging.getLogger(__name__)


class Live:
  """A call: sampling, or finished.

  Attributes:
    number: of the call in its execution, 0-based.
    call_id: the same as in the record.
    answer_id: names the answer to clients.
    asked: the request, without its messages.
    prompt: its prompt, with them.
    reader: reads what is sampled.
    said: the completion, once finished.
    finish: "stop", "length", "tool_calls" or "abort", once finished.
    error: why it failed, or None.
    running: the engine is at work.
    waiters: clients that wait for it.
    delivered: a client has the whole answer.
  """

  def __init__(
    self,
    number: int,
    answer_id: str,
    asked: wire.Asked,
    prompt: conversation.Prompt,
    reader: reading.Reader,
    sampling: Mapping[str, Any],
    start: float,
  ):
    self.number, self.call_id = number, f"{number:04d}"
    self.answer_id, self.asked, self.prompt = answer_id, asked, prompt
    self.reader, self.sampling, self.start = reader, dict(sampling), start
    self.end = start
    self.ids: list[int] = []
    self.logprobs: list[float] = []
    self.versions: list[int] = []
    self.said: wire.Said | None = None
    self.finish = ""
    self.error: wire.ApiError | None = None
    self.running = False
    self.waiters = 0
    self.delivered = False
    self.stop = asyncio.Event()
    self._changed = asyncio.Event()

  def take(self, token: int, logprob: float, version: int) -> None:
    """A sampled token; ends the call where it completes a stop text."""
    if self.reader.stop_at is not None:
      return
    self.ids.append(int(token))
    self.logprobs.append(float(logprob))
    self.versions.append(int(version))
    if self.reader.feed(int(token)):
      self.stop.set()
    self.notify()

  def notify(self) -> None:
    """Wakes those who wait for a change."""
    self._changed.set()
    self._changed = asyncio.Event()

  async def changed(self, timeout_s: float | None = None) -> bool:
    """Waits for the next change; False if none came in time."""
    event = self._changed
    try:
      async with asyncio.timeout(timeout_s):
        await event.wait()
    except TimeoutError:
      return False
    return True

  async def settled(self) -> None:
    """Waits until the engine is at work no more."""
    while self.running:
      await self.changed()

  def answer(self) -> wire.Answer:
    """The finished completion."""
    return wire.Answer(
      answer_id=self.answer_id,
      created=self.start,
      said=self.said or wire.Said(),
      finish=self.finish,
      stop_sequence=self.reader.stop_sequence,
      prompt_tokens=len(self.prompt.ids),
      completion_tokens=len(self.ids),
    )


class Execution:
  """The calls of one key."""

  def __init__(
    self,
    engine: engine_lib.Engine,
    renderer: render.Renderer,
    fmt: tool_parsers.Format,
    *,
    execution_id: str,
    group_id: str,
    seed: int,
    temperature: float,
    rollout: config.Rollout,
    max_context: int,
    max_new_tokens: int | None = None,
    max_live: int = 64,
    role_of: roles.RoleOf | None = None,
    clock: Callable[[], float] = time.time,
  ):
    """No call yet.

    Args:
      engine: samples.
      renderer: messages as ids.
      fmt: of tool calls.
      execution_id, group_id, seed: of the record and of each call's seed.
      temperature: replaces what the harness asks for.
      rollout: top_p and top_k, likewise.
      max_context: prompt and completion together.
      max_new_tokens: most tokens of one completion, beside what the harness
        asks for.
      max_live: most calls at once.
      role_of: overrides roles.deduce.
      clock: seconds since the epoch.
    """
    self._engine, self._renderer, self._fmt = engine, renderer, fmt
    self._names = {"execution_id": execution_id, "group_id": group_id}
    self._seed, self._temperature, self._rollout = seed, temperature, rollout
    self._max_context, self._max_new = max_context, max_new_tokens
    self._max_live, self._role_of, self._clock = max_live, role_of, clock
    self._book = conversation.Book(renderer, fmt)
    self._lives: list[Live] = []
    self._same: dict[bytes, list[Live]] = {}
    self._answers: dict[str, Live] = {}
    self._tasks: set[asyncio.Task] = set()
    self._number = 0
    self._closed = False

  # Requests.

  def prompt(self, asked: wire.Asked) -> conversation.Prompt:
    """The prompt of a request.

    Raises:
      ApiError: it follows an unknown answer, the chat template refuses the
        messages, or the context has no room for a completion.
    """
    messages = asked.messages
    if asked.previous:
      before = self._answers.get(asked.previous)
      if before is None or before.said is None:
        raise wire.ApiError(
          "invalid",
          f"no response {asked.previous!r} to follow",
          "previous_response_id",
        )
      # Instructions are not carried over, as the API has it.
      old = before.prompt.sent[bool(before.asked.echo.get("instructions")) :]
      first = bool(asked.echo.get("instructions"))
      head, new = messages[:first], messages[first:]
      messages = (*head, *old, before.said.message(), *new)
    return self._book.prompt(messages, asked.tools)

  async def begin(self, asked: wire.Asked, retry: bool = False) -> Live:
    """A call for the request, of which the caller is now a waiter.

    Args:
      asked: the request.
      retry: the client says that it has asked this before.

    Returns:
      A call under way or finished: a new one; or the one that the same
      request began when its client left, or (retry) whose answer it lost.

    Raises:
      ApiError: the request cannot be served.
    """
    prompt = self.prompt(asked)
    digest = _digest(asked, prompt)
    while True:
      if self._closed:
        raise wire.ApiError("authentication", "the key is no longer served")
      live = self._earlier(digest, retry)
      if live is None:
        live = self._new(asked, prompt, digest)
        break
      if live.running and live.stop.is_set():
        await live.settled()
        continue
      if not live.running and (live.finish == "abort" or live.error):
        self._start(live, asked)
      break
    live.waiters += 1
    return live

  def _earlier(self, digest: bytes, retry: bool) -> Live | None:
    """The call that a repeated request means, if there is one."""
    same = self._same.get(digest, [])
    for live in same:
      left = live.running and not live.waiters
      if left or (not live.running and not live.delivered):
        return live
    return same[-1] if same and retry else None

  def _new(
    self, asked: wire.Asked, prompt: conversation.Prompt, digest: bytes
  ) -> Live:
    if sum(live.running for live in self._lives) >= self._max_live:
      raise wire.ApiError(
        "busy", f"{self._max_live} calls of this key are being answered"
      )
    room = self._max_context - len(prompt.ids)
    if room < 1:
      raise wire.ApiError(
        "context",
        f"prompt is too long: {len(prompt.ids) + 1} tokens > "
        f"{self._max_context} maximum",
        "messages",
      )
    number, self._number = self._number, self._number + 1
    sampling = {
      "temperature": self._temperature,
      "top_p": self._rollout.top_p,
      "top_k": self._rollout.top_k,
      "max_new_tokens": self._most(asked, room),
      "seed": calls_lib.call_seed(
        self._seed, self._names["group_id"], self._names["execution_id"], number
      ),
    }
    reader = reading.Reader(
      self._renderer,
      self._fmt,
      tools=prompt.tools,
      stop=asked.stop,
      opened=prompt.opened,
      call_tools=asked.call_tools,
      parallel=asked.parallel,
      show_reasoning=asked.show_reasoning,
    )
    live = Live(
      number,
      self._name("answer", number),
      dataclasses.replace(asked, messages=()),
      prompt,
      reader,
      sampling,
      self._clock(),
    )
    self._lives.append(live)
    self._same.setdefault(digest, []).append(live)
    self._answers[live.answer_id] = live
    self._start(live, asked)
    return live

  def _most(self, asked: wire.Asked, room: int) -> int:
    limits = (room, asked.max_tokens, self._max_new)
    return min(n for n in limits if n is not None)

  def _name(self, *parts: Any) -> str:
    """24 hexadecimal digits that no other call of the run has."""
    text = "\0".join(map(str, (*self._names.values(), self._seed, *parts)))
    return hashlib.sha256(text.encode()).hexdigest()[:24]

  def release(self, live: Live, delivered: bool) -> None:
    """The caller of `begin` waits no more; the last one to leave cancels."""
    live.waiters -= 1
    live.delivered = live.delivered or delivered
    if live.running and not live.waiters:
      live.stop.set()

  # The engine.

  def _start(self, live: Live, asked: wire.Asked) -> None:
    room = self._max_context - len(live.prompt.ids)
    live.sampling["max_new_tokens"] = max(
      self._most(asked, room), min(len(live.ids), room), 1
    )
    live.running, live.finish, live.error = True, "", None
    live.stop = asyncio.Event()
    task = asyncio.get_running_loop().create_task(self._run(live))
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)

  async def _run(self, live: Live) -> None:
    """Samples until the call is whole, failed or left."""
    known = len(live.ids)
    sampling = dict(live.sampling)
    sampling["max_new_tokens"] -= known
    try:
      if sampling["max_new_tokens"]:
        request = engine_lib.Request(
          ids=np.concatenate([live.prompt.ids, live.ids]).astype(np.int32),
          stop_ids=self._renderer.stop_ids,
          request_id=f"{self._names['execution_id']}#{live.number}",
          execution_id=self._names["execution_id"],
          **sampling,
        )
        completion = await calls_lib.generate(
          self._engine, request, until=live.stop, on_token=live.take
        )
        for token in zip(
          completion.ids[len(live.ids) - known :],
          completion.logprobs[len(live.ids) - known :],
          completion.versions[len(live.ids) - known :],
          strict=True,
        ):
          live.take(*token)
        self._settle(live, completion.finish_reason)
      else:
        self._settle(live, "length")
    except engine_lib.Rejected as e:
      live.error = wire.ApiError("invalid", str(e))
    except engine_lib.EngineError as e:
      live.error = wire.ApiError("unavailable", str(e))
    except Exception as e:
      # No failure that engines tell of: a fault of ours. The client learns
      # that there was one, the log which, and the run ends by its engine.
      kind = type(e).__name__
      live.error = wire.ApiError("internal", f"the model failed: {kind}")
      _LOG.error(
        "call %s of %s failed: %s: %s",
        live.call_id,
        self._names["execution_id"],
        kind,
        " ".join(str(e).split()),
      )
    finally:
      try:
        if live.error is not None or not live.finish:
          self._settle(live, "abort")
      finally:
        live.running = False
        live.notify()

  def _settle(self, live: Live, reason: str) -> None:
    """Reads the completion and enters it among the conversations."""
    if live.reader.stop_at is not None:
      reason = "stop"
    ids = np.asarray(live.ids, np.int32)
    live.finish, live.end = reason, self._clock()
    live.said = live.reader.finish(
      ids,
      reason in ("length", "abort"),
      lambda i: live.asked.call_prefix + self._name(live.number, i),
    )
    if reason == "stop" and live.said.tool_calls:
      live.finish = "tool_calls"
    if len(ids):
      self._book.add(live.prompt, live.call_id, live.said, ids)

  # The record.

  def calls(self) -> tuple[types.Call, ...]:
    """The finished calls, partial ones included, in order of start."""
    done = [x for x in self._lives if x.ids and not x.running]
    named = roles.of_all([_note(x) for x in done], self._role_of)
    return tuple(
      self._call(x, role) for x, role in zip(done, named, strict=True)
    )

  def _call(self, live: Live, role: str) -> types.Call:
    stopped = live.finish in ("stop", "tool_calls")
    used = dict(live.sampling)
    if live.asked.stop:
      used["stop"] = list(live.asked.stop)
    return types.Call(
      **self._names,
      call_id=live.call_id,
      parent_hint=live.prompt.parent,
      boundary=live.prompt.boundary,
      role=role,
      prompt_ids=live.prompt.ids,
      completion_ids=live.ids,
      logprobs=live.logprobs,
      versions=live.versions,
      finish_reason="stop" if stopped else live.finish,
      t_start=live.start,
      t_end=live.end,
      engine=getattr(self._engine, "name", type(self._engine).__name__),
      sampling_asked=dict(live.asked.sampling),
      sampling_used=used,
    )

  async def close(self) -> tuple[types.Call, ...]:
    """Cancels what is under way; no more calls begin."""
    self._closed = True
    for live in self._lives:
      live.stop.set()
    while self._tasks:
      await asyncio.wait(set(self._tasks))
    return self.calls()


def _digest(asked: wire.Asked, prompt: conversation.Prompt) -> bytes:
  """Equal for requests that a client repeats."""
  parts = repr((asked.stop, asked.call_tools, asked.parallel)).encode()
  return hashlib.blake2b(prompt.chain + parts, digest_size=16).digest()


def _note(live: Live) -> roles.Note:
  """What a call's messages tell of its role."""
  sent, said = live.prompt.sent, live.said or wire.Said()
  users = [m.text for m in sent if m.role == "user"]
  told = [
    m.text for m in sent[live.prompt.known :] if m.role in ("system", "user")
  ]
  return roles.Note(
    call_id=live.call_id,
    parent=live.prompt.follows,
    system="\n".join(m.text for m in sent if m.role == "system"),
    tools=tuple(sorted(t.name for t in live.prompt.tools)),
    told="\n".join(told),
    opening=tuple(users),
    last_user=users[-1] if users else "",
    said=said.text,
    arguments=tuple(
      text for call in said.tool_calls for text in _texts_of(call.arguments)
    ),
  )


def _texts_of(arguments: str) -> list[str]:
  """Every text within a payload."""
  value = conversation.decoded(arguments)
  out, left = [], [value]
  while left:
    value = left.pop()
    if isinstance(value, str):
      out.append(value)
    elif isinstance(value, Mapping):
      left.extend(value.values())
    elif isinstance(value, list):
      left.extend(value)
  return out
