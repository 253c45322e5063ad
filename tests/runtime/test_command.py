"""What a user does wrong is one line and exit status 2; Ctrl-C is clean."""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import time

import pytest
from running import CONFIG, command, rows, run

from gyre.config import ConfigError, config_dict, from_config_dict
from gyre.envs import sandbox
from gyre.runtime import launch, main, tasks, workdir
from gyre.store import manifest


def refuse(directory, environment, *options):
  """The one line of a command that must be refused."""
  code, output = run(directory, environment, *options)
  lines = output.strip().splitlines()
  assert code == 2, output
  assert len(lines) == 1, output
  assert lines[0].startswith("error: ")
  return lines[0]


def sandboxes(pid):
  """Directories of a run's sandboxes, and processes that work in them."""
  found = list(sandbox.base_directory().glob(f"{pid}-*"))
  for link in pathlib.Path("/proc").glob("[0-9]*/cwd"):
    with contextlib.suppress(OSError):
      if f"/{pid}-" in os.readlink(link):
        found.append(link)
  return found


def test_one_line_for_each_mistake(tmp_path, environment):
  line = refuse(tmp_path / "a", environment, "--config.rollout.top_k=5")
  assert "rollout.top_k" in line
  for name in ("rollout.nonsense", "nonsense.seed", "run.dir"):
    line = refuse(tmp_path / "a", environment, f"--config.{name}=5")
    assert f"no option {name}" in line
  line = refuse(tmp_path / "a", environment, "--config", "none.py")
  assert "none.py" in line
  line = refuse(tmp_path / "a", environment, "--config", f"{CONFIG}:large")
  assert "get_config() takes 0 positional arguments" in line
  line = refuse(tmp_path / "a", environment, "--checkpoint=3")
  assert "--checkpoint has no effect with --mode train" in line


def test_the_step_of_one_of_several_cells_is_compiled(tmp_path, environment):
  options = ("--mode=compile", "--config.elastic.cells=2")
  code, output = run(tmp_path / "a", environment, *options)
  assert code == 0, output
  assert not (tmp_path / "a").exists()


def test_what_cannot_be_launched(tmp_path):
  wanted = config_dict(
    mesh={"data": 2, "fsdp": 8}, model={"hf_config": {"a": 1}}
  )
  with pytest.raises(ConfigError, match="need 16 devices, there are 8: 8"):
    launch.cell_meshes(from_config_dict(wanted))
  with pytest.raises(ConfigError, match="tiny holds no run"):
    main.evaluate_only(from_config_dict(wanted), tmp_path / "tiny", "latest")
  harbor = config_dict(
    model={"hf_config": {"a": 1}},
    tasks={"taskset": "harbor", "path": str(tmp_path)},
  )
  with pytest.raises(ConfigError, match="holds no task directories"):
    tasks.TaskSource(from_config_dict(harbor))


def test_another_configuration_on_the_same_directory(
  whole,
  environment,
):
  line = refuse(
    whole, environment, "--config.optim.lr=0.5", "--config.run.seed=4"
  )
  assert "optim.lr was 0.001, is 0.5" in line
  assert "run.seed was 3, is 4" in line


def test_a_held_directory(whole, environment):
  lock = workdir.Lock(whole)
  try:
    assert "in use" in refuse(whole, environment)
  finally:
    lock.release()


def test_a_flipped_bit_in_any_file(tmp_path, whole, environment):
  directory = tmp_path / "run"
  shutil.copytree(whole, directory)
  path = directory / "checkpoints" / "step_000003"
  files = sorted(p for p in path.rglob("*") if p.is_file())
  rng = random.Random(1)
  for file in files:
    good = file.read_bytes()
    bad = bytearray(good)
    bit = rng.randrange(8 * len(good)) if good else 0
    bad[bit // 8 :] = bytes([(good[bit // 8] if good else 0) ^ 1 << bit % 8])
    bad += good[bit // 8 + 1 :]
    file.write_bytes(bad)
    with pytest.raises(manifest.ManifestError, match=file.name):
      manifest.verify(path)
    file.write_bytes(good)
  manifest.verify(path)
  big = max(files, key=lambda p: p.stat().st_size)
  bad = bytearray(big.read_bytes())
  bad[len(bad) // 2] ^= 4
  big.write_bytes(bad)
  for options in ((), ("--mode=eval",)):
    assert str(big) in refuse(directory, environment, *options)


def test_mode_eval_changes_nothing(whole, environment):
  before = (whole / "metrics.jsonl").read_bytes()
  code, output = run(
    whole, environment, "--mode=eval", "--checkpoint=2", "--config.eval.n=6"
  )
  assert code == 0, output
  assert "checkpoint of step 2: held-out" in output
  row = json.loads((whole / "eval_000002.json").read_text())
  assert row["step"] == 2 and row["eval/n"] == 6
  low, high = row["eval/ci95"]
  assert low <= row["eval/reward"] <= high
  assert (whole / "metrics.jsonl").read_bytes() == before
  line = refuse(whole, environment, "--mode=eval", "--checkpoint=77")
  assert "'77'" in line and "2, 3" in line
  # SIGTERM ends an evaluation, and its sandboxes with it.
  names = sorted(p.name for p in whole.iterdir())
  process = subprocess.Popen(
    command(whole, "--mode=eval", "--config.eval.n=9000"),
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  end = time.monotonic() + 200
  while not sandboxes(process.pid) and process.poll() is None:
    assert time.monotonic() < end
    time.sleep(0.05)
  process.terminate()
  output = process.communicate()[0]
  assert process.returncode == 130, output
  assert output.endswith("\nstopped; the same command begins anew\n")
  assert "Traceback" not in output
  assert sandboxes(process.pid) == []
  assert sorted(p.name for p in whole.iterdir()) == names


def test_steps_may_be_raised_and_ctrl_c(tmp_path, whole, environment):
  directory = tmp_path / "run"
  shutil.copytree(whole, directory)
  process = subprocess.Popen(
    command(directory, "--config.run.steps=50"),
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  end = time.monotonic() + 200
  while len(rows(directory)) < 6 and process.poll() is None:
    assert time.monotonic() < end
    time.sleep(0.05)
  os.kill(process.pid, signal.SIGINT)
  output = process.communicate()[0]
  assert process.returncode == 130, output
  assert "the same command goes on" in output
  assert "Traceback" not in output
  assert rows(directory)[:4] == rows(whole)
  assert "steps 3 may be raised, not lowered" in refuse(directory, environment)
