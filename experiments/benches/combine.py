"""Gradient sums of cells in processes of their own, combined for the core.

As many processes as cells hold a sum of the model's size, f32, in shared
memory; they are added pairwise, and the core reads the total. Every file is
hashed when it is written and when it is read. Beside it, the same additions in
one process with the arrays at hand, and a plain copy of as many bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import tempfile
import time

import numpy as np
from benches import ours
from peers import common


def measure(model: str, cells: int = 4, repeat: int = 3) -> None:
  """Prints the JSON line of a combination.

  Args:
    model: Hugging Face directory, whose parameters the sums are of.
    cells: processes.
    repeat: timed calls of each; the median is reported.
  """
  settings = dict(locals())
  with tempfile.TemporaryDirectory(prefix="gyre-combine-") as root:
    results = asyncio.run(_measure(model, cells, repeat, pathlib.Path(root)))
  ours.emit("combine", settings, results)


def _zeros(model: str) -> dict[str, np.ndarray]:
  """Sums of the model's size, by name."""
  from gyre.models import params as params_lib
  from gyre.models.config import ModelConfig
  from gyre.runtime import reshard

  specs = params_lib.param_specs(ModelConfig.from_hf(model))
  named = reshard.named_leaves(params_lib.abstract_params(specs))
  return {
    f"grads.{k}": np.full(v.shape, 0.5, np.float32) for k, v in named.items()
  }


async def _measure(model, cells, repeat, root) -> dict:
  from gyre.rollout.profile import Profile
  from gyre.runtime import exchange, remote, workers
  from gyre.runtime.specs import emulated_spec

  sums = _zeros(model)
  size = sum(x.nbytes for x in sums.values())
  names = [f"cell {i}" for i in range(cells)]
  profile = Profile()
  specs = [emulated_spec(n, profile) for n in names]
  secs: dict[str, list[float]] = {}

  @contextlib.contextmanager
  def timed(name):
    begun = time.perf_counter()
    yield
    secs.setdefault(name, []).append(time.perf_counter() - begun)

  async with workers.Workers(specs, root) as group:
    processes = list(group.cells.values())
    for i in range(repeat + 1):
      with timed("share"):
        first = exchange.put(sums, exchange.TMPFS)
      held = [first]
      held += [exchange.put(sums, exchange.TMPFS) for _ in names[1:]]
      with timed("combine"):
        (total,) = await remote.combine_pairwise(held, processes)
      with timed("read"):
        got = total.load()
      total.close()
      if i == 0:
        wrong = [k for k, v in got.items() if (v != 0.5 * cells).any()]
        if wrong:
          raise AssertionError(f"wrong sums of {wrong[:3]}")
      del held, first, total
  secs = {k: float(np.median(v[1:])) for k, v in secs.items()}
  spare = {k: np.zeros_like(v) for k, v in sums.items()}

  def add(i):
    for _ in names[1:]:
      for name, x in sums.items():
        np.add(spare[name], x, out=spare[name])

  def copy(i):
    for name, x in sums.items():
      np.copyto(spare[name], x)

  secs["add_at_hand"] = common.timed(add, repeat)[0]
  secs["copy"] = common.timed(copy, repeat)[0]
  results = {f"{k}_s": v for k, v in secs.items()}
  moved = {"share": 1, "combine": cells, "read": 1, "copy": 1}
  results |= {f"{k}_gb_s": n * size / secs[k] / 1e9 for k, n in moved.items()}
  return results | {"bytes": size, "cells": cells}
