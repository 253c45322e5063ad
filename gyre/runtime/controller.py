"""The main loop: groups, rewards, advantages, a step, a commit, a publish.

Durable before visible. A finished execution is in the store before anything
else happens to it; a step's state and the ids of every group consumed are one
commit; only then are the weights published, and only then is the step's line
written. So there is one place to go on from: the newest checkpoint. What
follows a commit (publish, evaluation, line) is done again at a resume, from
what the store holds.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gyre.config import Config
from gyre.learner import advantages as advantages_lib
from gyre.learner.packing import pack
from gyre.runtime import (
  collect,
  evaluate,
  metrics,
  publish,
  sampler,
  warm_start,
)
from gyre.runtime.cell_worker import CoreWorker
from gyre.runtime.checkpoints import Checkpoints
from gyre.runtime.launch import Launched
from gyre.runtime.record import CELL, ENGINE, Record, peak_memory
from gyre.runtime.runner import Runner
from gyre.runtime.tasks import TaskSource
from gyre.runtime.trainer import Trainer, supervised
from gyre.store.rollouts import RolloutStore
from gyre.trajectory import select
from gyre.trajectory.score import reward
from gyre.types import Execution, Group, Sample


class RolloutError(RuntimeError):
  """No execution of a step could be scored; the message says why."""


@dataclasses.dataclass
class Position:
  """Where a run stands; a checkpoint's meta holds it as JSON.

  Attributes:
    phase: "warm" or "train".
    step: steps taken in that phase.
    sampler: of the tasks.
    next_group: index of the next group to dispatch.
    consumed: group_id -> step that trained it; every group of the run.
    row: metrics of `step`, without its evaluation.
    best: {"step", "reward"} before the evaluation of `step`.
    lengths: of the files of `Record`, before the line of `step`.
    wall_s: seconds taken, over all resumes.
  """

  phase: str = "warm"
  step: int = 0
  sampler: dict[str, int] = dataclasses.field(
    default_factory=lambda: dataclasses.asdict(sampler.SamplerState())
  )
  next_group: int = 0
  consumed: dict[str, int] = dataclasses.field(default_factory=dict)
  row: dict[str, Any] = dataclasses.field(default_factory=dict)
  best: dict[str, Any] | None = None
  lengths: dict[str, int] = dataclasses.field(default_factory=dict)
  wall_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Scored:
  """A step's groups after scoring.

  Attributes:
    executions: all, in order of dispatch.
    scores: the reward of each, or None.
    advantages: execution_id -> advantage, of those to train.
    selections: what of each execution can be trained.
    zero_variance: groups without variance.
  """

  executions: list[Execution]
  scores: list[float | None]
  advantages: dict[str, float]
  selections: list[select.Selection]
  zero_variance: int

  def trained(self) -> list[select.Selection]:
    """Returns the selections of the executions to train."""
    pairs = zip(self.executions, self.selections, strict=True)
    return [s for e, s in pairs if e.execution_id in self.advantages]

  def samples(self) -> list[Sample]:
    """Returns the samples to train."""
    return [s for selection in self.trained() for s in selection.samples]


def _advantages(executions, config: Config, step: int):
  """The reward of each execution, or None, and the advantages."""
  learner = config.learner
  scores = [reward(e.outcome, learner.score) for e in executions]
  names = [e.group_id for e in executions]
  if learner.advantage == "rloo":
    result = advantages_lib.rloo(scores, names)
  else:
    result = advantages_lib.grpo(
      scores,
      names,
      normalize_std=learner.normalize_std,
      ddof=learner.std_ddof,
    )
  if learner.shuffle_advantages:
    result = advantages_lib.shuffled(result, config.run.seed, step)
  flat = {n for n, z in zip(names, result.zero_variance, strict=True) if z}
  return scores, result, len(flat)


def score_groups(groups: Sequence[Group], config: Config, step: int) -> Scored:
  """Scores the groups of a step and gives each execution its advantage.

  Executions without a reward leave training; groups whose rewards are all
  equal teach nothing: they are counted and not computed.
  """
  executions = [e for g in groups for e in g.executions]
  scores, result, zero_variance = _advantages(executions, config, step)
  trained = result.included & ~result.zero_variance
  return Scored(
    executions=executions,
    scores=scores,
    advantages={
      e.execution_id: float(a)
      for e, a, t in zip(executions, result.values, trained, strict=True)
      if t
    },
    selections=[
      select.samples(e, config.trajectory, config.run.seed) for e in executions
    ],
    zero_variance=zero_variance,
  )


class Controller:
  """One run: from its newest checkpoint, or its start, to its last step."""

  def __init__(
    self,
    config: Config,
    directory: pathlib.Path,
    launched: Launched,
    tasks: TaskSource,
    runner: Runner,
  ):
    """Opens the store and the newest checkpoint.

    Args:
      config: the run's.
      directory: of the run, held by this process.
      launched: model, renderer, mesh.
      tasks: what to train on.
      runner: makes the function that runs an execution on an engine.

    Raises:
      manifest.ManifestError, CheckpointError: the newest checkpoint is
        corrupt or of another shape.
      StoreError: the store cannot be opened.
    """
    self.config, self.directory, self.tasks = config, directory, tasks
    self._launched, self._runner = launched, runner
    self.checkpoints = Checkpoints(
      directory / "checkpoints", config.checkpoint.keep
    )
    self.checkpoints.clean_up()
    self.trainer = Trainer(launched.model_cfg, launched.mesh, config)
    self._warm_trainer: Trainer | None = None
    self.position = Position()
    self._restore()
    self.store = RolloutStore(directory / "rollouts.sqlite")
    self._derive_store()
    self.record = Record(
      directory,
      config.run.steps,
      self.position.lengths,
      self.position.step if self.position.phase == "train" else 0,
    )
    self.cell = CoreWorker(CELL, self.trainer, config)
    self._clock = time.monotonic()
    self._wall_before = self.position.wall_s

  # Resume.

  def _restore(self) -> None:
    """Takes state and position of the newest checkpoint, if there is one."""
    path = self.checkpoints.latest()
    self._resumed = path is not None
    if path is None:
      return
    warm = path.name.startswith("warm_")
    trainer = self._make_warm_trainer() if warm else self.trainer
    self.position = Position(**trainer.restore(path))
    if self.config.learner.kl_coef and not warm:
      self.trainer.reference = self.trainer.restore_params(
        self.checkpoints.reference
      )

  def _derive_store(self) -> None:
    """Makes the store agree with the manifest that decides."""
    p = self.position
    step = p.step if p.phase == "train" else 0
    self.store.set_consumed(p.consumed)
    self.store.forget_after(step)
    dropped = self.store.drop_newer(step)
    if dropped:
      self.store.put_event("dropped", {"executions": dropped}, step=step)

  def _commit(
    self, trainer: Trainer, path: pathlib.Path, **changes: Any
  ) -> None:
    """Commits state and position in one manifest."""
    self.position = dataclasses.replace(
      self.position,
      lengths=self.record.lengths(),
      wall_s=self._wall(),
      **changes,
    )
    step = self.position.step
    with self.record.timeline.span(CELL, "checkpoint", step=step):
      trainer.save(path, dataclasses.asdict(self.position))

  def _wall(self) -> float:
    return self._wall_before + time.monotonic() - self._clock

  # The run.

  async def run(self) -> list[dict[str, Any]]:
    """Runs to the last step.

    Returns:
      The lines of metrics.jsonl.
    """
    with self.record.progress:
      try:
        if self._resumed:
          p = self.position
          self.record.progress.line(f"resuming {p.phase} after step {p.step}")
        if self.position.phase == "warm":
          await self._begin()
        params, step = self.trainer.state.params, self.position.step
        engine = self.cell.start_engine(params, step)
        await engine.ready()
        await self._after_commit()
        while self.position.step < self.config.run.steps:
          await self._step(self.position.step + 1)
        return self.record.rows()
      finally:
        await self.cell.close()

  def wall_s(self) -> float:
    """Seconds taken, over all resumes."""
    return self._wall()

  def close(self) -> None:
    """Closes the store and the files."""
    self.store.close()
    self.record.close()

  def _make_warm_trainer(self) -> Trainer:
    if self._warm_trainer is None:
      self._warm_trainer = Trainer(
        self._launched.model_cfg,
        self._launched.mesh,
        self.config,
        learner=supervised(self.config.learner),
        optimizer=warm_start.optimizer(self.config),
        total_steps=self.config.warm_start.steps,
        temperature=1.0,
      )
    return self._warm_trainer

  async def _begin(self) -> None:
    """The supervised phase, if any, and the commit of step 0."""
    config, row = self.config, {"step": 0}
    seed = config.run.seed
    if config.warm_start.steps:
      trainer = self._make_warm_trainer()
      if trainer.state is None:
        trainer.init(self._launched.initial_params(), seed)
      row |= await self._warm_up(trainer)
      params = trainer.state.params
      self._warm_trainer = None
    else:
      params = self._launched.initial_params()
    self.trainer.init(params, seed)
    if config.learner.kl_coef:
      path = self.checkpoints.reference
      if not path.exists():
        self.trainer.save(path, {})
      self.trainer.reference = self.trainer.restore_params(path)
    self._commit(
      self.trainer, self.checkpoints.path(0), phase="train", step=0, row=row
    )

  async def _warm_up(self, trainer: Trainer) -> dict[str, Any]:
    config = self.config
    self.record.progress.role(CELL, "warm start")
    run = self._runner(None, config.rollout.temperature)
    samples = await warm_start.transcripts(
      config, self.tasks, run, self.store, self.record
    )
    batch = warm_start.batches(
      samples, config, config.run.seed, trainer.row_multiple
    )
    began = time.monotonic()
    warm_start.train(
      trainer,
      batch,
      config,
      self.record,
      start=self.position.step,
      checkpoint=lambda step: self._commit_warm(trainer, step),
    )
    rows = metrics.read_lines(self.record.warm.path)
    return {
      "warm_start/steps": len(rows),
      "warm_start/loss_first": rows[0]["loss/policy"],
      "warm_start/loss_last": rows[-1]["loss/policy"],
      "perf/warm_start_s": time.monotonic() - began,
    }

  def _commit_warm(self, trainer: Trainer, step: int) -> None:
    self._commit(trainer, self.checkpoints.warm_path(step), step=step)
    self.checkpoints.prune(None)

  async def _after_commit(self) -> None:
    """What follows a commit: evaluation and the step's line."""
    step, row = self.position.step, dict(self.position.row)
    mine = [g for g, s in self.position.consumed.items() if s == step]
    self.store.mark_consumed(mine, step)
    self.store.put_event("publish", {"version": step}, step=step)
    self.record.timeline.instant(ENGINE, "publish", version=step)
    best = self.position.best
    written, self.record.written = self.record.written, None
    if written is not None:
      row = written
    elif self._evaluates(step):
      began = time.monotonic()
      row |= await self._evaluate(step)
      row["perf/eval_s"] = time.monotonic() - began
    if row.get("eval/reward") is not None:
      best = self.checkpoints.offer_best(step, row["eval/reward"], best)
    self.record.step(row)
    self.position.best = best
    self.checkpoints.prune(best)

  def _evaluates(self, step: int) -> bool:
    every = self.config.eval.every
    last = step == self.config.run.steps
    return bool(every and self.tasks.num_eval) and (step % every == 0 or last)

  async def _evaluate(self, step: int) -> dict[str, Any]:
    self.record.progress.role(CELL, "rollout")
    tasks = [self.tasks.get("eval", i) for i in range(self.tasks.num_eval)]
    with self.record.timeline.span(ENGINE, "evaluation", step=step):
      row, _ = await evaluate.evaluate(
        tasks,
        self._runner(self.cell.engine, self.config.eval.temperature),
        self.config,
        step=step,
        version=step,
        store=self.store,
        progress=lambda done, total: self.record.progress.phase(
          "evaluation", done, total
        ),
      )
    return row

  # A step.

  async def _step(self, step: int) -> None:
    began = time.monotonic()
    groups, draw, next_group, perf = await self._rollout(step)
    scored = score_groups(groups, self.config, step)
    if not any(s is not None for s in scored.scores):
      detail = scored.executions[0].outcome
      raise RolloutError(
        f"step {step}: none of {len(scored.executions)} executions could be "
        f"scored: {detail.detail if detail else 'no outcome'}"
      )
    self.store.put_samples(step, scored.samples(), scored.advantages)
    row = self._train(step, scored, perf)
    consumed = self.position.consumed | {g.group_id: step for g in groups}
    row["perf/step_s"] = time.monotonic() - began
    row["perf/rollout_idle"] = 1 - row["perf/rollout_s"] / row["perf/step_s"]
    row["perf/train_idle"] = 1 - row["perf/train_s"] / row["perf/step_s"]
    row["perf/peak_memory"] = peak_memory()
    self._commit(
      self.trainer,
      self.checkpoints.path(step),
      step=step,
      sampler=dataclasses.asdict(draw),
      next_group=next_group,
      consumed=consumed,
      row=row,
    )
    await publish.publish(self.cell.engine, self.trainer.state.params, step)
    await self._after_commit()

  async def _rollout(
    self, step: int
  ) -> tuple[list[Group], sampler.SamplerState, int, dict[str, Any]]:
    """Groups for a step; those without variance replaced where asked."""
    config = self.config
    draw = sampler.SamplerState(**self.position.sampler)
    index, wanted = self.position.next_group, config.rollout.groups_per_step
    groups: list[Group] = []
    began, tokens, rounds = time.monotonic(), 0, 0
    before = self.cell.engine.stats().generated_tokens
    self.record.progress.role(CELL, "rollout")
    with self.record.timeline.span(ENGINE, "rollout", step=step):
      while wanted:
        draw, tasks = sampler.draw(
          draw, wanted, num_tasks=self.tasks.num_train, seed=config.run.seed
        )
        groups += await self._run_groups(step, index, tasks)
        index += wanted
        wanted = 0
        if config.rollout.resample_zero_variance:
          if rounds < config.rollout.resample_limit:
            executions = [e for g in groups for e in g.executions]
            spare = len(groups) - config.rollout.groups_per_step
            flat = _advantages(executions, config, step)[-1]
            wanted = max(0, flat - spare)
          rounds += 1
    seconds = time.monotonic() - began
    tokens = self.cell.engine.stats().generated_tokens - before
    return (
      groups,
      draw,
      index,
      {
        "perf/rollout_s": seconds,
        "perf/rollout_tokens_per_s": tokens / seconds,
      },
    )

  async def _run_groups(
    self, step: int, first: int, tasks: Sequence[int]
  ) -> list[Group]:
    config, work = self.config, []
    for i, index in enumerate(tasks, first):
      task = self.tasks.get("train", index)
      group = Group(f"train-{i:06d}", i, task.task_id, version=step - 1)
      size = config.rollout.group_size
      work.append(
        (group, collect.dispatches(group, task, size, config.run.seed))
      )
    groups, _ = await collect.collect(
      work,
      self._runner(self.cell.engine, config.rollout.temperature),
      concurrency=config.sandbox.concurrency,
      store=self.store,
      phase="train",
      progress=lambda done, total: self.record.progress.phase(
        "rollout", done, total
      ),
    )
    return groups

  def _train(
    self, step: int, scored: Scored, perf: Mapping[str, Any]
  ) -> dict[str, Any]:
    config = self.config
    self.record.progress.role(CELL, "train")
    self.record.progress.phase("train")
    began = time.monotonic()
    with self.record.timeline.span(CELL, "train", step=step):
      packed = pack(
        scored.samples(),
        scored.advantages,
        row_tokens=config.learner.row_tokens,
        row_entries=config.learner.row_tokens,
        micro_rows=config.learner.micro_rows,
        row_multiple=self.trainer.row_multiple,
        fixed=True,
      )
      learned = self.trainer.train(packed)
      self.trainer.set_version(step)
    seconds = time.monotonic() - began
    stale = [step - 1 - e.version for e in scored.executions]
    return {
      "step": step,
      **metrics.rewards(scored.executions, scored.scores),
      **learned,
      "staleness/mean": float(np.mean(stale)),
      "staleness/max": int(max(stale)),
      "group/zero_variance": scored.zero_variance,
      "dedup/tokens_flat": packed.tokens_flat,
      "dedup/tokens_trained": packed.tokens_trained,
      **metrics.trajectories(
        [s.stats for s in scored.trained()], config.trajectory.roles
      ),
      **metrics.token_audit(scored.executions, scored.selections),
      "perf/train_s": seconds,
      "perf/train_tokens_per_s": packed.tokens_trained / seconds,
      **perf,
    }
