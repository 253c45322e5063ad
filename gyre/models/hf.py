"""Hugging Face names and layouts <-> the parameter tree; arrays in and out.

Each leaf of the tree has one Hugging Face name; a stacked leaf is the stack
of its layers' tensors, a matrix stored [in, out] the transpose of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from gyre.models import params as params_lib
from gyre.models.config import ModelConfig

_TOP = {
  "embed": "model.embed_tokens.weight",
  "final_norm": "model.norm.weight",
  "head": "lm_head.weight",
}
_LAYER = {
  "attn_norm": "input_layernorm.weight",
  "mlp_norm": "post_attention_layernorm.weight",
  "attn/q_norm": "self_attn.q_norm.weight",
  "attn/k_norm": "self_attn.k_norm.weight",
  **{
    f"{group}/{name}{ours}": f"{theirs_group}.{name}_proj.{theirs}"
    for group, theirs_group, names in (
      ("attn", "self_attn", ("q", "k", "v", "o")),
      ("mlp", "mlp", ("gate", "up", "down")),
    )
    for name in names
    for ours, theirs in (("", "weight"), ("_bias", "bias"))
  },
}


def _walk(tree: Any, cfg: ModelConfig) -> Iterator[tuple[Any, list[str], bool]]:
  """Yields (path, names of its tensors, whether transposed) of each leaf.

  A stacked leaf has one name a layer, every other leaf one.
  """
  stacked = params_lib.layout_of(tree) == "stacked"
  leaves = jax.tree_util.tree_leaves_with_path(
    tree, is_leaf=lambda node: isinstance(node, params_lib.ArraySpec)
  )
  for path, _ in leaves:
    keys = [p.key for p in path if hasattr(p, "key")]
    transposed = keys[-1].endswith(params_lib.IO)
    name = "/".join(keys).removesuffix(params_lib.IO)
    if keys[0] != "layers":
      yield path, [_TOP[name]], transposed
      continue
    name = _LAYER[name.removeprefix("layers/")]
    layers = range(cfg.num_layers) if stacked else [path[1].idx]
    yield path, [f"model.layers.{i}.{name}" for i in layers], transposed


def tensor_names(specs: params_lib.Specs, cfg: ModelConfig) -> list[str]:
  """Returns the names of all tensors of a model's checkpoint."""
  return [name for _, names, _ in _walk(specs, cfg) for name in names]


def from_hf(
  arrays: Mapping[str, np.ndarray], cfg: ModelConfig, specs: params_lib.Specs
) -> params_lib.Params:
  """Builds the parameter tree from a checkpoint's tensors.

  Args:
    arrays: Hugging Face name -> array; may be lazy, each is read once.
    cfg: the model.
    specs: from `params.param_specs`: layout, order and dtype of the result.

  Returns:
    A tree of numpy arrays shaped as specs.

  Raises:
    ValueError: a tensor is missing, has another shape, or is not used.
  """
  wanted = list(_walk(specs, cfg))
  names = {name for _, group, _ in wanted for name in group}
  missing = sorted(names - set(arrays))
  if missing:
    raise ValueError(f"{len(missing)} tensors are missing: {missing[0]} …")
  unused = sorted(n for n in set(arrays) - names if not _ignorable(n, cfg))
  if unused:
    raise ValueError(f"{len(unused)} tensors have no place: {unused[0]} …")
  leaves = []
  flat, structure = jax.tree.flatten(
    specs, is_leaf=lambda node: isinstance(node, params_lib.ArraySpec)
  )
  for spec, (_, group, transposed) in zip(flat, wanted, strict=True):
    out = np.empty(spec.shape, spec.dtype)
    rows = out if spec.stacked else out[None]
    for row, name in zip(rows, group, strict=True):
      array = np.asarray(arrays[name])
      array = array.T if transposed else array
      if array.shape != row.shape:
        raise ValueError(
          f"{name} has shape {array.shape}, the configuration {row.shape}"
          + (" (both transposed)" if transposed else "")
        )
      row[...] = array
    leaves.append(out)
  return jax.tree.unflatten(structure, leaves)


def _ignorable(name: str, cfg: ModelConfig) -> bool:
  """A tied head's copy, and rope's frequencies that old versions saved."""
  tied_head = cfg.tie_embeddings and name == _TOP["head"]
  return tied_head or name.endswith("rotary_emb.inv_freq")


def to_hf(params: params_lib.Params, cfg: ModelConfig) -> dict[str, np.ndarray]:
  """Returns a checkpoint's tensors, contiguous on the host.

  Args:
    params: arrays, in any layout and order.
    cfg: the model.

  Returns:
    Hugging Face name -> array in the dtype it has.
  """
  out = {}
  leaves = jax.tree.leaves(params)
  stacked = params_lib.layout_of(params) == "stacked"
  for leaf, (path, names, transposed) in zip(
    leaves, _walk(params, cfg), strict=True
  ):
    array = np.asarray(leaf)
    rows = array if stacked and path[0].key == "layers" else array[None]
    if len(rows) != len(names):
      raise ValueError(
        f"{names[0]}: {len(rows)} layers, the configuration has {len(names)}"
      )
    for name, row in zip(names, rows, strict=True):
      out[name] = np.ascontiguousarray(row.T if transposed else row)
  return out
