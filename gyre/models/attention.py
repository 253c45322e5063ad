"""Grouped-query attention: the mixer of dense decoders, and its masks.

Projections, optional RMS norm of each head's q and k, rope; what attends to
what is the business of an `AttendFn`, so that training, prefill and decode
share this code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import gyre_kernels
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gyre.models import params as params_lib
from gyre.models import rope as rope_lib
from gyre.models.config import ModelConfig

# attend(q [B,T,N,H], k [B,T,K,H], v [B,T,K,H], layer_state, *, window,
# softcap, sinks, scale) -> (out [B,T,N,H], new layer_state). q and k come
# after rope, k and v un-repeated. window is gyre_kernels' (how many positions
# before its own a query still sees), which is Hugging Face's less one.
AttendFn = Callable[..., tuple[jax.Array, Any]]


def linear(
  p: params_lib.Params, name: str, x: Float[Array, "... I"]
) -> Float[Array, "... O"]:
  """Returns x·Wᵀ + b, W stored [out, in] (`name`) or [in, out] (`name_io`).

  The product runs in x's dtype; parameters of another dtype are cast. Under
  `jax.checkpoint` the product is named "linear".
  """
  order = "oi" if name in p else "io"
  w = p[name if order == "oi" else name + params_lib.IO].astype(x.dtype)
  y = gyre_kernels.linear(x, w, order=order)
  bias = p.get(f"{name}_bias")
  return y if bias is None else y + bias.astype(x.dtype)


def linears(
  p: params_lib.Params,
  names: tuple[str, ...],
  x: Float[Array, "... I"],
  sizes: tuple[int, ...],
) -> list[Float[Array, "... O"]]:
  """Returns the products of siblings, stored apart or by `params.fuse`.

  Args:
    p: the block's parameters.
    names: of the siblings.
    x: their input.
    sizes: of their outputs.
  """
  fused = "_".join(names)
  if fused not in p:
    return [linear(p, name, x) for name in names]
  ends = list(itertools.accumulate(sizes))[:-1]
  return jnp.split(linear(p, fused, x), ends, -1)


def rms_norm(
  x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float
) -> Float[Array, "... D"]:
  """x / sqrt(mean(x²) + eps) · weight; arXiv 1910.07467.

  In f32 or wider, rounded to x's type once, at the end.
  """
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
  return (wide * scale * weight.astype(wide.dtype)).astype(x.dtype)


def attention(
  p: params_lib.Params,
  cfg: ModelConfig,
  x: Float[Array, "B T D"],
  rope: tuple[Float[Array, "B T Hh"], Float[Array, "B T Hh"]],
  attend: AttendFn,
  state: Any,
  *,
  window: int | None,
  constrain: params_lib.Constrain,
) -> tuple[Float[Array, "B T D"], Any]:
  """One layer's attention, without norm and residual.

  Args:
    p: the layer's "attn" parameters.
    cfg: the model.
    x: normalised input.
    rope: cos and sin of the positions, from `rope.tables`.
    attend: who sees whom, and where k and v are kept.
    state: the layer's state, handed to attend.
    window: Hugging Face's sliding window of this layer, or None.
    constrain: states shardings; see `params.activation_constraint`.

  Returns:
    The output and the layer's new state.
  """
  B, T, _ = x.shape
  heads = ("batch", None, "heads", None)
  kv_heads = ("batch", None, "kv_heads", None)
  counts = cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads
  sizes = tuple(n * cfg.head_dim for n in counts)
  q, k, v = (
    y.reshape(B, T, n, cfg.head_dim)
    for y, n in zip(
      linears(p, params_lib.SIBLINGS["attn"], x, sizes), counts, strict=True
    )
  )
  q, k, v = constrain(q, heads), constrain(k, kv_heads), constrain(v, kv_heads)
  if cfg.qk_norm:
    q = rms_norm(q, p["q_norm"], cfg.norm_eps)
    k = rms_norm(k, p["k_norm"], cfg.norm_eps)
  q, k = rope_lib.rotate(q, *rope), rope_lib.rotate(k, *rope)
  out, state = attend(
    q,
    k,
    v,
    state,
    window=None if window is None else window - 1,
    softcap=None,
    sinks=None,
    scale=cfg.head_dim**-0.5,
  )
  out = out.astype(x.dtype).reshape(B, T, cfg.num_heads * cfg.head_dim)
  return linear(p, "o", out), state


def packed_attend(
  subtree_end: Int[Array, "B T"] | None,
  positions: Int[Array, "B T"],
) -> AttendFn:
  """Returns the AttendFn of training and scoring: whole rows, no cache.

  Args:
    subtree_end: see `gyre_kernels.attention`: key j is seen by query i iff
      j <= i < subtree_end[j]; None is plain causal attention.
    positions: of each token in its own sequence; windows are measured in
      them, since a sibling may lie between.

  Returns:
    attend; a layer's state passes through it unchanged.
  """

  def attend(q, k, v, layer_state, *, window, softcap, sinks, scale):
    out = gyre_kernels.attention(
      q,
      k,
      v,
      subtree_end=subtree_end,
      q_positions=positions,
      k_positions=positions,
      window=window,
      softcap=softcap,
      sinks=sinks,
      scale=scale,
    )
    return out, layer_state

  return attend
