"""A model of two layers with random weights, whose samples differ."""

import jax

from gyre.models import params as params_lib
from gyre.models.config import ModelConfig


def small_model(vocab_size, seed):
  """(its configuration, its parameters); logits spread, so nothing ties."""
  cfg = ModelConfig(
    "qwen3",
    vocab_size=vocab_size,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=64,
    context_length=1024,
    tie_embeddings=True,
    qk_norm=True,
    init_std=0.2,
  )
  specs = params_lib.param_specs(cfg)
  return cfg, params_lib.init_params(specs, jax.random.key(seed))
