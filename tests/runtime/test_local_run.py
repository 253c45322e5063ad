"""Runs whose cells are processes of their own, which die.

The acceptance line, kill -9 of cells and of the controller:

  python -m pytest tests/runtime/test_local_run.py -m slow -s
"""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import threading
import time

import pytest
from running import (
  STEPS,
  check_consumed,
  command,
  final_state,
  finished,
  rows,
  run,
  tokens,
)
from test_elastic_run import audited

from gyre import config as config_lib
from gyre.config import ConfigError
from gyre.runtime import launch, reshard
from gyre.store.rollouts import RolloutStore

LOCAL = ("--config.elastic.cells=2", "--config.elastic.launcher=local")
SHM = pathlib.Path("/dev/shm")


def workers(pid):
  """Processes of a controller's cells: name -> pid."""
  found = {}
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      words = path.read_bytes().decode().split("\0")
    except OSError:  # it has gone
      continue
    if "gyre.runtime.worker" in words and str(pid) in words:
      found[words[words.index("--name") + 1]] = int(path.parent.name)
  return found


def shared(pid):
  """What a controller left in shared memory."""
  return list(SHM.glob(f"gyre-exchange-{pid}-*"))


def start(directory, environment, *options):
  """Starts a run over processes."""
  with open(directory.with_suffix(".log"), "ab") as log:
    return subprocess.Popen(
      command(directory, *LOCAL, *options),
      env=environment,
      stdout=log,
      stderr=log,
    )


def wait_for(holds, process=None, timeout_s=300):
  """Waits until something holds, or a process has ended."""
  end = time.monotonic() + timeout_s
  while not holds() and (process is None or process.poll() is None):
    assert time.monotonic() < end, "the moment never came"
    time.sleep(0.002)


def check_same_training(directory, whole):
  """What one process without a death would have done, bit for bit."""
  assert rows(directory) == rows(whole)
  assert final_state(directory) == final_state(whole)
  assert tokens(directory) == tokens(whole)
  check_consumed(directory)
  audit = audited(directory)
  assert sorted(audit.applied) == list(range(1, STEPS + 1))
  assert {d for *_, d in audit.staleness} == {0}
  return audit


def test_a_process_a_cell_trains_what_one_process_does(
  tmp_path, whole, environment
):
  directory = tmp_path / "run"
  process = start(directory, environment)
  wait_for(lambda: finished(directory, "train"), process)
  assert sorted(workers(process.pid)) == ["cell 0", "cell 1"]
  assert len(shared(process.pid)) == 1
  assert process.wait() == 0, directory.with_suffix(".log").read_text()
  assert check_same_training(directory, whole).deaths == 0
  assert not workers(process.pid) and not shared(process.pid)


@pytest.mark.slow
def test_a_run_that_is_stopped_leaves_nothing(tmp_path, environment):
  more = start(tmp_path / "run", environment, "--config.run.steps=50")
  wait_for(lambda: len(workers(more.pid)) == 2, more)
  more.send_signal(signal.SIGTERM)
  assert more.wait() == 130
  assert not workers(more.pid) and not shared(more.pid)


def test_devices_of_a_cell(monkeypatch):
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
  assert launch.visible((2, 3)) == (2, 3)
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5, 6,7")
  assert launch.visible((2, 3)) == ("6", "7")
  with pytest.raises(ConfigError, match=r"need 5 devices, .* names 4"):
    launch.visible((3, 4))


def test_a_mesh_of_one_cell_is_here_and_no_resize():
  wanted = {"mesh": {"fsdp": 8}, "model": {"hf_config": {"a": 1}}}
  elastic = {"cells": 4, "launcher": "local"}
  cfg = config_lib.config_dict(**wanted, elastic=elastic)
  (mesh,) = launch.cell_meshes(config_lib.from_config_dict(cfg))
  assert mesh.size == 8
  elastic |= {"resize": {"1": 4}}
  cfg = config_lib.config_dict(**wanted, elastic=elastic)
  with pytest.raises(ConfigError, match=r"resize needs .*'inprocess'"):
    config_lib.from_config_dict(cfg)


@pytest.mark.slow
def test_two_passes_and_a_reference_policy(tmp_path, environment):
  """Satellites join between the passes, and score by the first weights."""
  options = (
    "--config.learner.kl_coef=0.05",
    "--config.learner.updates_per_batch=2",
  )
  directories = tmp_path / "one", tmp_path / "two"
  for directory, more in zip(directories, ((), LOCAL), strict=True):
    code, output = run(directory, environment, *options, *more)
    assert code == 0, output
  one, two = directories
  assert any(row["loss/kl"] for row in rows(one)[1:])
  assert rows(two) == rows(one)
  assert final_state(two) == final_state(one)
  assert tokens(two) == tokens(one)
  audited(two)


