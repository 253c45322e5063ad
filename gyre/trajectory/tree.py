"""Radix tree over the token ids of one execution's calls.

Every call is a path from the root: its prompt, then its completion. A token
that several calls have in common, under the same context, lies once, with
every sample that was drawn of it. Nodes end where paths part and where calls
end, siblings are in order of their first id and calls in order of their name,
so the tree is the same whatever the order of insertion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from gyre.trajectory.prefixes import Prefixes
from gyre.types import Call


class Leaf(NamedTuple):
  """A node without children, and the role of the first call that ends there."""

  node: int
  role: str


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
  """Nodes, tokens, samples and calls of one execution; see `build`.

  Nodes (radix edges) are numbered in depth-first order, so that a parent comes
  before its children and a subtree is a range. Token t of the tree is ids[t];
  along a path the indices grow. The samples of token t are sample_start[t] to
  sample_start[t + 1], in order of their calls; those of call c along its
  completion are by_call[call_start[c] : call_start[c + 1]]. A sample at depth
  d of a path has row d - 1 of its call's routing file.

  Attributes:
    parent: int32 [N], -1 for a node that hangs from the root.
    start, stop: int64 [N], the node's tokens.
    depth: int64 [N], tokens above the node.
    ids: int32 [U], unique tokens, node by node.
    sample_start: int64 [U + 1].
    sample_call: int32 [n], number of the call.
    logprobs: float32 [n]; versions: int32 [n].
    call_ids, roles, routing: of each call; [C].
    prompt_len: int64 [C].
    leaf_of_call: int32 [C], the node whose end is the call's; -1 for a call
      without any token.
    call_start: int64 [C + 1]; by_call: int64 [n].
  """

  parent: np.ndarray
  start: np.ndarray
  stop: np.ndarray
  depth: np.ndarray
  ids: np.ndarray
  sample_start: np.ndarray
  sample_call: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  call_ids: tuple[str, ...]
  roles: tuple[str, ...]
  routing: tuple[str | None, ...]
  prompt_len: np.ndarray
  leaf_of_call: np.ndarray
  call_start: np.ndarray
  by_call: np.ndarray

  def nodes(self, node: int) -> list[int]:
    """Returns the nodes from the root to `node`; none for -1."""
    out = []
    while node >= 0:
      out.append(node)
      node = int(self.parent[node])
    return out[::-1]

  def path(self, node: int) -> np.ndarray:
    """Returns the token indices from the root to the end of `node`, int64."""
    return _ranges([(self.start[v], self.stop[v]) for v in self.nodes(node)])

  def completion(self, call: int) -> np.ndarray:
    """Returns the token indices that call number `call` sampled, int64."""
    n = int(self.call_start[call + 1] - self.call_start[call])
    node, parts = int(self.leaf_of_call[call]), []
    while n:
      stop = int(self.stop[node])
      first = max(int(self.start[node]), stop - n)
      parts.append((first, stop))
      n -= stop - first
      node = int(self.parent[node])
    return _ranges(parts[::-1])

  def read(
    self, call_id: str
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns a call's prompt ids, completion ids, logprobs and versions.

    Raises:
      KeyError: no such call.
    """
    try:
      call = self.call_ids.index(call_id)
    except ValueError:
      raise KeyError(
        f"no call {call_id!r} among {len(self.call_ids)} calls"
      ) from None
    ids = self.ids[self.path(int(self.leaf_of_call[call]))]
    samples = self.by_call[self.call_start[call] : self.call_start[call + 1]]
    n = int(self.prompt_len[call])
    return ids[:n], ids[n:], self.logprobs[samples], self.versions[samples]

  def leaves(self) -> list[Leaf]:
    """Returns the nodes without children, in depth-first order."""
    inner = np.zeros(len(self.parent), bool)
    inner[self.parent[self.parent >= 0]] = True
    role: dict[int, str] = {}
    for node, name in zip(self.leaf_of_call.tolist(), self.roles, strict=True):
      role.setdefault(node, name)
    return [Leaf(v, role[v]) for v in np.flatnonzero(~inner).tolist()]

  def multiplicity(self) -> np.ndarray:
    """Returns how often each token was sampled, int64 [U]."""
    return np.diff(self.sample_start)

  def trainable(self) -> np.ndarray:
    """Returns which tokens were sampled at least once, bool [U]."""
    return self.multiplicity() > 0

  def subtree_end(self) -> np.ndarray:
    """Returns the node after the last one below each node, int64 [N]."""
    end = np.arange(1, len(self.parent) + 1)
    for v in range(len(self.parent) - 1, 0, -1):
      p = self.parent[v]
      if p >= 0 and end[v] > end[p]:
        end[p] = end[v]
    return end


