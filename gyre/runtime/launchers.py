"""The cells of a run, by launcher: of this process, or a process each.

Both give the conductor cells that speak cell.Core and cell.Worker. In
processes of its own every cell may become the core: what it needs for that
lies in the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pathlib
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from gyre.config import Config
from gyre.elastic import scheduler as sched
from gyre.models.config import ModelConfig
from gyre.rollout.engine import EngineDown
from gyre.runtime import launch, reshard, specs
from gyre.runtime.cell import Worker
from gyre.runtime.cell_worker import CellWorker
from gyre.runtime.core_worker import CoreWorker
from gyre.runtime.trainer import Trainer
from gyre.runtime.workers import Supervision, WorkerDown, Workers
from gyre.types import Snapshot

if TYPE_CHECKING:
  from gyre.runtime.conductor import Conductor

log = logging.getLogger(__name__)


class InProcess:
  """Cells of this process, on sub-meshes of its devices.

  Attributes:
    snapshots: None: weights go from cell to cell as arrays.
  """

  snapshots: pathlib.Path | None = None

  def __init__(
    self,
    layout: sched.Layout,
    config: Config,
    trainer: Trainer,
    mesh: jax.sharding.Mesh,
    *,
    reference: pathlib.Path,
  ):
    """Nothing is started.

    Args:
      layout: the cells.
      config: the run's.
      trainer: the core's; holds the state when `start` is called.
      mesh: of one cell.
      reference: checkpoint of the KL term's reference policy.
    """
    self._layout, self._config, self._mesh = layout, config, mesh
    self._trainer, self._reference = trainer, reference
    self._workers: dict[str, CellWorker] = {}
    self._conductor: Conductor | None = None

  async def start(self, state: pathlib.Path) -> dict[str, Worker]:
    """The cells; the first holds the state already.

    Args:
      state: where it is committed.
    """
    del state
    for cell in self._layout:
      if cell.name != self._layout.core.name:
        self._workers[cell.name] = self.worker(cell)
      else:
        core = CoreWorker(cell.name, self._trainer, self._config)
        self._workers[cell.name] = core
        self._give_reference(core)
    return dict(self._workers)

  def worker(self, cell: sched.Cell) -> Worker:
    """A cell other than the core."""
    mesh = reshard.resized(self._mesh, cell.devices)
    made = CellWorker(cell.name, self._trainer.on(mesh), self._config)
    self._give_reference(made)
    return made

  def _give_reference(self, worker: CellWorker) -> None:
    if self._config.learner.kl_coef:
      worker.reference = Snapshot(0, str(self._reference))

  def supervise(self, conductor: Conductor) -> None:
    """The conductor hears of engines that fail."""
    self._conductor = conductor

  def failed(self, cell: str, error: EngineDown) -> None:
    """An engine does not do what it should: here that is the run's end.

    Args:
      cell: whose engine it is.
      error: what it did.
    """
    if self._conductor is not None:
      self._conductor.fail(error)

  async def close(self) -> None:
    """Ends all."""
    for worker in self._workers.values():
      await worker.close()


class Local:
  """A process a cell, started again when it dies.

  The conductor hears of deaths and returns. Once a cell has died too often the
  run goes on without it, while what is left can serve and train.
  """

  def __init__(
    self,
    layout: sched.Layout,
    config: Config,
    model_cfg: ModelConfig,
    directory: pathlib.Path,
    *,
    reference: pathlib.Path,
    say: Callable[[str], None],
  ):
    """Nothing is started.

    Args:
      layout: the cells; a process sees the devices of its cell alone.
      config: the run's.
      model_cfg: the model.
      directory: of the run.
      reference: checkpoint of the KL term's reference policy.
      say: shows and logs a line.
    """
    self._layout, self._config, self._say = layout, config, say
    self._reference = reference
    self._conductor: Conductor | None = None
    self._gone: dict[str, str] = {}
    self._lost: set[str] = set()
    self._changed = asyncio.Event()
    self._workers = Workers(
      [self._spec(cell, model_cfg) for cell in layout],
      directory,
      supervision=Supervision(restarts=config.elastic.restarts),
      on_up=self._up,
      on_down=self._down,
      on_lost=self._down_for_good,
    )

  def _spec(self, cell: sched.Cell, model_cfg: ModelConfig) -> specs.Spec:
    platform = launch.cells_platform()
    devices = cell.devices
    if platform != "cpu":
      devices = launch.visible(devices)
    cache = launch.cache_directory()
    return specs.jax_spec(
      cell.name,
      self._config,
      model_cfg.to_hf(),
      core=True,
      devices=devices,
      platform=platform,
      compilation_cache=str(cache),
    )

  @property
  def snapshots(self) -> pathlib.Path:
    """Where weights lie that one process gives another; gone at the end."""
    return self._workers.shared

  async def start(self, state: pathlib.Path) -> dict[str, Worker]:
    """Starts all; the first takes its state from the checkpoint.

    Args:
      state: the checkpoint.

    Raises:
      WorkerError: a cell cannot be started.
      WorkerDown: the core died too often.
      ManifestError: the checkpoint is corrupt.
    """
    await self._workers.start()
    cells = self._workers.cells
    for cell in cells.values():
      if self._config.run.deterministic:
        # The core adds all, in the order given, as one process would.
        cell.helpers = ()
      if self._config.learner.kl_coef:
        cell.reference = Snapshot(0, str(self._reference))
    core = cells[self._layout.core.name]
    while True:
      try:
        await core.restore(state)
        return dict(cells)
      except WorkerDown:
        if not await self._returns(core.name):
          raise

  async def _returns(self, cell: str) -> bool:
    """Waits for a cell to be up again; False: it never will be."""
    while cell in self._gone and cell not in self._lost:
      await self._changed.wait()
    return cell not in self._lost

  def worker(self, cell: sched.Cell) -> Worker:
    """Refused by the configuration's checks.

    Raises:
      EngineDown: always.
    """
    raise EngineDown(f"{cell.name} has no process: elastic.launcher is 'local'")

  def supervise(self, conductor: Conductor) -> None:
    """The conductor hears of deaths from now on, and of those before.

    Raises:
      WorkerDown: a cell is lost for good already.
    """
    if self._lost:
      raise WorkerDown(self._gone[min(self._lost)])
    self._conductor = conductor
    for cell, why in self._gone.items():
      conductor.cell_down(cell, WorkerDown(why))

  def _news(self) -> None:
    self._changed.set()
    self._changed = asyncio.Event()

  def _up(self, cell: str, _: str) -> None:
    self._news()
    if self._gone.pop(cell, None) is None:
      return
    self._say(f"{cell} is up again")
    if self._conductor is not None:
      self._conductor.cell_up(cell, self._workers.cells[cell])

  def _down(self, cell: str, why: str) -> None:
    self._news()
    self._gone[cell] = why
    if self._conductor is not None:
      self._conductor.cell_down(cell, WorkerDown(why))

  def _down_for_good(self, cell: str, why: str) -> None:
    self._lost.add(cell)
    log.warning("%s", why)
    self._down(cell, why)
    left = [c for c in self._layout if c.name not in self._lost]
    trains = any(c.kind != "standalone" for c in left)
    serves = any(c.kind != "trainer" for c in left)
    if self._conductor is None or (trains and serves and self._conductor.begun):
      return
    lack = f"no cell is left to {'serve' if trains else 'train'}: "
    whole = trains and serves  # but it never came to work
    self._conductor.fail(WorkerDown(f"{'' if whole else lack}{why}"))

  def failed(self, cell: str, error: EngineDown) -> None:
    """An engine does not do what it should: its process is started anew.

    Args:
      cell: whose engine it is.
      error: what it did.
    """
    if self._conductor is not None:
      self._conductor.cell_down(cell, error)
    if pid := self._workers.pids().get(cell):
      log.warning("%s", error)
      os.kill(pid, signal.SIGKILL)

  async def close(self) -> None:
    """Ends every process; nothing of them is left."""
    await self._workers.close()
