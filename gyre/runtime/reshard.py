"""State to disk and onto any mesh: Orbax between two hash checks.

Orbax loads flipped bits silently and, given no sharding, reads the one saved
with the arrays. So `save` commits a manifest of content hashes with one
atomic rename, and `restore` verifies every file first and always gives
Orbax the target's shardings. Full state (a resume, a core on another mesh)
and weights only (an engine, a satellite) are the same call: any subtree of
what was saved may be asked for.
"""

from __future__ import annotations

import math
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from gyre.store import manifest

_ARRAYS = "arrays"


class CheckpointError(ValueError):
  """A checkpoint cannot be written or read; the message is one line."""


def named_leaves(tree: Any) -> dict[str, Any]:
  """Flattens a pytree to {"params.layers.wq": leaf}."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  out = {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf
    for path, leaf in leaves
  }
  if len(out) != len(leaves):
    raise CheckpointError("two leaves of the state have one name")
  return out


def _describe(leaf: Any) -> list[Any]:
  return [list(leaf.shape), str(leaf.dtype)]


def save(
  state: Any,
  directory: str | os.PathLike,
  meta: Mapping[str, Any] | None = None,
) -> manifest.Manifest:
  """Writes a pytree of arrays durably; nothing is visible before it is whole.

  Args:
    state: pytree of jax.Array on any mesh.
    directory: must not exist; its parent is created.
    meta: JSON content committed in the same manifest.

  Returns:
    The manifest.

  Raises:
    CheckpointError: it cannot be written (a full disk); what was committed
      before is untouched.
  """
  directory = pathlib.Path(directory).absolute()
  named = named_leaves(state)
  described = {k: _describe(v) for k, v in named.items()}
  tmp = None
  try:
    tmp = manifest.temporary(directory)
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(tmp / _ARRAYS, named)
    return manifest.commit(
      tmp, directory, {"arrays": described, "meta": dict(meta or {})}
    )
  except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
    if tmp is not None:
      shutil.rmtree(tmp, ignore_errors=True)
    line = " ".join(str(error).split())[:300]
    raise CheckpointError(f"cannot write {directory}: {line}") from error


def read_meta(directory: str | os.PathLike) -> Mapping[str, Any]:
  """Returns what was committed as meta, verifying the manifest alone.

  Raises:
    manifest.ManifestError: the manifest is missing or corrupt.
  """
  return manifest.read_manifest(directory).meta["meta"]


def _check_leaf(name: str, leaf: Any, saved: Mapping[str, Any]) -> None:
  if name not in saved:
    raise CheckpointError(f"the checkpoint holds no array {name}")
  if _describe(leaf) != saved[name]:
    raise CheckpointError(
      f"{name} is {saved[name]} in the checkpoint, asked for {_describe(leaf)}"
    )
  sharding = getattr(leaf, "sharding", None)
  if sharding is None:
    raise CheckpointError(f"{name} needs a sharding to be restored")
  if isinstance(sharding, jax.sharding.NamedSharding):
    check_divides(name, leaf.shape, sharding)


def check_divides(
  name: str, shape: tuple[int, ...], sharding: jax.sharding.NamedSharding
) -> None:
  """Refuses a sharding that splits an axis unevenly.

  Raises:
    CheckpointError: names the axis and the divisors that would do.
  """
  for i, axes in enumerate(sharding.spec):
    if axes is None:
      continue
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    ways = math.prod(sharding.mesh.shape[a] for a in axes)
    if shape[i] % ways:
      divisors = [d for d in range(1, shape[i] + 1) if shape[i] % d == 0]
      raise CheckpointError(
        f"{name}: axis {i} of size {shape[i]} does not divide over "
        f"{'*'.join(axes)} = {ways} devices; its divisors are "
        f"{', '.join(map(str, divisors[:16]))}"
      )


def restore(
  directory: str | os.PathLike, abstract: Any, *, verified: bool = False
) -> tuple[Any, Mapping[str, Any]]:
  """Reads a pytree, or any subtree of it, onto the shardings asked for.

  Args:
    directory: what `save` wrote, on any mesh.
    abstract: pytree of jax.ShapeDtypeStruct, each with its sharding; names
      of leaves are those saved (a dict {"params": ...} takes weights only).
    verified: the caller has just verified every file itself.

  Returns:
    The arrays and the meta.

  Raises:
    manifest.ManifestError: a file is corrupt, missing or extra; named.
    CheckpointError: other names, shapes or types were saved, or an axis does
      not divide.
  """
  directory = pathlib.Path(directory).absolute()
  read = manifest.read_manifest if verified else manifest.verify
  body = read(directory).meta
  named = named_leaves(abstract)
  for name, leaf in named.items():
    _check_leaf(name, leaf, body["arrays"])
  args = {
    name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype)
    for name, leaf in named.items()
  }
  with ocp.PyTreeCheckpointer() as checkpointer:
    got = checkpointer.restore(
      directory / _ARRAYS,
      args=ocp.args.PyTreeRestore(
        item=named, restore_args=args, partial_restore=True
      ),
    )
  treedef = jax.tree_util.tree_structure(abstract)
  leaves = [got[name] for name in named]
  return jax.tree_util.tree_unflatten(treedef, leaves), body["meta"]
