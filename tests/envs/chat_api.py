"""A model API for tests: Chat Completions by HTTP, what it says is given.

Serves one app to any number of executions, each by its key, and records its
calls, as gyre's own proxy does.
"""

import asyncio
import itertools
import json
import secrets

import numpy as np
from starlette import applications, responses, routing

from gyre import types


class ChatApi:
  """Answers with what `reply(messages, execution_id)` returns.

  Attributes:
    app: the ASGI app.
    asked: execution_id -> the messages of each call.
    opened, closed: keys, in order.
  """

  def __init__(self, reply, delay_s=0.0):
    self._reply, self.delay_s = reply, delay_s
    self._live, self._calls = {}, {}
    self.asked, self.opened, self.closed, self.cancelled = {}, [], [], 0
    self.app = applications.Starlette(
      routes=[
        routing.Route("/v1/chat/completions", self._chat, methods=["POST"])
      ]
    )

  def open(self, *, execution_id, group_id, seed, temperature=None):
    key = secrets.token_hex(8)
    self._live[key] = (execution_id, group_id)
    self._calls[key] = []
    self.opened.append((key, execution_id, seed, temperature))
    return key

  async def close(self, key):
    await asyncio.sleep(0)
    del self._live[key]
    self.closed.append(key)
    return tuple(self._calls.pop(key))

  async def _chat(self, request):
    key = request.headers["authorization"].removeprefix("Bearer ")
    if key not in self._live:
      return responses.JSONResponse({"error": {"message": "no key"}}, 401)
    execution_id, group_id = self._live[key]
    body = await request.json()
    asked = self.asked.setdefault(execution_id, [])
    asked.append(body["messages"])
    try:
      await asyncio.sleep(self.delay_s)
    except asyncio.CancelledError:
      self.cancelled += 1
      raise
    said = self._reply(body["messages"], execution_id)
    ids = np.frombuffer(said.encode(), np.uint8)
    prompt = np.frombuffer(json.dumps(body["messages"]).encode(), np.uint8)
    if key in self._calls:
      self._calls[key].append(
        types.Call(
          execution_id=execution_id,
          group_id=group_id,
          call_id=f"{len(self._calls[key]):04d}",
          prompt_ids=prompt,
          completion_ids=ids,
          logprobs=np.zeros(len(ids)),
          versions=np.zeros(len(ids)),
          finish_reason="stop",
        )
      )
    message = {"role": "assistant", "content": said}
    return responses.JSONResponse({"choices": [{"message": message}]})


def in_order(*said):
  """A reply function: the n-th call of an execution gets the n-th of these."""
  counts = {}

  def reply(messages, execution_id):
    del messages
    n = counts.setdefault(execution_id, itertools.count())
    return said[min(next(n), len(said) - 1)]

  return reply
