"""A packed tree trains as its flat sequences: float64, 1e-9, random trees.

The flat side is another implementation: one sequence a row, the reference
attention, whole logits, sums written out. Both sides share the model's
projections and the token loss alone.
"""

import dataclasses
import functools

import call_trees
import gyre_kernels.reference
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gyre import config
from gyre.learner import losses, objective, optim, packing, state, step
from gyre.models import transformer
from gyre.trajectory import select as select_lib
from gyre.trajectory import tree as tree_lib

ADVANTAGES = {"g/0": 1.25, "g/1": -0.75, "g/2": 0.5}
OPTIM = config.Optim(lr=1e-2, weight_decay=0.1)
LEARNER = config.Learner(dual_clip=1.2, sum_norm_len=7)
MODES = ("once", "multiplicity", "leaf")
ROW_TOKENS, ROW_ENTRIES = 128, call_trees.CALLS * call_trees.LENGTH
few = settings(max_examples=8, deadline=None)
many = settings(
  max_examples=150,
  deadline=None,
  suppress_health_check=[HealthCheck.too_slow],
)
close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
trees = st.tuples(call_trees.call_trees(), st.integers(0, 999))


def _full_tree():
  """60 nodes, 8 deep; every third leaf is in two executions, every fifth was
  sampled twice."""
  parents, depths = [-1], [1]
  for i in range(1, call_trees.NODES):
    parent = i - 1 if i % 3 else (5 * i) % (i - 1)
    if depths[parent] == call_trees.DEPTH:
      parent = parents[parents[parent]]
    parents.append(parent)
    depths.append(depths[parent] + 1)
  assert max(depths) == call_trees.DEPTH
  specs = []
  leaves = [v for v in range(len(parents)) if v not in parents]
  for i, leaf in enumerate(leaves):
    path = call_trees.path(parents, leaf)
    ids = [(3 + 7 * v) % 29 + 1 for v in path]
    head = (*call_trees.PROMPT, *ids[: len(path) // 3])
    tail = tuple(ids[len(path) // 3 :])
    role = call_trees.ROLES[i % 4 // 2]
    executions = [i % 2] + [1 - i % 2] * (i % 3 == 0) + [i % 2] * (i % 5 == 0)
    for execution in executions:
      specs.append(call_trees.Spec(execution, role, head, tail))
  assert len(specs) <= call_trees.CALLS
  return specs


class Flat:
  """The flat side's compiled programs."""

  def __init__(self, cfg, learner):
    def logp(params, tokens):
      positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
      hidden, _ = transformer.forward(params, cfg, tokens, positions, _attend)
      logits = transformer.logits(params, cfg, hidden)[:, :-1]
      out = jax.nn.log_softmax(logits)
      return jnp.take_along_axis(out, tokens[:, 1:, None], 2)[..., 0]

    def loss(params, tokens, behaviour, advantage, coefficient):
      lp = logp(params, tokens)
      each = losses.ppo_clip(
        lp,
        behaviour,
        jnp.broadcast_to(advantage, lp.shape),
        eps_low=learner.eps_low,
        eps_high=learner.eps_high,
        dual_clip=learner.dual_clip,
      ).loss
      return jnp.sum(jnp.where(coefficient > 0, each, 0) * coefficient), lp

    self.logp = jax.jit(logp)
    self.value_and_grad = jax.jit(jax.value_and_grad(loss, has_aux=True))


def _attend(q, k, v, layer_state, *, window, softcap, sinks, scale):
  out = gyre_kernels.reference.attention(
    q, k, v, window=window, softcap=softcap, sinks=sinks, scale=scale
  )
  return out, layer_state


@functools.cache
def _flat(cfg):
  return Flat(cfg, LEARNER)


@functools.cache
def _score(cfg):
  return step.make_score(cfg)


@functools.cache
def _micro_step(cfg, learner):
  return step.make_micro_step(cfg, learner)


@functools.cache
def _adam():
  """One AdamW step: through the learner, and through optax alone."""
  optimizer = optim.make_optimizer(OPTIM, 10)

  def alone(params, grads):
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates)

  apply = step.make_apply(optimizer, optim.make_schedule(OPTIM, 10))
  return optimizer, apply, jax.jit(alone)


@pytest.fixture(scope="session")
def make_params(toy_params):
  """Returns f(cfg) -> float64 parameters; under enable_x64."""
  return functools.cache(lambda cfg: toy_params(np.float64, cfg))


def _select(calls, mode, **options):
  """The samples of all executions, in order."""
  options = {"max_samples": None} | options
  out = []
  for name, of in calls.items():
    out += select_lib.select(
      tree_lib.build(of),
      execution_id=name,
      group_id="g",
      mode=mode,
      **options,
    ).samples
  return out


def _pack(samples):
  (batch,) = packing.pack(
    samples,
    ADVANTAGES,
    row_tokens=ROW_TOKENS,
    row_entries=ROW_ENTRIES,
    fixed=True,
  ).batches
  return batch


def _entries(batch, samples, values):
  """(execution, sample, prefix) -> value of each entry."""
  out = {}
  for m in range(batch.num_entries[0]):
    s = samples[batch.sample[0, m]]
    at = batch.positions[0, batch.entry_parent[0, m]] + 1
    key = s.execution_id, int(batch.sample[0, m]), tuple(s.ids[: at + 1])
    out[key] = float(values[0, m])
  return out


def _train_packed(cfg, learner, params, samples):
  batch = _pack(samples)
  logp = _entries(batch, samples, np.asarray(_score(cfg)(params, batch)))
  sums = _micro_step(cfg, learner)(params, batch, step.zero_sums(params))
  loss = objective.metrics(sums.counts)["loss/policy"]
  grads = jax.tree.map(lambda g: g / sums.counts.denominator, sums.grads)
  optimizer, apply, _ = _adam()
  start = state.init_state(
    jax.tree.map(jnp.copy, params), optimizer, jax.random.key(0)
  )
  return logp, loss, grads, apply(start, sums)[0].params


def _train_flat(cfg, learner, params, flat):
  tokens = call_trees.padded([f.ids for f in flat])
  behaviour = np.zeros((call_trees.CALLS, call_trees.LENGTH - 1))
  advantage = np.zeros((call_trees.CALLS, 1))
  for i, f in enumerate(flat):
    behaviour[i, : len(f.ids) - 1] = f.logprobs[1:]
    advantage[i] = ADVANTAGES[f.execution]
  coefficient = call_trees.coefficients(
    flat, learner.aggregation, learner.sum_norm_len
  )
  (loss, lp), grads = _flat(cfg).value_and_grad(
    params, tokens, behaviour, advantage, coefficient
  )
  logp = {
    (f.execution, f.ids[: at + 1]): float(lp[i, at - 1])
    for i, f in enumerate(flat)
    for at in np.flatnonzero(f.mask)
  }
  return logp, loss, grads, _adam()[2](params, grads)


def _check(cfg, learner, params, samples, flat):
  """Proof 1: logprobs, loss, every gradient, one Adam step."""
  logp, *packed = _train_packed(cfg, learner, params, samples)
  want, *alone = _train_flat(cfg, learner, params, flat)
  assert {(e, p) for e, _, p in logp} == want.keys()
  assert len(logp) == sum(int(f.mask.sum()) for f in flat)
  for (execution, _, prefix), value in logp.items():
    close(value, want[execution, prefix])
  jax.tree.map(close, packed, alone)


def _proof_1(make_params, cfg, aggregation, tree):
  specs, seed = tree
  learner = dataclasses.replace(LEARNER, aggregation=aggregation)
  with jax.enable_x64(True):
    params = make_params(cfg)
    calls = call_trees.make_calls(
      specs, functools.partial(_flat(cfg).logp, params), seed
    )
    for mode in MODES:
      samples = _select(calls, mode, seed=seed)
      flat = {
        "once": call_trees.flat_samples(samples),
        "multiplicity": call_trees.flat_calls(calls),
        "leaf": call_trees.flat_paths(calls),
      }[mode]
      _check(cfg, learner, params, samples, flat)
      if aggregation == "execution_mean":
        present = len({s.role for s in specs})
        for bound in ({}, {"unbiased": True}):
          part = _select(
            calls, mode, seed=seed, max_samples=max(3, present), **bound
          )
          flat = call_trees.flat_samples(part)
          _check(cfg, learner, params, part, flat)


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
@few
@given(tree=trees)
@example(tree=(_full_tree(), 0))
def test_a_packed_tree_trains_as_flat(
  make_params, window_config, aggregation, tree
):
  _proof_1(make_params, window_config, aggregation, tree)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
@pytest.mark.parametrize("windows", [(None, None), (None, 5), (3, 2)])
@many
@given(tree=trees)
def test_many_packed_trees_train_as_flat(
  make_params, toy_config, aggregation, windows, tree
):
  cfg = dataclasses.replace(toy_config, layer_windows=windows)
  _proof_1(make_params, cfg, aggregation, tree)


def test_the_full_tree_clips_on_both_sides_on_shared_nodes(
  make_params, window_config
):
  """What the examples above are about does occur in them."""
  with jax.enable_x64(True):
    params = make_params(window_config)
    logp = functools.partial(_flat(window_config).logp, params)
    calls = call_trees.make_calls(_full_tree(), logp, 0)
    batch = _pack(_select(calls, "multiplicity"))
    assert batch.num_tokens[0] < sum(
      len(c.prompt_ids) + len(c.completion_ids) - 1
      for of in calls.values()
      for c in of
    )
    n = batch.num_entries[0]
    keys = list(
      zip(batch.entry_parent[0, :n], batch.entry_target[0, :n], strict=True)
    )
    signs = {}
    for key, a in zip(keys, batch.advantage[0, :n], strict=True):
      signs.setdefault(key, set()).add(a > 0)
    assert any(len(s) == 2 for s in signs.values())
    lp = np.asarray(_score(window_config)(params, batch))[0, :n]
    terms = losses.ppo_clip(
      lp,
      batch.logp_behaviour[0, :n],
      batch.advantage[0, :n],
      dual_clip=LEARNER.dual_clip,
    )
    clipped = np.asarray(terms.clipped)
    assert clipped.any() and not clipped.all()
    positive = batch.advantage[0, :n] > 0
    assert clipped[positive].any() and clipped[~positive].any()


def _proof_2(make_params, cfg, tree, where):
  """Perturb a token: what has it on its path changes, the rest does not."""
  specs, seed = tree
  with jax.enable_x64(True):
    params, score = make_params(cfg), _score(cfg)
    logp = functools.partial(_flat(cfg).logp, params)
    calls = call_trees.make_calls(specs, logp, seed)
    batch = _pack(_select(calls, "once", seed=seed))
    before = np.asarray(score(params, batch))[0]
    k = where % int(batch.num_tokens[0])
    tokens = batch.tokens.copy()
    tokens[0, k] = (tokens[0, k] + 1) % cfg.vocab_size
    after = score(params, dataclasses.replace(batch, tokens=tokens))
    after = np.asarray(after)[0]
    # Ancestors by depth alone: the last token of each depth before q.
    positions, live = batch.positions[0], batch.num_entries[0]
    for m in range(live):
      q = batch.entry_parent[0, m]
      on_path, depth = [], positions[q] + 1
      for t in range(q, -1, -1):
        if positions[t] == depth - 1:
          on_path.append(t)
          depth -= 1
      if k in on_path:
        assert before[m] != after[m]
      else:
        assert before[m] == after[m]


@settings(max_examples=60, deadline=None)
@given(tree=trees, where=st.integers(0, 999))
def test_siblings_change_nothing_and_ancestors_do(
  make_params, window_config, tree, where
):
  _proof_2(make_params, window_config, tree, where)


@settings(max_examples=20, deadline=None)
@given(tree=trees, order=st.randoms(use_true_random=False))
def test_the_order_of_siblings_changes_nothing(
  make_params, window_config, tree, order
):
  specs, seed = tree
  learner = dataclasses.replace(LEARNER, aggregation="execution_mean")
  with jax.enable_x64(True):
    params = make_params(window_config)
    logp = functools.partial(_flat(window_config).logp, params)
    calls = call_trees.make_calls(specs, logp, seed)
    samples = _select(calls, "once", seed=seed)
    shuffled = list(samples)
    order.shuffle(shuffled)
    got = []
    for s in (samples, shuffled):
      logp, *rest = _train_packed(window_config, learner, params, s)
      got.append(({(e, p): v for (e, _, p), v in logp.items()}, *rest))
    jax.tree.map(close, got[0], got[1])
