"""Selection: masks, bounds, priorities, weights that are unbiased."""

import collections
import itertools

import numpy as np
import pytest
from histories import ROLES, call, histories
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.trajectory import select as select_lib
from gyre.trajectory import tree as tree_lib

MODES = select_lib.MODES
examples = settings(max_examples=100, deadline=None)


def select(calls, **options):
  options.setdefault("max_samples", None)
  return select_lib.select(
    tree_lib.build(calls), execution_id="g/0", group_id="g", **options
  )


class Truth:
  """What calls sampled, from a dictionary of prefixes alone."""

  def __init__(self, calls):
    self.sampled = collections.defaultdict(list)  # prefix -> [(call, i)]
    self.calls = [c for c in calls if len(c.completion_ids)]
    for c in self.calls:
      ids = [*c.prompt_ids.tolist(), *c.completion_ids.tolist()]
      for i in range(len(c.completion_ids)):
        prefix = tuple(ids[: len(c.prompt_ids) + i + 1])
        self.sampled[prefix].append((c, i))
    below = {p[:n] for p in self.sampled for n in range(len(p))}
    # In depth-first order: siblings by id, a prefix before what extends it.
    self.leaves = sorted(p for p in self.sampled if p not in below)
    self.roles = [
      next(c.role for c, i in self.sampled[p] if i == len(c.logprobs) - 1)
      for p in self.leaves
    ]

  def path(self, leaf):
    """The sampled prefixes of a leaf's path."""
    prefixes = (leaf[: n + 1] for n in range(len(leaf)))
    return [p for p in prefixes if p in self.sampled]

  def ending(self, leaf):
    """Calls whose last token lies on a leaf's path."""
    return [
      c
      for c in self.calls
      if leaf[: len(c.prompt_ids) + len(c.completion_ids)]
      == (*c.prompt_ids.tolist(), *c.completion_ids.tolist())
    ]


def masked(sample):
  """(prefix, logprob, version) of each token that a sample trains."""
  ids = sample.ids.tolist()
  for at, *told in zip(
    sample.trained, sample.logprobs, sample.versions, strict=True
  ):
    yield tuple(ids[: at + 1]), *told


# --- modes, with everything drawn -----------------------------------------


@examples
@given(histories(), st.integers(0, 3))
def test_once_every_sampled_token_lies_in_exactly_one_mask(calls, seed):
  truth = Truth(calls)
  out = select(calls, seed=seed)
  got = [x for s in out.samples for x in masked(s)]
  want = [
    (p, c[0].logprobs[c[1]], c[0].versions[c[1]])
    for p, (c, *_) in truth.sampled.items()
  ]
  assert sorted(got) == sorted(want)
  assert sorted(tuple(s.ids) for s in out.samples) == truth.leaves
  for s in out.samples:  # U shrinks, and nothing trails the last token
    assert s.mask[-1] and s.weights is None and s.execution_weight is None
  assert out.stats["tokens_trained"] == len(truth.sampled)
  assert not any(v for k, v in out.stats.items() if k.startswith("dropped"))


@examples
@given(histories(), st.integers(0, 3))
def test_multiplicity_is_each_call_by_itself(calls, seed):
  out = select(calls, mode="multiplicity", seed=seed)

  def flat(ids, trained, logprobs, versions, role):
    return (*map(tuple, (ids, trained, logprobs, versions)), role)

  got = [
    flat(s.ids, s.trained, s.logprobs, s.versions, s.role) for s in out.samples
  ]
  want = []
  for c in Truth(calls).calls:
    n = len(c.prompt_ids)
    ids = np.concatenate([c.prompt_ids, c.completion_ids])
    trained = range(n, len(ids))
    want.append(flat(ids, trained, c.logprobs, c.versions, c.role))
  assert sorted(got) == sorted(want)


@examples
@given(histories(), st.integers(0, 3))
def test_leaf_is_each_path_by_itself(calls, seed):
  truth = Truth(calls)
  out = select(calls, mode="leaf", seed=seed)
  got = {tuple(s.ids): s for s in out.samples}
  assert sorted(got) == truth.leaves and len(got) == len(out.samples)
  for leaf, role in zip(truth.leaves, truth.roles, strict=True):
    assert [p for p, _, _ in masked(got[leaf])] == truth.path(leaf)
    assert got[leaf].role == role


