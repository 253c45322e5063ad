"""Advantages: published values, hand calculations, invariances."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.learner import advantages


def test_golden_low_variance_grpo_f64():
  out = advantages.grpo([1.0, 1.00001], [0, 0], ddof=1, eps=1e-6)
  np.testing.assert_allclose(out.values, [-0.6195, 0.6195], atol=5e-5)


def test_golden_low_variance_grpo_f32():
  rewards = np.array([1, 1.00001], np.float32)
  out = advantages.grpo(rewards, [0, 0], ddof=1, eps=1e-6)
  assert out.values.dtype == np.float32
  np.testing.assert_allclose(out.values, [-0.6196, 0.6196], atol=2e-4)


def test_golden_rloo():
  out = advantages.rloo([1, 2, 3], [0, 0, 0])
  np.testing.assert_array_equal(out.values, [-1.5, 0, 1.5])


def test_golden_rloo_of_one_is_zero():
  assert advantages.rloo([5.0], [0]).values[0] == 0


@pytest.mark.parametrize("estimate", [advantages.grpo, advantages.rloo])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-30, 7e8])
def test_zero_variance_is_exactly_zero(estimate, value):
  for size in range(2, 12):
    out = estimate([value] * size, [0] * size)
    assert not out.values.any()
    assert out.zero_variance.all()


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("normalize", [False, True])
def test_grpo_against_numpy(ddof, normalize):
  rng = np.random.default_rng(0)
  group = rng.integers(0, 5, 40)
  r = rng.normal(size=40)
  out = advantages.grpo(r, group, normalize_std=normalize, ddof=ddof)
  for g in range(5):
    x = r[group == g]
    want = x - x.mean()
    if normalize:
      want = want / (x.std(ddof=ddof) + 1e-6)
    np.testing.assert_allclose(out.values[group == g], want, rtol=1e-12)


def test_grpo_variance_is_centred():
  """A large mean must not eat a small spread (one-pass variance gives 0)."""
  x = np.array([0.0, 1.0, 2.0, 5.0])
  plain = advantages.grpo(x, [0] * 4, eps=0).values
  moved = advantages.grpo(x + 1e8, [0] * 4, eps=0).values
  np.testing.assert_allclose(moved, plain, rtol=1e-7)


@pytest.mark.parametrize("estimate", [advantages.grpo, advantages.rloo])
def test_one_scored_execution_left_gives_zero(estimate):
  out = estimate([3.0, None, None], ["a", "a", "a"])
  np.testing.assert_array_equal(out.values, [0, 0, 0])
  np.testing.assert_array_equal(out.included, [True, False, False])


@pytest.mark.parametrize("estimate", [advantages.grpo, advantages.rloo])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_reward_is_excluded_and_counted(estimate, bad):
  with_bad = estimate([1.0, bad, 2.0, 4.0], [0, 0, 0, 0])
  without = estimate([1.0, 2.0, 4.0], [0, 0, 0])
  np.testing.assert_array_equal(with_bad.included, [1, 0, 1, 1])
  assert with_bad.num_nonfinite == 1
  np.testing.assert_array_equal(with_bad.values[[0, 2, 3]], without.values)
  assert with_bad.values[1] == 0


@pytest.mark.parametrize("estimate", [advantages.grpo, advantages.rloo])
def test_pitfall_9_a_failure_enters_no_group_statistic(estimate):
  """None (eval_failed) is not a reward of 0, and is no error either."""
  failed = estimate([1.0, None, 3.0, 3.5], [0, 0, 0, 0])
  zero = estimate([1.0, 0.0, 3.0, 3.5], [0, 0, 0, 0])
  without = estimate([1.0, 3.0, 3.5], [0, 0, 0])
  np.testing.assert_array_equal(failed.values[[0, 2, 3]], without.values)
  assert abs(failed.values[0] - zero.values[0]) > 0.1
  assert not failed.included[1] and failed.num_nonfinite == 0


@settings(max_examples=50, deadline=None)
@given(
  st.lists(st.floats(-100, 100), min_size=2, max_size=12),
  st.randoms(use_true_random=False),
)
def test_group_advantages_sum_to_zero_in_any_order(rewards, random):
  order = list(range(len(rewards)))
  random.shuffle(order)
  for estimate in (advantages.grpo, advantages.rloo):
    out = estimate(rewards, [0] * len(rewards))
    scale = 1e-9 * (1 + np.abs(out.values).max()) * len(rewards)
    assert abs(out.values.sum()) <= max(scale, 1e-7)
    mixed = estimate([rewards[i] for i in order], [0] * len(rewards))
    np.testing.assert_allclose(
      mixed.values, out.values[order], rtol=1e-4, atol=1e-7
    )


def test_mismatched_lengths_are_refused():
  with pytest.raises(ValueError, match=r"\(2,\).*3"):
    advantages.grpo([1.0, 2.0], [0, 0, 0])


def _gae_loop(r, v, ids, gamma, lam, bootstrap):
  out = np.zeros(len(r))
  for t in reversed(range(len(r))):
    last = t + 1 == len(r) or ids[t + 1] != ids[t]
    after = bootstrap[t] if last else v[t + 1]
    carry = 0 if last else out[t + 1]
    out[t] = r[t] + gamma * after - v[t] + gamma * lam * carry
  return out


@pytest.mark.parametrize("gamma,lam", [(1, 1), (0.9, 0.8), (0.99, 0)])
@pytest.mark.parametrize("boot", [False, True])
def test_gae_against_the_recursion(x64, gamma, lam, boot):
  rng = np.random.default_rng(1)
  ids = np.repeat([4, 2, 9, 0], [3, 1, 5, 2])
  r, v, b = rng.normal(size=(3, len(ids)))
  got, returns = advantages.gae(
    jnp.asarray(r),
    jnp.asarray(v),
    jnp.asarray(ids),
    gamma=gamma,
    lam=lam,
    bootstrap=jnp.asarray(b) if boot else None,
  )
  want = _gae_loop(r, v, ids, gamma, lam, b if boot else 0 * b)
  np.testing.assert_allclose(got, want, atol=1e-13)
  np.testing.assert_allclose(returns, want + v, atol=1e-13)


def test_gae_of_t1_is_score_minus_value():
  """gamma = lam = 1, score on the last token: A_t = score - V_t."""
  v = jnp.array([0.1, 0.4, 0.2, 0.7, 0.3])
  r = jnp.array([0, 0, 1.0, 0, 0.5])
  got, returns = advantages.gae(r, v, jnp.array([0, 0, 0, 1, 1]))
  np.testing.assert_allclose(got, [0.9, 0.6, 0.8, -0.2, 0.2], atol=1e-6)
  np.testing.assert_allclose(returns, [1, 1, 1, 0.5, 0.5], atol=1e-6)


def test_shuffled_deals_out_the_same_values():
  rng = np.random.default_rng(1)
  group = np.repeat(np.arange(12), 4)
  rewards = rng.integers(0, 3, 48).astype(object)
  rewards[group == 3] = 1  # no variance
  rewards[5] = None
  plain = advantages.grpo(rewards, group)
  out = advantages.shuffled(plain, seed=0, step=7)
  live = plain.included & ~plain.zero_variance
  np.testing.assert_array_equal(
    np.sort(out.values[live]), np.sort(plain.values[live])
  )
  assert not out.values[~live].any()
  np.testing.assert_array_equal(out.included, plain.included)
  np.testing.assert_array_equal(out.zero_variance, plain.zero_variance)


def test_shuffled_by_seed_and_step():
  rng = np.random.default_rng(2)
  plain = advantages.grpo(rng.normal(size=200), np.repeat(np.arange(25), 8))
  deal = [
    advantages.shuffled(plain, seed, step).values
    for seed, step in ((0, 1), (0, 1), (0, 2), (1, 1))
  ]
  np.testing.assert_array_equal(deal[0], deal[1])
  for other in (plain.values, deal[2], deal[3]):
    # Nothing of the order is left: |r| of 200 is below 4 / sqrt(200).
    assert abs(np.corrcoef(deal[0], other)[0, 1]) < 0.28
