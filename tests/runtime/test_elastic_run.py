"""Runs whose cells move between rollout and training."""

import json

import pytest
from running import check_same, run, tokens

from gyre import config as config_lib
from gyre.runtime import controller, event_log, metrics
from gyre.store.rollouts import RolloutStore


def _config(directory):
  saved = json.loads((directory / "config.json").read_text())
  return config_lib.from_config_dict(saved["config"])


def audited(directory):
  """The audit of a run's event log; nothing in it contradicts itself."""
  config = _config(directory)
  with RolloutStore(directory / "rollouts.sqlite", readonly=True) as store:
    events = store.events(event_log.EVENT)
  audit = event_log.audit(
    controller.layout(config),
    controller.law(config),
    [(e["step"], e["payload"]) for e in events],
  )
  assert not audit.faults
  return audit


def _names(directory):
  trace = json.loads((directory / "timeline.json").read_text())
  tracks = {
    e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"
  }
  return {(tracks[e["tid"]], e["name"]) for e in trace if e["ph"] == "X"}


def test_two_cells_train_what_one_does_bit_for_bit(
  tmp_path, whole, environment
):
  directory = tmp_path / "run"
  code, output = run(directory, environment, "--config.elastic.cells=2")
  assert code == 0, output
  check_same(directory, whole)
  audit = audited(directory)
  assert audit.switches >= 6  # the core goes and comes back, each step
  names = _names(directory)
  assert {("cell 0", "train"), ("engine 1", "rollout")} <= names
  assert {("cell 0", "to train"), ("cell 0", "micro-step")} <= names
  rows = metrics.read_lines(directory / "metrics.jsonl")
  for row in rows[1:]:
    assert row["elastic/switches"] >= 1 and row["elastic/switch_s"] > 0
    assert 0 <= row["perf/rollout_idle"] <= 1


@pytest.mark.slow
def test_ahead_of_the_policy_over_three_cells(tmp_path, environment):
  """φ = 1/2, μ = 2, not deterministic, and resumed in the middle."""
  directory = tmp_path / "run"
  options = (
    "--config.run.deterministic=False",
    "--config.elastic.cells=3",
    "--config.elastic.phi=0.5",
    "--config.elastic.mu=2",
    "--config.rollout.max_slots=4",
  )
  code, output = run(directory, environment, *options, "--config.run.steps=3")
  assert code == 0, output
  before = tokens(directory)
  audit = audited(directory)
  assert {d for *_, d in audit.staleness} <= {0, 1, 2, 3}
  assert max(d for *_, d in audit.staleness) >= 1
  assert sorted(audit.applied) == [1, 2, 3]
  assert all(len(groups) == 2 for groups in audit.applied.values())
  code, output = run(directory, environment, *options, "--config.run.steps=3")
  assert code == 0, output
  assert tokens(directory) == before


@pytest.mark.slow
def test_a_core_lends_half_its_devices_and_takes_them_back(
  tmp_path, environment
):
  directory = tmp_path / "run"
  code, output = run(
    directory,
    environment,
    "--config.run.steps=5",
    "--config.mesh.fsdp=8",
    "--config.learner.micro_rows=8",
    "--config.elastic.resize={'1': 4, '3': 8}",
  )
  assert code == 0, output
  audit = audited(directory)
  assert sorted(audit.applied) == [1, 2, 3, 4, 5]
  names = _names(directory)
  assert {("cell 0", "resize"), ("engine 0-lent", "rollout")} <= names
