"""Of a cell's trainer and engine, one holds the devices' memory at a time."""

import gc
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_cells as toy

from gyre.rollout.engine import Request
from gyre.runtime import publish, reshard
from gyre.runtime.cell import CellError
from gyre.store import manifest
from gyre.types import Snapshot

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Of the cells under test; what other tests left there does not change.
DEVICES = (6, 7)


def _held():
  """Bytes of all live arrays on the devices."""
  gc.collect()
  buffers = {
    shard.data.unsafe_buffer_pointer(): shard.data.nbytes
    for x in jax.live_arrays()
    if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    for shard in x.addressable_shards
    if shard.device.id in DEVICES
  }
  return sum(buffers.values())


def _bytes(tree):
  return sum(
    shard.data.nbytes
    for x in jax.tree.leaves(tree)
    if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    for shard in x.addressable_shards
  )


async def _tokens(cell):
  done = await cell.engine.generate(
    Request(ids=[1, 2, 3], max_new_tokens=6, temperature=0.0, seed=1)
  )
  return done.ids.tolist(), done.versions.tolist()


# Counters, keys and the like.
SMALL = 512


def test_memory_goes_over_whole_and_comes_back(tmp_path):
  async def run():
    core = toy.core((1, 2, 1), 4)
    cell = toy.satellite("cell 1", (1, 1, 1), 6)
    empty = _held()
    weights = reshard.to_host(await core.weights())
    await cell.serve(weights, 0)
    serving = _held() - empty
    assert serving > 2 * 32 * 8 * 2 * 4  # the pages alone
    expected = await _tokens(cell)

    await core.join(None, 0)
    await cell.join(await core.weights(), 0)
    batch = toy.batches()[0]
    assert abs(_held() - empty - _bytes(cell.trainer_arrays())) <= SMALL
    await cell.work(batch)
    arrays = jax.tree.leaves(cell.trainer_arrays())
    assert abs(_held() - empty - _bytes(arrays)) <= SMALL
    weights_bytes = sum(x.nbytes for x in jax.tree.leaves(weights))
    assert _bytes(arrays) >= 2 * weights_bytes
    await cell.reset()

    arrays = jax.tree.leaves(cell.trainer_arrays())
    await cell.serve(weights, 0)
    assert arrays and all(x.is_deleted() for x in arrays)
    assert cell.trainer_arrays() == ()
    assert abs(_held() - empty - serving) <= SMALL
    assert await _tokens(cell) == expected
    await cell.close()
    assert abs(_held() - empty) <= SMALL

  toy.run(run())


def test_the_core_keeps_its_state_on_the_host_while_it_serves(tmp_path):
  async def run():
    core = toy.core((1, 2, 1), 6)
    empty = _held() - _bytes(core.trainer.state)
    await core.join(None, 0)
    await core.apply([await core.sums()], 1)
    state = core.trainer.state
    before = reshard.to_host(state)
    await core.serve(None, 1)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert core.engine.stats().version == 1
    assert set((await _tokens(core))[1]) == {1}
    jax.tree.map(
      np.testing.assert_array_equal, await core.weights(), before.params
    )
    # What is asked for meanwhile is of the same state.
    await core.save(tmp_path / "served", {"step": 1})
    await core.resize([6])
    await core.join(None, 1)
    after = reshard.to_host(core.trainer.state)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(
      np.testing.assert_array_equal, after.opt_state, before.opt_state
    )
    np.testing.assert_array_equal(after.key.data, before.key.data)
    assert abs(_held() - empty - _bytes(core.trainer.state)) <= SMALL
    assert await core.restore(tmp_path / "served") == {"step": 1}
    restored = reshard.to_host(core.trainer.state)
    jax.tree.map(np.testing.assert_array_equal, restored.params, before.params)
    await core.close()

  toy.run(run())


