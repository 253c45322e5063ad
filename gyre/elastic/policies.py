"""What a scheduler may choose freely, from what events have told.

A policy sees the state, which holds what events told; never the work that is
left. Whatever it chooses, E[d] and the maximum staleness are the law's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from gyre.elastic.state import State


@dataclasses.dataclass(frozen=True)
class Policy:
  """The free choices.

  Attributes:
    name: as in the configuration.
    leaves: (state, cell name) -> whether that cell, the next in order and in
      rollout, leaves for training now. Only asked when there is something to
      train on, and heard only if what it runs fits the free slots of others.
    endless: whether Q_b is kept full at the last boundaries too.
    deadlines: whether the maximum staleness is kept by the groups' deadlines
      (`Queue.in_time`) instead of a window.
  """

  name: str
  leaves: Callable[[State, str], bool]
  endless: bool = False
  deadlines: bool = False


def fits(state: State, cell: str) -> bool:
  """w ≤ C_R − C_e: all unfinished work fits what remains without a cell."""
  remaining = state.fleet.capacity - state.fleet.posts[cell].cell.slots
  return state.work.unfinished <= remaining


WATERLEVEL = Policy("waterlevel", leaves=fits)

#: Dispatch does not thin out at the end of a run: the last bursts too choose
#: their groups among Q_b, so that they wait for no straggler. What is then
#: unconsumed is as much as at any boundary.
STEADY = Policy("steady", leaves=fits, endless=True)

#: And the maximum staleness costs nothing: a window holds back whatever is
#: far from the oldest group; a deadline only what takes a late group's place.
DEADLINE = Policy("deadline", leaves=fits, endless=True, deadlines=True)

POLICIES = {policy.name: policy for policy in (WATERLEVEL, STEADY, DEADLINE)}
