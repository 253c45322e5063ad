"""The jitted training step over a mesh of data, fsdp and tensor axes.

A batch is cut into micro-steps. Each adds its un-normalised gradient sums and
counts to `GradSums`; `make_apply` divides once, clips and updates. A batch of
one micro-step takes `make_train_step`, which does both in one program and
holds no second copy of the gradient.

Rows lie over (data, fsdp), parameters by the models' rules. Hidden states are
gathered at entry parents before the head, so only entries meet the vocabulary,
in chunks (gyre_kernels.linear_logprob). Over the tensor axis the head
splits entries, not the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import gyre_kernels
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gyre import config
from gyre.learner import losses, objective, packing, state
from gyre.learner.objective import Counts, Extras
from gyre.learner.optim import cast_matrices
from gyre.models import attention, transformer
from gyre.models import params as params_lib
from gyre.models.config import ModelConfig
from gyre.types import Batch

ROWS = ("data", "fsdp")

# What a backward pass keeps of a layer: matrix products and attention's
# output. Norms, rope and the gated product are cheap to recompute, and are
# half the memory.
SAVE_PRODUCTS = jax.checkpoint_policies.save_only_these_names(
  "linear", "attention_out", "attention_lse"
)


@struct.dataclass
class GradSums:
  """What micro-steps add up; un-normalised.

  Attributes:
    grads: gradient of the summed loss numerator, like the f32 masters.
    counts: denominators and metric sums.
    version: int32 [], of the weights that the gradient was taken at.
  """

  grads: Any
  counts: Counts
  version: Any


def zero_sums(params: Any, version: Any = 0) -> GradSums:
  """GradSums of nothing, lying as `params` do."""
  dtype = jax.tree.leaves(params)[0].dtype
  return GradSums(
    grads=jax.tree.map(jnp.zeros_like, params),
    counts=objective.zero_counts(dtype),
    version=jnp.asarray(version, jnp.int32),
  )


def abstract_sums(layout: Layout) -> GradSums:
  """GradSums of ShapeDtypeStruct over the layout's mesh, for restoring."""
  params = params_lib.abstract_params(layout.specs)
  where, sums = layout.sums(), jax.eval_shape(zero_sums, params)

  def place(sharding, subtree):
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      subtree,
    )

  return jax.tree.map(place, where, sums)


def combine_sums(a: GradSums, b: GradSums) -> GradSums:
  """Sums of two disjoint parts of a batch, as cells combine theirs.

  Adding `zero_sums` changes nothing.
  """
  return GradSums(
    grads=jax.tree.map(jnp.add, a.grads, b.grads),
    counts=objective.add_counts(a.counts, b.counts),
    version=a.version,
  )


class Layout:
  """Where everything of a step lies: shardings over `mesh`, or none of it."""

  def __init__(self, specs, mesh: Mesh | None, rules):
    self.specs, self.mesh, self.rules = specs, mesh, rules
    self.row_ways = 1
    self.constrain = None
    if mesh is None:
      return
    missing = [a for a in state.AXES if a not in mesh.shape]
    if missing:
      raise ValueError(f"mesh axes {tuple(mesh.shape)} lack {missing}")
    self.row_ways = int(np.prod([mesh.shape[a] for a in ROWS]))
    self.constrain = params_lib.activation_constraint(mesh, rules)

  def params(self):
    if self.mesh is None:
      return None
    return params_lib.param_shardings(self.specs, self.mesh, self.rules)

  def rows(self):
    """Of every array of a Batch."""
    if self.mesh is None:
      return None
    return NamedSharding(self.mesh, PartitionSpec(ROWS))

  def whole(self):
    if self.mesh is None:
      return None
    return NamedSharding(self.mesh, PartitionSpec())

  def sums(self):
    if self.mesh is None:
      return None
    return GradSums(self.params(), self.whole(), self.whole())

  def jit(self, f, into, out, **kw):
    """jit with shardings where there is a mesh."""
    if self.mesh is None:
      return jax.jit(f, **kw)
    return jax.jit(f, in_shardings=into, out_shardings=out, **kw)


