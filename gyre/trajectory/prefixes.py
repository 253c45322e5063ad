"""Which earlier sequence of token ids shares the longest prefix with a new one.

A radix tree that remembers who brought each run of tokens and who ends where.
Finding and adding cost one comparison with what is shared and a copy of what
is new, so that n sequences which repeat their history take time linear in
their tokens and memory linear in the different ones.
"""

from __future__ import annotations

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


class _Run:
  """Tokens below one place of the tree.

  Attributes:
    ids: int32.
    owner: the sequence that brought them.
    below: the runs that follow, by their first id.
    whole: the sequences that end at the end of this run.
  """

  __slots__ = ("below", "ids", "owner", "whole")

  def __init__(self, ids: np.ndarray, owner: int):
    self.ids, self.owner = ids, owner
    self.below: dict[int, _Run] = {}
    self.whole: list[int] = []


class Prefixes:
  """Sequences of token ids, int32 [L] each, by their common prefixes."""

  def __init__(self) -> None:
    self._root = _Run(np.zeros(0, np.int32), -1)

  def _walk(self, ids: np.ndarray) -> tuple[_Run, int, int, list[int]]:
    """Follows `ids` down.

    Returns:
      The deepest run met, the tokens shared in it and in all, and the longest
      sequences that are whole prefixes.
    """
    run, done, n = self._root, 0, 0
    whole = run.whole
    while n == len(run.ids) and done < len(ids):
      below = run.below.get(int(ids[done]))
      if below is None:
        break
      run, n = below, common(below.ids, ids[done:])
      done += n
      if n == len(run.ids) and run.whole:
        whole = run.whole
    return run, n, done, whole

  def match(self, ids: np.ndarray) -> tuple[int | None, int]:
    """Finds the longest prefix that an added sequence shares.

    Returns:
      (owner of a sequence that has it, its length); (None, 0) if none has.
    """
    run, _, done, _ = self._walk(ids)
    return (run.owner if done else None), done

  def whole(self, ids: np.ndarray) -> tuple[int, ...]:
    """Owners of the longest added sequence that is a prefix of `ids`."""
    return tuple(self._walk(ids)[3])

  def add(self, owner: int, ids: np.ndarray) -> tuple[int | None, int]:
    """Adds a sequence; returns what `match` would have returned before.

    Args:
      owner: a number for it, as it is to be told.
      ids: int32 [L]; not kept.
    """
    run, n, done, _ = self._walk(ids)
    found = (run.owner if done else None), done
    if n < len(run.ids):
      lower = _Run(run.ids[n:], run.owner)
      lower.below, lower.whole = run.below, run.whole
      run.ids, run.whole = run.ids[:n], []
      run.below = {int(lower.ids[0]): lower}
    if done < len(ids):
      below = _Run(ids[done:].copy(), owner)
      run.below[int(ids[done])] = below
      run = below
    run.whole.append(owner)
    return found
