"""The cell of this process that holds the optimizer state."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gyre import config as config_lib
from gyre.learner import step
from gyre.runtime import reshard
from gyre.runtime.cell import CellError, Sums
from gyre.runtime.cell_worker import CellWorker
from gyre.runtime.trainer import SKIPPED, Trainer
from gyre.types import Snapshot


class CoreWorker(CellWorker):
  """The cell that holds the only optimizer state; see cell.Core.

  While it serves, the state lies in host memory. Without a state it is a
  satellite, which joins with weights; `restore` makes it the core.
  """

  def __init__(self, *args: Any, **kwargs: Any):
    """As CellWorker; `trainer.state` may be there already."""
    super().__init__(*args, **kwargs)
    self._on_host: Any = None
    self._trainers = {self.trainer.mesh: self.trainer}

  # The state.

  def _weights(self) -> Any:
    state = self.trainer.state
    return self._params if state is None else state.params

  @property
  def _is_core(self) -> bool:
    return self._on_host is not None or self.trainer.state is not None

  async def init(self, params: Any, seed: int, version: int = 0) -> None:
    """See cell.Core."""
    await self._do(self.trainer.init, params, seed, version)
    self._on_host = None

  async def restore(self, directory: os.PathLike) -> Mapping[str, Any]:
    """See cell.Core; an engine that serves gives its memory up first."""
    if self.role == "rollout":
      await self.engine.sleep()
      self.role = "idle"
    return await self._do(self._restore, directory)

  def _restore(self, directory: os.PathLike) -> Mapping[str, Any]:
    super()._free_training()
    self._on_host = None
    return self.trainer.restore(directory)

  async def save(self, directory: os.PathLike, meta: Mapping[str, Any]) -> None:
    """See cell.Core."""
    await self._do(self._save, directory, meta)

  def _save(self, directory: os.PathLike, meta: Mapping[str, Any]) -> None:
    host = self._on_host
    self._to_devices()
    try:
      self.trainer.save(directory, meta)
    finally:
      if host is not None:
        self._to_host()

  async def snapshot(self, directory: os.PathLike) -> Snapshot:
    """See cell.Core."""
    return await self._do(self._snapshot, directory)

  def _snapshot(self, directory: os.PathLike) -> Snapshot:
    state = self._on_host or self.trainer.state
    held = {"params": state.params, "version": jnp.asarray(state.version)}
    committed = reshard.save(held, directory)
    path = str(pathlib.Path(directory).absolute())
    return Snapshot(int(state.version), path, committed.files)

  async def weights(self) -> Any:
    """See cell.Core; arrays of the host while it serves."""
    return await self._do(lambda: (self._on_host or self.trainer.state).params)

  # Roles.

  def _to_host(self) -> None:
    if self._on_host is None and self.trainer.state is not None:
      self._on_host = reshard.to_host(self.trainer.state)
      reshard.free(self.trainer.state)
      self.trainer.state = None

  def _to_devices(self) -> None:
    if self._on_host is not None:
      shardings = jax.tree.map(lambda x: x.sharding, self.trainer.abstract())
      self.trainer.state = reshard.from_host(self._on_host, shardings)
      self._on_host = None

  def _free_training(self) -> None:
    super()._free_training()
    self._to_host()

  async def serve(self, weights: Any, version: int) -> None:
    """See cell.Worker; weights None are the core's own."""
    await self._do(self._free_training)
    if weights is None:
      self._check_version(version)
      weights = self._on_host.params
    await super().serve(weights, version)

  def _check_version(self, version: int) -> None:
    state = self._on_host or self.trainer.state
    if state is None:
      raise CellError(f"{self.name} has no state: init or restore comes first")
    if int(state.version) != version:
      raise CellError(
        f"{self.name} holds version {int(state.version)}, not {version}"
      )

  def _check_join(self, weights: Any, version: int) -> None:
    if weights is None:
      self._check_version(version)
    elif self._is_core:
      raise CellError(f"{self.name} is the core: it joins with weights None")
    else:
      super()._check_join(weights, version)

  def _place(self, weights: Any, version: int) -> None:
    if weights is None:
      self._to_devices()
    else:
      super()._place(weights, version)

  # The update.

  async def apply(self, sums: Sequence[Sums], version: int) -> dict[str, Any]:
    """See cell.Core."""
    self._check_trains()
    return await self._do(self._apply, list(sums), version)

  def _apply(self, sums: list[Sums], version: int) -> dict[str, Any]:
    if self._sums is not None:
      raise CellError(f"{self.name} holds sums that were not taken")
    total = self._combine(sums)
    metrics = dict(SKIPPED)
    if total is not None:
      self.trainer.state, got = self.trainer.programs.apply(
        self.trainer.state, total
      )
      metrics = {k: v.item() for k, v in jax.device_get(got).items()}
      reshard.free(total)
    self.trainer.set_version(version)
    self._version = version
    return metrics

  def _combine(self, sums: list[Sums]) -> step.GradSums | None:
    """Sums of all, on the core's mesh, in the order given."""
    programs, total = self.trainer.programs, None
    mine = int(self.trainer.state.version)
    while sums:
      named = sums.pop(0)
      if not named:
        continue
      one = self._unflatten(named)
      if int(one.version) != mine:
        raise CellError(
          f"sums of version {int(one.version)}, {self.name} holds {mine}"
        )
      total = one if total is None else programs.combine(total, one)
    return total

  def _unflatten(self, named: Sums) -> step.GradSums:
    """Named arrays of any mesh, or of the host, on the core's."""
    where = self.trainer.programs.layout.sums()
    params = self.trainer.state.params
    like = jax.eval_shape(step.zero_sums, params, np.int32(0))
    names = reshard.named_leaves(like)
    if names.keys() != named.keys():
      wrong = sorted(names.keys() ^ named.keys())
      raise CellError(f"sums disagree with the model on {', '.join(wrong[:3])}")
    for name, leaf in names.items():
      if named[name].shape != leaf.shape:
        raise CellError(
          f"sums: {name} is {named[name].shape}, the model's {leaf.shape}"
        )
    leaves = [named[name] for name in names]
    tree = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return jax.device_put(tree, where)

  # Another mesh.

  async def resize(
    self,
    devices: Sequence[int],
    sizes: config_lib.Mesh | None = None,
    *,
    directory: os.PathLike | None = None,
  ) -> None:
    """See cell.Core."""
    mesh = reshard.resized(self.trainer.mesh, devices, sizes)
    await self._do(self._resize, mesh, directory)
    if self.engine is not None and self._engine_at != self._engine_devices():
      # A device is given away, or taken back; `serve` starts another.
      engine, self.engine = self.engine, None
      await engine.close()

  def _resize(
    self, mesh: jax.sharding.Mesh, directory: os.PathLike | None
  ) -> None:
    old = self.trainer
    if mesh == old.mesh:
      return
    reshard.check_splits(old.specs, old.mesh, mesh)
    new = self._trainers.setdefault(mesh, old.on(mesh))
    if old.state is not None:
      held, target = self._held(old), self._target(new)
      if directory is None:
        got = reshard.put(held, jax.tree.map(lambda x: x.sharding, target))
        reshard.free(held)
      else:
        got = reshard.through(directory, held, target)
      old.state, new.state = None, got["state"]
      self._sums = got.get("sums")
    reshard.free(self._placed_reference)
    self._placed_reference = None
    self.trainer = new

  def _held(self, trainer: Trainer) -> dict[str, Any]:
    held = {"state": trainer.state}
    return held if self._sums is None else held | {"sums": self._sums}

  def _target(self, trainer: Trainer) -> dict[str, Any]:
    target = {"state": trainer.abstract()}
    if self._sums is None:
      return target
    return target | {"sums": step.abstract_sums(trainer.programs.layout)}
