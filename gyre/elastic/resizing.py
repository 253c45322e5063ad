"""A divisible core lends part of its devices to rollout, and takes them back.

The lent devices are a cell of their own that always serves. The core is
resized between two updates, when it trains and no group is consumed; what
runs on a lent cell is moved before, as slots become free.
"""

from __future__ import annotations

import dataclasses

from gyre.elastic import moves
from gyre.elastic.cells import Cell, Fleet, Post
from gyre.elastic.messages import (
  Resize,
  ResizeAsked,
  Resized,
  ResizeFailed,
)
from gyre.elastic.state import State, Transfer


def ask(state: State, time: float, devices: int) -> ResizeAsked:
  """The event by which the core is to train on `devices` of its devices.

  Raises:
    ValueError: if the layout's core is not divisible, or has not as many.
  """
  core = state.plan.layout.core
  if not core.divisible:
    raise ValueError(f"the core {core.name} is not divisible")
  if not 1 <= devices <= len(core.devices):
    raise ValueError(
      f"{devices} devices for the core; it needs 1 to {len(core.devices)}"
    )
  return ResizeAsked(time, devices)


def noted(state: State, event: ResizeAsked) -> moves.Step:
  """A new wish takes the place of the former. What can't be is ignored."""
  core = state.plan.layout.core
  if not core.divisible or not 1 <= event.devices <= len(core.devices):
    return state, ()
  return state.but(wanted=event.devices), ()


def due(state: State) -> bool:
  """Whether the core trains, should on other devices, and nothing but the
  end of an update, or of a transfer, is in the way."""
  lent = state.fleet.lent
  if not state.fleet.core_trains or not _differs(state):
    return False
  return lent is None or not state.work.load.get(lent, 0)


def _differs(state: State) -> bool:
  core = state.plan.layout.core.name
  if state.wanted is None or state.fleet.core != core:
    return False
  return len(state.fleet.posts[core].cell.devices) != state.wanted


def done(state: State, event: Resized) -> moves.Step:
  """The core has its new devices; the others are a cell, which will serve."""
  transfer = state.transfer
  if not _answers(state, event):
    return state, ()
  whole = state.plan.layout.core
  kept, lent = split(whole, len(transfer.action.devices))
  posts = dict(state.fleet.posts)
  posts[whole.name] = dataclasses.replace(posts[whole.name], cell=kept)
  if state.fleet.lent is not None:
    del posts[state.fleet.lent]
  if lent is not None:
    # Its lives are counted from the ticket: the last one's do not come back.
    life = transfer.action.ticket
    posts[lent.name] = Post(lent, "down", life=life, back=True)
  fleet = Fleet(
    posts=posts,
    core=state.fleet.core,
    hosted=state.fleet.hosted,
    lent=lent and lent.name,
  )
  return state.but(fleet=fleet, transfer=None), ()


def failed(state: State, event: ResizeFailed) -> moves.Step:
  """The core is as before; it is asked for again."""
  if not _answers(state, event):
    return state, ()
  return undone(state), ()


def undone(state: State) -> State:
  """Without the Resize under way; a lent cell closed for it may serve."""
  fleet = state.fleet
  if fleet.lent is not None:
    fleet = fleet.put(fleet.lent, back=True)
  return state.but(fleet=fleet, transfer=None)


def _answers(state: State, event: Resized | ResizeFailed) -> bool:
  if state.transfer is None or not isinstance(state.transfer.action, Resize):
    return False
  action = state.transfer.action
  return event.cell == action.cell and event.ticket in (None, action.ticket)


def split(core: Cell, devices: int) -> tuple[Cell, Cell | None]:
  """The part of a core that is kept, and the part that is lent.

  Slots and nodes go with the devices.
  """
  count = len(core.devices)
  if devices == count:
    return core, None
  share = devices / count
  slots = max(1, core.slots * devices // count)
  kept = dataclasses.replace(
    core,
    devices=core.devices[:devices],
    slots=slots,
    nodes=core.nodes * share,
    divisible=False,
  )
  lent = Cell(
    name=f"{core.name}-lent",
    devices=core.devices[devices:],
    slots=max(1, core.slots - slots),
    kind="standalone",
    nodes=core.nodes * (1 - share),
  )
  return kept, lent


def clear_lent(state: State) -> moves.Step:
  """A lent cell that is to change admits no more and is cleared."""
  name = state.fleet.lent
  if name is None or state.over:
    return state, ()
  closing = _differs(state)
  if state.fleet.posts[name].closing != closing:
    state = state.but(fleet=state.fleet.put(name, closing=closing))
  return moves.vacate(state, name) if closing else (state, ())


def resize(state: State) -> moves.Step:
  """Between two updates the core takes the devices that it should have."""
  trainer = state.trainer
  if state.transfer or trainer.claims or state.over or not due(state):
    return state, ()
  lent, core = state.fleet.lent, state.plan.layout.core
  ticket = state.tickets + 1
  action = Resize(core.name, core.devices[: state.wanted], ticket)
  fleet = state.fleet
  if lent is not None:
    life = fleet.posts[lent].life + 1
    fleet = fleet.put(lent, role="down", back=False, life=life)
  state = state.but(
    fleet=fleet,
    transfer=Transfer(action, before="train"),
    tickets=ticket,
  )
  return state, (action,)
