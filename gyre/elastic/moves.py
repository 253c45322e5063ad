"""Where executions go: free slots, and off a cell that leaves or died."""

from __future__ import annotations

from gyre.elastic.messages import Action, Migrate
from gyre.elastic.state import State

Step = tuple[State, tuple[Action, ...]]


def vacate(state: State, cell: str) -> Step:
  """Moves what runs on a cell to free slots.

  The rest stays, or if the cell is dead waits again, first.
  """
  members = state.work.on(cell)
  free = free_slots(state, len(members), without=cell)
  moves = list(zip(members, free, strict=False))
  work = state.work
  if moves:
    work = work.move(moves)
  dead = state.fleet.posts[cell].role == "down"
  if dead and len(free) < len(members):
    work = work.requeue(members[len(free) :])
  return state.but(work=work), tuple(Migrate(e, cell, t) for e, t in moves)


def free_slots(state: State, most: int, without: str = "") -> list[str]:
  """Up to `most` free slots, as cells in the order of being filled."""
  slots: list[str] = []
  for name in state.fleet.serving:
    if len(slots) >= most:
      break
    if name != without:
      free = state.fleet.posts[name].cell.slots - state.work.load.get(name, 0)
      slots += [name] * min(free, most - len(slots))
  return slots
