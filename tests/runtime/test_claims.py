"""Every micro-step is inside exactly one sum that counts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.runtime.claims import ClaimError, Claims

CELLS = ("a", "b", "c")


def _filled(n, update=3):
  claims = Claims(update)
  for i in range(n):
    claims.add(f"batch {i}", (f"g{i}",))
  return claims


def test_a_micro_step_is_fixed_when_it_is_made():
  claims = _filled(2)
  first = claims.claim("a")
  assert first.key == (3, 0)
  assert (first.batch, first.groups) == ("batch 0", ("g0",))
  claims.give_back("a")
  assert claims.claim("b") is first


def test_cells_claim_in_order_and_each_once():
  claims = _filled(3)
  got = [claims.claim(c).index for c in ("a", "b", "a")]
  assert got == [0, 1, 2]
  assert claims.claim("b") is None
  assert claims.waiting == 0


def test_drained_needs_the_seal_and_every_micro_step():
  claims = _filled(1)
  step = claims.claim("a")
  claims.done("a", step.index)
  assert not claims.drained
  claims.seal()
  assert claims.drained
  with pytest.raises(ClaimError, match="sealed with 1"):
    claims.add("late")
  empty = Claims(1)
  empty.seal()
  assert empty.drained


def test_a_death_returns_finished_ones_too():
  claims = _filled(4)
  claims.seal()
  for cell in ("a", "b", "a", "b"):
    claims.claim(cell)
  for cell, i in (("a", 0), ("b", 1), ("a", 2), ("b", 3)):
    claims.done(cell, i)
  assert claims.drained
  assert claims.give_back("a") == (0, 2)
  assert not claims.drained
  assert claims.members() == ("b",)
  with pytest.raises(ClaimError, match="a has not claimed micro-step 0"):
    claims.done("a", 0)
  assert [claims.claim("b").index for _ in range(2)] == [0, 2]


def test_what_was_handed_over_is_not_given_back():
  claims = _filled(3)
  claims.claim("a")
  with pytest.raises(ClaimError, match=r"a still works on micro-steps \[0\]"):
    claims.hand_over("a")
  claims.done("a", 0)
  assert claims.hand_over("a") == (0,)
  claims.claim("a")
  assert claims.give_back("a") == (1,)
  claims.start_over()
  assert claims.waiting == 3


def test_later_passes_keep_what_the_first_recorded():
  claims = _filled(2)
  claims.seal()
  for i in range(2):
    claims.claim("a")
    claims.done("a", i, extras=f"logp {i}")
  with pytest.raises(ClaimError, match="0 of 2 micro-steps are handed over"):
    claims.next_pass()
  claims.hand_over("a")
  claims.next_pass()
  assert claims.passes == 2
  again = [claims.claim("b") for _ in range(2)]
  assert [s.extras for s in again] == ["logp 0", "logp 1"]
  assert [s.batch for s in again] == ["batch 0", "batch 1"]


class Model:
  """Sums of toy cells: a multiset of indices each, and the core's."""

  def __init__(self, n):
    self.claims = _filled(n)
    self.claims.seal()
    self.working = {c: None for c in CELLS}
    self.inside = {c: [] for c in CELLS}
    self.core = []

  def act(self, kind, cell):
    if kind == "claim" and self.working[cell] is None:
      self.working[cell] = self.claims.claim(cell)
    elif kind == "finish" and self.working[cell] is not None:
      step, self.working[cell] = self.working[cell], None
      self.claims.done(cell, step.index)
      self.inside[cell].append(step.index)
    elif kind == "die":
      given = self.claims.give_back(cell)
      assert set(self.inside[cell]) <= set(given)
      self.working[cell], self.inside[cell] = None, []
    elif kind == "leave" and self.working[cell] is None:
      assert sorted(self.claims.hand_over(cell)) == sorted(self.inside[cell])
      self.core += self.inside[cell]
      self.inside[cell] = []
    elif kind == "core dies":
      self.claims.start_over()
      self.core = []
      self.working = {c: None for c in CELLS}
      self.inside = {c: [] for c in CELLS}

  def counted(self):
    return sorted(
      self.core + [i for held in self.inside.values() for i in held]
    )


@settings(max_examples=300, deadline=None)
@given(
  st.integers(0, 12),
  st.lists(
    st.tuples(
      st.sampled_from(
        ["claim", "finish"] * 4 + ["die", "leave"] * 2 + ["core dies"]
      ),
      st.sampled_from(CELLS),
    ),
    max_size=80,
  ),
)
def test_every_history_counts_each_micro_step_once(n, history):
  model = Model(n)
  for kind, cell in history:
    model.act(kind, cell)
    counted = model.counted()
    assert len(set(counted)) == len(counted)
    assert model.claims.drained == (counted == list(range(n)))
  for _ in range(n):
    for kind in ("claim", "finish"):
      for cell in CELLS:
        model.act(kind, cell)
  assert model.claims.drained
  assert model.counted() == list(range(n))
