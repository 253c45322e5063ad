"""Everything that needs a GPU, as one Markdown and one JSON report.

  python experiments/gpu_report.py --out DIR

The tests marked gpu, then the suite's numerical rooms with their arrays on
the GPU, then every benchmark of bench.py. A leg that fails is reported as
such and the next one runs; the exit status is 1 if any failed, 2 if there is
no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Any

import bench
from benches import plans

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUITES = {
  "tests marked gpu": ["-m", "gpu", "tests"],
  "kernels, models, learner, engine on the GPU": [
    *("-m", "not slow"),
    *(f"tests/{room}" for room in ("kernels", "models", "learner", "rollout")),
  ],
}
_PROBE = """
import importlib.metadata, json, jax
device = jax.devices("gpu")[0]
stats = device.memory_stats() or {}
print(json.dumps({
  "gpu": device.device_kind,
  "gpus": jax.device_count("gpu"),
  "compute_capability": getattr(device, "compute_capability", None),
  "memory_gib": round(stats.get("bytes_limit", 0) / 2**30, 1),
  "jax": jax.__version__,
  "jaxlib": importlib.metadata.version("jaxlib"),
}))
"""


@dataclasses.dataclass(frozen=True)
class Leg:
  """One part of the report: name, whether it succeeded, what it found."""

  name: str
  ok: bool
  seconds: float
  result: Mapping[str, Any]


def probe() -> dict[str, Any] | None:
  """Returns the GPU as JAX sees it, or None.

  A process of its own: this one must hold no accelerator context.
  """
  done = subprocess.run(
    [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False
  )
  if done.returncode:
    return None
  return json.loads(done.stdout.splitlines()[-1])


def run_suite(arguments: Sequence[str], timeout_s: float) -> dict[str, Any]:
  """Runs pytest with its arrays on the GPU.

  Returns:
    passed, failed, errors, skipped, and the names of what failed.
  """
  here = [a for a in arguments if not a.startswith("tests/")]
  here += [a for a in arguments if a.startswith("tests/") and _exists(a)]
  with tempfile.TemporaryDirectory() as directory:
    xml = pathlib.Path(directory) / "report.xml"
    try:
      subprocess.run(
        [sys.executable, "-m", "pytest", *here, f"--junit-xml={xml}"],
        cwd=ROOT,
        env=os.environ | {"GYRE_TEST_PLATFORM": "cuda,cpu"},
        stdout=sys.stderr,
        timeout=timeout_s,
        check=False,
      )
    except subprocess.TimeoutExpired:
      return {"error": f"no end after {timeout_s:.0f} s"}
    if not xml.exists():
      return {"error": "pytest wrote no report"}
    return read_junit(xml)


def _exists(path: str) -> bool:
  return (ROOT / path).exists()


def read_junit(path: pathlib.Path) -> dict[str, Any]:
  """Returns the counts of a JUnit report and the names of what failed."""
  cases = list(ET.parse(path).getroot().iter("testcase"))
  failed = [c for c in cases if c.find("failure") is not None]
  errors = [c for c in cases if c.find("error") is not None]
  skipped = sum(c.find("skipped") is not None for c in cases)
  bad = [f"{c.get('classname')}::{c.get('name')}" for c in failed + errors]
  return {
    "passed": len(cases) - len(bad) - skipped,
    "failed": len(failed),
    "errors": len(errors),
    "skipped": skipped,
    "names": bad,
  }


def run_leg(name: str, work, good) -> Leg:
  """Times `work()`; a BenchError is its result."""
  bench.note(f"gpu_report: {name}")
  start = time.perf_counter()
  try:
    result = work()
  except bench.BenchError as error:
    result = {"error": str(error)}
  seconds = time.perf_counter() - start
  ok = "error" not in result and good(result)
  return Leg(name, ok, seconds, result)


def markdown(machine: Mapping[str, Any], legs: Sequence[Leg]) -> str:
  """The report for people."""
  said = ", ".join(f"{k} {v}" for k, v in machine.items() if v)
  lines = ["# gyre on a GPU", "", said, ""]
  for leg in legs:
    state = "ok" if leg.ok else "FAILED"
    lines += [f"## {leg.name}: {state} ({leg.seconds:.0f} s)", ""]
    if "error" in leg.result:
      lines.append(leg.result["error"])
    elif "rows" in leg.result:
      lines.append(bench.markdown(leg.result["rows"]))
    else:
      keys = ("passed", "failed", "errors", "skipped")
      lines.append(", ".join(f"{leg.result[k]} {k}" for k in keys))
      lines += [f"- {name}" for name in leg.result["names"]]
    lines.append("")
  return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
  """Returns the command line's settings."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", default="gpu_report", help="directory to write")
  parser.add_argument("--model", default="", help="as of bench.py")
  parser.add_argument(
    "--peer",
    action="append",
    default=[],
    metavar="NAME=PYTHON",
    help="given to the benchmarks that know it; may be repeated",
  )
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--quick", action="store_true", help="as of bench.py")
  parser.add_argument("--suite-timeout", type=float, default=3600.0)
  args = parser.parse_args(argv)
  if args.rounds < 1:
    parser.error(f"--rounds is {args.rounds}, must be at least 1")
  return args


def run_benchmarks(args: argparse.Namespace) -> list[Leg]:
  """Runs every benchmark, with the peers that each knows."""
  named = bench.check_sources(args.model, args.peer)
  model = args.model or bench.default_model()
  options = plans.Options(model, quick=args.quick, device="gpu")
  rounds = 1 if args.quick else args.rounds
  legs = []
  for name, plan in plans.PLANS.items():
    known = {p for case in plan(options) for p in case.peers}
    peers = {k: v for k, v in named.items() if k in known}

    def work(name=name, peers=peers):
      return bench.benchmark(name, options, peers, rounds)

    legs.append(run_leg(f"bench {name}", work, lambda result: True))
  return legs


def main() -> None:
  """The command."""
  args = parse()
  try:
    bench.check_sources(args.model, args.peer)
  except bench.BenchError as error:
    bench.note(f"gpu_report: {error}")
    sys.exit(2)
  machine = probe()
  if machine is None:
    bench.note(
      "gpu_report: JAX finds no GPU here; on a machine with one, install the "
      "gpu extra: pip install -e '.[gpu]'"
    )
    sys.exit(2)
  machine |= {"date": datetime.date.today().isoformat()}
  legs = [
    run_leg(
      name,
      lambda arguments=arguments: run_suite(arguments, args.suite_timeout),
      lambda result: not result["names"],
    )
    for name, arguments in SUITES.items()
  ]
  try:
    legs += run_benchmarks(args)
  except bench.BenchError as error:
    bench.note(f"gpu_report: {error}")
    legs.append(Leg("benchmarks", False, 0.0, {"error": str(error)}))
  out = pathlib.Path(args.out)
  out.mkdir(parents=True, exist_ok=True)
  report = {"machine": machine, "legs": [dataclasses.asdict(x) for x in legs]}
  (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
  (out / "report.md").write_text(markdown(machine, legs))
  print(out / "report.md")
  sys.exit(0 if all(x.ok for x in legs) else 1)


if __name__ == "__main__":
  main()
