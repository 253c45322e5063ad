"""Held-out evaluation: tasks of seeds that training never draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gyre.config import Config
from gyre.envs.task import Task
from gyre.runtime import collect
from gyre.runtime.collect import RunFn
from gyre.store.rollouts import RolloutStore
from gyre.trajectory.score import reward
from gyre.trajectory.statistics import bootstrap_ci
from gyre.types import Group


def summarize(groups: Sequence[Group], config: Config) -> dict[str, Any]:
  """Returns eval/* of evaluated groups, one a task.

  A task's reward is the mean over its scored executions; a task none of
  whose executions could be scored is left out and counted.
  """
  rewards, solved, failed = [], [], 0
  for group in groups:
    scores = [
      (r, e.outcome)
      for e in group.executions
      if (r := reward(e.outcome, config.learner.score)) is not None
    ]
    failed += len(group.executions) - len(scores)
    if not scores:
      continue
    rewards.append(float(np.mean([r for r, _ in scores])))
    solved.append(
      float(np.mean([reward(o, "binary") == 1.0 for _, o in scores]))
    )
  ci = bootstrap_ci(
    rewards, resamples=config.eval.bootstrap, seed=config.run.seed
  )
  return {
    "eval/reward": float(np.mean(rewards)) if rewards else float("nan"),
    "eval/solved": float(np.mean(solved)) if solved else float("nan"),
    "eval/n": len(rewards),
    "eval/ci95": list(ci),
    "eval/failed": failed,
  }


async def evaluate(
  tasks: Sequence[Task],
  run: RunFn,
  config: Config,
  *,
  step: int,
  version: int,
  store: RolloutStore | None,
  progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, Any], list[Group]]:
  """Runs every held-out task and summarizes.

  Args:
    tasks: the held-out tasks.
    run: runs and verifies one execution with the weights to evaluate.
    config: eval.samples executions a task.
    step: of the weights, names the groups.
    version: of the weights.
    store: keeps the executions, so that an evaluation that was killed goes
      on; None keeps none.
    progress: told (finished, all).

  Returns:
    eval/* metrics, and the groups.
  """
  work = []
  for i, task in enumerate(tasks):
    group = Group(f"eval-{step:06d}-{i:05d}", i, task.task_id, version)
    work.append(
      (
        group,
        collect.dispatches(
          group,
          task,
          config.eval.samples,
          config.run.seed,
        ),
      )
    )
  groups, _ = await collect.collect(
    work,
    run,
    concurrency=config.sandbox.concurrency,
    store=store,
    phase="eval",
    progress=progress,
  )
  return summarize(groups, config), groups
