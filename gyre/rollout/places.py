"""Which request's keys lie in which row of the decode window. Pure Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gyre.rollout import schedule


@dataclasses.dataclass
class Placement:
  """The rows of a window.

  Attributes:
    lives: the request of each row, or None for an empty one.
    size: tokens a row can hold.
    base: tokens shared by all rows, which the window leaves out.
  """

  lives: list[schedule.Live | None]
  size: int
  base: int


class Places:
  """The current placement: kept while it holds who is to decode."""

  def __init__(self, windows: Sequence[tuple[int, int]], page_size: int):
    """windows: (rows, tokens) that are compiled."""
    self._windows = sorted(windows)
    self._page_size = page_size
    self.now: Placement | None = None

  def clear(self) -> None:
    """The window's content is void."""
    self.now = None

  def place(
    self, lives: Sequence[schedule.Live], steps: int
  ) -> tuple[Placement | None, list[int]]:
    """Finds each request a row with room for `steps` more tokens.

    Args:
      lives: ready to decode, pages reserved.
      steps: most tokens that each will feed.

    Returns:
      The placement, None where no window is large enough, and the rows to
      load: all that are taken if the placement is a new one.
    """
    longest = max(len(x.ids) - 1 + min(steps, x.remaining) for x in lives)
    rows = next((n for n, _ in self._windows if n >= len(lives)), 0)
    now = self.now
    if (
      now is not None
      and len(now.lives) == rows
      and longest - now.base <= now.size
      and self._shared(lives) >= now.base
    ):
      now.lives = [x if x in lives else None for x in now.lives]
      fresh = []
      for live in lives:
        if live not in now.lives:
          fresh.append(now.lives.index(None))
          now.lives[fresh[-1]] = live
      return now, fresh
    base = self._shared(lives) if len(lives) > 1 else 0
    need = longest - base
    size = next((s for n, s in self._windows if n == rows and s >= need), 0)
    self.now = None
    if size:
      spare = [None] * (rows - len(lives))
      self.now = Placement([*lives, *spare], size, base)
    return self.now, list(range(len(lives)))

  def _shared(self, lives: Sequence[schedule.Live]) -> int:
    """Tokens in full pages that all hold, before their last."""
    size = self._page_size
    count = min((len(x.ids) - 1) // size for x in lives)
    first, *others = (x.pages for x in lives)
    for pages in others:
      count = next((i for i in range(count) if pages[i] != first[i]), count)
    return count * size
