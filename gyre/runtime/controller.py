"""A run: from its newest checkpoint, or its start, to its last step.

Sets up what the run is made of, takes the supervised phase, and gives the rest
to the conductor (conductor.py), which carries out the scheduler's decisions
over the cells. What is durable when, run_work.py says.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Any

from gyre.config import Config
from gyre.elastic import scheduler as sched
from gyre.rollout.router import Router
from gyre.runtime import launchers, metrics, reshard, warm_start
from gyre.runtime.cell import Worker
from gyre.runtime.checkpoints import Checkpoints
from gyre.runtime.conductor import Conductor
from gyre.runtime.launch import Launched
from gyre.runtime.position import Position
from gyre.runtime.record import Record
from gyre.runtime.run_work import RunWork
from gyre.runtime.runner import Runner
from gyre.runtime.tasks import TaskSource
from gyre.runtime.trainer import Trainer, supervised
from gyre.runtime.watch import Watch, engine_of
from gyre.store.rollouts import RolloutStore

# Cells of a run with one; the supervised phase is the first's.
CORE = "cell 0"


def cell_names(config: Config) -> list[str]:
  """Returns the names of a run's cells, in the order of leaving rollout."""
  return [f"cell {i}" for i in range(config.elastic.cells)]


def layout(config: Config) -> sched.Layout:
  """Returns the cells of a run: the core, satellites, standalone ones."""
  e, r, width = config.elastic, config.rollout, config.mesh.size

  def kind(i: int) -> str:
    if i == 0:
      return "trainer" if e.trainer else "core"
    return "standalone" if i >= e.cells - e.standalone else "satellite"

  return sched.Layout(
    tuple(
      sched.Cell(
        name=name,
        devices=tuple(range(i * width, (i + 1) * width)),
        slots=e.slots or r.max_slots * (r.engines or width),
        kind=kind(i),
        divisible=i == 0 and bool(e.resize),
      )
      for i, name in enumerate(cell_names(config))
    )
  )


def policy(config: Config) -> str:
  """Returns the name of the scheduler's policy, where "auto" leaves it open."""
  e = config.elastic
  if e.policy != "auto":
    return e.policy
  in_order = e.window or config.run.deterministic
  return "waterlevel" if in_order else "deadline"


def law(config: Config) -> sched.Law:
  """Returns the dispatch law of a run, as the configuration's section says."""
  e, r = config.elastic, config.rollout
  window = e.window or (1 if config.run.deterministic else 0)
  made = sched.Law(e.phi, e.mu, r.groups_per_step, r.group_size, window or None)
  most = e.max_staleness
  if most < 0:
    most = made.maximum() if window else made.fifo_max + 1
  if not window and policy(config) != "deadline":
    window = made.window_for(most)
  return dataclasses.replace(made, window=window or None, max_staleness=most)


