"""Samples of an execution: every sampled token once, under its context."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.trajectory import chain
from gyre.types import Call, Execution


def _call(number, prompt, completion, role="main", version=1):
  n = len(completion)
  return Call(
    execution_id="g/0",
    group_id="g",
    call_id=str(number),
    prompt_ids=prompt,
    completion_ids=completion,
    logprobs=[-0.5 - number - 0.01 * i for i in range(n)],
    versions=[version] * n,
    finish_reason="stop",
    role=role,
  )


def _execution(*calls, truncated=""):
  return Execution("g/0", "g", 0, "task", calls=calls, truncated=truncated)


def test_calls_that_extend_each_other_are_one_sample():
  (sample,) = chain.samples(
    _execution(
      _call(0, [1, 2], [3, 4], version=5),
      _call(1, [1, 2, 3, 4, 9, 9], [6], version=7),
    )
  )
  np.testing.assert_array_equal(sample.ids, [1, 2, 3, 4, 9, 9, 6])
  np.testing.assert_array_equal(sample.mask, [0, 0, 1, 1, 0, 0, 1])
  np.testing.assert_allclose(
    sample.logprobs, [0, 0, -0.5, -0.51, 0, 0, -1.5], atol=1e-6
  )
  np.testing.assert_array_equal(sample.versions, [-1, -1, 5, 5, -1, -1, 7])
  assert sample.execution_id == "g/0" and sample.group_id == "g"


def test_one_changed_context_token_starts_a_new_sample():
  first, second = chain.samples(
    _execution(_call(0, [1, 2], [3, 4]), _call(1, [1, 2, 3, 5, 9], [6, 7]))
  )
  np.testing.assert_array_equal(first.ids, [1, 2, 3, 4])
  np.testing.assert_array_equal(second.ids, [1, 2, 3, 5, 9, 6, 7])
  np.testing.assert_array_equal(second.mask, [0, 0, 0, 0, 0, 1, 1])


def test_a_retry_of_the_same_prompt_is_a_sample_of_its_own():
  out = chain.samples(
    _execution(_call(0, [1, 2], [3]), _call(1, [1, 2], [4, 5]))
  )
  assert [s.mask.sum() for s in out] == [1, 2]


def test_interleaved_sub_agent_continues_its_own_chain():
  main, sub = chain.samples(
    _execution(
      _call(0, [1], [2]),
      _call(1, [7], [8], role="sub_agent"),
      _call(2, [1, 2, 3], [4]),
      _call(3, [7, 8, 9], [5], role="sub_agent"),
    )
  )
  np.testing.assert_array_equal(main.ids, [1, 2, 3, 4])
  np.testing.assert_array_equal(sub.ids, [7, 8, 9, 5])
  assert sub.role == "sub_agent"


def test_the_longest_open_sample_is_continued():
  out = chain.samples(
    _execution(
      _call(0, [1], [2]),
      _call(1, [1], [2, 3]),
      _call(2, [1, 2, 3, 4], [5]),
    )
  )
  assert [list(s.ids) for s in out] == [[1, 2], [1, 2, 3, 4, 5]]


def test_pitfall_3_a_truncated_execution_is_not_shortened():
  execution = _execution(
    _call(0, [1, 2], [3, 4]),
    _call(1, [1, 2, 3, 4], [0, 0, 0]),
    truncated="tokens",
  )
  (sample,) = chain.samples(execution)
  assert sample.mask.sum() == execution.num_sampled
  # A pad or end id that was sampled is trained as any other.
  np.testing.assert_array_equal(sample.ids[sample.mask], [3, 4, 0, 0, 0])


def test_empty_completions_teach_nothing():
  assert chain.samples(_execution(_call(0, [1, 2], []))) == []


def test_an_empty_prompt_is_refused():
  with pytest.raises(ValueError, match=r"call 0 .*1 completion"):
    chain.samples(_execution(_call(0, [], [1])))


@st.composite
def _histories(draw):
  """Calls over a tiny alphabet: extending, branching and retrying."""
  ids = st.lists(st.integers(0, 1), min_size=0, max_size=3)
  calls, seen = [], [[0]]
  for number in range(draw(st.integers(1, 8))):
    base = draw(st.sampled_from(seen))
    prompt = base + draw(ids)
    completion = draw(ids)
    calls.append(_call(number, prompt, completion))
    seen += [prompt, prompt + completion]
  return calls


@settings(max_examples=200, deadline=None)
@given(_histories())
def test_every_sampled_token_lies_in_exactly_one_mask(calls):
  samples = chain.samples(_execution(*calls))
  # Logprobs here name (call, position): each once, none invented.
  want = sorted(float(x) for c in calls for x in c.logprobs)
  got = sorted(float(x) for s in samples for x in s.logprobs[s.mask])
  assert got == want
  by_logprob = {
    float(lp): (c, i) for c in calls for i, lp in enumerate(c.logprobs)
  }
  for s in samples:
    assert s.mask[-1]
    for at in np.flatnonzero(s.mask):
      call, i = by_logprob[float(s.logprobs[at])]
      context = np.concatenate([call.prompt_ids, call.completion_ids[:i]])
      np.testing.assert_array_equal(s.ids[:at], context)
      assert s.ids[at] == call.completion_ids[i]


def test_a_long_conversation_is_one_sample():
  calls, ids = [], [1, 2, 3]
  for n in range(200):
    calls.append(_call(n, ids, [n, n + 1]))
    ids = [*ids, n, n + 1, 7]
  (sample,) = chain.samples(_execution(*calls))
  np.testing.assert_array_equal(sample.ids, ids[:-1])
  assert sample.mask.sum() == 400
