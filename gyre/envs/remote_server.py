"""Serves this machine's sandboxes to other machines: remote.py's protocol.

  uvicorn.run(remote_server.create_app(config.Sandbox(), token="..."))

Limits that a client asks for are cut to this service's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import io
import pathlib
import tarfile
import tempfile
import uuid
from typing import Any

from starlette import applications, requests, responses, routing

from gyre import config
from gyre.envs import reports, sandbox
from gyre.envs import task as task_lib

_MAX_TREE = 1 << 30


@dataclasses.dataclass
class _Session:
  """One client's sandbox, from its description to its end."""

  body: dict[str, Any]
  trees: dict[str, bytes] = dataclasses.field(default_factory=dict)
  box: sandbox.Sandbox | None = None


class _Refused(Exception):
  def __init__(self, status: int, reason: str):
    super().__init__(reason)
    self.status, self.reason = status, reason


def _files(tar: bytes) -> dict[str, task_lib.FileSpec]:
  """A tar's members as task files, in memory."""
  out = {}
  with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
    for member in archive:
      name, mode = member.name.strip("/"), member.mode & 0o777
      if member.isdir():
        out[name] = task_lib.FileSpec(directory=True, mode=mode)
      elif member.issym():
        out[name] = task_lib.FileSpec(link=member.linkname, mode=mode)
      elif member.isreg():
        content = archive.extractfile(member).read()
        out[name] = task_lib.FileSpec(content, mode)
      else:
        raise _Refused(422, f"{name}: neither file, directory nor link")
  return out


class _Service:
  def __init__(self, options: config.Sandbox, token: str):
    self._options = options
    self._token = token
    self._sessions: dict[str, _Session] = {}

  def _session(self, request: requests.Request) -> _Session:
    session = self._sessions.get(request.path_params["id"])
    if session is None:
      raise _Refused(404, "no such sandbox")
    return session

  def _box(self, request: requests.Request) -> sandbox.Sandbox:
    box = self._session(request).box
    if box is None:
      raise _Refused(409, "the sandbox has not started")
    return box

  def authorize(self, request: requests.Request) -> None:
    given = request.headers.get("authorization", "").encode()
    if self._token and not hmac.compare_digest(
      given, f"Bearer {self._token}".encode()
    ):
      raise _Refused(401, "the token is wrong or missing")

  async def create(self, request: requests.Request) -> responses.Response:
    name = uuid.uuid4().hex
    self._sessions[name] = _Session(await request.json())
    return responses.JSONResponse({"id": name}, 201)

  async def put_tree(self, request: requests.Request) -> responses.Response:
    session = self._session(request)
    if session.box is not None:
      raise _Refused(409, "the sandbox has started")
    data = bytearray()
    async for part in request.stream():
      data += part
      if len(data) > _MAX_TREE:
        raise _Refused(422, f"more than {_MAX_TREE} bytes")
    session.trees[request.query_params["path"]] = bytes(data)
    return responses.Response(status_code=204)

  def _limited(self, asked: dict[str, Any]) -> config.Sandbox:
    """This service's options, where the client asks for less: that."""
    mine = self._options
    values = {
      key: min(type(getattr(mine, key))(value), getattr(mine, key))
      for key, value in asked.items()
      if hasattr(mine, key)
    }
    return dataclasses.replace(mine, **values)

  async def start(self, request: requests.Request) -> responses.Response:
    session = self._session(request)
    body, trees = session.body, dict(session.trees)
    workspace = trees.pop("workspace", None)
    task = task_lib.Task(
      str(body["task_id"]),
      "",
      files=_files(trees.pop("environment")) if "environment" in trees else {},
      workdir=body.get("workdir") or task_lib.WORKDIR,
      image=body.get("image") or "",
      limits=task_lib.Limits(
        gpus=int(body.get("gpus", 0)),
        cpus=int(body.get("cpus", 0)),
        build_timeout_s=float(body.get("build_timeout_s", 600)),
      ),
    )
    with contextlib.ExitStack() as stack:
      path = None
      if workspace is not None:
        file = stack.enter_context(tempfile.NamedTemporaryFile())
        file.write(workspace)
        file.flush()
        path = pathlib.Path(file.name)
      session.box = await sandbox.start_backend(
        sandbox.Request(
          task,
          self._limited(body.get("limits", {})),
          deterministic=bool(body.get("deterministic")),
          workspace=path,
          mounts={k: _files(v) for k, v in trees.items()},
          env=body.get("env", {}),
          logs=bool(body.get("logs")),
        )
      )
    session.trees.clear()
    return responses.JSONResponse({"workdir": session.box.workdir})

  async def run(self, request: requests.Request) -> responses.Response:
    body = await request.json()
    result = await self._box(request).run(
      str(body["command"]), body.get("timeout_s")
    )
    return responses.JSONResponse(dataclasses.asdict(result))

  async def stop(self, request: requests.Request) -> responses.Response:
    await self._box(request).close_shell()
    return responses.Response(status_code=204)

  async def workspace(self, request: requests.Request) -> responses.Response:
    path = self._box(request).workspace
    if not path.exists():
      raise _Refused(409, "the sandbox has not stopped")
    return responses.FileResponse(path, media_type="application/x-tar")

  async def file(self, request: requests.Request) -> responses.Response:
    data, why = await self._box(request).read(
      request.query_params["path"], reports.MAX_BYTES
    )
    if data is None:
      raise _Refused(409 if why else 404, why or "no such file")
    return responses.Response(data)

  async def delete(self, request: requests.Request) -> responses.Response:
    session = self._session(request)
    del self._sessions[request.path_params["id"]]
    if session.box is not None:
      await session.box.close()
    return responses.Response(status_code=204)

  async def close(self) -> None:
    sessions = list(self._sessions.values())
    self._sessions.clear()
    await asyncio.gather(*(s.box.close() for s in sessions if s.box))


def create_app(
  options: config.Sandbox, *, token: str = ""
) -> applications.Starlette:
  """The service as an ASGI application.

  Args:
    options: backends to use here, and the most that a client may ask for.
    token: the bearer token to require; empty requires none.
  """
  service = _Service(options, token)

  def guarded(handler):
    async def handle(request: requests.Request) -> responses.Response:
      try:
        service.authorize(request)
        return await handler(request)
      except _Refused as e:
        return responses.JSONResponse({"error": e.reason}, e.status)
      except task_lib.TaskError as e:
        return responses.JSONResponse({"error": str(e)}, 422)
      except (KeyError, TypeError, ValueError, tarfile.TarError) as e:
        reason = f"malformed request: {type(e).__name__} {e}"
        return responses.JSONResponse({"error": reason}, 400)
      except sandbox.SandboxUnavailable as e:
        return responses.JSONResponse({"error": str(e)}, 422)
      except sandbox.SandboxError as e:
        return responses.JSONResponse({"error": str(e)}, 500)

    return handle

  @contextlib.asynccontextmanager
  async def lifespan(_app):
    yield
    await service.close()

  one = "/v1/sandboxes/{id}"
  table = [
    ("/v1/sandboxes", "POST", service.create),
    (f"{one}/tree", "PUT", service.put_tree),
    (f"{one}/start", "POST", service.start),
    (f"{one}/run", "POST", service.run),
    (f"{one}/stop", "POST", service.stop),
    (f"{one}/workspace", "GET", service.workspace),
    (f"{one}/file", "GET", service.file),
    (one, "DELETE", service.delete),
  ]
  return applications.Starlette(
    routes=[
      routing.Route(path, guarded(handler), methods=[method])
      for path, method, handler in table
    ],
    lifespan=lifespan,
  )
