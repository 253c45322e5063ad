"""The workload of a recorded run, for the same executions under another rule.

An execution's recorded duration is taken as its work: as if it had run at rate
1. That is what it is where executions do not slow each other down (f = 1); a
run whose engines were crowded is replayed as slow as it was.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.sim.workload import Replay, Work
from gyre.store.rollouts import RolloutStore


class ReplayError(ValueError):
  """The directory holds nothing that can be replayed; one line."""


@dataclasses.dataclass(frozen=True)
class Recorded:
  """What a run tells.

  Attributes:
    groups: works of each whole group, in order of dispatch.
    group_size: N.
    batch: B, groups an update; 0 where the configuration does not tell.
    slots: executions that an engine of it held at once; 0 where unknown.
    update_s: median seconds of an update's training; 0 where not recorded.
    switch_s: mean seconds of a cell's change of role; 0 where none was.
    switches: of which it is the mean.
    skipped: groups that lack executions.
    mean_s, longest_s: of the durations.
    hours: of all its steps, where recorded; else None.
  """

  groups: tuple[tuple[Work, ...], ...]
  group_size: int
  batch: int
  slots: int
  update_s: float
  switch_s: float
  switches: int
  skipped: int
  mean_s: float
  longest_s: float
  hours: float | None

  def workload(self, seed: int) -> Replay:
    """The groups, begun elsewhere for each seed; seed 0 is the recorded order.

    Recorded timeouts are in the durations already.

    Args:
      seed: turns the order of groups; executions stay as they are.
    """
    n = len(self.groups)
    first = (seed * max(1, n // 8 + 1)) % n
    turned = {i: self.groups[(first + i) % n] for i in range(n)}
    return Replay(turned)


def _rows(path: pathlib.Path) -> list[Mapping[str, Any]]:
  if not path.exists():
    return []
  lines = path.read_bytes().split(b"\n")[:-1]
  return [json.loads(line) for line in lines]


def read(directory: pathlib.Path) -> Recorded:
  """Reads a run's directory; nothing in it is changed.

  Raises:
    ReplayError: no run, no whole group, or a file that is not what a run
      writes.
    StoreError: rollouts.sqlite cannot be read.
  """
  rollouts = directory / "rollouts.sqlite"
  if not rollouts.is_file():
    what = "has no rollouts.sqlite" if directory.is_dir() else "is no directory"
    raise ReplayError(f"there is no run at {directory}: it {what}")
  with RolloutStore(rollouts, readonly=True) as store:
    lengths = store.lengths("train")
  members: dict[int, dict[int, Work]] = {}
  for group, index, status, seconds in lengths:
    scored = status in ("scored", "no_artifact")
    # Clocks that were fixed or stepped back leave nothing to replay.
    if seconds > 0:
      members.setdefault(group, {})[index] = Work(seconds, scored)
  try:
    config = json.loads((directory / "config.json").read_text())["config"]
    rows = _rows(directory / "metrics.jsonl")
    rollout = config["rollout"]
    size, batch = rollout["group_size"], rollout["groups_per_step"]
    slots = config.get("elastic", {}).get("slots") or rollout["max_slots"]
  except FileNotFoundError:
    rows, batch, slots = [], 0, 0
    size = max((len(g) for g in members.values()), default=0)
  except (json.JSONDecodeError, KeyError, TypeError) as error:
    raise ReplayError(
      f"{directory}: config.json or metrics.jsonl is not what a run writes: "
      f"{error!r}"
    ) from None
  whole = [
    tuple(g[i] for i in range(size))
    for _, g in sorted(members.items())
    if sorted(g) == list(range(size))
  ]
  if not whole:
    raise ReplayError(
      f"{directory} has {len(lengths)} recorded executions and no whole group "
      f"of {size}"
    )
  seconds = [work.seconds for group in whole for work in group]
  trained = _numbers(rows, "perf/train_s")
  stepped = _numbers(rows, "perf/step_s")
  switches = round(sum(_numbers(rows, "elastic/switches")))
  switching = sum(_numbers(rows, "elastic/switch_s"))
  return Recorded(
    groups=tuple(whole),
    group_size=size,
    batch=batch,
    slots=slots,
    update_s=statistics.median(trained) if trained else 0.0,
    switch_s=switching / switches if switches else 0.0,
    switches=switches,
    skipped=len(members) - len(whole),
    mean_s=statistics.fmean(seconds),
    longest_s=max(seconds),
    hours=sum(stepped) / 3600 if stepped else None,
  )


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
  return [row[name] for row in rows if row.get(name)]
