"""The queue of one update's micro-steps, which cells claim.

A micro-step is fixed when it is added: which groups it holds, in which order,
under which number. Cells take the next one whenever they are free, so faster
and earlier cells take more. A finished micro-step is inside its cell's sums
until those are handed over; a cell that dies before gives back everything
that it claimed since, finished or not. So each micro-step is inside exactly
one sum that counts, whatever the members did.
"""

from __future__ import annotations

import dataclasses
from typing import Any


class ClaimError(RuntimeError):
  """What was asked of the queue contradicts what it knows."""


@dataclasses.dataclass(frozen=True, eq=False)
class MicroStep:
  """One micro-step, as it was made.

  Attributes:
    update: number of the optimizer update that it belongs to.
    index: its place among the micro-steps of that update.
    batch: the packed rows.
    groups: ids of the groups that it holds samples of.
    extras: logprobs beside the batch that the first pass computed, or None.
  """

  update: int
  index: int
  batch: Any
  groups: tuple[str, ...] = ()
  extras: Any = None

  @property
  def key(self) -> tuple[int, int]:
    """(update, index), which names the micro-step."""
    return self.update, self.index


class Claims:
  """Micro-steps of one update: waiting, claimed, finished, handed over.

  Not thread-safe: one controller owns it.

  Attributes:
    update: number of the update.
    passes: passes over the micro-steps begun; the first is 1.
  """

  def __init__(self, update: int):
    """Starts empty.

    Args:
      update: number of the update.
    """
    self.update, self.passes = update, 1
    self._steps: list[MicroStep] = []
    self._waiting: list[int] = []
    self._claimed: dict[str, list[int]] = {}
    self._finished: set[int] = set()
    self._handed_over: set[int] = set()
    self._sealed = False

  def __len__(self) -> int:
    return len(self._steps)

  @property
  def steps(self) -> tuple[MicroStep, ...]:
    """Every micro-step, in the order in which they were made."""
    return tuple(self._steps)

  @property
  def waiting(self) -> int:
    """How many no cell holds."""
    return len(self._waiting)

  @property
  def drained(self) -> bool:
    """Whether nothing more comes and all that came is finished."""
    return self._sealed and len(self._finished) == len(self._steps)

  def add(self, batch: Any, groups: tuple[str, ...] = ()) -> MicroStep:
    """Makes a micro-step; cells may claim it at once.

    Raises:
      ClaimError: the queue is sealed.
    """
    if self._sealed:
      raise ClaimError(
        f"update {self.update} is sealed with {len(self._steps)} micro-steps"
      )
    made = MicroStep(self.update, len(self._steps), batch, tuple(groups))
    self._steps.append(made)
    self._waiting.append(made.index)
    return made

  def seal(self) -> None:
    """Says that every micro-step of the update has been added."""
    self._sealed = True

  def claim(self, cell: str) -> MicroStep | None:
    """Gives a cell the first micro-step that nobody holds, if there is one."""
    if not self._waiting:
      return None
    index = self._waiting.pop(0)
    self._claimed.setdefault(cell, []).append(index)
    return self._steps[index]

  def done(self, cell: str, index: int, extras: Any = None) -> None:
    """Notes that a cell has added a micro-step to its sums.

    Args:
      cell: that claimed it.
      index: of the micro-step.
      extras: kept with the micro-step for later passes, unless None.

    Raises:
      ClaimError: the cell does not hold it (it was given back, for one), or
        has finished it before.
    """
    if index not in self._claimed.get(cell, ()) or index in self._finished:
      raise ClaimError(f"{cell} has not claimed micro-step {index}")
    self._finished.add(index)
    if extras is not None:
      made = dataclasses.replace(self._steps[index], extras=extras)
      self._steps[index] = made

  def finished(self, cell: str) -> tuple[int, ...]:
    """Indices inside the sums of a cell, in the order of its claims."""
    held = self._claimed.get(cell, ())
    return tuple(i for i in held if i in self._finished)

  def members(self) -> tuple[str, ...]:
    """Cells whose sums hold finished micro-steps, by name."""
    return tuple(sorted(c for c in self._claimed if self.finished(c)))

  def may_hand_over(self, cell: str) -> bool:
    """Whether a cell has sums, and nothing is left for it to add to them.

    Unless another cell dies and gives back what it claimed.
    """
    held = self._claimed.get(cell)
    nothing_left = self._sealed and not self._waiting
    return nothing_left and bool(held) and self._finished.issuperset(held)

  def hand_over(self, cell: str) -> tuple[int, ...]:
    """Notes that a cell's sums are with the core; a death loses them no more.

    Returns:
      Indices of the micro-steps that they hold.

    Raises:
      ClaimError: the cell still works on one.
    """
    held = self._claimed.get(cell, [])
    busy = [i for i in held if i not in self._finished]
    if busy:
      raise ClaimError(f"{cell} still works on micro-steps {busy}")
    self._claimed.pop(cell, None)
    self._handed_over.update(held)
    return tuple(held)

  def give_back(self, cell: str) -> tuple[int, ...]:
    """Returns all that a cell claimed and has not handed over to the queue.

    Its sums must be discarded.

    Returns:
      Indices, finished or not; they wait again, in their old order.
    """
    back = self._claimed.pop(cell, [])
    self._finished.difference_update(back)
    self._waiting = sorted([*self._waiting, *back])
    return tuple(back)

  def start_over(self) -> None:
    """Begins anew with the first pass, as when the core dies."""
    self.passes = 1
    self._return_all()

  def _return_all(self) -> None:
    self._claimed.clear()
    self._finished.clear()
    self._handed_over.clear()
    self._waiting = list(range(len(self._steps)))

  def next_pass(self) -> None:
    """Makes every micro-step wait again, for the later weights.

    Raises:
      ClaimError: the pass is not drained, or sums were not handed over.
    """
    if not self.drained or len(self._handed_over) != len(self._steps):
      raise ClaimError(
        f"pass {self.passes} of update {self.update}: "
        f"{len(self._handed_over)} of {len(self._steps)} micro-steps are "
        "handed over"
      )
    self._return_all()
    self.passes += 1
