"""The task sampler: every task once an epoch, in an order of its own.

The task of a group follows from the group's number alone, so that a resumed
run draws what an uninterrupted one would.
"""

from __future__ import annotations

import functools

import numpy as np


@functools.lru_cache(maxsize=4)
def order(num_tasks: int, seed: int, epoch: int) -> np.ndarray:
  """Returns the order of an epoch: a permutation of range(num_tasks)."""
  bits = np.random.Philox(key=np.array([seed, epoch], np.uint64))
  return np.random.Generator(bits).permutation(num_tasks)


def task_of(number: int, *, num_tasks: int, seed: int) -> int:
  """Returns the index of a group's task.

  Args:
    number: of the group, in order of dispatch.
    num_tasks: size of the task set, positive.
    seed: of the run, not negative.
  """
  if num_tasks < 1:
    raise ValueError(f"num_tasks must be positive, got {num_tasks}")
  epoch, position = divmod(number, num_tasks)
  return int(order(num_tasks, seed, epoch)[position])