def _head(hidden, weight, batch, layout, temperature, with_entropy):
  """logp [R, M] and entropy [R, M] or None at the entries' parents."""

  def local(hidden, weight, parent, target):
    h = jnp.take_along_axis(hidden, parent[..., None], axis=1)
    out = gyre_kernels.linear_logprob(
      h.reshape(-1, h.shape[-1]),
      weight,
      target.reshape(-1),
      temperature=temperature,
      return_entropy=with_entropy,
    )
    out = out if with_entropy else (out,)
    return tuple(x.reshape(parent.shape) for x in out)

  args = (hidden, weight, batch.entry_parent, batch.entry_target)
  if layout.mesh is None or layout.mesh.size == 1:
    out = local(*args)
  else:
    tensor = layout.mesh.shape["tensor"]
    split = "tensor" if batch.entry_parent.shape[1] % tensor == 0 else None
    rows, entries = PartitionSpec(ROWS), PartitionSpec(ROWS, split)
    out = jax.shard_map(
      local,
      mesh=layout.mesh,
      in_specs=(rows, PartitionSpec(), entries, entries),
      out_specs=(entries,) * (2 if with_entropy else 1),
    )(*args)
  return out if with_entropy else (out[0], None)


def _logprobs(
  params, batch, cfg, layout, *, temperature, dtype, remat, with_entropy=False
):
  """logp [R, M] and, if wanted, entropy, at each loss entry."""
  attend = attention.packed_attend(batch.subtree_end, batch.positions)
  hidden, _ = transformer.forward(
    params,
    cfg,
    batch.tokens,
    batch.positions,
    attend,
    dtype=dtype,
    remat=remat or SAVE_PRODUCTS,
    constrain=layout.constrain,
  )
  weight = transformer.head_weight(params, cfg).astype(hidden.dtype)
  return _head(hidden, weight, batch, layout, temperature, with_entropy)


def _gradient(params, batch, extras, version, cfg, learner, layout, **kw):
  """GradSums of one micro-step."""
  if extras.logp_reference is None and learner.kl_coef:
    raise ValueError(
      f"learner.kl_coef is {learner.kl_coef} but there is no logp_reference"
    )
  dtype = kw["dtype"]

  def loss(params):
    # One cast a micro-step: a scan would cast again in its backward pass.
    cast = params if dtype is None else cast_matrices(params, jnp.dtype(dtype))
    logp, entropy = _logprobs(
      cast, batch, cfg, layout, with_entropy=bool(learner.entropy_coef), **kw
    )
    return objective.objective(learner, logp, entropy, batch, extras, version)

  grads, counts = jax.grad(loss, has_aux=True)(params)
  dtype = jax.tree.leaves(params)[0].dtype
  sums = {k: v.astype(dtype) for k, v in counts.sums.items()}
  return GradSums(grads, counts.replace(sums=sums), version)


def _check_rows(batch: Batch, layout: Layout) -> None:
  if batch.tokens.shape[0] % layout.row_ways:
    raise ValueError(
      f"a micro-step of {batch.tokens.shape[0]} rows does not divide over "
      f"data * fsdp = {layout.row_ways}: pack with row_multiple"
    )


def _edge(jitted, learner: config.Learner, layout: Layout):
  """call(x, batch, ..., extras=None) of a jitted f(x, batch, ..., extras).

  Refuses split samples before an objective over whole ones runs. `lower` and
  `trace` are the jitted function's own and take every argument.
  """
  whole = objective.needs_whole_samples(learner)

  def call(x, batch, *rest, extras: Extras | None = None):
    _check_rows(batch, layout)
    if whole and (extras is None or extras.sequence is None):
      losses.check_whole(batch.sample, batch.weight, batch.sample_weight)
    return jitted(x, batch, *rest, extras or Extras())

  call.lower, call.trace = jitted.lower, jitted.trace
  return call


