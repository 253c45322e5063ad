"""A recorded run's executions, read back and run again."""

import dataclasses
import json

import pytest

from gyre.elastic.cells import global_switch
from gyre.elastic.dispatch import Law
from gyre.sim import picture, replay
from gyre.sim.clock import simulate
from gyre.sim.fluids import Costs
from gyre.sim.workload import Work
from gyre.store.rollouts import RolloutStore
from gyre.types import Execution, Group, Outcome


def _record(directory, seconds, *, unscored=(), config=True, rows=()):
  """A run of groups with these durations (None: not finished)."""
  with RolloutStore(directory / "rollouts.sqlite") as store:
    for g, group in enumerate(seconds):
      name = f"train-{g}"
      store.put_group(Group(name, g, f"task{g}", 0))
      for i, length in enumerate(group):
        if length is None:
          continue
        bad = (g, i) in unscored
        outcome = Outcome("eval_failed") if bad else Outcome("scored", 1.0)
        store.put_execution(
          Execution(
            execution_id=f"{name}/{i}",
            group_id=name,
            index=i,
            task_id=f"task{g}",
            outcome=outcome,
            t_start=1000.0 + g,
            t_end=1000.0 + g + length,
          )
        )
    store.put_group(Group("eval-0", 0, "task", 0), phase="eval")
    store.put_execution(Execution("eval-0/0", "eval-0", 0, "task", t_end=9.0))
  if config:
    rollout = {"group_size": 2, "groups_per_step": 1, "max_slots": 3}
    (directory / "config.json").write_text(
      json.dumps({"config": {"rollout": rollout}, "versions": {}})
    )
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "metrics.jsonl").write_text(lines)


def test_a_run_is_read_back(tmp_path):
  _record(
    tmp_path,
    [[2.0, 3.0], [5.0, None], [1.0, 4.0]],
    unscored={(2, 1)},
    rows=[
      {"step": 0, "perf/warm_start_s": 50.0},
      {"step": 1, "perf/train_s": 2.0, "perf/step_s": 1800.0},
      {"step": 2, "perf/train_s": 4.0, "perf/step_s": 1800.0},
      {"step": 3, "perf/train_s": 3.0, "perf/step_s": 3600.0},
      {"step": 4, "elastic/switches": 3, "elastic/switch_s": 1.0},
      {"step": 5, "elastic/switches": 1, "elastic/switch_s": 5.0},
    ],
  )
  got = replay.read(tmp_path)
  assert got.groups == (
    (Work(2.0), Work(3.0)),
    (Work(1.0), Work(4.0, scored=False)),
  )
  assert (got.group_size, got.batch, got.slots) == (2, 1, 3)
  assert (got.update_s, got.skipped, got.hours) == (3.0, 1, 2.0)
  assert (got.switch_s, got.switches) == (1.5, 4)
  assert (got.mean_s, got.longest_s) == (2.5, 4.0)


def test_replayed_as_recorded(tmp_path):
  # One cell holds a group at a time: its steps last as the longest of each.
  _record(tmp_path, [[2.0, 3.0], [6.0, 5.0], [1.0, 4.0]])
  recorded = replay.read(tmp_path)
  costs = Costs(update_work=10.0, to_train=0.0, to_rollout=0.0)

  def applied(seed):
    run = simulate(
      global_switch(1, 2),
      Law(0, 1, 1, 2),
      recorded.workload(seed),
      costs,
      steps=3,
    )
    return run.applied

  assert applied(0) == pytest.approx([13.0, 29.0, 43.0])
  # Another seed begins at another group of the same run.
  assert applied(1) != applied(0) and applied(1)[-1] == pytest.approx(43.0)


def test_without_a_configuration_the_groups_tell_their_size(tmp_path):
  _record(tmp_path, [[2.0, 3.0], [5.0]], config=False)
  got = replay.read(tmp_path)
  assert (got.group_size, got.batch, got.slots, got.hours) == (2, 0, 0, None)
  assert len(got.groups) == 1 and got.skipped == 1


def test_the_slots_of_a_cell_are_those_of_an_elastic_run(tmp_path):
  _record(tmp_path, [[2.0, 3.0]])
  path = tmp_path / "config.json"
  head = json.loads(path.read_text())
  for slots, want in ((0, 3), (7, 7)):
    head["config"]["elastic"] = {"cells": 2, "slots": slots}
    path.write_text(json.dumps(head))
    assert replay.read(tmp_path).slots == want


def test_what_is_no_run_is_refused(tmp_path):
  with pytest.raises(replay.ReplayError, match="gone: it is no directory"):
    replay.read(tmp_path / "gone")
  with pytest.raises(replay.ReplayError, match=r"has no rollouts\.sqlite"):
    replay.read(tmp_path)
  _record(tmp_path, [[None, 3.0]])
  with pytest.raises(replay.ReplayError, match=r"1 recorded .* no whole group"):
    replay.read(tmp_path)
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(replay.ReplayError, match="not what a run writes"):
    replay.read(tmp_path)


def test_the_picture_shows_every_role_and_update(tmp_path):
  _record(tmp_path, [[2.0, 3.0]])
  run = simulate(
    global_switch(1, 2),
    Law(0, 1, 1, 2),
    replay.read(tmp_path).workload(0),
    Costs(update_work=10.0),
    steps=3,
  )
  page = picture.render("a < b", [("one & two", run)])
  assert "a &lt; b" in page and "one &amp; two" in page
  assert page.count("<rect") == len(run.spans)
  assert page.count("<title>update") == 3
  assert f"update 3: {run.seconds:.4g} s" in page and "20 s</text>" in page
  hour = dataclasses.replace(run, seconds=7200.0)
  assert "1 h</text>" in picture.render("", [("", hour)])
  assert "http" not in page and "src=" not in page
  alone = dataclasses.replace(run, seconds=2 * run.seconds)
  wide = picture.render("", [("", run), ("", alone)])
  assert wide.count("<svg") == 2
