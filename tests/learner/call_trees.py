"""Random trees of calls of a group, and the flat sequences that they stand for.

Nothing here knows of gyre's tree: flat sequences come from the calls
themselves, and from a dictionary of the prefixes that they sampled.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
from hypothesis import strategies as st

from gyre.types import Call

NODES, DEPTH, TOKENS, CALLS, EXECUTIONS = 60, 8, 2, 32, 3
PROMPT = (1, 2)
LENGTH = len(PROMPT) + DEPTH * TOKENS
ROLES = ("main", "main_summary", "sub_agent", "sub_agent_summary")


@dataclasses.dataclass(frozen=True)
class Spec:
  """A call before it has logprobs."""

  execution: int
  role: str
  prompt: tuple[int, ...]
  completion: tuple[int, ...]


def path(parents, node):
  """The nodes from the root to `node`."""
  out = []
  while node >= 0:
    out.append(node)
    node = parents[node]
  return out[::-1]


@st.composite
def call_trees(draw, nodes=NODES, calls=CALLS, vocab=31):
  """Specs of the calls of up to three executions over one tree of tokens.

  Calls end anywhere in the tree and sampled any part of the end of their path,
  so that they extend, branch, retry, and lie under several executions.
  """
  ids = st.lists(st.integers(1, vocab - 1), min_size=1, max_size=TOKENS)
  parents, depths, tokens = [], [], []
  for i in range(draw(st.integers(1, nodes))):
    parent = draw(st.integers(-1, i - 1))
    if parent >= 0 and depths[parent] == DEPTH:
      parent = parents[parent]
    parents.append(parent)
    depths.append(1 + (depths[parent] if parent >= 0 else 0))
    tokens.append(draw(ids))
  out = []
  for _ in range(draw(st.integers(1, calls))):
    on_path = path(parents, draw(st.integers(0, len(parents) - 1)))
    cut = draw(st.integers(0, len(on_path) - 1))
    prompt = [*PROMPT, *(x for v in on_path[:cut] for x in tokens[v])]
    completion = [x for v in on_path[cut:] for x in tokens[v]]
    out.append(
      Spec(
        draw(st.integers(0, EXECUTIONS - 1)),
        draw(st.sampled_from(ROLES)),
        tuple(prompt),
        tuple(completion),
      )
    )
  return out


def padded(sequences):
  """int32 [CALLS, LENGTH] of sequences; what follows an end is never read."""
  out = np.zeros((CALLS, LENGTH), np.int32)
  for row, ids in zip(out, sequences, strict=False):
    row[: len(ids)] = ids
  return out


def make_calls(specs, logp, seed):
  """Calls with behaviour logprobs near the policy's, on both sides.

  Args:
    specs: of the calls.
    logp: tokens [CALLS, LENGTH] -> [CALLS, LENGTH - 1], of the next token.
    seed: of the noise: a token that was sampled twice has two logprobs.
  """
  rng = np.random.default_rng(seed)
  got = np.asarray(logp(padded([s.prompt + s.completion for s in specs])))
  out = collections.defaultdict(list)
  for number, (spec, row) in enumerate(zip(specs, got, strict=False)):
    start, n = len(spec.prompt), len(spec.completion)
    near = row[start - 1 : start - 1 + n] + 0.3 * rng.normal(size=n)
    name = f"g/{spec.execution}"
    out[name].append(
      Call(
        execution_id=name,
        group_id="g",
        call_id=f"{number:04d}",
        prompt_ids=spec.prompt,
        completion_ids=spec.completion,
        logprobs=np.minimum(near, 0),
        versions=np.zeros(n, np.int32),
        finish_reason="stop",
        role=spec.role,
      )
    )
  return dict(out)


@dataclasses.dataclass(frozen=True)
class Flat:
  """A sequence that is trained by itself; behaviour 0 where not in the mask."""

  execution: str
  ids: tuple[int, ...]
  mask: np.ndarray
  logprobs: np.ndarray
  weights: np.ndarray
  total: float | None = None  # |T_e| where it is not the sum of the weights


def flat_calls(calls):
  """Each call by itself."""
  out = []
  for name, of in calls.items():
    for c in of:
      start = len(c.prompt_ids)
      mask = np.arange(start + len(c.completion_ids)) >= start
      logprobs = np.concatenate([np.zeros(start), c.logprobs])
      ids = (*c.prompt_ids.tolist(), *c.completion_ids.tolist())
      out.append(Flat(name, ids, mask, logprobs, mask.astype(float)))
  return out


def sampled(calls):
  """Prefix -> logprob of the first call that sampled its last token."""
  out = {}
  for c in calls:
    ids = (*c.prompt_ids.tolist(), *c.completion_ids.tolist())
    for i, logprob in enumerate(c.logprobs):
      out.setdefault(ids[: len(c.prompt_ids) + i + 1], logprob)
  return out


def flat_paths(calls):
  """Each path from the root to a leaf by itself, all its sampled tokens."""
  out = []
  for name, of in calls.items():
    known = sampled(of)
    below = {p[:n] for p in known for n in range(len(p))}
    for leaf in sorted(p for p in known if p not in below):
      prefixes = [leaf[: n + 1] for n in range(len(leaf))]
      mask = np.array([p in known for p in prefixes])
      logprobs = np.array([known.get(p, 0.0) for p in prefixes])
      out.append(Flat(name, leaf, mask, logprobs, mask.astype(float)))
  return out


def flat_samples(samples):
  """Each selected sample by itself."""
  out = []
  for s in samples:
    logprobs, weights = np.zeros((2, s.length))
    logprobs[s.trained] = s.logprobs
    weights[s.trained] = 1 if s.weights is None else s.weights
    ids = tuple(s.ids.tolist())
    out.append(
      Flat(s.execution_id, ids, s.mask, logprobs, weights, s.execution_weight)
    )
  return out


def coefficients(flat, aggregation, max_len):
  """[F, LENGTH - 1]: what the loss of each next token is multiplied by."""
  total: dict[str, float] = {}
  for f in flat:
    total[f.execution] = total.get(f.execution, 0.0) + f.weights.sum()
  total.update({f.execution: f.total for f in flat if f.total is not None})
  out = np.zeros((CALLS, LENGTH - 1))
  for row, f in zip(out, flat, strict=False):
    w = f.weights.astype(np.float32).astype(float)[1:]
    per_sequence = w / len(flat)
    row[: len(w)] = {
      "execution_mean": w / total[f.execution] / len(total),
      "token_mean": w / sum(x.weights.sum() for x in flat),
      "seq_mean_token_mean": per_sequence / f.weights.sum(),
      "seq_mean_token_sum": per_sequence,
      "seq_mean_token_sum_norm": per_sequence / max_len,
    }[aggregation]
  return out
