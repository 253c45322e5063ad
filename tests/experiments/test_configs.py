"""The configurations that come with gyre are whole."""

import importlib.util
import math
import pathlib
import subprocess
import sys

import jax
import pytest

from gyre import config
from gyre.models import params as params_lib
from gyre.models.config import ModelConfig
from gyre.runtime.tasks import TaskSource

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "experiments" / "configs").glob("*.py"))


def _module(path):
  spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_configuration_passes_its_checks_and_has_tasks(path):
  made = config.from_config_dict(_module(path).get_config())
  source = TaskSource(made)
  kinds = {source.get("train", i).metadata["kind"] for i in range(40)}
  assert not made.tasks.kinds or kinds <= set(made.tasks.kinds)
  assert source.get("eval", 0).solution_turns


# Billions of parameters, from the model cards on Hugging Face.
@pytest.mark.parametrize("size,billions", [("8b", 8.2), ("32b", 32.8)])
def test_qwen3_has_the_published_number_of_parameters(size, billions):
  qwen3 = _module(ROOT / "experiments" / "configs" / "qwen3.py")
  made = config.from_config_dict(qwen3.get_config(size))
  cfg = ModelConfig.from_hf(dict(made.model.hf_config))
  tree = params_lib.abstract_params(params_lib.param_specs(cfg))
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
  assert count / 1e9 == pytest.approx(billions, abs=0.05)
  devices = made.mesh.data * made.mesh.fsdp * made.mesh.tensor
  assert devices == 8


def test_an_unknown_size_is_one_line():
  done = subprocess.run(
    [
      sys.executable,
      ROOT / "experiments" / "run.py",
      f"--config={ROOT}/experiments/configs/qwen3.py:9b",
      "--mode=compile",
    ],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 2
  assert done.stderr == "error: size '9b' is not one of 8b, 32b\n"


@pytest.mark.parametrize(
  "given,name", [("qwen3.py:32b", "qwen3_32b"), ("qwen3.py", "qwen3")]
)
def test_runs_of_two_sizes_have_directories_of_their_own(given, name):
  code = "import run, sys; run._parse(sys.argv); print(run._workdir())"
  done = subprocess.run(
    [sys.executable, "-c", code, f"--config=configs/{given}"],
    cwd=ROOT / "experiments",
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout == f"runs/{name}\n"
