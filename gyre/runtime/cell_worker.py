"""The cells of this process: sub-meshes of its devices.

A cell has a trainer and an engine on the same devices; one of them holds
their memory at a time. What touches arrays runs in the cell's own thread, in
the order asked for, so that the event loop serves the other cells meanwhile.
The cell that holds the optimizer state is in core_worker.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gyre.config import Config
from gyre.learner import packing, step
from gyre.learner.objective import Extras
from gyre.rollout.engine import Engine
from gyre.rollout.jax_engine import JaxEngine
from gyre.rollout.programs import Programs
from gyre.rollout.replicas import Replicas
from gyre.runtime import publish, reshard
from gyre.runtime.cell import CellError, Sums
from gyre.runtime.trainer import Trainer
from gyre.store import manifest
from gyre.types import Batch, Snapshot


def pad_rows(batch: Batch, multiple: int) -> Batch:
  """Returns the micro-step with empty rows added up to a multiple.

  A row without tokens and entries adds nothing to any sum, so a micro-step
  fits every cell's mesh, whatever mesh it was made for.
  """
  rows, tokens = batch.tokens.shape
  missing = -rows % multiple
  if not missing:
    return batch
  empty = packing.empty_batch(missing, tokens, batch.entry_parent.shape[1])
  return jax.tree.map(lambda x, e: np.concatenate([x, e]), batch, empty)


def _pad_extras(extras: Extras, padded: Batch) -> Extras:
  rows = padded.tokens.shape[0]

  def pad(x):
    x = np.asarray(x)
    return np.concatenate([x, np.zeros((rows - len(x), *x.shape[1:]), x.dtype)])

  return jax.tree.map(pad, extras)


class CellWorker:
  """A satellite, or a cell that only serves; see cell.Worker.

  For subclasses: `_do` runs what touches arrays in the cell's thread. There
  `_weights` are what it trains on, `_check_join` and `_place` take those of
  `join`, and `_free_training` gives all of training up: `_params`, `_sums` and
  `_placed_reference`, which are the thread's alone.
  """

  def __init__(
    self,
    name: str,
    trainer: Trainer,
    config: Config,
    *,
    programs: dict[Any, Programs] | None = None,
  ):
    """Names the cell; it holds nothing before `serve` or `join`.

    Args:
      name: "cell 0".
      trainer: the step over the cell's mesh.
      config: rollout and agent sections shape the engine.
      programs: compiled steps of engines by device, which cells of the same
        model and settings may share; filled as engines start.
    """
    self.name, self.trainer = name, trainer
    self.engine: Engine | None = None
    self.role = "idle"
    self.reference: Any = None
    self._config = config
    self._params: Any = None
    self._placed_reference: Any = None
    self._sums: step.GradSums | None = None
    self._served: tuple[Any, int] | None = None
    self._version = 0
    self._verified = ("", "")  # a directory, and its stamp then
    self._engine_at: tuple[Any, ...] = ()
    self._programs = {} if programs is None else programs
    self._thread = concurrent.futures.ThreadPoolExecutor(
      1, thread_name_prefix=name
    )

  @property
  def row_multiple(self) -> int:
    """See cell.Worker."""
    return self.trainer.row_multiple

  async def _do(self, f: Callable[..., Any], *args: Any) -> Any:
    """Runs f in the cell's thread, after what was asked for before."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._thread, f, *args)

  # Serving.

  def _engine_devices(self) -> tuple[Any, ...]:
    """The devices of the cell that have an engine, or a replica of it."""
    devices = tuple(self.trainer.mesh.devices.flat)
    return devices[: self._config.rollout.engines or None]

  def _embedded(self, params: Any, version: int) -> Engine:
    name, devices = self.name.replace("cell", "engine"), self._engine_devices()
    if len(devices) == 1:
      return self._replica(params, version, devices[0], name)
    return Replicas(
      [
        self._replica(params, version, device, f"{name}.{i}")
        for i, device in enumerate(devices)
      ],
      slots=self._config.rollout.max_slots,
      name=name,
    )

  def _replica(
    self, params: Any, version: int, device: Any, name: str
  ) -> JaxEngine:
    made = JaxEngine(
      params,
      self.trainer.model_cfg,
      version=version,
      rollout=self._config.rollout,
      max_context=self._config.agent.max_context,
      deterministic=self._config.run.deterministic,
      device=device,
      name=name,
      programs=self._programs.get(device),
    )
    self._programs[device] = made.programs
    return made

  def start_engine(self, params: Any, version: int) -> Engine:
    """Starts the engine with weights; it copies them."""
    self._engine_at = self._engine_devices()
    self.engine = self._embedded(params, version)
    return self.engine

  async def serve(self, weights: Any, version: int) -> None:
    """See cell.Worker."""
    await self._do(self._free_training)
    self.role = "idle"
    arrays = await self._do(self._read, weights, version)
    if self.engine is None:
      await self.start_engine(arrays, version).ready()
    else:
      await self.engine.wake()
      await publish.publish(self.engine, arrays, version)
    self.role = "rollout"
    self._remember(weights, version)

  def _remember(self, weights: Any, version: int) -> None:
    """What it serves, to be served again; what costs the devices nothing."""
    self._served = None if _on_devices(weights) else (weights, version)

  async def publish(self, weights: Any, version: int) -> None:
    """The engine, which serves, takes weights; what it then uses is checked.

    Raises:
      PublishError: it uses others.
    """
    arrays = await self._do(self._read, weights, version)
    await publish.publish(self.engine, arrays, version)
    self._remember(weights, version)

  def _free_training(self) -> None:
    """Frees every array of training; in the thread."""
    reshard.free(self.trainer_arrays())
    self._params = self._placed_reference = self._sums = None

  # Training.

  async def join(self, weights: Any, version: int) -> None:
    """See cell.Worker."""
    if self._sums is not None:
      raise CellError(
        f"{self.name} holds sums at version {self._version}: take or reset "
        f"them before it joins at version {version}"
      )
    # Before the engine gives up anything.
    await self._do(self._check_join, weights, version)
    before = self.role
    if self.engine is not None:
      await self.engine.sleep()
    try:
      await self._do(self._place, weights, version)
    except Exception:  # raised again: the cell serves as before it
      await self._do(self._free_training)
      self.role = "idle"
      if before == "rollout":
        await self._serve_again()
      raise
    self._version, self.role = version, "train"

  async def _serve_again(self) -> None:
    """Unless the engine was given later weights, which only their giver has."""
    weights, version = self._served or (None, -1)
    if version == self.engine.stats().version:
      await self.serve(weights, version)

  def _check_join(self, weights: Any, version: int) -> None:
    """Refuses weights that cannot be taken; in the thread."""
    if isinstance(weights, Snapshot):
      self._verify(weights, version)

  def _place(self, weights: Any, version: int) -> None:
    """Takes weights onto the cell's mesh, as copies; in the thread."""
    reshard.free(self._params)
    self._params = None
    self._params = self._read(weights, version, copy=True)

  def _verify(self, weights: Snapshot, version: int) -> str:
    """Hashes files, unless someone did and they are as they were."""
    _check_snapshot(weights, version)
    path, stamp = self._verified
    stamp = weights.verified or (stamp if path == weights.path else "")
    stamp = manifest.checked(weights.path, stamp)
    self._verified = weights.path, stamp
    return stamp

  def _read(self, weights: Any, version: int, *, copy=False) -> Any:
    """Weights as arrays: a Snapshot's are read onto the cell's mesh."""
    if isinstance(weights, Snapshot):
      stamp = self._verify(weights, version)
      abstract = self.trainer.abstract()
      got, _ = reshard.restore(
        weights.path,
        {"params": abstract.params, "version": abstract.version},
        verified=True,
      )
      manifest.unchanged(weights.path, stamp)
      if int(got["version"]) != version:
        raise CellError(
          f"{weights.path} holds version {int(got['version'])}, not {version}"
        )
      return got["params"]
    if not copy:
      return weights
    self._check_weights(weights)
    return reshard.put(weights, self.trainer.programs.layout.params())

  def _check_weights(self, weights: Any) -> None:
    want = reshard.named_leaves(self.trainer.abstract().params)
    have = reshard.named_leaves(weights)
    if wrong := sorted(want.keys() ^ have.keys()):
      raise CellError(f"weights disagree with the model on {wrong[0]}")
    for name, leaf in want.items():
      if have[name].shape != leaf.shape:
        raise CellError(
          f"weights: {name} is {have[name].shape}, the model's {leaf.shape}"
        )

  async def work(self, batch: Batch, extras: Extras | None = None) -> Extras:
    """See cell.Worker."""
    self._check_trains()
    return await self._do(self._work, batch, extras)

  def _check_trains(self) -> None:
    if self.role != "train":
      raise CellError(f"{self.name} is in role {self.role!r}, not 'train'")

  def _weights(self) -> Any:
    return self._params

  def _work(self, batch: Batch, extras: Extras | None) -> Extras:
    rows = batch.tokens.shape[0]
    padded = pad_rows(batch, self.row_multiple)
    extras = extras or Extras()
    if self.trainer.learner.kl_coef and extras.logp_reference is None:
      logp = self.trainer.score(self._reference(), padded)
      extras = extras.replace(logp_reference=np.asarray(logp)[:rows])
    programs, params = self.trainer.programs, self._weights()
    if self._sums is None:
      self._sums = programs.zeros(params, np.int32(self._version))
    self._sums = programs.micro_step(
      params, padded, self._sums, extras=_pad_extras(extras, padded)
    )
    jax.block_until_ready(self._sums.counts.tokens)
    return extras

  def _reference(self) -> Any:
    if self._placed_reference is None:
      if self.reference is None:
        raise CellError(f"{self.name}: kl_coef needs reference weights")
      weights = self.reference
      version = weights.version if isinstance(weights, Snapshot) else 0
      self._placed_reference = self._read(weights, version, copy=True)
    return self._placed_reference

  async def sums(self) -> Sums:
    """See cell.Worker; arrays stay on the cell's mesh."""
    self._check_trains()
    return await self._do(self._take)

  def _take(self) -> Sums:
    taken, self._sums = self._sums, None
    return {} if taken is None else reshard.named_leaves(taken)

  def trainer_arrays(self) -> tuple[Any, ...]:
    """Returns what training holds on the cell's devices now."""
    held = (self._params, self._placed_reference, self._sums)
    return tuple(x for x in held if x is not None)

  async def reset(self) -> None:
    """See cell.Worker."""
    await self._do(self._reset)

  def _reset(self) -> None:
    reshard.free(self._sums)
    self._sums = None

  async def close(self) -> None:
    """See cell.Worker."""
    if self.engine is not None:
      await self.engine.close()
      self.engine = None
    await self._do(self._free_training)
    self.role = "idle"
    self._thread.shutdown(wait=False)


def _check_snapshot(weights: Snapshot, version: int) -> None:
  if weights.version != version:
    raise CellError(
      f"{weights.path} holds version {weights.version}, not {version}"
    )


def _on_devices(tree: Any) -> bool:
  return any(isinstance(x, jax.Array) for x in jax.tree.leaves(tree))
