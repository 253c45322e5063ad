"""The task sampler: every task once an epoch, in an order of its own.

The state is two integers, so that a checkpoint holds it and a resumed run
draws what an uninterrupted one would.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class SamplerState:
  """Where the sampler stands: `position` tasks of `epoch` are drawn."""

  epoch: int = 0
  position: int = 0


def order(num_tasks: int, seed: int, epoch: int) -> np.ndarray:
  """Returns the order of an epoch: a permutation of range(num_tasks)."""
  bits = np.random.Philox(key=np.array([seed, epoch], np.uint64))
  return np.random.Generator(bits).permutation(num_tasks)


def draw(
  state: SamplerState, n: int, *, num_tasks: int, seed: int
) -> tuple[SamplerState, list[int]]:
  """Draws the next n task indices.

  Args:
    state: where the sampler stands.
    n: how many; more than num_tasks go on into the next epochs.
    num_tasks: size of the task set, positive.
    seed: of the run, not negative.

  Returns:
    The new state, and the indices.
  """
  if num_tasks < 1:
    raise ValueError(f"num_tasks must be positive, got {num_tasks}")
  epoch, position, out = state.epoch, state.position, []
  while len(out) < n:
    if position >= num_tasks:
      epoch, position = epoch + 1, 0
    take = min(n - len(out), num_tasks - position)
    indices = order(num_tasks, seed, epoch)[position : position + take]
    out.extend(int(i) for i in indices)
    position += take
  return SamplerState(epoch, position), out