def make_micro_step(
  model_cfg: ModelConfig,
  learner: config.Learner,
  mesh: Mesh | None = None,
  *,
  specs: params_lib.Specs | None = None,
  temperature: float = 1.0,
  dtype: str | None = None,
  remat: bool = False,
  rules: params_lib.Rules = params_lib.DEFAULT_RULES,
) -> Callable[..., GradSums]:
  """Builds micro_step(params, batch, sums, *, extras=None) -> GradSums.

  Args:
    model_cfg: the model.
    learner: the objective.
    mesh: of axes data, fsdp, tensor; None: one device.
    specs: of the parameters; None: param_specs(model_cfg).
    temperature: that of sampling (rollout.temperature), applied in scoring.
    dtype: of activations and products; None: the parameters'.
    remat: True recomputes whole layers in the backward pass; False keeps
      their matrix products (SAVE_PRODUCTS) and recomputes the rest.
    rules: logical axis -> mesh axis.

  Returns:
    The jitted step. `sums` is donated; `sums.version` is the version of
    `params`. It refuses, with a ValueError, rows that do not divide over the
    mesh and samples split under an objective that needs them whole.
  """
  layout = _layout(model_cfg, mesh, specs, rules)

  def micro_step(params, batch, sums, extras):
    new = _gradient(
      params,
      batch,
      extras,
      sums.version,
      model_cfg,
      learner,
      layout,
      temperature=temperature,
      dtype=dtype,
      remat=remat,
    )
    return combine_sums(sums, new)

  jitted = layout.jit(
    micro_step,
    (layout.params(), layout.rows(), layout.sums(), layout.rows()),
    layout.sums(),
    donate_argnums=2,
  )
  return _edge(jitted, learner, layout)


def _layout(model_cfg, mesh, specs, rules) -> Layout:
  specs = params_lib.param_specs(model_cfg) if specs is None else specs
  return Layout(specs, mesh, rules)


def _update(optimizer, schedule, old: state.TrainState, sums: GradSums):
  """Divides once, clips, updates; the new state and its metrics."""
  count = jnp.maximum(sums.counts.denominator, 1)
  grads = jax.tree.map(lambda g: g / count.astype(g.dtype), sums.grads)
  updates, opt_state = optimizer.update(grads, old.opt_state, old.params)
  metrics = objective.metrics(sums.counts) | {
    "optim/grad_norm": optax.tree.norm(grads),
    "optim/lr": schedule(old.step),
  }
  new = old.replace(
    step=old.step + 1,
    version=old.version + 1,
    params=optax.apply_updates(old.params, updates),
    opt_state=opt_state,
  )
  return new, metrics


def make_apply(
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  mesh: Mesh | None = None,
  *,
  specs: params_lib.Specs | None = None,
  rules: params_lib.Rules = params_lib.DEFAULT_RULES,
) -> Callable[
  [state.TrainState, GradSums], tuple[state.TrainState, dict[str, Any]]
]:
  """Builds the jitted apply(state, sums) -> (state, metrics).

  The state is donated: copy parameters that others still read.

  Args:
    optimizer: from `optim.make_optimizer`.
    schedule: its learning rate, for the metric.
    mesh, specs, rules: as for make_micro_step; specs are needed with a mesh.
  """

  def apply(old, sums):
    return _update(optimizer, schedule, old, sums)

  if mesh is None:
    return jax.jit(apply, donate_argnums=0)
  layout = Layout(specs, mesh, rules)
  where = state.state_shardings(specs, optimizer, mesh, rules)
  return layout.jit(
    apply,
    (where, layout.sums()),
    (where, layout.whole()),
    donate_argnums=0,
  )


def make_train_step(
  model_cfg: ModelConfig,
  learner: config.Learner,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  mesh: Mesh | None = None,
  *,
  specs: params_lib.Specs | None = None,
  temperature: float = 1.0,
  dtype: str | None = None,
  remat: bool = False,
  rules: params_lib.Rules = params_lib.DEFAULT_RULES,
) -> Callable[..., tuple[state.TrainState, dict[str, Any]]]:
  """Builds train_step(state, batch, *, extras=None) -> (state, metrics).

  For a batch of one micro-step: gradient and update in one program, with no
  accumulation buffer. The same numbers as micro-step and apply, up to
  rounding. Arguments as for make_micro_step and make_apply; the state is
  donated.
  """
  layout = _layout(model_cfg, mesh, specs, rules)

  def train_step(old, batch, extras):
    sums = _gradient(
      old.params,
      batch,
      extras,
      old.version,
      model_cfg,
      learner,
      layout,
      temperature=temperature,
      dtype=dtype,
      remat=remat,
    )
    return _update(optimizer, schedule, old, sums)

  where = None
  if mesh is not None:
    where = state.state_shardings(layout.specs, optimizer, mesh, rules)
  jitted = layout.jit(
    train_step,
    (where, layout.rows(), layout.rows()),
    (where, layout.whole()),
    donate_argnums=0,
  )
  return _edge(jitted, learner, layout)


