"""Cells, their roles, and the orders in which they leave and are filled.

A cell is a fixed set of devices with a trainer and an engine, of which one
holds the devices at a time. A layout is the cells of a run in the order of
leaving; fixed partition, global switch, coarse switch and gyre's cells are
layouts of one rule.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

Kind = Literal["core", "satellite", "standalone", "trainer"]
Role = Literal["rollout", "to_train", "train", "to_rollout", "down"]


@dataclasses.dataclass(frozen=True)
class Cell:
  """A set of devices that changes its role as one.

  Attributes:
    name: unique in the layout.
    devices: their numbers.
    slots: executions that its engine holds at once.
    kind: "core" holds the authoritative weights and the only optimizer state;
      a "satellite" helps it train; "standalone" always serves; a "trainer" is
      a core that always trains.
    nodes: its size, in nodes.
    divisible: whether part of its devices may be lent to rollout (core and
      trainer only).
  """

  name: str
  devices: tuple[int, ...]
  slots: int
  kind: Kind = "satellite"
  nodes: float = 1.0
  divisible: bool = False

  def __post_init__(self):
    if self.kind not in get_args(Kind):
      raise ValueError(
        f"cell {self.name}: kind {self.kind!r} is none of {get_args(Kind)}"
      )
    if not self.devices:
      raise ValueError(f"cell {self.name} has devices (); it needs one or more")
    if self.slots < 0 or (self.slots == 0 and self.kind != "trainer"):
      raise ValueError(
        f"cell {self.name} has {self.slots} slots; kind {self.kind} needs >= 1"
      )
    if self.divisible and self.kind not in ("core", "trainer"):
      raise ValueError(
        f"cell {self.name} of kind {self.kind} can't be divisible; only a core "
        "or a trainer can"
      )
    if self.divisible and not (self.slots and len(self.devices) > 1):
      raise ValueError(
        f"divisible cell {self.name} has {len(self.devices)} devices and "
        f"{self.slots} slots; it needs >= 2 and >= 1"
      )

  @property
  def borrows(self) -> bool:
    """Whether it moves between rollout and training."""
    return self.kind in ("core", "satellite")


@dataclasses.dataclass(frozen=True)
class Layout:
  """The cells of a run, in the order of leaving rollout; the core is first."""

  cells: tuple[Cell, ...]

  def __post_init__(self):
    if not self.cells:
      raise ValueError(
        "a layout of 0 cells; it needs a core and a rollout cell"
      )
    names = [cell.name for cell in self.cells]
    if len(set(names)) != len(names):
      raise ValueError(f"cells named {names}; names must differ")
    kinds = [cell.kind for cell in self.cells]
    cores = [k for k in kinds if k in ("core", "trainer")]
    if len(cores) != 1 or kinds[0] != cores[0]:
      raise ValueError(
        f"cells of kinds {kinds}; exactly one core or trainer, the first"
      )
    if cores[0] == "trainer" and set(kinds[1:]) != {"standalone"}:
      raise ValueError(
        f"beside a trainer cells of kinds {kinds[1:]}; it needs standalone "
        "ones, and only those"
      )
    owner: dict[int, str] = {}
    for cell in self.cells:
      for device in cell.devices:
        if device in owner:
          raise ValueError(
            f"device {device} is in cells {owner[device]} and {cell.name}"
          )
        owner[device] = cell.name

  def __iter__(self) -> Iterator[Cell]:
    return iter(self.cells)

  @property
  def core(self) -> Cell:
    """The cell that holds the optimizer state at the beginning."""
    return self.cells[0]


def _cell(name: str, kind: Kind, nodes: int, slots: float, first: int) -> Cell:
  """A cell of `nodes` nodes from `first` on; a device is a node."""
  return Cell(
    name=name,
    devices=tuple(range(first, first + nodes)),
    slots=max(1, round(nodes * slots)),
    kind=kind,
    nodes=nodes,
  )


def fixed_partition(
  trainer_nodes: int, rollout_nodes: int, slots: float
) -> Layout:
  """Async: a trainer that never serves and a pool that never trains.

  Args:
    trainer_nodes, rollout_nodes: size of each part.
    slots: executions that a node holds; a cell's own are a whole number.
  """
  trainer = _cell("trainer", "trainer", trainer_nodes, slots, 0)
  pool = _cell("pool", "standalone", rollout_nodes, slots, trainer_nodes)
  return Layout((trainer, pool))


def global_switch(nodes: int, slots: float) -> Layout:
  """Colocate: one cell of all nodes, which leaves iff nothing is unfinished."""
  return Layout((_cell("core", "core", nodes, slots, 0),))


def coarse_switch(nodes: int, standalone_nodes: int, slots: float) -> Layout:
  """One large core that switches as one, beside standalone nodes."""
  return fine_switch(1, nodes, slots, standalone_nodes)


def fine_switch(
  cells: int, nodes: int, slots: float, standalone_nodes: int = 0
) -> Layout:
  """Gyre: homogeneous cells, the first of them the core.

  Args:
    cells: how many.
    nodes: size of each.
    slots: executions that a node holds; a cell's own are a whole number.
    standalone_nodes: size of a pool that never trains; 0 for none.
  """
  made = [
    _cell(
      f"cell{i}" if i else "core",
      "satellite" if i else "core",
      nodes,
      slots,
      i * nodes,
    )
    for i in range(cells)
  ]
  if standalone_nodes:
    first = cells * nodes
    made.append(_cell("pool", "standalone", standalone_nodes, slots, first))
  return Layout(tuple(made))


@dataclasses.dataclass(frozen=True)
class Post:
  """Where a cell stands.

  Attributes:
    cell: the cell.
    role: now.
    life: how often it went down; events of earlier lives are refused.
    back: a cell that is down in role but up again, and waits to serve.
    until: in training, the version at whose publication it returns.
    closing: it serves what it has, and is given no more.
  """

  cell: Cell
  role: Role
  life: int = 0
  back: bool = False
  until: int = 0
  closing: bool = False


@dataclasses.dataclass(frozen=True)
class Fleet:
  """Every cell's post, and who is the core.

  Attributes:
    posts: by name, in the order of the layout. Never changed in place.
    core: name of the cell that holds, or last held, the optimizer state.
    hosted: False since the core died; the next cell to train re-hosts it.
    lent: name of the cell of the core's lent devices, or None.
  """

  posts: Mapping[str, Post]
  core: str
  hosted: bool = True
  lent: str | None = None

  @functools.cached_property
  def serving(self) -> tuple[str, ...]:
    """Cells in rollout, in the order of being filled.

    Standalone cells first, then later cells: they stay longest. The core last.
    """
    return tuple(
      p.cell.name for p in reversed(self.in_order(None)) if p.role == "rollout"
    )

  @functools.cached_property
  def capacity(self) -> int:
    """C_R, slots of the cells in rollout."""
    return sum(p.cell.slots for p in self.posts.values() if p.role == "rollout")

  @property
  def core_trains(self) -> bool:
    """Whether there is a core, in training."""
    return self.hosted and self.posts[self.core].role == "train"

  def in_order(self, role: Role | None) -> list[Post]:
    """Cells of a role (None: any) in the order of leaving.

    The present core, then the others as in the layout, then the standalone.
    """
    if role is None:
      return list(self._order)
    return [p for p in self._order if p.role == role]

  @functools.cached_property
  def _order(self) -> tuple[Post, ...]:
    return tuple(
      sorted(
        self.posts.values(),
        key=lambda p: (p.cell.kind == "standalone", p.cell.name != self.core),
      )
    )

  def put(self, name: str, **changes) -> Fleet:
    """With one cell's post changed."""
    post = dataclasses.replace(self.posts[name], **changes)
    return dataclasses.replace(self, posts={**self.posts, name: post})


def fleet(layout: Layout) -> Fleet:
  """At the beginning all serve, but for a trainer."""
  posts = {
    cell.name: Post(cell, "train" if cell.kind == "trainer" else "rollout")
    for cell in layout
  }
  return Fleet(posts=posts, core=layout.core.name)
