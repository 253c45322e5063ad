"""The three modes of the main command, over one directory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import os
import pathlib
import signal
from collections.abc import Coroutine, Iterator
from typing import Any

import jax

from gyre.config import Config, ConfigError, Elastic
from gyre.envs.sandbox import SandboxError, prune
from gyre.envs.task import TaskError
from gyre.learner import state as state_lib
from gyre.rollout.engine import EngineError
from gyre.runtime import compile_step, evaluate, launch, progress, workdir
from gyre.runtime.cell_worker import CellWorker
from gyre.runtime.checkpoints import Checkpoints
from gyre.runtime.controller import Controller
from gyre.runtime.publish import PublishError
from gyre.runtime.reshard import CheckpointError
from gyre.runtime.run_work import RolloutError
from gyre.runtime.runner import Runner
from gyre.runtime.tasks import TaskSource
from gyre.runtime.trainer import Trainer
from gyre.runtime.warm_start import WarmStartError
from gyre.store.database import StoreError
from gyre.store.manifest import ManifestError

# Errors that are one line for the user: what was asked for, what was found.
EXPECTED = (
  CheckpointError,
  ConfigError,
  EngineError,
  ManifestError,
  PublishError,
  RolloutError,
  SandboxError,
  StoreError,
  TaskError,
  WarmStartError,
)

# While evaluating, these may differ from what the run was trained with.
_EVAL_FREE = (
  "run.steps",
  "elastic.",
  "eval.",
  "sandbox.",
  "rollout.engines",
  "rollout.max_slots",
)


class _Lines(logging.Handler):
  """Warnings of the rooms become lines of the console and the log."""

  def __init__(self, shown: progress.Progress):
    super().__init__(logging.WARNING)
    self._shown = shown

  def emit(self, record: logging.LogRecord) -> None:
    self._shown.line(f"{record.levelname.lower()}: {record.getMessage()}")


@contextlib.contextmanager
def _warnings(shown: progress.Progress) -> Iterator[None]:
  logger, handler = logging.getLogger("gyre"), _Lines(shown)
  logger.addHandler(handler)
  logger.propagate = False
  try:
    yield
  finally:
    logger.removeHandler(handler)
    logger.propagate = True


def _interrupt(*_: Any) -> None:
  raise KeyboardInterrupt


def _cache() -> None:
  launch.use_compilation_cache(launch.cache_directory())


def train(config: Config, directory: pathlib.Path) -> None:
  """Runs or resumes a run in `directory`, to its last step."""
  directory.mkdir(parents=True, exist_ok=True)
  lock = workdir.Lock(directory)
  signal.signal(signal.SIGTERM, _interrupt)
  try:
    workdir.check_config(directory, config)
    tasks = TaskSource(config)
    launch.use_host_devices(config)
    _cache()
    launched = launch.launch(config, tasks)
    workdir.write_config(directory, config)
    workdir.write_tokenizer(directory, launched.renderer.tokenizer)
    runner = Runner(config, launched.renderer)
    controller = Controller(config, directory, launched, tasks, runner)
    # What was imported stays: a collection that walks it stops the loop 0.3 s.
    gc.freeze()
    try:
      with _warnings(controller.record.progress):
        rows = _until_done(_train(controller, runner))
      title = f"{directory}: {config.run.steps} steps"
      table = progress.final_table(rows, controller.wall_s(), title)
      controller.record.progress.show(table)
    finally:
      controller.close()
  finally:
    lock.release()


async def _stoppable(work: Coroutine[Any, Any, Any]) -> Any:
  """`work`, which SIGTERM cancels: it alone, as Ctrl-C does.

  An exception raised wherever the loop is would have every task cancelled,
  those too that see to it that a process is started or ended whole.
  """
  loop, task = asyncio.get_running_loop(), asyncio.current_task()

  def stop(*_: Any) -> None:
    task.cancel()
    loop.call_soon_threadsafe(lambda: None)  # wakes the loop

  before = signal.signal(signal.SIGTERM, stop)
  try:
    return await work
  finally:
    signal.signal(signal.SIGTERM, before)


def _until_done(work: Coroutine[Any, Any, Any]) -> Any:
  try:
    return asyncio.run(_stoppable(work))
  except asyncio.CancelledError:
    raise KeyboardInterrupt from None


async def _train(
  controller: Controller, runner: Runner
) -> list[dict[str, Any]]:
  await prune()
  try:
    return await controller.run()
  finally:
    await runner.close()


def evaluate_only(
  config: Config, directory: pathlib.Path, which: str
) -> dict[str, Any]:
  """Evaluates a checkpoint of a run; the run's files stay as they are.

  SIGTERM ends it as Ctrl-C does: KeyboardInterrupt, and nothing is written.

  Args:
    config: the run's; the eval and sandbox sections may differ.
    directory: of the run.
    which: "latest", "best" or a step.

  Returns:
    eval/* metrics, also written to DIR/eval_<step>.json.
  """
  signal.signal(signal.SIGTERM, _interrupt)
  if not (directory / workdir.CONFIG).exists():
    raise ConfigError(f"{directory} holds no run")
  workdir.check_config(directory, config, _EVAL_FREE)
  # One cell, of this process, is enough.
  config = dataclasses.replace(config, elastic=Elastic())
  checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint.keep)
  path = checkpoints.resolve(which)
  tasks = TaskSource(config)
  if not tasks.num_eval:
    raise ConfigError("there are no held-out tasks: eval.every or eval.n is 0")
  launch.use_host_devices(config)
  _cache()
  launched = launch.launch(config, tasks)
  trainer = Trainer(launched.model_cfg, launched.meshes[0], config)
  params = trainer.restore_params(path)
  step = int(path.name.rpartition("_")[2])
  cell = CellWorker("cell 0", trainer, config)
  runner = Runner(config, launched.renderer)
  with progress.Progress(None, config.run.steps) as shown, _warnings(shown):
    row = _until_done(
      _evaluate(config, cell, params, step, tasks, runner, shown)
    )
    shown.line(f"checkpoint of step {step}: {progress.eval_text(row)}")
  text = json.dumps({"step": step, **row}, indent=2) + "\n"
  workdir.write_text(directory / f"eval_{step:06d}.json", text)
  return row


async def _evaluate(
  config, cell, params, step, tasks, runner, shown
) -> dict[str, Any]:
  engine = cell.start_engine(params, step)
  try:
    await engine.ready()
    row, _ = await evaluate.evaluate(
      [tasks.get("eval", i) for i in range(tasks.num_eval)],
      runner(engine, config.eval.temperature),
      config,
      step=step,
      version=step,
      store=None,
      progress=lambda done, total: shown.phase("evaluation", done, total),
    )
    return row
  finally:
    await runner.close()
    await cell.close()


def compile_only(config: Config) -> None:
  """Compiles the train step for the mesh and prints bytes per device."""
  m = config.mesh
  need = m.size
  if os.environ.get("JAX_PLATFORMS", "cpu") in ("", "cpu"):
    jax.config.update("jax_num_cpu_devices", need)
  _cache()
  mesh = state_lib.make_mesh(m)
  hf = config.model.hf_config
  if "vocab_size" in hf:
    model_cfg = launch.published_config(hf)
  else:
    alone = dataclasses.replace(config, elastic=Elastic())
    model_cfg = launch.launch(alone, TaskSource(config)).model_cfg
  table = compile_step.compile_step(config, model_cfg, mesh)
  progress.Progress(None, 0).show(table)
