"""What our measurements share: the JSON line, an engine, its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from peers import common

PACKAGES = ("gyre", "gyre-kernels", "jax", "jaxlib")


def emit(name: str, settings: Mapping[str, Any], results: Mapping[str, Any]):
  """Prints the JSON line of a measurement, in the peers' own form."""
  import jax

  versions = common.versions(*PACKAGES)
  versions["device"] = jax.devices()[0].device_kind
  common.emit(name, settings, results, versions)


def peak_gib() -> float:
  """Returns the peak memory of this process, or of its GPU, in GiB."""
  import jax

  stats = jax.devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" in stats:
    return round(stats["peak_bytes_in_use"] / 2**30, 3)
  return common.peak_rss_gib()


def open_engine(params, cfg, dtype: str, **rollout: Any):
  """Returns a JaxEngine as a GRPO run would open it.

  Args:
    params: of the model.
    cfg: the ModelConfig.
    dtype: of weights and cache.
    **rollout: fields of config.Rollout; max_context besides.
  """
  from gyre import config
  from gyre.rollout.jax_engine import JaxEngine

  max_context = rollout.pop("max_context", 0)
  settings = config.Rollout(dtype=dtype, **rollout)
  return JaxEngine(params, cfg, rollout=settings, max_context=max_context)


async def generate(
  engine, prompts: Sequence[Sequence[int]], new: int, seed: int
) -> list:
  """Samples `new` tokens a prompt, all requests at once, stopping at none.

  Args:
    engine: any Engine.
    prompts: token ids.
    new: tokens a completion.
    seed: of the first request; the next ones count on.

  Returns:
    Completions, in order.
  """
  from gyre.rollout.engine import Request

  requests = [
    Request(ids=p, max_new_tokens=new, seed=seed + i)
    for i, p in enumerate(prompts)
  ]
  return await asyncio.gather(*(engine.generate(r) for r in requests))


def token_ids(rng: np.random.Generator, n: int, vocab: int) -> list[int]:
  """Returns n random ids, without the special ones at the ends."""
  return rng.integers(min(100, vocab // 2), min(40000, vocab), n).tolist()
