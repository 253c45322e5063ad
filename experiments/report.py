"""Writes the result of one or more runs: a table, a curve, the gain.

  python experiments/report.py --run trained=runs/a --run control=runs/b \\
    --out experiments/results/smollm2_shell

It writes OUT.md and OUT.svg. The gain is that of the last evaluation over the
first, paired by held-out task.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from gyre.analysis import report, runs
from gyre.store.rollouts import StoreError


def main(argv: list[str] | None = None) -> int:
  """Runs the command; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument(
    "--run",
    action="append",
    required=True,
    metavar="NAME=DIR",
    help="a run's directory and its name in the report; may be repeated",
  )
  parser.add_argument(
    "--out", required=True, type=pathlib.Path, help="path without suffix"
  )
  parser.add_argument("--title", help="heading; default the name of OUT")
  args = parser.parse_args(argv)
  try:
    named = []
    for given in args.run:
      name, found, directory = given.partition("=")
      if not (found and name and directory):
        raise runs.RunError(f"--run {given} is not NAME=DIR")
      named.append(runs.load(pathlib.Path(directory), name))
    title = args.title or args.out.name
    text = report.markdown(named, title, f"{args.out.name}.svg")
    image = report.figure(named, title)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_name(f"{args.out.name}.md").write_text(text)
    args.out.with_name(f"{args.out.name}.svg").write_text(image)
  except (runs.RunError, StoreError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  for run in named:
    g = runs.gain(run)
    low, high = g.gain_ci
    print(
      f"{run.name}: {g.n} held-out tasks, {g.before:.3f} -> {g.after:.3f}, "
      f"gain {g.gain:+.3f} [{low:.3f}, {high:.3f}]"
    )
  return 0


if __name__ == "__main__":
  sys.exit(main())
