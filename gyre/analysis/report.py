"""Runs side by side: a Markdown report of curves, gains and steps."""

from __future__ import annotations

from collections.abc import Sequence

from gyre.analysis import curves, runs
from gyre.analysis.runs import Run


def _interval(ends: tuple[float, float]) -> str:
  return f"[{ends[0]:.3f}, {ends[1]:.3f}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
  lines = [head, ["---"] * len(head), *rows]
  return [f"| {' | '.join(line)} |" for line in lines]


def _training(run: Run) -> list[tuple[int, float]]:
  """(step, mean training reward) of each step that has one."""
  return [
    (row["step"], row["reward/mean"])
    for row in run.rows
    if row.get("reward/mean") is not None
  ]


def _seconds(run: Run) -> tuple[float, float]:
  """(training steps, evaluations), seconds in all."""
  steps = sum(row.get("perf/step_s") or 0.0 for row in run.rows)
  return steps, sum(row.get("perf/eval_s") or 0.0 for row in run.rows)


def _by_kind(named: Sequence[Run]) -> list[list[str]]:
  """A row a kind; an empty cell where a run has no task of it to pair."""
  rows = []
  for kind in sorted({k for run in named for k in runs.kinds(run)}):
    row = [kind]
    for run in named:
      if runs.paired(run, f"{kind}-"):
        g = runs.gain(run, f"{kind}-")
        row.append(f"{g.before:.2f} -> {g.after:.2f} (n {g.n})")
      else:
        row.append("")
    rows.append(row)
  return rows


def figure(named: Sequence[Run], title: str) -> str:
  """Returns the SVG of training rewards and held-out evaluations.

  Args:
    named: runs, at most curves.MAX_CURVES.
    title: its heading.

  Raises:
    RunError: too many runs.
  """
  if len(named) > curves.MAX_CURVES:
    raise runs.RunError(
      f"{len(named)} runs, a figure has room for {curves.MAX_CURVES}"
    )
  drawn = []
  for run in named:
    points = _training(run)
    marks = [
      (row["step"], row["eval/reward"], *row["eval/ci95"])
      for row in run.rows
      if row.get("eval/reward") is not None
    ]
    drawn.append(
      curves.Curve(
        run.name, [p[0] for p in points], [p[1] for p in points], marks
      )
    )
  return curves.svg(
    drawn,
    title=title,
    x_label="step (dots: held-out tasks, 95% interval)",
    y_label="reward",
  )


def markdown(named: Sequence[Run], title: str, image: str) -> str:
  """Returns the report.

  Args:
    named: runs with at least two evaluations each.
    title: its heading.
    image: path of the figure, relative to the report.

  Raises:
    RunError: a run has no gain to report.
  """
  gains = [(run, runs.gain(run)) for run in named]
  out = [f"# {title}", "", f"![reward by step]({image})", ""]
  out += _table(
    ["run", "steps", "held-out tasks", "before", "after", "gain", "s"],
    [
      [
        run.name,
        f"{g.steps[0]} -> {g.steps[1]}",
        str(g.n),
        f"{g.before:.3f} {_interval(g.before_ci)}",
        f"{g.after:.3f} {_interval(g.after_ci)}",
        f"{g.gain:+.3f} {_interval(g.gain_ci)}",
        "{:.0f} + {:.0f}".format(*_seconds(run)),
      ]
      for run, g in gains
    ],
  )
  out += [
    "",
    "Mean reward over held-out tasks; the gain is paired by task. In brackets:",
    f"95% percentile bootstrap over tasks, {runs.RESAMPLES:,} resamples. s:",
    "seconds of training steps + of evaluations.",
    "",
    "By kind of task, before -> after:",
    "",
  ]
  out += _table(["kind", *(run.name for run in named)], _by_kind(named))
  out += ["", "Mean training reward by step:", ""]
  by_run = [dict(_training(run)) for run in named]
  steps = sorted({s for one in by_run for s in one})
  out += _table(
    ["step", *(run.name for run in named)],
    [
      [str(s), *(f"{one[s]:.3f}" if s in one else "" for one in by_run)]
      for s in steps
    ],
  )
  out.append("")
  for run in named:
    packages = ", ".join(f"{k} {v}" for k, v in run.versions.items())
    seed = run.config["run"]["seed"]
    out.append(f"{run.name}: seed {seed}; {packages}.")
  return "\n".join([*out, ""])
