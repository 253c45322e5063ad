"""Bounded selection: which paths of an execution's tree are trained, and how.

Leaves are the ends of paths after which nothing more was sampled. Paths are
drawn one at a time, a leaf with probability proportional to the tokens that
its path would add, and a token is trained with the first path that has it:

  U = all trainable tokens; samples = []
  while U and len(samples) < J_max:
    role = highest role with a leaf that has tokens of U on its path
    leaf ~ categorical(number of U tokens on its path), over that role's leaves
    samples.append(path(leaf), trained = path ∩ U);  U -= path

Modes say what a path trains:

- "once": as above; a token sampled several times trains its first sample.
- "multiplicity": every sample of a token. A drawn path trains the calls that
  end on it, each in a sample of its own, over its whole completion: with
  J_max = ∞ this is training each call flat. U counts samples of tokens.
- "leaf": trained = all trainable tokens of the path, also those trained
  already: with J_max = ∞ this is training each path from the root to a leaf
  flat.

|T_e| is the sum of the weights of what was selected. Strict priority of roles
is biased: with J_max paths or fewer of a higher role, nothing of a lower one
is ever trained.

The unbiased mode draws by strata instead. A token belongs to the highest role
that has a leaf below it (in mode "leaf", a path to the role of its leaf); each
stratum has n draws, at least one, the rest shared out by size. Draw k takes a
leaf with p proportional to its uncovered tokens; a token that is covered at
draw k, when a draw covered it with probability q (the sum of p over the leaves
below it), has the weight

  w = (n - k + 1 / q) / n

so that sum_t w_t f_t is the mean over k of Des Raj's ordered estimates
sum(covered before) + sum(covered at k) / q (Des Raj, JASA 51, 1956), whose
expectation is the sum of f over all tokens. A stratum whose leaves are all
drawn is complete: weights 1. |T_e| is the number of all trainable tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from gyre import config
from gyre.trajectory import tree as tree_lib
from gyre.trajectory.tree import Tree
from gyre.types import Execution, Sample

Mode = Literal["once", "multiplicity", "leaf"]
MODES = ("once", "multiplicity", "leaf")
ROLES = config.Trajectory().roles

# choose(weights int64 [L]) -> index, with probability weights / weights.sum().
Choose = Callable[[np.ndarray], int]


@dataclasses.dataclass(frozen=True)
class Selection:
  """What of an execution is trained.

  Attributes:
    samples: in order of drawing; empty when nothing was sampled.
    stats: counts, additive over executions: calls (that sampled something),
      tokens_flat (prompts and completions, call by call), tokens_unique (in
      the tree), tokens_trainable, tokens_trained (masked, over all samples),
      leaves, paths (drawn), nodes (with a trainable token), nodes_repeated
      (of those, with a token sampled more than once), and "dropped/ROLE":
      tokens (mode multiplicity: samples of tokens) that no path covers, by
      the highest role below them.
  """

  samples: list[Sample]
  stats: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class _Draw:
  """A path: its leaf, the nodes first covered by it and their weights."""

  leaf: int
  nodes: list[int]
  weights: list[float]


class _Paths:
  """The leaves of a tree, what each node holds, who lies below whom.

  Attributes:
    leaves: [L] nodes after which nothing was sampled, in depth-first order.
    rank: [L] priority of each leaf's role, 0 the highest.
    low, high: [N], the leaves below node v are leaves[low[v]:high[v]].
    amount: [N] what covering a node adds: its trainable tokens, or in mode
      multiplicity the samples of the calls that end there.
    stratum: [N] least rank of the leaves below; -1 where there is none.
  """

  def __init__(self, tree: Tree, mode: Mode, roles: Sequence[str]):
    nodes = len(tree.parent)
    held = np.concatenate([[0], np.cumsum(tree.trainable())])
    tokens = held[tree.stop] - held[tree.start]
    end = tree.subtree_end()
    total = np.concatenate([[0], np.cumsum(tokens)])
    below = total[end] - total[1:]
    self.tree = tree
    self.leaves = np.flatnonzero((tokens > 0) & (below == 0))
    self.low = np.searchsorted(self.leaves, np.arange(nodes))
    self.high = np.searchsorted(self.leaves, end)
    self.tokens = self.amount = tokens
    self.calls_at: dict[int, list[int]] = {}
    sampled = np.diff(tree.call_start)
    for call in np.flatnonzero(sampled).tolist():
      node = int(tree.leaf_of_call[call])
      self.calls_at.setdefault(node, []).append(call)
    if mode == "multiplicity":
      self.amount = np.zeros(nodes, np.int64)
      for node, calls in self.calls_at.items():
        self.amount[node] = sampled[calls].sum()
    order = {role: i for i, role in enumerate(roles)}
    self.rank = np.array(
      [
        order.get(tree.roles[self.calls_at[v][0]], len(roles) - 1)
        for v in self.leaves.tolist()
      ],
      np.int64,
    )
    self.stratum = np.array(
      [
        self.rank[a:b].min() if a < b else -1
        for a, b in zip(self.low.tolist(), self.high.tolist(), strict=True)
      ],
      np.int64,
    )


class _Uncovered:
  """U: what nodes still hold, and how much of it each leaf's path has."""

  def __init__(self, paths: _Paths, owned: np.ndarray):
    """Starts with everything in the nodes `owned`, bool [N]."""
    self.paths = paths
    self.amount = np.where(owned, paths.amount, 0)
    self.counts = np.zeros(len(paths.leaves), np.int64)
    for v in np.flatnonzero(self.amount).tolist():
      self.counts[paths.low[v] : paths.high[v]] += self.amount[v]

  def fresh(self, leaf: int) -> list[int]:
    """The nodes that the path to leaves[leaf] would newly cover."""
    nodes = self.paths.tree.nodes(int(self.paths.leaves[leaf]))
    return [v for v in nodes if self.amount[v]]

  def cover(self, nodes: list[int]) -> None:
    for v in nodes:
      span = slice(self.paths.low[v], self.paths.high[v])
      self.counts[span] -= self.amount[v]
      self.amount[v] = 0