@pytest.mark.slow
def test_a_run_goes_on_without_a_cell_that_is_lost(
  tmp_path, whole, environment
):
  directory = tmp_path / "run"
  process = start(directory, environment, "--config.elastic.restarts=0")
  wait_for(lambda: finished(directory, "train"), process)
  os.kill(workers(process.pid)["cell 0"], signal.SIGKILL)
  log = directory.with_suffix(".log")
  assert process.wait() == 0, log.read_text()
  assert "cell 0: killed by SIGKILL" in log.read_text()
  trace = json.loads((directory / "timeline.json").read_text())
  assert [e["name"] for e in trace].count("down") == 1
  assert check_same_training(directory, whole).deaths == 1
  # Nor can it when the last one has gone.
  shutil.rmtree(directory)
  process = start(directory, environment, "--config.elastic.restarts=0")
  for _ in range(2):
    wait_for(lambda: finished(directory, "train"), process)
    for pid in workers(process.pid).values():
      os.kill(pid, signal.SIGKILL)
  assert process.wait() == 2
  assert "no cell is left to train" in log.read_text().splitlines()[-1]
  assert not shared(process.pid)


class _Killer(threading.Thread):
  """Kills one of a run's processes when a moment has come."""

  def __init__(self, process, directory, rng, spare_s):
    super().__init__(daemon=True)
    self._process, self._directory = process, directory
    self._rng, self._spare_s = rng, spare_s
    self.kills = []

  def _moment(self):
    """A random time, or one inside a checkpoint."""
    if self._rng.random() < 0.3:
      there = self._directory / "checkpoints"
      wait_for(lambda: list(there.glob(".tmp-step_*")), self._process)
      return "in a checkpoint"
    time.sleep(self._rng.uniform(0.1, 1.0) * self._spare_s)
    return "at a random moment"

  def run(self):
    wait_for(lambda: finished(self._directory, "train"), self._process)
    while self._process.poll() is None:
      when = self._moment()
      cells = workers(self._process.pid)
      if self._process.poll() is not None or not cells:
        continue
      who = self._rng.choice([*sorted(cells), "cell 0", "controller"])
      pid = self._process.pid if who == "controller" else cells.get(who)
      if pid is None:
        continue
      try:
        os.kill(pid, signal.SIGKILL)
      except ProcessLookupError:
        continue
      self.kills.append((who, when))
      if who == "controller":
        return


def killed_at_random_moments(directory, environment, rng, wanted, check, *more):
  """Kills processes of runs until there were so many; then one may end.

  Args:
    directory: of the runs, one after the other.
    environment: of the command.
    rng: who is killed, and when.
    wanted: kills.
    check: looks at a run that has ended; returns the audit of its log.
    *more: options of the command.
  """
  log = directory.with_suffix(".log")
  kills, ended, deaths, before, controllers = [], 0, 0, {}, []
  more = (*more, "--config.elastic.restarts=99")
  while True:
    process = start(directory, environment, *more)
    controllers.append(process.pid)
    killer = _Killer(process, directory, rng, spare_s=8.0)
    if len(kills) < wanted:
      killer.start()
    code = process.wait()
    if killer.ident:
      killer.join()
    kills += killer.kills
    print(f"status {code}: {killer.kills}", flush=True)
    now = tokens(directory)
    assert before.items() <= now.items()  # no finished execution is lost
    wait_for(lambda: not workers(controllers[-1]), timeout_s=10)
    before = now
    if code != 0:
      assert code == -signal.SIGKILL, log.read_text()[-4000:]
      continue
    ended, before = ended + 1, {}
    deaths += check(directory).deaths
    if len(kills) >= wanted:
      break
    shutil.rmtree(directory)
  # A run that was killed leaves an empty directory, which the next removes.
  assert not any(map(shared, controllers))
  print(f"{len(kills)} kills, {deaths} deaths of cells in logs, {ended} runs")


@pytest.mark.slow
def test_killed_at_random_moments_trains_the_same(tmp_path, whole, environment):
  killed_at_random_moments(
    tmp_path / "run",
    environment,
    random.Random(os.environ.get("GYRE_CRASH_SEED", "0")),
    int(os.environ.get("GYRE_KILLS", "12")),
    lambda directory: check_same_training(directory, whole),
  )


def check_books(directory):
  """Nothing is lost or trained twice, nor staler than the law allows."""
  path = directory / "checkpoints" / f"step_{STEPS:06d}"
  consumed = reshard.read_meta(path)["consumed"]
  with RolloutStore(directory / "rollouts.sqlite", readonly=True) as store:
    assert store.consumed() == consumed
    versions = {g.group_id: g.version for g in store.groups("train")}
  assert sorted(consumed.values()) == [1, 1, 2, 2, 3, 3]
  # φ = 1/2 and μ = 2 imply at most 2; one more is what the default allows.
  assert {step - 1 - versions[g] for g, step in consumed.items()} <= {
    0,
    1,
    2,
    3,
  }
  assert [row["step"] for row in rows(directory)] == list(range(STEPS + 1))
  audit = audited(directory)
  assert sorted(audit.applied) == list(range(1, STEPS + 1))
  return audit


@pytest.mark.slow
def test_killed_at_random_moments_ahead_of_the_policy(tmp_path, environment):
  """φ = 1/2, μ = 2, streaming over three cells, not deterministic."""
  killed_at_random_moments(
    tmp_path / "run",
    environment,
    random.Random(os.environ.get("GYRE_CRASH_SEED", "1")),
    int(os.environ.get("GYRE_KILLS", "12")),
    check_books,
    "--config.run.deterministic=False",
    "--config.elastic.cells=3",
    "--config.elastic.phi=0.5",
    "--config.elastic.mu=2",
    "--config.rollout.max_slots=4",
  )
