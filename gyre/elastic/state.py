"""The state of the scheduler: everything that a decision depends on."""

from __future__ import annotations

import dataclasses
from typing import Literal

from gyre.elastic import cells, dispatch, placement, policies
from gyre.elastic.messages import Publish, Rehost, Resize, Switch
from gyre.elastic.placement import Execution


@dataclasses.dataclass(frozen=True)
class Trainer:
  """How far training is.

  Attributes:
    version: v_t, updates applied.
    published: the version that engines serve.
    claims: groups consumed for update version + 1, in order.
    drained: all of them are trained.
    applying: the optimizer step is asked for.
    asked: it was, if perhaps of a cell that died since.
    replaced: flat groups dropped instead of being consumed for it.
  """

  version: int = 0
  published: int = 0
  claims: tuple[int, ...] = ()
  drained: bool = False
  applying: bool = False
  asked: bool = False
  replaced: int = 0


@dataclasses.dataclass(frozen=True)
class Transfer:
  """The one action under way of those that come one after the other.

  Attributes:
    action: what was asked for.
    before: the role of its cell before, to which a failure returns.
  """

  action: Switch | Rehost | Resize | Publish
  before: cells.Role | None = None


@dataclasses.dataclass(frozen=True)
class Resumed:
  """What a stored run knows, to go on from.

  Attributes:
    version: the trainer's, of the newest commit.
    groups: (number, v_d) of each group admitted and not in a commit, in order
      of admission; groups consumed for an update that was not committed too.
    finished: (execution, scored) of those groups' ended executions.
    flat: numbers of those groups that are whole, with equal rewards.
    consumed: numbers in commits, in any order. They must be B an update.
    dropped: numbers of dropped groups, whose numbers are not used again.
    published: the version that the engines serve at the beginning: `version`,
      or the end of the last burst or of the one before; None for the last's.
  """

  version: int
  groups: tuple[tuple[int, int], ...] = ()
  finished: tuple[tuple[Execution, bool], ...] = ()
  flat: tuple[int, ...] = ()
  consumed: tuple[int, ...] = ()
  dropped: tuple[int, ...] = ()
  published: int | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
  """What does not change in a run.

  Attributes:
    layout: the cells of the run.
    law: of dispatch.
    policy: the free choices.
    steps: updates of the run.
    streaming: groups are consumed as soon as they are whole and eligible; else
      B at once, and a burst begins when all its groups are ready.
    endless: groups are admitted as if the run had no end; else no more than
      its updates consume.
    resample: flat groups are replaced, up to this many times B an update.
  """

  layout: cells.Layout
  law: dispatch.Law
  policy: policies.Policy
  steps: int
  streaming: bool = True
  endless: bool = False
  resample: int = 0


@dataclasses.dataclass(frozen=True)
class State:
  """Kept, compared and stored like a value; mappings are never changed.

  Attributes:
    plan: what does not change.
    fleet: the cells' roles.
    queue: unconsumed groups.
    work: unfinished executions.
    trainer: how far training is.
    transfer: what is under way, or None.
    next_group: number of the next group.
    tickets: transfers asked for.
    wanted: devices that the core should train on; None: as in the layout.
    phase: "new" before Begin, "stopped" after Stop.
  """

  plan: Plan
  fleet: cells.Fleet
  queue: dispatch.Queue
  work: placement.Work
  trainer: Trainer = Trainer()
  transfer: Transfer | None = None
  next_group: int = 0
  tickets: int = 0
  wanted: int | None = None
  phase: Literal["new", "running", "stopped"] = "new"

  @property
  def law(self) -> dispatch.Law:
    """The dispatch law."""
    return self.plan.law

  @property
  def stopped(self) -> bool:
    """Whether Stop was asked for."""
    return self.phase == "stopped"

  @property
  def over(self) -> bool:
    """Every update is applied."""
    return self.trainer.version >= self.plan.steps

  @property
  def boundary(self) -> int:
    """The version at the end of the last burst that is over."""
    version = self.trainer.version
    return version if self.over else version - version % self.law.mu

  @property
  def publishing(self) -> bool:
    """Whether weights are going out."""
    return self.transfer is not None and self.transfer.before is None

  def but(self, **changes) -> State:
    """With some fields changed."""
    return dataclasses.replace(self, **changes)