def _tracks(config: Config) -> list[str]:
  """A track for each cell, and for each engine."""
  names = cell_names(config)
  if config.elastic.resize:
    names.append(f"{CORE}-lent")
  return [track for name in names for track in (name, engine_of(name))]


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
      launched: model, renderer, meshes.
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
    self.trainer = Trainer(launched.model_cfg, launched.meshes[0], config)
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
      tracks=_tracks(config),
    )
    self._cells = self._launcher()
    self.router = Router(on_down=self._cells.failed)
    self._clock = time.monotonic()
    self._wall_before = self.position.wall_s

  def _launcher(self) -> launchers.InProcess | launchers.Local:
    config, reference = self.config, self.checkpoints.reference
    if config.elastic.launcher == "local":
      return launchers.Local(
        layout(config),
        config,
        self._launched.model_cfg,
        self.directory,
        reference=reference,
        say=self.record.progress.line,
      )
    return launchers.InProcess(
      layout(config),
      config,
      self.trainer,
      self._launched.meshes[0],
      reference=reference,
    )

  # Resume.

  def _restore(self) -> None:
    """Takes state and position of the newest checkpoint, if there is one."""
    path = self.checkpoints.latest()
    self._resumed = path is not None
    if path is None:
      return
    warm = path.name.startswith("warm_")
    if self.config.elastic.launcher == "local" and not warm:
      # The state is taken, and verified, by the process of the core.
      self.position = Position(**reshard.read_meta(path))
      return
    trainer = self._make_warm_trainer() if warm else self.trainer
    self.position = Position(**trainer.restore(path))

  def _derive_store(self) -> None:
    """Makes the store agree with the manifest that decides."""
    p = self.position
    step = p.step if p.phase == "train" else 0
    self.store.set_consumed(p.consumed)
    self.store.forget_after(step)
    dropped = self.store.drop_newer(step)
    if dropped:
      self.store.put_event("dropped", {"executions": dropped}, step=step)

  def wall_s(self) -> float:
    """Seconds taken, over all resumes."""
    return self._wall_before + time.monotonic() - self._clock

  # The run.

  async def run(self) -> list[dict[str, Any]]:
    """Runs to the last step.

    Returns:
      The lines of metrics.jsonl.
    """
    with self.record.progress:
      if self._resumed:
        p = self.position
        self.record.progress.line(f"resuming {p.phase} after step {p.step}")
      if self.position.phase == "warm":
        await self._begin()
      if self.config.elastic.launcher == "local":
        self.trainer.state = None  # the core's process has it from the disk
      state = self.checkpoints.path(self.position.step)
      try:
        await self._conduct(await self._cells.start(state))
        return self.record.rows()
      finally:
        await self.router.close()
        await self._cells.close()

  async def _conduct(self, workers: dict[str, Worker]) -> None:
    config, e, r = self.config, self.config.elastic, self.config.rollout
    watch = Watch(self.record, self.store)
    work = RunWork(
      config,
      self.position,
      tasks=self.tasks,
      runner=self._runner,
      router=self.router,
      store=self.store,
      checkpoints=self.checkpoints,
      record=self.record,
      watch=watch,
      row_multiple=workers[CORE].row_multiple,
      wall_s=self.wall_s,
      worker=self._cells.worker,
      snapshots=self._cells.snapshots,
    )
    state = sched.begin(
      layout(config),
      law(config),
      streaming=e.streaming,
      policy=policy(config),
      steps=config.run.steps,
      resample=r.resample_limit if r.resample_zero_variance else 0,
      resume=work.resumed(),
    )
    conductor = Conductor(state, workers, work, self.router, watch)
    work.resize_after(e.resize, conductor.ask_resize)
    self._cells.supervise(conductor)
    try:
      await conductor.run()
    finally:
      watch.close()

  def close(self) -> None:
    """Closes the store and the files."""
    self.store.close()
    self.record.close()

  # The supervised phase.

  def _make_warm_trainer(self) -> Trainer:
    if self._warm_trainer is None:
      self._warm_trainer = Trainer(
        self._launched.model_cfg,
        self._launched.meshes[0],
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
    if config.learner.kl_coef and not self.checkpoints.reference.exists():
      self.trainer.save(self.checkpoints.reference, {})
    self._commit(
      self.trainer, self.checkpoints.path(0), phase="train", step=0, row=row
    )

  async def _warm_up(self, trainer: Trainer) -> dict[str, Any]:
    config = self.config
    self.record.progress.role(CORE, "warm start")
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

  def _commit(
    self, trainer: Trainer, path: pathlib.Path, **changes: Any
  ) -> None:
    """Commits state and position in one manifest."""
    self.position = dataclasses.replace(
      self.position,
      lengths=self.record.lengths(),
      wall_s=self.wall_s(),
      **changes,
    )
    step = self.position.step
    with self.record.timeline.span(CORE, "checkpoint", step=step):
      trainer.save(path, dataclasses.asdict(self.position))
