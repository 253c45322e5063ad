"""The radix tree: every call back bit for bit, whatever the order."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
from histories import call, histories
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.trajectory import tree as tree_lib


def _equal(a, b):
  for field in dataclasses.fields(tree_lib.Tree):
    x, y = getattr(a, field.name), getattr(b, field.name)
    if isinstance(x, tuple):
      assert x == y, field.name
    else:
      assert x.dtype == y.dtype, field.name
      np.testing.assert_array_equal(x, y, field.name)


@settings(max_examples=200, deadline=None)
@given(histories(), st.randoms(use_true_random=False))
def test_every_call_is_read_back_bit_for_bit_in_any_order(calls, random):
  tree = tree_lib.build(iter(calls))
  for c in calls:
    got = tree.read(c.call_id)
    want = (c.prompt_ids, c.completion_ids, c.logprobs, c.versions)
    for x, y in zip(got, want, strict=True):
      assert x.dtype == y.dtype
      np.testing.assert_array_equal(x, y)
  shuffled = list(calls)
  random.shuffle(shuffled)
  _equal(tree_lib.build(shuffled), tree)


@settings(max_examples=200, deadline=None)
@given(histories())
def test_tokens_are_the_prefixes_and_keep_all_their_samples(calls):
  """Against a dictionary of prefixes: one token a distinct prefix."""
  samples = {}
  for number, c in enumerate(calls):
    ids = [*c.prompt_ids.tolist(), *c.completion_ids.tolist()]
    for n in range(1, len(ids) + 1):
      samples.setdefault(tuple(ids[:n]), [])
    for i in range(len(c.completion_ids)):
      prefix = tuple(ids[: len(c.prompt_ids) + i + 1])
      samples[prefix].append((number, c.logprobs[i], c.versions[i]))
  tree = tree_lib.build(calls)
  assert len(tree.ids) == len(samples)
  seen = set()
  for node in range(len(tree.parent)):
    path = tree.path(node)
    assert (np.diff(path) > 0).all()
    ids = tree.ids[path].tolist()
    assert tree.depth[node] == len(ids) - (tree.stop[node] - tree.start[node])
    for t in range(tree.start[node], tree.stop[node]):
      prefix = tuple(ids[: np.searchsorted(path, t) + 1])
      seen.add(prefix)
      span = slice(tree.sample_start[t], tree.sample_start[t + 1])
      got = zip(
        tree.sample_call[span],
        tree.logprobs[span],
        tree.versions[span],
        strict=True,
      )
      assert list(got) == samples[prefix]
      assert tree.trainable()[t] == bool(samples[prefix])
      assert tree.multiplicity()[t] == len(samples[prefix])
  assert seen == samples.keys()


@settings(max_examples=100, deadline=None)
@given(histories())
def test_nodes_end_where_paths_part_and_where_calls_end(calls):
  tree = tree_lib.build(calls)
  ends = set(tree.leaf_of_call.tolist())
  for node in range(len(tree.parent)):
    children = np.flatnonzero(tree.parent == node)
    assert tree.stop[node] > tree.start[node]
    assert len(children) >= 2 or node in ends
    firsts = tree.ids[tree.start[children]]
    assert (np.diff(firsts) > 0).all()
    below = tree.subtree_end()[node]
    inside = [v for v in range(len(tree.parent)) if node in tree.nodes(v)]
    assert inside == list(range(node, below))
  leaves = [leaf.node for leaf in tree.leaves()]
  assert leaves == [
    v for v in range(len(tree.parent)) if not (tree.parent == v).any()
  ]


def test_a_leaf_has_the_role_of_the_first_call_that_ends_there():
  tree = tree_lib.build(
    [
      call(10, [1, 2], [3], role="sub_agent"),
      call(9, [1, 2], [3], role="main"),
      call(11, [7], [8, 9], role="main_summary"),
    ]
  )
  assert tree.call_ids == ("9", "10", "11")
  roles = {tuple(tree.ids[tree.path(x.node)]): x.role for x in tree.leaves()}
  assert roles == {(1, 2, 3): "main", (7, 8, 9): "main_summary"}


def test_no_calls_and_calls_without_tokens():
  assert len(tree_lib.build([]).ids) == 0
  tree = tree_lib.build([call(0, [], []), call(1, [4], [])])
  assert [x.tolist() for x in tree.read("0")] == [[], [], [], []]
  assert tree.leaf_of_call[0] == -1
  assert tree.read("1")[0].tolist() == [4]
  assert not tree.trainable().any()


def test_what_cannot_be_trained_is_refused_by_name():
  with pytest.raises(ValueError, match=r"call 0 .*empty prompt but 1 compl"):
    tree_lib.build([call(0, [], [1])])
  with pytest.raises(ValueError, match=r"call 3 of execution g/0 is there"):
    tree_lib.build([call(3, [1], [1]), call(3, [2], [1])])
  with pytest.raises(KeyError, match="no call '5' among 1"):
    tree_lib.build([call(3, [1], [1])]).read("5")


def test_memory_is_that_of_new_tokens():
  """300 calls that resend their history, one at a time: 4.5M ids flat."""
  history = np.arange(30_000, dtype=np.int32)

  def calls():
    for i in range(300):
      n = 100 * (i + 1)
      yield call(i, history[: n - 2].copy(), history[n - 2 : n].copy())

  tracemalloc.start()
  tree = tree_lib.build(calls())
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  np.testing.assert_array_equal(tree.ids, history)
  assert tree.trainable().sum() == 600
  assert peak < 4_500_000
