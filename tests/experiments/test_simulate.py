"""simulate.py as a user runs it: tables, replay, sweep, picture, mistakes."""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

from gyre.store.rollouts import RolloutStore
from gyre.types import Execution, Group, Outcome

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SIMULATE = ROOT / "experiments" / "simulate.py"


def run(*arguments):
  return subprocess.run(
    [sys.executable, str(SIMULATE), *map(str, arguments)],
    capture_output=True,
    text=True,
    check=False,
  )


def cells(text):
  """The rows of the Markdown table in a text, as dictionaries."""
  lines = [x for x in text.splitlines() if x.startswith("|")]
  split = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
  return [dict(zip(split[0], row, strict=True)) for row in split[2:]]


def test_table_1(tmp_path):
  picture = tmp_path / "roles.html"
  done = run("--table", 1, "--seeds", 1, "--json", "--picture", picture)
  assert done.returncode == 0, done.stderr
  rows = {
    row["id"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]
  }
  assert {"A0", "A1", "A2", "A3", "C0", "C1", "E0"} <= rows.keys()
  shown = {row["id"]: row for row in cells(done.stdout)}
  assert shown.keys() == rows.keys()
  for name, row in rows.items():
    assert row["bound"] < row["hours"] == row["each"][0]
    assert float(shown[name]["hours"].split()[0]) == pytest.approx(
      row["hours"], rel=1e-3
    )
  assert shown["A0"]["published h"] == "25.08"
  assert "not identifiable" in done.stdout.replace("\n", " ")
  assert "1/" in done.stderr and "A0" in done.stderr
  assert picture.read_text().count("<svg") == len(rows)


def test_table_2_prints_every_distance():
  done = run("--table", 2, "--seeds", 1, "--steps", 6, "--json")
  assert done.returncode == 0, done.stderr
  shown = cells(done.stdout)
  records = json.loads(done.stdout.splitlines()[-1])["comparisons"]
  assert len(shown) == len(records) == 8
  published = [1.569, 1.610, 1.572, 1.824, 1.383, 1.809, 1.430, 1.849]
  assert [r["published"] for r in records] == published
  for row, record in zip(shown, records, strict=True):
    distance = record["speedup"] / record["published"] - 1
    assert float(row["distance"].rstrip("%")) == pytest.approx(
      100 * distance, abs=0.06
    )
  assert "8 comparisons" in done.stdout


def test_what_matters_has_a_row_a_variant():
  done = run("--matters", "--seeds", 1, "--steps", 3, "--json")
  assert done.returncode == 0, done.stderr
  shown = cells(done.stdout)
  rows = json.loads(done.stdout.splitlines()[-1])["rows"]
  assert len(rows) == 2 * len(shown) and len(shown) >= 6
  assert shown[0]["changed"] == "nothing" and shown[0]["change"].startswith(
    "+0.0%"
  )


def test_sweep_takes_every_combination():
  done = run(
    "--sweep", "phi=0.5,1", "mu=1,2", "cells=4", "--seeds", 1, "--steps", 4
  )
  assert done.returncode == 0, done.stderr
  assert [row["(φ, μ)"] for row in cells(done.stdout)] == [
    "(0.5, 1)",
    "(0.5, 2)",
    "(1, 1)",
    "(1, 2)",
  ]


def test_sweep_under_a_guaranteed_maximum():
  args = ("--sweep", "cells=4", "--seeds", 1, "--max-staleness", 3)
  by_window = run(*args)
  by_deadline = run(*args, "--policy", "deadline")
  assert by_window.returncode == 0, by_window.stderr
  assert by_deadline.returncode == 0, by_deadline.stderr
  (slow,), (fast,) = cells(by_window.stdout), cells(by_deadline.stdout)
  assert slow["mean d"] == fast["mean d"] and int(fast["max d"]) <= 3
  assert float(fast["hours"].split()[0]) < float(slow["hours"].split()[0])


@pytest.fixture
def recorded(tmp_path):
  with RolloutStore(tmp_path / "rollouts.sqlite") as store:
    for g in range(12):
      store.put_group(Group(f"g{g}", g, "task", 0))
      for i in range(2):
        store.put_execution(
          Execution(
            execution_id=f"g{g}/{i}",
            group_id=f"g{g}",
            index=i,
            task_id="task",
            outcome=Outcome("scored", 1.0),
            t_end=1800.0,
          )
        )
  rollout = {"group_size": 2, "groups_per_step": 2, "max_slots": 4}
  (tmp_path / "config.json").write_text(
    json.dumps({"config": {"rollout": rollout}, "versions": {}})
  )
  (tmp_path / "metrics.jsonl").write_text(
    json.dumps({"step": 1, "perf/train_s": 1800.0, "perf/step_s": 3600.0})
    + "\n"
  )
  return tmp_path


