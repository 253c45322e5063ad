"""A radix tree over token ids: who shares which prefix with whom.

The one such tree of gyre: of an execution's calls (trajectory/tree.py), of the
calls that a new one is stored by reference to (store/rollouts.py), of imported
turns (trajectory/align.py), and of a group's samples in a row
(learner/packing.py). It remembers who brought each run of tokens and who ends
where. Finding and adding cost one comparison with what is shared and one copy,
or view, of what is new, so that n sequences which repeat their history take
time linear in their tokens and memory linear in the different ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_BLOCK = 4096


def common(a: np.ndarray, b: np.ndarray) -> int:
  """Length of the longest common prefix, in time linear in it."""
  n, done, block = min(len(a), len(b)), 0, _BLOCK
  while done < n:
    end = min(done + block, n)
    differs = a[done:end] != b[done:end]
    first = int(differs.argmax())
    if differs[first]:
      return done + first
    done, block = end, 2 * block
  return n


class Run:
  """Tokens below one place of the tree.

  Attributes:
    ids: int32.
    depth: tokens above.
    owner: the sequence that brought them.
    below: the runs that follow, by their first id, in order of their coming.
    ends: the sequences that end at the end of this run.
  """

  __slots__ = ("below", "depth", "ends", "ids", "owner")

  def __init__(self, ids: np.ndarray, depth: int, owner: int):
    self.ids, self.depth, self.owner = ids, depth, owner
    self.below: dict[int, Run] = {}
    self.ends: list[int] = []


class _Place(NamedTuple):
  """How far a sequence leads down.

  Attributes:
    run: the deepest met.
    inside, shared: tokens shared in it and in all.
    whole: the longest sequences that are whole prefixes.
    rest: what follows of the sequence, without empty arrays.
  """

  run: Run
  inside: int
  shared: int
  whole: list[int]
  rest: list[np.ndarray]


class Prefixes:
  """Sequences of token ids by their common prefixes.

  A sequence is given as one or more arrays, int32, end to end.

  Attributes:
    root: an empty run.
    num_tokens: different ones, in all runs.
  """

  def __init__(self, views: bool = False) -> None:
    """Makes an empty tree.

    Args:
      views: keep views of what is added, a run an array; otherwise it is
        copied, and runs end only where sequences part or end.
    """
    self.root = Run(np.zeros(0, np.int32), 0, -1)
    self.num_tokens = 0
    self._views = views

  def _walk(self, sequence: tuple[np.ndarray, ...]) -> _Place:
    run, inside, shared = self.root, 0, 0
    whole = run.ends
    for k, ids in enumerate(sequence):
      at, length = 0, len(ids)
      while at < length:
        if inside == len(run.ids):
          below = run.below.get(int(ids[at]))
          if below is None:
            break
          run, inside = below, 0
        n = common(run.ids[inside:], ids[at:])
        inside, at, shared = inside + n, at + n, shared + n
        if inside < len(run.ids):
          break
        whole = run.ends or whole
      if at < length:
        rest = [ids[at:], *(x for x in sequence[k + 1 :] if len(x))]
        return _Place(run, inside, shared, whole, rest)
    return _Place(run, inside, shared, whole, [])

  def match(self, *sequence: np.ndarray) -> tuple[int | None, int]:
    """Finds the longest prefix that an added sequence shares.

    Returns:
      (owner of a sequence that has it, its length); (None, 0) if none has.
    """
    place = self._walk(sequence)
    return (place.run.owner if place.shared else None), place.shared

  def whole(self, *sequence: np.ndarray) -> tuple[int, ...]:
    """Owners of the longest added sequence that is a prefix of this one."""
    return tuple(self._walk(sequence).whole)

  def add(self, owner: int, *sequence: np.ndarray) -> tuple[int | None, int]:
    """Adds a sequence; returns what `match` would have returned before.

    Args:
      owner: a number for it, as it is to be told.
      *sequence: int32 each; kept only in a tree of views.
    """
    run, inside, shared, _, rest = self._walk(sequence)
    found = (run.owner if shared else None), shared
    if inside < len(run.ids):
      lower = Run(run.ids[inside:], run.depth + inside, run.owner)
      lower.below, lower.ends = run.below, run.ends
      run.ids, run.ends = run.ids[:inside], []
      run.below = {int(lower.ids[0]): lower}
    if rest and not self._views:
      rest = [np.concatenate(rest)]
    for ids in rest:
      below = run.below[int(ids[0])] = Run(ids, shared, owner)
      run, shared = below, shared + len(ids)
      self.num_tokens += len(ids)
    run.ends.append(owner)
    return found

  def depth_first(self, *, by_id: bool = True) -> tuple[list[Run], list[int]]:
    """Lists the runs, without the root, a parent before those below it.

    Args:
      by_id: siblings in order of their first id, so that the list is the same
        whatever the order of adding; otherwise in order of their coming.

    Returns:
      The runs, and of each the number of the run above it, -1 for the root.
    """
    runs: list[Run] = []
    parents: list[int] = []
    stack = [(self.root, -1)]
    while stack:
      run, parent = stack.pop()
      number = -1
      if run is not self.root:
        number = len(runs)
        runs.append(run)
        parents.append(parent)
      below = list(run.below)
      if by_id:
        below.sort()
      stack.extend((run.below[first], number) for first in reversed(below))
    return runs, parents
