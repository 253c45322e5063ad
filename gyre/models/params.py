"""One tree of ArraySpec gives shapes, shardings, init and stored order.

A parameter tree is

    {"embed": [V, D], "layers": ..., "final_norm": [D], "head": [V, D]}

("head" only where embeddings are not tied). Layout "stacked": "layers" is one
layer's dict whose arrays have a leading axis L, for `lax.scan`. Layout
"layers": a tuple of L dicts. A layer's dict is

    {"attn_norm", "attn": {"q", "k", "v", "o", ...}, "mlp_norm",
     "mlp": {"gate", "up", "down", ...}}

A matrix stored [out, in] has its plain name, one stored [in, out] the name
with "_io" behind it, so a tree of arrays says by itself how it is stored.
The idea of one tree of array descriptions is that of jax-llm-examples.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gyre.models.config import ModelConfig

Layout = Literal["stacked", "layers"]
Order = Literal["oi", "io"]
Params = dict[str, Any]
Specs = dict[str, Any]
Rules = Mapping[str, str | tuple[str, ...] | None]
Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]

IO = "_io"  # behind the name of a matrix stored [in, out]

# Logical axis -> mesh axes. A mesh axis that the mesh lacks, that an array
# already uses or that does not divide the dimension is left out.
DEFAULT_RULES: Rules = {
  "batch": ("data", "fsdp"),
  "vocab": "tensor",
  "heads": "tensor",
  "kv_heads": "tensor",
  "mlp": "tensor",
  "embed": "fsdp",
}


@dataclasses.dataclass(frozen=True)
class ArraySpec:
  """What one parameter array is.

  Attributes:
    shape: its sizes, in stored order.
    dtype: of the stored array.
    axes: a logical axis name, or None, for each dimension; "layers" marks
      the leading axis of a stacked array.
    init: "normal", "zeros" or "ones".
    scale: standard deviation of "normal".
    order: "oi" [out, in] or "io" [in, out] of a matrix, "" of what is none.
  """

  shape: tuple[int, ...]
  dtype: Any
  axes: tuple[str | None, ...]
  init: Literal["normal", "zeros", "ones"]
  scale: float = 0.0
  order: Literal["oi", "io", ""] = ""

  @property
  def stacked(self) -> bool:
    """Whether the leading axis counts layers."""
    return self.axes[:1] == ("layers",)


def _is_spec(node: Any) -> bool:
  return isinstance(node, ArraySpec)


def map_specs(f: Callable[..., Any], specs: Specs, *rest: Any) -> Any:
  """Returns the tree of f(spec, ...) over the specs' tree."""
  return jax.tree.map(f, specs, *rest, is_leaf=_is_spec)


def param_specs(
  cfg: ModelConfig,
  *,
  layout: Layout = "stacked",
  order: Order = "oi",
  dtype: Any = jnp.float32,
) -> Specs:
  """Returns the tree of ArraySpec of a model.

  Args:
    cfg: the model.
    layout: "stacked" or "layers".
    order: how each matrix is stored, [out, in] or [in, out]. The embedding is
      [V, D] in both.
    dtype: of every array.

  Returns:
    A dict shaped as the module's docstring says.
  """
  if layout not in ("stacked", "layers"):
    raise ValueError(f"layout {layout!r} must be 'stacked' or 'layers'")
  if order not in ("oi", "io"):
    raise ValueError(f"order {order!r} must be 'oi' or 'io'")
  dtype = jnp.dtype(dtype)
  D, V = cfg.hidden_size, cfg.vocab_size
  specs: Specs = {
    "embed": ArraySpec(
      (V, D), dtype, ("vocab", "embed"), "normal", cfg.init_std
    ),
    "final_norm": ArraySpec((D,), dtype, (None,), "ones"),
  }
  if not cfg.tie_embeddings:
    specs |= _matrix("head", V, D, "vocab", "embed", order, dtype, cfg.init_std)
  layer = _layer_specs(cfg, order, dtype)
  if layout == "layers":
    specs["layers"] = tuple(layer for _ in range(cfg.num_layers))
  else:
    specs["layers"] = map_specs(lambda s: _stack(s, cfg.num_layers), layer)
  return specs


def _stack(spec: ArraySpec, num_layers: int) -> ArraySpec:
  return dataclasses.replace(
    spec, shape=(num_layers, *spec.shape), axes=("layers", *spec.axes)
  )


