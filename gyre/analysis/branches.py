"""An execution's tree as branches: lines of tokens, and where each leaves.

A radix tree has a node wherever anything parts or ends. People read lines: at
a split one child goes on (the role of the highest rank, then the side that
more calls ended on, then the first), every other child starts a branch, and
each branch has a reason.
"""

from __future__ import annotations

import dataclasses
import string

import numpy as np

from gyre.analysis import reasons
from gyre.analysis.pieces import Pieces
from gyre.analysis.runs import RunError
from gyre.trajectory import select
from gyre.trajectory import tree as tree_lib
from gyre.types import Call, Execution

#: Of calls, the highest rank first, as a run has them unless told otherwise.
ROLES = select.ROLES


@dataclasses.dataclass(frozen=True, eq=False)
class Branch:
  """A line of tokens.

  Attributes:
    name: "A", "B", … by first call.
    roles: of the calls that end on it, in order of first appearance.
    parent: name of the branch it leaves, or "" where nothing is shared.
    depth: tokens above its first.
    tokens: int64 [n], its own, as indices of unique tokens.
    calls: whose last token lies on it, as indices of the execution's calls.
    reason: why it leaves; None for the one line that starts the tree.
    behind: it is the older side: the later call is on the parent branch.
    older, newer: indices of the calls compared for the reason, or -1.
  """

  name: str
  roles: tuple[str, ...]
  parent: str
  depth: int
  tokens: np.ndarray
  calls: tuple[int, ...]
  reason: reasons.Reason | None = None
  behind: bool = False
  older: int = -1
  newer: int = -1

  @property
  def end(self) -> int:
    """Depth after its last token."""
    return self.depth + len(self.tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class History:
  """An execution, its tree, and what is known of each unique token.

  Attributes:
    execution: the record.
    branches: by first call.
    tree: of its calls.
    multiplicity: int32 [U], calls that sampled the token; 0 is context.
    call: int32 [U], the first call that sampled it, or -1.
    logprob: float32 [U], of that call; 0 for context.
    version: int32 [U], of that call; -1 for context.
    flat: tokens of all prompts and completions.
  """

  execution: Execution
  branches: tuple[Branch, ...]
  tree: tree_lib.Tree
  multiplicity: np.ndarray
  call: np.ndarray
  logprob: np.ndarray
  version: np.ndarray
  flat: int

  def branch(self, name: str) -> Branch:
    """Returns the branch of that name."""
    return next(b for b in self.branches if b.name == name)


def letters(index: int) -> str:
  """Returns the index-th of A … Z, AA, AB, …"""
  out = ""
  index += 1
  while index:
    index, digit = divmod(index - 1, 26)
    out = string.ascii_uppercase[digit] + out
  return out


def _rank(role: str) -> int:
  return ROLES.index(role) if role in ROLES else len(ROLES)


def _by_node(parent: np.ndarray, leaf: np.ndarray) -> list[list[int]]:
  """For each node, the calls that end in it or below, ascending."""
  out: list[list[int]] = [[] for _ in range(len(parent))]
  for call, node in enumerate(leaf.tolist()):
    while node >= 0:
      out[node].append(call)
      node = int(parent[node])
  return out


@dataclasses.dataclass
class _Line:
  """A branch being made: its nodes from the top, and its rivals."""

  nodes: list[int]
  parent: int
  rivals: list[int]


def _lines(
  parent: np.ndarray, below: list[list[int]], calls: tuple[Call, ...]
) -> list[_Line]:
  """Cuts the tree into lines; a line's parent is an index of the result."""
  children: dict[int, list[int]] = {}
  for node, above in enumerate(parent.tolist()):
    children.setdefault(above, []).append(node)

  def preference(node: int) -> tuple[int, int, int]:
    rank = min((_rank(calls[c].role) for c in below[node]), default=len(ROLES))
    return rank, -len(below[node]), below[node][0] if below[node] else -1

  lines: list[_Line] = []
  # Node of a line's start, its line's parent, the other children there.
  todo: list[tuple[int, int, list[int]]] = []

  def split(nodes: list[int], line: int) -> int | None:
    best = min(nodes, key=preference)
    for node in nodes:
      if node != best:
        todo.append((node, line, [n for n in nodes if n != node]))
    return best

  def follow(node: int, above: int, rivals: list[int]) -> None:
    line = _Line([node], above, rivals)
    lines.append(line)
    number = len(lines) - 1
    while (below_it := children.get(line.nodes[-1])) is not None:
      line.nodes.append(split(below_it, number))

  roots = children.get(-1, [])
  if roots:
    follow(split(roots, -1), -1, [])
  while todo:
    follow(*todo.pop())
  return lines


def _rivalry(
  mine: list[int], theirs: list[int], calls: tuple[Call, ...]
) -> tuple[int, int]:
  """(older, newer) call of two sides of a split: what opened the later one."""
  if min(mine) > min(theirs):
    late, early = min(mine), theirs
  else:
    late, early = min(theirs), mine
  before = [c for c in early if c < late]
  hinted = [c for c in before if calls[c].call_id == calls[late].parent_hint]
  return (hinted or before)[-1], late


def _tokens(tree: tree_lib.Tree, nodes: list[int]) -> np.ndarray:
  parts = [np.arange(tree.start[n], tree.stop[n]) for n in nodes]
  return np.concatenate(parts).astype(np.int64)


def _branches(
  tree: tree_lib.Tree,
  leaf: np.ndarray,
  execution: Execution,
  pieces: Pieces,
) -> tuple[Branch, ...]:
  """The lines of the tree, named by first call."""
  calls = execution.calls
  parent = np.asarray(tree.parent)
  below = _by_node(parent, leaf)
  lines = _lines(parent, below, calls)
  order = sorted(
    range(len(lines)),
    key=lambda i: (
      below[lines[i].nodes[0]][0],
      int(tree.depth[lines[i].nodes[0]]),
    ),
  )
  names = {line: letters(i) for i, line in enumerate(order)}
  out = []
  for i in order:
    line = lines[i]
    here = set(line.nodes)
    ends = tuple(c for c, node in enumerate(leaf.tolist()) if node in here)
    depth = int(tree.depth[line.nodes[0]])
    branch = Branch(
      name=names[i],
      roles=tuple(dict.fromkeys(calls[c].role for c in ends)),
      parent=names.get(line.parent, ""),
      depth=depth,
      tokens=_tokens(tree, line.nodes),
      calls=ends,
    )
    if line.rivals:
      mine = below[line.nodes[0]]
      theirs = sorted(c for n in line.rivals for c in below[n])
      older, newer = _rivalry(mine, theirs, calls)
      reason = reasons.explain(
        calls[older], calls[newer], depth, calls=calls, pieces=pieces
      )
      branch = dataclasses.replace(
        branch,
        reason=reason,
        behind=older in mine,
        older=older,
        newer=newer,
      )
    out.append(branch)
  return tuple(out)


def build(execution: Execution) -> tree_lib.Tree:
  """Returns an execution's tree.

  Raises:
    RunError: its calls make none: two of one name, or an empty prompt.
  """
  try:
    return tree_lib.build(execution.calls)
  except ValueError as error:
    raise RunError(str(error)) from None


def history(execution: Execution, pieces: Pieces | None = None) -> History:
  """Builds an execution's tree and reads it as branches.

  Args:
    execution: any, also one without calls.
    pieces: reads ids for the reasons; default none.

  Raises:
    RunError: its calls make no tree.
  """
  calls = execution.calls
  tree = build(execution)
  index = {call_id: i for i, call_id in enumerate(tree.call_ids)}
  where = np.asarray(tree.leaf_of_call, np.int64)
  leaf = np.array([where[index[c.call_id]] for c in calls], np.int64)
  n = len(tree.ids)
  multiplicity = np.zeros(n, np.int32)
  first = np.full(n, -1, np.int32)
  logprob = np.zeros(n, np.float32)
  version = np.full(n, -1, np.int32)
  for i, call in enumerate(calls):
    path = tree.completion(index[call.call_id])
    multiplicity[path] += 1
    new = first[path] < 0
    first[path[new]] = i
    logprob[path[new]] = call.logprobs[new]
    version[path[new]] = call.versions[new]
  return History(
    execution=execution,
    branches=_branches(tree, leaf, execution, pieces or Pieces()),
    tree=tree,
    multiplicity=multiplicity,
    call=first,
    logprob=logprob,
    version=version,
    flat=sum(len(c.prompt_ids) + len(c.completion_ids) for c in calls),
  )
