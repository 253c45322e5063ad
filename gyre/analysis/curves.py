"""Curves as SVG, written by hand: no plotting library is needed to see them."""

from __future__ import annotations

import dataclasses
import xml.sax.saxutils
from collections.abc import Sequence

import numpy as np

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
#: Most curves that one figure tells apart.
MAX_CURVES = len(_COLORS)
_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 16, 40, 48
_MIDDLE = 'text-anchor="middle"'


@dataclasses.dataclass(frozen=True)
class Curve:
  """Points of one run.

  Attributes:
    name: in the legend.
    x, y: of the points, in order of x.
    marks: (x, y, low, high): points with an interval.
  """

  name: str
  x: Sequence[float]
  y: Sequence[float]
  marks: Sequence[tuple[float, float, float, float]] = ()


def smooth(y: Sequence[float], window: int) -> list[float]:
  """Trailing mean over at most `window` values."""
  return [
    float(np.mean(y[max(0, i + 1 - window) : i + 1])) for i in range(len(y))
  ]


def _px(x: float, last: float) -> float:
  return round(_LEFT + x / last * (_WIDTH - _LEFT - _RIGHT), 1)


def _py(y: float) -> float:
  return round(_HEIGHT - _BOTTOM - y * (_HEIGHT - _TOP - _BOTTOM), 1)


def _text(x: float, y: float, words: str, more: str = "") -> str:
  body = xml.sax.saxutils.escape(words)
  return f'<text x="{x}" y="{y}" {more}>{body}</text>'


def _axes(last: float) -> list[str]:
  """Grid lines and numbers: y from 0 to 1, x from 0 to `last`."""
  out = []
  for i in range(6):
    y = _py(i / 5)
    out.append(
      f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" '
      'stroke="#ddd"/>'
    )
    out.append(_text(_LEFT - 8, y + 4, f"{i / 5:.1f}", 'text-anchor="end"'))
  for x in range(0, int(last) + 1, max(1, round(last / 8))):
    at = _px(x, last)
    out.append(_text(at, _HEIGHT - _BOTTOM + 18, str(x), _MIDDLE))
  return out


def _drawn(curve: Curve, color: str, last: float) -> list[str]:
  """A curve's values, their trailing mean and its marks."""
  stroke = f'stroke="{color}"'

  def line(y: Sequence[float], look: str) -> str:
    pairs = zip(curve.x, y, strict=True)
    points = " ".join(f"{_px(a, last)},{_py(b)}" for a, b in pairs)
    return f'<polyline points="{points}" fill="none" {stroke} {look}/>'

  out = [
    line(curve.y, 'stroke-opacity="0.35"'),
    line(smooth(curve.y, 5), 'stroke-width="2.5"'),
  ]
  for x, y, low, high in curve.marks:
    at = _px(x, last)
    out.append(
      f'<line x1="{at}" x2="{at}" y1="{_py(low)}" y2="{_py(high)}" '
      f'{stroke} stroke-width="1.5"/>'
    )
    out.append(f'<circle cx="{at}" cy="{_py(y)}" r="4.5" fill="{color}"/>')
  return out


def svg(
  curves: Sequence[Curve], *, title: str, x_label: str, y_label: str
) -> str:
  """Draws curves over a y axis from 0 to 1.

  Each curve's values are thin, their trailing mean over 5 is thick; marks are
  dots with the interval as a bar.

  Args:
    curves: at most MAX_CURVES; values in [0, 1].
    title, x_label, y_label: plain text.

  Returns:
    The text of an SVG file.

  Raises:
    ValueError: more curves than colours, or no point at all.
  """
  if len(curves) > MAX_CURVES:
    raise ValueError(f"{len(curves)} curves, at most {MAX_CURVES}")
  xs = [x for c in curves for x in (*c.x, *(m[0] for m in c.marks))]
  if not xs:
    raise ValueError("no point to draw")
  last = max(max(xs), 1)
  turned = f"rotate(-90 14 {_HEIGHT / 2})"
  out = [
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
    f'height="{_HEIGHT}" font-family="sans-serif" font-size="13">',
    f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    _text(_WIDTH / 2, 20, title, _MIDDLE + ' font-size="15"'),
    _text(_WIDTH / 2, _HEIGHT - 8, x_label, _MIDDLE),
    _text(14, _HEIGHT / 2, y_label, f'{_MIDDLE} transform="{turned}"'),
    *_axes(last),
  ]
  for i, (curve, color) in enumerate(zip(curves, _COLORS, strict=False)):
    out += _drawn(curve, color, last)
    row = _TOP + 14 + 18 * i
    out.append(
      f'<rect x="{_LEFT + 12}" y="{row - 9}" width="14" height="8" '
      f'fill="{color}"/>'
    )
    out.append(_text(_LEFT + 32, row, curve.name))
  return "\n".join([*out, "</svg>", ""])
