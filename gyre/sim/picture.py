"""Time lines of cell roles: one HTML file that needs nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from gyre.sim.clock import Result

_COLOURS = {
  "rollout": "#4c8bb8",
  "train": "#e0913a",
  "to_train": "#7a4f9c",
  "to_rollout": "#7a4f9c",
}
_NAMES = {
  "rollout": "rollout",
  "train": "training",
  "to_train": "switching",
}
_LEFT, _WIDTH, _LANE, _GAP = 90, 900, 14, 3
_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 24px; color: #222;
  background: #fff; max-width: 1040px; }
h1 { font-size: 20px; margin: 0 0 4px; }
h2 { font-size: 15px; margin: 22px 0 4px; }
p { margin: 0 0 8px; color: #555; }
svg { display: block; max-width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: #444; }
.key i { display: inline-block; width: 12px; height: 12px; margin: 0 5px 0 14px;
  vertical-align: -1px; }
"""


def _unit(longest: float) -> tuple[str, float]:
  """What times are shown in, and how many seconds that is."""
  return ("h", 3600.0) if longest >= 3600 else ("s", 1.0)


def _tick(longest: float) -> float:
  """A round step that makes about ten ticks."""
  step = 10 ** math.floor(math.log10(longest / 10))
  return next(step * k for k in (1, 2, 5, 10) if step * k >= longest / 10)


def _lanes(run: Result, longest: float) -> str:
  """The time lines of one run, on the scale of the longest."""
  cells = list(dict.fromkeys(span.cell for span in run.spans))
  cells.sort(key=_natural)
  height = len(cells) * (_LANE + _GAP)
  scale = _WIDTH / longest
  unit, seconds = _unit(longest)
  out = [
    f'<svg viewBox="0 0 {_LEFT + _WIDTH + 20} {height + 24}" '
    f'width="{_LEFT + _WIDTH + 20}" role="img">'
  ]
  for i, cell in enumerate(cells):
    y = i * (_LANE + _GAP)
    out.append(
      f'<text x="{_LEFT - 6}" y="{y + 11}" text-anchor="end">'
      f"{html.escape(cell)}</text>"
    )
    for span in run.spans:
      if span.cell == cell:
        x, w = _LEFT + span.start * scale, (span.end - span.start) * scale
        out.append(
          f'<rect x="{x:.2f}" y="{y}" width="{max(w, 0.6):.2f}" '
          f'height="{_LANE}" fill="{_COLOURS[span.role]}"/>'
        )
  for update, t in enumerate(run.applied, 1):
    x = _LEFT + t * scale
    out.append(
      f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height}" stroke="#222" '
      'stroke-width="0.8">'
      f"<title>update {update}: {t / seconds:.4g} {unit}</title></line>"
    )
  step = _tick(longest / seconds)
  for k in range(math.floor(longest / seconds / step + 1e-9) + 1):
    x = _LEFT + k * step * seconds * scale
    out.append(
      f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{height}" y2="{height + 4}" '
      f'stroke="#888"/><text x="{x:.1f}" y="{height + 17}" '
      f'text-anchor="middle">{k * step:g} {unit}</text>'
    )
  return "".join([*out, "</svg>"])


def _natural(name: str) -> tuple[int, str, int]:
  """core and trainer first, then cells by number, then the pool."""
  stem = name.rstrip("0123456789")
  rank = {"core": 0, "trainer": 0, "pool": 2}.get(stem, 1)
  return rank, stem, int(name[len(stem) :] or 0)


def render(title: str, runs: Sequence[tuple[str, Result]]) -> str:
  """One page: the cells' roles over time, a picture a run, on one scale.

  Args:
    title: of the page.
    runs: (caption, run), in order.

  Returns:
    HTML that loads nothing.
  """
  longest = max(run.seconds for _, run in runs)
  key = "".join(
    f'<i style="background:{_COLOURS[role]}"></i>{name}'
    for role, name in _NAMES.items()
  )
  parts = [
    "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
    f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
    f"<h1>{html.escape(title)}</h1>",
    f"<p class='key'>Roles of the cells:{key}. A line is an update.</p>",
  ]
  for caption, run in runs:
    parts.append(f"<h2>{html.escape(caption)}</h2>")
    parts.append(_lanes(run, longest))
  return "\n".join([*parts, "</body></html>\n"])
