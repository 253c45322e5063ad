"""Layouts: what is refused, and the orders of leaving and of being filled."""

import pytest

from gyre.elastic import cells
from gyre.elastic.cells import Cell, Layout


def _layout(*kinds):
  return Layout(
    tuple(Cell(f"c{i}", (i,), 1, kind) for i, kind in enumerate(kinds))
  )


@pytest.mark.parametrize(
  "make,words",
  [
    (lambda: _layout(), "a layout of 0 cells"),
    (lambda: _layout("satellite"), "exactly one core or trainer"),
    (lambda: _layout("satellite", "core"), "exactly one core or trainer"),
    (lambda: _layout("core", "core"), "exactly one core or trainer"),
    (lambda: _layout("trainer", "satellite"), "beside a trainer"),
    (lambda: _layout("trainer"), "beside a trainer"),
    (lambda: Cell("a", (), 1), r"cell a has devices \(\)"),
    (lambda: Cell("a", (0,), 0), "cell a has 0 slots"),
    (lambda: Cell("a", (0,), 1, "moon"), "kind 'moon' is none of"),
    (
      lambda: Cell("a", (0,), 1, "satellite", divisible=True),
      "can't be divisible",
    ),
    (
      lambda: Layout((Cell("a", (0, 1), 1, "core"), Cell("b", (1,), 1))),
      "device 1 is in cells a and b",
    ),
    (
      lambda: Layout((Cell("a", (0,), 1, "core"), Cell("a", (1,), 1))),
      "names must differ",
    ),
  ],
)
def test_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()


def test_orders():
  fleet = cells.fleet(cells.fine_switch(3, 1, 2, standalone_nodes=1))
  assert fleet.serving == ("pool", "cell2", "cell1", "core")
  names = [post.cell.name for post in fleet.in_order(None)]
  assert names == ["core", "cell1", "cell2", "pool"]
  assert fleet.capacity == 8
  later = fleet.put("cell2", role="train")
  assert later.capacity == 6 and fleet.capacity == 8
  assert later.serving == ("pool", "cell1", "core")


def test_named_layouts_cover_the_nodes():
  for layout in (
    cells.fixed_partition(16, 16, 9.2),
    cells.global_switch(32, 9.2),
    cells.coarse_switch(28, 4, 9.2),
    cells.fine_switch(8, 4, 9.2),
  ):
    assert sum(cell.nodes for cell in layout) == 32
    devices = [d for cell in layout for d in cell.devices]
    assert sorted(devices) == list(range(32))
