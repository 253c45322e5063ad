"""What is asked for, one function a rule, each of the state alone."""

from __future__ import annotations

import dataclasses

from gyre.elastic import moves, notes, resizing
from gyre.elastic.dispatch import Group
from gyre.elastic.messages import (
  Action,
  Admit,
  Apply,
  Consume,
  Publish,
  Rehost,
  Start,
  Stop,
  Switch,
)
from gyre.elastic.state import State, Transfer


def drop_stale(state: State) -> moves.Step:
  """A group whose staleness would be beyond the maximum is never trained."""
  if state.law.max_staleness is None or state.over:
    return state, ()
  asked: tuple[Action, ...] = ()
  oldest = state.trainer.version - state.law.max_staleness
  for group in state.queue.stale(oldest):
    state, actions = notes.drop(state, group, "stale")
    asked += actions
  return state, asked


def apply(state: State) -> moves.Step:
  """A drained update is applied by the core, unless weights are going out."""
  trainer = state.trainer
  if not trainer.drained or trainer.applying:
    return state, ()
  if state.publishing or not state.fleet.core_trains:
    return state, ()
  trainer = dataclasses.replace(trainer, applying=True, asked=True)
  return state.but(trainer=trainer), (Apply(trainer.version + 1),)


def publish(state: State) -> moves.Step:
  """The weights at the end of a burst are published."""
  if state.trainer.published >= state.boundary or state.transfer:
    return state, ()
  action = Publish(state.boundary)
  return state.but(transfer=Transfer(action)), (action,)


def replenish(state: State) -> moves.Step:
  """Unconsumed groups are brought to Q_b, less what the burst consumed.

  At a boundary these are μB new ones in steady state; at any time one for each
  group dropped.
  """
  trainer, law = state.trainer, state.law
  done = (trainer.version - trainer.published) * law.batch + len(trainer.claims)
  wanted = law.boundary - done
  if not state.plan.endless:
    left = (state.plan.steps - trainer.version) * law.batch
    wanted = min(wanted, left - len(trainer.claims))
  count = wanted - len(state.queue)
  if count <= 0 or state.over:
    return state, ()
  numbers = range(state.next_group, state.next_group + count)
  queue = state.queue
  for number in numbers:
    queue = queue.admit(Group(number, trainer.published, law.group_size))
  members = [(g, i) for g in numbers for i in range(law.group_size)]
  state = state.but(
    queue=queue,
    work=state.work.add(members),
    next_group=numbers.stop,
  )
  return state, tuple(Admit(number, trainer.published) for number in numbers)


def _room(state: State) -> int:
  """Groups that may be consumed now, if they are whole and eligible.

  None before the last burst's weights go out, nor before a resize.
  """
  trainer = state.trainer
  if not state.queue.whole or state.over:
    return 0
  if trainer.published < state.boundary and not state.publishing:
    return 0
  if not trainer.claims and resizing.due(state):
    return 0
  return state.law.batch - len(trainer.claims)


def drop_flat(state: State) -> moves.Step:
  """A group that teaches nothing is replaced where it would be consumed.

  Up to `resample` times B of them an update; then what comes is taken. So in
  order of admission it does not depend on time which are replaced.
  """
  most = state.plan.resample * state.law.batch
  asked: tuple[Action, ...] = ()
  while (group := _flat(state)) and state.trainer.replaced < most:
    replaced = state.trainer.replaced + 1
    trainer = dataclasses.replace(state.trainer, replaced=replaced)
    state, actions = notes.drop(state.but(trainer=trainer), group, "flat")
    asked += actions
  return state, asked


def _flat(state: State) -> Group | None:
  """The first flat group among those to be consumed now."""
  room = _room(state)
  groups = (
    state.queue.groups[n] for n in (_ready(state, room) if room else ())
  )
  return next((group for group in groups if group.flat), None)


def consume(state: State) -> moves.Step:
  """Whole groups inside the window go into the claim queue of the update.

  With streaming one by one; else B at once, and for a burst's first update
  when all the burst's are ready. Not before the last burst's weights go out.
  """
  trainer, law = state.trainer, state.law
  room = _room(state)
  if not room:
    return state, ()
  needed = 1 if state.plan.streaming else room
  if not state.plan.streaming and trainer.version == state.boundary:
    end = law.burst_end(trainer.version, state.plan.steps)
    needed = (end - trainer.version) * law.batch
  if len(state.queue.whole) < needed:
    return state, ()
  ready = _ready(state, max(needed, room))
  if len(ready) < needed:
    return state, ()
  taken = ready[:room]
  trainer = dataclasses.replace(trainer, claims=trainer.claims + taken)
  update = trainer.version + 1
  state = state.but(trainer=trainer, queue=state.queue.without(taken))
  return state, tuple(Consume(number, update) for number in taken)


def _ready(state: State, most: int) -> tuple[int, ...]:
  """Up to `most` groups that can be consumed now, one after the other."""
  law, trainer = state.law, state.trainer
  if not state.plan.policy.deadlines:
    return state.queue.ready(law.window, most)
  room = law.batch - len(trainer.claims)
  return state.queue.in_time(law, trainer.version + 1, room, most)


def start(state: State) -> moves.Step:
  """Executions that wait start where a slot is free, in their order."""
  if not state.work.waiting or state.over:
    return state, ()
  free = moves.free_slots(state, len(state.work.waiting))
  if not free:
    return state, ()
  placed = state.work.waiting[: len(free)]
  state = state.but(work=state.work.start(free))
  return state, tuple(map(Start, placed, free))


