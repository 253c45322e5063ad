"""How long executions take: drawn, or replayed from a recorded run.

The work of an execution is a function of (seed, group, index) alone, so that
the same execution has the same work under every design: common random numbers
take most of the spread out of a comparison.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

HOUR = 3600.0
#: An execution: its group's number in order of admission, its place in it.
ExecutionId = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Work:
  """What one execution needs.

  Attributes:
    seconds: time it would take on a pool where it runs at rate 1.
    scored: False: it ends without a score (a failed evaluation).
  """

  seconds: float
  scored: bool = True


class Workload(Protocol):
  """What the clock asks of a workload."""

  @property
  def timeout(self) -> float:
    """Wall seconds after which an execution is ended; inf: none."""
    ...

  def work(self, execution: ExecutionId) -> Work:
    """The work of an execution; the same at every call."""
    ...


class LogNormal:
  """Log-normal work with a correlation between the executions of a group.

    X = mean * exp(sigma*z - sigma^2/2),  z = sqrt(rho)*g + sqrt(1 - rho)*e

  with g shared by a group and e of its own, both standard normal. E[X] = mean;
  rho is the correlation of log X between two executions of a group.
  """

  def __init__(
    self,
    *,
    mean: float,
    sigma: float,
    correlation: float = 0.0,
    timeout: float = math.inf,
    group_size: int,
    seed: int = 0,
  ):
    """Sets the law; nothing is drawn before it is asked for.

    Args:
      mean: mean work [s].
      sigma: standard deviation of log X.
      correlation: rho, 0 to 1.
      timeout: wall timeout [s].
      group_size: N.
      seed: of the whole workload, non-negative.

    Raises:
      ValueError: a value is out of its range.
    """
    if not mean > 0:
      raise ValueError(f"mean work must be positive, got {mean}")
    if not sigma >= 0:
      raise ValueError(f"sigma must not be negative, got {sigma}")
    if not 0 <= correlation <= 1:
      raise ValueError(f"correlation must be from 0 to 1, got {correlation}")
    if not timeout > 0:
      raise ValueError(f"timeout must be positive, got {timeout}")
    self.mean, self.sigma, self.correlation = mean, sigma, correlation
    self.timeout, self.group_size, self.seed = timeout, group_size, seed
    self._drawn: dict[int, np.ndarray] = {}

  def _group(self, group: int) -> np.ndarray:
    if group not in self._drawn:
      key = np.array([self.seed, group], np.uint64)
      z = np.random.Generator(np.random.Philox(key=key)).standard_normal(
        1 + self.group_size
      )
      rho, sigma = self.correlation, self.sigma
      z = math.sqrt(rho) * z[0] + math.sqrt(1 - rho) * z[1:]
      self._drawn[group] = self.mean * np.exp(sigma * z - sigma**2 / 2)
    return self._drawn[group]

  def work(self, execution: ExecutionId) -> Work:
    """The work of an execution.

    Raises:
      ValueError: its index is not below the size of a group.
    """
    group, index = execution
    if not 0 <= index < self.group_size:
      raise ValueError(
        f"execution index {index} is not in a group of {self.group_size}"
      )
    return Work(float(self._group(group)[index]))


class Replay:
  """Given works, for instance those of a recorded run.

  Groups beyond the last given begin again at the first: another design may
  need a few more than the run had.
  """

  def __init__(
    self,
    groups: Mapping[int, tuple[Work, ...]],
    *,
    timeout: float = math.inf,
  ):
    """Takes the works of each group.

    Args:
      groups: number of the group -> its executions, 0, 1, ... without gaps.
      timeout: wall timeout [s].

    Raises:
      ValueError: no group, a gap between groups, groups of unequal size.
    """
    if sorted(groups) != list(range(len(groups))) or not groups:
      raise ValueError(
        f"groups must be numbered 0 .. n-1 with n >= 1, got {len(groups)} "
        f"groups up to {max(groups, default=None)}"
      )
    sizes = {len(works) for works in groups.values()}
    if len(sizes) != 1 or 0 in sizes:
      raise ValueError(f"groups must have one size, got {sorted(sizes)}")
    self.group_size = sizes.pop()
    self.timeout = timeout
    self._groups = [groups[i] for i in range(len(groups))]

  def work(self, execution: ExecutionId) -> Work:
    """The work of an execution."""
    group, index = execution
    return self._groups[group % len(self._groups)][index]
