"""Emulated cells: switches and micro-steps take the profile's time."""

import asyncio
import dataclasses

import numpy as np
import pytest
import virtual_time

from gyre.learner import packing
from gyre.rollout import engine
from gyre.rollout.profile import Profile
from gyre.runtime import emulated_cell
from gyre.runtime.cell import CellError
from gyre.store import manifest

PROFILE = Profile(
  nodes=4,
  slots=8,
  speedup=1,
  f=1,
  token_s=1,
  stream_s=1,
  update_s=320,
  alpha=0.5,
  join_s=8.52,
  serve_s=3.46,
)


def cell(kind=emulated_cell.EmulatedCell, **changes):
  profile = dataclasses.replace(PROFILE, **changes)
  return kind("cell 1", profile, executions=16)


def now():
  return asyncio.get_running_loop().time()


def test_switches_take_their_time():
  async def main():
    one = cell()
    await one.serve(None, 2)
    assert now() == pytest.approx(3.46)
    assert (one.role, one.engine.stats().version) == ("rollout", 2)
    await one.join(None, 2)
    assert now() == pytest.approx(3.46 + 8.52)
    assert (one.role, one.engine.stats().asleep) == ("train", True)
    await one.join(None, 3)  # later weights: no switch
    assert now() == pytest.approx(3.46 + 8.52)
    await one.serve(None, 3)
    assert now() == pytest.approx(2 * 3.46 + 8.52)
    got = await one.engine.generate(engine.Request([1], 2))
    np.testing.assert_array_equal(got.versions, [3, 3])

  virtual_time.run(main())


@pytest.mark.parametrize(
  "changes,seconds",
  [
    ({}, 320 / 2 / 8),  # 4 nodes: W / 4^0.5, an eighth of it
    ({"alpha": 1.0}, 320 / 4 / 8),
    # 4 of 16 nodes do a quarter of W / 16^0.5 in the time that all take.
    ({"alpha_nodes": 16.0}, 320 / 4 * 4 / 8),
  ],
)
def test_a_micro_step_takes_its_share_of_an_update(changes, seconds):
  batch = packing.empty_batch(2, 8, 4)
  batch.execution_first[0, :2] = True  # 2 of 16 executions

  async def main():
    one = cell(**changes)
    await one.join(None, 0)
    before = now()
    # Asked for at the same time, they are done one after the other.
    await asyncio.gather(one.work(batch), one.work(0.125))
    assert now() - before == pytest.approx(2 * seconds)
    sums = await one.sums()
    assert sums["counts.share"] == 0.25
    assert sums["counts.micro_steps"] == 2
    assert await one.sums() == {}

  virtual_time.run(main())


def test_the_way_between_processes_is_not_emulated():
  async def main():
    one = cell()
    await one.join(None, 0)
    begin = now()
    for _ in range(10):
      await one.work(0.125)  # 20 s
      await asyncio.sleep(0.01)
    assert now() - begin == pytest.approx(200.01)
    await asyncio.sleep(1)  # idle
    await one.work(0.125)
    assert now() - begin == pytest.approx(221.01)

  virtual_time.run(main())


def test_what_the_role_or_the_version_forbids_is_refused():
  async def main():
    one, core = cell(), cell(emulated_cell.EmulatedCore)
    with pytest.raises(CellError, match="role 'idle'"):
      await one.work(0.5)
    await core.init(None, 0, 4)
    with pytest.raises(CellError, match="version 4, not 5"):
      await core.join(None, 5)
    await one.join(None, 4)
    await one.work(0.5)
    with pytest.raises(CellError, match="sums at version 4"):
      await one.join(None, 5)
    await core.join(None, 4)
    await core.work(0.5)
    with pytest.raises(CellError, match="not taken"):
      await core.apply([], 5)
    sums = [await core.sums(), await one.sums()]
    assert await core.apply(sums, 5) == {
      "emulated/share": 1.0,
      "emulated/micro_steps": 2,
    }
    await one.work(0.5)
    with pytest.raises(CellError, match="version 4, cell 1 holds 5"):
      await core.apply([await one.sums()], 6)
    await one.work(0.5)
    await one.reset()
    assert await one.sums() == {}

  virtual_time.run(main())


def test_a_core_is_saved_restored_and_joined(tmp_path):
  async def main():
    core = cell(emulated_cell.EmulatedCore, join_s=0, serve_s=0)
    await core.init(None, 0, 7)
    await core.save(tmp_path / "step", {"groups": [1, 2]})
    snapshot = await core.snapshot(tmp_path / "snapshot")
    assert snapshot.version == 7
    other = cell(emulated_cell.EmulatedCore, join_s=0, serve_s=0)
    assert await other.restore(tmp_path / "step") == {"groups": [1, 2]}
    await other.join(None, 7)
    one = cell(join_s=0, serve_s=0)
    await one.join(snapshot, 7)
    with pytest.raises(CellError, match="holds version 7, not 8"):
      await one.serve(dataclasses.replace(snapshot, version=8), 8)
    await one.serve(snapshot, 7)
    (tmp_path / "step" / "state.json").write_bytes(b"{}")
    with pytest.raises(manifest.ManifestError, match=r"state\.json is corrupt"):
      await other.restore(tmp_path / "step")

  asyncio.run(main())


def test_a_resized_core_trains_at_its_new_size():
  async def main():
    core = emulated_cell.EmulatedCore("cell 0", PROFILE, devices=8)
    await core.join(None, 0)
    await core.resize(range(2))
    before = now()
    await core.work(0.125)
    assert now() - before == pytest.approx(320 / 8)  # one node
    with pytest.raises(CellError, match="each once"):
      await core.resize([0, 0])

  virtual_time.run(main())
