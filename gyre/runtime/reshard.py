"""State to disk and onto any mesh: Orbax between two hash checks.

Orbax loads flipped bits silently and, given no sharding, reads the one saved
with the arrays. So `save` commits a manifest of content hashes with one
atomic rename, and `restore` verifies every file first and always gives
Orbax the target's shardings. Full state (a resume, a core on another mesh)
and weights only (an engine, a satellite) are the same call: any subtree of
what was saved may be asked for.

An axis that does not divide over a mesh is refused, with its divisors named:
padded parameters would have the shapes of the mesh they came from, and no
longer the bits. Rows of a micro-step, which hold nothing when they are empty,
are padded instead (cell_worker.pad_rows).
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from gyre import config
from gyre.learner import state as state_lib
from gyre.models import params as params_lib
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
    _check_leaf(name, leaf, body.get("arrays", {}))
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


def put(tree: Any, shardings: Any) -> Any:
  """Copies a pytree onto other devices of this process.

  Args:
    tree: arrays, on any mesh or of the host.
    shardings: of the copies, one a leaf.

  Returns:
    Copies, ready; none shares memory with what it was made of.

  Raises:
    CheckpointError: an axis does not divide.
  """
  named, where = named_leaves(tree), jax.tree.leaves(shardings)
  for (name, leaf), sharding in zip(named.items(), where, strict=True):
    if isinstance(sharding, jax.sharding.NamedSharding):
      check_divides(name, leaf.shape, sharding)
  copies = [_copy(x, s) for x, s in zip(named.values(), where, strict=True)]
  return jax.tree.unflatten(
    jax.tree.structure(tree), jax.block_until_ready(copies)
  )


def _copy(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  """A copy that shares nothing.

  device_put reuses what already lies on a device of both meshes, whatever
  may_alias says; freeing or donating one would then free the other.
  """
  if not isinstance(leaf, jax.Array):
    return jax.device_put(np.array(leaf), sharding)
  if _is_key(leaf):
    data = np.array(jax.random.key_data(leaf))
    fresh = jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jax.device_put(fresh, sharding)
  copy = jax.device_put(leaf, sharding)
  before = leaf.sharding.device_set
  if before.isdisjoint(sharding.device_set):
    return copy
  shards = [
    jax.device_put(s.data, s.device, may_alias=False)
    if s.device in before
    else s.data
    for s in copy.addressable_shards
  ]
  return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def through(directory: str | os.PathLike, tree: Any, target: Any) -> Any:
  """Moves a pytree to another mesh through a checkpoint, verified.

  The devices never hold both: the arrays are freed once they are committed.

  Args:
    directory: of the checkpoint; must not exist, removed at the end.
    tree: arrays; deleted.
    target: as `abstract` of `restore`.

  Returns:
    The arrays on their new shardings.

  Raises:
    CheckpointError, manifest.ManifestError: nothing could be written, and the
      arrays are untouched; or it cannot be read, and the directory is kept.
  """
  named, saved = named_leaves(target), named_leaves(tree)
  described = {name: _describe(leaf) for name, leaf in saved.items()}
  for name, leaf in named.items():
    _check_leaf(name, leaf, described)
  save(tree, directory)
  manifest.verify(directory)
  for leaf in saved.values():
    leaf.delete()
  moved, _ = restore(directory, target, verified=True)
  manifest.remove(pathlib.Path(directory))
  return jax.block_until_ready(moved)


def to_host(tree: Any) -> Any:
  """Copies a pytree to host memory; typed keys become their data and name."""

  def one(leaf):
    if not _is_key(leaf):
      return np.array(leaf)
    data = np.array(jax.random.key_data(leaf))
    return _HostKey(data, str(jax.random.key_impl(leaf)))

  return jax.tree.map(one, tree)


def from_host(tree: Any, shardings: Any) -> Any:
  """Takes what `to_host` made back to devices, bit for bit."""

  def one(leaf):
    if not isinstance(leaf, _HostKey):
      return leaf
    return jax.random.wrap_key_data(leaf.data, impl=leaf.impl)

  whole = jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, _HostKey))
  return put(whole, shardings)


def free(*trees: Any) -> None:
  """Frees the arrays' memory now, whoever still holds a reference."""
  for leaf in jax.tree.leaves(trees):
    if isinstance(leaf, jax.Array) and not leaf.is_deleted():
      leaf.delete()


@dataclasses.dataclass(frozen=True, eq=False)
class _HostKey:
  """A PRNG key in host memory."""

  data: np.ndarray
  impl: str


def resized(
  mesh: jax.sharding.Mesh,
  devices: Sequence[int],
  sizes: config.Mesh | None = None,
) -> jax.sharding.Mesh:
  """Returns the mesh that a mesh becomes on other devices.

  Args:
    mesh: of axes data, fsdp, tensor.
    devices: indices among the devices of the process.
    sizes: of the axes; None: data and tensor stay, fsdp follows.

  Raises:
    CheckpointError: the sizes do not fit the devices; says which would.
  """
  have = jax.devices()
  if len(set(devices)) != len(devices) or not devices:
    raise CheckpointError(f"devices {list(devices)} must be some, each once")
  if not all(0 <= i < len(have) for i in devices):
    raise CheckpointError(
      f"devices {list(devices)} are not all among 0 .. {len(have) - 1}"
    )
  n = len(devices)
  if sizes is None:
    fixed = mesh.shape["data"] * mesh.shape["tensor"]
    if n % fixed:
      raise CheckpointError(
        f"{n} devices do not divide by data * tensor = {fixed}; its multiples "
        "do, or name the sizes"
      )
    sizes = config.Mesh(mesh.shape["data"], n // fixed, mesh.shape["tensor"])
  need = sizes.size
  if need != n:
    raise CheckpointError(f"{sizes} takes {need} devices, not {n}")
  return state_lib.make_mesh(sizes, [have[i] for i in devices])


def check_splits(
  specs: params_lib.Specs, old: jax.sharding.Mesh, new: jax.sharding.Mesh
) -> None:
  """Refuses a mesh over which what was split would be whole on each device.

  Placement by rule leaves whole what does not divide, which is right for a
  few small arrays and wrong for what a mesh was chosen to split: a core of 8
  devices on 3 would hold everything three times.

  Raises:
    CheckpointError: names the array, the axis and its divisors.
  """
  named = named_leaves(params_lib.abstract_params(specs))
  before = jax.tree.leaves(params_lib.param_shardings(specs, old))
  after = jax.tree.leaves(params_lib.param_shardings(specs, new))
  for (name, leaf), a, b in zip(named.items(), before, after, strict=True):
    for axis in ("fsdp", "tensor"):
      i = _axis_of(a.spec, axis)
      ways = new.shape[axis]
      if i is None or ways == 1 or _axis_of(b.spec, axis) is not None:
        continue
      split = jax.sharding.PartitionSpec(*(None,) * i, axis)
      check_divides(name, leaf.shape, jax.sharding.NamedSharding(new, split))


def _axis_of(spec: jax.sharding.PartitionSpec, axis: str) -> int | None:
  """Which dimension a mesh axis splits."""
  for i, names in enumerate(spec):
    if axis in ((names,) if isinstance(names, str) else names or ()):
      return i
  return None
