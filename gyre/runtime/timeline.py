"""timeline.json: a Chrome/Perfetto trace of the run.

One track a cell and one an engine; spans for steps, rollouts, checkpoints and
evaluations, instants for publishes and role switches. The file is whole JSON
after every event and is cut back at a resume.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

_END = b"\n]\n"
_START = b"["


class Timeline:
  """Appends events to timeline.json. Times are microseconds since 1970."""

  def __init__(self, path: pathlib.Path, tracks: tuple[str, ...]):
    """Opens the file and names the tracks.

    Args:
      path: timeline.json; one cut back by a resume is continued.
      tracks: names in the order shown.
    """
    self._tracks = {name: i for i, name in enumerate(tracks)}
    self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
    self._end = self._file.seek(0, os.SEEK_END)
    if self._end >= len(_END):
      self._file.seek(-len(_END), os.SEEK_END)
      if self._file.read() == _END:
        self._end -= len(_END)
    if self._end == 0:
      self._file.write(_START)
      self._end = len(_START)
      for name, i in self._tracks.items():
        self._put(
          {"ph": "M", "name": "thread_name", "tid": i, "args": {"name": name}}
        )
    else:
      self._finish(b"")

  def _finish(self, data: bytes) -> None:
    self._file.seek(self._end)
    self._file.write(data + _END)
    self._file.truncate()
    self._file.flush()
    self._end += len(data)

  def _put(self, event: dict[str, Any]) -> None:
    comma = b"\n" if self._end == len(_START) else b",\n"
    event = {"pid": 0, "ts": 0, **event}
    self._finish(comma + json.dumps(event).encode())

  def tell(self) -> int:
    """Returns the length in bytes to cut back to."""
    return self._end

  def instant(self, track: str, name: str, **args: Any) -> None:
    """Marks a moment (a publish, a role switch) on a track."""
    ts = int(time.time() * 1e6)
    tid = self._tracks[track]
    self._put(
      {"ph": "i", "s": "t", "name": name, "tid": tid, "ts": ts, "args": args}
    )

  @contextlib.contextmanager
  def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
    """Records what is done inside as a span on a track."""
    start = time.time()
    yield
    self.complete(track, name, start, time.time(), **args)

  def complete(
    self, track: str, name: str, start: float, end: float, **args: Any
  ) -> None:
    """Records what went on from `start` to `end` [s since 1970] on a track."""
    self._put(
      {
        "ph": "X",
        "name": name,
        "tid": self._tracks[track],
        "ts": int(start * 1e6),
        "dur": int((end - start) * 1e6),
        "args": args,
      }
    )

  def close(self) -> None:
    """Closes the file."""
    self._file.close()
