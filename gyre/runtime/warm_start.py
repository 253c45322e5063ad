"""A short supervised phase on reference solutions of other seeds.

A scripted policy replays each warm-start task's solution through the same
agent loop and the same sandbox that training uses, so that the transcripts
have the very token ids, tool outputs and masks of a rollout. They are stored
like any execution; only those that the verifier passed are learned, with
REINFORCE at advantage 1 by the learner's own step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from gyre.config import Config, Optim, Trajectory
from gyre.learner.packing import Packed, pack
from gyre.runtime import collect, sampler
from gyre.runtime.collect import RunFn
from gyre.runtime.record import CELL, Record
from gyre.runtime.tasks import TaskSource
from gyre.runtime.trainer import Trainer
from gyre.store.rollouts import RolloutStore
from gyre.trajectory import select
from gyre.trajectory.score import reward
from gyre.types import Execution, Group, Sample

# Supervised steps between checkpoints.
CHECKPOINT_EVERY = 50
_FILL = 0.9  # share of the rows' tokens that a step's samples may take


class WarmStartError(ValueError):
  """There is nothing to learn from; the message is one line."""


def optimizer(config: Config) -> Optim:
  """Returns the supervised phase's optimizer: a cosine to a tenth."""
  warm = config.warm_start
  return dataclasses.replace(
    config.optim,
    lr=warm.lr,
    warmup_steps=min(warm.warmup_steps, warm.steps),
    schedule="cosine",
    final_ratio=0.1,
  )


async def transcripts(
  config: Config,
  tasks: TaskSource,
  run: RunFn,
  store: RolloutStore,
  record: Record,
) -> list[Sample]:
  """Replays the reference solutions; those stored already are not replayed.

  Args:
    config: warm_start.tasks of them.
    tasks: the "warm" split.
    run: runs one task with the scripted policy.
    store: keeps the executions.
    record: told what was found.

  Returns:
    Samples of the executions that the verifier passed.

  Raises:
    WarmStartError: none passed.
  """
  work = []
  for i in range(config.warm_start.tasks):
    task = tasks.get("warm", i)
    group = Group(f"warm-{i:06d}", i, task.task_id)
    work.append((group, collect.dispatches(group, task, 1, config.run.seed)))
  with record.timeline.span(CELL, "transcripts", n=len(work)):
    groups, ran = await collect.collect(
      work,
      run,
      concurrency=config.sandbox.concurrency,
      store=store,
      phase="warm",
      progress=lambda done, total: record.progress.phase(
        "transcripts", done, total
      ),
    )
  executions = [e for g in groups for e in g.executions]
  passed = [e for e in executions if _is_solved(e)]
  if not passed:
    detail = executions[0].outcome.detail if executions else "no tasks"
    raise WarmStartError(
      f"none of {len(executions)} reference solutions passed: {detail}"
    )
  everything = Trajectory(max_samples=0)
  samples = [s for e in passed for s in select.samples(e, everything).samples]
  record.progress.line(
    f"warm start: {len(passed)} of {len(executions)} transcripts passed "
    f"({ran} replayed now), {sum(len(s.trained) for s in samples)} tokens "
    "to learn"
  )
  return samples


def _is_solved(execution: Execution) -> bool:
  return reward(execution.outcome, "binary") == 1.0


def batches(
  samples: Sequence[Sample], config: Config, seed: int, row_multiple: int
) -> Callable[[int], Packed]:
  """Returns step -> the samples of that supervised step, packed.

  Samples are shuffled anew each epoch; a step takes the next ones that fit
  warm_start.rows rows. What a step holds depends on the step alone.

  Raises:
    WarmStartError: a sample is longer than a row.
  """
  rows, width = config.warm_start.rows, config.learner.row_tokens
  longest = max(len(s.ids) for s in samples)
  if longest > width:
    raise WarmStartError(
      f"a transcript has {longest} tokens, learner.row_tokens is {width}"
    )
  budget = max(int(rows * width * _FILL), longest)
  starts = [(0, None)]

  def take(position: int):
    chosen, used, seen = [], 0, set()
    while True:
      i = sampler.task_of(position, num_tasks=len(samples), seed=seed)
      size = samples[i].length
      if used + size > budget or i in seen:
        return position, chosen
      position, used = position + 1, used + size
      seen.add(i)
      chosen.append(samples[i])

  def batch(step: int) -> Packed:
    while len(starts) <= step + 1:
      starts.append(take(starts[-1][0]))
    return pack(
      starts[step + 1][1],
      None,
      row_tokens=width,
      row_entries=width,
      micro_rows=rows,
      row_multiple=row_multiple,
      fixed=True,
    )

  return batch


def train(
  trainer: Trainer,
  batch: Callable[[int], Packed],
  config: Config,
  record: Record,
  *,
  start: int,
  checkpoint: Callable[[int], None],
) -> None:
  """Takes the supervised steps from `start` on.

  Args:
    trainer: with the supervised objective and optimizer.
    batch: step -> what it learns.
    config: warm_start.steps in all.
    record: gets a line of warm_start.jsonl a step.
    start: steps already taken.
    checkpoint: commits the state after so many steps.
  """
  steps = config.warm_start.steps
  for step in range(start, steps):
    began = time.monotonic()
    packed = batch(step)
    with record.timeline.span(CELL, "supervised step", step=step):
      metrics = trainer.train(packed)
    seconds = time.monotonic() - began
    record.progress.phase("warm start", step + 1, steps)
    record.warm.put(
      {
        "step": step + 1,
        "loss/policy": metrics["loss/policy"],
        "optim/grad_norm": metrics["optim/grad_norm"],
        "optim/lr": metrics["optim/lr"],
        "tokens": packed.num_entries,
        "perf/step_s": seconds,
        "perf/train_tokens_per_s": packed.tokens_trained / seconds,
      }
    )
    if (step + 1) % max(1, steps // 5) == 0:
      record.progress.line(
        f"warm start {step + 1:>5}/{steps}  loss {metrics['loss/policy']:.4f}"
        f"  {seconds:.2f} s"
      )
    if (step + 1) % CHECKPOINT_EVERY == 0 and step + 1 < steps:
      checkpoint(step + 1)
