"""Policy losses, corrections, KL and aggregation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gyre.learner import losses

LOSSES = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]
MASK = [[1, 1, 0], [1, 1, 1]]


def _entries(loss=LOSSES, mask=MASK):
  """Flat entries of two samples of two executions, padding kept."""
  mask = np.array(mask, np.float32)
  sample = np.repeat(np.arange(len(mask)), mask.shape[1])
  totals = np.repeat(mask.sum(1), mask.shape[1])
  first = np.zeros(mask.shape, bool)
  first[:, 0] = mask.sum(1) > 0
  return (
    jnp.asarray(np.array(loss, np.float32).reshape(-1)),
    jnp.asarray(mask.reshape(-1)),
    jnp.asarray(totals),
    jnp.asarray(first.reshape(-1)),
    sample,
  )


def _mean(kind, loss=LOSSES, mask=MASK, max_len=3):
  loss, weight, totals, first, _ = _entries(loss, mask)
  top = losses.aggregate(loss, weight, totals, totals, kind, max_len=max_len)
  return top / jnp.maximum(losses.denominator(weight, first, first, kind), 1)


@pytest.mark.parametrize(
  "kind,want",
  [
    ("token_mean", 0.36),
    ("seq_mean_token_mean", 0.325),
    ("seq_mean_token_sum", 0.9),
    ("seq_mean_token_sum_norm", 0.3),
  ],
)
def test_golden_aggregation(kind, want):
  np.testing.assert_allclose(_mean(kind), want, rtol=1e-6)


@pytest.mark.parametrize("kind", losses.AGGREGATIONS)
def test_golden_all_zero_mask_is_exactly_zero_with_finite_gradient(kind):
  def f(x):
    _, weight, totals, first, _ = _entries(mask=np.zeros((2, 3)))
    top = losses.aggregate(x, weight, totals, totals, kind, max_len=3)
    return top / jnp.maximum(losses.denominator(weight, first, first, kind), 1)

  value, grad = jax.value_and_grad(f)(jnp.array([1, jnp.nan, 3, 4, 5, jnp.inf]))
  assert value == 0
  assert np.isfinite(grad).all() and not grad.any()


def test_execution_mean_weighs_executions_not_samples():
  """Execution 0 has samples of 1 and 3 tokens, execution 1 one of 2."""
  loss = jnp.array([1.0, 2, 3, 4, 10, 20])
  sample_weight = jnp.array([1.0, 3, 3, 3, 2, 2])
  execution_weight = jnp.array([4.0, 4, 4, 4, 2, 2])
  first = jnp.array([True, False, False, False, True, False])
  weight = jnp.ones(6)
  top = losses.aggregate(
    loss, weight, sample_weight, execution_weight, "execution_mean"
  )
  n = losses.denominator(weight, first, first, "execution_mean")
  np.testing.assert_allclose(top / n, (2.5 + 15) / 2)


@pytest.mark.parametrize(
  "kind,want",
  [
    ("k1", [-1, 14, 29]),
    ("k2", [0.5, 98, 420.5]),
    ("k3", [0.7183, 13, 28]),
  ],
)
def test_golden_kl_values(kind, want):
  logp = jnp.full(3, -1.0)
  got = losses.kl(logp, jnp.array([0.0, -15, -30]), kind)
  np.testing.assert_allclose(got, want, atol=1e-4)


def test_golden_ppo():
  ratio, a = jnp.array([0.5, 1, 1.5]), jnp.array([1.0, -1, 2])
  terms = losses.ppo_clip(jnp.log(ratio), jnp.zeros(3), a)
  np.testing.assert_allclose(-terms.loss, [0.5, -1, 2.4], rtol=1e-6)
  np.testing.assert_allclose(terms.loss.mean(), -0.6333, atol=5e-5)
  np.testing.assert_array_equal(terms.clipped, [False, False, True])


def test_golden_dual_clip():
  ratio, a = jnp.array([2.0, 2, 0.5]), jnp.array([2.0, -2, 2])
  terms = losses.ppo_clip(jnp.log(ratio), jnp.zeros(3), a, dual_clip=1.5)
  np.testing.assert_allclose(terms.loss, [-2.4, 3, -1], rtol=1e-6)


def test_golden_icepop():
  rho = jnp.array([0.4, 0.8, 6])
  got = losses.icepop(rho, low=0.5, high=5)
  np.testing.assert_allclose(got, [0, 0.8, 0])


def test_tis_clips_both_ends():
  got = losses.tis(jnp.array([0.1, 0.8, 6]), low=0.5, high=2)
  np.testing.assert_allclose(got, [0.5, 0.8, 2])


def test_behaviour_weight_is_detached():
  f = lambda x: losses.behaviour_weight(x, jnp.zeros(2)).sum()  # noqa: E731
  assert not jax.grad(f)(jnp.array([0.3, -1.0])).any()


def test_clip_range_is_asymmetric():
  a = jnp.array([1.0, -1.0])
  terms = losses.ppo_clip(
    jnp.log(jnp.array([1.25, 0.75])), jnp.zeros(2), a, eps_high=0.28
  )
  np.testing.assert_array_equal(terms.clipped, [False, True])
  np.testing.assert_allclose(terms.loss, [-1.25, 0.8], rtol=1e-6)


# --- gradients ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("off_policy", [False, True])
def test_kl_loss_gradient_is_that_of_the_divergence(x64, kind, off_policy):
  """E over the sampler of the entry's gradient = grad KL(policy || ref)."""
  rng = np.random.default_rng(3)
  logits, ref, sampler = rng.normal(size=(3, 6))
  log_ref = jax.nn.log_softmax(ref)
  behaviour = jax.nn.log_softmax(sampler if off_policy else logits)

  def divergence(x):
    lp = jax.nn.log_softmax(x)
    return jnp.sum(jnp.exp(lp) * (lp - log_ref))

  def expected(x):
    terms = losses.kl_loss(
      jax.nn.log_softmax(x), log_ref, kind, logp_behaviour=behaviour
    )
    return jnp.sum(jnp.exp(behaviour) * terms)

  got = jax.grad(expected)(jnp.asarray(logits))
  np.testing.assert_allclose(
    got, jax.grad(divergence)(jnp.asarray(logits)), atol=1e-12
  )
  if kind != "k2":  # k2's value is biased
    np.testing.assert_allclose(expected(logits), divergence(logits), rtol=1e-10)


