"""gpu_report.py: what it says without a GPU, and how it reads a suite."""

import json
import os
import pathlib
import subprocess
import sys

EXPERIMENTS = (
  pathlib.Path(__file__).resolve().parent.parent.parent / "experiments"
)


def run(*arguments):
  return subprocess.run(
    [sys.executable, *arguments],
    capture_output=True,
    text=True,
    check=False,
    cwd=EXPERIMENTS,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )


def test_without_a_gpu_one_line_says_so(tmp_path):
  done = run("gpu_report.py", "--out", str(tmp_path / "report"))
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert "no GPU" in line
  done = run("gpu_report.py", "--peer", "torch=/no/python")
  assert done.returncode == 2
  assert "no program '/no/python'" in done.stderr
  assert not (tmp_path / "report").exists()


def test_benchmarks_are_of_the_gpu_and_of_the_peers_they_know(tmp_path):
  """What each is asked for; it then fails, which is a leg of the report."""
  (tmp_path / "config.json").write_text("{}")
  code = (
    "import bench, gpu_report, sys\n"
    "def benchmark(name, options, peers, rounds):\n"
    "  print(name, options.device, options.quick, rounds, *peers)\n"
    "  raise bench.BenchError('nothing was measured')\n"
    "bench.benchmark = benchmark\n"
    "legs = gpu_report.run_benchmarks(gpu_report.parse(sys.argv[1:]))\n"
    "assert not any(leg.ok for leg in legs)"
  )
  peer = ("--peer", f"vllm={sys.executable}")
  done = run("-c", code, "--model", str(tmp_path), *peer, "--rounds", "2")
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert "attention gpu False 2" in lines and "engine gpu False 2 vllm" in lines


def test_reads_what_pytest_reports(tmp_path):
  (tmp_path / "test_three.py").write_text(
    "import pytest\n"
    "def test_good(): pass\n"
    "def test_bad(): assert False\n"
    "def test_absent(): pytest.skip('no')\n"
  )
  xml = tmp_path / "report.xml"
  run("-m", "pytest", "-c", os.devnull, str(tmp_path), f"--junit-xml={xml}")
  code = (
    "import gpu_report, json, pathlib, sys; "
    "print(json.dumps(gpu_report.read_junit(pathlib.Path(sys.argv[1]))))"
  )
  counts = json.loads(run("-c", code, str(xml)).stdout)
  names = counts.pop("names")
  assert counts == {"passed": 1, "failed": 1, "errors": 0, "skipped": 1}
  assert len(names) == 1 and names[0].endswith("test_bad")
