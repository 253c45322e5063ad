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
  assert not (tmp_path / "report").exists()


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
