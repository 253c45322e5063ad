"""What each benchmark measures: cases, settings of ours, settings of peers.

No JAX here: the parent process of a benchmark only starts others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Metric:
  """A figure of a measurement's results; higher: more is better."""

  key: str
  title: str
  higher: bool = True


@dataclasses.dataclass(frozen=True)
class Variant:
  """One way to run a case: a process with these settings.

  Variants of one dtype compete: after the first round only the best by the
  case's first metric goes on.
  """

  dtype: str
  name: str
  settings: Settings


@dataclasses.dataclass(frozen=True)
class Peer:
  """A script of experiments/peers/ and the ways to run it."""

  script: str
  variants: tuple[Variant, ...]


@dataclasses.dataclass(frozen=True)
class Case:
  """Equal work for us and for the peers.

  Attributes:
    name: one line.
    ours: settings of `measure` in benches/<bench>.py.
    metrics: what is compared, the most important first.
    peers: by the name that --peer gives.
  """

  name: str
  ours: tuple[Variant, ...]
  metrics: tuple[Metric, ...]
  peers: Mapping[str, Peer] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Options:
  """model: Hugging Face directory; quick: sizes that only show that all runs;
  device: "cpu" or "gpu"; run: directory of a recorded run.
  """

  model: str = ""
  run: str = ""
  quick: bool = False
  device: str = "cpu"


def _per_dtype(name: str = "", **settings: Any) -> tuple[Variant, ...]:
  return tuple(Variant(d, name, settings | {"dtype": d}) for d in DTYPES)


def engine(options: Options) -> tuple[Case, ...]:
  """Generation of SmolLM2, prefill, a shared prefix, batch 1."""
  sizes = {"model": options.model, "repeat": 1}
  if options.quick:
    sizes |= {
      "batch": 4,
      "prompt": 16,
      "new": 8,
      "prefill_batch": 2,
      "prefill_len": 64,
      "shared": 32,
      "shared_batch": 2,
      "rescore": 2,
    }
  metrics = (
    Metric("decode_only_tok_s", "32 × (128 + 128): decode only, tok/s"),
    Metric("gen_tok_s", "32 × (128 + 128): with prefill, tok/s"),
    Metric("prefill_tok_s", "prefill 8 × 1,024, tok/s"),
    Metric("shared_gen_tok_s", "16 sharing 512, 128 new each, tok/s"),
    Metric("batch1_ms_per_token", "batch 1, ms a token", higher=False),
    Metric("logprob_gap_mean", "mean |logprob − f32 rescoring|", higher=False),
    Metric("logprob_gap_max", "max |logprob − f32 rescoring|", higher=False),
  )
  peers = {
    "vllm": Peer("rollout_vllm.py", _per_dtype(**sizes)),
    "hf": Peer(
      "rollout_hf.py",
      _per_dtype(**{k: v for k, v in sizes.items() if k != "rescore"}),
    ),
  }
  return (Case("SmolLM2", _per_dtype(**sizes), metrics, peers),)


def _torch_train(batch: int, seq: int, **settings: Any) -> Peer:
  settings |= {"batch": batch, "seq": seq}
  variants = []
  for dtype in DTYPES:
    for loss in ("naive", "chunked"):
      extra = {"loss": loss, "bf16": dtype == "bfloat16"}
      variants.append(Variant(dtype, loss, settings | extra))
  return Peer("train_torch.py", tuple(variants))


def train(options: Options) -> tuple[Case, ...]:
  """Train steps of SmolLM2; tokens are counted flat, a prompt once a row."""
  shapes = ((8, 256, 0), (1, 2048, 0), (8, 128, 512))
  if options.quick:
    shapes = ((2, 16, 0), (1, 32, 0), (2, 8, 16))
  metrics = (
    Metric("tok_s", "tok/s"),
    Metric("peak_gib", "peak memory, GiB", higher=False),
  )
  cases = []
  for batch, seq, prompt in shapes:
    size = {"model": options.model, "repeat": 1 if options.quick else 3}
    torch_size = size | {"completion": seq if prompt else 0}
    variants = tuple(
      Variant(d, name, size | shape | {"dtype": d, "remat": name == "remat"})
      for shape in ({"batch": batch, "seq": seq, "prompt": prompt},)
      for d in DTYPES
      for name in ("", "remat")
    )
    name = f"[{batch}, {seq}]"
    if prompt:
      name = f"{batch} completions of {seq} sharing a {prompt}-token prompt"
    peer = _torch_train(batch, prompt + seq, **torch_size)
    cases.append(Case(name, variants, metrics, {"torch": peer}))
  return tuple(cases)