@examples
@given(histories(), st.sampled_from(MODES), st.integers(1, 4), st.booleans())
def test_nothing_that_was_not_sampled_is_ever_in_a_mask(
  calls, mode, most, unbiased
):
  truth = Truth(calls)
  if unbiased:
    most = max(most, len(set(truth.roles)))
  out = select(calls, mode=mode, max_samples=most, unbiased=unbiased)
  assert out.stats["paths"] == min(most, len(truth.leaves))
  for s in out.samples:
    for prefix, logprob, version in masked(s):
      assert (logprob, version) in [
        (c.logprobs[i], c.versions[i]) for c, i in truth.sampled[prefix]
      ]


# --- draws ----------------------------------------------------------------


def _oracle(calls, mode, roles, picks):
  """Weights of every draw by the page's own words; `picks` decides."""
  truth = Truth(calls)

  def units(leaf):
    if mode == "multiplicity":
      return {
        (c.call_id, i)
        for c in truth.ending(leaf)
        for i in range(len(c.completion_ids))
      }
    return set(truth.path(leaf))

  rest = {x for leaf in truth.leaves for x in units(leaf)}
  rank = [min(roles.index(r), len(roles)) for r in truth.roles]
  weights = []
  while rest:
    counts = [len(units(leaf) & rest) for leaf in truth.leaves]
    top = min(r for r, n in zip(rank, counts, strict=True) if n)
    counts = [n if r == top else 0 for r, n in zip(rank, counts, strict=True)]
    weights.append(counts)
    candidates = [i for i, n in enumerate(counts) if n]
    leaf = candidates[picks[len(weights) - 1] % len(candidates)]
    rest -= units(truth.leaves[leaf])
  return weights


@examples
@given(
  histories(),
  st.sampled_from(MODES),
  st.permutations(ROLES),
  st.lists(st.integers(0, 9), min_size=8, max_size=8),
)
def test_draws_are_by_priority_and_uncovered_tokens(calls, mode, roles, picks):
  seen = []

  def choose(weights):
    seen.append(weights.tolist())
    candidates = np.flatnonzero(weights)
    return int(candidates[picks[len(seen) - 1] % len(candidates)])

  select(calls, mode=mode, roles=roles, choose=choose)
  assert seen == _oracle(calls, mode, roles, picks)


def _fan(sizes, role="main", prompt=(1, 2)):
  """One call a leaf, disjoint below the prompt, of so many tokens each."""
  return [
    call(i, list(prompt), [10 + i] * n, role=role) for i, n in enumerate(sizes)
  ]


def test_the_seed_and_the_execution_decide_and_frequencies_are_right():
  tree = tree_lib.build(_fan([1, 3, 6]))
  count = collections.Counter()
  for i in range(2000):
    a, b = (
      select_lib.select(
        tree, execution_id=f"g/{i}", group_id="g", max_samples=1, seed=7
      )
      for _ in range(2)
    )
    assert a.samples[0].ids.tolist() == b.samples[0].ids.tolist()
    count[len(a.samples[0].ids) - 2] += 1
  for n in (1, 3, 6):  # within 4 standard deviations
    p = n / 10
    assert abs(count[n] / 2000 - p) < 4 * (p * (1 - p) / 2000) ** 0.5


def test_a_higher_role_is_drawn_first_and_others_are_dropped():
  calls = [
    call(0, [1], [2, 2]),
    call(1, [3], [4] * 50, role="sub_agent"),
    call(2, [5], [6, 6, 6], role="main_summary"),
    call(3, [7], [8], role="of another harness"),
  ]
  for most in range(1, 5):
    out = select(calls, max_samples=most)
    want = ["main", "main_summary", "sub_agent", "of another harness"]
    assert [s.role for s in out.samples] == want[:most]
  out = select(calls, max_samples=2)
  dropped = {k: v for k, v in out.stats.items() if k.startswith("dropped/")}
  assert dropped == {
    "dropped/main": 0,
    "dropped/main_summary": 0,
    "dropped/sub_agent": 50,
    "dropped/sub_agent_summary": 1,
  }
  first = select(calls, max_samples=1, roles=("sub_agent", "main"))
  assert first.samples[0].role == "sub_agent"


def test_a_token_budget_counts_shared_tokens_once():
  calls = [call(i, [1] * 10, [2 + i] * 4) for i in range(5)]
  for budget, paths in [(1, 1), (14, 1), (17, 1), (18, 2), (22, 3), (99, 5)]:
    assert select(calls, token_budget=budget).stats["paths"] == paths
  both = select(calls, token_budget=22, max_samples=2)
  assert both.stats["paths"] == 2


