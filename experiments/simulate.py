"""Schedules under a virtual clock: the scheduler's own decisions, no devices.

  python experiments/simulate.py --table 1
  python experiments/simulate.py --table 2 --seeds 4
  python experiments/simulate.py --run DIR --design gyre --cells 4 --nodes 8
  python experiments/simulate.py --matters
  python experiments/simulate.py --sweep phi=0,0.5,1 mu=1,2,3 cells=4,8

Table 1 are seven designs on 32 nodes, table 2 gyre beside Async and Colocate
on two workloads, both beside their published numbers. --run replays the
executions of a recorded run under other designs or budgets. Hours are means
over the seeds with their standard deviation; the same seed is the same
executions in every design. The bound is what a clairvoyant, perfectly
divisible schedule under the same law can't get below.

Markdown on stdout; with --json its last line is one JSON object. Progress on
stderr. --picture FILE.html draws the roles of the cells over time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from gyre.elastic.dispatch import Law
from gyre.elastic.policies import POLICIES
from gyre.sim import picture, replay, report, tables
from gyre.sim.bound import lower_bound
from gyre.sim.clock import Result, simulate
from gyre.sim.fluids import Costs, SimulationError
from gyre.sim.report import Row
from gyre.sim.tables import Calibration, Design
from gyre.store.database import StoreError

SWEPT = ("phi", "mu", "cells")

# Options that only some modes have, and what they are where not given.
OF_SWEEP = {"policy": "waterlevel", "max_staleness": None}
OF_RUN = OF_SWEEP | {
  "design": None,
  "nodes": 4,
  "cells": 4,
  "train_nodes": None,
  "mean_staleness": 1.5,
  "phi": None,
  "mu": None,
  "batch": None,
  "slots": None,
  "update_s": None,
  "alpha": 1.0,
  "serial": 1.0,
  "publish_s": 0.0,
  "to_train_s": None,
  "to_rollout_s": None,
}
# Seconds of a cell's switch, published, where a run recorded none.
TO_TRAIN_S, TO_ROLLOUT_S = 8.52, 3.46


class UsageError(ValueError):
  """What was asked for cannot be done; the message is one line."""


def note(message: str) -> None:
  """Progress, on stderr: stdout holds the tables."""
  print(message, file=sys.stderr, flush=True)


def simulate_rows(
  designs: Sequence[Design],
  seeds: Sequence[int],
  run: Callable[[Design, int], Result],
  bound: Callable[[Design, int], float],
) -> list[Row]:
  """Simulates every design on every seed, saying how far it is."""
  rows: list[Row] = []
  began = time.monotonic()
  for i, design in enumerate(designs):
    try:
      runs = tuple(run(design, seed) for seed in seeds)
      bounds = tuple(bound(design, seed) for seed in seeds)
    except (SimulationError, ValueError) as error:
      raise UsageError(f"{design.id}: {error}") from error
    rows.append(Row(design, runs, bounds))
    note(
      f"{i + 1}/{len(designs)} {design.id}: {rows[-1].hours:.4g} h "
      f"({time.monotonic() - began:.0f} s)"
    )
  return rows


def _calibrated(calibration: Calibration, steps: int):
  """(run, bound) of designs on a calibration's own works."""

  def run(design: Design, seed: int) -> Result:
    return tables.run_design(design, calibration, seed, steps=steps)

  def bound(design: Design, seed: int) -> float:
    return tables.bound_of(design, calibration, seed, steps=steps)

  return run, bound