def test_kl_value_differentiated_directly_has_the_wrong_gradient(x64):
  """The reason for kl_loss: k3's own derivative is of the reversed KL."""
  rng = np.random.default_rng(3)
  logits, ref = jnp.asarray(rng.normal(size=(2, 6)))
  log_ref = jax.nn.log_softmax(ref)
  p = jax.nn.softmax(logits)

  def naive(x):
    return jnp.sum(p * losses.kl(jax.nn.log_softmax(x), log_ref, "k3"))

  def reversed_kl(x):
    return jnp.sum(jnp.exp(log_ref) * (log_ref - jax.nn.log_softmax(x)))

  np.testing.assert_allclose(
    jax.grad(naive)(logits), jax.grad(reversed_kl)(logits), atol=1e-12
  )


SAMPLE = np.array([3, 3, 3, 7, 7, 7, 7, 1])
SIZES = np.array([3, 3, 3, 4, 4, 4, 4, 1.0])
SIGNS = np.array([1.0, 1, 1, -2, -2, -2, -2, 0.5])


def _sequence_objective(name, logp, old, eps):
  """By definition, a sample at a time, differentiated as a whole."""
  total = 0.0
  for s in (3, 7, 1):
    at = np.flatnonzero(s == SAMPLE)
    a, d = SIGNS[at[0]], logp[at] - old[at]
    if name == "gspo":
      r = jnp.exp(d.mean())
      total += jnp.minimum(r * a, jnp.clip(r, 1 - eps, 1 + eps) * a)
    else:
      sign = np.sign(a)
      d = sign * jnp.minimum(sign * d, sign * jnp.clip(d, -eps, eps))
      total += jnp.exp(d.mean()) * a
  return -total


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
@pytest.mark.parametrize("scale", [0.05, 0.5])
def test_sequence_losses_equal_their_definition(x64, name, scale):
  """Value and gradient, samples of both signs, clipped and not."""
  rng = np.random.default_rng(4)
  old = jnp.asarray(-rng.uniform(0.5, 3, 8))
  logp = old + scale * rng.normal(size=8)
  eps = 0.1
  ones = jnp.ones(8)

  def entrywise(logp):
    terms = getattr(losses, name)(
      logp,
      old,
      jnp.asarray(SIGNS),
      ones,
      jnp.asarray(SAMPLE),
      jnp.asarray(SIZES),
      eps_low=eps,
      eps_high=eps,
    )
    return losses.aggregate(
      terms.loss, ones, jnp.asarray(SIZES), ones, "seq_mean_token_mean"
    )

  want = jax.value_and_grad(lambda x: _sequence_objective(name, x, old, eps))
  got = jax.value_and_grad(entrywise)
  for g, w in zip(got(logp), want(logp), strict=True):
    np.testing.assert_allclose(g, w, atol=1e-12)


def test_gmpo_never_clips_for_the_wrong_side(x64):
  """A > 0 with a small ratio, A < 0 with a large one: not clipped."""
  args = (jnp.ones(1), jnp.zeros(1, int), jnp.ones(1))
  low = losses.gmpo(jnp.array([-2.0]), jnp.zeros(1), jnp.ones(1), *args)
  high = losses.gmpo(jnp.array([2.0]), jnp.zeros(1), -jnp.ones(1), *args)
  np.testing.assert_allclose(low.ratio, np.exp(-2))
  np.testing.assert_allclose(high.ratio, np.exp(2))
  assert not low.clipped[0] and not high.clipped[0]


