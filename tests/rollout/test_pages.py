"""Pages: accounting, the prefix cache, eviction."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
  RuleBasedStateMachine,
  invariant,
  precondition,
  rule,
)

from gyre.rollout import engine, pages, schedule

SIZE = 4


def _keys(ids, version=0, salt=""):
  root = pages.root_key(version, salt)
  return pages.page_keys(np.asarray(ids, np.int32), SIZE, root)


def test_keys_chain_tokens_version_and_salt():
  ids = list(range(12))
  keys = _keys(ids)
  assert len(keys) == 3
  assert _keys([*ids, 99]) == keys
  assert _keys([*ids[:8], 0, 0, 0, 0])[:2] == keys[:2]
  # An equal page after another beginning is another page.
  assert _keys([9, 9, 9, 9, *ids[4:]])[1] != keys[1]
  everything = keys + _keys(ids, version=1) + _keys(ids, salt="tenant")
  assert len(set(everything)) == 9


def test_cached_pages_are_matched_shared_and_evicted_last_used_first():
  pool = pages.PagePool(4, SIZE)
  first, second = _keys(range(8))
  held = pool.take(2)
  pool.publish(held[0], first)
  pool.publish(held[1], second)
  assert pool.match([first, second]) == held
  assert [pool.count(p) for p in held] == [2, 2]
  pool.release(held)
  pool.release(held)
  assert pool.available == 3
  # One page is empty; the next to go is the end of the chain.
  pool.take(2)
  assert pool.match([first, second]) == held[:1]


def test_flush_forgets_everything_but_holds():
  pool = pages.PagePool(5, SIZE)
  (key,) = _keys(range(4))
  (page,) = pool.take(1)
  pool.publish(page, key)
  pool.flush()
  assert pool.match([key]) == []
  assert pool.count(page) == 1
  pool.release([page])
  assert pool.available == 4


def test_partial_pages_are_found_by_common_beginning_until_released():
  pool = pages.PagePool(5, SIZE)
  root = pages.root_key(0, "")
  (page,) = pool.take(1)
  pool.publish_partial(page, root, [1, 2, 3])
  assert pool.match_partial(root, [1, 2, 9]) == (page, 2)
  assert pool.match_partial(root, [9]) is None
  assert pool.match_partial(pages.root_key(1, ""), [1, 2]) is None
  pool.release([page])
  assert pool.match_partial(root, [1, 2, 3]) is None


def test_release_of_a_page_that_nobody_holds_is_an_error():
  pool = pages.PagePool(3, SIZE)
  with pytest.raises(ValueError, match="count 0"):
    pool.release([1])


class PoolMachine(RuleBasedStateMachine):
  """Random takes, matches, publications and releases leak nothing."""

  def __init__(self):
    super().__init__()
    self.pool = pages.PagePool(9, SIZE)
    self.held: list[list[int]] = []

  @rule(n=st.integers(0, 9))
  def take(self, n):
    available = self.pool.available
    got = self.pool.take(n)
    assert (got is None) == (n > available)
    if got is None:
      assert self.pool.available == available
    else:
      for page in got:
        assert all(page not in other for other in self.held)
      self.held.append(got)

  @rule(start=st.integers(0, 2), length=st.integers(0, 5))
  def match(self, start, length):
    keys = _keys(np.full(length * SIZE, start))
    self.held.append(self.pool.match(keys))

  @precondition(lambda self: self.held)
  @rule(data=st.data(), start=st.integers(0, 2))
  def publish(self, data, start):
    held = data.draw(st.sampled_from(self.held))
    for page, key in zip(
      held, _keys(np.full(len(held) * SIZE, start)), strict=True
    ):
      self.pool.publish(page, key)

  @precondition(lambda self: self.held)
  @rule(data=st.data(), ids=st.lists(st.integers(0, 2), max_size=3))
  def publish_partial(self, data, ids):
    for page in data.draw(st.sampled_from(self.held)):
      self.pool.publish_partial(page, pages.root_key(0, ""), ids)

  @precondition(lambda self: self.held)
  @rule(data=st.data())
  def release(self, data):
    index = data.draw(st.integers(0, len(self.held) - 1))
    self.pool.release(self.held.pop(index))

  @rule()
  def flush(self):
    self.pool.flush()

  @invariant()
  def counts_are_the_holds(self):
    for page in range(1, self.pool.num_pages):
      assert self.pool.count(page) == sum(h.count(page) for h in self.held)

  @invariant()
  def every_page_is_held_or_available(self):
    held = {page for h in self.held for page in h}
    assert self.pool.available == self.pool.num_pages - 1 - len(held)
    assert 0 not in held  # padding rows write there


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30)


def _live(ids, new=8, name="", salt=""):
  request = engine.Request(
    ids=ids, max_new_tokens=new, request_id=name, cache_salt=salt
  )
  return schedule.Live(
    request=request, name=name, ids=list(ids), prompt=len(ids),
    arrival=0, stops=frozenset(),
  )  # fmt: skip


def _prefill(sched, live):
  sched.advance(live, live.pending)


def test_twins_wait_for_the_first_and_share_its_pages():
  sched = schedule.Scheduler(pages.PagePool(40, SIZE), 8)
  twins = [_live(range(11)) for _ in range(4)]
  sched.waiting.extend(twins)
  assert sched.admit() == []
  assert sched.running == twins[:1]
  _prefill(sched, twins[0])
  copies = sched.admit()
  assert sched.running == twins
  # Two full pages shared, the third copied: only the last token is left.
  assert [t.pages[:2] for t in twins] == [twins[0].pages[:2]] * 4
  assert [t.pending for t in twins] == [0] * 4
  assert copies == [(twins[0].pages[2], t.pages[2]) for t in twins[1:]]


def test_an_aborted_leader_hands_over():
  sched = schedule.Scheduler(pages.PagePool(40, SIZE), 8)
  first, second = _live(range(11)), _live(range(11))
  sched.waiting.extend([first, second])
  sched.admit()
  sched.remove(first)
  sched.admit()
  assert sched.running == [second]
  assert second.pending == 10


def test_the_youngest_is_preempted_and_finds_its_pages_again():
  sched = schedule.Scheduler(pages.PagePool(8, SIZE), 8)
  old, young = _live([0] * 9, new=20), _live([1] * 9, new=20)
  sched.waiting.extend([old, young])
  sched.admit()
  for live in (old, young):
    _prefill(sched, live)
  for _ in range(8):
    lives, steps = sched.reserve(sched.decoding(), 1)
    assert steps == 1
    for live in lives:
      live.ids.append(5)
      sched.advance(live, 1)
  assert sched.running == [old]
  assert list(sched.waiting) == [young]
  assert sched.preemptions == 1
  sched.remove(old)
  sched.admit()
  assert sched.running == [young]
  assert young.computed >= 2 * SIZE


def test_restart_computes_everything_again_under_the_new_version():
  sched = schedule.Scheduler(pages.PagePool(40, SIZE), 8)
  live = _live(range(9))
  sched.waiting.append(live)
  sched.admit()
  _prefill(sched, live)
  sched.restart(3)
  assert sched.pool.available == 39
  sched.admit()
  assert live.pending == 8
