"""Samples -> packed rows: shared prefixes once, static shapes, linear time.

A group's samples form a radix tree over token ids; a row holds several trees
in depth-first order, so that a token that several samples share is computed
once. It is shared for compute, never for the loss: every trained token of
every sample has an entry of its own. Only tokens whose hidden state is needed
are kept: a sample's last trained token is a target and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from gyre.trajectory.prefixes import Prefixes
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
    execution_ids: of execution number i.
    tokens_flat: tokens that training each sample by itself would compute.
    tokens_trained: tokens in the rows (shared ones once a tree).
    tokens_padded: R * S summed over micro-steps.
    num_entries: trained tokens, over all samples.
  """

  batches: tuple[Batch, ...]
  execution_ids: tuple[str, ...]
  tokens_flat: int
  tokens_trained: int
  tokens_padded: int
  num_entries: int


def bucket(n: int, quantum: int = 64) -> int:
  """Rounds up to quantum * 2^k or quantum * 3 * 2^(k-1), two an octave.

  Raises:
    ValueError: quantum is not positive.
  """
  if quantum < 1:
    raise ValueError(f"quantum must be at least 1, got {quantum} for {n}")
  size = quantum
  while size < n:
    if size % 2 == 0 and size * 3 // 2 >= n and size >= 2 * quantum:
      return size * 3 // 2
    size *= 2
  return size


@dataclasses.dataclass(frozen=True)
class _Item:
  """A sample's number, the runs of ids that it feeds, its entries."""

  number: int
  runs: tuple[np.ndarray, ...]
  entries: int


class _Tree:
  """One group's samples, or a part of them, in a radix tree of views."""

  def __init__(self):
    self.paths = Prefixes(views=True)
    self.num_entries = 0

  @property
  def num_tokens(self) -> int:
    return self.paths.num_tokens

  def insert(self, item: _Item) -> None:
    self.paths.add(item.number, *item.runs)
    self.num_entries += item.entries

  def fits_with(self, item: _Item, limits) -> bool:
    shared = self.paths.match(*item.runs)[1]
    length = sum(map(len, item.runs))
    return (
      self.num_tokens + length - shared <= limits[0]
      and self.num_entries + item.entries <= limits[1]
    )

  def lay_out(
    self, at: int, tokens, positions, subtree_end
  ) -> dict[int, _Path]:
    """Writes the tree depth-first from index `at` of a row's arrays.

    Returns:
      Sample number -> where its path lies.
    """
    runs, parents = self.paths.depth_first(by_id=False)
    lengths = np.array([len(run.ids) for run in runs])
    ends = at + np.cumsum(lengths)
    starts, depths = ends - lengths, np.array([run.depth for run in runs])
    for v in range(len(runs) - 1, 0, -1):
      if parents[v] >= 0:
        ends[parents[v]] = max(ends[parents[v]], ends[v])
    span = slice(at, at + self.num_tokens)
    tokens[span] = np.concatenate([run.ids for run in runs])
    row = np.arange(span.start, span.stop)
    positions[span] = row - np.repeat(starts - depths, lengths)
    subtree_end[span] = np.repeat(ends, lengths)
    return {
      number: _Path(depths[path], starts[path])
      for v, run in enumerate(runs)
      if run.ends
      for path in [_above(parents, v)]
      for number in run.ends
    }


def _above(parents: list[int], v: int) -> list[int]:
  """Run v and those above it, from the root down."""
  out = []
  while v >= 0:
    out.append(v)
    v = parents[v]
  return out[::-1]


class _Path(NamedTuple):
  """The runs of a path: their depths and where in the row they start."""

  depths: np.ndarray
  starts: np.ndarray

  def indices(self, depth: np.ndarray) -> np.ndarray:
    """Index in the row of the tokens at some depths of the path."""
    run = np.searchsorted(self.depths, depth, side="right") - 1
    return self.starts[run] + depth - self.depths[run]


def _fed(sample: Sample) -> tuple[np.ndarray, ...]:
  """The runs that come before the last trained token."""
  left, out = int(sample.trained[-1]), []
  for run in sample.runs:
    out.append(run[:left])
    left -= len(out[-1])
    if not left:
      break
  return tuple(out)


