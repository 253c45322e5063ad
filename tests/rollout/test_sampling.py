"""Sampling against exact calculations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gyre.rollout import sampling

V = 700  # not a multiple of the block


def _exact(logits, temperature, top_k, top_p):
  """The distribution by sorting, in float64."""
  z = np.asarray(logits, np.float64) / temperature
  p = np.exp(z - z.max())
  order = np.argsort(-p)
  keep = np.zeros(len(p), bool)
  kept = order[:top_k] if top_k else order
  mass = np.cumsum(p[kept]) / p[kept].sum()
  n = np.searchsorted(mass, top_p) + 1 if top_p < 1 else len(kept)
  keep[kept[:n]] = True
  p = np.where(keep, p, 0.0)
  return p / p.sum()


def _draw(logits, n, temperature=1.0, top_k=0, top_p=1.0):
  def full(value, dtype):
    return jnp.full(n, value, dtype)

  u = sampling.position_uniform(
    jnp.arange(n, dtype=jnp.uint32), full(17, jnp.int32)
  )
  return jax.jit(sampling.sample)(
    jnp.tile(logits, (n, 1)),
    u,
    full(temperature, jnp.float32),
    full(top_k, jnp.int32),
    full(top_p, jnp.float32),
    full(True, bool),
  )


CASES = [
  (1.0, 0, 1.0),
  (0.5, 0, 1.0),
  (1.0, 5, 1.0),
  (1.0, 0, 0.7),
  (1.3, 20, 0.8),
  (1.0, 1, 1.0),
]


@pytest.mark.parametrize("temperature, top_k, top_p", CASES)
def test_frequencies_and_logprobs_are_those_of_the_exact_distribution(
  temperature, top_k, top_p
):
  logits = np.random.default_rng(0).normal(0, 2.5, V).astype(np.float32)
  p = _exact(logits, temperature, top_k, top_p)
  n = 8192
  ids, logps = (
    np.asarray(x) for x in _draw(logits, n, temperature, top_k, top_p)
  )
  assert (p[ids] > 0).all()
  np.testing.assert_allclose(logps, np.log(p[ids]), atol=1e-5)
  assert (logps <= 0).all()
  # Pool rare tokens so that each cell of the chi-square expects at least 10.
  counts = np.bincount(ids, minlength=V)
  common = p * n >= 10
  observed = np.append(counts[common], counts[~common].sum())
  expected = np.append(p[common], p[~common].sum()) * n
  ok = expected > 0
  chi2 = np.sum((observed[ok] - expected[ok]) ** 2 / expected[ok])
  freedom = ok.sum() - 1
  # Mean `freedom`, standard deviation sqrt(2 freedom); keys are fixed.
  assert chi2 < freedom + 4 * np.sqrt(2 * freedom) + 1e-6


def test_truncation_keeps_exactly_the_sorted_answer():
  rng = np.random.default_rng(1)
  rows = rng.permuted(np.tile(np.linspace(0.001, 1, V), (6, 1)), axis=1)
  rows = rows.astype(np.float32)
  top_k = np.array([0, 1, 7, 0, 50, V], np.int32)
  top_p = np.array([1, 1, 1, 0.3, 0.5, 0.99], np.float32)
  kept = rows >= np.asarray(sampling.cutoff(rows, top_k, top_p))
  for row, k, share, got in zip(rows, top_k, top_p, kept, strict=True):
    expected = _exact(np.log(row), 1.0, int(k), float(share)) > 0
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("vocab", [V, 1024, 20_000])
def test_the_last_token_that_a_cut_keeps_counts_in_the_sum(vocab):
  rng = np.random.default_rng(3)
  rows = rng.normal(0, 2.5, (16, vocab)).astype(np.float32)
  top_k = rng.integers(2, 60, 16)
  one = jnp.ones(16)
  ids, logps = jax.jit(sampling.sample)(
    rows, rng.random(16), 0.7 * one, top_k, one, one > 0
  )
  for row, k, i, logp in zip(rows, top_k, ids, logps, strict=True):
    p = _exact(row, 0.7, int(k), 1.0)
    np.testing.assert_allclose(logp, np.log(p[i]), atol=1e-5)


def test_greedy_takes_the_argmax_and_its_logprob_at_one():
  logits = np.random.default_rng(2).normal(0, 2, V).astype(np.float32)
  ids, logps = _draw(logits, 3, temperature=0.0, top_k=3, top_p=0.5)
  assert (np.asarray(ids) == logits.argmax()).all()
  expected = jax.nn.log_softmax(logits)[logits.argmax()]
  np.testing.assert_allclose(logps, expected, atol=1e-5)


def test_a_draw_at_the_very_end_takes_a_possible_token():
  logits = jnp.full((1, V), -jnp.inf).at[0, 3].set(1.0).at[0, 300].set(1.0)
  one = jnp.ones(1)
  ids, logps = sampling.sample(
    logits, jnp.array([1.0]), one, one.astype(int) * 0, one, one > 0
  )
  assert ids.tolist() == [300]
  np.testing.assert_allclose(logps, np.log(0.5), atol=1e-6)


def test_keys_depend_on_seed_and_position_only():
  seeds = jnp.array([1, 1, 2, 1], jnp.uint32)
  u = sampling.position_uniform(seeds, jnp.array([5, 6, 5, 5]))
  assert u[0] == u[3]
  assert len({float(x) for x in u}) == 3
  key = jax.random.fold_in(jax.random.key(1), 5)
  assert u[0] == jax.random.uniform(key)
