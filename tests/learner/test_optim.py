"""Optimizer and schedules against optax, torch and hand calculations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gyre import config
from gyre.learner import optim
from gyre.models import params as params_lib

CFG = config.Optim(lr=1e-2, weight_decay=0.1, clip_norm=0.0, eps=1e-8)


def _steps(optimizer, params, grads):
  opt_state = optimizer.init(params)
  for g in grads:
    updates, opt_state = optimizer.update(g, opt_state, params)
    params = optax.apply_updates(params, updates)
  return params


def _problem(n=5):
  rng = np.random.default_rng(0)
  draw = lambda: {  # noqa: E731
    "q": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32),
    "norm": jnp.asarray(rng.normal(size=4), jnp.float32),
  }
  return draw(), [draw() for _ in range(n)]


def test_adamw_equals_optax_reference():
  params, grads = _problem()
  mask = {"q": True, "norm": False}
  got = _steps(optim.make_optimizer(CFG, 10, mask=mask), params, grads)
  reference = optax.adamw(
    CFG.lr, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=mask
  )
  want = _steps(reference, params, grads)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), got, want)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_adamw_equals_torch(clip_norm):
  torch = pytest.importorskip("torch")
  params, grads = _problem()
  cfg = config.Optim(lr=1e-2, weight_decay=0.1, clip_norm=clip_norm)
  got = _steps(
    optim.make_optimizer(cfg, 10, mask={"q": True, "norm": False}),
    params,
    grads,
  )
  theirs = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in params.items()}
  optimizer = torch.optim.AdamW(
    [
      {"params": [theirs["q"]], "weight_decay": 0.1},
      {"params": [theirs["norm"]], "weight_decay": 0.0},
    ],
    lr=1e-2,
    betas=(0.9, 0.95),
    eps=1e-8,
  )
  for g in grads:
    for k, p in theirs.items():
      p.grad = torch.tensor(g[k])
    if clip_norm:
      torch.nn.utils.clip_grad_norm_(theirs.values(), clip_norm)
    optimizer.step()
  for k, p in theirs.items():
    np.testing.assert_allclose(got[k], p.detach().numpy(), rtol=2e-5)


def test_decay_takes_matrices_not_norms_nor_biases(window_config):
  for layout in ("stacked", "layers"):
    specs = params_lib.param_specs(window_config, layout=layout)
    mask = optim.decay_mask(specs)
    for path, decays in jax.tree_util.tree_leaves_with_path(mask):
      name = path[-1].key
      assert decays == (not name.endswith(("norm", "_bias"))), name


def test_pitfall_6_bf16_parameters_lose_small_updates_and_masters_do_not():
  cfg = config.Optim(lr=1e-4, clip_norm=0.0)
  one = {"q": jnp.ones((2, 2), jnp.float32)}
  grads = [jax.tree.map(jnp.ones_like, one)] * 10
  optimizer = optim.make_optimizer(cfg, 10)
  masters = _steps(optimizer, one, grads)["q"]
  narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), one)
  lost = _steps(
    optimizer,
    narrow,
    [jax.tree.map(lambda x: x.astype(jnp.bfloat16), g) for g in grads],
  )["q"]
  np.testing.assert_array_equal(lost.astype(jnp.float32), 1)
  np.testing.assert_allclose(masters, 1 - 10 * 1e-4, rtol=1e-5)
  assert masters.dtype == jnp.float32


@pytest.mark.parametrize(
  "schedule,step,want",
  [
    ("constant", 0, 0.25),
    ("constant", 3, 1.0),
    ("constant", 99, 1.0),
    ("linear", 1, 0.5),
    ("linear", 4, 1.0),
    ("linear", 12, 0.55),
    ("linear", 20, 0.1),
    ("linear", 50, 0.1),
    ("cosine", 4, 1.0),
    ("cosine", 12, 0.55),
    ("cosine", 20, 0.1),
  ],
)
def test_schedules_by_hand(schedule, step, want):
  cfg = config.Optim(lr=1.0, schedule=schedule, warmup_steps=4)
  got = optim.make_schedule(cfg, 20)(jnp.asarray(step))
  np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_a_run_shorter_than_its_warm_up_begins_as_a_longer_one(schedule):
  cfg = config.Optim(lr=1.0, schedule=schedule, warmup_steps=30)
  short, long = (optim.make_schedule(cfg, n) for n in (20, 100))
  steps = jnp.arange(20)
  np.testing.assert_array_equal(short(steps), long(steps))
  assert short(steps[-1]) < 1.0
