"""Responses of the proxy: finished ones, and those that wait for a call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from gyre.harness import recorder, wire

_NO_BUFFER = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ClientGone(Exception):
  """The client left, or takes nothing any more."""


class Reply:
  """A response that is finished."""

  def __init__(self, status: int, body: Any, headers: dict[str, str]):
    """status, body as JSON, further headers."""
    self._status, self._headers = status, headers
    self._body = b"" if body is None else wire.encode(body)

  async def __call__(self, scope, receive, send) -> None:
    """Sends it."""
    head = {
      "content-type": "application/json",
      "content-length": str(len(self._body)),
      **self._headers,
    }
    await send(
      {
        "type": "http.response.start",
        "status": self._status,
        "headers": [(k.encode(), v.encode()) for k, v in head.items()],
      }
    )
    await send({"type": "http.response.body", "body": self._body})


async def nobody(scope, receive, send) -> None:
  """Answers a client that left before it had asked."""
  del scope, receive, send


class Answering:
  """A response that waits for a call and follows the client's connection."""

  def __init__(
    self,
    api: ModuleType,
    execution: recorder.Execution,
    live: recorder.Live,
    asked: wire.Asked,
    headers: dict[str, str],
    *,
    send_timeout_s: float,
    keep_alive_s: float,
  ):
    """Takes over the caller's place as a waiter of `live`.

    Args:
      api: the translation module.
      execution: whose call it is.
      live: the call.
      asked: the request.
      headers: of the response.
      send_timeout_s: for the client to take what is sent.
      keep_alive_s: a silent stream is kept alive so often.
    """
    self._api, self._execution = api, execution
    self._live, self._asked, self._headers = live, asked, headers
    self._send_timeout_s, self._keep_alive_s = send_timeout_s, keep_alive_s

  async def __call__(self, scope, receive, send) -> None:
    """Answers; a client that leaves is left by us."""
    del scope
    delivered = False
    left = asyncio.ensure_future(self._leaves(receive))
    work = asyncio.ensure_future(self._answer(send))
    try:
      await asyncio.wait({left, work}, return_when=asyncio.FIRST_COMPLETED)
      if work.done():
        delivered = work.result()
    except (ClientGone, OSError):
      delivered = False
    finally:
      for task in (left, work):
        task.cancel()
      await asyncio.gather(left, work, return_exceptions=True)
      self._execution.release(self._live, delivered)

  async def _leaves(self, receive) -> None:
    while (await receive())["type"] != "http.disconnect":
      pass

  async def _send(self, send, message: dict[str, Any]) -> None:
    """Sends; a client that takes nothing for too long counts as gone."""
    try:
      async with asyncio.timeout(self._send_timeout_s):
        await send(message)
    except TimeoutError:
      raise ClientGone("the client reads nothing") from None

  async def _start(self, send, status: int, kind: str, **more: str) -> None:
    headers = {"content-type": kind, **self._headers, **more}
    await self._send(
      send,
      {
        "type": "http.response.start",
        "status": status,
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
      },
    )

  async def _answer(self, send) -> bool:
    """Sends the answer; whether it was one, and not an error."""
    live = self._live
    if self._asked.stream:
      # An error before the first token can still have a status of its own.
      if live.running and not live.ids:
        await live.changed(self._keep_alive_s)
      if live.running or live.error is None:
        return await self._stream(send)
    await live.settled()
    if live.error is not None or self._cut():
      fault = self._fault()
      await self._body(send, wire.STATUS[fault.kind], self._error(fault))
      return False
    await self._body(send, 200, self._api.render(self._asked, live.answer()))
    return True

  def _cut(self) -> bool:
    """The call was cancelled while this client waits: the key is closed."""
    return self._live.finish == "abort"

  def _fault(self) -> wire.ApiError:
    return self._live.error or wire.ApiError(
      "unavailable", "the call was cancelled"
    )

  def _error(self, e: wire.ApiError) -> dict[str, Any]:
    return self._api.error(e, self._headers["request-id"])

  async def _body(self, send, status: int, body: dict[str, Any]) -> None:
    data = wire.encode(body)
    length = {"content-length": str(len(data))}
    await self._start(send, status, "application/json", **length)
    await self._send(send, {"type": "http.response.body", "body": data})

  async def _stream(self, send) -> bool:
    live = self._live
    stream = self._api.Stream(
      self._asked, live.answer_id, live.start, len(live.prompt.ids)
    )

    async def push(events: Iterable[bytes], more: bool = True) -> None:
      body = b"".join(events)
      if body or not more:
        await self._send(
          send,
          {"type": "http.response.body", "body": body, "more_body": more},
        )

    await self._start(
      send, 200, "text/event-stream; charset=utf-8", **_NO_BUFFER
    )
    await push(stream.open())
    while live.running:
      await push(stream.update(*live.reader.visible()))
      if live.running and not await live.changed(self._keep_alive_s):
        await push([stream.ping()])
    if live.error is not None or self._cut():
      await push(stream.fail(self._fault()), more=False)
      return False
    await push(stream.close(live.answer()), more=False)
    return True
