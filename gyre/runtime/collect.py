"""Groups of executions, run concurrently, each stored as soon as it ends.

What the store already holds is not run again, so that a killed run loses no
finished execution. Seeds come from (run seed, group, execution), never from
the order in which executions happen to finish.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gyre.envs.task import Task
from gyre.store.rollouts import RolloutStore
from gyre.types import Execution, Group


@dataclasses.dataclass(frozen=True)
class Dispatch:
  """One execution to run.

  Attributes:
    task: what to do.
    execution_id, group_id, index, seed, version: as in `types.Execution`.
  """

  task: Task
  execution_id: str
  group_id: str
  index: int
  seed: int
  version: int


RunFn = Callable[[Dispatch], Awaitable[Execution]]


def seed_of(run_seed: int, *names: Any) -> int:
  """Returns a 32-bit seed of a run's seed and names, the same everywhere."""
  text = "\0".join(str(x) for x in (run_seed, *names))
  return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def dispatches(
  group: Group, task: Task, size: int, run_seed: int
) -> list[Dispatch]:
  """Returns the executions of a group.

  Args:
    group: its id, version and index.
    task: of the group.
    size: executions.
    run_seed: config.run.seed.
  """
  return [
    Dispatch(
      task=task,
      execution_id=f"{group.group_id}/{i}",
      group_id=group.group_id,
      index=i,
      seed=seed_of(run_seed, group.group_id, i),
      version=group.version,
    )
    for i in range(size)
  ]


async def _run_all(
  todo: Sequence[Dispatch],
  run: RunFn,
  concurrency: int,
  finished: Callable[[Execution], None],
) -> None:
  slots = asyncio.Semaphore(concurrency)  # first come, first served

  async def one(dispatch: Dispatch) -> None:
    async with slots:
      finished(await run(dispatch))

  try:
    async with asyncio.TaskGroup() as tasks:
      for dispatch in todo:
        tasks.create_task(one(dispatch))
  except BaseExceptionGroup as group:
    raise _first(group) from group


def _first(error: BaseException) -> BaseException:
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return error


async def collect(
  groups: Sequence[tuple[Group, Sequence[Dispatch]]],
  run: RunFn,
  *,
  concurrency: int,
  store: RolloutStore | None,
  phase: str,
  progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Group], int]:
  """Runs what is missing of some groups.

  Args:
    groups: each group and its executions, in order of dispatch.
    run: runs and verifies one execution.
    concurrency: executions that run at once.
    store: where finished executions are and go; None keeps none.
    phase: "train", "eval" or "warm", for the store.
    progress: told (finished, all).

  Returns:
    The groups with all their executions in order of index, and how many
    executions were run now (the rest came from the store).
  """
  done: dict[str, Execution] = {}
  for group, _ in groups if store is not None else ():
    store.put_group(group, phase)
    for execution in store.executions(group.group_id):
      done[execution.execution_id] = execution
  everything = [d for _, ds in groups for d in ds]
  todo = [d for d in everything if d.execution_id not in done]

  def finished(execution: Execution) -> None:
    if store is not None:
      store.put_execution(execution)
    done[execution.execution_id] = execution
    progress(len(done), len(everything))

  progress(len(done), len(everything))
  await _run_all(todo, run, concurrency, finished)
  out = [
    dataclasses.replace(
      group, executions=tuple(done[d.execution_id] for d in ds)
    )
    for group, ds in groups
  ]
  return out, len(todo)
