"""google-tunix's GRPOLearner: seconds a GRPO step, generation and the rest.

A Qwen3 of 9.8M parameters by default, with random weights and the vanilla
rollout engine. Set-up: Python 3.12, pip install google-tunix.
"""

import argparse
import os
import statistics
import time

from common import emit, peak_rss_gib, versions


class IntTokenizer:
  """Whitespace-separated integers are the tokens."""

  def encode(self, text, **_):
    """Returns the ids that the text spells."""
    return [int(t) for t in text.split()]

  def decode(self, ids, **_):
    """Returns the ids as text."""
    return " ".join(str(int(i)) for i in ids)

  def bos_id(self):
    """Returns the id that begins a prompt."""
    return 2

  def eos_id(self):
    """Returns the id that ends a text."""
    return 1

  def pad_id(self):
    """Returns the id of padding."""
    return 0


def digit_reward(prompts, completions, **_):
  """Returns how often each completion says 7."""
  return [float(sum(c == "7" for c in text)) for text in completions]


def parse():
  """Returns the command line's settings."""
  ap = argparse.ArgumentParser(description=__doc__)
  ap.add_argument("--vocab", type=int, default=4096)
  ap.add_argument("--dim", type=int, default=256)
  ap.add_argument("--hidden", type=int, default=1408)
  ap.add_argument("--layers", type=int, default=6)
  ap.add_argument("--heads", type=int, default=4)
  ap.add_argument("--kv-heads", type=int, default=2)
  ap.add_argument("--head-dim", type=int, default=64)
  ap.add_argument("--prompts", type=int, default=4)
  ap.add_argument("--group", type=int, default=8)
  ap.add_argument(
    "--prompt-len", type=int, default=63, help="plus the bos token"
  )
  ap.add_argument("--max-prompt", type=int, default=64)
  ap.add_argument("--new", type=int, default=64)
  ap.add_argument("--cache", type=int, default=128)
  ap.add_argument(
    "--beta", type=float, default=0.04, help="Tunix's default; 0: no reference"
  )
  ap.add_argument(
    "--bf16", action="store_true", help="activations; parameters stay f32"
  )
  ap.add_argument("--micro", type=int, help="prompts a micro-batch; all")
  ap.add_argument("--steps", type=int, default=5)
  ap.add_argument("--warmup", type=int, default=2)
  return ap.parse_args()


def make_models(a, mesh):
  """Returns (actor, reference or None)."""
  import jax.numpy as jnp
  from flax import nnx
  from tunix.models.qwen3 import model as qwen3

  cfg = qwen3.ModelConfig(
    num_layers=a.layers,
    vocab_size=a.vocab,
    embed_dim=a.dim,
    hidden_dim=a.hidden,
    num_heads=a.heads,
    head_dim=a.head_dim,
    num_kv_heads=a.kv_heads,
    rope_theta=1_000_000,
    norm_eps=1e-6,
    use_tied_embedding=False,
    dtype=jnp.bfloat16 if a.bf16 else jnp.float32,
    param_dtype=jnp.float32,
  )
  with mesh:
    actor = qwen3.Qwen3(cfg, rngs=nnx.Rngs(0))
    reference = qwen3.Qwen3(cfg, rngs=nnx.Rngs(0)) if a.beta else None
  return actor, reference