def _by_priority(
  paths: _Paths,
  max_samples: int | None,
  token_budget: int | None,
  choose: Choose,
) -> Iterator[_Draw]:
  """Strict priority of roles, until U, the count or the budget is used up."""
  u = _Uncovered(paths, np.ones(len(paths.amount), bool))
  length = paths.tree.stop - paths.tree.start
  laid: set[int] = set()
  drawn = used = 0
  while u.counts.any() and (max_samples is None or drawn < max_samples):
    rank = paths.rank[u.counts > 0].min()
    leaf = choose(np.where(paths.rank == rank, u.counts, 0))
    node = int(paths.leaves[leaf])
    new = [v for v in paths.tree.nodes(node) if v not in laid]
    used += int(length[new].sum())
    if token_budget is not None and drawn and used > token_budget:
      return
    laid.update(new)
    nodes = u.fresh(leaf)
    u.cover(nodes)
    drawn += 1
    yield _Draw(node, nodes, [1.0] * len(nodes))


def _shared_out(sizes: list[int], most: list[int], draws: int) -> list[int]:
  """At least one draw each, the next always to the largest share a draw."""
  out = [1] * len(sizes)
  while sum(out) < draws:
    open_ = [i for i in range(len(out)) if out[i] < most[i]]
    if not open_:
      break
    out[max(open_, key=lambda i: sizes[i] / (out[i] + 1))] += 1
  return out


def _by_strata(
  paths: _Paths, mode: Mode, max_samples: int | None, choose: Choose
) -> Iterator[_Draw]:
  """Des Raj's sequential draws in each stratum."""
  ranks = np.unique(paths.rank).tolist()
  draws = len(paths.leaves) if max_samples is None else max_samples
  if len(ranks) > draws:
    raise ValueError(
      f"max_samples {max_samples} is less than the {len(ranks)} roles present: "
      "the unbiased mode draws one path of each"
    )
  starts = []
  for rank in ranks:
    owned = paths.stratum == rank
    if mode == "leaf":
      owned = np.ones(len(paths.amount), bool)
    starts.append((_Uncovered(paths, owned), paths.rank == rank))
  sizes = [
    int(u.counts[mine].sum() if mode == "leaf" else u.amount.sum())
    for u, mine in starts
  ]
  most = [int(mine.sum()) for _, mine in starts]
  shares = _shared_out(sizes, most, draws)
  for (u, mine), n, leaves in zip(starts, shares, most, strict=True):
    for k in range(1, n + 1):
      yield _sequential(u, mine, k, n, n == leaves, mode, choose)


