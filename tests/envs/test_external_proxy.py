"""A harness through gyre's own proxy: roles, branches, ids bit for bit."""

import asyncio
import importlib.util
import pathlib

import audited
import numpy as np

from gyre import config
from gyre.envs import external, scripted, serve
from gyre.envs.tasksets import shell
from gyre.harness import render
from gyre.harness.proxy import Proxy

ROOT = pathlib.Path(__file__).parents[2]
HARNESSES = ROOT / "experiments" / "harnesses"
# Its commands are long enough to be taken for summaries.
TASK = shell.make_task("move", 11, min_turns=3, max_turns=3)


def reference(task):
  spec = importlib.util.spec_from_file_location(
    "delegating_reference", HARNESSES / "delegating.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.reference(task.instruction, task.solution_turns)


def run(task, renderer, engine, options, compact):
  async def main():
    proxy = Proxy(engine, renderer, rollout=config.Rollout(), max_context=1024)
    async with serve.served(proxy.app) as path:
      return await external.run_external(
        task,
        proxy=proxy,
        socket=path,
        harness=config.Harness(
          name="command",
          path=str(HARNESSES),
          command="{python} {path}/delegating.py --tokens 64 --compact "
          f"{compact} {{instruction}}",
        ),
        sandbox=options,
        agent=config.Agent(),
        execution_id="g/0",
        group_id="g",
        index=0,
        seed=5,
        version=2,
      )

  return asyncio.run(main())


def test_compaction_and_a_sub_agent_are_branches(local_options):
  renderer = render.minimal_renderer(shell.training_text(120), 900)
  policy = scripted.ReplyingPolicy(reference(TASK), renderer, version=2)
  first, second, third = TASK.solution_turns
  compact = len(TASK.instruction) + len(first) - 1
  execution = run(TASK, renderer, policy, local_options, compact)
  assert execution.outcome.score == 1.0, execution.outcome
  calls = execution.calls
  said = [renderer.completion_text(c.completion_ids) for c in calls]
  step = TASK.instruction.split(", then ")[-1]
  assert list(zip([c.role for c in calls], said, strict=True)) == [
    ("main", first),
    ("main_summary", first),
    ("main", second),
    ("main_summary", f"{first}; {second}"),
    ("main", f"ask {step}"),
    ("sub_agent", third),
    ("sub_agent", "done"),
    ("main_summary", f"{first}; {second}; {third}"),
    ("main", "done"),
  ]
  # What goes on is extended as it was sampled; what is new opens a branch.
  parents = [c.parent_hint for c in calls]
  ids = [c.call_id for c in calls]
  assert parents == [
    None, ids[0], None, ids[2], None, None, ids[5], ids[4], None,
  ]  # fmt: skip
  assert execution.turns == 6
  for call, request in zip(calls, policy.requests, strict=True):
    assert call.versions.tolist() == [2] * len(call.completion_ids)
    np.testing.assert_array_equal(call.prompt_ids, request.ids)
  audited.check(calls, ["main_summary"] * 3 + ["main", "sub_agent"])