def _matrix(
  name: str,
  out: int,
  inner: int,
  out_axis: str,
  in_axis: str,
  order: Order,
  dtype: Any,
  scale: float,
) -> Specs:
  shape, axes = (out, inner), (out_axis, in_axis)
  if order == "io":
    name, shape, axes = name + IO, shape[::-1], axes[::-1]
  return {name: ArraySpec(shape, dtype, axes, "normal", scale, order)}


def _layer_specs(cfg: ModelConfig, order: Order, dtype: Any) -> Specs:
  D, F, H = cfg.hidden_size, cfg.mlp_dim, cfg.head_dim
  heads, kv_heads = cfg.num_heads * H, cfg.num_kv_heads * H
  # GPT-2's depth scaling of what is added to the residual stream.
  std, out_std = cfg.init_std, cfg.init_std / math.sqrt(2 * cfg.num_layers)

  def norm(size: int) -> ArraySpec:
    return ArraySpec((size,), dtype, (None,), "ones")

  def linear(name, out, inner, out_axis, in_axis, bias, scale=std) -> Specs:
    specs = _matrix(name, out, inner, out_axis, in_axis, order, dtype, scale)
    if bias:
      specs[f"{name}_bias"] = ArraySpec((out,), dtype, (out_axis,), "zeros")
    return specs

  attn = {
    **linear("q", heads, D, "heads", "embed", cfg.qkv_bias),
    **linear("k", kv_heads, D, "kv_heads", "embed", cfg.qkv_bias),
    **linear("v", kv_heads, D, "kv_heads", "embed", cfg.qkv_bias),
    **linear("o", D, heads, "embed", "heads", cfg.o_bias, out_std),
  }
  if cfg.qk_norm:
    attn |= {"q_norm": norm(H), "k_norm": norm(H)}
  mlp = {
    **linear("gate", F, D, "mlp", "embed", cfg.mlp_bias),
    **linear("up", F, D, "mlp", "embed", cfg.mlp_bias),
    **linear("down", D, F, "embed", "mlp", cfg.mlp_bias, out_std),
  }
  return {"attn_norm": norm(D), "attn": attn, "mlp_norm": norm(D), "mlp": mlp}


def _key_name(path: tuple[Any, ...]) -> tuple[str, int | None]:
  """A leaf's name without layer or order, and its layer in a tuple."""
  layer = next((p.idx for p in path if hasattr(p, "idx")), None)
  names = [p.key for p in path if hasattr(p, "key")]
  return "/".join(names).removesuffix(IO), layer


def init_params(specs: Specs, key: jax.Array) -> Params:
  """Returns random parameters; the values depend on no layout and no order.

  Args:
    specs: from `param_specs`.
    key: a PRNG key, consumed.

  Returns:
    A tree of arrays; a layer's matrix is drawn from
    fold_in(fold_in(key, hash of its name), layer).
  """

  def draw(leaf_key: jax.Array, shape: tuple[int, ...], spec: ArraySpec):
    shape = shape[::-1] if spec.order == "io" else shape
    x = spec.scale * jax.random.normal(leaf_key, shape, jnp.float32)
    return (x.T if spec.order == "io" else x).astype(spec.dtype)

  def leaf(path: tuple[Any, ...], spec: ArraySpec) -> jax.Array:
    if spec.init != "normal":
      fill = {"zeros": 0, "ones": 1}[spec.init]
      return jnp.full(spec.shape, fill, spec.dtype)
    name, layer = _key_name(path)
    leaf_key = jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)
    if spec.stacked:
      keys = [jax.random.fold_in(leaf_key, i) for i in range(spec.shape[0])]
      return jnp.stack([draw(k, spec.shape[1:], spec) for k in keys])
    if layer is not None:
      leaf_key = jax.random.fold_in(leaf_key, layer)
    return draw(leaf_key, spec.shape, spec)

  return jax.tree_util.tree_map_with_path(leaf, specs, is_leaf=_is_spec)


def abstract_params(specs: Specs, shardings: Any = None) -> Params:
  """Returns the tree of jax.ShapeDtypeStruct, with shardings where given."""
  if shardings is None:
    return map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs)
  return map_specs(
    lambda s, sharding: jax.ShapeDtypeStruct(
      s.shape, s.dtype, sharding=sharding
    ),
    specs,
    shardings,
  )


