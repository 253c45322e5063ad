"""Simulated designs as Markdown tables and JSON records."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from gyre.sim import tables
from gyre.sim.clock import Result, mean_and_spread
from gyre.sim.tables import Design
from gyre.sim.workload import HOUR


@dataclasses.dataclass(frozen=True)
class Row:
  """One design over the seeds.

  Attributes:
    design: what was simulated.
    runs: a result a seed.
    bounds: seconds, a seed.
  """

  design: Design
  runs: tuple[Result, ...]
  bounds: tuple[float, ...]

  @property
  def hours(self) -> float:
    """Mean over the seeds."""
    return mean_and_spread([run.hours for run in self.runs])[0]

  @property
  def spread(self) -> float:
    """Standard deviation over the seeds."""
    return mean_and_spread([run.hours for run in self.runs])[1]

  @property
  def bound(self) -> float:
    """Mean of the bounds, in hours."""
    return sum(self.bounds) / len(self.bounds) / HOUR

  @property
  def mean_staleness(self) -> float:
    """Mean d over all groups trained."""
    return self._mean("mean_staleness")

  @property
  def max_staleness(self) -> int:
    """The largest d."""
    return max(run.max_staleness for run in self.runs)

  def _mean(self, name: str) -> float:
    return sum(getattr(run, name) for run in self.runs) / len(self.runs)

  def as_json(self) -> dict[str, Any]:
    """As in the JSON line."""
    return {
      "id": self.design.id,
      "design": self.design.name,
      "policy": self.design.policy,
      "phi": self.design.law.phi,
      "mu": self.design.law.mu,
      "nodes": self.design.shown,
      "hours": round(self.hours, 4),
      "spread": round(self.spread, 4),
      "each": [round(run.hours, 4) for run in self.runs],
      "published": self.design.published,
      "bound": round(self.bound, 4),
      "staleness_mean": round(self.mean_staleness, 4),
      "staleness_max": self.max_staleness,
      "switches": self._mean("switches"),
      "rollout_busy": round(self._mean("rollout_busy"), 4),
      "train_busy": round(self._mean("train_busy"), 4),
    }


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A Markdown table."""
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def law_of(design: Design) -> str:
  """(φ, μ) of a design."""
  return f"({design.law.phi:g}, {design.law.mu})"


def _percent(x: float) -> str:
  return f"{100 * x:+.1f}%"


def _measured(row: Row) -> list[str]:
  """Columns that every table has."""
  return [
    f"{row.hours:.4g} ± {row.spread:.2g}",
    f"{row.bound:.4g}",
    _percent(row.hours / row.bound - 1),
    f"{row.mean_staleness:.3g}",
    str(row.max_staleness),
  ]


MEASURED = ["hours", "bound", "above it", "mean d", "max d"]


def table_1(rows: Sequence[Row]) -> str:
  """The seven designs, and gyre's other policies."""
  base = next(row for row in rows if row.design.id == "E0")
  body = []
  for row in rows:
    d = row.design
    known = d.published is not None
    body.append(
      [
        d.id,
        d.name,
        law_of(d),
        d.shown,
        f"{d.published:.2f}" if known else "",
        _percent(row.hours / d.published - 1) if known else "",
        f"{d.published / base.design.published:.3f}" if known else "",
        f"{row.hours / base.hours:.3f}",
        *_measured(row),
      ]
    )
  header = ["id", "design", "(φ, μ)", "nodes", "published h", "distance"]
  header += ["published /E0", "/E0", *MEASURED]
  wrong = misordered(rows)
  order = (
    f"{len(wrong)} pairs are in another order: {', '.join(wrong)}."
    if wrong
    else "All are in the published order."
  )
  pairs = "Of pairs of designs whose published hours differ by more than 5%: "
  return markdown(header, body) + f"\n\n{pairs}{order}"


def room(short: Row, full: Row, steps: int, long: Row, long_steps: int) -> str:
  """What any policy could gain on a design, by the bounds.

  Args:
    short: the design, over `steps`.
    full: the same, bounded with Q_b kept full to the end.
    steps: updates of both.
    long: as `full`, over `long_steps`.
    long_steps: so many that a run's beginning and end weigh little.
  """
  return (
    f"By the bounds no schedule, clairvoyant or not, is over {steps} steps "
    f"faster than {short.design.id} by more than {_gap(short)}, or "
    f"{_gap(full)} if it keeps Q_b full to the end. Over "
    f"{long_steps} steps, where a run's beginning and end weigh little, it "
    f"takes {long.hours:.4g} ± {long.spread:.2g} h, the bound of both is "
    f"{long.bound:.4g} h, and no schedule under this law is more than "
    f"{_gap(long)} faster."
  )


