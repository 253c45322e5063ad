"""The proxy: what a black-box harness talks to instead of a model API.

An ASGI app that speaks OpenAI Chat Completions and Responses and Anthropic
Messages, so that a harness needs only its base URL and key changed. Each
execution has a key of its own, which names it. Every call is recorded with
the ids that went in and those that were sampled.

  proxy = Proxy(engine, renderer, rollout=config.rollout, max_context=4096)
  key = proxy.open(execution_id="g0/0", group_id="g0", seed=0)
  ...  # serve proxy.app; the harness runs with this key
  calls = await proxy.close(key)
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgspec
import starlette.applications
import starlette.requests
import starlette.routing

from gyre import config, types
from gyre.harness import (
  answering,
  anthropic_messages,
  openai_chat,
  openai_responses,
  recorder,
  render,
  roles,
  tool_parsers,
  wire,
)
from gyre.rollout import engine as engine_lib

Request = starlette.requests.Request

_PATIENCE = 4


class Proxy:
  """Serves executions, each by its key; records what they call.

  Attributes:
    app: the ASGI app.
    model: the model's name in the list of models; harnesses may use any.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    renderer: render.Renderer,
    *,
    rollout: config.Rollout,
    max_context: int,
    max_new_tokens: int | None = None,
    tool_format: str = "",
    model: str = "policy",
    max_body_bytes: int = 32 << 20,
    max_live: int = 64,
    body_timeout_s: float = 60.0,
    send_timeout_s: float = 60.0,
    keep_alive_s: float = 10.0,
    clock: Callable[[], float] = time.time,
  ):
    """Serves nobody yet.

    Args:
      engine: samples.
      renderer: messages as ids.
      rollout: the trainer's sampling, used in place of the harness's.
      max_context: most tokens of a prompt and its completion together.
      max_new_tokens: most tokens of one completion; None for what fits.
      tool_format: of tool_parsers.FORMATS; "" for what the chat template
        teaches.
      model: see above.
      max_body_bytes: of a request.
      max_live: calls of one execution at a time.
      body_timeout_s: for a request to arrive.
      send_timeout_s: for a client to take what is sent.
      keep_alive_s: a silent stream is kept alive so often.
      clock: seconds since the epoch, for the records.

    Raises:
      ValueError: no such tool format.
    """
    if tool_format and tool_format not in tool_parsers.FORMATS:
      known = ", ".join(tool_parsers.FORMATS)
      raise ValueError(f"no tool format {tool_format!r}: {known}")
    self._engine, self._renderer = engine, renderer
    self._fmt = (
      tool_parsers.FORMATS[tool_format]
      if tool_format
      else tool_parsers.detect(renderer.chat_template)
    )
    self._rollout = rollout
    self._limits = {
      "max_context": max_context,
      "max_new_tokens": max_new_tokens,
      "max_live": max_live,
    }
    self.model = model
    self._max_body, self._body_timeout_s = max_body_bytes, body_timeout_s
    self._timeouts = {
      "send_timeout_s": send_timeout_s,
      "keep_alive_s": keep_alive_s,
    }
    self._clock = clock
    self._executions: dict[str, recorder.Execution] = {}
    # A fault of ours is told in the API's shape too; the server still logs it.
    self.app = starlette.applications.Starlette(
      routes=self._routes(),
      exception_handlers={
        Exception: self._fault,
        404: self._unknown,
        405: self._unknown,
      },
    )

  # For the trainer.

  def open(
    self,
    *,
    execution_id: str,
    group_id: str,
    seed: int,
    temperature: float | None = None,
    role_of: roles.RoleOf | None = None,
  ) -> str:
    """Begins to serve an execution.

    Args:
      execution_id, group_id: of the record.
      seed: of the execution; each call has its own.
      temperature: replaces rollout.temperature (evaluation).
      role_of: overrides how a call's role is found (roles.deduce).

    Returns:
      Its key, which cannot be guessed.
    """
    key = f"sk-gyre-{secrets.token_hex(24)}"
    self._executions[key] = recorder.Execution(
      self._engine,
      self._renderer,
      self._fmt,
      execution_id=execution_id,
      group_id=group_id,
      seed=seed,
      temperature=(
        self._rollout.temperature if temperature is None else temperature
      ),
      rollout=self._rollout,
      role_of=role_of,
      clock=self._clock,
      **self._limits,
    )
    return key

  def calls(self, key: str) -> tuple[types.Call, ...]:
    """The calls recorded so far, in order of start.

    Raises:
      KeyError: the key is not served.
    """
    return self._executions[key].calls()

  async def close(self, key: str) -> tuple[types.Call, ...]:
    """Serves the key no longer; live calls are cancelled at the engine.

    Returns:
      All calls, in order of start; what was cancelled as far as it came.

    Raises:
      KeyError: the key is not served.
    """
    return await self._executions.pop(key).close()

  # For the harness.

  def _routes(self) -> list[starlette.routing.Route]:
    routes = [starlette.routing.Route("/", self._root, methods=["GET"])]
    apis = {
      "/chat/completions": openai_chat,
      "/responses": openai_responses,
      "/messages": anthropic_messages,
    }
    for prefix in ("/v1", ""):
      for path, api in apis.items():
        routes.append(self._route(prefix + path, api, self._complete))
      path = f"{prefix}/messages/count_tokens"
      routes.append(self._route(path, anthropic_messages, self._count))
      for path in (f"{prefix}/models", f"{prefix}/models/{{name:path}}"):
        routes.append(
          starlette.routing.Route(path, self._models, methods=["GET"])
        )
    every = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    routes.append(
      starlette.routing.Route("/{path:path}", self._unknown, methods=every)
    )
    return routes

  def _route(self, path, api: ModuleType, handle) -> starlette.routing.Route:
    async def endpoint(request: Request):
      headers = _headers()
      try:
        return await handle(request, api, headers)
      except wire.ApiError as e:
        return self._refuse(e, api, headers)
      except starlette.requests.ClientDisconnect:
        return answering.nobody

    return starlette.routing.Route(path, endpoint, methods=["POST"])

  def _refuse(
    self, e: wire.ApiError, api: ModuleType, headers: dict[str, str]
  ) -> answering.Reply:
    if e.kind in ("too_large", "timeout"):
      # The rest of the body is not read.
      headers = headers | {"connection": "close"}
    body = api.error(e, headers["request-id"])
    return answering.Reply(wire.STATUS[e.kind], body, headers)

  def _execution(self, request: Request) -> recorder.Execution:
    key = _key(request)
    execution = self._executions.get(key)
    if execution is None:
      shown = f"{key[:11]}..." if key else "none given"
      raise wire.ApiError("authentication", shown)
    return execution

  async def _read(self, request: Request) -> dict[str, Any]:
    """The body, as far as it is allowed to come.

    Raises:
      ApiError: too long, too slow, or no JSON object.
    """
    limit, parts, size = self._max_body, [], 0
    try:
      async with asyncio.timeout(self._body_timeout_s):
        async for part in request.stream():
          size += len(part)
          if size > limit:
            # Read on for a while: who still writes would not read the error.
            parts.clear()
            if size <= _PATIENCE * limit:
              continue
            break
          parts.append(part)
    except TimeoutError:
      raise wire.ApiError(
        "timeout",
        f"the request did not arrive within {self._body_timeout_s} s",
      ) from None
    if size > limit:
      raise wire.ApiError("too_large", f"the request exceeds {limit} bytes")
    try:
      body = msgspec.json.decode(b"".join(parts))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
      raise wire.ApiError(
        "invalid", f"the body is not valid JSON: {e}"
      ) from None
    wire.require(isinstance(body, dict), "the body must be a JSON object")
    return body

  async def _complete(
    self, request: Request, api: ModuleType, headers: dict[str, str]
  ):
    execution = self._execution(request)
    asked = api.parse(await self._read(request))
    again = request.headers.get("x-stainless-retry-count", "0") != "0"
    live = await execution.begin(asked, retry=again)
    return answering.Answering(
      api, execution, live, asked, headers, **self._timeouts
    )

  async def _count(
    self, request: Request, api: ModuleType, headers: dict[str, str]
  ):
    execution = self._execution(request)
    asked = api.parse_count(await self._read(request))
    tokens = len(execution.prompt(asked).ids)
    return answering.Reply(200, api.render_count(tokens), headers)

  async def _models(self, request: Request):
    headers = _headers()
    api = _api_of(request)
    theirs = api is anthropic_messages
    try:
      self._execution(request)
    except wire.ApiError as e:
      return self._refuse(e, api, headers)
    name = request.path_params.get("name", "")
    model = _model(name or self.model, theirs)
    if name:
      return answering.Reply(200, model, headers)
    if theirs:
      ids = {"first_id": self.model, "last_id": self.model, "has_more": False}
      return answering.Reply(200, {"data": [model], **ids}, headers)
    return answering.Reply(200, {"object": "list", "data": [model]}, headers)

  async def _fault(self, request: Request, e: Exception):
    error = wire.ApiError("internal", f"the proxy failed: {type(e).__name__}")
    return self._refuse(error, _api_of(request), _headers())

  async def _root(self, request: Request):
    del request
    return answering.Reply(200, {"gyre": "proxy"}, _headers())

  async def _unknown(self, request: Request, e: Exception | None = None):
    del e
    path = " ".join(request.url.path.split())
    where = f"{request.method} {path}"
    e = wire.ApiError("not_found", f"nothing is served at {where}")
    return self._refuse(e, _api_of(request), _headers())


def _headers() -> dict[str, str]:
  name = f"req_{secrets.token_hex(12)}"
  return {"request-id": name, "x-request-id": name}


def _api_of(request: Request) -> ModuleType:
  """The API that a client speaks, as far as path and headers tell."""
  theirs = "anthropic-version" in request.headers
  theirs = theirs or "/messages" in request.url.path
  return anthropic_messages if theirs else openai_chat


def _key(request: Request) -> str:
  """The key of a request, from either header."""
  kind, _, token = request.headers.get("authorization", "").partition(" ")
  if kind.lower() == "bearer" and token.strip():
    return token.strip()
  return request.headers.get("x-api-key", "").strip()


def _model(name: str, theirs: bool) -> dict[str, Any]:
  if theirs:
    return {
      "type": "model",
      "id": name,
      "display_name": name,
      "created_at": "1970-01-01T00:00:00Z",
    }
  return {"id": name, "object": "model", "created": 0, "owned_by": "gyre"}
