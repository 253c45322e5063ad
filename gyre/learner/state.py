"""TrainState, the mesh, and their abstract and sharded forms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gyre import config
from gyre.models import params as params_lib

AXES = ("data", "fsdp", "tensor")


@struct.dataclass
class TrainState:
  """Everything that an optimizer step reads and writes.

  Attributes:
    step: int32 [], optimizer steps taken.
    version: int32 [], of these weights, as rollouts record it; one more after
      each step.
    params: f32 masters.
    opt_state: of the optimizer, f32.
    key: PRNG key.
  """

  step: jax.Array
  version: jax.Array
  params: Any
  opt_state: Any
  key: jax.Array


def make_mesh(sizes: config.Mesh, devices=None) -> Mesh:
  """Returns the mesh of axes data, fsdp, tensor over the first devices.

  Args:
    sizes: of the axes.
    devices: those to take from; None: all of the process.

  Raises:
    ValueError: there are fewer devices than the mesh needs.
  """
  devices = list(jax.devices() if devices is None else devices)
  shape = tuple(getattr(sizes, axis) for axis in AXES)
  need = int(np.prod(shape))
  if need > len(devices):
    raise ValueError(
      f"mesh {dict(zip(AXES, shape, strict=True))} needs {need} devices, "
      f"there are {len(devices)}"
    )
  return Mesh(np.array(devices[:need]).reshape(shape), AXES)


def _create(params, optimizer, key, version) -> TrainState:
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    version=jnp.asarray(version, jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    key=key,
  )


def state_shardings(
  specs: params_lib.Specs,
  optimizer: optax.GradientTransformation,
  mesh: Mesh,
  rules: params_lib.Rules = params_lib.DEFAULT_RULES,
) -> TrainState:
  """Returns a TrainState of NamedSharding: moments lie as their parameters."""
  whole = NamedSharding(mesh, PartitionSpec())
  shardings = params_lib.param_shardings(specs, mesh, rules)
  opt_state = jax.eval_shape(optimizer.init, params_lib.abstract_params(specs))
  opt_state = optax.tree_utils.tree_map_params(
    optimizer,
    lambda _, sharding: sharding,
    opt_state,
    shardings,
    transform_non_params=lambda _: whole,
  )
  return TrainState(whole, whole, shardings, opt_state, whole)


def abstract_state(
  specs: params_lib.Specs,
  optimizer: optax.GradientTransformation,
  mesh: Mesh | None = None,
) -> TrainState:
  """Returns a TrainState of ShapeDtypeStruct, with shardings over `mesh`.

  It is what a checkpoint is restored into and what a step is compiled for
  ahead of time; nothing is allocated.
  """
  state = jax.eval_shape(
    lambda p, k: _create(p, optimizer, k, 0),
    params_lib.abstract_params(specs),
    jax.eval_shape(lambda: jax.random.key(0)),
  )
  if mesh is None:
    return state
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    state,
    state_shardings(specs, optimizer, mesh),
  )


def init_state(
  params: Any,
  optimizer: optax.GradientTransformation,
  key: jax.Array,
  *,
  specs: params_lib.Specs | None = None,
  mesh: Mesh | None = None,
  version: int = 0,
) -> TrainState:
  """Returns the state before the first step.

  Args:
    params: arrays; masters are made f32 (wider ones are kept).
    optimizer: from `optim.make_optimizer`.
    key: PRNG key kept in the state.
    specs: of the parameters; needed with `mesh`.
    mesh: places the state by the default rules; None: leaves it where it is.
    version: of these weights.

  Raises:
    ValueError: a mesh without specs.
  """
  masters = jax.tree.map(
    lambda x: jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32)), params
  )
  if mesh is None:
    return _create(masters, optimizer, key, version)
  if specs is None:
    raise ValueError(f"placing a state over {mesh.shape} needs specs, got None")
  shardings = state_shardings(specs, optimizer, mesh)
  masters = jax.device_put(masters, shardings.params)
  opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(
    masters
  )
  scalars = jax.device_put(
    (jnp.zeros((), jnp.int32), jnp.asarray(version, jnp.int32), key),
    shardings.step,
  )
  return TrainState(scalars[0], scalars[1], masters, opt_state, scalars[2])