def _sequential(
  u: _Uncovered,
  mine: np.ndarray,
  k: int,
  n: int,
  complete: bool,
  mode: Mode,
  choose: Choose,
) -> _Draw:
  """Draw k of n among the leaves `mine`; see the module."""
  counts = np.where(mine, u.counts, 0)
  leaf = choose(counts)
  upto = np.concatenate([[0], np.cumsum(counts)])
  nodes, paths = u.fresh(leaf), u.paths
  weights = [1.0] * len(nodes)
  if not complete:
    for i, v in enumerate(nodes):
      low, high = paths.low[v], paths.high[v]
      if mode == "leaf":  # the path is drawn or not, whatever it shares
        low, high = leaf, leaf + 1
      q = (upto[high] - upto[low]) / upto[-1]
      weights[i] = (n - k + 1 / q) / n
  u.cover(nodes)
  return _Draw(int(paths.leaves[leaf]), nodes, weights)


def _seeded(seed: int, execution_id: str) -> Choose:
  """Draws that depend on the seed and the execution alone."""
  text = f"{seed} {execution_id}".encode()
  key = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest())
  bits = np.random.Philox(key=key)

  def choose(weights: np.ndarray) -> int:
    upto = np.cumsum(weights)
    at = int(bits.random_raw()) * int(upto[-1]) >> 64
    return int(np.searchsorted(upto, at, side="right"))

  return choose


def select(
  tree: Tree,
  *,
  execution_id: str,
  group_id: str,
  mode: Mode = "once",
  max_samples: int | None = 5,
  token_budget: int | None = None,
  unbiased: bool = False,
  roles: Sequence[str] = ROLES,
  seed: int = 0,
  choose: Choose | None = None,
) -> Selection:
  """Selects what of an execution is trained; see the module.

  Args:
    tree: of the execution's calls.
    execution_id, group_id: of the samples.
    mode: what a path trains.
    max_samples: J_max, most paths drawn; None: all. In mode multiplicity a
      path yields a sample a call.
    token_budget: most tokens of all paths drawn, shared ones counted once:
      drawing ends before the path that would exceed it; the first path is
      always taken. None: no budget. Not in the unbiased mode.
    unbiased: weights tokens so that the expectation of the execution's sum is
      that over all its tokens.
    roles: highest first; a role that is not among them ranks with the last.
    seed: with the execution's id it decides the draws.
    choose: replaces the seeded draws.

  Returns:
    Selection.

  Raises:
    ValueError: an unknown mode, bounds that are not positive, no roles, a
      budget in the unbiased mode, or fewer samples than it needs.
  """
  if mode not in MODES:
    raise ValueError(f"mode {mode!r} is not one of {MODES}")
  for name, bound in (
    ("max_samples", max_samples),
    ("token_budget", token_budget),
  ):
    if bound is not None and bound <= 0:
      raise ValueError(f"{name} must be positive or None, got {bound}")
  if not roles:
    raise ValueError(f"roles must name at least one role, got {roles!r}")
  if unbiased and token_budget is not None:
    raise ValueError(
      f"the unbiased mode draws a fixed number of paths: token_budget is "
      f"{token_budget}, must be None"
    )
  paths = _Paths(tree, mode, roles)
  choose = choose or _seeded(seed, execution_id)
  if unbiased:
    draws = list(_by_strata(paths, mode, max_samples, choose))
  else:
    draws = list(_by_priority(paths, max_samples, token_budget, choose))
  make = _calls if mode == "multiplicity" else _path
  weighted = any(w != 1 for d in draws for w in d.weights)
  common = {"execution_id": execution_id, "group_id": group_id}
  if weighted:
    common["execution_weight"] = float(_everything(paths, mode))
  samples = [s for d in draws for s in make(paths, d, mode, weighted, common)]
  return Selection(samples, _stats(paths, draws, samples, roles))


