"""The remote backend: sandboxes on other machines, over HTTP.

Harbor reaches its remote environments through Python classes of each
provider's own; there is no protocol to speak. This is a small one. Any
service may implement it; remote_server.py serves this machine's backends.

  POST   /v1/sandboxes              what to open -> 201 {"id", "workdir"}
  PUT    /v1/sandboxes/ID/tree      ?path=P  body: tar; before the first run
  POST   /v1/sandboxes/ID/start     -> {"workdir"}
  POST   /v1/sandboxes/ID/run       {"command", "timeout_s"} -> CommandResult
  POST   /v1/sandboxes/ID/stop      ends every process; keeps the files
  GET    /v1/sandboxes/ID/workspace -> tar; after stop
  GET    /v1/sandboxes/ID/file      ?path=/logs/...  -> bytes, 404, 409 why
  DELETE /v1/sandboxes/ID

The trees are "workspace" (laid out instead of the task's files), "environment"
(the task's files, with its Dockerfile), and absolute paths, shown read-only.
Errors have the body {"error": one line}: 422 when the task cannot be served,
401 without the token, 5xx when the service failed. Where the variable
GYRE_SANDBOX_TOKEN is set it is sent as a bearer token.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import shutil
from typing import Any

import httpx

from gyre.envs import limits, sandbox, shell, snapshot

_CALL_TIMEOUT_S = 120.0
TOKEN = "GYRE_SANDBOX_TOKEN"


def describe(request: sandbox.Request) -> dict[str, Any]:
  """The body that opens a sandbox: JSON, without files."""
  task, options = request.task, request.options
  return {
    "task_id": task.task_id,
    "image": task.image,
    "workdir": task.workdir,
    "env": dict(task.env) | dict(request.env),
    "deterministic": request.deterministic,
    "logs": request.logs,
    "has_workspace": request.workspace is not None,
    "gpus": task.limits.gpus,
    "cpus": task.limits.cpus,
    "build_timeout_s": task.limits.build_timeout_s,
    "limits": {
      "cpu_s": options.cpu_s,
      "wall_s": options.wall_s,
      "memory_mib": task.limits.memory_mib or options.memory_mib,
      "disk_mib": task.limits.storage_mib or options.disk_mib,
      "max_processes": options.max_processes,
      "max_files": options.max_files,
      "max_output_bytes": options.max_output_bytes,
    },
  }


class Remote:
  """See the module."""

  name = "remote"

  def __init__(self, request: sandbox.Request, directory: pathlib.Path):
    self._request = request
    self._dir = directory
    self._id = ""
    self._ended = False
    self.workdir = request.task.workdir
    self.workspace = directory / "workspace.tar"
    self.kept_without: list[str] = []
    token = os.environ.get(TOKEN, "")
    self._http = httpx.AsyncClient(
      base_url=request.options.remote_url,
      timeout=_CALL_TIMEOUT_S,
      headers={"Authorization": f"Bearer {token}"} if token else {},
    )

  @property
  def cpu_s(self) -> float:
    """0: the protocol does not tell."""
    return 0.0

  async def _call(
    self, method: str, path: str, *, allow: tuple[int, ...] = (), **options
  ) -> httpx.Response:
    """One exchange.

    Raises:
      sandbox.SandboxError: no answer, or an error that is not in `allow`.
    """
    try:
      answer = await self._http.request(method, path, **options)
    except httpx.HTTPError as e:
      raise sandbox.SandboxError(
        f"{self._request.options.remote_url}: {type(e).__name__} {e}"
      ) from e
    if answer.is_error and answer.status_code not in allow:
      raise sandbox.SandboxError(f"{answer.status_code}: {_reason(answer)}")
    return answer

  async def start(self) -> None:
    """Opens the sandbox, sends the files, starts the shell."""
    request = self._request
    answer = await self._call("POST", "/v1/sandboxes", json=describe(request))
    self._id = f"/v1/sandboxes/{answer.json()['id']}"
    trees = {
      path: snapshot.pack_files(files)
      for path, files in {
        "environment": request.task.files, **request.mounts
      }.items()
    }  # fmt: skip
    if request.workspace is not None:
      trees["workspace"] = await asyncio.to_thread(request.workspace.read_bytes)
    for path, tar in trees.items():
      await self._call(
        "PUT", f"{self._id}/tree", params={"path": path}, content=tar
      )
    timeout_s = request.task.limits.build_timeout_s + _CALL_TIMEOUT_S
    answer = await self._call("POST", f"{self._id}/start", timeout=timeout_s)
    self.workdir = str(answer.json()["workdir"])

  async def run(
    self, command: str, timeout_s: float | None = None
  ) -> shell.CommandResult:
    """See sandbox.Sandbox.run."""
    if self._ended:
      raise sandbox.SandboxError("remote: the sandbox is closed")
    limit = timeout_s or self._request.options.wall_s
    answer = await self._call(
      "POST",
      f"{self._id}/run",
      json={"command": command, "timeout_s": timeout_s},
      timeout=limit * 2 + _CALL_TIMEOUT_S,
    )
    fields = {f.name for f in dataclasses.fields(shell.CommandResult)}
    try:
      values = {k: v for k, v in answer.json().items() if k in fields}
      result = shell.CommandResult(**values)
    except (ValueError, TypeError, AttributeError) as e:
      raise sandbox.SandboxError(f"remote: not a result: {e}") from e
    # The service is bound to the limit; this side does not rely on it.
    room = self._request.options.max_output_bytes
    buffer = shell.OutputBuffer(room)
    buffer.add(result.output.encode("utf-8", "replace"))
    if len(result.output) > room:
      result = dataclasses.replace(result, output=buffer.text(), truncated=True)
    return result

  async def close_shell(self) -> pathlib.Path:
    """See sandbox.Sandbox.close_shell."""
    if not self._ended:
      self._ended = True
      await self._call("POST", f"{self._id}/stop")
      room = 2 * self._request.options.disk_mib * limits.MIB
      raw = self._dir / "raw.tar"
      await self._download(f"{self._id}/workspace", raw, 2 * room)
      self.kept_without = await asyncio.to_thread(
        snapshot.sanitize, raw, self.workspace, room
      )
    return self.workspace

  async def _download(self, path: str, target: pathlib.Path, room: int) -> None:
    try:
      async with self._http.stream("GET", path) as answer:
        if answer.is_error:
          await answer.aread()
          raise sandbox.SandboxError(f"{answer.status_code}: {_reason(answer)}")
        with target.open("wb") as f:
          async for data in answer.aiter_bytes():
            room -= len(data)
            if room < 0:
              raise sandbox.SandboxError("remote: the workspace is too large")
            f.write(data)
    except httpx.HTTPError as e:
      raise sandbox.SandboxError(f"remote: {type(e).__name__} {e}") from e

  async def read(self, path: str, max_bytes: int) -> tuple[bytes | None, str]:
    """See sandbox.Sandbox.read."""
    answer = await self._call(
      "GET", f"{self._id}/file", params={"path": path}, allow=(404, 409)
    )
    if answer.status_code == 404:
      return None, ""
    if answer.status_code == 409:
      return None, _reason(answer)
    if len(answer.content) > max_bytes:
      return None, f"{path} has {len(answer.content)} bytes, above {max_bytes}"
    return answer.content, ""

  async def close(self) -> None:
    """See sandbox.Sandbox.close."""
    self._ended = True
    if self._id:
      with contextlib.suppress(sandbox.SandboxError):
        await self._call("DELETE", self._id, allow=(404,))
      self._id = ""
    await self._http.aclose()
    await asyncio.to_thread(shutil.rmtree, self._dir, True)


def _reason(answer: httpx.Response) -> str:
  """The service's own line about what went wrong."""
  try:
    return str(answer.json()["error"])[:300]
  except (ValueError, KeyError, TypeError):
    return answer.text[:100].replace("\n", " ")


async def start(request: sandbox.Request) -> Remote:
  """Opens a sandbox at sandbox.remote_url.

  Raises:
    sandbox.SandboxError: no URL, no answer, or the service refuses.
  """
  if not request.options.remote_url:
    raise sandbox.SandboxError("sandbox.remote_url is empty")
  box = Remote(request, sandbox.new_directory())
  try:
    await box.start()
  except BaseException:
    await box.close()
    raise
  return box
