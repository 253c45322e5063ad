"""A toy decoder and toy groups of samples that share prompts."""

import dataclasses

import jax
import numpy as np
import pytest
from unpacking import unpack

from gyre.learner import packing, step
from gyre.models import params as params_lib
from gyre.models.config import ModelConfig
from gyre.types import Sample

VOCAB = 31


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
  """Toy programs run once: compile them with few optimisations."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def x64():
  with jax.enable_x64(True):
    yield


@pytest.fixture(scope="session")
def toy_config():
  return ModelConfig(
    model_type="llama",
    vocab_size=VOCAB,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=24,
    tie_embeddings=True,
    init_std=0.3,
  )


@pytest.fixture(scope="session")
def toy_params(toy_config):
  """Returns f(dtype) -> parameters; f64 needs x64."""

  def make(dtype=np.float32, cfg=toy_config):
    specs = params_lib.param_specs(cfg, dtype=dtype)
    return params_lib.init_params(specs, jax.random.key(7))

  return make


@pytest.fixture(scope="session")
def toy_samples():
  """Returns f(seed) -> samples of 3 groups x 4 executions.

  Groups share a prompt; two samples of each share their first sampled tokens;
  every third execution has two samples; tool output lies between sampled runs.
  """

  def make(seed=0, groups=3, size=4, prompt=6, vocab=VOCAB):
    rng = np.random.default_rng(seed)
    out = []
    for g in range(groups):
      start = rng.integers(1, vocab, prompt + g)
      opening = rng.integers(1, vocab, 3)
      for i in range(size):
        for _ in range(1 + (i % 3 == 2)):
          lengths = rng.integers(1, 6, 3)
          parts = [
            (opening if i < 2 else rng.integers(1, vocab, 3), True),
            (rng.integers(1, vocab, lengths[0]), False),
            (rng.integers(1, vocab, lengths[1]), True),
          ]
          ids = np.concatenate([start, *(p for p, _ in parts)])
          mask = np.concatenate(
            [np.zeros(len(start), bool)]
            + [np.full(len(p), m) for p, m in parts]
          )
          logprobs = -rng.uniform(1, 5, len(ids))[mask]
          out.append(
            Sample(
              execution_id=f"g{g}/{i}",
              group_id=f"g{g}",
              runs=(ids,),
              trained=np.flatnonzero(mask),
              logprobs=logprobs,
              versions=np.full(mask.sum(), 3),
            )
          )
    return out

  return make


@pytest.fixture(scope="session")
def toy_advantages():
  """Advantages of both signs, by execution."""

  def make(samples, seed=0):
    rng = np.random.default_rng(seed)
    names = sorted({s.execution_id for s in samples})
    return dict(zip(names, rng.normal(size=len(names)), strict=True))

  return make


@pytest.fixture(scope="session")
def window_config(toy_config):
  """Untied, q/k norm, biases, one layer with a sliding window."""
  return dataclasses.replace(
    toy_config,
    model_type="qwen3",
    layer_windows=(None, 5),
    tie_embeddings=False,
    qk_norm=True,
    qkv_bias=True,
  )


@pytest.fixture(scope="session")
def near_policy():
  """Returns f(samples, params, cfg): behaviour logprobs near the policy's.

  Ratios lie on both sides of a clip range of 0.2.
  """

  def make(samples, params, cfg, scale=0.25, seed=5):
    packed = packing.pack(samples, None, row_tokens=64, micro_rows=8)
    (batch,) = packed.batches
    logp = np.asarray(step.make_score(cfg)(params, batch))
    scored = unpack(dataclasses.replace(batch, logp_behaviour=logp))
    rng = np.random.default_rng(seed)
    out = []
    for i, s in enumerate(samples):
      noise = scale * rng.normal(size=len(s.ids))[s.trained]
      lp = scored[i]["logprobs"] + noise
      out.append(dataclasses.replace(s, logprobs=np.minimum(lp, 0)))
    return out

  return make
