"""Everything a run writes beside rollouts and checkpoints, kept in step.

A checkpoint records how long each file was; a resumed run cuts them back to
that and goes on, so that the files are those of an uninterrupted run.
"""

from __future__ import annotations

import json
import pathlib
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gyre.runtime import metrics, timeline, workdir
from gyre.runtime.progress import Progress

METRICS, WARM, LOG, TIMELINE = (
  "metrics.jsonl",
  "warm_start.jsonl",
  "log.txt",
  "timeline.json",
)
CELL, ENGINE = "cell 0", "engine 0"


class Record:
  """metrics.jsonl, warm_start.jsonl, TensorBoard, timeline.json, log.txt.

  Attributes:
    written: the line of the step that is resumed, where it was written before
      the run ended, or None.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    steps: int,
    lengths: Mapping[str, int],
    step: int = 0,
    *,
    tracks: Sequence[str] = (CELL, ENGINE),
  ):
    """Cuts the files back and opens them.

    Args:
      directory: of the run.
      steps: of the whole run, to show.
      lengths: of each file at the checkpoint that is resumed; a file not
        named starts again.
      step: whose line will be written next.
      tracks: of the time line, in the order shown.
    """
    self._directory = directory
    self.written = self._line_of(step, lengths.get(METRICS, 0))
    for name in (METRICS, WARM, LOG, TIMELINE):
      workdir.cut(directory / name, lengths.get(name, 0))
    self.metrics = metrics.Lines(directory / METRICS)
    self.warm = metrics.Lines(directory / WARM)
    self.tensorboard = metrics.TensorBoard(directory, step)
    self.timeline = timeline.Timeline(directory / TIMELINE, tuple(tracks))
    self.progress = Progress(directory / LOG, steps)
    for row in self.rows():
      self.progress.seen(row)

  def _line_of(self, step: int, start: int) -> dict[str, Any] | None:
    path = self._directory / METRICS
    if not path.exists():
      return None
    line, end, _ = path.read_bytes()[start:].partition(b"\n")
    row = json.loads(line) if end else {}
    return row if row.get("step") == step else None

  def lengths(self) -> dict[str, int]:
    """Returns the length of each file, for a checkpoint."""
    return {
      METRICS: self.metrics.tell(),
      WARM: self.warm.tell(),
      LOG: self.progress.tell(),
      TIMELINE: self.timeline.tell(),
    }

  def rows(self) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl."""
    return metrics.read_lines(self._directory / METRICS)

  def step(self, row: Mapping[str, Any]) -> None:
    """Writes a step's line everywhere."""
    self.metrics.put(row)
    self.tensorboard.put(row["step"], row)
    self.progress.step(row)

  def close(self) -> None:
    """Closes every file."""
    self.progress.close()
    for file in (self.metrics, self.warm, self.tensorboard, self.timeline):
      file.close()


def peak_memory() -> int:
  """Returns the peak memory so far [bytes]: of the devices, else resident."""
  stats = [d.memory_stats() for d in jax.local_devices()]
  peaks = [s["peak_bytes_in_use"] for s in stats if s]
  if peaks:
    return max(peaks)
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
