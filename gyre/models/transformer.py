"""embed -> layers -> norm -> hidden states, and the head.

One forward pass serves training, prefill and decode: what differs is the
`AttendFn` and the state it keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gyre_kernels
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gyre.models import params as params_lib
from gyre.models import rope as rope_lib
from gyre.models.attention import AttendFn, attention, linear, linears, rms_norm
from gyre.models.config import ModelConfig

_RESIDUAL = ("batch", None, None)
_MAX_PERIOD = 8  # layers in the body of a scan over a repeating pattern


def forward(
  params: params_lib.Params,
  cfg: ModelConfig,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  attend: AttendFn,
  state: Any = None,
  *,
  dtype: Any = None,
  remat: bool | Callable[..., bool] = False,
  constrain: params_lib.Constrain | None = None,
) -> tuple[Float[Array, "B T D"], Any]:
  """Runs the decoder up to and including the final norm.

  Args:
    params: as `params.param_specs` describes, in either layout and order.
    cfg: the model (static).
    tokens: ids within the vocabulary.
    positions: of each token in its own sequence, for rope.
    attend: who sees whom; see `attention.AttendFn`.
    state: what attend keeps: for the stacked layout a pytree whose leaves
      have a leading axis of layers, for the other a tuple, one entry a layer;
      None for none.
    dtype: of activations and products; None takes the embedding's. f32
      parameters with bf16 activations are cast where they are used.
    remat: recompute each layer in the backward pass; a callable is a
      `jax.checkpoint` policy.
    constrain: states shardings of activations over a mesh; see
      `params.activation_constraint`.

  Returns:
    Hidden states after the final norm, and the new state, shaped as `state`.

  Raises:
    ValueError: shapes that do not fit each other.
  """
  if tokens.ndim != 2 or tokens.shape != positions.shape:
    raise ValueError(
      f"tokens {tokens.shape} and positions {positions.shape} must both be "
      "[B, T]"
    )
  constrain = constrain or (lambda x, axes: x)
  # Rows are cast after the look-up: casting the table would read all of it.
  x = params["embed"][tokens].astype(dtype or params["embed"].dtype)
  x = constrain(x, _RESIDUAL)
  # Kept, or XLA would fuse the cosines into each layer's every head.
  rope = jax.lax.optimization_barrier(
    rope_lib.tables(cfg.rope, cfg.head_dim, positions)
  )

  def layer(p, x, rope, layer_state, window):
    return apply_layer(
      p, cfg, x, rope, attend, layer_state, window=window, constrain=constrain
    )

  if remat:
    policy = remat if callable(remat) else None
    layer = jax.checkpoint(
      layer, policy=policy, prevent_cse=False, static_argnums=(4,)
    )
  layers = params_lib.num_layers(params)
  if layers != cfg.num_layers:
    raise ValueError(
      f"params have {layers} layers, the configuration {cfg.num_layers}"
    )
  run = _loop if params_lib.layout_of(params) == "layers" else _scan
  x, state = run(layer, params["layers"], cfg, x, rope, state)
  return rms_norm(x, params["final_norm"], cfg.norm_eps), state


def apply_layer(
  p: params_lib.Params,
  cfg: ModelConfig,
  x: Float[Array, "B T D"],
  rope: tuple[Float[Array, "B T Hh"], Float[Array, "B T Hh"]],
  attend: AttendFn,
  layer_state: Any,
  *,
  window: int | None,
  constrain: params_lib.Constrain,
) -> tuple[Float[Array, "B T D"], Any]:
  """One pre-norm layer: x + mixer(norm(x)), then x + mlp(norm(x)).

  Args:
    p: the layer's parameters.
    cfg, x, rope, attend, layer_state, window, constrain: as in `attention`.

  Returns:
    The residual stream after the layer and the layer's new state.
  """
  h = rms_norm(x, p["attn_norm"], cfg.norm_eps)
  h, layer_state = attention(
    p["attn"],
    cfg,
    h,
    rope,
    attend,
    layer_state,
    window=window,
    constrain=constrain,
  )
  x = constrain(x + h, _RESIDUAL)
  h = rms_norm(x, p["mlp_norm"], cfg.norm_eps)
  h = mlp(p["mlp"], cfg, h, constrain)
  return constrain(x + h, _RESIDUAL), layer_state


def mlp(
  p: params_lib.Params,
  cfg: ModelConfig,
  x: Float[Array, "B T D"],
  constrain: params_lib.Constrain,
) -> Float[Array, "B T D"]:
  """down(silu(gate(x)) · up(x)); SwiGLU, arXiv 2002.05202.

  The gated product is taken in f32 or wider and rounded once.
  """
  inner = ("batch", None, "mlp")
  sizes = cfg.mlp_dim, cfg.mlp_dim
  gate, up = (
    constrain(y, inner)
    for y in linears(p, params_lib.SIBLINGS["mlp"], x, sizes)
  )
  wide = jnp.promote_types(x.dtype, jnp.float32)
  gated = jax.nn.silu(gate.astype(wide)) * up.astype(wide)
  return linear(p, "down", gated.astype(x.dtype))


def _loop(layer, layers, cfg, x, rope, state):
  """One array a layer: an unrolled loop over a tuple."""
  if state is not None and len(state) != cfg.num_layers:
    raise ValueError(
      f"state has {len(state)} layers, the configuration {cfg.num_layers}"
    )
  new_state = []
  for i, (p, window) in enumerate(zip(layers, cfg.layer_windows, strict=True)):
    layer_state = None if state is None else state[i]
    x, layer_state = layer(p, x, rope, layer_state, window)
    new_state.append(layer_state)
  return x, None if state is None else tuple(new_state)


def _scan(layer, layers, cfg, x, rope, state):
  """Stacked arrays: a scan over each run of a repeating pattern of layers."""
  new_states = []
  for start, period, repeats in _runs(cfg.layer_windows):
    windows = cfg.layer_windows[start : start + period]

    def blocks(a, start=start, period=period, repeats=repeats):
      a = a[start : start + period * repeats]
      return a.reshape(repeats, period, *a.shape[1:])

    def body(x, block, windows=windows):
      p, block_state = block
      out = []
      for j, window in enumerate(windows):
        pick = lambda a, j=j: a[j]  # noqa: E731
        x, layer_state = layer(
          jax.tree.map(pick, p),
          x,
          rope,
          jax.tree.map(pick, block_state),
          window,
        )
        out.append(layer_state)
      return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *out)

    x, new_state = jax.lax.scan(
      body, x, (jax.tree.map(blocks, layers), jax.tree.map(blocks, state))
    )
    new_states.append(
      jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), new_state)
    )
  return x, jax.tree.map(lambda *a: jnp.concatenate(a), *new_states)


def _runs(kinds: tuple[Any, ...]) -> list[tuple[int, int, int]]:
  """Splits layers into (start, period, repeats) runs of a repeated pattern.

  Greedy: from each start the pattern of at most `_MAX_PERIOD` layers, repeated
  at least twice, that covers most; where none repeats, one layer alone.
  """
  runs, start = [], 0
  while start < len(kinds):
    best = (start, 1, 1)
    for period in range(1, _MAX_PERIOD + 1):
      repeats, pattern = 1, kinds[start : start + period]
      while (
        kinds[start + repeats * period : start + (repeats + 1) * period]
        == pattern
      ):
        repeats += 1
      if repeats > 1 and period * repeats > best[1] * best[2]:
        best = (start, period, repeats)
    runs.append(best)
    start += best[1] * best[2]
  return runs


def head_weight(
  params: params_lib.Params, cfg: ModelConfig
) -> Float[Array, "V D"]:
  """Returns the head's matrix [V, D]; the embedding where they are tied."""
  if cfg.tie_embeddings:
    return params["embed"]
  if "head" in params:
    return params["head"]
  return params["head" + params_lib.IO].T


def logits(
  params: params_lib.Params,
  cfg: ModelConfig,
  hidden: Float[Array, "... D"],
) -> Float[Array, "... V"]:
  """Returns the logits in f32 (or wider) of hidden states after the norm."""
  weight = head_weight(params, cfg).astype(hidden.dtype)
  wide = jnp.promote_types(hidden.dtype, jnp.float32)
  return gyre_kernels.linear(hidden, weight, out_dtype=wide)
