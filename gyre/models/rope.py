"""Rotary position embedding and its scalings.

RoFormer (arXiv 2104.09864); linear, llama3 and YaRN (arXiv 2309.00071) as
Hugging Face transformers computes them, in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_FIELDS = {  # Hugging Face key -> field, by kind
  "default": {},
  "linear": {"factor": "factor"},
  "llama3": {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
  },
  "yarn": {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "attention_factor": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
  },
}
_REQUIRED = {
  "default": (),
  "linear": ("factor",),
  "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
  "yarn": ("factor",),
}


@dataclasses.dataclass(frozen=True)
class Rope:
  """theta: base of the frequencies. kind: "default", "linear", "llama3" or
  "yarn". factor: how much longer the context became. original_context:
  positions before the scaling. The rest as in Hugging Face's configuration;
  None takes its default.
  """

  theta: float = 10000.0
  kind: str = "default"
  factor: float = 1.0
  original_context: int = 0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float | None = None
  beta_slow: float | None = None
  attention_factor: float | None = None
  mscale: float | None = None
  mscale_all_dim: float | None = None
  truncate: bool = True


def from_hf(hf: Mapping[str, Any], context_length: int) -> Rope:
  """Reads `rope_parameters`, or `rope_scaling` with `rope_theta`.

  Args:
    hf: a parsed config.json.
    context_length: its max_position_embeddings, the default of
      original_max_position_embeddings.

  Returns:
    The rope.

  Raises:
    ValueError: a kind or an option that is not supported.
  """
  # transformers 5 lets rope_scaling win where a file has both.
  rope = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
  theta = rope.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0
  old = rope.pop("type", None)
  kind = rope.pop("rope_type", None) or old or "default"
  if kind not in _FIELDS:
    raise ValueError(
      f"rope_type {kind!r} is not supported ({', '.join(_FIELDS)})"
    )
  if rope.pop("partial_rotary_factor", None) not in (None, 1, 1.0):
    raise ValueError(
      "rope's partial_rotary_factor other than 1 is not supported"
    )
  for key in _REQUIRED[kind]:
    if not isinstance(rope.get(key), int | float):
      raise ValueError(
        f"rope_type {kind}: {key} must be a number, got {rope.get(key)}"
      )
  fields = {}
  for key, value in rope.items():
    if value is None:
      continue
    if key not in _FIELDS[kind]:
      raise ValueError(
        f"rope_type {kind}: option {key}={value!r} is not supported"
      )
    fields[_FIELDS[kind][key]] = value
  if kind in ("llama3", "yarn"):
    fields.setdefault("original_context", context_length)
  return Rope(theta=float(theta), kind=kind, **fields)


def to_hf(rope: Rope) -> dict[str, Any]:
  """Returns rope_theta, rope_scaling and rope_parameters of a config.json."""
  scaling = {
    key: getattr(rope, field)
    for key, field in _FIELDS[rope.kind].items()
    if getattr(rope, field) is not None
  }
  if scaling:
    scaling = {"rope_type": rope.kind, **scaling}
  return {
    "rope_theta": rope.theta,
    "rope_scaling": scaling or None,
    "rope_parameters": {
      "rope_type": rope.kind,
      "rope_theta": rope.theta,
      **scaling,
    },
  }


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
  """Returns the inverse frequencies [H/2] f32 and the scale of cos and sin.

  Args:
    rope: which rope.
    head_dim: H, even.

  Returns:
    ω_i = θ^(−2i/H), scaled as `rope.kind` says, radians a position; and the
    factor (1 but for YaRN) that multiplies cos and sin.
  """
  exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  inverse = np.float32(1.0) / np.power(np.float32(rope.theta), exponent)
  if rope.kind == "linear":
    return inverse / np.float32(rope.factor), 1.0
  if rope.kind == "llama3":
    return _llama3(rope, inverse), 1.0
  if rope.kind == "yarn":
    return _yarn(rope, inverse, head_dim)
  return inverse, 1.0


def _llama3(rope: Rope, inverse: np.ndarray) -> np.ndarray:
  """Long wavelengths are divided, short kept, those between interpolated."""
  wavelength = np.float32(2 * math.pi) / inverse
  ratio = np.float32(rope.original_context) / wavelength
  smooth = (ratio - rope.low_freq_factor) / (
    rope.high_freq_factor - rope.low_freq_factor
  )
  smooth = np.clip(smooth, 0.0, 1.0).astype(np.float32)
  scaled = inverse / np.float32(rope.factor)
  return (1 - smooth) * scaled + smooth * inverse


def _yarn(
  rope: Rope, inverse: np.ndarray, head_dim: int
) -> tuple[np.ndarray, float]:
  """A ramp over dimensions from extrapolation to interpolation."""

  def dimension(rotations: float) -> float:
    length = rope.original_context / (rotations * 2 * math.pi)
    return head_dim * math.log(length) / (2 * math.log(rope.theta))

  low, high = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  if low == high:
    high += 0.001  # keeps the ramp finite
  index = np.arange(head_dim // 2, dtype=np.float32)
  keep = 1 - np.clip((index - low) / (high - low), 0, 1).astype(np.float32)
  scaled = inverse / np.float32(rope.factor)
  return scaled * (1 - keep) + inverse * keep, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: Rope) -> float:
  def get(mscale: float) -> float:
    return 1.0 + (
      0.1 * mscale * math.log(rope.factor) if rope.factor > 1 else 0
    )

  if rope.attention_factor is not None:
    return float(rope.attention_factor)
  if rope.mscale and rope.mscale_all_dim:
    return get(rope.mscale) / get(rope.mscale_all_dim)
  return get(1.0)


def tables(
  rope: Rope, head_dim: int, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T Hh"], Float[Array, "B T Hh"]]:
  """Returns cos and sin [B, T, H/2] f32 of each position's angles."""
  inverse, scale = frequencies(rope, head_dim)
  angle = positions.astype(jnp.float32)[..., None] * inverse
  return jnp.cos(angle) * np.float32(scale), jnp.sin(angle) * np.float32(scale)


def rotate(
  x: Float[Array, "B T N H"],
  cos: Float[Array, "B T Hh"],
  sin: Float[Array, "B T Hh"],
) -> Float[Array, "B T N H"]:
  """Rotates the pairs (x_i, x_{i + H/2}) by their angles, in f32 or wider."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  first, second = jnp.split(x.astype(wide), 2, axis=-1)
  cos, sin = cos[:, :, None, :], sin[:, :, None, :]
  rotated = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
