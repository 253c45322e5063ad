"""AdamW on f32 masters, global-norm clipping, learning-rate schedules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gyre import config
from gyre.models import params as params_lib


def make_schedule(cfg: config.Optim, total_steps: int) -> optax.Schedule:
  """Returns step -> learning rate.

  The first `warmup_steps` steps rise linearly, lr (step + 1) / warmup_steps;
  the rest go from lr to lr * final_ratio at `total_steps`: constant, along a
  half cosine or a line.

  Args:
    cfg: lr, schedule, warmup_steps, final_ratio.
    total_steps: optimizer steps of the run, warm-up included. A run that is
      shorter than its warm-up takes the first steps of a longer one.

  Raises:
    ValueError: an unknown schedule.
  """
  decay = max(1, total_steps - cfg.warmup_steps)
  if cfg.schedule == "constant":
    after = optax.constant_schedule(cfg.lr)
  elif cfg.schedule == "cosine":
    after = optax.cosine_decay_schedule(cfg.lr, decay, cfg.final_ratio)
  elif cfg.schedule == "linear":
    after = optax.linear_schedule(cfg.lr, cfg.lr * cfg.final_ratio, decay)
  else:
    raise ValueError(
      f"optim.schedule {cfg.schedule!r} is not constant, cosine or linear"
    )

  def schedule(step):
    step = jnp.asarray(step)
    warm = cfg.lr * (step + 1) / max(1, cfg.warmup_steps)
    return jnp.where(
      step < cfg.warmup_steps, warm, after(step - cfg.warmup_steps)
    )

  return schedule


def decay_mask(specs: params_lib.Specs) -> Any:
  """Returns a tree of bool: which parameters decay.

  Matrices do, embedding and head included; norm scales and biases do not, as
  in Hugging Face's Trainer and nanoGPT. Stacking over layers does not make a
  matrix of a norm.
  """
  return params_lib.map_specs(
    lambda s: len(s.shape) - (s.axes[:1] == ("layers",)) >= 2, specs
  )


def make_optimizer(
  cfg: config.Optim, total_steps: int, *, mask: Any = None
) -> optax.GradientTransformation:
  """Returns clipping by the global norm, then AdamW (1711.05101).

  Moments and masters have the parameters' dtype, f32: an update below half a
  bf16 ulp of a weight is not lost.

  Args:
    cfg: the optimizer; clip_norm 0 does not clip.
    total_steps: of the schedule.
    mask: which parameters decay, from `decay_mask`; None: all.
  """
  adamw = optax.adamw(
    make_schedule(cfg, total_steps),
    b1=cfg.b1,
    b2=cfg.b2,
    eps=cfg.eps,
    weight_decay=cfg.weight_decay,
    mask=mask,
  )
  if cfg.clip_norm > 0:
    return optax.chain(optax.clip_by_global_norm(cfg.clip_norm), adamw)
  return adamw


def cast_matrices(params: Any, dtype: Any) -> Any:
  """Returns the layers' matrices in `dtype`, once; the rest untouched.

  The embedding stays wide: its look-up adds up gradients of repeated tokens.
  """

  def cast(path, x):
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == dtype:
      return x
    name = path[-1].key
    return x.astype(dtype) if params_lib.is_matrix(name) else x

  return jax.tree_util.tree_map_with_path(cast, params)