def make_learner(a, mesh, actor, reference):
  """Returns (cluster, learner) as Tunix's own examples build them."""
  import optax
  from tunix.rl import rl_cluster as rlc
  from tunix.rl.grpo import grpo_learner
  from tunix.rl.rollout import base_rollout

  roles = [rlc.Role.ACTOR, rlc.Role.REFERENCE, rlc.Role.ROLLOUT]
  config = rlc.ClusterConfig(
    role_to_mesh={r: mesh for r in roles},
    rollout_engine="vanilla",
    training_config=rlc.RLTrainingConfig(
      actor_optimizer=optax.adamw(1e-6),
      max_steps=a.steps + a.warmup,
      eval_every_n_steps=10**6,
      mini_batch_size=a.prompts,
      train_micro_batch_size=a.micro or a.prompts,
    ),
    rollout_config=base_rollout.RolloutConfig(
      max_tokens_to_generate=a.new,
      max_prompt_length=a.max_prompt,
      kv_cache_size=a.cache,
      temperature=1.0,
      top_p=1.0,
      top_k=None,
      eos_tokens=[a.vocab + 1],
    ),
  )
  cluster = rlc.RLCluster(
    actor=actor,
    reference=reference,
    tokenizer=IntTokenizer(),
    cluster_config=config,
  )
  learner = grpo_learner.GRPOLearner(
    rl_cluster=cluster,
    algo_config=grpo_learner.GRPOConfig(num_generations=a.group, beta=a.beta),
    reward_fns=digit_reward,
  )
  return cluster, learner


def instrument(cluster, learner):
  """Wraps the learner's methods; returns (seconds a step, tokens a call)."""
  import jax
  from flax import nnx

  spent, rows, tokens = {"generate": 0.0, "prepare": 0.0}, [], []

  def wrap(obj, name, key):
    inner = getattr(obj, name)

    def timed(*args, **kw):
      t = time.perf_counter()
      out = inner(*args, **kw)
      jax.block_until_ready(out)
      spent[key] += time.perf_counter() - t
      if key == "generate":
        tokens.append(int(sum(len(x) for x in out.tokens)))
      return out

    setattr(obj, name, timed)

  wrap(cluster, "generate", "generate")
  wrap(learner, "_generate_and_compute_advantage", "prepare")
  inner_step = learner._run_global_step

  def global_step(*args, **kw):
    for k in spent:
      spent[k] = 0.0
    t = time.perf_counter()
    out = inner_step(*args, **kw)
    jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
    rows.append({"total": time.perf_counter() - t, **spent})
    return out

  learner._run_global_step = global_step
  return rows, tokens


def make_data(a):
  """Returns one batch of random prompts a step, and one to spare."""
  import numpy as np

  rng = np.random.default_rng(0)

  def prompt():
    return " ".join(map(str, rng.integers(3, a.vocab, a.prompt_len)))

  return [
    {"prompts": np.array([prompt() for _ in range(a.prompts)])}
    for _ in range(a.steps + a.warmup + 1)
  ]


def main():
  """Measures and prints one JSON line."""
  a = parse()
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  import jax
  from flax import nnx

  mesh = jax.make_mesh(
    (1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  actor, reference = make_models(a, mesh)
  n_params = sum(x.size for x in jax.tree.leaves(nnx.state(actor, nnx.Param)))
  cluster, learner = make_learner(a, mesh, actor, reference)
  rows, tokens = instrument(cluster, learner)
  t = time.perf_counter()
  with mesh:
    learner.train(make_data(a))
  wall = time.perf_counter() - t
  use = rows[a.warmup :]
  med = {k: statistics.median(r[k] for r in use) for k in use[0]}
  optim = statistics.median(r["total"] - r["prepare"] for r in use)
  n = a.prompts * a.group
  results = {
    "params": n_params,
    "step_s": round(med["total"], 3),
    "generate_s": round(med["generate"], 3),
    "score_s": round(med["prepare"] - med["generate"], 3),
    "optimise_s": round(optim, 3),
    "all_step_s": [round(r["total"], 3) for r in rows],
    "all_generate_s": [round(r["generate"], 3) for r in rows],
    "completion_tokens": tokens[-1],
    "gen_tok_s": round(tokens[-1] / med["generate"], 1),
    "trained_tok_s": round(n * (a.max_prompt + a.new) / optim, 1),
    "wall_s": round(wall, 2),
    "peak_gib": peak_rss_gib(),
  }
  vers = versions("google-tunix", "jax", "flax", "optax", "qwix")
  emit("train_tunix", vars(a), results, vers)


if __name__ == "__main__":
  main()
