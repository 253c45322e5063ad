"""Which shapes the embedded engine compiles for a configuration."""

from __future__ import annotations

import dataclasses

from gyre import config
from gyre.rollout import paged

_MAX_STEPS = 16
_WINDOW = 256
_ROWS = 1, 8, 16


@dataclasses.dataclass(frozen=True)
class Shapes:
  """What is compiled.

  Attributes:
    rows: decode batch sizes over pages alone, ascending.
    windows: (rows, tokens) of decode programs over a window.
    chunks: (rows, tokens) of prefill programs; empty where prefill runs
      through the decode program.
    pages, page_size: of the cache.
    table_width: pages a row's table can name; a multiple of `block`.
    block: pages read at a time by attention.
    steps: most decode steps in one dispatch.
  """

  rows: tuple[int, ...]
  windows: tuple[tuple[int, int], ...]
  chunks: tuple[tuple[int, int], ...]
  pages: int
  page_size: int
  table_width: int
  block: int
  steps: int


def _windows(
  rollout: config.Rollout, max_context: int
) -> tuple[tuple[int, int], ...]:
  """(rows, tokens) of the decode windows.

  Two lengths for each batch: what most completions need, and the most that
  takes no more memory than the pages do. More rows than pages have none.
  """
  slots, page = rollout.max_slots, rollout.page_size
  windows = []
  for rows in (*(n for n in _ROWS if n < slots), slots):
    most = min(-(-max_context // page), rollout.num_pages // rows)
    sizes = {min(-(-_WINDOW // page), most), most} - {0}
    windows += [(rows, n * page) for n in sorted(sizes)]
  return tuple(windows)


def choose(
  rollout: config.Rollout, max_context: int, deterministic: bool
) -> Shapes:
  """Chooses what to compile.

  Args:
    rollout: slots, pages, chunk and dtype.
    max_context: longest prompt and completion together.
    deterministic: one program of one shape for everything.

  Returns:
    The shapes.
  """
  block = paged.block_pages(rollout.page_size)
  width = -(-max_context // rollout.page_size)
  slots = rollout.max_slots
  if deterministic:
    rows, windows, chunks = (max(8, slots),), (), ()
  else:
    rows, windows = (slots,), _windows(rollout, max_context)
    lengths = sorted({max(1, rollout.prefill_chunk // n) for n in (1, 4, 16)})
    chunks = tuple((rollout.prefill_chunk // n, n) for n in lengths)
  return Shapes(
    rows=rows,
    windows=windows,
    chunks=chunks,
    pages=rollout.num_pages + 1,
    page_size=rollout.page_size,
    table_width=-(-width // block) * block,
    block=block,
    steps=_MAX_STEPS,
  )
