"""The embedded engine at the rollout cases, and how exact its logprobs are."""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from benches import ours
from peers import common


def _arguments(settings: dict[str, Any]) -> argparse.Namespace:
  """The rollout arguments, with the peers' own defaults."""
  parser = argparse.ArgumentParser()
  common.add_rollout_arguments(parser)
  common.add_rescore_argument(parser)
  return argparse.Namespace(**(vars(parser.parse_args([])) | settings))


def rescore(
  params: Any, cfg: Any, sequences: Sequence[Sequence[int]], new: int
) -> list[list[float]]:
  """Returns the f32 log-probability of the last `new` ids of each sequence.

  Teacher-forced, through the pass and the kernel that training uses.
  """
  import gyre_kernels
  import jax
  import jax.numpy as jnp

  from gyre.models import attention, transformer

  @jax.jit
  def score(tokens):
    positions = jnp.arange(tokens.shape[0] - 1)[None]
    attend = attention.packed_attend(None, positions)
    hidden, _ = transformer.forward(
      params, cfg, tokens[None, :-1], positions, attend
    )
    head = transformer.head_weight(params, cfg)
    return gyre_kernels.linear_logprob(hidden[0, -new:], head, tokens[-new:])

  return [score(np.asarray(s, np.int32)).tolist() for s in sequences]


def measure(
  model: str, dtype: str, max_context: int = 2048, **sizes: Any
) -> None:
  """Prints the JSON line of the engine.

  Args:
    model: Hugging Face directory.
    dtype: of the engine's weights and cache.
    max_context: longest prompt and completion together.
    **sizes: of the rollout cases, see peers/common.py.
  """
  from gyre.models import load

  a = _arguments(sizes | {"model": model, "dtype": dtype})
  cfg, params = load.load_hf_dir(model, layout="layers")
  rng, seeds = np.random.default_rng(0), itertools.count(0, 1000)
  engine = ours.open_engine(
    params,
    cfg,
    dtype,
    num_pages=1024,
    max_context=min(max_context, cfg.context_length),
  )
  with asyncio.Runner() as runner:

    def ids(n):
      return ours.token_ids(rng, n, cfg.vocab_size)

    def generate(prompts, new):
      outs = runner.run(ours.generate(engine, prompts, new, next(seeds)))
      assert all(len(o.ids) == new for o in outs)
      return outs

    results = common.rollout_rates(common.rollout_cases(generate, ids, a), a)
    if a.rescore:
      rng = np.random.default_rng(1)
      prompts = [ids(a.prompt) for _ in range(a.rescore)]
      outs = generate(prompts, a.new)
      whole = [p + o.ids.tolist() for p, o in zip(prompts, outs, strict=True)]
      recorded = [o.logprobs.tolist() for o in outs]
      exact = rescore(params, cfg, whole, a.new)
      results |= common.logprob_gap(recorded, exact)
    results["compilations"] = engine.stats().compilations
    results["peak_gib"] = ours.peak_gib()
    runner.run(engine.close())
  ours.emit("engine", vars(a), results)