def do_table_1(options, seeds) -> tuple[str, list[Row], dict[str, Any]]:
  """Table 1 and what it says."""
  steps = options.steps or tables.STEPS_1
  designs = [*tables.TABLE_1, *tables.BEYOND]
  rows = simulate_rows(designs, seeds, *_calibrated(tables.CALIBRATION, steps))
  # What a policy can gain at all. Keeping Q_b full is a policy's to choose.
  long = tables.LONG * steps
  e0 = next(row for row in rows if row.design.id == "E0")
  full = dataclasses.replace(e0.design, policy="steady")
  bounds = [
    tables.bound_of(full, tables.CALIBRATION, seed, steps=steps)
    for seed in seeds
  ]
  (lasting,) = simulate_rows(
    [dataclasses.replace(e0.design, id=f"E0 over {long} steps")],
    seeds,
    lambda design, seed: tables.run_design(
      design, tables.CALIBRATION, seed, steps=long
    ),
    lambda design, seed: tables.bound_of(
      full, tables.CALIBRATION, seed, steps=long
    ),
  )
  room = report.room(
    e0, dataclasses.replace(e0, bounds=tuple(bounds)), steps, lasting, long
  )
  text = (
    f"## Table 1: {tables.NODES} nodes, {steps} steps, {len(seeds)} seeds\n\n"
    f"{report.table_1(rows)}\n\n{tables.BEYOND_NOTE}\n\n{room}\n\n"
    f"{UNIDENTIFIED}"
  )
  return text, rows, {"long_run": {"steps": long, **lasting.as_json()}}


def do_table_2(options, seeds) -> tuple[str, list[Row], dict[str, Any]]:
  """Table 2 and what it says."""
  steps = options.steps or tables.STEPS_2
  rows: list[Row] = []
  for workload in dict.fromkeys(c.workload for c in tables.TABLE_2):
    calibration = tables.WORKLOADS[workload]
    designs = [
      design
      for comparison in tables.TABLE_2
      if comparison.workload == workload
      for design in comparison.designs()
    ]
    rows += simulate_rows(designs, seeds, *_calibrated(calibration, steps))
  table, records = report.table_2(rows)
  text = (
    f"## Table 2: {tables.NODES} nodes, {steps} steps, {len(seeds)} seeds\n\n"
    f"{table}\n\n{tables.WORKLOADS_NOTE}"
  )
  return text, rows, {"comparisons": records}


def do_matters(options, seeds) -> tuple[str, list[Row], dict[str, Any]]:
  """gyre and Colocate with one thing changed at a time."""
  steps = options.steps or tables.STEPS_1
  rows: list[Row] = []
  for variant in tables.VARIANTS:
    rows += simulate_rows(
      variant.designs(), seeds, *_calibrated(variant.calibration, steps)
    )
  text = (
    f"## What matters: E0 and C0 of table 1, {steps} steps, {len(seeds)} "
    f"seeds\n\n{report.matters_table(rows)}"
  )
  return text, rows, {}


UNIDENTIFIED = (
  "Nine parameters were fitted to these seven published hours, so they are not "
  "identifiable: other sets fit as well. Publication is the only delay between "
  "a burst and the next; an execution moves between cells for nothing."
)


def _number(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f"{text} is not finite")
  return value


def parse_sweep(words: Sequence[str]) -> dict[str, list[float]]:
  """["phi=0,0.5", "mu=1,2"] as {"phi": [0.0, 0.5], "mu": [1.0, 2.0]}.

  Raises:
    UsageError: an unknown name, one given twice, or no number.
  """
  out: dict[str, list[float]] = {}
  for word in words:
    name, _, values = word.partition("=")
    if name not in SWEPT:
      raise UsageError(f"--sweep {word}: {name!r} is none of {SWEPT}")
    if name in out:
      raise UsageError(f"--sweep {word}: {name} is given twice")
    try:
      out[name] = [_number(v) for v in values.split(",")]
    except ValueError:
      raise UsageError(
        f"--sweep {word}: {values!r} are no numbers between commas"
      ) from None
    if name != "phi" and any(v != int(v) or v < 1 for v in out[name]):
      raise UsageError(f"--sweep {word}: {name} takes whole numbers >= 1")
  return out


