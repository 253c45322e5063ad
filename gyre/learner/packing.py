"""Samples -> packed rows: shared prefixes once, static shapes, linear time.

A group's samples form a radix tree over token ids; a row holds several trees
in depth-first order, so that a token that several samples share is computed
once. It is shared for compute, never for the loss: every trained token of
every sample has an entry of its own. Only tokens whose hidden state is needed
are kept: a sample's last trained token is a target and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from gyre.trajectory.prefixes import common
from gyre.types import Batch, Sample

jax.tree_util.register_dataclass(
  Batch,
  data_fields=[f.name for f in dataclasses.fields(Batch)],
  meta_fields=[],
)


@dataclasses.dataclass(frozen=True)
class Packed:
  """What `pack` made of a list of samples.

  Attributes:
    batches: micro-steps, numpy Batch each, of one shape.
    sample_keys: (execution_id, index among its samples) of sample number i.
    execution_ids: of execution number i.
    tokens_flat: tokens that training each sample by itself would compute.
    tokens_trained: tokens in the rows (shared ones once a tree).
    tokens_padded: R * S summed over micro-steps.
    num_entries: trained tokens, over all samples.
  """

  batches: tuple[Batch, ...]
  sample_keys: tuple[tuple[str, int], ...]
  execution_ids: tuple[str, ...]
  tokens_flat: int
  tokens_trained: int
  tokens_padded: int
  num_entries: int


def bucket(n: int, quantum: int = 64) -> int:
  """Rounds up to quantum * 2^k or quantum * 3 * 2^(k-1), two an octave."""
  size = quantum
  while size < n:
    if size % 2 == 0 and size * 3 // 2 >= n and size >= 2 * quantum:
      return size * 3 // 2
    size *= 2
  return size


class _Node:
  """A run of tokens with children; `start` and `end` once laid out."""

  __slots__ = ("children", "depth", "end", "ids", "start")

  def __init__(self, ids: np.ndarray, depth: int):
    self.ids, self.depth = ids, depth
    self.children: dict[int, _Node] = {}
    self.start = self.end = 0


def _compare(a: np.ndarray, b: np.ndarray) -> int:
  """Lexicographic: negative where `a` comes first, as a prefix of `b` does."""
  n = common(a, b)
  if n == min(len(a), len(b)):
    return len(a) - len(b)
  return int(a[n]) - int(b[n])


class _Tree:
  """Radix tree of one group's samples, or of a part of them."""

  def __init__(self):
    self.root = _Node(np.zeros(0, np.int32), 0)
    self.samples: list[int] = []
    self.num_tokens = 0
    self.num_entries = 0

  def _descend(self, ids: np.ndarray) -> tuple[_Node, int, int]:
    """(node reached, tokens of it that agree, tokens of ids consumed)."""
    node, inside, done = self.root, 0, 0
    while inside == len(node.ids) and done < len(ids):
      child = node.children.get(int(ids[done]))
      if child is None:
        break
      node, inside = child, common(child.ids, ids[done:])
      done += inside
    return node, inside, done

  def cost(self, ids: np.ndarray) -> int:
    """Tokens that inserting `ids` would add."""
    return len(ids) - self._descend(ids)[2]

  def insert(self, number: int, ids: np.ndarray, entries: int) -> None:
    node, inside, done = self._descend(ids)
    if done < len(ids):
      if inside < len(node.ids):
        tail = _Node(node.ids[inside:], node.depth + inside)
        tail.children = node.children
        node.ids, node.children = node.ids[:inside], {int(tail.ids[0]): tail}
      node.children[int(ids[done])] = _Node(ids[done:], done)
    self.samples.append(number)
    self.num_tokens += len(ids) - done
    self.num_entries += entries

  def lay_out(self, at: int, tokens, positions, subtree_end) -> None:
    """Writes the tree depth-first from index `at` of a row's arrays."""
    stack = [(self.root, False)]
    while stack:
      node, closing = stack.pop()
      if closing:
        node.end = at
        subtree_end[node.start : node.start + len(node.ids)] = at
        continue
      node.start = at
      span = slice(at, at + len(node.ids))
      tokens[span] = node.ids
      positions[span] = node.depth + np.arange(len(node.ids))
      at = span.stop
      stack.append((node, True))
      stack.extend((c, False) for c in reversed(node.children.values()))

  def indices(self, ids: np.ndarray) -> np.ndarray:
    """Index in the row of each token of `ids`, which the tree holds."""
    out, node, done = [], self.root, 0
    while done < len(ids):
      node = node.children[int(ids[done])]
      n = min(len(node.ids), len(ids) - done)
      out.append(node.start + np.arange(n))
      done += n
    return np.concatenate(out) if out else np.zeros(0, int)


