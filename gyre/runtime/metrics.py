"""metrics.jsonl and TensorBoard: one JSON object a training step.

metrics.jsonl holds one line for step 0 (warm start and first evaluation,
`warm_start/*` and `eval/*` only) and one a training step; an evaluation's
`eval/*` are in the line of the step whose weights it evaluated. Losses of
single supervised steps are in warm_start.jsonl.
"""

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from gyre.trajectory import align, ladder
from gyre.trajectory.score import reward
from gyre.trajectory.select import Selection
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


def rewards(
  executions: Sequence[Execution], scores: Sequence[float | None]
) -> dict[str, float]:
  """Returns reward/* and episode/* of the executions that have a reward.

  An execution whose environment or verifier failed enters none of them; it
  is counted in episode/failed.

  Args:
    executions: of a step.
    scores: the reward of each, or None.
  """
  scored = [
    (e, s) for e, s in zip(executions, scores, strict=True) if s is not None
  ]
  values = [s for _, s in scored]
  return {
    "reward/mean": _mean(values),
    "reward/std": float(np.std(values)) if values else 0.0,
    "reward/solved": _mean(
      [reward(e.outcome, "binary") == 1.0 for e, _ in scored]
    ),
    "reward/n": len(scored),
    "episode/turns": _mean([e.turns for e, _ in scored]),
    "episode/tokens": _mean([e.num_sampled for e, _ in scored]),
    "episode/truncated": _mean([bool(e.truncated) for e, _ in scored]),
    "episode/failed": len(executions) - len(scored),
  }


def trajectories(
  stats: Sequence[Mapping[str, int]], roles: Sequence[str]
) -> dict[str, float]:
  """Returns trajectory/*: what selection made of the executions trained.

  Args:
    stats: of the Selection of each.
    roles: that tokens may be dropped by.
  """
  names = ["tokens_flat", "tokens_unique", "tokens_trainable"]
  names += ["tokens_trained", "leaves", "paths"]
  names += [f"dropped/{role}" for role in roles]
  total = {name: sum(s[name] for s in stats) for name in names}
  nodes = sum(s["nodes"] for s in stats)
  repeated = sum(s["nodes_repeated"] for s in stats)
  out = {f"trajectory/{name}": value for name, value in total.items()}
  return out | {"trajectory/repeated": repeated / max(nodes, 1)}


def token_audit(
  executions: Sequence[Execution], selections: Sequence[Selection]
) -> dict[str, int]:
  """Returns tito/*: looks every token in the loss up in the calls again.

  Boundaries are counted by the step of the ladder that made them. Where calls
  do not tell it, one that goes on from an earlier one is strict, and each leaf
  but the first is a split. tito/drift_in_loss counts tokens in a loss mask that
  no call of the execution sampled, with that logprob and version, under exactly
  the context before them; it must be 0.

  Args:
    executions: of a step.
    selections: of each.
  """
  totals: collections.Counter = collections.Counter()
  for execution, selection in zip(executions, selections, strict=True):
    told = ladder.counts(c.boundary for c in execution.calls)
    if not any(told.values()):
      leaves = selection.stats["leaves"]
      told["tito/strict"] = selection.stats["calls"] - leaves
      told["tito/split"] = max(leaves - 1, 0)
    totals.update(told)
    audit = align.audit(execution.calls, selection.samples)
    totals["tito/drift_in_loss"] += audit.drift_in_loss
  # Repair comes before sampling here, so that no context drifts.
  names = [*ladder.counts(()), "tito/drift_in_loss", "tito/context_drift"]
  return {name: totals[name] for name in names}