def do_sweep(options, seeds) -> tuple[str, list[Row], dict[str, Any]]:
  """gyre on table 1's works at every combination of what is swept."""
  swept = {"phi": [0.5], "mu": [3.0], "cells": [8.0]}
  swept |= parse_sweep(options.sweep)
  steps = options.steps or tables.STEPS_1
  designs = []
  for phi, mu, cells in itertools.product(*(swept[k] for k in SWEPT)):
    count = int(cells)
    if tables.NODES % count:
      raise UsageError(f"{tables.NODES} nodes are no {count} equal cells")
    try:
      law = Law(phi, int(mu), tables.BATCH, tables.GROUP_SIZE)
      law = tables.guaranteed(law, options.max_staleness, options.policy)
    except ValueError as error:
      raise UsageError(f"--sweep: {error}") from None
    designs.append(
      Design(
        id=f"phi{phi:g}-mu{int(mu)}-cells{count}",
        name="gyre",
        kind="gyre",
        law=law,
        split=(count, tables.NODES // count),
        streaming=True,
        policy=options.policy,
      )
    )
  rows = simulate_rows(designs, seeds, *_calibrated(tables.CALIBRATION, steps))
  text = (
    f"## gyre over {', '.join(options.sweep)}: {tables.NODES} nodes, {steps} "
    f"steps, {len(seeds)} seeds\n\n{report.plain_table(rows)}"
  )
  return text, rows, {}


def _replayed(options, batch: int, group_size: int) -> list[Design]:
  """The designs asked for, of the nodes asked for."""
  nodes, cells = options.nodes, options.cells
  designs = list(dict.fromkeys(options.design or ()))
  if nodes % cells and (not designs or "gyre" in designs):
    raise UsageError(f"--nodes {nodes} are no --cells {cells} equal cells")
  train = options.train_nodes or max(1, nodes // 2)
  needs = {"async": 2, "coarse": 2, "colocate": 1, "gyre": 1}
  out = []
  for kind in designs or list(needs):
    if nodes < needs[kind]:
      if designs:
        raise UsageError(
          f"--design {kind} needs {needs[kind]} nodes, got --nodes {nodes}"
        )
      continue
    if kind == "async" and not train < nodes:
      raise UsageError(f"--train-nodes {train} must be below --nodes {nodes}")
    split = {
      "async": (train, nodes - train),
      "coarse": (nodes - max(1, nodes // 8), max(1, nodes // 8)),
      "colocate": (nodes, 0),
      "gyre": (cells, nodes // cells),
    }[kind]
    phi, mu = tables.named_law(kind, options.mean_staleness)
    if options.phi is not None:
      phi = options.phi
    if options.mu is not None:
      mu = options.mu
    law = tables.guaranteed(
      Law(phi, mu, batch, group_size), options.max_staleness, options.policy
    )
    out.append(
      Design(
        id=kind,
        name=kind,
        kind=kind,
        law=law,
        split=split,
        streaming=kind == "gyre",
        policy=options.policy,
      )
    )
  return out


def do_run(options, seeds) -> tuple[str, list[Row], dict[str, Any]]:
  """A recorded run's executions under other designs."""
  directory = pathlib.Path(options.run)
  recorded = replay.read(directory)
  batch = options.batch or recorded.batch
  slots = options.slots or recorded.slots
  if not batch or not slots:
    raise UsageError(
      f"{directory} has no config.json: name --batch (groups an update, found "
      f"{batch}) and --slots (executions a node holds, found {slots})"
    )
  update_s = options.update_s
  if update_s is None:
    update_s = recorded.update_s
  to_train, to_rollout = options.to_train_s, options.to_rollout_s
  if to_train is None:
    to_train = recorded.switch_s if recorded.switches else TO_TRAIN_S
  if to_rollout is None:
    to_rollout = recorded.switch_s if recorded.switches else TO_ROLLOUT_S
  steps = options.steps or max(1, len(recorded.groups) // batch)
  try:
    designs = _replayed(options, batch, recorded.group_size)
    costs = Costs(
      serial=options.serial,
      load=slots,
      update_work=update_s,
      alpha=options.alpha,
      to_train=to_train,
      to_rollout=to_rollout,
      publish=options.publish_s,
    )
  except ValueError as error:
    raise UsageError(str(error)) from None

  def run(design: Design, seed: int) -> Result:
    return simulate(
      design.layout(slots),
      design.law,
      recorded.workload(seed),
      costs,
      steps=steps,
      streaming=design.streaming,
      policy=design.policy,
    )

  def bound(design: Design, seed: int) -> float:
    return lower_bound(
      design.law,
      recorded.workload(seed),
      costs,
      nodes=design.nodes,
      slots=slots,
      steps=steps,
      endless=POLICIES[design.policy].endless,
    )

  rows = simulate_rows(designs, seeds, run, bound)
  was = "" if recorded.hours is None else f", {recorded.hours:.4g} h of steps"
  text = (
    f"## Replay of {directory.name}: {len(recorded.groups)} groups of "
    f"{recorded.group_size} ({recorded.skipped} incomplete ones left out), "
    f"executions of {recorded.mean_s:.3g} s on average and at most "
    f"{recorded.longest_s:.3g} s{was}\n\n"
    f"{steps} steps of {batch} groups, {slots} executions a node, "
    f"{update_s:.4g} node-seconds an update, switches of "
    f"{_seconds(to_train, options.to_train_s, recorded)} to training and of "
    f"{_seconds(to_rollout, options.to_rollout_s, recorded)} back. Seeds begin "
    "at other groups of the run. What was recorded counts as work at rate 1."
    "\n\n"
    f"{report.plain_table(rows)}"
  )
  return text, rows, {}


def _seconds(
  value: float, asked: float | None, recorded: replay.Recorded
) -> str:
  """A switch's seconds, and where they are from."""
  source = "published"
  if asked is not None:
    source = "as asked"
  elif recorded.switches:
    source = f"the mean of the run's {recorded.switches}"
  return f"{value:.3g} s ({source})"


def parser() -> argparse.ArgumentParser:
  """The command line."""
  p = argparse.ArgumentParser(
    prog="simulate.py",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  what = p.add_mutually_exclusive_group(required=True)
  what.add_argument("--table", type=int, choices=(1, 2))
  what.add_argument("--run", metavar="DIR", help="replay a recorded run")
  what.add_argument(
    "--sweep",
    nargs="+",
    metavar="NAME=V,V",
    help="gyre on table 1's works; names: phi mu cells",
  )
  what.add_argument(
    "--matters",
    action="store_true",
    help="gyre and Colocate with one thing changed at a time",
  )
  p.add_argument("--seeds", type=int, default=8, help="how many (8)")
  p.add_argument("--first-seed", type=int, default=0, help="the first (0)")
  p.add_argument("--steps", type=int, help="updates (the table's; the run's)")
  p.add_argument(
    "--policy",
    choices=sorted(POLICIES),
    help="of --run and --sweep (waterlevel); table 1 has rows of each",
  )
  p.add_argument(
    "--max-staleness",
    type=int,
    help="of --run and --sweep: guaranteed, by the policy's means (none)",
  )
  p.add_argument("--json", action="store_true", help="end with a JSON line")
  p.add_argument("--picture", metavar="FILE", help="HTML, roles over time")
  r = p.add_argument_group("with --run")
  r.add_argument(
    "--design",
    action="append",
    choices=("async", "colocate", "coarse", "gyre"),
    help="may be given again (default: all)",
  )
  r.add_argument("--nodes", type=int, help="nodes in all (4)")
  r.add_argument("--cells", type=int, help="gyre's cells (4)")
  r.add_argument("--train-nodes", type=int, help="async's (half)")
  r.add_argument(
    "--mean-staleness",
    type=float,
    help="E[d], which sets phi and mu of each design (1.5)",
  )
  r.add_argument("--phi", type=float, help="of every design instead")
  r.add_argument("--mu", type=int, help="of every design instead")
  r.add_argument("--batch", type=int, help="groups an update (the run's)")
  r.add_argument("--slots", type=int, help="executions a node (the run's)")
  r.add_argument(
    "--update-s", type=float, help="node-seconds an update (the run's)"
  )
  r.add_argument("--alpha", type=float, help="update_s/n^alpha (1)")
  r.add_argument(
    "--serial",
    type=float,
    help="f: part of an execution that more nodes do not speed up (1)",
  )
  for name, what in (
    ("--publish-s", "a publication of weights (0)"),
    ("--to-train-s", f"a cell's switch to training (the run's; {TO_TRAIN_S})"),
    ("--to-rollout-s", f"a cell's switch back (the run's; {TO_ROLLOUT_S})"),
  ):
    r.add_argument(name, type=float, help=f"seconds of {what}")
  return p


def _without_effect(options) -> str:
  """Why an option that is given would change nothing; "" if all do."""
  if options.run:
    mode, known = "--run", OF_RUN
  elif options.sweep:
    mode, known = "--sweep", OF_SWEEP
  else:
    mode = "--matters" if options.matters else f"--table {options.table}"
    known = {}
  for name in OF_RUN:
    if getattr(options, name) is not None and name not in known:
      flag = "--" + name.replace("_", "-")
      modes = "--run or --sweep" if name in OF_SWEEP else "--run"
      return f"{flag} has no effect with {mode}; it is for {modes}"
  for flag, value, kind in (
    ("--cells", options.cells, "gyre"),
    ("--train-nodes", options.train_nodes, "async"),
  ):
    if value is not None and options.design and kind not in options.design:
      return f"{flag} has no effect without --design {kind}"
  laws = (options.phi, options.mu, options.mean_staleness)
  if None not in laws:
    return "--mean-staleness has no effect with both --phi and --mu"
  return ""


def check(options) -> None:
  """Refuses what makes no sense or has no effect, and fills in the rest.

  Raises:
    UsageError: one line.
  """
  if reason := _without_effect(options):
    raise UsageError(reason)
  for name, default in OF_RUN.items():
    value = getattr(options, name)
    if value is None:
      setattr(options, name, default)
    elif isinstance(value, float) and not (math.isfinite(value) and value >= 0):
      flag = "--" + name.replace("_", "-")
      raise UsageError(f"{flag} must be a number >= 0, got {value}")
  whole = "seeds steps nodes cells train_nodes batch slots mu"
  for name in whole.split():
    value = getattr(options, name)
    if value is not None and value < 1:
      flag = "--" + name.replace("_", "-")
      raise UsageError(f"{flag} must be >= 1, got {value}")
  if options.first_seed < 0:
    raise UsageError(f"--first-seed must be >= 0, got {options.first_seed}")
  if options.picture is not None:
    path = pathlib.Path(options.picture)
    if path.is_dir() or not path.parent.is_dir():
      raise UsageError(f"--picture {path}: there can be no file of that name")


def write_picture(path: pathlib.Path, title: str, rows: Sequence[Row]) -> None:
  """Draws the first seed of every row."""
  captions = [
    f"{row.design.id}: {row.design.name}, {report.law_of(row.design)}, "
    f"{row.design.shown}: {row.runs[0].hours:.4g} h"
    for row in rows
  ]
  runs = [row.runs[0] for row in rows]
  path.write_text(picture.render(title, list(zip(captions, runs, strict=True))))


def main(argv: Sequence[str] | None = None) -> int:
  """Prints what was asked for; returns the exit status."""
  options = parser().parse_args(argv)
  try:
    check(options)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if options.table == 1:
      what, do = "Table 1", do_table_1
    elif options.table == 2:
      what, do = "Table 2", do_table_2
    elif options.run:
      what, do = f"Replay of {pathlib.Path(options.run).name}", do_run
    elif options.matters:
      what, do = "What matters", do_matters
    else:
      what, do = "Sweep", do_sweep
    text, rows, more = do(options, seeds)
    print(text)
    if options.picture:
      path = pathlib.Path(options.picture)
      write_picture(path, f"{what}, seed {options.first_seed}", rows)
      note(f"wrote {path}")
    if options.json:
      print(json.dumps({"rows": [row.as_json() for row in rows], **more}))
  except (UsageError, replay.ReplayError, StoreError, OSError) as error:
    print(f"simulate.py: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("\nsimulate.py: stopped", file=sys.stderr)
    return 130
  return 0


if __name__ == "__main__":
  sys.exit(main())