def test_replay_under_another_budget(recorded):
  free = ["--to-train-s", 0, "--to-rollout-s", 0]
  done = run(
    *("--run", recorded, "--design", "colocate", "--mean-staleness", 0),
    *("--nodes", 1, "--seeds", 2, *free),
  )
  assert done.returncode == 0, done.stderr
  (row,) = cells(done.stdout)
  # 6 steps of half an hour of rollout and half an hour of training, as it was.
  assert row["hours"] == "6 ± 0" and row["max d"] == "0"
  done = run(
    *("--run", recorded, "--design", "colocate", "--mean-staleness", 0),
    *("--nodes", 2, "--seeds", 1, "--json", *free),
  )
  # Two nodes halve the training; an execution lasts as long as ever.
  line = json.loads(done.stdout.splitlines()[-1])
  assert line["rows"][0]["hours"] == pytest.approx(4.5)


def test_replay_of_all_designs(recorded):
  with (recorded / "metrics.jsonl").open("a") as lines:
    lines.write('{"elastic/switches": 4, "elastic/switch_s": 6.0}\n')
  done = run("--run", recorded, "--seeds", 1, "--to-rollout-s", 2)
  assert done.returncode == 0, done.stderr
  assert "1.5 s (the mean of the run's 4) to training" in done.stdout
  assert "2 s (as asked) back" in done.stdout
  assert [row["id"] for row in cells(done.stdout)] == [
    "async",
    "coarse",
    "colocate",
    "gyre",
  ]


@pytest.mark.parametrize(
  "arguments,match",
  [
    (["--table", 1, "--seeds", 0], "--seeds must be >= 1, got 0"),
    (["--sweep", "kappa=1"], "'kappa' is none of"),
    (["--sweep", "mu=a"], "'a' are no numbers"),
    (["--sweep", "mu=1.5"], "whole numbers"),
    (["--sweep", "phi=0.3"], "nearest phi is 0.3125"),
    (["--sweep", "cells=5"], "32 nodes are no 5 equal cells"),
    (["--sweep", "mu=5", "--max-staleness", 4], "max_staleness 4 is below 5"),
    (["--sweep", "mu=1", "mu=2"], "mu is given twice"),
    (["--sweep", "phi=inf"], "'inf' are no numbers"),
    (["--sweep", "mu=1", "--slots", 4], "--slots has no effect with --sweep"),
    (["--table", 1, "--nodes", 4], "--nodes has no effect with --table 1"),
    (["--matters", "--policy", "steady"], "it is for --run or --sweep"),
    (["--run", "nowhere"], "no run at nowhere: it is no directory"),
    (["--run", "x", "--alpha", "nan"], "--alpha must be a number >= 0"),
    (
      ["--run", "x", "--design", "async", "--cells", 2],
      "without --design gyre",
    ),
    (["--run", "x", "--design", "gyre", "--train-nodes", 2], "--design async"),
    (
      ["--run", "x", "--phi", 0, "--mu", 1, "--mean-staleness", 1],
      "--mean-staleness has no effect with both --phi and --mu",
    ),
    (["--table", 1, "--picture", "nowhere/x.html"], "can be no file"),
    (["--table", 1, "--first-seed", -1], "got -1"),
  ],
)
def test_mistakes_are_one_line(arguments, match):
  done = run(*arguments)
  assert done.returncode == 2
  assert match in done.stderr and len(done.stderr.splitlines()) == 1
  assert done.stdout == ""


def test_a_budget_that_does_not_divide_is_one_line(recorded):
  done = run("--run", recorded, "--nodes", 5, "--cells", 2)
  assert done.returncode == 2
  assert done.stderr == (
    "simulate.py: --nodes 5 are no --cells 2 equal cells\n"
  )


def test_it_can_be_stopped():
  """In the middle of much: one line, and no rows."""
  command = [sys.executable, str(SIMULATE), "--sweep", "mu=1,2,3,4,5,6,7,8"]
  process = subprocess.Popen(
    [*command, "phi=0,1,2,3", "--seeds", "2"],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  process.stderr.readline()  # it has begun
  process.send_signal(signal.SIGINT)
  out, error = process.communicate(timeout=60)
  assert (process.returncode, out) == (130, "")
  assert error.endswith("\nsimulate.py: stopped\n")
  assert "Traceback" not in error


def test_help():
  done = run("--help")
  assert done.returncode == 0
  assert "--table" in done.stdout and "--sweep" in done.stdout