def samples(
  execution: Execution, options: config.Trajectory, seed: int = 0
) -> Selection:
  """Builds an execution's tree and selects from it, as configured.

  Args:
    execution: with its calls, in any order.
    options: section `trajectory`.
    seed: of the run.

  Returns:
    Selection; a truncated execution's tokens are trained as any other's.

  Raises:
    ValueError: as build and select.
  """
  return select(
    tree_lib.build(execution.calls),
    execution_id=execution.execution_id,
    group_id=execution.group_id,
    mode=options.mode,
    max_samples=options.max_samples or None,
    token_budget=options.token_budget or None,
    unbiased=options.unbiased,
    roles=options.roles,
    seed=seed,
  )


def _everything(paths: _Paths, mode: Mode) -> int:
  """|T_e| with nothing left out."""
  if mode != "leaf":
    return int(paths.amount.sum())
  return int((paths.amount * (paths.high - paths.low)).sum())


def _runs(tree: Tree, nodes: list[int]) -> tuple[np.ndarray, ...]:
  return tuple(tree.ids[tree.start[v] : tree.stop[v]] for v in nodes)


def _path(paths, draw, mode, weighted, common) -> Iterator[Sample]:
  """One sample: the path, its new tokens or all, each its first sample."""
  tree = paths.tree
  on_path = tree.nodes(draw.leaf)
  nodes, weights = draw.nodes, draw.weights
  if mode == "leaf":
    nodes = [v for v in on_path if paths.tokens[v]]
    weights = [draw.weights[0]] * len(nodes)
  where, first = [], []
  for v in nodes:
    bounds = tree.sample_start[tree.start[v] : tree.stop[v] + 1]
    sampled = np.flatnonzero(bounds[1:] > bounds[:-1])
    where.append(tree.depth[v] + sampled)
    first.append(bounds[sampled])
  chosen = np.concatenate(first)
  yield Sample(
    runs=_runs(tree, on_path),
    trained=np.concatenate(where),
    logprobs=tree.logprobs[chosen],
    versions=tree.versions[chosen],
    role=tree.roles[paths.calls_at[draw.leaf][0]],
    weights=np.repeat(weights, [len(w) for w in where]) if weighted else None,
    **common,
  )


def _calls(paths, draw, mode, weighted, common) -> Iterator[Sample]:
  """A sample a call that ends at a newly covered node."""
  tree = paths.tree
  on_path = tree.nodes(draw.leaf)
  runs = _runs(tree, on_path)
  upto = {v: n for n, v in enumerate(on_path, 1)}
  for node, weight in zip(draw.nodes, draw.weights, strict=True):
    end = int(tree.depth[node] + tree.stop[node] - tree.start[node])
    for call in paths.calls_at[node]:
      span = slice(int(tree.call_start[call]), int(tree.call_start[call + 1]))
      of_call = tree.by_call[span]
      yield Sample(
        runs=runs[: upto[node]],
        trained=np.arange(int(tree.prompt_len[call]), end),
        logprobs=tree.logprobs[of_call],
        versions=tree.versions[of_call],
        role=tree.roles[call],
        weights=np.full(len(of_call), weight) if weighted else None,
        **common,
      )


def _stats(paths, draws, samples, roles) -> dict[str, int]:
  tree = paths.tree
  sampled = np.diff(tree.call_start)
  repeated = np.concatenate([[0], np.cumsum(tree.multiplicity() > 1)])
  left = paths.amount.copy()
  for draw in draws:
    left[draw.nodes] = 0
  out = {
    "calls": int((sampled > 0).sum()),
    "tokens_flat": int(tree.prompt_len.sum() + sampled.sum()),
    "tokens_unique": len(tree.ids),
    "tokens_trainable": int(tree.trainable().sum()),
    "tokens_trained": sum(len(s.trained) for s in samples),
    "leaves": len(paths.leaves),
    "paths": len(draws),
    "nodes": int((paths.tokens > 0).sum()),
    "nodes_repeated": int((repeated[tree.stop] > repeated[tree.start]).sum()),
  }
  for rank, role in enumerate(roles):
    out[f"dropped/{role}"] = int(left[paths.stratum == rank].sum())
  return out
