"""Runs one execution: an agent in a sandbox, then the verifier.

The agent is the built-in loop, or a harness that talks to the engine through
its API.
"""

from __future__ import annotations

import contextlib

from gyre.config import Config, ConfigError
from gyre.envs import agent, external, launchers, scripted, verifier
from gyre.envs.task import Task
from gyre.envs.tasksets import shell
from gyre.harness.render import Renderer
from gyre.rollout.engine import Engine
from gyre.runtime import apis
from gyre.runtime.collect import Dispatch, RunFn
from gyre.types import Execution


def _kinds(config: Config) -> set[str]:
  """Kinds of all tasks that the configuration can draw."""
  tasks, warm = config.tasks, config.warm_start
  weights = [tasks.kinds or dict.fromkeys(shell.available(tasks.max_turns), 1)]
  if warm.steps and warm.kinds:
    weights.append(warm.kinds)
  return {k for kinds in weights for k, weight in kinds.items() if weight > 0}


class Runner:
  """Makes run functions for an engine, or for the reference solutions."""

  def __init__(self, config: Config, renderer: Renderer):
    """Takes what every execution shares.

    Args:
      config: agent, harness, sandbox, rollout, run, tasks and warm_start
        sections.
      renderer: messages to token ids.

    Raises:
      ConfigError: worked examples are asked for of a kind that has none, or a
        harness that is not there.
    """
    self._config, self._renderer = config, renderer
    self._outcomes = verifier.KnownOutcomes()
    self._apis = apis.Apis(config, renderer)
    self._reference: apis.Reference | None = None
    if config.harness.is_external:
      launchers.check_installed(config.harness)
    if config.warm_start.policy:
      self._reference = apis.load_reference(config.warm_start.policy)
    n = config.agent.examples
    self._easy = tuple(shell.example_tasks(n))
    self._of_kind: dict[str, tuple[Task, ...]] = {}
    if config.agent.examples_of == "kind":
      for kind in sorted(_kinds(config)):
        try:
          examples = shell.example_tasks(
            n, kinds=(kind,), site=config.tasks.site
          )
        except ValueError as error:
          raise ConfigError(f"agent.examples_of 'kind': {error}") from None
        self._of_kind[kind] = tuple(examples)

  def _examples(self, task: Task) -> tuple[Task, ...]:
    if self._config.agent.examples_of == "kind":
      return self._of_kind[task.metadata["kind"]]
    return self._easy

  def __call__(self, engine: Engine | None, temperature: float) -> RunFn:
    """Returns the function that runs and verifies one execution.

    Args:
      engine: the policy; None replays each task's reference solution.
      temperature: of sampling.
    """

    async def run(dispatch: Dispatch) -> Execution:
      if self._config.harness.is_external:
        return await self._run_external(engine, temperature, dispatch)
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
        verify=self._outcomes.verify,
        engine=policy,
        renderer=self._renderer,
        rollout=config.rollout,
        execution_id=dispatch.execution_id,
        group_id=dispatch.group_id,
        index=dispatch.index,
        seed=dispatch.seed,
        version=dispatch.version,
        examples=self._examples(dispatch.task),
        temperature=temperature,
        engine_name="scripted" if engine is None else "engine 0",
      )

    return run

  async def _run_external(
    self, engine: Engine | None, temperature: float, dispatch: Dispatch
  ) -> Execution:
    config, task = self._config, dispatch.task
    async with contextlib.AsyncExitStack() as stack:
      if engine is None:
        # It knows this task alone, so that it is served for itself.
        policy = scripted.ReplyingPolicy(
          self._reference(task.instruction, task.solution_turns),
          self._renderer,
        )
        api = await stack.enter_async_context(self._apis.serving(policy))
      else:
        api = await self._apis.of(engine)
      return await external.run_external(
        task,
        proxy=api.proxy,
        socket=api.socket,
        harness=config.harness,
        sandbox=config.sandbox,
        agent=config.agent,
        verify=self._outcomes.verify,
        execution_id=dispatch.execution_id,
        group_id=dispatch.group_id,
        index=dispatch.index,
        seed=dispatch.seed,
        version=dispatch.version,
        temperature=temperature,
        check=api.check,
      )

  async def close(self) -> None:
    """Ends what was served to harnesses."""
    await self._apis.close()
