"""A core goes on on fewer devices and takes them back; nothing else changes."""

import jax
import numpy as np
import pytest
import toy_cells as toy

from gyre import config
from gyre.runtime import reshard
from gyre.runtime.cell import CellError
from gyre.runtime.reshard import CheckpointError
from gyre.store import manifest
from gyre.types import Snapshot

EIGHT, FOUR = tuple(range(8)), tuple(range(4))
SIZES = (2, 2, 2)
TOLERANCE = 1e-5


pytestmark = pytest.mark.usefixtures("quick_compilation")


def _bits(tree):
  return {
    name: np.asarray(
      jax.random.key_data(x)
      if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
    ).tobytes()
    for name, x in reshard.named_leaves(tree).items()
  }


async def _updates(core, resize=None, steps=4):
  """Gradients by update; `resize(core, step, when)` is awaited at each."""
  out = []
  for u in range(steps):
    await core.join(None, u)
    batches = toy.batches(u, rows=8)
    for i, batch in enumerate(batches):
      if resize is not None:
        await resize(core, u, i)
      await core.work(batch)
    row = await core.apply([await core.sums()], u + 1)
    out.append((toy.gradient(core), row))
  return out


@pytest.fixture(scope="module")
def fixed():
  """Gradients of a run on one mesh of eight."""
  return toy.run(_updates(toy.core(SIZES)))


@pytest.mark.parametrize("way", ["device_put", "orbax"])
def test_8_4_8_in_the_middle_of_a_run(way, fixed, tmp_path):
  used = []

  async def resize(core, step, index):
    """To 4 before update 2, in the middle of it back, and so again."""
    want = {(1, 0): FOUR, (2, 1): EIGHT, (3, 1): FOUR}.get((step, index))
    if want is None:
      return
    directory = tmp_path / f"{step}" if way == "orbax" else None
    await core.resize(want, directory=directory)
    leaf = jax.tree.leaves(await core.weights())[0]
    used.append(sorted(d.id for d in leaf.sharding.device_set))

  got = toy.run(_updates(toy.core(SIZES), resize))
  assert used == [list(FOUR), list(EIGHT), list(FOUR)]
  assert list(tmp_path.iterdir()) == []
  for (gradient, row), (expected, expected_row) in zip(got, fixed, strict=True):
    assert toy.distance(gradient, expected) <= TOLERANCE
    assert row["optim/grad_norm"] == pytest.approx(
      expected_row["optim/grad_norm"], rel=1e-5
    )


@pytest.mark.parametrize("way", ["device_put", "orbax"])
def test_every_bit_comes_along(way, tmp_path):
  """8 -> 4 -> 2 -> 1 -> 8 and other splits: parameters, moments, key, sums."""

  async def run():
    core = toy.core(SIZES)
    await core.join(None, 0)
    await core.work(toy.batches(rows=8)[0])
    await core.apply([await core.sums()], 1)
    await core.join(None, 1)
    await core.work(toy.batches(1, rows=8)[0])
    first = _bits(core.trainer.state)
    for n, sizes in (
      (4, (1, 2, 2)),
      (2, (2, 1, 1)),
      (1, (1, 1, 1)),
      (8, (1, 8, 1)),
      (8, (2, 2, 2)),
    ):
      directory = tmp_path / f"{n}{sizes[0]}" if way == "orbax" else None
      old = jax.tree.leaves(core.trainer.state)
      await core.resize(range(n), config.Mesh(*sizes), directory=directory)
      assert all(x.is_deleted() for x in old)
      assert _bits(core.trainer.state) == first
      for leaf, like in zip(
        jax.tree.leaves(core.trainer.state),
        jax.tree.leaves(core.trainer.abstract()),
        strict=True,
      ):
        assert leaf.sharding == like.sharding
    sums = await core.sums()
    fixed = toy.core(SIZES)
    await fixed.join(None, 0)
    await fixed.work(toy.batches(rows=8)[0])
    await fixed.apply([await fixed.sums()], 1)
    await fixed.join(None, 1)
    await fixed.work(toy.batches(1, rows=8)[0])
    assert _bits(sums) == _bits(await fixed.sums())

  toy.run(run())


def test_devices_that_do_not_divide_are_refused():
  async def run():
    core = toy.core((1, 8, 1))
    before = _bits(core.trainer.state)
    with pytest.raises(
      CheckpointError,
      match=r"embed: axis 1 of size 16 .* fsdp = 3 .* 1, 2, 4, 8, 16",
    ):
      await core.resize(range(3))
    with pytest.raises(CheckpointError, match="takes 4 devices, not 2"):
      await core.resize(range(2), config.Mesh(fsdp=4))
    with pytest.raises(CheckpointError, match=r"not all among 0 \.\. 7"):
      await core.resize([0, 8])
    with pytest.raises(CheckpointError, match="each once"):
      await core.resize([1, 1])
    assert _bits(core.trainer.state) == before
    two = toy.core((1, 1, 2))
    with pytest.raises(CheckpointError, match=r"3 devices .* tensor = 2"):
      await two.resize(range(3))

  toy.run(run())


def test_a_resize_that_fails_leaves_the_core_where_it_was(tmp_path):
  (tmp_path / "file").write_text("a file where a directory should be")

  async def run():
    core = toy.core((1, 2, 1))
    await core.join(None, 0)
    before = _bits(core.trainer.state)
    with pytest.raises(CheckpointError, match="cannot write"):
      await core.resize([0], directory=tmp_path / "file" / "s")
    assert _bits(core.trainer.state) == before
    assert core.trainer.mesh.size == 2
    assert core.role == "train"

  toy.run(run())


def test_a_satellite_joins_from_the_cores_checkpoint(tmp_path):
  async def run():
    core = toy.core((1, 2, 1))
    await core.join(None, 0)
    await core.apply([], 4)
    await core.save(tmp_path / "full", {"step": 4})
    weights = await core.snapshot(tmp_path / "weights")
    assert weights.version == 4
    bits = _bits(await core.weights())
    cell = toy.satellite("cell 3", (1, 1, 1), 6)
    full = Snapshot(4, str(tmp_path / "full"))
    for snapshot in (full, weights):
      await cell.join(snapshot, 4)
      assert _bits(cell.trainer_arrays()[0]) == bits
      await cell.work(toy.batches()[0])
      got = await cell.sums()
      await cell.join(await core.weights(), 4)
      await cell.work(toy.batches()[0])
      assert _bits(await cell.sums()) == _bits(got)
    with pytest.raises(CellError, match="holds version 4, not 5"):
      await cell.join(full, 5)
    with pytest.raises(CellError, match="full holds version 4, not 3"):
      await cell.join(Snapshot(3, full.path), 3)
    (path,) = [
      p for p in (tmp_path / "full").rglob("*") if p.name == "_METADATA"
    ]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(manifest.ManifestError, match="_METADATA"):
      await cell.join(full, 4)

  toy.run(run())