def _last_target(sample: Sample) -> int:
  """The id of the last trained token, which no row holds."""
  left = int(sample.trained[-1])
  for run in sample.runs:
    if left < len(run):
      break
    left -= len(run)
  return int(run[left])


def _grow(trees: list[_Tree], items: list[_Item], limits) -> None:
  """Adds a group as one tree, or as several where it exceeds a row.

  A tree that is too large is cut at nodes: each part is a run of its paths in
  depth-first order, so that what two parts repeat is the path to the node
  between them and nothing else.
  """
  whole = _Tree()
  for item in items:
    whole.insert(item)
  if whole.num_tokens <= limits[0] and whole.num_entries <= limits[1]:
    trees.append(whole)
    return
  of = {item.number: item for item in items}
  tree = None
  for number in (n for run in whole.paths.depth_first()[0] for n in run.ends):
    if tree is None or not tree.fits_with(of[number], limits):
      tree = _Tree()
      trees.append(tree)
    tree.insert(of[number])


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
    need, entries = int(s.trained[-1]), len(s.trained)
    if need > row_tokens:
      raise ValueError(
        f"a sample of execution {s.execution_id} needs {need} tokens but "
        f"row_tokens is {row_tokens}"
      )
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
    return float(len(sample.trained))
  return float(sample.weights.sum())


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


def _numbered(
  samples: Sequence[Sample], advantages: Mapping[str, float] | None
) -> tuple[_Numbering, tuple[str, ...]]:
  """Numbers samples and executions; returns also the executions' ids."""
  names: dict[str, int] = {}
  execution = np.zeros(len(samples), int)
  weights = np.zeros(len(samples))
  advantage = np.ones(len(samples))
  for i, s in enumerate(samples):
    execution[i] = names.setdefault(s.execution_id, len(names))
    weights[i] = _sample_weight(s)
    if advantages is not None:
      advantage[i] = advantages[s.execution_id]
  number = _Numbering(
    execution,
    advantage,
    weights.astype(np.float32),
    _execution_weights(samples, execution, weights, len(names)),
  )
  return number, tuple(names)


def _write_row(
  batch: Batch, r: int, trees: list[_Tree], samples, number: _Numbering, seen
) -> None:
  """Fills row `r`; entries go by sample, then by position."""
  at = entry = 0
  for tree in trees:
    paths = tree.lay_out(
      at, batch.tokens[r], batch.positions[r], batch.subtree_end[r]
    )
    at += tree.num_tokens
    for i in sorted(paths):
      s, e = samples[i], number.execution[i]
      span = slice(entry, entry + len(s.trained))
      batch.entry_parent[r, span] = paths[i].indices(s.trained - 1)
      target = batch.entry_target[r, span]
      target[:-1] = batch.tokens[r, paths[i].indices(s.trained[:-1])]
      target[-1] = _last_target(s)
      batch.logp_behaviour[r, span] = s.logprobs
      batch.version[r, span] = s.versions
      batch.advantage[r, span] = number.advantage[i]
      batch.weight[r, span] = 1 if s.weights is None else s.weights
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
    ValueError: a size that is not positive, a sample longer than a row, one
      without an advantage, or samples that disagree on the weight of their
      execution.
  """
  sizes = dict(
    row_tokens=row_tokens, micro_rows=micro_rows, row_multiple=row_multiple
  )
  if row_entries is not None:
    sizes["row_entries"] = row_entries
  for name, size in sizes.items():
    if size < 1:
      raise ValueError(f"{name} must be at least 1, got {size}")
  samples = [s for s in samples if len(s.trained)]
  _check(samples, row_tokens, row_entries, advantages)
  limits = (row_tokens, np.inf if row_entries is None else row_entries)
  number, names = _numbered(samples, advantages)
  groups: dict[object, list[_Item]] = {}
  for i, s in enumerate(samples):
    item = _Item(i, _fed(s), len(s.trained))
    groups.setdefault(s.group_id if share else i, []).append(item)
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
    execution_ids=names,
    tokens_flat=sum(int(s.trained[-1]) for s in samples),
    tokens_trained=sum(t.num_tokens for t in trees),
    tokens_padded=sum(b.tokens.size for b in batches),
    num_entries=sum(int(b.num_entries.sum()) for b in batches),
  )