@dataclasses.dataclass(frozen=True)
class Programs:
  """The jitted parts of an update over one mesh, which share their compiles.

  Attributes:
    layout: where everything lies.
    micro_step: of make_micro_step.
    fused: of make_train_step.
    apply: of make_apply.
    zeros: (params, version) -> GradSums of nothing.
    combine: (GradSums, GradSums) -> their sum; the first is used up.
  """

  layout: Layout
  micro_step: Callable[..., GradSums]
  fused: Callable[..., tuple[state.TrainState, dict[str, Any]]]
  apply: Callable[..., tuple[state.TrainState, dict[str, Any]]]
  zeros: Callable[[Any, Any], GradSums]
  combine: Callable[[GradSums, GradSums], GradSums]

  def update(
    self,
    old: state.TrainState,
    batches: Sequence[Batch],
    *,
    extras: Sequence[Extras] | None = None,
  ) -> tuple[state.TrainState, dict[str, Any]]:
    """One optimizer step of a state (donated) on one or more micro-steps."""
    if not batches:
      raise ValueError("an update needs at least one micro-step, got 0")
    extras = [Extras()] * len(batches) if extras is None else extras
    if len(batches) == 1:
      return self.fused(old, batches[0], extras=extras[0])
    sums = self.zeros(old.params, old.version)
    for batch, extra in zip(batches, extras, strict=True):
      sums = self.micro_step(old.params, batch, sums, extras=extra)
    return self.apply(old, sums)


def make_programs(
  model_cfg: ModelConfig,
  learner: config.Learner,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  mesh: Mesh | None = None,
  **options: Any,
) -> Programs:
  """Builds the parts of an update; arguments as for make_train_step."""
  specs = options.get("specs") or params_lib.param_specs(model_cfg)
  rules = options.get("rules", params_lib.DEFAULT_RULES)
  layout = Layout(specs, mesh, rules)
  sums = layout.sums()
  return Programs(
    layout=layout,
    micro_step=make_micro_step(model_cfg, learner, mesh, **options),
    fused=make_train_step(
      model_cfg, learner, optimizer, schedule, mesh, **options
    ),
    apply=make_apply(optimizer, schedule, mesh, specs=specs, rules=rules),
    zeros=layout.jit(zero_sums, (layout.params(), layout.whole()), sums),
    combine=layout.jit(combine_sums, (sums, sums), sums, donate_argnums=0),
  )


def make_update(
  model_cfg: ModelConfig,
  learner: config.Learner,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  **options: Any,
) -> Callable[..., tuple[state.TrainState, dict[str, Any]]]:
  """Builds update(state, batches, *, extras=None): one optimizer step.

  Args: as for make_train_step.

  Returns:
    A function of a state (donated), a non-empty sequence of micro-steps and
    as many Extras; it takes make_train_step's program for one micro-step, and
    otherwise accumulates.
  """
  return make_programs(
    model_cfg, learner, optimizer, schedule, **options
  ).update


def make_score(
  model_cfg: ModelConfig,
  mesh: Mesh | None = None,
  *,
  specs: params_lib.Specs | None = None,
  temperature: float = 1.0,
  dtype: str | None = None,
  rules: params_lib.Rules = params_lib.DEFAULT_RULES,
) -> Callable[[Any, Batch], jax.Array]:
  """Builds the jitted score(params, batch) -> logp [R, M].

  For logp_old, the reference policy and evaluation. Past a row's last entry
  the values mean nothing. Arguments as for make_micro_step.
  """
  layout = _layout(model_cfg, mesh, specs, rules)

  def score(params, batch):
    if dtype is not None:
      params = cast_matrices(params, jnp.dtype(dtype))
    return _logprobs(
      params,
      batch,
      model_cfg,
      layout,
      temperature=temperature,
      dtype=dtype,
      remat=False,
    )[0]

  jitted = layout.jit(score, (layout.params(), layout.rows()), layout.rows())

  def call(params, batch):
    _check_rows(batch, layout)
    return jitted(params, batch)

  call.lower, call.trace = jitted.lower, jitted.trace
  return call


def abstract_batch(
  rows: int, row_tokens: int, row_entries: int, mesh: Mesh | None = None
) -> Batch:
  """A Batch of ShapeDtypeStruct, for compiling ahead of time."""
  where = Layout(None, mesh, params_lib.DEFAULT_RULES).rows()
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
    packing.empty_batch(rows, row_tokens, row_entries),
  )
