"""What the console shows, and log.txt, which keeps it.

On a terminal: a live panel with the reward's sparkline, tokens a second,
staleness and each cell's role, above which finished lines scroll. Elsewhere:
the lines alone.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 100


def sparkline(values: list[float]) -> str:
  """Draws the last 40 values in [0, 1]; values outside are clipped."""
  top = len(_BARS) - 1
  return "".join(
    _BARS[round(min(max(v, 0.0), 1.0) * top)] for v in values[-40:]
  )


def _number(row: Mapping[str, Any], name: str, form: str) -> str:
  value = row.get(name)
  return "-" if value is None else format(value, form)


def step_line(row: Mapping[str, Any], steps: int) -> str:
  """One line for a step's metrics; step 0 is the start."""
  parts = [f"step {row['step']:>4}/{steps}"]
  if "reward/mean" in row:
    parts += [
      f"reward {_number(row, 'reward/mean', '.3f')}",
      f"solved {_number(row, 'reward/solved', '.2f')}",
      f"turns {_number(row, 'episode/turns', '.1f')}",
      f"grad {_number(row, 'optim/grad_norm', '.2e')}",
      f"mismatch {_number(row, 'mismatch/logprob_abs_diff', '.1e')}",
      f"flat groups {_number(row, 'group/zero_variance', '.0f')}",
      f"{_number(row, 'perf/rollout_tokens_per_s', '.0f')} tok/s",
      f"{_number(row, 'perf/step_s', '.1f')} s",
    ]
  if "eval/reward" in row:
    parts.append(eval_text(row))
  return "  ".join(parts)


def eval_text(row: Mapping[str, Any]) -> str:
  """The held-out result of a line."""
  low, high = row["eval/ci95"]
  return (
    f"held-out {row['eval/reward']:.3f} [{low:.3f}, {high:.3f}] "
    f"solved {row['eval/solved']:.2f} n {row['eval/n']}"
  )


class Progress:
  """Shows a run and keeps log.txt."""

  def __init__(self, path: pathlib.Path | None, steps: int):
    """Opens the log.

    Args:
      path: log.txt, continued if it exists; None keeps no log.
      steps: of the whole run.
    """
    self.console = Console(highlight=False, soft_wrap=True)
    self._file = None
    if path is not None:
      self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
    self._steps = steps
    self._rewards: list[float] = []
    self._last: Mapping[str, Any] = {}
    self._roles: dict[str, str] = {}
    self._phase: tuple[str, int, int] = ("", 0, 0)
    self._started = time.monotonic()
    self._live: Live | None = None

  def __enter__(self) -> Progress:
    if self.console.is_terminal:
      self._live = Live(
        console=self.console, get_renderable=self._panel, refresh_per_second=4
      )
      self._live.start()
    return self

  def __exit__(self, *exc: object) -> None:
    if self._live is not None:
      self._phase = ("", 0, 0)
      self._live.stop()
      self._live = None

  def close(self) -> None:
    """Closes the log."""
    if self._file is not None:
      self._file.close()
      self._file = None

  def tell(self) -> int:
    """Returns log.txt's length in bytes."""
    self._file.flush()
    return self._file.tell()

  def line(self, text: str) -> None:
    """Shows and logs a line."""
    self.console.print(text, markup=False)
    if self._file is not None:
      self._file.write(text + "\n")
      self._file.flush()

  def show(self, renderable: RenderableType) -> None:
    """Shows and logs a table."""
    self.console.print(renderable)
    if self._file is not None:
      Console(file=self._file, width=_WIDTH).print(renderable)
      self._file.flush()

  def role(self, cell: str, role: str) -> None:
    """Says what a cell does now."""
    self._roles[cell] = role

  def phase(self, name: str, done: int = 0, total: int = 0) -> None:
    """Says what is being done and how far it is; the live panel alone."""
    self._phase = (name, done, total)

  def seen(self, row: Mapping[str, Any]) -> None:
    """Takes a step's metrics into the panel without a line."""
    self._last = row
    if "reward/mean" in row:
      self._rewards.append(row["reward/mean"])

  def step(self, row: Mapping[str, Any]) -> None:
    """Shows and logs a step's line."""
    self.seen(row)
    self.line(step_line(row, self._steps))

  def _panel(self) -> RenderableType:
    name, done, total = self._phase
    count = f" {done}/{total}" if total else ""
    roles = "  ".join(f"{c}: {r}" for c, r in self._roles.items())
    row = self._last
    text = (
      f"reward {sparkline(self._rewards)} "
      f"{_number(row, 'reward/mean', '.3f')}\n"
      f"step {row.get('step', 0)}/{self._steps}  "
      f"rollout {_number(row, 'perf/rollout_tokens_per_s', '.0f')} tok/s  "
      f"train {_number(row, 'perf/train_tokens_per_s', '.0f')} tok/s  "
      f"staleness {_number(row, 'staleness/mean', '.1f')}  "
      f"{time.monotonic() - self._started:.0f} s\n"
      f"{roles}  {name}{count}"
    )
    return Text(text)


def final_table(
  rows: list[Mapping[str, Any]], wall_s: float, title: str
) -> Table:
  """The table at the end of a run.

  Args:
    rows: lines of metrics.jsonl, step 0 included.
    wall_s: seconds that the run took, over all its resumes.
    title: of the table.

  Returns:
    reward over the first and last five steps; held-out reward before and
    after with its 95% interval; solved; wall time.
  """
  table = Table(title=title, show_header=True)
  for name in ("", "before", "after"):
    table.add_column(name, justify="right" if name else "left")
  steps = [r for r in rows if "reward/mean" in r]
  first, last = steps[:5], steps[-5:]

  def mean(rows, name):
    values = [r[name] for r in rows if r.get(name) is not None]
    return f"{sum(values) / len(values):.3f}" if values else "-"

  for label, name in (
    ("reward, first 5 / last 5 steps", "reward/mean"),
    ("solved, first 5 / last 5 steps", "reward/solved"),
  ):
    table.add_row(label, mean(first, name), mean(last, name))
  evals = [r for r in rows if "eval/reward" in r]
  if evals:
    ends = (evals[0], evals[-1])
    table.add_row(
      f"held-out reward (n = {evals[-1]['eval/n']})",
      *(f"{r['eval/reward']:.3f}" for r in ends),
    )
    table.add_row(
      "  its 95% interval",
      *("{:.3f} – {:.3f}".format(*r["eval/ci95"]) for r in ends),
    )
    table.add_row("held-out solved", *(f"{r['eval/solved']:.3f}" for r in ends))
    table.add_row("  at step", *(str(r["step"]) for r in ends))
  table.add_row("wall time", "", f"{wall_s:.0f} s")
  return table
