"""Compiles a configuration's train step for its mesh, without its weights.

Nothing is allocated: state and batch are shapes with shardings. On a machine
without the devices, host devices stand in for them.
"""

from __future__ import annotations

import math
import time
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from gyre.config import Config
from gyre.learner import optim, step
from gyre.learner import state as state_lib
from gyre.learner.objective import Extras
from gyre.models import params as params_lib
from gyre.models.config import ModelConfig


def bytes_per_device(tree: Any) -> int:
  """Returns the bytes that a tree of sharded shapes takes on one device."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      continue
    shape = leaf.sharding.shard_shape(leaf.shape)
    total += math.prod(shape) * leaf.dtype.itemsize
  return total


def compile_step(
  config: Config, model_cfg: ModelConfig, mesh: jax.sharding.Mesh
) -> Table:
  """Builds the abstract state and compiles micro-step and update.

  Args:
    config: learner, optim, model and rollout.temperature.
    model_cfg: the model.
    mesh: of axes data, fsdp, tensor.

  Returns:
    A table of bytes a device, as the arrays and as the compiler count them.
  """
  specs = params_lib.param_specs(
    model_cfg, layout=config.model.layout, dtype=jnp.float32
  )
  total = config.run.steps * config.learner.updates_per_batch
  optimizer = optim.make_optimizer(
    config.optim, total, mask=optim.decay_mask(specs)
  )
  schedule = optim.make_schedule(config.optim, total)
  state = state_lib.abstract_state(specs, optimizer, mesh)
  ways = mesh.shape["data"] * mesh.shape["fsdp"]
  rows = -(-config.learner.micro_rows // ways) * ways
  width = config.learner.row_tokens
  batch = step.abstract_batch(rows, width, width, mesh)
  dtype = None if config.model.dtype == "float32" else config.model.dtype
  micro_step = step.make_micro_step(
    model_cfg,
    config.learner,
    mesh,
    specs=specs,
    temperature=config.rollout.temperature,
    dtype=dtype,
    remat=config.model.remat,
  )
  update = step.make_apply(optimizer, schedule, mesh, specs=specs)
  sums = _with_shardings(
    jax.eval_shape(step.zero_sums, state.params, state.version),
    step.Layout(specs, mesh, params_lib.DEFAULT_RULES).sums(),
  )
  table = Table(title=f"{model_cfg.model_type} on {dict(mesh.shape)}")
  table.add_column("", no_wrap=True)
  table.add_column("per device", justify="right", no_wrap=True)
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))
  table.add_row("parameters (whole model)", f"{count:,}")
  for name, tree in (
    ("parameters, f32 masters", state.params),
    ("optimizer state", state.opt_state),
    ("gradient sums", sums.grads),
    (f"batch of {rows} rows x {width} tokens", batch),
  ):
    table.add_row(name, _size(bytes_per_device(tree)))
  for name, lower in (
    (
      "micro-step",
      lambda: micro_step.lower(state.params, batch, sums, Extras()),
    ),
    ("update", lambda: update.lower(state, sums)),
  ):
    began = time.monotonic()
    memory = lower().compile().memory_analysis()
    seconds = time.monotonic() - began
    table.add_row(f"{name}: compiled in", f"{seconds:.1f} s")
    if memory is not None:
      table.add_row("  arguments", _size(memory.argument_size_in_bytes))
      table.add_row("  temporaries", _size(memory.temp_size_in_bytes))
      table.add_row("  aliased with outputs", _size(memory.alias_size_in_bytes))
  return table


def _with_shardings(tree: Any, shardings: Any) -> Any:
  def place(sharding, subtree):
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      subtree,
    )

  return jax.tree.map(place, shardings, tree)


def _size(n: int) -> str:
  return f"{n:,} B  {n / 2**30:7.3f} GiB"
