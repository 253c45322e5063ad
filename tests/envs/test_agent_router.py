"""The built-in agent over a router whose cells change role meanwhile."""

import asyncio
import dataclasses
import hashlib

import numpy as np
import pytest
from small_model import small_model

from gyre import config
from gyre.envs import agent
from gyre.envs.shell import CommandResult
from gyre.envs.tasksets import shell
from gyre.harness import render
from gyre.rollout.jax_engine import JaxEngine
from gyre.rollout.router import Router

ROLLOUT = config.Rollout(max_slots=8, num_pages=512, page_size=8)
CELLS = ("cell 0", "cell 1")
_PROGRAMS = {}
SETTINGS = config.Agent(
  tool_format="line", max_turns=6, max_new_tokens=60, max_context=1024
)


class Stepwise(JaxEngine):
  """Can be interrupted after every token."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self._batcher._steps = lambda prefilling: 1


class Echo:
  """A shell that answers what it is told with a digest of it."""

  async def run(self, command, timeout_s=None):
    await asyncio.sleep(0.001)
    digest = hashlib.sha256(command.encode()).hexdigest()
    return CommandResult(output=digest[:6], exit_code=0)


async def _play(engines, params, renderer, executions, points, temperature):
  """Some executions of one task, with switches after so many tokens.

  Returns:
    The executions, and how many switches there were.
  """
  router = Router(patience_s=30.0)
  for name, e in engines.items():
    router.add(name, e)
  task = shell.make_task("write", 1, min_turns=1, max_turns=1)
  before = router.stats().generated_tokens

  async def run(i):
    name = f"g1/{i}"
    router.place(name, CELLS[0], version=0)
    execution = await agent.run_execution(
      task,
      box=Echo(),
      engine=router,
      renderer=renderer,
      agent=SETTINGS,
      rollout=dataclasses.replace(ROLLOUT, temperature=temperature),
      execution_id=name,
      group_id="g1",
      index=i,
      seed=3,
      version=0,
      deterministic=True,
    )
    router.forget(name)
    return execution

  works = [asyncio.ensure_future(run(i)) for i in range(executions)]
  switches = 0
  for point in points:
    while router.stats().generated_tokens - before < point:
      if all(w.done() for w in works):
        break
      await asyncio.sleep(0.001)
    else:
      source, target = CELLS[switches % 2], CELLS[1 - switches % 2]
      await router.drain(source, {e: target for e in router.executions(source)})
      await engines[source].sleep()
      await engines[source].wake()
      await engines[source].load_weights(params, 0)
      router.serve(source)
      switches += 1
  return await asyncio.gather(*works), switches


def _check(temperature, executions, switches):
  renderer = render.minimal_renderer(shell.training_text(40), 500)
  cfg, params = small_model(renderer.vocab_size, seed=2)

  async def main():
    engines = {}
    for name in CELLS:
      engines[name] = Stepwise(
        params,
        cfg,
        rollout=ROLLOUT,
        deterministic=True,
        name=name,
        programs=_PROGRAMS.get("programs"),
      )
      _PROGRAMS["programs"] = engines[name].programs
    for e in engines.values():
      await e.ready()
    options = engines, params, renderer, executions
    whole, _ = await _play(*options, [], temperature)
    tokens = sum(len(c.completion_ids) for e in whole for c in e.calls)
    rng = np.random.default_rng(0)
    # Each switch lets a few tokens of each execution pass.
    last = tokens - 4 * executions * 5
    points = np.sort(rng.choice(last, switches, replace=False))
    disturbed, done = await _play(*options, points.tolist(), temperature)
    for e in engines.values():
      await e.close()
    return whole, disturbed, done

  whole, disturbed, done = asyncio.run(main())
  assert done == switches
  for a, b in zip(whole, disturbed, strict=True):
    assert a.messages == b.messages
    assert a.turns == b.turns > 1 and a.truncated == b.truncated
    assert [c.call_id for c in a.calls] == [c.call_id for c in b.calls]
    for mine, its in zip(a.calls, b.calls, strict=True):
      np.testing.assert_array_equal(mine.prompt_ids, its.prompt_ids)
      np.testing.assert_array_equal(mine.completion_ids, its.completion_ids)
      np.testing.assert_array_equal(mine.logprobs, its.logprobs)
      assert mine.finish_reason == its.finish_reason != "abort"


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_the_agent_notices_none_of_fifty_switches(temperature):
  _check(temperature, executions=3, switches=50)
