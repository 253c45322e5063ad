"""From recorded calls to samples: is everything that was sampled found again?

Trusts neither the tree nor the selection nor the audit that a run has: what
must be found is told by the calls alone. A sampled token is its id, its
logprob's bits, its version and a digest of all ids before it.
"""

import collections
import hashlib

import numpy as np

from gyre.trajectory import align, select
from gyre.trajectory import tree as tree_lib


def logprob_of(seed, position, token):
  """A given logprob, exact in float32."""
  key = f"{seed} {position} {token}".encode()
  return -int.from_bytes(hashlib.sha256(key).digest()[:2], "big") / 4096


def _places(ids, where):
  """[(digest of the ids before, id)] of the tokens at `where`."""
  running, done, out = hashlib.blake2b(digest_size=16), 0, []
  for at in where:
    running.update(np.ascontiguousarray(ids[done:at], np.int32).tobytes())
    done = at
    out.append((running.digest(), int(ids[at])))
  return out


def _tokens(ids, where, logprobs, versions):
  """[(place, (bits of the logprob, version))] of the tokens at `where`."""
  bits = np.ascontiguousarray(logprobs, np.float32).view(np.int32)
  values = zip(bits.tolist(), versions.tolist(), strict=True)
  return list(zip(_places(ids, where), values, strict=True))


def _of_call(call):
  ids = np.concatenate([call.prompt_ids, call.completion_ids])
  own = range(len(call.prompt_ids), len(ids))
  return _tokens(ids, own, call.logprobs, call.versions)


def check_samples(calls, samples, mode):
  """The samples train what the calls sampled, as the mode says, and no more.

  Args:
    calls: of one execution, in order of start.
    samples: selected from them, without a bound.
    mode: "once", "multiplicity" or "leaf".
  """
  sampled = [t for c in calls for t in _of_call(c)]
  first = {}
  for place, values in sampled:
    first.setdefault(place, values)
  trained = [
    t
    for s in samples
    for t in _tokens(s.ids, s.trained.tolist(), s.logprobs, s.versions)
  ]
  if mode == "multiplicity":
    assert collections.Counter(trained) == collections.Counter(sampled)
  elif mode == "once":
    assert collections.Counter(trained) == collections.Counter(first.items())
  else:
    # Every sampled token of every path that was walked.
    assert set(trained) == set(first.items())
    for s in samples:
      every = _places(s.ids, range(len(s.ids)))
      sampled_at = [at for at, place in enumerate(every) if place in first]
      assert s.trained.tolist() == sampled_at
  found = align.audit(calls, samples)
  assert found.drift_in_loss == 0
  assert found.sampled == len(sampled)
  if mode == "multiplicity" or len(first) == len(sampled):
    assert found.located == len(sampled)


def ends(calls):
  """[call] at whose ends nothing goes on: the branches that happened."""
  whole = [
    np.concatenate([c.prompt_ids, c.completion_ids]).tobytes() for c in calls
  ]
  out = {}
  for call, ids in zip(calls, whole, strict=True):
    longer = (len(w) > len(ids) and w.startswith(ids) for w in whole)
    if not any(longer):
      out.setdefault(ids, call)
  return list(out.values())


def check_tree(calls):
  """The tree gives each call back, and has the branches that happened.

  Returns:
    It.
  """
  tree = tree_lib.build(calls)
  path = {}
  for number, call_id in enumerate(tree.call_ids):
    path[call_id] = tree.path(int(tree.leaf_of_call[number])).tolist()
  for call in calls:
    prompt, completion, logprobs, versions = tree.read(call.call_id)
    for mine, its in (
      (call.prompt_ids, prompt),
      (call.completion_ids, completion),
      (call.logprobs.view(np.int32), logprobs.view(np.int32)),
      (call.versions, versions),
    ):
      np.testing.assert_array_equal(mine, its)
    # A call lies below the one that it goes on from.
    if call.boundary in ("strict", "retokenized"):
      before = path[call.parent_hint]
      assert path[call.call_id][: len(before)] == before
  happened = [c.role for c in ends(calls)]
  assert sorted(leaf.role for leaf in tree.leaves()) == sorted(happened)
  return tree


def check(calls, branches=None):
  """All of it: tree, branches, samples of every mode, drift.

  Args:
    calls: of one execution.
    branches: roles of the tree's leaves, in any order; None: whichever.

  Returns:
    The tree.
  """
  tree = check_tree(calls)
  if branches is not None:
    assert sorted(leaf.role for leaf in tree.leaves()) == sorted(branches)
  for mode in select.MODES:
    found = select.select(
      tree,
      execution_id=calls[0].execution_id,
      group_id=calls[0].group_id,
      mode=mode,
      max_samples=None,
    )
    check_samples(calls, found.samples, mode)
    assert {s.role for s in found.samples} <= {c.role for c in calls}
  return tree
