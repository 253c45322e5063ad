"""Runs one execution: the agent loop in a sandbox, then the verifier."""

from __future__ import annotations

from gyre.config import Config
from gyre.envs import agent, scripted
from gyre.envs.tasksets import shell
from gyre.harness.render import Renderer
from gyre.rollout.engine import Engine
from gyre.runtime.collect import Dispatch, RunFn
from gyre.types import Execution


class Runner:
  """Makes run functions for an engine, or for the reference solutions."""

  def __init__(self, config: Config, renderer: Renderer):
    """Takes what every execution shares.

    Args:
      config: agent, sandbox, rollout and run sections.
      renderer: messages to token ids.
    """
    self._config, self._renderer = config, renderer
    self._examples = tuple(shell.example_tasks(config.agent.examples))

  def __call__(self, engine: Engine | None, temperature: float) -> RunFn:
    """Returns the function that runs and verifies one execution.

    Args:
      engine: the policy; None replays each task's reference solution.
      temperature: of sampling.
    """

    async def run(dispatch: Dispatch) -> Execution:
      config, policy = self._config, engine
      if policy is None:
        policy = scripted.ScriptedPolicy(
          dispatch.task, self._renderer, config.agent.tool_format
        )
      return await agent.run_and_verify(
        dispatch.task,
        sandbox=config.sandbox,
        agent=config.agent,
        deterministic=config.run.deterministic,
        engine=policy,
        renderer=self._renderer,
        rollout=config.rollout,
        execution_id=dispatch.execution_id,
        group_id=dispatch.group_id,
        index=dispatch.index,
        seed=dispatch.seed,
        version=dispatch.version,
        examples=self._examples,
        temperature=temperature,
        engine_name="scripted" if engine is None else "engine 0",
      )

    return run