def test_stats():
  calls = [
    call(0, [1, 2], [3, 4]),
    call(1, [1, 2], [3, 5]),  # shares the 3
    call(2, [1, 2, 3, 4, 9], [6]),
    call(3, [1, 2, 8], []),
  ]
  stats = select(calls, max_samples=1).stats
  assert stats["calls"] == 3
  assert stats["tokens_flat"] == 4 + 4 + 6 + 3
  assert stats["tokens_unique"] == 2 + 1 + 1 + 1 + 2 + 1
  assert stats["tokens_trainable"] == 4
  assert stats["leaves"] == 2 and stats["paths"] == 1
  assert stats["nodes"] == 4 and stats["nodes_repeated"] == 1
  assert stats["tokens_trained"] + stats["dropped/main"] == 4


# --- the unbiased mode ----------------------------------------------------


def every_draw(run):
  """(probability, run(choose)) over every way that `choose` can answer."""
  stack = [()]
  while stack:
    given_ = stack.pop()
    taken, probability = [], [1.0]

    def choose(weights, given_=given_, taken=taken, probability=probability):
      n = len(taken)
      if n < len(given_):
        pick = given_[n]
      else:
        pick, *others = np.flatnonzero(weights).tolist()
        stack.extend((*taken, other) for other in others)
      taken.append(pick)
      probability[0] *= weights[pick] / weights.sum()
      return pick

    yield probability, run(choose)


def expected_weights(calls, mode, most):
  """Expectation of the weight of every unit that could be trained."""
  total = collections.Counter()
  sizes, mass = set(), 0.0
  outcomes = every_draw(
    lambda choose: select(
      calls, mode=mode, max_samples=most, unbiased=True, choose=choose
    )
  )
  for (p,), out in outcomes:
    mass += p
    for s in out.samples:
      weights = np.ones(len(s.trained)) if s.weights is None else s.weights
      for (prefix, logprob, _), w in zip(masked(s), weights, strict=True):
        if mode == "once":
          unit = prefix
        elif mode == "multiplicity":
          unit = float(logprob)
        else:
          unit = tuple(s.ids), prefix
        total[unit] += p * w
      if s.execution_weight is not None:
        sizes.add(s.execution_weight)
  assert abs(mass - 1) < 1e-12
  return total, sizes


def _units(calls, mode):
  truth = Truth(calls)
  if mode == "once":
    return set(truth.sampled)
  if mode == "multiplicity":
    return {float(x) for c in calls for x in c.logprobs}
  return {(leaf, p) for leaf in truth.leaves for p in truth.path(leaf)}


@settings(max_examples=60, deadline=None)
@given(
  histories(max_calls=6, roles=ROLES[:2]),
  st.sampled_from(MODES),
  st.integers(1, 4),
)
def test_unbiased_weights_expect_1_over_every_draw(calls, mode, most):
  most = max(most, len(set(Truth(calls).roles)))
  total, sizes = expected_weights(calls, mode, most)
  units = _units(calls, mode)
  assert total.keys() == units
  for unit, mean in total.items():
    assert abs(mean - 1) < 1e-12, (unit, mean)
  assert sizes <= {len(units)}


@pytest.mark.parametrize("mode", MODES)
def test_unbiased_over_every_draw_of_a_tree_of_two_roles(mode):
  calls = [
    call(0, [1], [2, 3]),
    call(1, [1, 2, 3], [4, 4, 4]),
    call(2, [1, 2, 3], [5]),
    call(3, [1], [2, 6, 7]),
    call(4, [1, 2, 6], [8], role="sub_agent"),
    call(5, [9], [1, 2], role="sub_agent"),
    call(6, [9], [1, 3, 3, 3], role="sub_agent"),
  ]
  for most in (2, 3, 4, 5):
    total, sizes = expected_weights(calls, mode, most)
    assert total.keys() == _units(calls, mode)
    np.testing.assert_allclose(list(total.values()), 1, atol=1e-12)
    assert sizes == {len(total)}
  assert expected_weights(calls, mode, 6)[1] == set()  # complete: weights 1


def test_weights_are_des_rajs_on_disjoint_leaves():
  """t_k = sum of those before + y_k / p_k; the estimate is their mean."""
  sizes = [2, 3, 5, 7]
  rng = np.random.default_rng(0)
  values = [rng.normal(size=n) for n in sizes]
  for order in itertools.permutations(range(4), 3):
    script = iter(order)
    out = select(
      _fan(sizes),
      max_samples=3,
      unbiased=True,
      choose=lambda _, script=script: next(script),
    )
    before, rest, estimates = 0.0, sum(sizes), []
    for i in order:
      estimates.append(before + values[i].sum() / (sizes[i] / rest))
      before += values[i].sum()
      rest -= sizes[i]
    got = sum(
      s.weights @ values[i] for i, s in zip(order, out.samples, strict=True)
    )
    np.testing.assert_allclose(got, np.mean(estimates), rtol=1e-12)
    assert {s.execution_weight for s in out.samples} == {sum(sizes)}


