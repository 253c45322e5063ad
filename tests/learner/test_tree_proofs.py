"""A packed tree trains as its flat sequences: float64, 1e-9, random trees.

The flat side is another implementation: one sequence a row, the reference
attention, whole logits, sums written out. Both sides share the model's
projections and the token loss alone.
"""

import collections
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
# Rows that hold any tree, and rows that it has to be cut for.
WHOLE = {
  "row_tokens": 128,
  "row_entries": call_trees.CALLS * call_trees.LENGTH,
}
PARTS = {"row_tokens": 24, "row_entries": 4 * call_trees.LENGTH}
few = settings(max_examples=8, deadline=None)
many = settings(
  max_examples=150,
  deadline=None,
  suppress_health_check=[HealthCheck.too_slow],
)
close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
trees = st.tuples(call_trees.call_trees(), st.integers(0, 999))
row_kinds = st.sampled_from([WHOLE, PARTS])
bounds = st.fixed_dictionaries(
  {"mode": st.sampled_from(MODES), "unbiased": st.booleans()}
)


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


def _pack(samples, rows):
  return packing.pack(samples, ADVANTAGES, fixed=True, **rows).batches


def _entries(batch, samples, values):
  """(execution, sample, prefix) -> value of each entry."""
  out = {}
  for m in range(batch.num_entries[0]):
    s = samples[batch.sample[0, m]]
    at = batch.positions[0, batch.entry_parent[0, m]] + 1
    key = s.execution_id, int(batch.sample[0, m]), tuple(s.ids[: at + 1])
    out[key] = float(values[0, m])
  return out


def _train_packed(cfg, learner, params, samples, rows):
  logp, sums = {}, step.zero_sums(params)
  for batch in _pack(samples, rows):
    scored = np.asarray(_score(cfg)(params, batch))
    logp |= _entries(batch, samples, scored)
    sums = _micro_step(cfg, learner)(params, batch, sums)
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


def _check(cfg, learner, params, samples, flat, rows):
  """Proof 1: logprobs, loss, every gradient, one Adam step."""
  want, *alone = _train_flat(cfg, learner, params, flat)
  logp, *packed = _train_packed(cfg, learner, params, samples, rows)
  assert {(e, p) for e, _, p in logp} == want.keys()
  assert len(logp) == sum(int(f.mask.sum()) for f in flat)
  for (execution, _, prefix), value in logp.items():
    close(value, want[execution, prefix])
  jax.tree.map(close, packed, alone)


def _proof_1(make_params, cfg, aggregation, tree, rows, bound):
  """Each mode with everything drawn, and a part of it as `bound` says.

  The unbiased mode is of means over an execution's tokens alone.
  """
  unbiased = bound["unbiased"] and aggregation == "execution_mean"
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
      _check(cfg, learner, params, samples, flat, rows)
    most = max(3, len({s.role for s in specs}))
    part = _select(
      calls, bound["mode"], seed=seed, max_samples=most, unbiased=unbiased
    )
    flat = call_trees.flat_samples(part)
    _check(cfg, learner, params, part, flat, rows)


@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
@few
@given(tree=trees, rows=row_kinds, bound=bounds)
@example(
  tree=(_full_tree(), 0),
  rows=WHOLE,
  bound={"mode": "once", "unbiased": True},
)
@example(
  tree=(_full_tree(), 0),
  rows=PARTS,
  bound={"mode": "leaf", "unbiased": True},
)
def test_a_packed_tree_trains_as_flat(
  make_params, window_config, aggregation, tree, rows, bound
):
  if aggregation != "execution_mean":
    rows = WHOLE  # each kind of rows is a program; the slow test has them all
  _proof_1(make_params, window_config, aggregation, tree, rows, bound)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", losses.AGGREGATIONS)
@pytest.mark.parametrize("windows", [(None, None), (None, 5), (3, 2)])
@many
@given(tree=trees, rows=row_kinds, bound=bounds)
def test_many_packed_trees_train_as_flat(
  make_params, toy_config, aggregation, windows, tree, rows, bound
):
  cfg = dataclasses.replace(toy_config, layer_windows=windows)
  _proof_1(make_params, cfg, aggregation, tree, rows, bound)


