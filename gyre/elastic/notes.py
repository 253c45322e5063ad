"""What each event changes by itself; the rules then see what follows."""

from __future__ import annotations

import dataclasses

from gyre.elastic import moves, resizing
from gyre.elastic.dispatch import Group
from gyre.elastic.messages import (
  Applied,
  Begin,
  CellDown,
  CellUp,
  Drained,
  Drop,
  Finished,
  Publish,
  Published,
  Rehost,
  Resize,
  ResizeAsked,
  Resized,
  ResizeFailed,
  Switch,
  SwitchDone,
  SwitchFailed,
)
from gyre.elastic.state import State, Trainer


def _begin(state: State, event: Begin) -> moves.Step:
  """A stored run may have ended before it dropped a lost group."""
  state, asked = state.but(phase="running"), ()
  for number in state.queue.whole:
    group = state.queue.groups[number]
    if not group.scored:
      state, actions = drop(state, group, "lost")
      asked += actions
  return state, asked


def _finished(state: State, event: Finished) -> moves.Step:
  if event.execution not in state.work:
    return state, ()
  number = event.execution[0]
  state = state.but(
    work=state.work.without([event.execution]),
    queue=state.queue.ended(number, event.scored, event.flat),
  )
  group = state.queue.groups[number]
  if group.left or group.scored:
    return state, ()
  return drop(state, group, "lost")


def drop(state: State, group: Group, reason: str) -> moves.Step:
  """Drops a group, whatever of it runs."""
  members = [(group.number, i) for i in range(state.law.group_size)]
  state = state.but(
    queue=state.queue.without((group.number,)),
    work=state.work.without(members),
  )
  return state, (Drop(group.number, reason),)


def _under_way(state: State, event: SwitchDone | SwitchFailed) -> bool:
  """Whether an event answers the transfer under way."""
  if state.transfer is None:
    return False
  action = state.transfer.action
  if not isinstance(action, (Switch, Rehost)):
    return False
  return event.cell == action.cell and event.ticket in (None, action.ticket)


def _switch_done(state: State, event: SwitchDone) -> moves.Step:
  if not _under_way(state, event):
    return state, ()
  action = state.transfer.action
  if isinstance(action, Switch) and action.role == "rollout":
    fleet = state.fleet.put(event.cell, role="rollout", back=False)
  else:
    fleet = state.fleet.put(event.cell, role="train", back=False)
  if isinstance(action, Rehost):
    fleet = dataclasses.replace(fleet, core=event.cell, hosted=True)
  return state.but(fleet=fleet, transfer=None), ()


def _switch_failed(state: State, event: SwitchFailed) -> moves.Step:
  if not _under_way(state, event):
    return state, ()
  fleet = state.fleet.put(event.cell, role=state.transfer.before)
  return state.but(fleet=fleet, transfer=None), ()


def _drained(state: State, event: Drained) -> moves.Step:
  trainer = state.trainer
  whole = len(trainer.claims) == state.law.batch
  if event.update != trainer.version + 1 or not whole:
    return state, ()
  return state.but(trainer=dataclasses.replace(trainer, drained=True)), ()


def _applied(state: State, event: Applied) -> moves.Step:
  trainer = state.trainer
  if event.update != trainer.version + 1 or not trainer.asked:
    return state, ()
  trainer = Trainer(version=event.update, published=trainer.published)
  return state.but(trainer=trainer), ()


def _published(state: State, event: Published) -> moves.Step:
  transfer = state.transfer
  if transfer is None or transfer.action != Publish(event.version):
    return state, ()
  trainer = dataclasses.replace(state.trainer, published=event.version)
  return state.but(trainer=trainer, transfer=None), ()


def _cell_down(state: State, event: CellDown) -> moves.Step:
  """What a dead cell trained is trained again, what it ran goes on elsewhere.

  The runtime sends Drained again if it was sent; an optimizer step that was
  committed before the death is told by Applied as ever.
  """
  post = state.fleet.posts.get(event.cell)
  if post is None or event.life not in (None, post.life):
    return state, ()
  if post.role == "down" and not post.back:
    return state, ()
  fleet = state.fleet.put(
    event.cell, role="down", back=False, life=post.life + 1
  )
  if event.cell == fleet.core:
    fleet = dataclasses.replace(fleet, hosted=False)
  if post.role not in ("rollout", "down"):
    trainer = dataclasses.replace(state.trainer, drained=False, applying=False)
    state = state.but(trainer=trainer)
  state = _transfer_ended(state.but(fleet=fleet), event.cell)
  return moves.vacate(state, event.cell)


def _transfer_ended(state: State, cell: str) -> State:
  """The transfer of a cell that died is over."""
  transfer = state.transfer
  if transfer is None or isinstance(transfer.action, Publish):
    return state
  if transfer.action.cell != cell:
    return state
  if isinstance(transfer.action, Resize):
    return resizing.undone(state)
  return state.but(transfer=None)


def _cell_up(state: State, event: CellUp) -> moves.Step:
  post = state.fleet.posts.get(event.cell)
  if post is None or event.life not in (None, post.life):
    return state, ()
  if post.role != "down" or post.back:
    return state, ()
  return state.but(fleet=state.fleet.put(event.cell, back=True)), ()


NOTES = {
  Begin: _begin,
  Finished: _finished,
  SwitchDone: _switch_done,
  SwitchFailed: _switch_failed,
  Drained: _drained,
  Applied: _applied,
  Published: _published,
  CellDown: _cell_down,
  CellUp: _cell_up,
  ResizeAsked: resizing.noted,
  Resized: resizing.done,
  ResizeFailed: resizing.failed,
}
