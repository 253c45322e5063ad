"""metrics.jsonl and TensorBoard: one JSON object a training step.

metrics.jsonl holds one line for step 0 (warm start and first evaluation,
`warm_start/*` and `eval/*` only) and one a training step; an evaluation's
`eval/*` are in the line of the step whose weights it evaluated. Losses of
single supervised steps are in warm_start.jsonl.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from gyre.types import Execution


class Lines:
  """A file of JSON lines that a resumed run continues."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self._file = open(path, "a")  # noqa: SIM115

  def put(self, row: Mapping[str, Any]) -> None:
    """Appends a line; whole or not at all in the eyes of a reader."""
    self._file.write(json.dumps(_finite(row)) + "\n")
    self._file.flush()
    os.fsync(self._file.fileno())

  def tell(self) -> int:
    """Returns the file's length in bytes."""
    return self._file.tell()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def _finite(x: Any) -> Any:
  """JSON has no nan: they become null."""
  if isinstance(x, Mapping):
    return {k: _finite(v) for k, v in x.items()}
  if isinstance(x, list | tuple):
    return [_finite(v) for v in x]
  if isinstance(x, float) and not math.isfinite(x):
    return None
  return x


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the whole lines of a file of JSON lines, [] when missing."""
  if not path.exists():
    return []
  lines = path.read_bytes().split(b"\n")[:-1]
  return [json.loads(line) for line in lines]


class TensorBoard:
  """The same numbers for TensorBoard, under DIR/tensorboard."""

  def __init__(self, directory: pathlib.Path, step: int):
    """Opens it; events of steps >= `step` written before are purged."""
    self._writer = SummaryWriter(
      str(directory / "tensorboard"), purge_step=step or None
    )

  def put(self, step: int, row: Mapping[str, Any]) -> None:
    """Writes every number of a line; pairs become _low and _high."""
    for name, value in row.items():
      if name == "step" or value is None:
        continue
      if isinstance(value, list | tuple):
        for end, v in zip(("low", "high"), value, strict=True):
          self._writer.add_scalar(f"{name}_{end}", v, step)
      elif isinstance(value, int | float) and math.isfinite(value):
        self._writer.add_scalar(name, value, step)
    self._writer.flush()

  def close(self) -> None:
    """Closes it."""
    self._writer.close()


def _mean(xs: Sequence[float]) -> float:
  return float(np.mean(np.asarray(xs, np.float64))) if len(xs) else 0.0


def rewards(executions: Sequence[Execution]) -> dict[str, float]:
  """Returns reward/* and episode/* of the executions that were scored.

  An execution whose environment or verifier failed is in neither; it is
  counted in episode/failed.
  """
  scored = [e for e in executions if e.outcome and e.outcome.score is not None]
  scores = [e.outcome.score for e in scored]
  solved = [
    e.outcome.passed == e.outcome.total > 0 or e.outcome.score >= 1.0
    for e in scored
  ]
  return {
    "reward/mean": _mean(scores),
    "reward/std": float(np.std(scores)) if scores else 0.0,
    "reward/solved": _mean(solved),
    "reward/n": len(scored),
    "episode/turns": _mean([e.turns for e in scored]),
    "episode/tokens": _mean([e.num_sampled for e in scored]),
    "episode/truncated": _mean([bool(e.truncated) for e in scored]),
    "episode/failed": len(executions) - len(scored),
  }


def staleness(executions: Sequence[Execution], version: int) -> dict[str, Any]:
  """Returns staleness/*: trainer version before consumption less admission."""
  stale = [version - e.version for e in executions]
  return {
    "staleness/mean": _mean(stale),
    "staleness/max": max(stale, default=0),
  }
