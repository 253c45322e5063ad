"""How a conductor begins, and hears of cells: what comes early is not lost."""

import asyncio
import dataclasses

import pytest
import virtual_time
from elastic_runs import check, conducted, emulation, layout, mortal

from gyre.elastic import scheduler as sched
from gyre.rollout.engine import EngineDown
from gyre.runtime import emulated_run


def _others():
  return asyncio.all_tasks() - {asyncio.current_task()}


def test_a_run_that_cannot_begin_ends():
  """Its error is raised, whatever cell is still waited for."""

  async def main():
    e = emulation()
    run = emulated_run.EmulatedRun(e, mortal(e))

    async def lose():
      run.down("cell 1", "killed")
      await asyncio.sleep(20)
      run.conductor.fail(EngineDown("cell 1 died too often"))

    with pytest.raises(EngineDown, match="too often"):
      await conducted(run, lose())
    await asyncio.sleep(0)
    assert not _others()

  virtual_time.run(main())


@pytest.mark.parametrize("cell", ["cell 0", "cell 2"])
def test_a_first_role_that_fails_leaves_no_other_behind(cell):
  async def main():
    e = emulation()
    run = emulated_run.EmulatedRun(e)

    async def fails(weights, version):
      raise RuntimeError("no memory")

    run.workers[cell].serve = fails
    with pytest.raises(RuntimeError, match="no memory"):
      await conducted(run)
    assert not _others()

  virtual_time.run(main())


def test_a_resize_asked_for_before_the_beginning_is_done():
  core, *others = layout(2).cells
  core = dataclasses.replace(core, devices=(0, 7), slots=8, divisible=True)

  async def main():
    e = emulation(cells=sched.Layout((core, *others)))
    run = emulated_run.EmulatedRun(e)
    run.conductor.ask_resize(1)
    await conducted(run)
    return run

  run = virtual_time.run(main())
  actions = [a for _, r in run.log.records for a in r["actions"]]
  (resize,) = [a["Resize"] for a in actions if "Resize" in a]
  assert resize["devices"] == (0,)


@pytest.mark.parametrize("cell", ["cell 0", "cell 1", "cell 2"])
def test_deaths_told_faster_than_they_are_decided_on(cell):
  async def main():
    e = emulation()
    run = emulated_run.EmulatedRun(e, mortal(e))

    async def die_twice():
      await asyncio.sleep(9)
      await run.workers[cell].die()
      run.down(cell, "killed")
      run.workers[cell].born()
      run.up(cell)
      await run.workers[cell].die()
      run.down(cell, "killed again")
      await asyncio.sleep(5)
      run.workers[cell].born()
      run.up(cell)

    check(run, await conducted(run, die_twice()))

  virtual_time.run(main())
