"""Files of a run: lock, configuration, lines, trace, sampler."""

import collections
import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.config import Config, ConfigError, Run, Trajectory
from gyre.runtime import metrics, sampler, timeline, workdir
from gyre.trajectory import select
from gyre.types import Call, Execution, Outcome


@given(st.integers(1, 20), st.integers(0, 9), st.integers(0, 60))
def test_sampler_every_task_once_an_epoch(num_tasks, seed, n):
  drawn = [sampler.task_of(i, num_tasks=num_tasks, seed=seed) for i in range(n)]
  for start in range(0, n - num_tasks + 1, num_tasks):
    epoch = drawn[start : start + num_tasks]
    assert sorted(epoch) == list(range(num_tasks))
  counts = collections.Counter(drawn)
  assert max(counts.values(), default=0) - min(
    (counts[i] for i in range(num_tasks)), default=0
  ) in (0, 1)


def test_sampler_shuffles():
  orders = {tuple(sampler.order(50, s, e)) for s in (0, 1) for e in (0, 1)}
  assert len(orders) == 4


def test_lock_refuses_a_second_run(tmp_path):
  lock = workdir.Lock(tmp_path)
  code = (
    "import pathlib, sys\nfrom gyre.runtime import workdir\n"
    "workdir.Lock(pathlib.Path(sys.argv[1]))\n"
  )
  run = [sys.executable, "-c", code, str(tmp_path)]
  second = subprocess.run(run, capture_output=True, text=True)
  assert second.returncode != 0
  assert "ConfigError" in second.stderr and "in use" in second.stderr
  lock.release()
  assert subprocess.run(run).returncode == 0


def test_another_configuration_is_refused(tmp_path):
  config = Config(run=Run(seed=1, steps=5))
  workdir.check_config(tmp_path, config)
  workdir.write_config(tmp_path, config)
  workdir.check_config(tmp_path, config)
  more = dataclasses.replace(config, run=Run(seed=1, steps=9))
  workdir.check_config(tmp_path, more)
  engines = dataclasses.replace(config.rollout, engines=2)
  workdir.check_config(tmp_path, dataclasses.replace(more, rollout=engines))
  with pytest.raises(ConfigError, match=r"5 steps.*run.steps 3"):
    fewer = dataclasses.replace(config, run=Run(seed=1, steps=3))
    workdir.check_config(tmp_path, fewer)
  other = dataclasses.replace(
    config,
    run=Run(seed=2, steps=5),
    tasks=dataclasses.replace(config.tasks, kinds={"files": 2.0}),
  )
  with pytest.raises(ConfigError) as error:
    workdir.check_config(tmp_path, other)
  message = str(error.value)
  assert "run.seed was 1, is 2" in message
  assert "tasks.kinds.files was unset, is 2.0" in message
  assert "\n" not in message
  versions = json.loads((tmp_path / "config.json").read_text())["versions"]
  assert set(versions) == {"jax", "jaxlib", "gyre"}


def test_lines_are_cut_and_continued(tmp_path):
  path = tmp_path / "metrics.jsonl"
  lines = metrics.Lines(path)
  lines.put({"step": 1, "loss/policy": float("nan")})
  end = lines.tell()
  lines.put({"step": 2})
  lines.close()
  workdir.cut(path, end)
  lines = metrics.Lines(path)
  assert lines.tell() == end
  lines.put({"step": 2, "again": True})
  lines.close()
  assert metrics.read_lines(path) == [
    {"step": 1, "loss/policy": None},
    {"step": 2, "again": True},
  ]
  assert metrics.read_lines(tmp_path / "none") == []


def test_timeline_is_json_after_every_event(tmp_path):
  path = tmp_path / "timeline.json"
  t = timeline.Timeline(path, ("cell 0", "engine 0"))
  with t.span("cell 0", "step", step=1):
    pass
  end = t.tell()
  assert len(json.loads(path.read_text())) == 3
  t.instant("engine 0", "publish", version=1)
  assert len(json.loads(path.read_text())) == 4
  t.close()
  workdir.cut(path, end)  # a killed run, resumed
  t = timeline.Timeline(path, ("cell 0", "engine 0"))
  assert len(json.loads(path.read_text())) == 3
  t.instant("engine 0", "publish", version=2)
  t.close()
  events = json.loads(path.read_text())
  assert [e["name"] for e in events] == [
    "thread_name",
    "thread_name",
    "step",
    "publish",
  ]
  assert events[2]["ph"] == "X" and events[2]["dur"] >= 0
  assert events[3]["args"] == {"version": 2}


def _execution(score, status="scored", **kwargs):
  outcome = Outcome(status, score, passed=int(score == 1), total=1)
  return Execution("g/0", "g", 0, "t", outcome=outcome, **kwargs)


def test_failures_enter_no_statistic():
  xs = [_execution(1.0, turns=2), _execution(0.0, turns=4)]
  xs.append(_execution(None, "eval_failed", turns=90))
  got = metrics.rewards(xs, [1.0, 0.0, None])
  assert got["reward/mean"] == 0.5
  assert got["reward/std"] == 0.5
  assert got["reward/solved"] == 0.5
  assert got["episode/turns"] == 3
  assert got["episode/failed"] == 1


def _call(i, prompt, completion):
  n = len(completion)
  return Call(
    "g/0", "g", f"{i}", prompt, completion, [-1.0] * n, [0] * n, "stop"
  )


@pytest.mark.parametrize("mode", ["once", "multiplicity", "leaf"])
def test_token_audit_finds_every_span_or_counts_it(mode):
  calls = (
    _call(0, [1, 2], [3]),
    _call(1, [1, 2, 3, 4], [5, 6]),
    _call(2, [9], [5]),
    _call(3, [1, 2, 3, 4], [5, 7]),
  )
  execution = Execution("g/0", "g", 0, "t", calls=calls)
  selection = select.samples(execution, Trajectory(mode=mode))
  got = metrics.token_audit([execution], [selection])
  assert got["tito/strict"] == 1 and got["tito/split"] == 2
  assert got["tito/drift_in_loss"] == 0
  told = [
    dataclasses.replace(c, boundary=b)
    for c, b in zip(calls, ("", "normalized", "split", "split"), strict=True)
  ]
  got = metrics.token_audit(
    [dataclasses.replace(execution, calls=tuple(told))], [selection]
  )
  assert got["tito/strict"] == 0 and got["tito/normalized"] == 1
  assert got["tito/split"] == 2 and got["tito/retokenized"] == 0

  def drift(**changes):
    """Masked tokens lost when the longest sample is another."""
    i = max(range(len(selection.samples)), key=lambda i: len(samples[i].ids))
    broken = dataclasses.replace(samples[i], **changes)
    parts = [*samples[:i], broken, *samples[i + 1 :]]
    audit = metrics.token_audit(
      [execution], [dataclasses.replace(selection, samples=parts)]
    )
    return audit["tito/drift_in_loss"], len(samples[i].trained)

  samples = selection.samples
  longest = max(samples, key=lambda s: len(s.ids))
  ids = longest.ids.copy()
  ids[1] = 8  # every token of it loses its context
  lost, masked = drift(runs=(ids,))
  assert lost == masked > 0
  trained = longest.trained.copy()
  assert trained[0] > 1
  trained[0] = 1  # a token of the prompt, that no call sampled
  assert drift(trained=trained)[0] == 1
  logprobs = longest.logprobs - 0.5
  assert drift(logprobs=logprobs)[0] == masked
