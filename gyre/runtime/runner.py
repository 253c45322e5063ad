"""Runs one execution: the agent loop in a sandbox, then the verifier."""

from __future__ import annotations

from gyre.config import Config, ConfigError
from gyre.envs import agent, scripted, verifier
from gyre.envs.task import Task
from gyre.envs.tasksets import shell
from gyre.harness.render import Renderer
from gyre.rollout.engine import Engine
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
      config: agent, sandbox, rollout, run and tasks sections.
      renderer: messages to token ids.

    Raises:
      ConfigError: worked examples are asked for of a kind that has none.
    """
    self._config, self._renderer = config, renderer
    self._outcomes = verifier.KnownOutcomes()
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
