"""Real cells in processes of their own: the sums and tokens of this one's."""

import asyncio
import os
import pathlib
import signal

import jax.numpy as jnp
import numpy as np
import pytest
import toy_cells as toy

from gyre import config, types
from gyre.rollout import engine
from gyre.runtime import remote, reshard, workers
from gyre.runtime.specs import jax_spec

SIZES = {"cell 0": (1, 1, 1), "cell 1": (1, 2, 1)}


def specs(cache):
  return [
    jax_spec(
      name,
      toy.make_config(),
      toy.MODEL.to_hf(),
      core=name == "cell 0",
      mesh=config.Mesh(*sizes),
      compilation_cache=str(cache),
    )
    for name, sizes in SIZES.items()
  ]


def relative(got, want):
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def assert_same_sums(got, want):
  assert got.keys() == want.keys()
  for name in want:
    assert relative(got[name], want[name]) <= 1e-5, name


async def local_cells():
  core, one = toy.core(), toy.satellite("cell 1", (1, 2, 1), first=2)
  await core.join(None, 0)
  await one.join(await core.weights(), 0)
  return core, one


REQUEST = engine.Request(
  ids=[3, 1, 4, 1, 5], max_new_tokens=8, temperature=0.0, request_id="a"
)


@pytest.mark.slow  # two processes compile: 40 s
def test_processes_add_up_train_and_serve_as_this_one_does(tmp_path):
  steps = toy.batches(groups=6)
  half = len(steps) // 2

  async def here():
    core, one = await local_cells()
    for batch in steps[:half]:
      await core.work(batch)
    for batch in steps[half:]:
      await one.work(batch)
    sums = [await core.sums(), await one.sums()]
    kept = [{k: np.asarray(v) for k, v in s.items()} for s in sums]
    metrics = await core.apply(sums, 1)
    weights = reshard.named_leaves(await core.weights())
    weights = {k: np.asarray(v) for k, v in weights.items()}
    await one.serve(await core.weights(), 1)
    got = await one.engine.generate(REQUEST)
    used = await one.engine.fingerprint()
    for cell in (core, one):
      await cell.close()
    return kept, metrics, weights, got, used

  async def there():
    async with (
      asyncio.timeout(240),
      workers.Workers(specs(tmp_path / "cache"), tmp_path) as group,
    ):
      core, one = group.cells.values()
      assert (core.row_multiple, one.row_multiple) == (1, 2)
      await core.init(toy.params(), 3)
      snapshot = await core.snapshot(tmp_path / "v0")
      await core.join(None, 0)
      await one.join(snapshot, 0)
      for batch in steps[:half]:
        await core.work(batch)
      for batch in steps[half:]:
        await one.work(batch)
      # Killed with all it has added: it joins again, and does it again.
      os.kill(group.pids()["cell 1"], signal.SIGKILL)
      with pytest.raises(remote.WorkerDown):
        await one.sums()
      while one.role != "idle":
        await asyncio.sleep(0.05)
      await one.join(snapshot, 0)
      for batch in steps[half:]:
        await one.work(batch)
      sums = [await core.sums(), await one.sums()]
      kept = [dict(s) for s in sums]
      metrics = await core.apply(sums, 1)
      weights = reshard.named_leaves(await core.weights())
      await one.serve(await core.snapshot(tmp_path / "v1"), 1)
      tokens = []
      got = await one.engine.generate(REQUEST, lambda *t: tokens.append(t))
      assert [t[0] for t in tokens] == got.ids.tolist()
      await core.save(tmp_path / "step", {"groups": [1]})
      # The core's own weights are served as well, and a checkpoint loaded.
      await core.serve(None, 1)
      used = [await c.engine.fingerprint() for c in (core, one)]
      assert used[0] == used[1]
      saved = {"params": toy.params(9), "version": jnp.asarray(2, jnp.int32)}
      reshard.save(saved, tmp_path / "v2")
      later = types.Snapshot(2, str(tmp_path / "v2"))
      await one.engine.load_weights(later, 2)
      assert one.engine.stats().version == 2
      assert await one.engine.fingerprint() != used[1]
      return kept, metrics, weights, got, used[1]

  want, metrics, weights, answer, used = toy.run(here())
  got, metrics_2, weights_2, answer_2, used_2 = toy.run(there())
  for a, b in zip(got, want, strict=True):
    assert_same_sums(a, b)
  assert metrics_2.keys() == metrics.keys()
  for name, value in metrics.items():
    assert relative(metrics_2[name], value) <= 1e-4, name
  assert weights_2.keys() == weights.keys()
  for name, value in weights.items():
    assert relative(weights_2[name], value) <= 1e-5, name
  assert used_2.keys() == used.keys()
  np.testing.assert_array_equal(answer_2.ids, answer.ids)
  np.testing.assert_allclose(answer_2.logprobs, answer.logprobs, atol=1e-4)
  assert reshard.read_meta(tmp_path / "step") == {"groups": [1]}
  assert pathlib.Path(tmp_path, "workers", "cell_1.log").exists()


def test_one_real_worker_has_the_sums_of_this_process(tmp_path):
  steps = toy.batches(groups=4)[:2]

  async def here():
    core = toy.core()
    await core.join(None, 0)
    for batch in steps:
      await core.work(batch)
    sums = {k: np.asarray(v) for k, v in (await core.sums()).items()}
    await core.close()
    return sums

  async def there():
    one = specs(tmp_path / "cache")[0]
    async with (
      asyncio.timeout(120),
      workers.Workers([one], tmp_path) as group,
    ):
      (core,) = group.cells.values()
      await core.init(toy.params(), 3)
      await core.join(None, 0)
      for batch in steps:
        await core.work(batch)
      return dict(await core.sums())

  want = toy.run(here())
  assert_same_sums(toy.run(there()), want)
