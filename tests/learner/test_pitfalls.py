"""What other trainers' users reported, at the learner's level.

Pitfalls 3 and 5 are in test_packing.py and test_select.py, 6 in test_optim.py,
9 in test_advantages.py and test_score.py, 7 with the checkpoints.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gyre import config
from gyre.learner import objective, optim, packing, state, step
from gyre.learner.objective import Extras
from gyre.models import attention, transformer
from gyre.models import params as params_lib
from gyre.types import Batch, Sample


def _by_entry(packed, values):
  """(sample, entry's rank in it) -> value, over micro-steps."""
  out = {}
  for batch, value in zip(packed.batches, values, strict=True):
    value = np.asarray(value)
    for r, count in enumerate(batch.num_entries):
      rank = {}
      for m in range(count):
        i = int(batch.sample[r, m])
        out[i, rank.setdefault(i, 0)] = value[r, m]
        rank[i] += 1
  return out


def _unfused(params, cfg, sample, temperature):
  """log softmax of whole logits of one sample by itself, at its mask."""
  ids = jnp.asarray(sample.ids)[None]
  positions = jnp.arange(ids.shape[1])[None]
  attend = attention.packed_attend(None, positions)
  hidden, _ = transformer.forward(params, cfg, ids, positions, attend)
  logits = transformer.logits(params, cfg, hidden)[0] / temperature
  logp = jax.nn.log_softmax(logits)
  at = sample.trained
  return np.asarray(logp)[at - 1, sample.ids[at]]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_pitfalls_2_and_10_scores_are_tempered_aligned_and_not_positive(
  toy_config, toy_params, toy_samples, x64, temperature
):
  """The sampler's temperature, the token's own logprob, an unfused check."""
  params, samples = toy_params(np.float64), toy_samples()
  packed = packing.pack(samples, None, row_tokens=64, micro_rows=4)
  score = step.make_score(toy_config, temperature=temperature)
  got = _by_entry(packed, [score(params, b) for b in packed.batches])
  assert max(got.values()) <= 0
  for i in (0, 9):
    want = _unfused(params, toy_config, samples[i], temperature)
    for rank, value in enumerate(want):
      np.testing.assert_allclose(got[i, rank], value, atol=1e-10)


def test_pitfall_2_training_and_scoring_share_the_temperature(
  toy_config, toy_params, toy_samples
):
  """Scored at T, then trained at T: no mismatch; at another T, some."""
  params, samples = toy_params(), toy_samples()
  (batch,) = packing.pack(samples, None, row_tokens=64, micro_rows=4).batches
  logp = step.make_score(toy_config, temperature=0.6)(params, batch)
  batch = dataclasses.replace(batch, logp_behaviour=np.asarray(logp))
  gap = []
  for temperature in (0.6, 1.0):
    micro_step = step.make_micro_step(
      toy_config, config.Learner(), temperature=temperature
    )
    sums = micro_step(params, batch, step.zero_sums(params))
    metrics = objective.metrics(sums.counts)
    gap.append(float(metrics["mismatch/logprob_abs_diff"]))
  assert gap[0] < 1e-5 and gap[1] > 1e-2


def test_pitfall_1_at_learning_rate_0_nothing_drifts_and_the_ratio_is_1(
  toy_config, toy_params, toy_samples, toy_advantages
):
  """Mismatch is flat over steps; nothing is clipped whatever the split."""
  samples = toy_samples()
  optim_cfg = config.Optim(lr=0.0, weight_decay=0.1)
  optimizer = optim.make_optimizer(optim_cfg, 10)
  learner = config.Learner(eps_low=1e-4, eps_high=1e-4)
  update = step.make_update(
    toy_config, learner, optimizer, optim.make_schedule(optim_cfg, 10)
  )
  (batch,) = packing.pack(
    samples, toy_advantages(samples), row_tokens=64, micro_rows=4
  ).batches
  params = toy_params()
  logp = step.make_score(toy_config)(params, batch)
  batch = dataclasses.replace(batch, logp_behaviour=np.asarray(logp))
  halves = [
    jax.tree.map(lambda x, rows=rows: x[rows], batch)
    for rows in (np.array([0, 2]), np.array([3, 1]))
  ]
  train = state.init_state(
    jax.tree.map(jnp.copy, params), optimizer, jax.random.key(0)
  )
  for parts in ([batch], halves):
    seen = []
    for _ in range(2):
      train, metrics = update(train, parts)
      assert metrics["ratio/clip_fraction"] == 0
      assert metrics["mismatch/logprob_abs_diff"] < 1e-5
      seen.append(float(metrics["mismatch/logprob_abs_diff"]))
    assert seen[0] == seen[1]
  jax.tree.map(np.testing.assert_array_equal, train.params, params)


@pytest.mark.parametrize("correction", ["tis", "icepop", "sequence_mask"])
def test_pitfall_1_streaming_ratios_are_exactly_1(toy_samples, correction):
  """logp_old = stop_gradient(logp): exact, in whatever program or split."""
  (batch,) = packing.pack(
    toy_samples(), None, row_tokens=64, micro_rows=4
  ).batches
  rng = np.random.default_rng(0)
  logp = jnp.asarray(-rng.uniform(0, 3, batch.weight.shape), jnp.float32)
  learner = config.Learner(correction=correction, correction_high=1e9)
  near = dataclasses.replace(batch, logp_behaviour=np.asarray(logp) - 0.1)
  for b in (batch, near):
    _, counts = objective.objective(learner, logp, None, b, Extras(), 0)
    assert counts.sums["clipped"] == 0
  flat = objective.flat_entries(near)
  terms = objective.policy_terms(
    learner, logp.reshape(-1), logp.reshape(-1), flat
  )
  assert (terms.ratio == 1).all()


@pytest.mark.parametrize("windows", [(None, None), (None, 5)])
def test_pitfall_4_a_document_never_changes_its_neighbour(
  toy_config, toy_params, toy_samples, windows
):
  """Perturb one document, or a sibling: the others' logprobs, bit for bit.

  An ancestor does change its descendants; a padding token changes nothing.
  """
  cfg = dataclasses.replace(toy_config, layer_windows=windows)
  samples, params = toy_samples(groups=2, size=3), toy_params()
  (batch,) = packing.pack(samples, None, row_tokens=128).batches
  assert batch.tokens.shape[0] == 1
  score = step.make_score(cfg)
  entries = np.arange(batch.weight.shape[1]) < batch.num_entries[0]
  before = np.asarray(score(params, batch))[0]
  path_of = [
    {int(k) for k in np.flatnonzero(batch.subtree_end[0] > q) if k <= q}
    for q in range(batch.tokens.shape[1])
  ]
  used = np.array([len(path_of[q]) for q in range(batch.num_tokens[0])])
  assert used.max() > 5
  for k in (0, 3, int(batch.num_tokens[0]) - 1, int(batch.num_tokens[0])):
    tokens = batch.tokens.copy()
    tokens[0, k] = (tokens[0, k] + 1) % cfg.vocab_size
    after = np.asarray(
      score(params, dataclasses.replace(batch, tokens=tokens))
    )[0]
    below = np.array([k in path_of[q] for q in batch.entry_parent[0]])
    np.testing.assert_array_equal(
      after[entries & ~below], before[entries & ~below]
    )
    touched = entries & below
    if touched.any():
      assert (after[touched] != before[touched]).any()


def test_pitfall_4_siblings_may_be_swapped(
  toy_config, toy_params, toy_samples, x64
):
  samples, params = toy_samples(groups=2), toy_params(np.float64)
  score = step.make_score(toy_config)
  got = []
  for order in (range(len(samples)), range(len(samples))[::-1]):
    order = list(order)
    packed = packing.pack([samples[i] for i in order], None, row_tokens=200)
    values = _by_entry(packed, [score(params, b) for b in packed.batches])
    got.append({(order[i], rank): v for (i, rank), v in values.items()})
  assert got[0].keys() == got[1].keys()
  for key, value in got[0].items():
    np.testing.assert_allclose(value, got[1][key], atol=1e-12)


def _largest(jaxpr):
  """Elements of the largest array that a program makes, at any depth."""
  most = 0
  for eqn in jaxpr.eqns:
    for v in eqn.outvars:
      most = max(most, int(np.prod(getattr(v.aval, "shape", ()))))
    for sub in jax.tree.leaves(tuple(eqn.params.values())):
      sub = getattr(sub, "jaxpr", sub)
      if hasattr(sub, "eqns"):
        most = max(most, _largest(sub))
  return most


def test_pitfall_8_many_logits_never_exist_at_once(toy_config):
  """No array of the step, backward pass included, is near [M, V] of 1 GiB."""
  vocab, length = 32768, 8192
  cfg = dataclasses.replace(toy_config, vocab_size=vocab)
  params = params_lib.abstract_params(params_lib.param_specs(cfg))
  batch = step.abstract_batch(1, length, length)
  micro_step = step.make_micro_step(
    cfg, config.Learner(entropy_coef=0.01), remat=True
  )
  sums = jax.eval_shape(step.zero_sums, params)
  traced = micro_step.trace(params, batch, sums, Extras())
  largest = _largest(traced.jaxpr.jaxpr)
  assert length * cfg.hidden_size <= largest < length * vocab / 4, largest


def test_supervised_training_is_cross_entropy(
  toy_config, toy_params, toy_samples, x64
):
  """loss reinforce, advantage 1, token_mean: value and gradient."""
  params, samples = toy_params(np.float64), toy_samples(groups=1)[:2]
  (batch,) = packing.pack(samples, None, row_tokens=200).batches
  assert isinstance(batch, Batch)
  learner = config.Learner(loss="reinforce", aggregation="token_mean")
  micro_step = step.make_micro_step(toy_config, learner)
  sums = micro_step(params, batch, step.zero_sums(params))

  def cross_entropy(params):
    total = 0.0
    for s in samples:
      ids = jnp.asarray(s.ids)[None]
      positions = jnp.arange(ids.shape[1])[None]
      attend = attention.packed_attend(None, positions)
      hidden, _ = transformer.forward(
        params, toy_config, ids, positions, attend
      )
      logits = transformer.logits(params, toy_config, hidden)[0]
      at = s.trained
      total -= jax.nn.log_softmax(logits)[at - 1, s.ids[at]].sum()
    return total / sum(len(s.trained) for s in samples)

  value, grads = jax.jit(jax.value_and_grad(cross_entropy))(params)
  metrics = objective.metrics(sums.counts)
  np.testing.assert_allclose(metrics["loss/policy"], value, rtol=1e-10)
  jax.tree.map(
    lambda g, w: np.testing.assert_allclose(
      g / sums.counts.denominator, w, atol=1e-10
    ),
    sums.grads,
    grads,
  )


def test_decoupled_ppo_weighs_by_the_behaviour_ratio():
  """Both given: exp(old - behaviour) * clipped surrogate against old."""
  (batch,) = packing.pack(
    _pair(), {"g/0": 1.0, "g/1": -2.0}, row_tokens=16
  ).batches
  e = objective.flat_entries(batch)
  live = np.asarray(e.weight) > 0
  n = batch.weight.shape[1]
  logp = np.full((1, n), -1.0, np.float32)
  old = np.full((1, n), -1.15, np.float32)
  total, counts = objective.objective(
    config.Learner(eps_high=0.1, aggregation="token_mean"),
    jnp.asarray(logp),
    None,
    batch,
    Extras(logp_old=jnp.asarray(old)),
    0,
  )
  a = np.asarray(e.advantage)[live]
  rho = np.exp(-1.15 - np.asarray(e.logp_behaviour)[live])
  ratio = np.exp(0.15)
  want = -rho * np.minimum(ratio * a, np.clip(ratio, 0.8, 1.1) * a)
  np.testing.assert_allclose(total, want.sum(), rtol=1e-5)
  assert counts.denominator == live.sum()


def test_kl_and_entropy_enter_the_loss():
  (batch,) = packing.pack(_pair(), None, row_tokens=16).batches
  shape = batch.weight.shape
  logp = jnp.full(shape, -1.0)
  learner = config.Learner(
    loss="reinforce", kl_coef=0.5, entropy_coef=0.1, aggregation="token_mean"
  )
  batch = dataclasses.replace(batch, logp_behaviour=np.asarray(logp))
  total, counts = objective.objective(
    learner,
    logp,
    jnp.full(shape, 2.0),
    batch,
    Extras(logp_reference=jnp.full(shape, -1.5)),
    0,
  )
  n = float(counts.tokens)
  k3 = np.exp(-0.5) + 0.5 - 1
  np.testing.assert_allclose(total / n, 1 + 0.5 * k3 - 0.1 * 2, rtol=1e-6)
  metrics = objective.metrics(counts)
  np.testing.assert_allclose(metrics["loss/kl"], k3, rtol=1e-5)
  np.testing.assert_allclose(metrics["loss/entropy"], 2, rtol=1e-6)


def _pair():
  out = []
  for i in range(2):
    out.append(
      Sample(
        execution_id=f"g/{i}",
        group_id="g",
        runs=([1, 2 + i, 3, 4, 5],),
        trained=[1, 2, 4],
        logprobs=[-1.0 - 0.1 * i] * 3,
        versions=[0] * 3,
      )
    )
  return out