def test_an_engine_is_on_the_devices_that_the_core_has():
  async def run():
    core = toy.core((1, 2, 1), 6)
    await core.join(None, 0)
    got = []
    for devices in ([6, 7], [6], [7], [6, 7]):
      await core.resize(devices)
      await core.serve(None, 0)
      got.append(await _tokens(core))
      assert core.engine.stats().total_pages == 32 * len(devices)
      await core.join(None, 0)
      assert core.engine.stats().asleep
    assert got == got[:1] * 4
    # What stays as it was is kept, and sleeps.
    kept = core.engine
    await core.resize([6, 7])
    assert core.engine is kept
    await core.close()

  toy.run(run())


def test_a_join_that_fails_leaves_the_engine_serving(tmp_path):
  async def run():
    core = toy.core((1, 2, 1), 4)
    weights = reshard.to_host(await core.weights())
    cell = toy.satellite("cell 1", (1, 1, 1), 6)
    await cell.serve(weights, 0)
    expected = await _tokens(cell)
    snapshot = await core.snapshot(tmp_path / "s")
    other = {k: v for k, v in weights.items() if k != "embed"}
    broken = Snapshot(0, str(tmp_path / "gone"))
    wrong = {**weights, "embed": np.zeros((30, 16), np.float32)}
    for given, error in (
      (broken, manifest.ManifestError),
      (other, (ValueError, CellError)),
      (wrong, (ValueError, CellError)),
    ):
      with pytest.raises(error):
        await cell.join(given, 0)
      assert cell.role == "rollout"
      assert await _tokens(cell) == expected
    # Of what it was given since, too; but not of what only its engine was.
    await cell.publish(weights, 1)
    with pytest.raises(CellError, match="embed"):
      await cell.join(other, 0)
    assert await _tokens(cell) == (expected[0], [1] * 6)
    await publish.publish(cell.engine, weights, 2)
    with pytest.raises(CellError, match="embed"):
      await cell.join(other, 0)
    assert cell.role == "idle" and cell.engine.stats().asleep
    await cell.join(snapshot, 0)
    assert cell.role == "train"
    await cell.close()

  toy.run(run())


def _bytes_read():
  """By this process, ever."""
  rows = pathlib.Path("/proc/self/io").read_text().split("\n")
  return int(dict(r.split(": ") for r in rows if r)["rchar"])


def test_a_checkpoint_is_hashed_once_and_refused_when_damaged_since(tmp_path):
  async def run():
    core = toy.core((1, 2, 1), 4)
    cell = toy.satellite("cell 1", (1, 1, 1), 6)
    held = {"params": await core.weights(), "version": jnp.asarray(0)}
    noise = np.random.default_rng(0).random(2 << 20, np.float32)
    reshard.save(held | {"moments": jnp.asarray(noise)}, tmp_path / "full")
    path = str(tmp_path / "full")
    before = _bytes_read()
    await cell.serve(Snapshot(0, path), 0)
    assert _bytes_read() - before > 7 << 20
    before = _bytes_read()
    given = Snapshot(0, path, verified=manifest.checked(path))
    other = toy.satellite("cell 2", (1, 1, 1), 7)
    for one in (cell, other):
      await one.serve(given, 0)
      await one.join(given, 0)
      await one.serve(given, 0)
      await one.publish(given, 0)
    assert 7 << 20 < _bytes_read() - before < 12 << 20
    expected = await _tokens(cell)
    largest = max(
      (tmp_path / "full").rglob("*"), key=lambda p: p.stat().st_size
    )
    at = largest.stat()
    with open(largest, "r+b") as f:
      f.seek(1 << 20)
      (byte,) = f.read(1)
      f.seek(1 << 20)
      f.write(bytes([byte ^ 16]))
    os.utime(largest, ns=(at.st_atime_ns, at.st_mtime_ns))
    for ask in (cell.publish, cell.join):
      with pytest.raises(manifest.ManifestError, match=largest.name):
        await ask(given, 0)
      assert await _tokens(cell) == expected
    with pytest.raises(manifest.ManifestError, match=largest.name):
      await cell.serve(given, 0)
    assert cell.role == "idle"
    for one in (cell, other):
      await one.close()

  toy.run(run())