def _gap(row: Row) -> str:
  """By how much of its time a row is above its bound."""
  shares = [
    1 - bound / run.seconds
    for run, bound in zip(row.runs, row.bounds, strict=True)
  ]
  mean, spread = mean_and_spread(shares)
  return f"{100 * mean:.1f} ± {100 * spread:.1f}%"


def misordered(rows: Sequence[Row]) -> list[str]:
  """Pairs that differ by more than 5% and come out the other way round."""
  known = [row for row in rows if row.design.published is not None]
  known.sort(key=lambda row: row.design.published)
  return [
    f"{a.design.id} {b.design.id}"
    for a, b in itertools.combinations(known, 2)
    if b.design.published > 1.05 * a.design.published and a.hours >= b.hours
  ]


def table_2(rows: Sequence[Row]) -> tuple[str, list[dict[str, Any]]]:
  """Speed-ups of gyre: the Markdown, and a record a comparison."""
  of = {row.design.id: row for row in rows}
  records, body = [], []
  for comparison in tables.TABLE_2:
    slow, whole, fine = (of[d.id] for d in comparison.designs())
    for name, row, published in (
      ("Async", slow, comparison.over_async),
      ("Colocate", whole, comparison.over_colocate),
    ):
      each = [
        a.seconds / b.seconds for a, b in zip(row.runs, fine.runs, strict=True)
      ]
      speedup, spread = mean_and_spread(each)
      records.append(
        {
          "workload": comparison.workload,
          "mean_staleness": comparison.mean_staleness,
          "over": name,
          "published": published,
          "speedup": round(speedup, 4),
          "spread": round(spread, 4),
          "fitted": comparison.fitted,
        }
      )
      body.append(
        [
          comparison.workload,
          f"{comparison.mean_staleness:g}",
          name,
          f"{row.hours:.4g}",
          f"{fine.hours:.4g}",
          f"{fine.bound:.4g}",
          f"{published:.3f}",
          f"{speedup:.3f} ± {spread:.2g}",
          _percent(speedup / published - 1),
          "fitted" if comparison.fitted else "left out",
        ]
      )
  header = ["workload", "E[d]", "over", "its hours", "gyre's hours"]
  header += ["gyre's bound", "published", "speed-up", "distance", "its number"]
  ahead = sum(record["speedup"] > 1 for record in records)
  return (
    markdown(header, body) + f"\n\ngyre is ahead in {ahead} of "
    f"{len(records)} comparisons.",
    records,
  )


def plain_table(rows: Sequence[Row]) -> str:
  """Any rows, fastest marked."""
  best = min(row.hours for row in rows)
  body = [
    [
      row.design.id,
      row.design.name,
      row.design.policy,
      law_of(row.design),
      row.design.shown,
      f"{row.hours / best:.3f}",
      *_measured(row),
    ]
    for row in rows
  ]
  header = ["id", "design", "policy", "(φ, μ)", "nodes", "/best", *MEASURED]
  return markdown(header, body)


def matters_table(rows: Sequence[Row]) -> str:
  """gyre and Colocate under every variant, as ratios of a seed's hours."""
  of = {row.design.id: row for row in rows}
  base = of[tables.VARIANTS[0].designs()[0].id]
  body = []
  for variant in tables.VARIANTS:
    fine, whole = (of[design.id] for design in variant.designs())
    change = _ratios(fine, base)
    tie = _ratios(whole, fine)
    body.append(
      [
        variant.what,
        f"{fine.hours:.4g} ± {fine.spread:.2g}",
        f"{_percent(change[0] - 1)} ± {100 * change[1]:.1f}%",
        f"{whole.hours:.4g} ± {whole.spread:.2g}",
        f"{tie[0]:.3f} ± {tie[1]:.2g}",
      ]
    )
  header = ["changed", "gyre h", "change", "Colocate h", "Colocate / gyre"]
  return markdown(header, body)


def _ratios(a: Row, b: Row) -> tuple[float, float]:
  """Mean and spread of a / b over the seeds."""
  pairs = zip(a.runs, b.runs, strict=True)
  return mean_and_spread([x.seconds / y.seconds for x, y in pairs])
