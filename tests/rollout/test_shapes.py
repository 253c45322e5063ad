"""Which shapes the engine compiles."""

import pytest

from gyre import config
from gyre.rollout import shapes

CASES = [
  {"max_slots": 32, "num_pages": 1024, "page_size": 16},
  {"max_slots": 32, "num_pages": 1024, "page_size": 16, "dtype": "bfloat16"},
  {"max_slots": 4, "num_pages": 40, "page_size": 7},
  {"max_slots": 64, "num_pages": 20, "page_size": 64},
  {"max_slots": 1, "num_pages": 3, "page_size": 300},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_windows_fit_into_the_memory_of_the_pages(options):
  rollout = config.Rollout(**options)
  context = 3 * rollout.page_size - 1
  made = shapes.choose(rollout, context, deterministic=False)
  capacity = rollout.num_pages * rollout.page_size
  for rows, tokens in made.windows:
    assert 1 <= rows <= rollout.max_slots
    assert tokens > 0 and tokens % rollout.page_size == 0
    assert rows * tokens <= capacity
  # A single request always has a window, and any batch a program.
  smallest = min(made.windows)[0]
  assert max(s for n, s in made.windows if n == smallest) >= context
  assert made.rows[-1] == rollout.max_slots
  assert made.table_width * rollout.page_size >= context


def test_a_batch_of_more_rows_than_pages_has_no_window():
  rollout = config.Rollout(max_slots=64, num_pages=20, page_size=64)
  made = shapes.choose(rollout, 190, deterministic=False)
  assert {n for n, _ in made.windows} == {1, 8, 16}


def test_deterministic_mode_has_one_shape():
  rollout = config.Rollout(max_slots=16)
  made = shapes.choose(rollout, 512, deterministic=True)
  assert (made.rows, made.windows, made.chunks) == ((16,), (), ())