def test_the_full_tree_clips_on_both_sides_on_shared_nodes(
  make_params, window_config
):
  """What the examples above are about does occur in them."""
  with jax.enable_x64(True):
    params = make_params(window_config)
    logp = functools.partial(_flat(window_config).logp, params)
    calls = call_trees.make_calls(_full_tree(), logp, 0)
    samples = _select(calls, "multiplicity")
    assert len(_pack(samples, PARTS)) > 2
    (batch,) = _pack(samples, WHOLE)
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
  """Perturb a token: what sees it on its path changes, the rest does not."""
  specs, seed = tree
  with jax.enable_x64(True):
    params, score = make_params(cfg), _score(cfg)
    logp = functools.partial(_flat(cfg).logp, params)
    calls = call_trees.make_calls(specs, logp, seed)
    (batch,) = _pack(_select(calls, "once", seed=seed), WHOLE)
    before = np.asarray(score(params, batch))[0]
    k = where % int(batch.num_tokens[0])
    tokens = batch.tokens.copy()
    tokens[0, k] = (tokens[0, k] + 1) % cfg.vocab_size
    after = score(params, dataclasses.replace(batch, tokens=tokens))
    after = np.asarray(after)[0]
    # Ancestors by depth alone: the last token of each depth before q.
    positions, live = batch.positions[0], batch.num_entries[0]
    windows = cfg.layer_windows
    reach = np.inf if None in windows else sum(w - 1 for w in windows)
    for m in range(live):
      q = batch.entry_parent[0, m]
      on_path, depth = [], positions[q] + 1
      for t in range(q, -1, -1):
        if positions[t] == depth - 1:
          on_path.append(t)
          depth -= 1
      if k in on_path and positions[q] - positions[k] <= reach:
        assert before[m] != after[m]
      else:
        assert before[m] == after[m]


@pytest.mark.parametrize("windows", [(None, None), (None, 5), (3, 2)])
@settings(max_examples=40, deadline=None)
@given(tree=trees, where=st.integers(0, 999))
def test_siblings_change_nothing_and_ancestors_in_reach_do(
  make_params, window_config, windows, tree, where
):
  cfg = dataclasses.replace(window_config, layer_windows=windows)
  _proof_2(make_params, cfg, tree, where)


@settings(max_examples=20, deadline=None)
@given(
  tree=trees,
  mode=st.sampled_from(MODES),
  order=st.randoms(use_true_random=False),
)
def test_the_order_of_siblings_changes_nothing(
  make_params, window_config, tree, mode, order
):
  specs, seed = tree
  learner = dataclasses.replace(LEARNER, aggregation="execution_mean")
  with jax.enable_x64(True):
    params = make_params(window_config)
    logp = functools.partial(_flat(window_config).logp, params)
    calls = call_trees.make_calls(specs, logp, seed)
    samples = _select(calls, mode, seed=seed)
    shuffled = list(samples)
    order.shuffle(shuffled)
    got = []
    for s in (samples, shuffled):
      logp, *rest = _train_packed(window_config, learner, params, s, WHOLE)
      got.append(({(e, p): v for (e, _, p), v in logp.items()}, *rest))
    jax.tree.map(close, got[0], got[1])


def _trained(sample):
  """The prefixes that end in a token that a sample trains."""
  ids = tuple(sample.ids.tolist())
  return [ids[: at + 1] for at in sample.trained]


@settings(max_examples=80, deadline=None)
@given(tree=trees, bound=st.integers(4, 9))
def test_every_sampled_token_is_in_one_mask_and_no_other_token_in_any(
  tree, bound
):
  """Proof 3."""
  specs, seed = tree
  nothing = np.zeros((call_trees.CALLS, call_trees.LENGTH - 1))
  calls = call_trees.make_calls(specs, lambda _: nothing, seed)
  for name, of in calls.items():
    sampled = collections.Counter(
      (*c.prompt_ids.tolist(), *c.completion_ids[: i + 1].tolist())
      for c in of
      for i in range(len(c.completion_ids))
    )
    got = {m: _select({name: of}, m, seed=seed) for m in MODES}
    trained = {
      m: collections.Counter(p for s in samples for p in _trained(s))
      for m, samples in got.items()
    }
    assert trained["once"] == dict.fromkeys(sampled, 1)
    assert trained["multiplicity"] == sampled
    assert trained["leaf"].keys() == sampled.keys()
    for s in got["leaf"]:
      on_path = [tuple(s.ids[: n + 1].tolist()) for n in range(s.length)]
      assert _trained(s) == [p for p in on_path if p in sampled]
    assert all(len(s.trained) for s in got["once"])  # U shrinks each round
    for mode in MODES:
      for unbiased in (False, True):
        for s in _select(
          {name: of}, mode, seed=seed, max_samples=bound, unbiased=unbiased
        ):
          assert sampled.keys() >= set(_trained(s))
