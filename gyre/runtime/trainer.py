"""The learner's step over one mesh, with its state."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gyre.config import Config, Learner, Optim
from gyre.learner import optim, step
from gyre.learner import state as state_lib
from gyre.learner.objective import Extras
from gyre.learner.packing import Packed
from gyre.learner.state import TrainState
from gyre.models import params as params_lib
from gyre.models.config import ModelConfig
from gyre.runtime import reshard

SKIPPED = {
  "loss/policy": 0.0,
  "loss/kl": 0.0,
  "loss/entropy": 0.0,
  "ratio/clip_fraction": 0.0,
  "mismatch/logprob_abs_diff": 0.0,
  "mismatch/kl": 0.0,
  "staleness/mean": 0.0,
  "staleness/max": 0,
  "optim/grad_norm": 0.0,
  "optim/lr": 0.0,
}


def supervised(learner: Learner) -> Learner:
  """Returns the objective of supervised training: REINFORCE, advantage 1."""
  return dataclasses.replace(
    learner,
    loss="reinforce",
    aggregation="token_mean",
    correction="none",
    kl_coef=0.0,
    entropy_coef=0.0,
    updates_per_batch=1,
  )


def mean_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Metrics of a batch from those of each pass over it.

  Args:
    rows: of each pass, in order; none were taken: those of a skipped batch.

  Returns:
    Means; mismatch and staleness are those of the first pass, since later
    ones move away from the sampler, which is no mismatch.
  """
  if not rows:
    return dict(SKIPPED)
  out = {k: float(np.mean([r[k] for r in rows])) for k in rows[0]}
  for name in ("mismatch/logprob_abs_diff", "mismatch/kl", "staleness/mean"):
    out[name] = float(rows[0][name])
  out["staleness/max"] = int(rows[0]["staleness/max"])
  return out


class Trainer:
  """The learner's step over a mesh, with its state.

  Attributes:
    model_cfg, mesh, specs: the model, where it is trained, its parameters.
    learner: the objective.
    programs: the jitted parts of an update.
    score: of step.make_score.
    state: the TrainState, or None before `init` or `restore`.
    reference: weights of the KL term's reference policy.
  """

  def __init__(
    self,
    model_cfg: ModelConfig,
    mesh: jax.sharding.Mesh,
    config: Config,
    *,
    learner: Learner | None = None,
    optimizer: Optim | None = None,
    total_steps: int = 0,
    temperature: float | None = None,
  ):
    """Builds the programs; nothing is compiled before the first step.

    Args:
      model_cfg: the model.
      mesh: of axes data, fsdp, tensor.
      config: the run's.
      learner, optimizer: of another phase; default the configuration's.
      total_steps: of the schedule; default run.steps with all its updates.
      temperature: at which logprobs are scored; default the rollout's.
    """
    self._like = functools.partial(
      Trainer,
      model_cfg,
      config=config,
      learner=learner,
      optimizer=optimizer,
      total_steps=total_steps,
      temperature=temperature,
    )
    self.learner = learner or config.learner
    self.mesh, self.model_cfg = mesh, model_cfg
    optimizer = optimizer or config.optim
    total = total_steps or config.run.steps * self.learner.updates_per_batch
    self.specs = params_lib.param_specs(
      model_cfg, layout=config.model.layout, dtype=jnp.float32
    )
    self.optimizer = optim.make_optimizer(
      optimizer, total, mask=optim.decay_mask(self.specs)
    )
    dtype = config.model.dtype
    options = {
      "specs": self.specs,
      "temperature": temperature or config.rollout.temperature,
      "dtype": None if dtype == "float32" else dtype,
    }
    self.programs = step.make_programs(
      model_cfg,
      self.learner,
      self.optimizer,
      optim.make_schedule(optimizer, total),
      mesh,
      remat=config.model.remat,
      **options,
    )
    self.score = step.make_score(model_cfg, mesh, **options)
    self.state: TrainState | None = None
    self.reference: Any = None

  def on(self, mesh: jax.sharding.Mesh) -> Trainer:
    """Returns the same step over another mesh, without a state."""
    return self._like(mesh)

  @property
  def row_multiple(self) -> int:
    """Rows of a micro-step are a multiple of this: data * fsdp."""
    return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

  def abstract(self) -> TrainState:
    """Returns shapes and shardings of the state, to restore into."""
    return state_lib.abstract_state(self.specs, self.optimizer, self.mesh)

  def init(self, params: Any, seed: int, version: int = 0) -> None:
    """Takes first weights, with an optimizer that has seen nothing."""
    self.state = state_lib.init_state(
      params,
      self.optimizer,
      jax.random.key(seed),
      specs=self.specs,
      mesh=self.mesh,
      version=version,
    )

  def save(self, directory: os.PathLike, meta: Mapping[str, Any]) -> None:
    """Commits the full state; see reshard.save."""
    reshard.save(self.state, directory, meta)

  def restore(self, directory: os.PathLike) -> Mapping[str, Any]:
    """Takes the full state of a checkpoint; returns its meta."""
    self.state, meta = reshard.restore(directory, self.abstract())
    return meta

  def restore_params(self, directory: os.PathLike) -> Any:
    """Returns the weights alone of a checkpoint; the state is untouched."""
    abstract = {"params": self.abstract().params}
    return reshard.restore(directory, abstract)[0]["params"]

  def set_version(self, version: int) -> None:
    """Numbers the weights, also where a batch took several updates or none."""
    where = self.state.version.sharding
    number = jax.device_put(np.int32(version), where)
    self.state = self.state.replace(version=number)

  def train(self, packed: Packed) -> dict[str, float]:
    """Trains on a batch, learner.updates_per_batch times.

    Args:
      packed: its micro-steps; none leaves the state as it is.

    Returns:
      loss/*, ratio/*, mismatch/* and so on; see mean_metrics.
    """
    rows: list[dict[str, Any]] = []
    extras = self._extras(packed)
    for _ in range(self.learner.updates_per_batch if packed.batches else 0):
      self.state, metrics = self.programs.update(
        self.state, packed.batches, extras=extras
      )
      rows.append(jax.device_get(metrics))
    return mean_metrics(rows)

  def _extras(self, packed: Packed) -> Sequence[Extras] | None:
    if not self.learner.kl_coef or not packed.batches:
      return None
    if self.reference is None:
      raise ValueError("learner.kl_coef needs reference weights")
    return [
      Extras(logp_reference=self.score(self.reference, batch))
      for batch in packed.batches
    ]
