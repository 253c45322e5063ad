"""Shows what runs did: their gain, their executions, an execution's tree.

The result of one or more runs, as OUT.md and OUT.svg; the gain is that of the
last evaluation over the first, paired by held-out task:

  python experiments/report.py --run trained=runs/a --run control=runs/b \\
    --out experiments/results/smollm2_shell

A table of a run's executions, and the tree of one, as text or as a page that
needs nothing else:

  python experiments/report.py runs/a --sort branches --largest-first --limit 9
  python experiments/report.py runs/a --tree train-000003/1 --html tree.html
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import sys
from typing import NoReturn

from gyre.analysis import executions, reading, report, runs
from gyre.store.database import StoreError

_DEFAULT_WIDTH = 160


class _Parser(argparse.ArgumentParser):
  """Says what is wrong in one line."""

  def error(self, message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "directory",
    nargs="?",
    type=pathlib.Path,
    metavar="RUN",
    help="a run's directory, to show its executions or one of them",
  )
  parser.add_argument(
    "--run",
    action="append",
    default=[],
    metavar="NAME=DIR",
    help="a run's directory and its name in the report; may be repeated",
  )
  parser.add_argument("--out", type=pathlib.Path, help="path without suffix")
  parser.add_argument("--title", help="heading; default the name of OUT")
  table = parser.add_argument_group("executions of RUN")
  table.add_argument("--phase", choices=executions.PHASES)
  table.add_argument("--status", help="only of this outcome")
  table.add_argument("--role", help="only with a call of this role")
  table.add_argument("--task", default="", help="only of tasks named so")
  table.add_argument(
    "--sort", metavar="COLUMN", help="default the order of dispatch"
  )
  table.add_argument(
    "--largest-first", action="store_true", help="turns the order of --sort"
  )
  table.add_argument("--limit", type=int, help="show at most so many")
  tree = parser.add_argument_group("one execution of RUN")
  tree.add_argument(
    "--tree", metavar="EXECUTION", help="its id, or an end no other id has"
  )
  tree.add_argument(
    "--html", type=pathlib.Path, metavar="OUT", help="write a page instead"
  )
  tree.add_argument(
    "--tokenizer",
    type=pathlib.Path,
    metavar="PATH",
    help="tokenizer.json, or its directory; default the run's own",
  )
  return parser


def _result(args: argparse.Namespace) -> None:
  """Writes the report and the figure of named runs."""
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
  for run in named:
    g = runs.gain(run)
    low, high = g.gain_ci
    print(
      f"{run.name}: {g.n} held-out tasks, {g.before:.3f} -> {g.after:.3f}, "
      f"gain {g.gain:+.3f} [{low:.3f}, {high:.3f}]"
    )


def _table(args: argparse.Namespace) -> None:
  """Prints the executions of a run."""
  with executions.open_store(args.directory) as store:
    found = executions.load(store, args.phase)
  rows = executions.select(
    found, status=args.status, role=args.role, task=args.task
  )
  if args.sort:
    rows = executions.sort(rows, args.sort, largest_first=args.largest_first)
  shown = rows[: args.limit] if args.limit is not None else rows
  title = f"{args.directory}: {len(shown):,} of {len(found):,} executions"
  width = _DEFAULT_WIDTH
  if sys.stdout.isatty():
    width = shutil.get_terminal_size((width, 24)).columns
  print(executions.text(shown, title=title, width=width), end="")


def _tree(args: argparse.Namespace) -> None:
  """Prints an execution's tree, or writes its page."""
  read = reading.read(args.directory, args.tree, tokenizer=args.tokenizer)
  if not read.pieces.known:
    print(
      "note: no tokenizer.json was found, ids are shown; --tokenizer PATH "
      "names one",
      file=sys.stderr,
    )
  if args.html is None:
    print(read.text(), end="")
    return
  page = read.html()
  args.html.parent.mkdir(parents=True, exist_ok=True)
  args.html.write_text(page, "utf-8")
  print(
    f"{args.html}: {len(read.history.branches)} branches, "
    f"{len(read.history.tree.ids):,} tokens, {len(page.encode()):,} bytes"
  )


def _check(args: argparse.Namespace) -> None:
  """Refuses arguments that do not go together."""
  if args.directory is None:
    if not args.run:
      raise runs.RunError("name a RUN, or --run NAME=DIR and --out")
    if args.out is None:
      raise runs.RunError("--run NAME=DIR needs --out")
  elif args.run or args.out:
    raise runs.RunError(f"{args.directory} and --run are two reports: one each")
  for name in ("html", "tokenizer"):
    if getattr(args, name) and not args.tree:
      raise runs.RunError(f"--{name} needs --tree EXECUTION")
  if args.tree and args.directory is None:
    raise runs.RunError("--tree needs a RUN")
  if args.limit is not None and args.limit < 1:
    raise runs.RunError(f"--limit is {args.limit}, must be at least 1")


def main(argv: list[str] | None = None) -> int:
  """Runs the command; returns the exit status."""
  args = _parser().parse_args(argv)
  try:
    _check(args)
    if args.directory is None:
      _result(args)
    elif args.tree:
      _tree(args)
    else:
      _table(args)
  except BrokenPipeError:  # the reader, head for one, has seen enough
    sys.stderr.close()
    return 0
  except (runs.RunError, StoreError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
