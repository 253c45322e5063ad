"""bench.py as a user runs it: the table, the JSON line, peers, mistakes."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import pytest

from gyre.models import load
from gyre.models import params as params_lib
from gyre.models.config import ModelConfig

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
EXPERIMENTS = ROOT / "experiments"
BENCH = EXPERIMENTS / "bench.py"
PEERS = sorted(
  p for p in (EXPERIMENTS / "peers").glob("*.py") if p.stem != "common"
)
ROW = {
  "case",
  "metric",
  "key",
  "dtype",
  "ours",
  "peer",
  "theirs",
  "ratio",
  "settings",
}


def run(*arguments):
  return subprocess.run(
    [sys.executable, str(BENCH), *map(str, arguments)],
    capture_output=True,
    text=True,
    check=False,
  )


def run_json(*arguments):
  done = run(*arguments, "--json")
  assert done.returncode == 0, done.stderr
  (line,) = done.stdout.splitlines()
  return json.loads(line)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
  """A Hugging Face directory that every bench takes for SmolLM2."""
  cfg = ModelConfig.from_hf(
    {
      "model_type": "llama",
      "vocab_size": 512,
      "hidden_size": 32,
      "intermediate_size": 64,
      "num_hidden_layers": 2,
      "num_attention_heads": 4,
      "num_key_value_heads": 2,
      "head_dim": 8,
      "max_position_embeddings": 256,
      "rms_norm_eps": 1e-5,
      "rope_theta": 10000.0,
      "tie_word_embeddings": True,
    }
  )
  params = params_lib.init_params(
    params_lib.param_specs(cfg), jax.random.key(0)
  )
  directory = tmp_path_factory.mktemp("tiny")
  load.save_hf_dir(directory, cfg, params)
  return directory


def test_help_names_the_benchmarks():
  done = run("--help")
  assert done.returncode == 0
  for name in ("engine", "train", "grpo", "attention", "reshard"):
    assert name in done.stdout
  for name in ("trajectories", "--peer", "--run"):
    assert name in done.stdout


@pytest.mark.parametrize("script", PEERS, ids=lambda p: p.stem)
def test_peer_scripts_start_in_any_interpreter(script):
  # -S: without site-packages, as in an interpreter that has only the peer.
  done = subprocess.run(
    [sys.executable, "-S", str(script), "--help"],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr


def test_ratio_above_one_means_ours_is_better():
  if importlib.util.find_spec("torch") is None:
    pytest.skip("the peer of this benchmark is torch, which is not installed")
  out = run_json("attention", "--quick", "--peer", f"torch={sys.executable}")
  rows = [r for r in out["rows"] if r["dtype"] != "best each"]
  for row in rows:
    assert row["peer"] == "torch"
    assert row["ratio"] == pytest.approx(row["theirs"] / row["ours"])
  for best in (r for r in out["rows"] if r["dtype"] == "best each"):
    mine = [r for r in rows if r["key"] == best["key"]]
    assert best["ours"] == min(r["ours"] for r in mine)
    assert best["theirs"] == min(r["theirs"] for r in mine)
  assert "torch" in out["versions"]["torch"]


@pytest.mark.parametrize(
  "arguments,said",
  [
    (("attention", "--peer", "vllm=python"), "knows no peer 'vllm'"),
    (
      ("attention", "--quick", "--peer", "torch=/bin/false"),
      "no setting of torch ran",
    ),
    (("attention", "--peer", "torch=/no/python"), "no program '/no/python'"),
    (("attention", "--peer", "a=sh", "--peer", "a=sh"), "a is given twice"),
    (("attention", "--model", "x"), "--model has no effect but with combine"),
    (("engine", "--run", "x"), "--run has no effect but with trajectories"),
    (("engine", "--quick", "--rounds", "2"), "no effect with --quick"),
    (("trajectories", "--run", "/no/run"), "no run at --run /no/run"),
    (("attention", "--only", "nonsense"), "no case of attention"),
    (("train", "--quick", "--model", "/no/model"), "/no/model"),
  ],
)
def test_mistakes_are_one_line(arguments, said):
  done = run(*arguments)
  assert done.returncode == 2
  assert said in done.stderr.splitlines()[-1]
  assert "Traceback" not in done.stderr


def test_engine_measures_a_tiny_model(tiny_model):
  out = run_json("engine", "--quick", "--model", tiny_model)
  assert out["bench"] == "engine" and out["rounds"] == 1
  assert out["cores"] >= 1 and out["cpu"]
  assert out["versions"]["ours"]["jax"] == jax.__version__
  assert all(set(r) == ROW and r["ratio"] is None for r in out["rows"])
  rows = {(r["key"], r["dtype"]): r["ours"] for r in out["rows"]}
  assert rows["gen_tok_s", "float32"] > 0
  # The engine records what rescoring finds: f32 to rounding, bf16 not.
  assert rows["logprob_gap_max", "float32"] < 1e-4
  exact = rows["logprob_gap_mean", "float32"]
  assert exact < rows["logprob_gap_mean", "bfloat16"] < 0.1


def test_trajectories_are_built_stored_and_bounded():
  out = run_json("trajectories", "--quick")
  rows = {(r["case"].split(", ")[-1], r["key"]): r["ours"] for r in out["rows"]}
  for mode in ("once", "multiplicity", "leaf"):
    assert rows[mode, "total_s"] > 0
    assert rows[mode, "tokens_flat"] > 150_000
  assert rows["store", "ratio"] > 1
  trained = [rows["generated", f"trained_{n}_of_all"] for n in ("1", "5")]
  assert 0 < trained[0] < trained[1] <= 1
  assert 0 < rows["generated", "packed_1_of_all"] <= 1


def test_bounds_are_measured_on_a_recorded_run():
  run = "experiments/notebooks/sample_run"
  out = run_json("trajectories", "--quick", "--only", "branching", "--run", run)
  rows = {r["key"]: r["ours"] for r in out["rows"]}
  assert rows["executions"] > 1 and rows["step_all_s"] > 0
  assert 0 < rows["trained_1_of_all"] < rows["trained_5_of_all"] <= 1


def test_what_the_proxy_adds_is_measured():
  out = run_json("proxy", "--quick")
  for how in ("whole answers", "streamed"):
    rows = {r["key"]: r["ours"] for r in out["rows"] if how in r["case"]}
    assert 0 < rows["added_ms_median"] <= rows["added_ms_p90"]
    assert rows["engine_ms_median"] > 0 and rows["calls_per_s"] > 0
    assert rows["strict_share"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["train", "grpo", "reshard", "combine", "elastic"]
)
def test_the_other_benchmarks_run(tiny_model, name):
  model = () if name == "elastic" else ("--model", tiny_model)
  out = run_json(name, "--quick", *model)
  assert all(r["ours"] > 0 for r in out["rows"])
