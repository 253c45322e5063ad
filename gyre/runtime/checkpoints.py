"""The checkpoints of a run: which there are, which are kept, which is best."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Collection
from typing import Any

from gyre.runtime.reshard import CheckpointError
from gyre.store import manifest

_STEP, _WARM, _BEST = "step_", "warm_", "best.json"


class Checkpoints:
  """DIR/checkpoints: step_000012, warm_000050 and best.json."""

  def __init__(self, directory: pathlib.Path, keep: int):
    """Looks after a directory; nothing is touched yet.

    Args:
      directory: of the checkpoints.
      keep: newest steps to keep, beside the best.
    """
    self.directory, self._keep = directory, keep

  def clean_up(self) -> list[str]:
    """Makes the directory, removes what a killed writer left behind."""
    self.directory.mkdir(parents=True, exist_ok=True)
    return manifest.clean_temporaries(self.directory)

  def _numbers(self, prefix: str) -> list[int]:
    paths = self.directory.glob(f"{prefix}*")
    names = [p.name.removeprefix(prefix) for p in paths]
    return sorted(int(n) for n in names if n.isdigit())

  def steps(self) -> list[int]:
    """Returns the steps that have a checkpoint, oldest first."""
    return self._numbers(_STEP)

  def path(self, step: int) -> pathlib.Path:
    """Returns where a step's checkpoint is, or goes."""
    return self.directory / f"{_STEP}{step:06d}"

  def warm_path(self, step: int) -> pathlib.Path:
    """Returns where a supervised step's checkpoint is, or goes."""
    return self.directory / f"{_WARM}{step:06d}"

  @property
  def reference(self) -> pathlib.Path:
    """Where the weights of the KL term's reference policy are, or go."""
    return self.directory / "reference"

  def latest(self) -> pathlib.Path | None:
    """Returns the newest checkpoint, of training before that of warm start."""
    if steps := self.steps():
      return self.path(steps[-1])
    if warm := self._numbers(_WARM):
      return self.warm_path(warm[-1])
    return None

  def best(self) -> dict[str, Any] | None:
    """Returns {"step", "reward"} of the best by evaluation, or None.

    Raises:
      manifest.ManifestError: best.json is corrupt.
    """
    if not (self.directory / _BEST).exists():
      return None
    return manifest.read_document(self.directory / _BEST)

  def offer_best(
    self, step: int, reward: float, best: dict[str, Any] | None
  ) -> dict[str, Any] | None:
    """Marks `step` as the best if its held-out reward is above `best`'s.

    Args:
      step: with a checkpoint.
      reward: held-out.
      best: of the steps before.

    Returns:
      The best now.
    """
    if not math.isnan(reward) and (best is None or reward > best["reward"]):
      best = {"step": step, "reward": reward}
    if best is not None and best != self.best():
      manifest.write_document(self.directory / _BEST, best)
    return best

  def prune(
    self, best: dict[str, Any] | None, needed: Collection[int] = ()
  ) -> None:
    """Removes what is neither among the newest, the best, nor needed.

    Args:
      best: as `offer_best` returned it.
      needed: further steps to keep.
    """
    steps = self.steps()
    kept = {*steps[-self._keep :], *needed}
    kept |= {best["step"]} if best else set()
    for step in steps:
      if step not in kept:
        manifest.remove(self.path(step))
    warm = self._numbers(_WARM)
    for step in warm if steps else warm[:-1]:
      manifest.remove(self.warm_path(step))

  def resolve(self, which: str) -> pathlib.Path:
    """Returns the checkpoint that "latest", "best" or a step number names.

    Raises:
      CheckpointError: there is none; says which there are.
    """
    steps = self.steps()
    if which == "latest" and steps:
      return self.path(steps[-1])
    if which == "best" and (best := self.best()):
      return self.path(best["step"])
    if which.isdigit() and int(which) in steps:
      return self.path(int(which))
    there = ", ".join(map(str, steps)) or "none"
    raise CheckpointError(
      f"no checkpoint {which!r} in {self.directory}; steps there: {there}"
    )