def _grow(
  trees: list[_Tree], items: list[tuple[int, np.ndarray, int]], limits
) -> None:
  """Adds a group as one tree, or as several where it exceeds a row.

  A tree that is too large is cut at nodes: each part is a run of its paths in
  depth-first order, so that what two parts repeat is the path to the node
  between them and nothing else.
  """
  whole = _Tree()
  for item in items:
    whole.insert(*item)
  if whole.num_tokens <= limits[0] and whole.num_entries <= limits[1]:
    trees.append(whole)
    return
  depth_first = functools.cmp_to_key(_compare)
  items = sorted(items, key=lambda item: depth_first(item[1]))
  tree = None
  for number, ids, entries in items:
    full = tree is not None and (
      tree.num_tokens + tree.cost(ids) > limits[0]
      or tree.num_entries + entries > limits[1]
    )
    if tree is None or full:
      tree = _Tree()
      trees.append(tree)
    tree.insert(number, ids, entries)


def _fill_rows(trees: list[_Tree], limits) -> list[list[_Tree]]:
  """First-fit decreasing into rows of limits (tokens, entries)."""
  order = sorted(range(len(trees)), key=lambda i: -trees[i].num_tokens)
  rows: list[list[_Tree]] = []
  room: list[list[int]] = []
  first = 0
  for i in order:
    tree = trees[i]
    for r in range(first, len(rows)):
      left = room[r]
      if left[0] >= tree.num_tokens and left[1] >= tree.num_entries:
        rows[r].append(tree)
        break
    else:
      rows.append([tree])
      left = [limits[0], limits[1]]
      room.append(left)
    left[0] -= tree.num_tokens
    left[1] -= tree.num_entries
    while first < len(rows) and not (room[first][0] and room[first][1]):
      first += 1
  return rows


def _check(samples, row_tokens, row_entries, advantages) -> None:
  for s in samples:
    need = int(np.flatnonzero(s.mask)[-1]) if s.mask.any() else 0
    if need > row_tokens:
      raise ValueError(
        f"a sample of execution {s.execution_id} needs {need} tokens but "
        f"row_tokens is {row_tokens}"
      )
    entries = int(s.mask.sum())
    if row_entries is not None and entries > row_entries:
      raise ValueError(
        f"a sample of execution {s.execution_id} has {entries} entries but "
        f"row_entries is {row_entries}"
      )
    if advantages is not None and s.execution_id not in advantages:
      raise ValueError(
        f"execution {s.execution_id} has a sample but no advantage"
      )


def empty_batch(rows: int, row_tokens: int, row_entries: int) -> Batch:
  """A numpy Batch of padding only.

  A padding token sees itself alone (a softmax needs one key) and no token sees
  it; a padding entry has weight 0.
  """
  r, s, m = rows, row_tokens, row_entries
  ints = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
  floats = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
  return Batch(
    tokens=ints(r, s),
    positions=ints(r, s),
    subtree_end=np.tile(np.arange(1, s + 1, dtype=np.int32), (r, 1)),
    num_tokens=ints(r),
    entry_parent=ints(r, m),
    entry_target=ints(r, m),
    logp_behaviour=floats(r, m),
    version=ints(r, m) - 1,
    advantage=floats(r, m),
    weight=floats(r, m),
    sample=ints(r, m) - 1,
    execution=ints(r, m) - 1,
    sample_weight=floats(r, m),
    execution_weight=floats(r, m),
    num_entries=ints(r),
    sample_first=np.zeros((r, m), bool),
    execution_first=np.zeros((r, m), bool),
  )


