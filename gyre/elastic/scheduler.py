"""decide(state, event) -> (state, actions): what every controller executes.

An event is first noted (the facts that it brings change the state), then the
rules (rules.py) are applied in their order until none asks for anything.
Each rule is a function of the state alone. Transfers are serial: of Switch,
Rehost, Resize and Publish one is under way at a time.
"""

from __future__ import annotations

from gyre.elastic import (
  cells,
  dispatch,
  moves,
  notes,
  placement,
  policies,
  resizing,
  rules,
)
from gyre.elastic.cells import Cell, Layout
from gyre.elastic.dispatch import Group, Law
from gyre.elastic.messages import (
  Action,
  Admit,
  Applied,
  Apply,
  Begin,
  CellDown,
  CellUp,
  Consume,
  Drained,
  Drop,
  Event,
  Finished,
  Migrate,
  Publish,
  Published,
  Rehost,
  Resize,
  ResizeAsked,
  Resized,
  ResizeFailed,
  Start,
  Stop,
  Switch,
  SwitchDone,
  SwitchFailed,
)
from gyre.elastic.placement import Execution
from gyre.elastic.state import Plan, Resumed, State, Trainer

__all__ = [
  "Action",
  "Admit",
  "Applied",
  "Apply",
  "Begin",
  "Cell",
  "CellDown",
  "CellUp",
  "Consume",
  "Drained",
  "Drop",
  "Event",
  "Execution",
  "Finished",
  "Layout",
  "Migrate",
  "Publish",
  "Published",
  "Rehost",
  "Resize",
  "ResizeAsked",
  "ResizeFailed",
  "Resized",
  "Resumed",
  "Start",
  "State",
  "Stop",
  "Switch",
  "SwitchDone",
  "SwitchFailed",
  "ask_resize",
  "begin",
  "decide",
]

ask_resize = resizing.ask


def begin(
  layout: Layout,
  law: Law,
  *,
  streaming: bool = True,
  policy: str | policies.Policy = "waterlevel",
  steps: int,
  endless: bool | None = None,
  resample: int = 0,
  resume: Resumed | None = None,
) -> State:
  """The state before `Begin`.

  Args:
    layout: the cells, in the order of leaving.
    law: the dispatch law.
    streaming: whether groups are consumed one by one as they become whole.
    policy: "waterlevel", another name in `policies.POLICIES`, or a policy.
    steps: updates of the run, numbered from 1.
    endless: whether groups are admitted that no update will consume; None: as
      the policy has it.
    resample: groups whose rewards are all equal are replaced, up to this many
      times B an update.
    resume: what a stored run knows; None for a new run.

  Raises:
    ValueError: for an unknown policy, one that can't keep the law, no steps,
      or a stored run that contradicts itself.
  """
  if steps < 1:
    raise ValueError(f"steps must be >= 1, got {steps}")
  if isinstance(policy, str):
    if policy not in policies.POLICIES:
      raise ValueError(
        f"policy {policy!r} is none of {sorted(policies.POLICIES)}"
      )
    policy = policies.POLICIES[policy]
  bounded = law.window is None and law.max_staleness is not None
  if policy.deadlines and not bounded:
    raise ValueError(
      f"policy {policy.name} with window {law.window} and max_staleness "
      f"{law.max_staleness}; it needs None and a number"
    )
  if endless is None:
    endless = policy.endless
  plan = Plan(layout, law, policy, steps, streaming, endless, resample)
  state = State(
    plan=plan,
    fleet=cells.fleet(layout),
    queue=dispatch.Queue(),
    work=placement.Work(),
  )
  return state if resume is None else _resumed(state, resume)


def decide(state: State, event: Event) -> moves.Step:
  """Notes an event and gives what is to be done.

  News that can't be (of an execution that is not unfinished, a transfer that
  is not under way, an update that is not the present one, a cell's earlier
  life) changes nothing. Nothing happens before Begin nor after Stop.
  """
  first = isinstance(event, Begin)
  if state.phase != ("new" if first else "running"):
    return state, ()
  state, actions = notes.NOTES[type(event)](state, event)
  asked = list(actions)
  moved = True
  while moved:
    moved = False
    for rule in rules.RULES:
      state, actions = rule(state)
      if actions:
        asked += actions
        moved = True
  return state, tuple(asked)


def _resumed(state: State, resume: Resumed) -> State:
  """The state in which a stored run stands."""
  law = state.law
  consumed = set(resume.consumed)
  if len(consumed) != resume.version * law.batch:
    raise ValueError(
      f"{len(consumed)} groups in commits at version {resume.version}; "
      f"batch {law.batch} makes it {resume.version * law.batch}"
    )
  twice = sorted(consumed & {number for number, _ in resume.groups})
  if twice:
    raise ValueError(f"groups {twice} are both in commits and unconsumed")
  boundary = state.but(trainer=Trainer(version=resume.version)).boundary
  published = boundary if resume.published is None else resume.published
  at_end = published % law.mu == 0 and 0 <= boundary - published <= law.mu
  if published != resume.version and not at_end:
    raise ValueError(
      f"published version {published} at version {resume.version} ends no "
      f"burst of {law.mu} updates, or one too long ago"
    )
  queue = dispatch.Queue()
  for number, version in sorted(resume.groups):
    queue = queue.admit(Group(number, version, law.group_size))
  ended, flat = dict(resume.finished), set(resume.flat)
  for (number, _), scored in ended.items():
    if number in queue.groups:
      queue = queue.ended(number, scored, flat=number in flat)
  members = [
    (number, i)
    for number in queue.groups
    for i in range(law.group_size)
    if (number, i) not in ended
  ]
  used = [*consumed, *resume.dropped, *queue.groups]
  return state.but(
    queue=queue,
    work=placement.Work().add(members),
    trainer=Trainer(version=resume.version, published=published),
    next_group=max(used, default=-1) + 1,
  )
