"""What a cell can be asked to do, by whatever launcher it was started.

The controller knows these two protocols only. `cell_worker` and `core_worker`
have the cells of this process; cells of other processes speak the same over a
socket.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gyre.rollout.engine import Engine, EngineError
from gyre.types import Batch, Snapshot

if TYPE_CHECKING:  # the process of an emulated cell has no JAX
  from gyre import config
  from gyre.learner.objective import Extras

# Un-normalised gradient sums, denominators and metric sums by name; empty
# where nothing was added.
Sums = Mapping[str, Any]


class CellError(RuntimeError):
  """A cell was asked for what its role or its weights do not allow."""


# What is asked of a cell may fail with these because of the cell: refused, or
# because it, its engine or its process is dead.
CELL_ERRORS = (CellError, EngineError)

# News of a cell's death may come so many seconds after the error it causes.
GRACE_S = 10.0


class Worker(Protocol):
  """A cell: one of its trainer and its engine holds the devices.

  Attributes:
    name: of the cell.
    engine: serves while the role is "rollout"; None before the first `serve`.
    role: "idle", "rollout" or "train".
    row_multiple: rows of a micro-step are padded to a multiple of it.
    reference: weights of the KL term's reference policy, or None: a pytree or
      a Snapshot, read when they are first needed.
  """

  name: str
  engine: Engine | None
  role: str
  row_multiple: int
  reference: Any

  async def serve(self, weights: Any, version: int) -> None:
    """Frees the training arrays; the engine wakes with weights.

    Args:
      weights: parameter pytree, or a Snapshot.
      version: of the weights; checked against what the engine then serves.
    """

  async def join(self, weights: Any, version: int) -> None:
    """Puts the engine to sleep, takes the weights; the sums are empty.

    A cell in training may join again, for later weights. Where it fails, the
    role is what it was, or "idle" if what it served cannot be served again.

    Args:
      weights: parameter pytree, or a Snapshot that `CoreWorker.save` or
        `reshard.save` wrote.
      version: of the weights.

    Raises:
      CellError: sums of earlier weights were not taken.
    """

  async def work(self, batch: Batch, extras: Extras | None = None) -> Extras:
    """Adds one micro-step to the sums.

    Args:
      batch: the micro-step, whole.
      extras: what an earlier `work` on it returned.

    Returns:
      Arrays of the host that later passes over the micro-step need.
    """

  async def sums(self) -> Sums:
    """Hands over what was added since the last time, and starts from zero."""

  async def reset(self) -> None:
    """Discards what was added."""

  async def close(self) -> None:
    """Ends the engine and frees everything."""


class Core(Worker, Protocol):
  """The cell with the authoritative weights and the optimizer state."""

  async def init(self, params: Any, seed: int, version: int = 0) -> None:
    """Takes first weights, with an optimizer that has seen nothing."""

  async def apply(self, sums: Sequence[Sums], version: int) -> dict[str, Any]:
    """Combines sums in the order given, normalises once, takes a step.

    Args:
      sums: of all cells, or of all micro-steps; they are used up. With
        nothing in them the weights stay.
      version: of the weights after it.

    Returns:
      The metrics.
    """

  async def weights(self) -> Any:
    """The parameters, valid until the next apply, resize or change of role."""

  async def save(self, directory: os.PathLike, meta: Mapping[str, Any]) -> None:
    """Commits the full state; a satellite can join from the directory."""

  async def restore(self, directory: os.PathLike) -> Mapping[str, Any]:
    """Takes the full state of a checkpoint; returns its meta."""

  async def resize(
    self,
    devices: Sequence[int],
    sizes: config.Mesh | None = None,
    *,
    directory: os.PathLike | None = None,
  ) -> None:
    """Moves state and sums onto another mesh.

    Args:
      devices: indices of the devices to go on on.
      sizes: of the mesh axes; None: data and tensor stay, fsdp follows.
      directory: goes through a checkpoint written there, which must not
        exist; None: straight from device to device.
    """

  async def snapshot(self, directory: os.PathLike) -> Snapshot:
    """Writes the weights alone, for satellites of other processes."""
