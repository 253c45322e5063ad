"""The longest shared prefix, against comparing with every sequence."""

import hypothesis as hp
import hypothesis.strategies as st
import numpy as np

from gyre.trajectory import prefixes


def _shared(a, b):
  n = 0
  while n < min(len(a), len(b)) and a[n] == b[n]:
    n += 1
  return n


@hp.settings(deadline=None)
@hp.given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=14))
def test_the_longest_shared_prefix_of_all_that_were_added(sequences):
  known, before = prefixes.Prefixes(), []
  for number, ids in enumerate(sequences):
    array = np.asarray(ids, np.int32)
    best = max((_shared(b, ids) for b in before), default=0)
    found, whole = known.match(array), known.whole(array)
    standing = [b for b in before if ids[: len(b)] == b]
    longest = max(standing, key=len, default=None)
    assert whole == tuple(i for i, b in enumerate(before) if b == longest)
    owner, length = known.add(number, array)
    assert found == (owner, length) and length == best
    assert (owner is None) == (best == 0)
    if best:
      assert before[owner][:best] == ids[:best]
    array[:] = 7  # what was added is not kept by reference
    before.append(ids)


@hp.given(st.integers(0, 30_000), st.integers(0, 9), st.integers(0, 9))
def test_common_prefix_over_blocks(length, a, b):
  x = np.arange(length, dtype=np.int32)
  left = np.concatenate([x, np.full(a, -1, np.int32)])
  right = np.concatenate([x, np.full(b, -2, np.int32)])
  assert prefixes.common(left, right) == length
