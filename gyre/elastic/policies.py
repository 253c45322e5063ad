"""What a scheduler may choose freely, from what events have told.

A policy sees the state, which holds times, counts, ids and the lengths of
what finished; never the work that is left. Whatever it chooses, E[d] and the
maximum staleness are the law's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from gyre.elastic.scheduler import State


@dataclasses.dataclass(frozen=True)
class Policy:
  """The free choices.

  Attributes:
    name: as in the configuration.
    leaves: (state, cell name) -> whether that cell, the next in order and in
      rollout, leaves for training now. Only asked when there is something to
      train on and what runs on it fits the free slots of the others.
  """

  name: str
  leaves: Callable[[State, str], bool]


def fits(state: State, cell: str) -> bool:
  """w ≤ C_R − C_e: all unfinished work fits what remains without a cell."""
  remaining = state.fleet.capacity - state.fleet.posts[cell].cell.slots
  return state.work.unfinished <= remaining


WATERLEVEL = Policy("waterlevel", leaves=fits)

POLICIES = {policy.name: policy for policy in (WATERLEVEL,)}
