"""A finished run, read from its directory: metrics and held-out rewards."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from gyre.store.rollouts import RolloutStore
from gyre.trajectory.score import reward
from gyre.trajectory.statistics import bootstrap_ci

RESAMPLES = 10_000


class RunError(ValueError):
  """The directory does not hold what was asked for; one line."""


@dataclasses.dataclass(frozen=True)
class Run:
  """What a report needs of a run.

  Attributes:
    name: as it is called in the report.
    config: the resolved configuration, as in config.json.
    versions: of the packages it ran with.
    rows: lines of metrics.jsonl.
    held_out: step -> task id -> mean reward over its executions; one entry
      an evaluation.
  """

  name: str
  config: Mapping[str, Any]
  versions: Mapping[str, str]
  rows: tuple[Mapping[str, Any], ...]
  held_out: Mapping[int, Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class Gain:
  """Held-out reward before and after, on the same tasks.

  Attributes:
    steps: (of the weights before, of those after).
    n: tasks scored in both evaluations.
    before, after: mean rewards.
    before_ci, after_ci: their 95% bootstrap intervals over tasks.
    gain: mean of the paired differences, after - before.
    gain_ci: its 95% bootstrap interval over tasks.
  """

  steps: tuple[int, int]
  n: int
  before: float
  after: float
  before_ci: tuple[float, float]
  after_ci: tuple[float, float]
  gain: float
  gain_ci: tuple[float, float]


def load(directory: pathlib.Path, name: str = "") -> Run:
  """Reads a run.

  Args:
    directory: of the run; nothing in it is changed.
    name: for the report; default the directory's.

  Raises:
    RunError: a file is missing or is not what a run writes.
    StoreError: rollouts.sqlite cannot be read.
  """
  try:
    head = json.loads((directory / "config.json").read_text())
    lines = (directory / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    rows = tuple(json.loads(line) for line in lines)
    if not all(isinstance(row, dict) for row in rows):
      raise ValueError("metrics.jsonl has a line that is no object")
  except OSError as error:
    raise RunError(
      f"{directory} holds no run: {error.strerror}: {error.filename}"
    ) from None
  except ValueError as error:
    raise RunError(
      f"{directory}: a file is not what a run writes: {error}"
    ) from None
  try:
    config, versions = head["config"], head["versions"]
    score = config["learner"]["score"]
  except (KeyError, TypeError):
    raise RunError(
      f"{directory}/config.json lacks config.learner.score or versions"
    ) from None
  with RolloutStore(directory / "rollouts.sqlite", readonly=True) as store:
    held_out = _held_out(store, score)
  return Run(name or directory.name, config, versions, rows, held_out)


def _held_out(store: RolloutStore, score: str) -> dict[int, dict[str, float]]:
  out: dict[int, dict[str, float]] = {}
  for group in store.groups("eval"):
    scores = [
      r
      for e in store.executions(group.group_id)
      if (r := reward(e.outcome, score)) is not None
    ]
    if scores:
      step = out.setdefault(group.version, {})
      step[group.task_id] = float(np.mean(scores))
  return out


def _interval(values: np.ndarray) -> tuple[float, float]:
  return bootstrap_ci(values, resamples=RESAMPLES, seed=0)


def gain(run: Run, tasks: str = "") -> Gain:
  """Compares the first and the last evaluation of a run, task by task.

  Args:
    run: with at least two evaluations.
    tasks: only those whose id starts so; "" takes all.

  Raises:
    RunError: fewer than two evaluations, or no task in both.
  """
  steps = sorted(run.held_out)
  if len(steps) < 2:
    raise RunError(f"{run.name} has {len(steps)} evaluations, a gain needs 2")
  first, last = run.held_out[steps[0]], run.held_out[steps[-1]]
  names = paired(run, tasks)
  if not names:
    raise RunError(f"{run.name}: no task {tasks!r} in both evaluations")
  before = np.array([first[t] for t in names])
  after = np.array([last[t] for t in names])
  return Gain(
    steps=(steps[0], steps[-1]),
    n=len(names),
    before=float(before.mean()),
    after=float(after.mean()),
    before_ci=_interval(before),
    after_ci=_interval(after),
    gain=float((after - before).mean()),
    gain_ci=_interval(after - before),
  )


def paired(run: Run, tasks: str = "") -> tuple[str, ...]:
  """Ids of the tasks scored in the first and in the last evaluation.

  Args:
    run: any.
    tasks: only those whose id starts so; "" takes all.
  """
  if not run.held_out:
    return ()
  first, last = (run.held_out[end(run.held_out)] for end in (min, max))
  return tuple(sorted(t for t in first if t in last and t.startswith(tasks)))


def kinds(run: Run) -> tuple[str, ...]:
  """Kinds of the held-out tasks: what stands before an id's first hyphen."""
  names = {t.partition("-")[0] for s in run.held_out.values() for t in s}
  return tuple(sorted(names))
