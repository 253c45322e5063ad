"""The APIs of a run: one an engine, failures told, references loaded."""

import asyncio
import dataclasses

import external_config
import httpx
import pytest

from gyre import config
from gyre.envs import scripted
from gyre.envs.tasksets import shell
from gyre.harness.render import minimal_renderer
from gyre.rollout import engine as engine_lib
from gyre.runtime import apis, collect
from gyre.runtime.runner import Runner
from gyre.runtime.tasks import TaskSource
from gyre.types import Group


@pytest.fixture(scope="module")
def renderer():
  return minimal_renderer(shell.training_text(60), 512)


def made(**harness):
  """The configuration of the tests, with other options of the harness."""
  cfg = config.from_config_dict(external_config.get_config())
  line = cfg.harness.command.rpartition("; ")[2]
  own = dataclasses.replace(cfg.harness, **{"command": line, **harness})
  return dataclasses.replace(cfg, harness=own)


def dispatch(cfg, split="train"):
  task = TaskSource(cfg).get(split, 0)
  (one,) = collect.dispatches(Group("g", 0, task.task_id), task, 1, 0)
  return one


def test_one_proxy_serves_an_engine_until_the_end(renderer):
  engines = [scripted.ScriptedPolicy(["ls"], renderer, "line") for _ in "ab"]
  every = apis.Apis(made(), renderer)

  async def main():
    first, again = await asyncio.gather(*(every.of(engines[0]) for _ in "ab"))
    other = await every.of(engines[1])
    assert first is again and other.socket != first.socket
    key = first.proxy.open(execution_id="g/0", group_id="g", seed=0)
    async with httpx.AsyncClient(
      transport=httpx.AsyncHTTPTransport(uds=str(first.socket))
    ) as http:
      body = {"model": "x", "messages": [{"role": "user", "content": "hi"}]}
      url = "http://gyre/v1/chat/completions"
      head = {"Authorization": f"Bearer {key}"}
      said = (await http.post(url, json=body, headers=head)).json()
      assert said["choices"][0]["message"]["content"] == "ls"
      refused = await http.post(url, json=body)
      assert refused.status_code == 401
    assert len(await first.proxy.close(key)) == 1
    await every.close()
    assert not first.socket.exists() and not other.socket.exists()

  asyncio.run(main())


def test_the_reference_answers_the_harness(renderer):
  runner = Runner(made(), renderer)

  async def main():
    try:
      return await runner(None, 1.0)(dispatch(made(), "warm"))
    finally:
      await runner.close()

  execution = asyncio.run(main())
  assert execution.outcome.score == 1.0
  assert {c.role for c in execution.calls} >= {"main", "sub_agent"}
  assert execution.group_id == "g" and execution.execution_id == "g/0"


@pytest.mark.parametrize("asked, used", [(None, 32), (20, 20), (500, 32)])
def test_a_completion_is_as_long_as_configured_at_most(renderer, asked, used):
  """agent.max_new_tokens, or less where the harness asks for less."""
  assert made().agent.max_new_tokens == 32
  engine = scripted.ScriptedPolicy(["echo " + "a b " * 300], renderer, "line")
  every = apis.Apis(made(), renderer)

  async def main():
    api = await every.of(engine)
    key = api.proxy.open(execution_id="g/0", group_id="g", seed=0)
    async with httpx.AsyncClient(
      transport=httpx.AsyncHTTPTransport(uds=str(api.socket))
    ) as http:
      body = {"model": "x", "messages": [{"role": "user", "content": "hi"}]}
      body |= {} if asked is None else {"max_tokens": asked}
      url = "http://gyre/v1/chat/completions"
      head = {"Authorization": f"Bearer {key}"}
      said = (await http.post(url, json=body, headers=head)).json()
    calls = await api.proxy.close(key)
    await every.close()
    return said, calls

  said, (call,) = asyncio.run(main())
  assert said["choices"][0]["finish_reason"] == call.finish_reason == "length"
  assert said["usage"]["completion_tokens"] == used == len(call.completion_ids)
  assert call.sampling_asked.get("max_tokens") == asked
  assert call.sampling_used["max_new_tokens"] == used
  (request,) = engine.requests
  assert request.max_new_tokens == used


@pytest.mark.parametrize("kind", [engine_lib.EngineDown, KeyError])
def test_an_engine_that_is_down_ends_the_run(renderer, kind):
  """A harness only sees a status; its workspace is no outcome then."""

  class Down(scripted.ScriptedPolicy):
    async def generate(self, request, on_token=None):
      raise kind("closed")

  runner = Runner(made(), renderer)

  async def main():
    try:
      await runner(Down([], renderer, "line"), 1.0)(dispatch(made()))
    finally:
      await runner.close()

  with pytest.raises(kind, match="closed"):
    asyncio.run(main())


def test_a_request_at_fault_is_the_harness_s(renderer):
  class Refuses(scripted.ScriptedPolicy):
    async def generate(self, request, on_token=None):
      raise engine_lib.Rejected("too long")

  runner = Runner(made(command=made().harness.command + "; true"), renderer)

  async def main():
    try:
      engine = Refuses([], renderer, "line")
      return await runner(engine, 1.0)(dispatch(made()))
    finally:
      await runner.close()

  execution = asyncio.run(main())
  assert execution.outcome.score == 0.0 and not execution.calls


def test_a_harness_that_is_not_there_is_one_line(renderer):
  cfg = made(path="/nowhere/harness")
  with pytest.raises(config.ConfigError, match=r"harness\.path.*/nowhere"):
    Runner(cfg, renderer)


@pytest.mark.parametrize(
  "text,needle",
  [
    (None, "no Python file"),
    ("def reference(:\n", "invalid syntax"),
    ("import gyre_nowhere\n", "gyre_nowhere"),
    ("x = 1\n", "no function 'reference'"),
  ],
)
def test_a_reference_that_cannot_be_loaded_is_one_line(text, needle, tmp_path):
  path = tmp_path / "policy.py"
  if text is not None:
    path.write_text(text)
  with pytest.raises(config.ConfigError, match=needle) as error:
    apis.load_reference(str(path))
  assert str(path) in str(error.value) and "\n" not in str(error.value)
