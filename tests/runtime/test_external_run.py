"""The main command with an external harness, whole and killed.

The acceptance line, 20 executions at once:

  python -m pytest tests/runtime/test_external_run.py -m slow -s
"""

import collections
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import time
import uuid

import pytest
import running

from gyre.envs import sandbox
from gyre.runtime import metrics
from gyre.store.rollouts import RolloutStore

CONFIG = pathlib.Path(__file__).parent / "external_config.py"


def command(directory, mark, *options):
  return [
    sys.executable,
    str(running.RUN),
    "--config",
    f"{CONFIG}:{mark}",
    "--workdir",
    str(directory),
    *options,
  ]


def run(directory, environment, mark, *options):
  done = subprocess.run(
    command(directory, mark, *options),
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
  )
  return done.returncode, done.stdout


def harnesses(mark):
  """Host processes with the mark that are no runs of gyre."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      words = path.read_bytes().split(b"\0")
    except OSError:
      continue
    if mark.encode() in words:
      found.append(int(path.parent.name))
  return found


def executions(directory, phase):
  with RolloutStore(directory / "rollouts.sqlite", readonly=True) as store:
    return [
      store.execution(name)
      for group in store.groups(phase)
      for name in store.execution_ids()
      if name.startswith(f"{group.group_id}/")
    ]


def left_behind():
  """Directories of sandboxes and sockets whose process has ended."""
  names = [p.name for p in sandbox.base_directory().iterdir()]
  return [n for n in names if not os.path.exists(f"/proc/{n.split('-')[0]}")]


def test_a_run_trains_through_the_harness(tmp_path, environment):
  directory = tmp_path / "run"
  code, output = run(
    directory,
    environment,
    "gyre",
    "--config.rollout.groups_per_step=2",
    "--config.rollout.group_size=2",
    "--config.harness.command={python} {path}/delegating.py --turns 3 "
    "--compact 100 --tokens 24 {instruction}",
  )
  assert code == 0, output
  (warm,) = [x for x in output.splitlines() if "transcripts passed" in x]
  assert "8 of 8" in warm
  row = metrics.read_lines(directory / "metrics.jsonl")[-1]
  assert row["step"] == 1 and row["tito/drift_in_loss"] == 0
  assert 0 <= row["reward/mean"] <= 1
  roles = collections.Counter(
    c.role for e in executions(directory, "warm") for c in e.calls
  )
  assert roles["sub_agent"] >= 16 and roles["main_summary"] >= 1
  for execution in executions(directory, "train"):
    assert execution.outcome.status in ("scored", "no_artifact")
    assert execution.calls
  # Nothing is served any more, and nothing is left.
  assert not [n for n in left_behind() if "-shared" not in n]


@pytest.mark.slow
def test_killed_in_the_middle_of_20_concurrent_harnesses(tmp_path, environment):
  mark = f"gyre-{uuid.uuid4().hex}"
  directory = tmp_path / "run"
  process = subprocess.Popen(
    command(directory, mark),
    env=environment,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  end = time.monotonic() + 300
  most = 0
  try:
    while running.finished(directory, "train") < 5:
      assert process.poll() is None and time.monotonic() < end
      most = max(most, len(harnesses(mark)))
      time.sleep(0.01)
    alive = harnesses(mark)
  finally:
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
  killed = time.monotonic()
  while harnesses(mark):
    assert time.monotonic() < killed + 5, "orphaned harness processes"
    time.sleep(0.01)
  gone = time.monotonic() - killed
  before = running.tokens(directory)
  done = [name for name in before if name.startswith("train-")]
  print(
    f"killed with {len(done)} of 20 finished, {len(alive)} harness processes "
    f"alive (most {most}); all gone after {gone:.2f} s",
    flush=True,
  )
  assert 5 <= len(done) < 20 and alive
  code, output = run(directory, environment, mark)
  assert code == 0, output
  after = running.tokens(directory)
  assert before.items() <= after.items()
  names = [name for name in after if name.startswith("train-")]
  assert sorted(names) == [f"train-{g:06d}/{i}" for g in range(5)
                           for i in range(4)]  # fmt: skip
  db = sqlite3.connect(directory / "rollouts.sqlite")
  try:
    rows = db.execute("SELECT execution_id FROM executions").fetchall()
    calls = db.execute("SELECT execution_id, call_id FROM calls").fetchall()
  finally:
    db.close()
  assert len(rows) == len(set(rows)) and len(calls) == len(set(calls))
  assert not harnesses(mark)
  assert not [n for n in left_behind() if n.startswith(f"{process.pid}-")]


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_takes_its_harnesses_down(
  tmp_path, environment
):
  """SIGTERM at several moments: it ends soon, and leaves nothing."""
  mark = f"gyre-{uuid.uuid4().hex}"
  directory = tmp_path / "run"
  for count in (1, 6, 11):
    process = subprocess.Popen(
      command(directory, mark),
      env=environment,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
    )
    try:
      while running.finished(directory, "train") < count:
        assert process.poll() is None
        time.sleep(0.005)
      process.terminate()
      _, said = process.communicate(timeout=60)
    finally:
      process.kill()
      process.wait()
    assert process.returncode == 130 and "stopped" in said
    assert not harnesses(mark)
    mine = [n for n in left_behind() if n.startswith(f"{process.pid}-")]
    assert not [n for n in mine if "-shared" not in n]