def partition_spec(
  shape: tuple[int, ...],
  axes: tuple[str | None, ...],
  mesh: Mesh,
  rules: Rules = DEFAULT_RULES,
) -> PartitionSpec:
  """Returns which mesh axes split each dimension of an array.

  Args:
    shape: sizes of the array.
    axes: a logical axis, or None, for each dimension.
    mesh: the mesh.
    rules: logical axis -> mesh axis or axes; see DEFAULT_RULES.

  Returns:
    The partition; what does not divide evenly is replicated.
  """
  used: set[str] = set()
  parts = []
  for size, axis in zip(shape, axes, strict=True):
    wanted = rules.get(axis) if axis is not None else None
    wanted = (wanted,) if isinstance(wanted, str) else wanted or ()
    chosen: list[str] = []
    count = 1
    for name in wanted:
      ways = mesh.shape.get(name, 1)
      if ways > 1 and name not in used and size % (count * ways) == 0:
        chosen.append(name)
        count *= ways
    used.update(chosen)
    parts.append(tuple(chosen) if len(chosen) > 1 else (chosen or [None])[0])
  return PartitionSpec(*parts)


def param_shardings(
  specs: Specs, mesh: Mesh, rules: Rules = DEFAULT_RULES
) -> Any:
  """Returns the tree of NamedSharding of the parameters over a mesh."""
  return map_specs(
    lambda s: NamedSharding(mesh, partition_spec(s.shape, s.axes, mesh, rules)),
    specs,
  )


def activation_constraint(
  mesh: Mesh, rules: Rules = DEFAULT_RULES
) -> Constrain:
  """Returns constrain(x, axes): x with its sharding over the mesh stated.

  `transformer.forward` calls it on the residual stream and on what lies
  between two matrices, so that the partitioner gathers weights, not sums.
  """

  def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    spec = partition_spec(x.shape, axes, mesh, rules)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

  return constrain


def layout_of(params: Params) -> Layout:
  """Returns the layout of a tree of parameters or specs."""
  return "layers" if isinstance(params["layers"], tuple | list) else "stacked"


def num_layers(params: Params) -> int:
  """Returns how many layers a tree of parameters has."""
  if layout_of(params) == "layers":
    return len(params["layers"])
  return jax.tree.leaves(params["layers"])[0].shape[0]


def convert_layout(
  params: Params,
  cfg: ModelConfig,
  *,
  layout: Layout,
  order: Order | None = None,
) -> Params:
  """Returns the same parameters in another layout or stored order.

  Args:
    params: arrays, in any layout and order.
    cfg: the model.
    layout: of the result.
    order: of the result's matrices; None keeps each as it is.

  Returns:
    A tree as `param_specs(cfg, layout=layout, order=order)` describes it.
  """
  layers = params["layers"]
  have = layout_of(params)
  if have == "stacked" and layout == "layers":
    layers = tuple(
      jax.tree.map(lambda x, i=i: x[i], layers) for i in range(cfg.num_layers)
    )
  elif have == "layers" and layout == "stacked":
    layers = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
  out = {**params, "layers": layers}
  return out if order is None else _reorder(out, order)


# What a layer multiplies with the same input.
SIBLINGS = {"attn": ("q", "k", "v"), "mlp": ("gate", "up")}


def fuse(params: Params) -> Params:
  """Returns the parameters with sibling matrices as one: "q_k_v", "gate_up".

  Args:
    params: of layout "layers" and order "oi"; no dimension split over a mesh.

  Returns:
    The same tree, but for [q + k + v, in] in the place of three arrays.
  """

  def fused(block: Params, names: tuple[str, ...]) -> Params:
    block = dict(block)
    for end in ("", "_bias"):
      if names[0] + end in block:
        parts = [block.pop(name + end) for name in names]
        block["_".join(names) + end] = jnp.concatenate(parts)
    return block

  layers = tuple(
    layer | {k: fused(layer[k], names) for k, names in SIBLINGS.items()}
    for layer in params["layers"]
  )
  return {**params, "layers": layers}


def _reorder(tree: Any, order: Order) -> Any:
  if isinstance(tree, tuple | list):
    return tuple(_reorder(node, order) for node in tree)
  out: Params = {}
  for name, node in tree.items():
    if isinstance(node, Mapping | tuple | list):
      out[name] = _reorder(node, order)
    elif not is_matrix(name):
      out[name] = node
    else:
      flip = name.endswith(IO) != (order == "io")
      name = name.removesuffix(IO) + (IO if order == "io" else "")
      out[name] = jnp.swapaxes(node, -1, -2) if flip else node
  return out


def is_matrix(name: str) -> bool:
  """Whether a leaf of this name is a matrix that has a stored order."""
  return name.removesuffix(IO) in MATRICES


MATRICES = frozenset(("q", "k", "v", "o", "gate", "up", "down", "head"))
