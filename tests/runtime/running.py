"""Runs the main command in processes of its own and reads what it left."""

import json
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import time

import jax
import numpy as np

from gyre.runtime import metrics, reshard
from gyre.store import manifest
from gyre.store.rollouts import RolloutStore

_HERE = pathlib.Path(__file__).parent
RUN = _HERE.parents[1] / "experiments" / "run.py"
CONFIG = _HERE / "tiny_config.py"
STEPS = 3


def command(directory, *options):
  """The main command on `directory`."""
  return [
    sys.executable,
    str(RUN),
    "--config",
    str(CONFIG),
    "--workdir",
    str(directory),
    *options,
  ]


def run(directory, environment, *options):
  """Runs the command to its end; (exit status, its output)."""
  done = subprocess.run(
    command(directory, *options),
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  return done.returncode, done.stdout


def final_state(directory):
  """Every array of the last step's checkpoint: name -> bytes."""
  path = directory / "checkpoints" / f"step_{STEPS:06d}"
  arrays = manifest.verify(path).meta["arrays"]
  where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  key = jax.random.key(0).dtype
  abstract = {
    name: jax.ShapeDtypeStruct(
      shape, key if dtype.startswith("key") else dtype, sharding=where
    )
    for name, (shape, dtype) in arrays.items()
  }
  state, _ = reshard.restore(path, abstract)
  return {
    name: np.asarray(jax.random.key_data(x) if x.dtype == key else x).tobytes()
    for name, x in state.items()
  }


def rows(directory):
  """metrics.jsonl without what depends on the clock: times, and switches."""
  return [
    {
      k: v
      for k, v in row.items()
      if not k.startswith(("perf/", "elastic/")) and not k.endswith("_s")
    }
    for row in metrics.read_lines(directory / "metrics.jsonl")
  ]


def tokens(directory):
  """Every finished execution: id -> tokens, logprobs, score."""
  path = directory / "rollouts.sqlite"
  if not path.exists():
    return {}
  out = {}
  with RolloutStore(path, readonly=True) as store:
    for execution_id in store.execution_ids():
      e = store.execution(execution_id)
      out[execution_id] = (
        [
          (
            c.prompt_ids.tobytes(),
            c.completion_ids.tobytes(),
            c.logprobs.tobytes(),
            c.versions.tobytes(),
          )
          for c in e.calls
        ],
        e.outcome.score,
        e.version,
      )
  return out


def check_same(directory, whole):
  """A run that was killed and resumed against one that was not."""
  assert rows(directory) == rows(whole)
  assert final_state(directory) == final_state(whole)
  assert tokens(directory) == tokens(whole)
  for name in ("warm_start.jsonl",):
    got, expected = (
      [r["loss/policy"] for r in metrics.read_lines(d / name)]
      for d in (directory, whole)
    )
    assert got == expected
  check_consumed(directory)
  lines = (directory / "log.txt").read_text().splitlines()
  steps = [line.split("/")[0] for line in lines if line.startswith("step ")]
  assert [int(s.removeprefix("step")) for s in steps] == list(range(STEPS + 1))
  trace = json.loads((directory / "timeline.json").read_text())
  published = [e["args"]["version"] for e in trace if e["name"] == "publish"]
  assert sorted(set(published)) == list(range(STEPS + 1))
  updates = [e["args"]["update"] for e in trace if e["name"] == "update"]
  assert updates == list(range(1, STEPS + 1))


def check_consumed(directory):
  """Each group dispatched is trained once, by the step of its manifest."""
  path = directory / "checkpoints" / f"step_{STEPS:06d}"
  consumed = reshard.read_meta(path)["consumed"]
  with RolloutStore(directory / "rollouts.sqlite", readonly=True) as store:
    assert store.consumed() == consumed
    assert sorted(consumed) == [g.group_id for g in store.groups("train")]
    for step in range(1, STEPS + 1):
      for sample, _ in store.samples(step):
        assert consumed[sample.group_id] == step
  for step in range(1, STEPS + 1):
    assert list(consumed.values()).count(step) == 2


def kill_when(directory, environment, moment, timeout_s=300):
  """Starts the command and kills it -9 once `moment()` holds."""
  process = subprocess.Popen(
    command(directory),
    env=environment,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  end = time.monotonic() + timeout_s
  try:
    while process.poll() is None and not moment():
      assert time.monotonic() < end, "the moment never came"
      time.sleep(0.002)
  finally:
    if process.poll() is None:
      os.kill(process.pid, signal.SIGKILL)
  return process.wait()


def finished(directory, phase):
  """How many executions of a phase the store holds."""
  path = directory / "rollouts.sqlite"
  if not path.exists():
    return 0
  db = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
  try:
    return db.execute(
      "SELECT COUNT(*) FROM executions JOIN groups USING (group_id)"
      " WHERE phase = ?",
      (phase,),
    ).fetchone()[0]
  except sqlite3.OperationalError:  # the schema is not there yet
    return 0
  finally:
    db.close()