@dataclasses.dataclass(frozen=True)
class _Numbering:
  """Sample and execution numbers and weights, over the whole batch."""

  execution: np.ndarray  # [samples] execution number
  advantage: np.ndarray  # [samples]
  sample_weight: np.ndarray  # [samples]
  execution_weight: np.ndarray  # [executions]


def _sample_weight(sample: Sample) -> float:
  if sample.weights is None:
    return float(sample.mask.sum())
  return float(sample.weights[sample.mask].sum())


def _execution_weights(samples, execution, weights, count) -> np.ndarray:
  """|T_e|: as the samples give it, else the sum of their weights."""
  total = np.bincount(execution, weights, count)
  told: dict[int, float | None] = {}
  for e, s in zip(execution.tolist(), samples, strict=True):
    if told.setdefault(e, s.execution_weight) != s.execution_weight:
      raise ValueError(
        f"samples of execution {s.execution_id} disagree on its weight: "
        f"{told[e]} and {s.execution_weight}"
      )
    if s.execution_weight is not None:
      total[e] = s.execution_weight
  return total.astype(np.float32)


def _write_row(
  batch: Batch, r: int, trees: list[_Tree], samples, number: _Numbering, seen
) -> None:
  """Fills row `r`; entries go by sample, then by position."""
  at = entry = 0
  for tree in trees:
    tree.lay_out(at, batch.tokens[r], batch.positions[r], batch.subtree_end[r])
    at += tree.num_tokens
    for i in sorted(tree.samples):
      s, e = samples[i], number.execution[i]
      where = np.flatnonzero(s.mask)
      index = tree.indices(s.ids[: where[-1]])
      span = slice(entry, entry + len(where))
      batch.entry_parent[r, span] = index[where - 1]
      batch.entry_target[r, span] = s.ids[where]
      batch.logp_behaviour[r, span] = s.logprobs[where]
      batch.version[r, span] = s.versions[where]
      batch.advantage[r, span] = number.advantage[i]
      batch.weight[r, span] = 1 if s.weights is None else s.weights[where]
      batch.sample[r, span] = i
      batch.execution[r, span] = e
      batch.sample_weight[r, span] = number.sample_weight[i]
      batch.execution_weight[r, span] = number.execution_weight[e]
      batch.sample_first[r, entry] = True
      batch.execution_first[r, entry] = e not in seen
      seen.add(e)
      entry = span.stop
  batch.num_tokens[r], batch.num_entries[r] = at, entry


