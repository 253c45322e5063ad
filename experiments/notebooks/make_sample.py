"""Cuts a small run out of a run: what rollout_trees.ipynb shows.

  python experiments/run.py --config experiments/configs/delegating.py \\
    --workdir runs/sample
  python experiments/notebooks/make_sample.py runs/sample

It keeps whole groups: of training, those whose executions branched most, then
those whose scores differ most; of evaluation, the first. Calls, outcomes and
what was trained stay as they were recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shutil
import sqlite3
import sys
from collections.abc import Sequence

import numpy as np

from gyre.analysis import executions, reading, runs
from gyre.store.database import StoreError
from gyre.store.rollouts import RolloutStore
from gyre.types import Execution, Group

OUT = pathlib.Path(__file__).parent / "sample_run"
MAX_BYTES = 300_000
_KEPT = ("agent", "learner", "rollout", "run", "tasks", "trajectory")


@dataclasses.dataclass(frozen=True)
class _Kept:
  group: Group
  phase: str
  executions: tuple[Execution, ...]


def _interest(members: Sequence[Execution]) -> tuple[float, ...]:
  """Orders groups: the most branches, then the widest scores."""
  rows = [executions.row(e, "train") for e in members]
  scores = [r.score for r in rows if r.score is not None]
  spread = float(np.ptp(scores)) if scores else 0.0
  kinds = len({role for r in rows for role in r.roles})
  return kinds, max((r.branches for r in rows), default=0), spread


def choose(store: RolloutStore, train: int, held_out: int) -> list[_Kept]:
  """Returns the groups to keep.

  Args:
    store: of the run.
    train: groups of training that were consumed.
    held_out: groups of evaluation.

  Raises:
    RunError: nothing was trained.
  """
  consumed = store.consumed()
  found = [
    (group, tuple(store.executions(group.group_id)))
    for group in store.groups("train")
    if group.group_id in consumed
  ]
  if not found:
    raise runs.RunError(f"{store.path} holds no group that was trained on")
  found.sort(key=lambda pair: _interest(pair[1]), reverse=True)
  kept = [_Kept(group, "train", members) for group, members in found[:train]]
  return kept + [
    _Kept(group, "eval", tuple(store.executions(group.group_id)))
    for group in store.groups("eval")[:held_out]
  ]


def copy(source: RolloutStore, target: pathlib.Path, kept: list[_Kept]) -> None:
  """Writes groups, executions and their samples to a new file."""
  ids = {e.execution_id for k in kept for e in k.executions}
  names = {k.group.group_id for k in kept}
  consumed = {g: s for g, s in source.consumed().items() if g in names}
  with RolloutStore(target) as store:
    for k in kept:
      store.put_group(k.group, k.phase)
      for execution in k.executions:
        store.put_execution(execution)
    for step in sorted(set(consumed.values())):
      mine = [p for p in source.samples(step) if p[0].execution_id in ids]
      advantages = {s.execution_id: a for s, a in mine if a is not None}
      store.put_samples(step, [s for s, _ in mine], advantages)
    store.set_consumed(consumed)
  # One file that can be read where nothing can be written.
  with sqlite3.connect(target, isolation_level=None) as db:
    db.execute("PRAGMA journal_mode=DELETE")
    db.execute("VACUUM")
  db.close()


def make(
  run: pathlib.Path, out: pathlib.Path, train: int, held_out: int
) -> int:
  """Makes the sample; returns the bytes of its rollouts.

  Raises:
    RunError: the run lacks something, or the sample is too large.
  """
  tokenizer = reading.tokenizer_of(run)
  if tokenizer is None:
    raise runs.RunError(f"{run} has no tokenizer.json")
  try:
    config = json.loads((run / "config.json").read_text())["config"]
  except OSError as error:
    raise runs.RunError(f"{run} holds no run: {error}") from None
  shutil.rmtree(out, ignore_errors=True)
  out.mkdir(parents=True)
  target = out / executions.ROLLOUTS
  with executions.open_store(run) as source:
    copy(source, target, choose(source, train, held_out))
  size = target.stat().st_size
  if size > MAX_BYTES:
    raise runs.RunError(
      f"{target} has {size:,} bytes, at most {MAX_BYTES:,}: keep fewer groups"
    )
  shutil.copyfile(tokenizer, out / "tokenizer.json")
  # Of the configuration what says how the calls were made; no path.
  kept = {k: v for k, v in config.items() if k in _KEPT}
  text = json.dumps({"config": kept}, indent=2) + "\n"
  (out / "config.json").write_text(text)
  return size


def main(argv: list[str] | None = None) -> int:
  """Runs the command; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("run", type=pathlib.Path, metavar="RUN")
  parser.add_argument("--out", type=pathlib.Path, default=OUT)
  parser.add_argument("--train", type=int, default=4, help="groups")
  parser.add_argument("--eval", type=int, default=4, help="groups")
  args = parser.parse_args(argv)
  try:
    size = make(args.run, args.out, args.train, args.eval)
  except (runs.RunError, StoreError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(f"{args.out}: {size:,} bytes of rollouts")
  return 0


if __name__ == "__main__":
  sys.exit(main())