def test_cispo_gradient_survives_the_clip():
  ratio, a = jnp.array([0.5, 5.0]), jnp.array([1.0, -2.0])
  f = lambda lp: losses.cispo(  # noqa: E731
    lp, jnp.zeros(2), a, eps_low=1, eps_high=2
  ).loss.sum()
  np.testing.assert_allclose(
    jax.grad(f)(jnp.log(ratio)), [-0.5, 6.0], rtol=1e-6
  )


def test_reinforce_gradient_is_minus_advantage():
  a = jnp.array([1.0, -2.0])
  f = lambda lp: losses.reinforce(lp, lp * 0, a).loss.sum()  # noqa: E731
  np.testing.assert_allclose(jax.grad(f)(jnp.array([-1.0, -3.0])), -a)


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "reinforce"])
def test_on_policy_losses_share_one_gradient(name):
  """At ratio 1 each is the policy gradient -A."""
  a = jnp.array([1.0, -2.0, 0.3])
  lp = jnp.array([-1.0, -2.0, -0.1])
  f = lambda x: getattr(losses, name)(x, lp, a).loss.sum()  # noqa: E731
  np.testing.assert_allclose(jax.grad(f)(lp), -a, rtol=1e-6)


# --- sequence mask and refusals -------------------------------------------


def _mask(rho, **kw):
  n = len(rho)
  sample = jnp.array([0, 0, 1, 1, 1][:n])
  size = jnp.array([2.0, 2, 3, 3, 3][:n])
  weight = kw.pop("weight", jnp.ones(n))
  return losses.sequence_mask(
    jnp.log(jnp.array(rho)), jnp.zeros(n), weight, sample, size, **kw
  )


def test_sequence_mask_bands_the_geometric_mean():
  # geometric means: 2 ** 0.5 and 3
  got = _mask([1.0, 2.0, 3.0, 3.0, 3.0], low=0.5, high=2)
  np.testing.assert_array_equal(got, [1, 1, 0, 0, 0])


def test_sequence_mask_vetoes_one_bad_token():
  rho = [1.0, 1.0, 9e-5, 1e2, 1.1e2]  # geometric mean about 1
  np.testing.assert_array_equal(_mask(rho), [1, 1, 0, 0, 0])
  rho = [1.0, 1.0, 1.1e-4, 1e2, 1e2]
  np.testing.assert_array_equal(_mask(rho), [1, 1, 1, 1, 1])


def test_sequence_mask_from_two_pass_sums_equals_one_pass():
  rho = np.array([1.0, 2.0, 0.6, 3.0, 9e-5], np.float32)
  whole = _mask(rho)
  log_rho = np.log(rho)
  sums = [log_rho[:2].sum()] * 2 + [log_rho[2:].sum()] * 3
  least = [log_rho[:2].min()] * 2 + [log_rho[2:].min()] * 3
  sums = losses.SequenceSums(None, jnp.array(sums), jnp.array(least))
  np.testing.assert_array_equal(_mask(rho, sums=sums), whole)
  part = losses.SequenceSums(None, *(x[:4] for x in sums[1:]))
  np.testing.assert_array_equal(_mask(rho[:4], sums=part), whole[:4])


def test_a_split_sample_is_refused_naming_both_weights():
  sample, weight = np.array([5, 5, 8]), np.ones(3)
  losses.check_whole(sample, weight, np.array([2.0, 2, 1]))
  with pytest.raises(ValueError, match="sample 5 is split: weight 2 of 3"):
    losses.check_whole(sample, weight, np.array([3.0, 3, 1]))


@pytest.mark.parametrize(
  "call,message",
  [
    (lambda x: losses.kl(x, x, "k4"), "k4"),
    (lambda x: losses.aggregate(x, x, x, x, "mean"), "mean"),
    (
      lambda x: losses.aggregate(x, x, x, x, "seq_mean_token_sum_norm"),
      "max_len > 0, got 0",
    ),
  ],
)
def test_unknown_kinds_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call(jnp.ones(2))


def test_everything_is_computed_in_f32():
  x = jnp.array([-1.0, -2.0], jnp.bfloat16)
  terms = losses.ppo_clip(x, x, x)
  assert terms.loss.dtype == jnp.float32
  assert losses.kl_loss(x, x).dtype == jnp.float32
  assert losses.tis(x).dtype == jnp.float32


def test_dense_ids_follow_any_ids():
  ids = jnp.array([9, -1, 9, 4, -1, 100000])
  dense = np.asarray(losses.dense_ids(ids))
  assert dense.max() < len(ids)
  same = np.asarray(ids)[:, None] == np.asarray(ids)
  np.testing.assert_array_equal(same, dense[:, None] == dense)