# The model of experiments/peers/train_tunix.py.
TUNIX_MODEL = {
  "model_type": "qwen3",
  "vocab_size": 4096,
  "hidden_size": 256,
  "intermediate_size": 1408,
  "num_hidden_layers": 6,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 64,
  "rope_theta": 1_000_000.0,
  "rms_norm_eps": 1e-6,
  "max_position_embeddings": 2048,
  "tie_word_embeddings": False,
}


def grpo(options: Options) -> tuple[Case, ...]:
  """A GRPO step of 4 prompts × 8 completions × 64 tokens, prompt 64."""
  size = {"prompts": 4, "group": 8, "prompt_len": 64, "new": 64}
  steps = {"steps": 3, "warmup": 2}
  if options.quick:
    size = {"prompts": 2, "group": 2, "prompt_len": 16, "new": 8}
    steps = {"steps": 1, "warmup": 1}
  metrics = (
    Metric("step_s", "s a step", higher=False),
    Metric("generate_s", "of it generation, s", higher=False),
    Metric("optimise_s", "of it optimisation, s", higher=False),
    Metric("peak_gib", "peak memory, GiB", higher=False),
  )
  n = size["prompts"] * size["group"]
  trl = size | {"model": options.model, "no_ckpt": True}
  trl_variants = tuple(
    Variant(
      d,
      f"micro-batch {micro}",
      trl
      | {"bf16": d == "bfloat16", "micro": micro}
      | {"steps": min(2, steps["steps"]), "warmup": 1},
    )
    for d in DTYPES
    for micro in (n // 4, n)
  )
  tunix = size | steps | {"prompt_len": size["prompt_len"] - 1, "beta": 0.0}
  tunix |= {"max_prompt": size["prompt_len"]}
  tunix |= {"cache": size["prompt_len"] + size["new"]}
  tunix_variants = tuple(
    Variant(d, "", tunix | {"bf16": d == "bfloat16"}) for d in DTYPES
  )
  ours = size | steps
  return (
    Case(
      "SmolLM2",
      _per_dtype(model=options.model, **ours),
      metrics,
      {"trl": Peer("train_trl.py", trl_variants)},
    ),
    Case(
      "9.8M parameters",
      _per_dtype(hf_config=TUNIX_MODEL, **ours),
      metrics,
      {"tunix": Peer("train_tunix.py", tunix_variants)},
    ),
  )


def attention(options: Options) -> tuple[Case, ...]:
  """Causal attention of 9 query and 3 key heads of 64."""
  metrics = (
    Metric("fwd_ms", "forward, ms", higher=False),
    Metric("fwd_bwd_ms", "forward + backward, ms", higher=False),
  )
  gpu = options.device == "gpu"
  heads = {"heads": 32, "kv_heads": 8, "dim": 128} if gpu else {}
  seqs = (2048, 8192, 32768) if gpu else (2048, 8192)
  cases = []
  for seq in (128,) if options.quick else seqs:
    size = heads | {"seq": seq}
    device = {"device": "cuda"} if gpu else {}
    peer = Peer("attention_torch.py", _per_dtype(**size, **device))
    name = f"T = {seq:,}"
    cases.append(Case(name, _per_dtype(**size), metrics, {"torch": peer}))
  return tuple(cases)


def reshard(options: Options) -> tuple[Case, ...]:
  """A train state from one mesh of 8 devices onto another."""
  metrics = (
    Metric("save_gb_s", "Orbax save, GB/s"),
    Metric("restore_gb_s", "Orbax restore onto the other mesh, GB/s"),
    Metric("verified_restore_gb_s", "the same, hashes already verified, GB/s"),
    Metric("through_gb_s", "saved, verified, freed, restored, GB/s"),
    Metric("device_put_gb_s", "device_put onto the other mesh, GB/s"),
    Metric("copy_gb_s", "plain memory copy, GB/s"),
  )
  settings = {"model": options.model, "repeat": 1 if options.quick else 3}
  cases = {"fsdp 8 → fsdp 4 × tensor 2": False, "8 → 4 devices": True}
  return tuple(
    Case(name, (Variant("", "", settings | {"half": half}),), metrics)
    for name, half in cases.items()
  )


def combine(options: Options) -> tuple[Case, ...]:
  """Gradient sums between processes, combined pairwise for the core."""
  metrics = (
    Metric("combine_s", "combined pairwise, s", higher=False),
    Metric("combine_gb_s", "the same, GB/s of all sums"),
    Metric("share_gb_s", "one sum into shared memory, hashed, GB/s"),
    Metric("read_gb_s", "the total read at the core, hashed, GB/s"),
    Metric("add_at_hand_s", "the additions alone, in one process, s", False),
    Metric("copy_gb_s", "plain memory copy, GB/s"),
    Metric("bytes", "bytes of a sum", higher=False),
  )
  repeat = 1 if options.quick else 3
  return tuple(
    Case(
      f"{n} cells",
      (
        Variant("", "", {"model": options.model, "cells": n, "repeat": repeat}),
      ),
      metrics,
    )
    for n in (2, 4)
  )


def elastic(options: Options) -> tuple[Case, ...]:
  """gyre beside Async and Colocate, emulated over processes, 1 h as 10 s."""
  metrics = (
    Metric("over_a0", "gyre over Async, measured"),
    Metric("over_a0_predicted", "gyre over Async, the simulator's"),
    Metric("over_c0", "gyre over Colocate, measured"),
    Metric("over_c0_predicted", "gyre over Colocate, the simulator's"),
    Metric("e0_h", "gyre, measured, h", higher=False),
    Metric("e0_predicted_h", "gyre, the simulator's, h", higher=False),
    Metric("e0_switches", "gyre: switches", higher=False),
    Metric("e0_migrations", "gyre: executions moved", higher=False),
    Metric("cpu_share", "cores busy, of one, in the controller", higher=False),
  )
  sizes = {"steps": 12, "speedup": 360.0, "calls": 6}
  if options.quick:
    sizes = {"steps": 1, "speedup": 7200.0, "calls": 1}
  return tuple(
    Case(f"seed {seed}", (Variant("", "", {"seed": seed} | sizes),), metrics)
    for seed in ((0,) if options.quick else (0, 1, 2))
  )


def trajectories(options: Options) -> tuple[Case, ...]:
  """From calls to packed rows; selection with J_max 1, 5 and no bound."""
  calls, tokens = (30, 10_000) if options.quick else (300, 1_000_000)
  size = {"calls": calls, "tokens": tokens}
  long_metrics = (
    Metric("total_s", "built, selected and packed, s", higher=False),
    Metric("build_s", "of it build, s", higher=False),
    Metric("select_s", "of it select, s", higher=False),
    Metric("pack_s", "of it pack, s", higher=False),
    Metric("peak_gib", "peak memory of the process, GiB", higher=False),
    Metric("imports_gib", "of it before the first call, GiB", higher=False),
    Metric("tokens_flat", "prompt and sampled tokens, flat"),
  )
  store_metrics = (
    Metric("ratio", "file over one copy of what is in it", higher=False),
    Metric("put_s", "put, s", higher=False),
  )
  bounds_metrics = tuple(
    Metric(f"{key}_{name}_of_all", f"{title}, J_max {name}", higher=False)
    for name in ("1", "5")
    for key, title in (
      ("trained", "trained tokens over those without a bound"),
      ("packed", "tokens in rows over those without a bound"),
      ("step", "time of a step over that without a bound"),
    )
  )
  bounds_metrics += (
    Metric("step_all_s", "a step without a bound, s", higher=False),
    Metric("trained_all", "trained tokens without a bound"),
    Metric("executions", "executions"),
  )
  name = f"{calls} calls up to {tokens:,} tokens"
  bounds = {"part": "bounds", "run": options.run}
  executions = 256 if options.run else 8
  bounds |= {"executions": executions, "scale": 48, "repeat": 2}
  if options.quick:
    bounds |= {"executions": 2, "scale": 6, "repeat": 1}
  cases = [
    Case(
      f"{name}, {mode}",
      (Variant("", "", size | {"part": "long", "mode": mode}),),
      long_metrics,
    )
    for mode in ("once", "multiplicity", "leaf")
  ]
  cases += [
    Case(
      f"{name}, store",
      (Variant("", "", size | {"part": "store"}),),
      store_metrics,
    ),
    Case(
      f"branching, {options.run or 'generated'}",
      (Variant("", "", bounds),),
      bounds_metrics,
    ),
  ]
  return tuple(cases)


def proxy(options: Options) -> tuple[Case, ...]:
  """What the proxy adds to a call, with 64 executions at once."""
  metrics = (
    Metric("added_ms_median", "added to a call, median, ms", higher=False),
    Metric(
      "added_ms_p90", "added to a call, 90th percentile, ms", higher=False
    ),
    Metric("engine_ms_median", "of the engine, median, ms", higher=False),
    Metric("calls_per_s", "calls/s"),
    Metric("prompt_tokens_mean", "tokens of a prompt, mean"),
    Metric("strict_share", "share of prompts that extend the last call's"),
  )
  size = {"executions": 64, "calls": 8}
  if options.quick:
    size = {"executions": 4, "calls": 3, "token_s": 0.001, "spread_s": 0.1}
  n = size["executions"]
  return tuple(
    Case(
      f"{n} executions, {how}",
      (Variant("", "", size | {"stream": how == "streamed"}),),
      metrics,
    )
    for how in ("whole answers", "streamed")
  )


PLANS = {
  f.__name__: f
  for f in (
    engine,
    train,
    grpo,
    attention,
    reshard,
    combine,
    elastic,
    trajectories,
    proxy,
  )
}