@examples
@given(
  histories(), st.sampled_from(MODES), st.integers(0, 4), st.integers(0, 3)
)
def test_each_role_has_a_draw(calls, mode, more, seed):
  present = set(Truth(calls).roles)
  most = len(present) + more
  if not most:
    return
  out = select(calls, mode=mode, max_samples=most, unbiased=True, seed=seed)
  ends = {tuple(s.ids) for s in out.samples}
  truth = Truth(calls)
  drawn = {
    role
    for leaf, role in zip(truth.leaves, truth.roles, strict=True)
    if leaf in ends
  }
  assert drawn == present
  assert out.stats["paths"] == min(most, len(truth.leaves))


def test_what_cannot_be_done_is_refused_with_both_values():
  calls = [call(0, [1], [2]), call(1, [3], [4], role="sub_agent")]
  for options, said in [
    ({"mode": "twice"}, r"'twice' is not one of"),
    ({"max_samples": 0}, r"max_samples must be positive or None, got 0"),
    ({"token_budget": -1}, r"token_budget must be positive or None, got -1"),
    ({"roles": ()}, r"at least one role"),
    ({"unbiased": True, "token_budget": 9}, r"token_budget is 9"),
    ({"unbiased": True, "max_samples": 1}, r"max_samples 1 .* 2 roles"),
  ]:
    with pytest.raises(ValueError, match=said):
      select(calls, **options)


# --- histories that agents make -------------------------------------------


def test_calls_that_extend_each_other_are_one_sample():
  (sample,) = select(
    [
      call(0, [1, 2], [3, 4], version=5),
      call(1, [1, 2, 3, 4, 9, 9], [6], version=7),
    ]
  ).samples
  np.testing.assert_array_equal(sample.ids, [1, 2, 3, 4, 9, 9, 6])
  np.testing.assert_array_equal(sample.trained, [2, 3, 6])
  np.testing.assert_allclose(sample.logprobs, [-1, -1.01, -2], atol=1e-6)
  np.testing.assert_array_equal(sample.versions, [5, 5, 7])
  assert sample.execution_id == "g/0" and sample.group_id == "g"


def test_one_changed_context_token_starts_a_new_sample():
  calls = [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 5, 9], [6, 7])]
  samples = {tuple(s.ids): s for s in select(calls).samples}
  other = samples.pop((1, 2, 3, 5, 9, 6, 7))
  assert samples.keys() == {(1, 2, 3, 4)}
  # The shared 3 was sampled and is trained once, with whichever came first.
  assert other.mask[[5, 6]].all() and not other.mask[[3, 4]].any()
  assert other.mask[2] != samples[1, 2, 3, 4].mask[2]


def test_interleaved_sub_agent_is_a_sample_of_its_own():
  main, sub = select(
    [
      call(0, [1], [2]),
      call(1, [7], [8], role="sub_agent"),
      call(2, [1, 2, 3], [4]),
      call(3, [7, 8, 9], [5], role="sub_agent"),
    ]
  ).samples
  np.testing.assert_array_equal(main.ids, [1, 2, 3, 4])
  np.testing.assert_array_equal(sub.ids, [7, 8, 9, 5])
  assert (main.role, sub.role) == ("main", "sub_agent")


def test_pitfall_3_sampled_pads_and_ends_are_trained_as_any_other():
  (sample,) = select(
    [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4], [0, 0, 0])]
  ).samples
  np.testing.assert_array_equal(sample.ids[sample.mask], [3, 4, 0, 0, 0])


def test_empty_completions_teach_nothing():
  out = select([call(0, [1, 2], [])])
  assert out.samples == [] and out.stats["paths"] == 0
  # An aborted call does not make its history a path of its own.
  calls = [call(0, [1], [2]), call(1, [1, 2, 3], []), call(2, [1, 2, 4], [])]
  (sample,) = select(calls, mode="leaf").samples
  np.testing.assert_array_equal(sample.ids, [1, 2])


def test_a_long_conversation_is_one_sample():
  calls, ids = [], [1, 2, 3]
  for n in range(200):
    calls.append(call(n, ids, [n, n + 1]))
    ids = [*ids, n, n + 1, 7]
  (sample,) = select(calls).samples
  np.testing.assert_array_equal(sample.ids, ids[:-1])
  assert len(sample.trained) == 400
