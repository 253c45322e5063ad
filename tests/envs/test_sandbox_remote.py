"""The remote backend against the service itself, on loopback."""

import asyncio
import dataclasses
import threading
import time

import httpx
import pytest
import uvicorn

from gyre import config
from gyre.envs import remote, remote_server, sandbox, verifier
from gyre.envs import task as task_lib

TEST = b"""
[ "$(cat x)" = hi ] && s=passed || s=failed
r="{\\"name\\":\\"x\\",\\"status\\":\\"$s\\"}"
echo "{\\"results\\":{\\"tests\\":[$r]}}" > /logs/verifier/ctrf.json
"""
TASK = task_lib.Task(
  "r",
  "x",
  files={
    "seed": task_lib.FileSpec(b"seed\n", 0o640),
    "l": task_lib.FileSpec(link="/etc/passwd"),
  },
  tests={"test.sh": task_lib.FileSpec(TEST)},
  expected=("x",),
  env={"FROM_TASK": "1"},
)
TOKEN = "test-token"


@pytest.fixture(scope="module")
def url():
  """A running service with the process backend, which every host has."""
  app = remote_server.create_app(
    config.Sandbox(backends=("bubblewrap", "process"), max_output_bytes=4096),
    token=TOKEN,
  )
  server = uvicorn.Server(
    uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
  )
  thread = threading.Thread(target=server.run, daemon=True)
  thread.start()
  while not server.started:
    time.sleep(0.01)
  port = server.servers[0].sockets[0].getsockname()[1]
  yield f"http://127.0.0.1:{port}"
  server.should_exit = True
  thread.join(10)


@pytest.fixture
def options(url, monkeypatch):
  monkeypatch.setenv(remote.TOKEN, TOKEN)
  return config.Sandbox(backends=("remote",), remote_url=url)


def test_a_whole_execution(options):
  async def main():
    box = await sandbox.open_sandbox(options, TASK)
    try:
      first = await box.run("stat -c %a seed; readlink l; cd /tmp; X=2; f() { "
                            "echo f$X$FROM_TASK; }")  # fmt: skip
      second = await box.run("f; pwd; false")
      slow = await box.run("sleep 20", 0.4)
      third = await box.run("f; cd; echo hi > /app/x; mkfifo /app/p; seq 9999")
      path = await box.close_shell()
      outcome = await verifier.verify(TASK, path, options)
      return first, second, slow, third, outcome
    finally:
      await box.close()

  first, second, slow, third, outcome = asyncio.run(main())
  assert first.output == "640\n/etc/passwd\n"
  assert second.output.startswith("f21\n") and second.exit_code == 1
  assert slow.timed_out and not slow.restarted
  assert third.output.startswith("f21\n") and third.truncated
  assert (outcome.status, outcome.score) == ("scored", 1.0)


def refusal(options, task=TASK):
  with pytest.raises(sandbox.SandboxUnavailable) as e:
    asyncio.run(sandbox.open_sandbox(options, task))
  assert "\n" not in str(e.value)
  return str(e.value)


def test_refusals_are_named(options, monkeypatch):
  imaged = dataclasses.replace(TASK, image="org/image:3")
  assert "org/image:3" in refusal(options, imaged)
  monkeypatch.setenv(remote.TOKEN, "wrong")
  assert "401" in refusal(options)
  nobody = dataclasses.replace(options, remote_url="http://127.0.0.1:9")
  assert "127.0.0.1:9" in refusal(nobody)


def test_the_service_answers_nonsense_with_an_error(url):
  with httpx.Client(
    base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}
  ) as http:
    assert http.post("/v1/sandboxes", content=b"{").status_code == 400
    assert http.post("/v1/sandboxes/none/run", json={}).status_code == 404
    name = http.post("/v1/sandboxes", json={}).json()["id"]
    base = f"/v1/sandboxes/{name}"
    assert http.post(f"{base}/run", json={}).status_code == 409
    answer = http.post(f"{base}/start")
    assert answer.status_code == 400 and "task_id" in answer.json()["error"]
    http.put(f"{base}/tree", params={"path": "environment"}, content=b"junk")
    assert http.delete(base).status_code == 204
    assert http.delete(base).status_code == 404
  assert httpx.post(f"{url}/v1/sandboxes", json={}).status_code == 401


def test_limits_are_cut_to_the_services_own(options):
  async def main():
    box = await sandbox.open_sandbox(
      dataclasses.replace(options, memory_mib=1 << 20, max_files=1 << 20), TASK
    )
    try:
      return await box.run("ulimit -n; ulimit -d")
    finally:
      await box.close()

  assert asyncio.run(main()).output == f"256\n{1024 * 1024}\n"


def test_a_service_that_dies_is_a_sandbox_error(options):
  async def main():
    box = await sandbox.open_sandbox(options, TASK)
    box._http = httpx.AsyncClient(base_url="http://127.0.0.1:9")
    with pytest.raises(sandbox.SandboxError, match="ConnectError"):
      await box.run("true")
    await box.close()

  asyncio.run(main())
