"""A cell that may become the core: a satellite until it restores a state."""

import chex
import jax
import numpy as np
import pytest
import toy_cells as toy

from gyre.runtime import reshard
from gyre.runtime.cell import CellError
from gyre.runtime.core_worker import CoreWorker
from gyre.types import Snapshot

pytestmark = pytest.mark.usefixtures("quick_compilation")


def stateless(first):
  """A CoreWorker without a state, on other devices than the core's."""
  made, config = toy.trainer((1, 1, 1), first), toy.make_config()
  return CoreWorker(f"cell {first}", made, config, programs=toy.programs())


def copies(tree):
  return {k: np.asarray(v) for k, v in reshard.named_leaves(tree).items()}


async def step(cell, batches, version):
  """One optimizer step of a core alone."""
  for batch in batches:
    await cell.work(batch)
  await cell.apply([await cell.sums()], version)
  return copies(await cell.weights())


def test_a_satellite_takes_the_place_of_a_lost_core(tmp_path):
  first, second = toy.batches(), toy.batches(seed=1)

  async def scenario():
    core, other = toy.core(), stateless(1)
    await core.join(None, 0)
    with pytest.raises(CellError, match="no state"):
      await other.join(None, 0)
    await other.serve(await core.weights(), 0)
    # It helps: its sums are those of the core for the same micro-step.
    await other.join(await core.weights(), 0)
    for cell in (core, other):
      await cell.work(first[0])
    chex.assert_trees_all_equal(
      copies(await other.sums()), copies(await core.sums())
    )
    await step(core, first, 1)
    await core.save(tmp_path / "one", {"step": 1})
    want = await step(core, second, 2)
    # The core is lost, in the middle of an update; another goes on from what
    # was committed, as if nothing had been.
    await other.join(Snapshot(1, str(tmp_path / "one")), 1)
    await other.work(second[0])
    assert await other.restore(tmp_path / "one") == {"step": 1}
    await other.join(None, 1)
    chex.assert_trees_all_equal(await step(other, second, 2), want)
    with pytest.raises(CellError, match="is the core"):
      await other.join(await core.weights(), 2)
    for cell in (core, other):
      await cell.close()

  toy.run(scenario())


def test_a_cell_that_serves_frees_its_engine_before_it_restores(tmp_path):
  async def scenario():
    core, other = toy.core(), stateless(1)
    await core.join(None, 0)
    await core.save(tmp_path / "zero", {})
    await other.serve(Snapshot(0, str(tmp_path / "zero")), 0)
    await other.restore(tmp_path / "zero")
    assert other.engine.stats().asleep
    await other.join(None, 0)
    chex.assert_trees_all_equal(
      jax.device_get(await other.weights()), jax.device_get(toy.params())
    )
    await other.serve(None, 0)
    assert not other.engine.stats().asleep
    for cell in (core, other):
      await cell.close()

  toy.run(scenario())