def _shape(rows, row_tokens, row_entries, micro_rows, row_multiple, fixed):
  """(rows a micro-step, S, M): bucketed, so that few shapes compile."""
  n = micro_rows
  if not fixed and len(rows) < micro_rows:
    n = 1
    while n < len(rows):
      n *= 2
  n = -(-n // row_multiple) * row_multiple
  s = max(sum(t.num_tokens for t in row) for row in rows)
  m = max(sum(t.num_entries for t in row) for row in rows)
  if fixed:
    return n, row_tokens, row_entries or bucket(m)
  s, m = min(bucket(s), row_tokens), bucket(m)
  return n, s, m if row_entries is None else min(m, row_entries)


def pack(
  samples: Sequence[Sample],
  advantages: Mapping[str, float] | None,
  *,
  row_tokens: int,
  row_entries: int | None = None,
  micro_rows: int = 1,
  row_multiple: int = 1,
  fixed: bool = False,
  share: bool = True,
) -> Packed:
  """Packs samples into micro-steps of rows.

  Args:
    samples: any order; those without a trained token are passed over.
    advantages: execution_id -> advantage; None gives each 1 (supervised).
    row_tokens: most tokens of a row. A group whose tree is larger is cut at
      nodes; the parts repeat the paths to them.
    row_entries: most entries of a row; None: as many as come.
    micro_rows: rows of a micro-step.
    row_multiple: the mesh's data * fsdp; rows are padded to a multiple of it.
    fixed: the shape is exactly (micro_rows, row_tokens, row_entries) whatever
      the samples; False takes the smallest bucket that holds them.
    share: False lays each sample out by itself (the flat reference).

  Returns:
    Packed; `batches` is empty when nothing is trained.

  Raises:
    ValueError: a sample longer than a row, one without an advantage, or
      samples that disagree on the weight of their execution.
  """
  samples = [s for s in samples if s.mask.any()]
  _check(samples, row_tokens, row_entries, advantages)
  limits = (row_tokens, np.inf if row_entries is None else row_entries)
  names: dict[str, int] = {}
  groups: dict[object, list] = {}
  execution = np.zeros(len(samples), int)
  weights = np.zeros(len(samples))
  keys, count_of, flat = [], {}, 0
  for i, s in enumerate(samples):
    execution[i] = names.setdefault(s.execution_id, len(names))
    keys.append((s.execution_id, count_of.get(s.execution_id, 0)))
    count_of[s.execution_id] = keys[-1][1] + 1
    fed = s.ids[: int(np.flatnonzero(s.mask)[-1])]
    weights[i] = _sample_weight(s)
    flat += len(fed)
    key = s.group_id if share else i
    groups.setdefault(key, []).append((i, fed, int(s.mask.sum())))
  number = _Numbering(
    execution,
    np.array(
      [
        1.0 if advantages is None else advantages[s.execution_id]
        for s in samples
      ]
    ),
    weights.astype(np.float32),
    _execution_weights(samples, execution, weights, len(names)),
  )
  trees: list[_Tree] = []
  for items in groups.values():
    _grow(trees, items, limits)
  rows = _fill_rows(trees, limits)
  batches, seen = [], set()
  if rows:
    n, s, m = _shape(
      rows, row_tokens, row_entries, micro_rows, row_multiple, fixed
    )
    for start in range(0, len(rows), n):
      batch = empty_batch(n, s, m)
      for r, row in enumerate(rows[start : start + n]):
        _write_row(batch, r, row, samples, number, seen)
      batches.append(batch)
  return Packed(
    batches=tuple(batches),
    sample_keys=tuple(keys),
    execution_ids=tuple(names),
    tokens_flat=flat,
    tokens_trained=sum(t.num_tokens for t in trees),
    tokens_padded=sum(b.tokens.size for b in batches),
    num_entries=sum(int(b.num_entries.sum()) for b in batches),
  )


def unpack(batch: Batch) -> dict[int, dict[str, np.ndarray]]:
  """Reads samples back from a packed batch, by sample number.

  Args:
    batch: one micro-step, on the host.

  Returns:
    sample number -> arrays of the sample up to its last trained token: ids,
    mask, logprobs, versions, weights, and the scalars execution and advantage.
  """
  out = {}
  for r in range(batch.tokens.shape[0]):
    ends = batch.subtree_end[r, : batch.num_tokens[r]]
    count = int(batch.num_entries[r])
    for i in np.unique(batch.sample[r, :count]):
      at = np.flatnonzero(batch.sample[r, :count] == i)
      last = int(batch.entry_parent[r, at[-1]])
      path = np.flatnonzero(ends[: last + 1] > last)
      ids = np.append(batch.tokens[r, path], batch.entry_target[r, at[-1]])
      where = batch.positions[r, batch.entry_parent[r, at]] + 1
      if not np.array_equal(ids[where], batch.entry_target[r, at]):
        raise ValueError(f"sample {i}: targets disagree with its tokens")
      mask = np.zeros(len(ids), bool)
      logprobs = np.zeros(len(ids), np.float32)
      versions = np.full(len(ids), -1, np.int32)
      weights = np.zeros(len(ids), np.float32)
      mask[where] = True
      weights[where] = batch.weight[r, at]
      logprobs[where] = batch.logp_behaviour[r, at]
      versions[where] = batch.version[r, at]
      out[int(i)] = {
        "ids": ids,
        "mask": mask,
        "logprobs": logprobs,
        "versions": versions,
        "weights": weights,
        "execution": batch.execution[r, at[0]],
        "advantage": batch.advantage[r, at[0]],
      }
  return out
