"""What lay on one mesh comes back bit for bit on any other."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gyre.runtime import reshard
from gyre.store import manifest


def _mesh(n):
  shape = {8: (2, 2, 2), 4: (1, 4, 1), 2: (1, 1, 2), 1: (1, 1, 1)}[n]
  devices = np.array(jax.devices()[:n]).reshape(shape)
  return Mesh(devices, ("data", "fsdp", "tensor"))


_SPECS = {"w": ("fsdp", "tensor"), "v": (None, ("data", "fsdp")), "b": ()}


def _values(seed=0):
  rng = np.random.default_rng(seed)
  return {
    "w": rng.normal(size=(8, 16)).astype(np.float32),
    "v": rng.normal(size=(3, 8)).astype(jnp.bfloat16),
    "b": rng.integers(0, 9, (5,)).astype(np.int32),
  }


def _state(mesh):
  def put(params):
    return {
      k: jax.device_put(v, NamedSharding(mesh, PartitionSpec(*_SPECS[k])))
      for k, v in params.items()
    }

  optimizer = optax.adam(0.1)
  params = put(_values())
  opt_state = optimizer.init(params)
  key = jax.device_put(jax.random.key(7), NamedSharding(mesh, PartitionSpec()))
  moments = opt_state[0]._replace(mu=put(_values(1)), nu=put(_values(2)))
  count = jax.device_put(jnp.int32(41), NamedSharding(mesh, PartitionSpec()))
  moments = moments._replace(count=count)
  return {"params": params, "opt_state": (moments, opt_state[1]), "key": key}


def _abstract(mesh):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    _state(mesh),
  )


def _bits(tree):
  out = {}
  for name, x in reshard.named_leaves(tree).items():
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    out[name] = (str(x.dtype), np.asarray(x).tobytes())
  return out


def test_8_4_2_1_8_is_bit_equal(tmp_path):
  state = _state(_mesh(8))
  first = _bits(state)
  for i, n in enumerate((4, 2, 1, 8)):
    reshard.save(state, tmp_path / f"{i}", {"step": i, "groups": ["a"]})
    abstract = _abstract(_mesh(n))
    state, meta = reshard.restore(tmp_path / f"{i}", abstract)
    assert meta == {"step": i, "groups": ["a"]}
    assert _bits(state) == first
    for got, asked in zip(
      jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True
    ):
      assert got.sharding == asked.sharding
    assert jax.tree.structure(state) == jax.tree.structure(abstract)


def test_weights_only_is_the_same_call(tmp_path):
  reshard.save(_state(_mesh(8)), tmp_path / "s")
  abstract = {"params": _abstract(_mesh(2))["params"]}
  got, _ = reshard.restore(tmp_path / "s", abstract)
  assert _bits(got) == _bits({"params": _state(_mesh(1))["params"]})


def test_axes_that_do_not_divide(tmp_path):
  x = {"w": jnp.arange(6.0)}
  reshard.save(x, tmp_path / "s")
  sharding = NamedSharding(_mesh(4), PartitionSpec("fsdp"))
  with pytest.raises(
    reshard.CheckpointError,
    match=r"w: axis 0 of size 6 .* fsdp = 4 .* 1, 2, 3, 6",
  ):
    abstract = {"w": jax.ShapeDtypeStruct((6,), jnp.float32)}
    abstract["w"] = abstract["w"].update(sharding=sharding)
    reshard.restore(tmp_path / "s", abstract)
  with pytest.raises(reshard.CheckpointError, match="needs a sharding"):
    reshard.restore(
      tmp_path / "s", {"w": jax.ShapeDtypeStruct((6,), jnp.float32)}
    )


def test_other_shapes_types_and_names(tmp_path):
  mesh = _mesh(1)
  reshard.save(_state(mesh), tmp_path / "s")
  for change, message in [
    ({"shape": (8, 15)}, r"params\.w is \[\[8, 16\], 'float32'\]"),
    ({"dtype": jnp.bfloat16}, r"params\.w is .*bfloat16"),
  ]:
    abstract = _abstract(mesh)
    w = abstract["params"]["w"]
    shape = change.get("shape", w.shape)
    dtype = change.get("dtype", w.dtype)
    abstract["params"]["w"] = jax.ShapeDtypeStruct(
      shape, dtype, sharding=w.sharding
    )
    with pytest.raises(reshard.CheckpointError, match=message):
      reshard.restore(tmp_path / "s", abstract)
  abstract = {"extra": _abstract(mesh)["key"]}
  with pytest.raises(reshard.CheckpointError, match="no array extra"):
    reshard.restore(tmp_path / "s", abstract)


def test_a_flipped_bit_in_every_file_is_refused(tmp_path):
  mesh = _mesh(2)
  directory = tmp_path / "s"
  reshard.save(_state(mesh), directory, {"step": 1})
  files = sorted(p for p in directory.rglob("*") if p.is_file())
  assert len(files) > 5
  rng = random.Random(0)
  for path in files:
    good = path.read_bytes()
    for _ in range(4 if good else 0):
      bit = rng.randrange(8 * len(good))
      bad = bytearray(good)
      bad[bit // 8] ^= 1 << bit % 8
      path.write_bytes(bad)
      with pytest.raises(manifest.ManifestError, match=path.name):
        reshard.restore(directory, _abstract(mesh))
    path.write_bytes(good)
    for change in (good[:-1] if good else b"x", good + b"\0"):
      path.write_bytes(change)
      with pytest.raises(manifest.ManifestError, match=path.name):
        reshard.restore(directory, _abstract(mesh))
    path.unlink()
    with pytest.raises(manifest.ManifestError, match=path.name):
      reshard.restore(directory, _abstract(mesh))
    path.write_bytes(good)
  (directory / "added").write_bytes(b"x")
  with pytest.raises(manifest.ManifestError, match="added"):
    reshard.restore(directory, _abstract(mesh))
  (directory / "added").unlink()
  state, _ = reshard.restore(directory, _abstract(mesh))
  assert _bits(state) == _bits(_state(mesh))


@pytest.mark.parametrize("spec", [(), ("fsdp",), ("tensor",), (("data",),)])
@pytest.mark.parametrize("sizes", [(8, 4), (4, 8), (8, 8), (4, 4), (1, 1)])
def test_copies_share_no_memory(spec, sizes):
  source, target = (
    NamedSharding(_mesh(n), PartitionSpec(*spec)) for n in sizes
  )
  values = np.arange(16, dtype=np.float32)
  key = jax.random.key(3)
  whole = NamedSharding(_mesh(sizes[0]), PartitionSpec())
  tree = {
    "x": jax.device_put(values, source),
    "key": jax.device_put(key, whole),
  }
  where = {"x": target, "key": NamedSharding(_mesh(sizes[1]), PartitionSpec())}
  copies = reshard.put(tree, where)
  for name, leaf in tree.items():
    assert copies[name].sharding == where[name]
    leaf.delete()
  np.testing.assert_array_equal(copies["x"], values)
  assert jax.random.key_data(copies["key"]).tolist() == [0, 3]


def test_a_copy_of_host_memory_is_a_copy():
  values = np.arange(1024, dtype=np.float32)
  copy = reshard.put(
    {"x": values}, {"x": NamedSharding(_mesh(1), PartitionSpec())}
  )
  values[:] = -1
  np.testing.assert_array_equal(copy["x"], np.arange(1024))


def test_the_host_keeps_every_bit():
  state = _state(_mesh(4))
  first = _bits(state)
  host = reshard.to_host(state)
  assert not [x for x in jax.tree.leaves(host) if isinstance(x, jax.Array)]
  shardings = jax.tree.map(lambda x: x.sharding, _abstract(_mesh(2)))
  back = reshard.from_host(host, shardings)
  assert _bits(back) == first


def test_nothing_is_visible_when_writing_fails(tmp_path):
  parent = tmp_path / "file"
  parent.write_text("a file where a directory should be")
  with pytest.raises(reshard.CheckpointError, match="cannot write"):
    reshard.save({"w": jnp.arange(3)}, parent / "s")
  reshard.save({"w": jnp.arange(3)}, tmp_path / "s")
  with pytest.raises(reshard.CheckpointError, match="never replaces"):
    reshard.save({"w": jnp.arange(3)}, tmp_path / "s")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "s"]