def _ranges(parts: list[tuple[int, int]]) -> np.ndarray:
  if not parts:
    return np.zeros(0, np.int64)
  return np.concatenate([np.arange(a, b) for a, b in parts])


@dataclasses.dataclass(frozen=True)
class _Entered:
  """What stays of a call once its tokens are in the tree."""

  call_id: str
  role: str
  routing: str | None
  prompt_len: int
  logprobs: np.ndarray
  versions: np.ndarray
  number: int


def _concatenated(parts: list[np.ndarray], dtype: type) -> np.ndarray:
  return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


def _offsets(lengths: list[int]) -> np.ndarray:
  return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(int)


def build(calls: Iterable[Call]) -> Tree:
  """Builds the tree of one execution's calls.

  Each call costs one comparison with what the tree holds already and the
  insertion of what is new; nothing keeps a reference to its prompt, so that
  calls may come from a generator.

  Args:
    calls: in any order. They are numbered by call_id, shorter names first, so
      that "10" comes after "9": names are in order of start.

  Returns:
    The tree.

  Raises:
    ValueError: a call sampled from an empty prompt (its first token has no
      predictor), or two calls of one name.
  """
  paths = Prefixes()
  entered: dict[str, _Entered] = {}
  for call in calls:
    if len(call.completion_ids) and not len(call.prompt_ids):
      raise ValueError(
        f"call {call.call_id} of execution {call.execution_id} has an empty "
        f"prompt but {len(call.completion_ids)} completion ids"
      )
    if call.call_id in entered:
      raise ValueError(
        f"call {call.call_id} of execution {call.execution_id} is there twice"
      )
    number = len(entered)
    paths.add(number, call.prompt_ids, call.completion_ids)
    entered[call.call_id] = _Entered(
      call.call_id,
      call.role,
      call.routing,
      len(call.prompt_ids),
      call.logprobs,
      call.versions,
      number,
    )
  order = sorted(entered.values(), key=lambda c: (len(c.call_id), c.call_id))
  return _freeze(paths, order)


def _freeze(paths: Prefixes, calls: list[_Entered]) -> Tree:
  runs, parents = paths.depth_first()
  bounds = _offsets([len(run.ids) for run in runs])
  ends = {number: v for v, run in enumerate(runs) for number in run.ends}
  call_start = _offsets([len(c.logprobs) for c in calls])
  tree = Tree(
    parent=np.asarray(parents, np.int32),
    start=bounds[:-1],
    stop=bounds[1:],
    depth=np.asarray([run.depth for run in runs], np.int64),
    ids=_concatenated([run.ids for run in runs], np.int32),
    sample_start=np.zeros(bounds[-1] + 1, np.int64),
    sample_call=np.zeros(0, np.int32),
    logprobs=_concatenated([c.logprobs for c in calls], np.float32),
    versions=_concatenated([c.versions for c in calls], np.int32),
    call_ids=tuple(c.call_id for c in calls),
    roles=tuple(c.role for c in calls),
    routing=tuple(c.routing for c in calls),
    prompt_len=np.asarray([c.prompt_len for c in calls], np.int64),
    leaf_of_call=np.asarray([ends.get(c.number, -1) for c in calls], np.int32),
    call_start=call_start,
    by_call=np.zeros(0, np.int64),
  )
  return _with_samples(tree)


def _with_samples(tree: Tree) -> Tree:
  """Sorts the samples, given call by call, by the token that they are of."""
  calls = range(len(tree.call_ids))
  tokens = _concatenated([tree.completion(c) for c in calls], np.int64)
  order = np.argsort(tokens, kind="stable")
  by_call = np.empty_like(order)
  by_call[order] = np.arange(len(order))
  counts = np.bincount(tokens, minlength=len(tree.ids))
  of_call = np.repeat(
    np.arange(len(calls), dtype=np.int32), np.diff(tree.call_start)
  )
  return dataclasses.replace(
    tree,
    sample_start=_offsets(counts),
    sample_call=of_call[order],
    logprobs=tree.logprobs[order],
    versions=tree.versions[order],
    by_call=by_call,
  )
