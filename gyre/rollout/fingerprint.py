"""A sum of every tensor's bits: does an engine use what was published?

Each element's bits, in the engine's dtype, are multiplied by an odd number
that hashes the element's index, and summed modulo 2^32. Integer sums do not
depend on their order, so two trees of the same values give the same numbers
however they are laid out, sharded or fused, and need no tolerance. A change of
one element always shows; any other with all but 2^-32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from gyre.models import params as params_lib
from gyre.models.config import ModelConfig

Fingerprint = dict[str, tuple[int, ...]]


@runtime_checkable
class Fingerprinted(Protocol):
  """An engine that tells what weights it computes with."""

  def fingerprint_of(self, weights: Any) -> Fingerprint:
    """The fingerprint of its own weights when it serves these, a pytree."""
    ...

  async def difference(self, expected: Fingerprint) -> str:
    """Where its own weights differ from those expected; "" if nowhere.

    Raises:
      ValueError: it has none: it sleeps, or slept and was given none.
    """
    ...


def _weights(shape: tuple[int, ...]) -> jax.Array:
  """Odd uint32 numbers, hashes of the flat index."""
  index = jnp.zeros(shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(len(shape))):
    along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    index += along * jnp.uint32(stride % (1 << 32))
    stride *= shape[axis]
  # The finalizer of MurmurHash3.
  index *= jnp.uint32(0x9E3779B1)
  index ^= index >> 16
  index *= jnp.uint32(0x85EBCA6B)
  index ^= index >> 13
  index *= jnp.uint32(0xC2B2AE35)
  return (index ^ (index >> 16)) | jnp.uint32(1)


@functools.partial(jax.jit, static_argnames=("dtype", "flip", "rows"))
def _sums(x, *, dtype: str, flip: bool, rows: tuple[int, ...]) -> jax.Array:
  """Sums of the parts of an array, cut by rows; uint32 [parts]."""
  x = jnp.swapaxes(x, -1, -2) if flip else x
  x = x.astype(dtype)
  bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
  out, start = [], 0
  for n in rows:
    part = bits[start : start + n].astype(jnp.uint32)
    out.append(jnp.sum(part * _weights(part.shape), dtype=jnp.uint32))
    start += n
  return jnp.stack(out)


@functools.partial(jax.jit, static_argnames=("dtype", "flip"))
def _stacked_sums(x, *, dtype: str, flip: bool) -> jax.Array:
  """Sums of each layer's array; uint32 [L]."""
  rows = (x.shape[-1] if flip else x.shape[1],)
  one = functools.partial(_sums, dtype=dtype, flip=flip, rows=rows)
  return jax.vmap(one)(x)[:, 0]


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
  for name, node in tree.items():
    if isinstance(node, Mapping):
      yield from _leaves(node, f"{prefix}{name}/")
    else:
      yield prefix + name, node


def _parts(cfg: ModelConfig) -> dict[str, tuple[tuple[str, int], ...]]:
  """Fused name -> (name, rows) of what it was made of."""
  layer = params_lib.param_specs(cfg, layout="layers")["layers"][0]
  out = {}
  for block, names in params_lib.SIBLINGS.items():
    for end in ("", "_bias"):
      if names[0] + end in layer[block]:
        out[f"{block}/{'_'.join(names)}{end}"] = tuple(
          (f"{block}/{name}{end}", layer[block][name + end].shape[0])
          for name in names
        )
  return out


def of(params: Any, cfg: ModelConfig, dtype: Any) -> Fingerprint:
  """The fingerprint of weights.

  Args:
    params: a tree of arrays in any layout and order, fused or not, on any
      devices.
    cfg: the model.
    dtype: to which they are cast first, the engine's.

  Returns:
    Name -> a number a layer, or one; "layers/attn/q" whatever the layout.
  """
  dtype = jnp.dtype(dtype).name
  parts = _parts(cfg)
  found: dict[str, list[Any]] = {}

  def enter(prefix: str, name: str, x: Any) -> None:
    flip = name.endswith(params_lib.IO)
    name = name.removesuffix(params_lib.IO)
    whole = ((name, x.shape[-1] if flip else x.shape[0]),)
    names, rows = zip(*parts.get(name, whole), strict=True)
    sums = _sums(x, dtype=dtype, flip=flip, rows=rows)
    for i, part in enumerate(names):
      found.setdefault(prefix + part, []).append(sums[i])

  top = {k: v for k, v in params.items() if k != "layers"}
  for name, x in _leaves(top, ""):
    enter("", name, x)
  if params_lib.layout_of(params) == "layers":
    for layer in params["layers"]:
      for name, x in _leaves(layer, ""):
        enter("layers/", name, x)
  else:
    for name, x in _leaves(params["layers"], ""):
      flip = name.endswith(params_lib.IO)
      sums = _stacked_sums(x, dtype=dtype, flip=flip)
      found["layers/" + name.removesuffix(params_lib.IO)] = [sums]
  return {
    name: tuple(int(i) for x in found[name] for i in np.ravel(x))
    for name in sorted(found)
  }


def difference(expected: Fingerprint, got: Fingerprint) -> str:
  """The first tensor in which two fingerprints differ, with both values.

  Returns:
    "" where they are equal.
  """
  for name in sorted({*expected, *got}):
    a, b = expected.get(name, ()), got.get(name, ())
    if len(a) != len(b):
      return f"{name} has {len(b)} sums, not {len(a)}"
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
      if x != y:
        layer = f" of layer {i}" if len(a) > 1 else ""
        return f"{name}{layer} sums to {y:08x}, not {x:08x}"
  return ""
