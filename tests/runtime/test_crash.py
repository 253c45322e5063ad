"""The main command, killed at any moment, resumes to the same end.

The acceptance line, 20 random moments:

  python -m pytest tests/runtime/test_crash.py -m slow -s
"""

import json
import os
import random
import shutil
import signal
import time

import pytest
from running import (
  STEPS,
  check_consumed,
  check_same,
  finished,
  kill_when,
  rows,
  run,
  tokens,
)

from gyre.store import manifest


def test_an_uninterrupted_run(whole):
  got = rows(whole)
  assert [r["step"] for r in got] == list(range(STEPS + 1))
  assert [("eval/reward" in r) for r in got] == [True, False, True, True]
  assert any(r["optim/grad_norm"] > 0 for r in got[1:])
  for row in got[1:]:
    assert row["tito/drift_in_loss"] == 0
    assert row["staleness/max"] == 0
    assert row["mismatch/logprob_abs_diff"] < 1e-4
    assert 0 <= row["reward/mean"] <= 1
  config = json.loads((whole / "config.json").read_text())
  assert config["config"]["run"]["steps"] == STEPS
  assert set(config["versions"]) == {"jax", "jaxlib", "gyre"}
  check_consumed(whole)
  table = (whole / "log.txt").read_text()
  assert "held-out reward (n = 4)" in table and "wall time" in table
  assert list((whole / "tensorboard").glob("events*"))
  kept = sorted(p.name for p in (whole / "checkpoints").iterdir())
  best = manifest.read_document(whole / "checkpoints" / "best.json")
  assert f"step_{best['step']:06d}" in kept
  assert {"step_000002", "step_000003"} <= set(kept)


def test_killed_in_rollout_and_in_a_checkpoint(tmp_path, whole, environment):
  directory = tmp_path / "run"
  partial = directory / "checkpoints" / ".tmp-step_000002"
  moments = (
    lambda: finished(directory, "train") >= 3,
    lambda: partial.exists(),
  )
  before = {}
  for moment in moments:
    assert kill_when(directory, environment, moment) == -signal.SIGKILL
    now = tokens(directory)
    assert before.items() <= now.items()
    before = now
  code, output = run(directory, environment)
  assert code == 0, output
  assert "resuming train after step 1" in output
  assert before.items() <= tokens(directory).items()
  assert not list((directory / "checkpoints").glob(".tmp-*"))
  check_same(directory, whole)


@pytest.mark.slow
def test_killed_at_20_random_moments(tmp_path, whole, environment):
  rng = random.Random(os.environ.get("GYRE_CRASH_SEED", "0"))
  began = time.monotonic()
  directory = tmp_path / "warm"
  assert run(directory, environment)[0] == 0
  length = time.monotonic() - began
  check_same(directory, whole)
  directory = tmp_path / "run"
  before, kills = {}, 0
  while kills < 20:
    if (directory / "checkpoints" / f"step_{STEPS:06d}").exists():
      # It came to its end: check it, and kill another run.
      assert run(directory, environment)[0] == 0
      check_same(directory, whole)
      shutil.rmtree(directory)
      before = {}
    end = time.monotonic() + rng.uniform(0.2, 1.0) * length
    code = kill_when(
      directory, environment, lambda end=end: time.monotonic() > end
    )
    if code == 0:
      continue
    assert code == -signal.SIGKILL
    kills += 1
    now = tokens(directory)
    assert before.items() <= now.items()
    before = now
    there = sorted(p.name for p in directory.glob("checkpoints/*"))
    print(f"kill {kills}: {len(now)} executions, {there}", flush=True)
  code, output = run(directory, environment)
  assert code == 0, output
  check_same(directory, whole)
