"""The step: any mesh, any cut, packed or flat: one gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gyre import config
from gyre.learner import objective, optim, packing, state, step
from gyre.learner.objective import Extras
from gyre.models import params as params_lib

OPTIM = config.Optim(lr=1e-2, weight_decay=0.1)
LEARNER = config.Learner(dual_clip=3.0, correction="none")


def _relative(got, want):
  """Largest relative L2 distance of a leaf."""

  def one(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)

  return max(jax.tree.leaves(jax.tree.map(one, got, want)))


def _sums(cfg, learner, params, batches, mesh=None, extras=None, **kw):
  micro_step = step.make_micro_step(cfg, learner, mesh, **kw)
  sums = step.zero_sums(params)
  if mesh is not None:
    specs = kw.get("specs") or params_lib.param_specs(cfg)
    layout = step.Layout(specs, mesh, params_lib.DEFAULT_RULES)
    sums = jax.device_put(sums, layout.sums())
    params = jax.device_put(params, layout.params())
  for i, batch in enumerate(batches):
    extra = None if extras is None else extras[i]
    sums = micro_step(params, batch, sums, extras=extra)
  return sums


def _take(batch, rows):
  return jax.tree.map(lambda x: x[np.asarray(rows)], batch)


@pytest.fixture(scope="module")
def problem(toy_params, toy_samples, toy_advantages, near_policy):
  """Returns f(cfg, dtype) -> params, samples near the policy, advantages."""

  @functools.cache
  def make(cfg, dtype=np.float32):
    params = toy_params(dtype, cfg)
    samples = near_policy(toy_samples(), params, cfg)
    return params, samples, toy_advantages(samples)

  return make


# --- meshes ---------------------------------------------------------------

MESHES = [
  config.Mesh(data=2),
  config.Mesh(fsdp=2, tensor=2),
  config.Mesh(data=2, fsdp=2, tensor=2),
]
MORE_MESHES = [
  config.Mesh(fsdp=2),
  config.Mesh(tensor=2),
  config.Mesh(data=2, tensor=2),
  config.Mesh(data=2, fsdp=2),
  config.Mesh(data=8),
  config.Mesh(fsdp=8),
  config.Mesh(data=4, tensor=2),
]


def _mesh_gradients(problem, cfg, dtype, meshes, tolerance):
  params, samples, advantages = problem(cfg, dtype)
  (batch,) = packing.pack(
    samples, advantages, row_tokens=40, micro_rows=8, row_multiple=8
  ).batches
  want = _sums(cfg, LEARNER, params, [batch])
  for sizes in meshes:
    mesh = state.make_mesh(sizes)
    got = _sums(cfg, LEARNER, params, [batch], mesh)
    assert _relative(got.grads, want.grads) <= tolerance, sizes
    assert got.counts.denominator == want.counts.denominator
    assert got.counts.tokens == want.counts.tokens
    shardings = params_lib.param_shardings(params_lib.param_specs(cfg), mesh)
    jax.tree.map(
      lambda g, s: _lies_as(g.sharding, s, g.ndim), got.grads, shardings
    )


def _lies_as(got, want, ndim):
  assert got.is_equivalent_to(want, ndim), f"{got} is not {want}"


def test_gradients_agree_on_meshes_f64(problem, window_config, x64):
  _mesh_gradients(problem, window_config, np.float64, MESHES, 1e-12)


def test_gradients_agree_on_meshes_f32(problem, toy_config):
  _mesh_gradients(problem, toy_config, np.float32, MESHES[-1:], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_agree_on_every_mesh(
  problem, toy_config, window_config, x64, dtype
):
  tolerance = 1e-5 if dtype == np.float32 else 1e-12
  for cfg in (toy_config, window_config):
    _mesh_gradients(problem, cfg, dtype, MESHES + MORE_MESHES, tolerance)


# --- micro-steps ----------------------------------------------------------

CUTS = [
  [[0, 1, 2, 3, 4, 5, 6, 7]],
  [[6, 0, 3, 4], [5, 1, 2, 7]],
  [[3, 4], [1, 7], [0, 5], [6, 2]],
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_agree_under_any_micro_batch_split(
  problem, toy_config, x64, dtype
):
  tolerance = 1e-5 if dtype == np.float32 else 1e-12
  params, samples, advantages = problem(toy_config, dtype)
  (batch,) = packing.pack(
    samples, advantages, row_tokens=40, micro_rows=8
  ).batches
  assert batch.tokens.shape[0] == 8 and (batch.num_entries > 0).sum() >= 5
  cuts = CUTS if dtype == np.float64 else CUTS[::2]
  all_sums = [
    _sums(toy_config, LEARNER, params, [_take(batch, rows) for rows in cut])
    for cut in cuts
  ]
  for sums in all_sums[1:]:
    assert _relative(sums.grads, all_sums[0].grads) <= tolerance
    assert sums.counts.denominator == all_sums[0].counts.denominator
    assert sums.counts.tokens == all_sums[0].counts.tokens
    for name in objective.METRICS:
      np.testing.assert_allclose(
        sums.counts.sums[name], all_sums[0].counts.sums[name], rtol=tolerance
      )


@pytest.mark.parametrize(
  "kind",
  [
    "execution_mean",
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
  ],
)
def test_denominators_are_bitwise_invariant_under_any_cut(toy_samples, kind):
  samples = toy_samples(groups=9)
  learner = config.Learner(aggregation=kind)
  rng = np.random.default_rng(0)
  seen = set()
  for row_tokens, micro_rows, order in [
    (30, 1, 0),
    (30, 3, 1),
    (40, 2, 2),
    (64, 1, 3),
    (64, 5, 4),
    (200, 2, 5),
  ]:
    packed = packing.pack(
      [samples[i] for i in rng.permutation(len(samples))] if order else samples,
      None,
      row_tokens=row_tokens,
      micro_rows=micro_rows,
    )
    counts = objective.zero_counts()
    for b in packed.batches:
      _, new = objective.objective(
        learner, jnp.zeros(b.weight.shape), None, b, Extras(), 0
      )
      counts = objective.add_counts(counts, new)
    seen.add(np.asarray(counts.denominator).tobytes())
  assert len(seen) == 1


def test_the_fused_step_equals_micro_steps_and_apply(problem, toy_config, x64):
  params, samples, advantages = problem(toy_config, np.float64)
  (batch,) = packing.pack(
    samples, advantages, row_tokens=40, micro_rows=8
  ).batches
  optimizer = optim.make_optimizer(OPTIM, 10)
  schedule = optim.make_schedule(OPTIM, 10)
  update = step.make_update(toy_config, LEARNER, optimizer, schedule)
  out = []
  for cut in (CUTS[0], CUTS[1]):
    old = state.init_state(
      jax.tree.map(jnp.copy, params), optimizer, jax.random.key(0), version=4
    )
    new, metrics = update(old, [_take(batch, rows) for rows in cut])
    assert new.step == 1 and new.version == 5
    out.append((new, metrics))
  (a, a_metrics), (b, b_metrics) = out
  assert _relative(a.params, b.params) <= 1e-12
  for name, value in a_metrics.items():
    np.testing.assert_allclose(value, b_metrics[name], rtol=1e-12, err_msg=name)
  # Versions in the samples are 3, the state's is 4.
  assert a_metrics["staleness/mean"] == 1 and a_metrics["staleness/max"] == 1
  assert 0 < a_metrics["ratio/clip_fraction"] < 1
  np.testing.assert_allclose(a_metrics["optim/lr"], OPTIM.lr)


# --- packed against flat --------------------------------------------------


def _by_entry(batch, values):
  """(sample, depth of the target) -> value."""
  live = np.asarray(batch.weight) > 0
  rows = np.nonzero(live)[0]
  depth = batch.positions[rows, batch.entry_parent[live]] + 1
  keys = zip(batch.sample[live].tolist(), depth.tolist(), strict=True)
  return dict(zip(keys, np.asarray(values)[live].tolist(), strict=True))


def _train(cfg, learner, params, packed):
  optimizer = optim.make_optimizer(OPTIM, 10)
  score = step.make_score(cfg)
  logp, sums = {}, None
  for batch in packed.batches:
    logp |= _by_entry(batch, score(params, batch))
  sums = _sums(cfg, learner, params, packed.batches)
  apply = step.make_apply(optimizer, optim.make_schedule(OPTIM, 10))
  start = state.init_state(
    jax.tree.map(jnp.copy, params), optimizer, jax.random.key(0)
  )
  new, metrics = apply(start, sums)
  return logp, sums, new, metrics


def test_a_packed_tree_trains_as_each_sample_alone(problem, window_config, x64):
  _packed_equals_flat(problem, window_config, config.Learner(dual_clip=1.5))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gspo", "cispo", "gmpo", "reinforce"])
@pytest.mark.parametrize("correction", ["none", "icepop", "sequence_mask"])
def test_a_packed_tree_trains_as_each_sample_alone_whatever_the_loss(
  problem, toy_config, x64, loss, correction
):
  learner = config.Learner(
    loss=loss, correction=correction, aggregation="seq_mean_token_mean"
  )
  _packed_equals_flat(problem, toy_config, learner)


def _packed_equals_flat(problem, cfg, learner):
  params, samples, advantages = problem(cfg, np.float64)
  assert min(advantages.values()) < 0 < max(advantages.values())
  shared = packing.pack(samples, advantages, row_tokens=64, micro_rows=2)
  flat = packing.pack(
    samples, advantages, row_tokens=64, micro_rows=16, share=False
  )
  assert shared.tokens_trained < 0.7 * flat.tokens_trained
  logp, sums, new, metrics = _train(cfg, learner, params, shared)
  f_logp, f_sums, f_new, f_metrics = _train(cfg, learner, params, flat)
  assert logp.keys() == f_logp.keys() and len(logp) == shared.num_entries
  for key, value in logp.items():
    assert abs(value - f_logp[key]) <= 1e-9
  assert _relative(sums.grads, f_sums.grads) <= 1e-9
  assert _relative(new.params, f_new.params) <= 1e-9
  for name, value in f_metrics.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-9, err_msg=name)
  if learner.loss == "ppo_clip":
    assert 0.1 < metrics["ratio/clip_fraction"] < 0.9


# --- refusals and two passes ----------------------------------------------


def _halves(batch):
  """One micro-step cut in two through the middle of its samples."""
  odd = np.arange(batch.weight.shape[1]) % 2 == 1
  out = []
  for keep in (odd, ~odd):
    out.append(
      dataclasses.replace(
        batch,
        weight=np.where(keep, batch.weight, 0),
        sample_first=batch.sample_first & keep,
        execution_first=batch.execution_first & keep,
      )
    )
  return out


@pytest.mark.parametrize(
  "loss,correction",
  [
    ("gspo", "sequence_mask"),
    pytest.param("gmpo", "tis", marks=pytest.mark.slow),
  ],
)
def test_split_samples_are_refused_or_trained_from_two_pass_sums(
  problem, toy_config, x64, loss, correction
):
  learner = config.Learner(
    loss=loss, correction=correction, correction_low=0.8, correction_high=1.3
  )
  params, samples, advantages = problem(toy_config, np.float64)
  (batch,) = packing.pack(
    samples, advantages, row_tokens=64, micro_rows=4
  ).batches
  halves = _halves(batch)
  with pytest.raises(ValueError, match=r"sample \d+ is split"):
    _sums(toy_config, learner, params, halves)
  want = _sums(toy_config, learner, params, [batch])
  assert any(np.asarray(g).any() for g in jax.tree.leaves(want.grads))
  score = step.make_score(toy_config)
  logp = [score(params, b) for b in halves]
  sequence = objective.sequence_sums(learner, halves, logp)
  got = _sums(
    toy_config,
    learner,
    params,
    halves,
    extras=[Extras(sequence=s) for s in sequence],
  )
  assert _relative(got.grads, want.grads) <= 1e-9
  assert got.counts.denominator == want.counts.denominator


def test_what_does_not_fit_is_refused(toy_config, toy_params, toy_samples):
  params = toy_params()
  packed = packing.pack(toy_samples(), None, row_tokens=64, micro_rows=1)
  batch = packed.batches[0]
  mesh = state.make_mesh(config.Mesh(data=2))
  with pytest.raises(ValueError, match=r"1 rows .* 2"):
    _sums(toy_config, LEARNER, params, [batch], mesh)
  learner = config.Learner(kl_coef=0.1)
  with pytest.raises(ValueError, match=r"kl_coef is 0.1 .* logp_reference"):
    _sums(toy_config, learner, params, [batch])
  with pytest.raises(ValueError, match=r"needs 16 devices, there are 8"):
    state.make_mesh(config.Mesh(data=16))


def test_state_lies_over_the_mesh_as_declared(toy_config, toy_params):
  mesh = state.make_mesh(config.Mesh(fsdp=2, tensor=2))
  specs = params_lib.param_specs(toy_config)
  optimizer = optim.make_optimizer(OPTIM, 10, mask=optim.decay_mask(specs))
  real = state.init_state(
    toy_params(), optimizer, jax.random.key(3), specs=specs, mesh=mesh
  )
  abstract = state.abstract_state(specs, optimizer, mesh)

  def same(a, b):
    assert a.shape == b.shape and a.dtype == b.dtype
    _lies_as(a.sharding, b.sharding, a.ndim)

  jax.tree.map(same, real, abstract)
  q = real.params["layers"]["attn"]["q"]
  assert q.addressable_shards[0].data.size == q.size // 4
  adam = optax.tree_utils.tree_get(real.opt_state, "ScaleByAdamState")
  for moments in (adam.mu, adam.nu):
    jax.tree.map(
      lambda m, p: _lies_as(m.sharding, p.sharding, m.ndim),
      moments,
      real.params,
    )