def bring_back(state: State) -> moves.Step:
  """A cell goes to rollout: revived, at the end of its burst, or in need."""
  if state.transfer:
    return state, ()
  state = _renew_core(state)
  name = _revived(state) or _returning(state) or _needed(state)
  if name is None:
    return state, ()
  return _switch(state, name, "rollout")


def _renew_core(state: State) -> State:
  """The core stays in training iff the next batch is ready and the other
  cells that serve, or will return to it, cover what is unfinished."""
  fleet, trainer, law = state.fleet, state.trainer, state.law
  post = fleet.posts[fleet.core]
  if post.role != "train" or post.until > trainer.published or state.over:
    return state
  room = law.batch - len(trainer.claims)
  ready = len(_ready(state, room)) == room
  others = sum(
    other.cell.slots
    for name, other in fleet.posts.items()
    if name != fleet.core and other.role in ("rollout", "train", "to_rollout")
  )
  if not ready or state.work.unfinished > others:
    return state
  until = law.burst_end(trainer.version, state.plan.steps)
  return state.but(fleet=fleet.put(fleet.core, until=until))


def _revived(state: State) -> str | None:
  """A cell that is up again and holds nothing; not a trainer."""
  for post in state.fleet.in_order("down"):
    if post.back and post.cell.kind != "trainer" and not post.closing:
      return post.cell.name
  return None


def _returning(state: State) -> str | None:
  """A cell in training whose burst is published: later cells first."""
  if state.trainer.drained:
    return None
  for post in reversed(state.fleet.in_order("train")):
    if post.cell.borrows and post.until <= state.trainer.published:
      return post.cell.name
  return None


def _needed(state: State) -> str | None:
  """A cell called back in mid-burst, as what is unfinished grew.

  A satellite if w > C_R (a group was replaced, a cell died); the core only if
  nothing serves and the update lacks groups.
  """
  work, trainer, law = state.work, state.trainer, state.law
  if not work.waiting or work.unfinished <= state.fleet.capacity:
    return None
  if state.over or trainer.drained:
    return None
  for post in reversed(state.fleet.in_order("train")):
    if post.cell.kind == "trainer":
      continue
    if post.cell.name != state.fleet.core:
      return post.cell.name
    lacks = len(trainer.claims) < law.batch
    if lacks and not state.fleet.capacity:
      return post.cell.name
  return None


def _switch(state: State, name: str, role: str) -> moves.Step:
  """Asks for a transfer; what the cell runs is moved before."""
  post = state.fleet.posts[name]
  ticket = state.tickets + 1
  if role == "rollout":
    action = Switch(name, "rollout", ticket)
    fleet = state.fleet.put(name, role="to_rollout")
    actions: tuple[Action, ...] = ()
  else:
    state, actions = moves.vacate(state, name)
    until = state.law.burst_end(state.trainer.version, state.plan.steps)
    fleet = state.fleet.put(name, role="to_train", until=until)
    hosted = state.fleet.hosted
    action = Switch(name, "train", ticket) if hosted else Rehost(name, ticket)
  transfer = Transfer(action, before=post.role)
  state = state.but(fleet=fleet, transfer=transfer, tickets=ticket)
  return state, (*actions, action)


def _trainable(state: State) -> bool:
  """Whether there is something to train on, or to apply."""
  trainer = state.trainer
  applies = trainer.drained and state.fleet.core_trains
  return bool(trainer.claims) and not applies


def rehost(state: State) -> moves.Step:
  """A lost core's state goes to a cell that serves nobody, if there is one.

  A trainer that is up again, or the first satellite in training. Otherwise the
  next cell that leaves rollout becomes the core.
  """
  if state.transfer or state.fleet.hosted or state.over:
    return state, ()
  for post in state.fleet.in_order(None):
    trainer = post.cell.kind == "trainer" and post.back
    if trainer or post.role == "train":
      return _switch(state, post.cell.name, "train")
  return state, ()


def leave(state: State) -> moves.Step:
  """The next cell in order leaves rollout for training, if the policy lets it.

  The waterlevel: iff w ≤ C_R − C_e and there is something to train on.
  """
  if state.transfer or state.over or not _trainable(state):
    return state, ()
  movable = (p for p in state.fleet.in_order("rollout") if p.cell.borrows)
  post = next(movable, None)
  if post is None:
    return state, ()
  name = post.cell.name
  if not state.plan.policy.leaves(state, name):
    return state, ()
  load = state.work.load.get(name, 0)
  if len(moves.free_slots(state, load, without=name)) < load:
    return state, ()
  return _switch(state, name, "train")


def stop(state: State) -> moves.Step:
  """The run ends when its weights are out and borrowed cells are back."""
  if not state.over or state.transfer or state.stopped:
    return state, ()
  if state.trainer.published < state.plan.steps:
    return state, ()
  if any(p.cell.borrows for p in state.fleet.in_order("train")):
    return state, ()
  return state.but(phase="stopped"), (Stop(),)


#: In the order in which they are applied.
RULES = (
  drop_stale,
  apply,
  publish,
  resizing.resize,
  drop_flat,
  replenish,
  consume,
  resizing.clear_lent,
  start,
  bring_back,
  rehost,
  leave,
  stop,
)
