"""A cell whose training takes time, and computes nothing.

It speaks cell.Worker and cell.Core beside an emulated engine: switches,
micro-steps and publications take the wall time of a profile. Its sums are the
shares of a batch that it trained, so that what was lost or trained twice is
seen where they are combined. JAX-free.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

from gyre.rollout.emulated import EmulatedEngine
from gyre.rollout.profile import Profile
from gyre.runtime import exchange
from gyre.runtime.cell import CellError, Sums
from gyre.store import manifest
from gyre.types import Batch, Snapshot

_STATE = "state.json"
_ON_THE_WAY_S = 0.02


def batch_share(batch: Batch | float, executions: int) -> float:
  """The share of an update that a micro-step is.

  Args:
    batch: packed rows: what counts are the executions whose first weighted
      entry they hold; or the share itself.
    executions: of a whole update.
  """
  if isinstance(batch, int | float):
    return float(batch)
  return float(np.sum(batch.execution_first)) / executions


def _read(directory: str | os.PathLike) -> tuple[int, Mapping[str, Any]]:
  """(version, meta) of what `save` or `snapshot` wrote, verified."""
  meta = manifest.verify(directory).meta
  state = manifest.read_document(pathlib.Path(directory) / _STATE)
  return int(state["version"]), meta["meta"]


class EmulatedCell:
  """A satellite, or a cell that only serves; see cell.Worker."""

  def __init__(
    self,
    name: str,
    profile: Profile,
    *,
    devices: int = 1,
    executions: int = 128,
  ):
    """Names the cell; it does nothing before `serve` or `join`.

    Args:
      name: "cell 0".
      profile: what it costs.
      devices: that profile.nodes are.
      executions: of an update, B * N.
    """
    self.name, self.profile = name, profile
    self.engine: EmulatedEngine | None = None
    self.role, self.row_multiple = "idle", 1
    self.reference: Any = None
    self._devices, self._executions = devices, executions
    self._version = 0
    self._share, self._micro_steps = 0.0, 0
    self._turn = asyncio.Lock()
    self._free = -math.inf  # since when it has nothing to do

  @contextlib.asynccontextmanager
  async def _taking(self, emulated_s: float) -> AsyncIterator[None]:
    """What is done inside takes so long, in the order asked for.

    What comes at once after what was before begins where that ended: the way
    of an answer and the next call between two processes is the emulation's,
    and as long as minutes of what is emulated.
    """
    loop = asyncio.get_running_loop()
    async with self._turn:
      begin = loop.time()
      if begin - self._free <= _ON_THE_WAY_S:
        begin = self._free
      end = begin + self.profile.wall(emulated_s)
      yield
      await asyncio.sleep(max(0.0, end - loop.time()))
      self._free = end

  async def _check_weights(self, weights: Any, version: int) -> None:
    if not isinstance(weights, Snapshot):
      return
    held = weights.version
    if (pathlib.Path(weights.path) / _STATE).exists():
      held, _ = await asyncio.to_thread(_read, weights.path)
    if held != version:
      raise CellError(f"{weights.path} holds version {held}, not {version}")

  async def serve(self, weights: Any, version: int) -> None:
    """See cell.Worker; takes serve_s."""
    await self._check_weights(weights, version)
    self.role = "idle"
    async with self._taking(self.profile.serve_s):
      self._clear()
      if self.engine is None:
        name = self.name.replace("cell", "engine")
        self.engine = EmulatedEngine(self.profile, version=version, name=name)
    self.engine.take(weights, version)
    await self.engine.wake()
    self.role = "rollout"

  async def join(self, weights: Any, version: int) -> None:
    """See cell.Worker; takes join_s."""
    if self._micro_steps:
      raise CellError(
        f"{self.name} holds sums at version {self._version}: take or reset "
        f"them before it joins at version {version}"
      )
    await self._check_weights(weights, version)
    slept = self.engine is not None and not self.engine.stats().asleep
    if slept:
      await self.engine.sleep()
    # Weights of a later update are taken without a switch.
    cost = 0.0 if self.role == "train" else self.profile.join_s
    async with self._taking(cost):
      pass
    self._version, self.role = version, "train"

  def _check_trains(self) -> None:
    if self.role != "train":
      raise CellError(f"{self.name} is in role {self.role!r}, not 'train'")

  async def work(self, batch: Batch | float, extras: Any = None) -> Any:
    """See cell.Worker; takes the profile's share of an update.

    Args:
      batch: a micro-step, or its share of an update.
      extras: returned as they are.
    """
    self._check_trains()
    share = batch_share(batch, self._executions)
    async with self._taking(self.profile.training_s(share)):
      pass
    self._share += share
    self._micro_steps += 1
    return extras

  def _clear(self) -> None:
    self._share, self._micro_steps = 0.0, 0

  async def sums(self) -> Sums:
    """See cell.Worker."""
    self._check_trains()
    async with self._turn:
      if not self._micro_steps:
        return {}
      out = {
        "counts.share": np.float64(self._share).reshape(()),
        "counts.micro_steps": np.asarray(self._micro_steps, np.int64),
        "version": np.asarray(self._version, np.int32),
      }
      self._clear()
      return out

  async def reset(self) -> None:
    """See cell.Worker; what is under way is discarded with the rest."""
    async with self._turn:
      self._clear()

  async def close(self) -> None:
    """See cell.Worker."""
    if self.engine is not None:
      await self.engine.close()
      self.engine = None
    self._clear()
    self.role = "idle"


class EmulatedCore(EmulatedCell):
  """The cell whose version is the trainer's; see cell.Core."""

  async def init(self, params: Any, seed: int, version: int = 0) -> None:
    """See cell.Core; there are no weights to take."""
    del params, seed
    self._version = version

  async def _check_weights(self, weights: Any, version: int) -> None:
    if weights is None and version != self._version:
      raise CellError(
        f"{self.name} holds version {self._version}, not {version}"
      )
    await super()._check_weights(weights, version)

  async def apply(self, sums: Sequence[Sums], version: int) -> dict[str, Any]:
    """See cell.Core.

    Returns:
      emulated/share, of an update, and emulated/micro_steps.
    """
    self._check_trains()
    if self._micro_steps:
      raise CellError(f"{self.name} holds sums that were not taken")
    total: dict[str, Any] = {}
    for one in sums:
      total = exchange.add(total, one)
    if total and int(total["version"]) != self._version:
      raise CellError(
        f"sums of version {int(total['version'])}, {self.name} holds "
        f"{self._version}"
      )
    self._version = version
    return {
      "emulated/share": float(total.get("counts.share", 0.0)),
      "emulated/micro_steps": int(total.get("counts.micro_steps", 0)),
    }

  async def weights(self) -> dict[str, np.ndarray]:
    """See cell.Core."""
    return {"version": np.asarray(self._version, np.int32)}

  def _write(
    self, directory: os.PathLike, meta: Mapping[str, Any]
  ) -> manifest.Manifest:
    tmp = manifest.temporary(directory)
    manifest.write_document(tmp / _STATE, {"version": self._version})
    return manifest.commit(tmp, directory, {"arrays": {}, "meta": dict(meta)})

  async def save(self, directory: os.PathLike, meta: Mapping[str, Any]) -> None:
    """See cell.Core."""
    await asyncio.to_thread(self._write, directory, meta)

  async def restore(self, directory: os.PathLike) -> Mapping[str, Any]:
    """See cell.Core."""
    self._version, meta = await asyncio.to_thread(_read, directory)
    return meta

  async def snapshot(self, directory: os.PathLike) -> Snapshot:
    """See cell.Core."""
    version = self._version
    committed = await asyncio.to_thread(self._write, directory, {})
    path = str(pathlib.Path(directory).absolute())
    return Snapshot(version, path, committed.files)

  async def resize(
    self,
    devices: Sequence[int],
    sizes: Any = None,
    *,
    directory: os.PathLike | None = None,
  ) -> None:
    """See cell.Core: as many nodes a device as before; takes join_s."""
    del sizes
    if not devices or len(set(devices)) != len(devices):
      raise CellError(f"devices {list(devices)} must be some, each once")
    async with self._taking(self.profile.join_s):
      if directory is not None:
        await asyncio.to_thread(self._write, directory, {})
    nodes = self.profile.nodes * len(devices) / self._devices
    self.profile = dataclasses.replace(self.profile, nodes=nodes)
    self._devices = len(devices)
    if self.engine is not None:
      self.engine.become(self.profile)
