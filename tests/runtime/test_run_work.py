"""Commits of a run and what becomes of them when the core dies amid one."""

import asyncio
import contextlib
import dataclasses
import pathlib
import threading

import pytest
import tiny_config

from gyre import config as config_lib
from gyre.rollout.engine import EngineDown
from gyre.rollout.profile import Profile
from gyre.rollout.router import Router
from gyre.runtime import metrics, reshard
from gyre.runtime.checkpoints import Checkpoints
from gyre.runtime.emulated_cell import EmulatedCore
from gyre.runtime.position import Position
from gyre.runtime.record import Record
from gyre.runtime.run_work import RunWork
from gyre.runtime.tasks import TaskSource
from gyre.runtime.trainer import SKIPPED
from gyre.runtime.watch import Watch
from gyre.store import manifest
from gyre.store.rollouts import RolloutStore
from gyre.types import Call, Execution, Outcome

PROFILE = Profile(speedup=1e6)
CONFIG = config_lib.from_config_dict(tiny_config.get_config())


def runner(engine, temperature):
  """Executions whose rewards differ inside a group, but for each third."""
  del engine, temperature

  async def run(dispatch):
    taught = int(dispatch.group_id[-1]) % 3 != 2
    call = Call(
      execution_id=dispatch.execution_id,
      group_id=dispatch.group_id,
      call_id="0000",
      prompt_ids=[1, 2],
      completion_ids=[3, 4],
      logprobs=[-1.0, -1.0],
      versions=[0, 0],
      finish_reason="stop",
    )
    return Execution(
      dispatch.execution_id,
      dispatch.group_id,
      dispatch.index,
      dispatch.task.task_id,
      calls=(call,),
      outcome=Outcome(status="scored", passed=dispatch.index * taught, total=4),
    )

  return run


class Dies(EmulatedCore):
  """A core that dies in a commit: before it is made, or after."""

  def __init__(self, *args, after):
    super().__init__(*args)
    self._after = after

  async def save(self, directory, meta):
    if self._after:
      await super().save(directory, meta)
    raise EngineDown(f"{self.name}: killed by SIGKILL")


@contextlib.asynccontextmanager
async def made(directory, config=CONFIG, **options):
  """A RunWork at its newest step, its store, where its checkpoints are."""
  checkpoints = Checkpoints(directory / "checkpoints", 2)
  checkpoints.clean_up()
  if not checkpoints.steps():
    begun = Position(phase="train", row={"step": 0})
    first = EmulatedCore("cell 0", PROFILE)
    await first.save(checkpoints.path(0), dataclasses.asdict(begun))
  newest = checkpoints.steps()[-1]
  position = Position(**reshard.read_meta(checkpoints.path(newest)))
  store = RolloutStore(directory / "rollouts.sqlite")
  store.set_consumed(position.consumed)
  store.forget_after(position.step)
  record = Record(directory, 3, position.lengths, position.step)
  work = RunWork(
    config,
    position,
    tasks=TaskSource(config),
    runner=runner,
    router=Router(),
    store=store,
    checkpoints=checkpoints,
    record=record,
    watch=Watch(record, store),
    row_multiple=1,
    wall_s=lambda: 0.0,
    worker=lambda cell: None,
    **options,
  )
  try:
    yield work, store, checkpoints
  finally:
    store.close()
    record.close()


async def consume(work, update, groups):
  for group in groups:
    work.admit(group, 0)
    for i in range(CONFIG.rollout.group_size):
      assert await work.run((group, i))
    await work.compose(update, group)
  work.rest(update)
  await work.keep(update)


@pytest.mark.parametrize("after", [False, True])
def test_a_core_that_dies_in_a_commit(tmp_path, after):
  """What is on disk decides whether the update was taken."""

  async def main():
    async with made(tmp_path) as (work, store, checkpoints):
      await consume(work, 1, (0, 1))
      core = Dies("cell 0", PROFILE, after=after)
      await core.join(None, 0)
      await core.apply([], 1)
      with pytest.raises(EngineDown):
        await work.commit(core, 1, [SKIPPED])
      assert work.position.step == 0 and store.consumed() == {}
      other = EmulatedCore("cell 1", PROFILE)
      version = await work.rehost(other)
      assert version == work.position.step == (1 if after else 0)
      assert (await other.weights())["version"] == version
      assert other.role == "train"
      if not after:
        await other.apply([], 1)
        await work.commit(other, 1, [SKIPPED])
      consumed = {"train-000000": 1, "train-000001": 1}
      assert store.consumed() == work.position.consumed == consumed
      assert checkpoints.steps() == [0, 1]
      # And on, from there.
      await consume(work, 2, (2, 3))
      await other.apply([], 2)
      await work.commit(other, 2, [SKIPPED])
      assert store.consumed() == consumed | {
        "train-000002": 2,
        "train-000003": 2,
      }

  asyncio.run(main())


@pytest.mark.parametrize("killed", ["never", "before", "between", "after"])
def test_lines_of_a_burst_are_written_when_their_updates_are_committed(
  tmp_path, killed
):
  """None is lost or written twice, wherever the run is killed.

  Before the commit of the first update of a burst, between it and its line,
  after that.
  """
  config = dataclasses.replace(
    CONFIG,
    run=dataclasses.replace(CONFIG.run, steps=3),
    elastic=dataclasses.replace(CONFIG.elastic, mu=2),
    eval=dataclasses.replace(CONFIG.eval, every=0),
  )

  def lines():
    rows = metrics.read_lines(tmp_path / "metrics.jsonl")
    return [row["step"] for row in rows]

  async def first(work):
    await work.published(0)
    assert lines() == [0]
    await consume(work, 1, (0, 1))
    core = EmulatedCore("cell 0", PROFILE)
    if killed in ("before", "between"):
      core = Dies("cell 0", PROFILE, after=killed == "between")
    await core.join(None, 0)
    await core.apply([], 1)
    with contextlib.suppress(EngineDown):
      await work.commit(core, 1, [SKIPPED])
    assert lines() == ([0] if isinstance(core, Dies) else [0, 1])
    return core

  async def main():
    async with made(tmp_path, config) as (work, _, _):
      core = await first(work)
      if killed == "never":
        await second(work, core)
    if killed == "never":
      return
    async with made(tmp_path, config) as (work, _, _):
      assert work.position.step == (0 if killed == "before" else 1)
      core = EmulatedCore("cell 0", PROFILE)
      await work.rehost(core)
      await work.published(0)
      if killed == "before":
        assert lines() == [0]
        assert {g.index for g in work._groups.values()} == {0, 1}
        for group in (0, 1):
          await work.compose(1, group)
        work.rest(1)
        await work.keep(1)
        await core.apply([], 1)
        await work.commit(core, 1, [SKIPPED])
      assert lines() == [0, 1]
      await second(work, core)

  async def second(work, core):
    for update, groups in ((2, (2, 3)), (3, (4, 5))):
      await consume(work, update, groups)
      await core.apply([], update)
      await work.commit(core, update, [SKIPPED])
      # These two are published, the last because it is.
      assert lines() == list(range(update))
      await work.published(update)
      assert lines() == list(range(update + 1))

  asyncio.run(main())


class Held(tuple):
  """Calls that nobody gets to see before the event loop has had its turn."""

  turn: threading.Event
  begun = 0

  def __iter__(self):
    Held.begun += 1
    assert self.turn.wait(30), "the event loop stands still"
    return super().__iter__()


def test_the_loop_goes_on_while_executions_are_stored_scored_and_audited(
  tmp_path,
):
  """With hundreds of calls, each of these takes seconds."""

  async def main():
    async with made(tmp_path) as (work, store, _):
      turn, ran = threading.Event(), runner(None, None)

      async def held(dispatch):
        done = await ran(dispatch)
        calls = Held(done.calls)
        calls.turn = turn
        return dataclasses.replace(done, calls=calls)

      work._run = held

      async def beside(doing):
        turn.clear()
        task = asyncio.ensure_future(doing)
        await asyncio.sleep(0.02)
        assert not task.done()
        turn.set()
        return await task

      for group in (0, 1):
        work.admit(group, 0)
        for i in range(CONFIG.rollout.group_size):
          assert await beside(work.run((group, i)))
        assert store.execution(work.name((group, i))).calls
        await beside(work.compose(1, group))
      work.rest(1)
      await beside(work.keep(1))
      assert {s.group_id for s, _ in store.samples(1)} == {
        "train-000000",
        "train-000001",
      }
      # Of many that end at once the loop's own writes wait for one.
      work.admit(2, 0)
      begun = Held.begun

      async def together():
        return await asyncio.gather(*(work.run((2, i)) for i in range(3)))

      turn.clear()
      task = asyncio.ensure_future(together())
      while Held.begun == begun:
        await asyncio.sleep(0.01)
      await asyncio.sleep(0.02)
      assert Held.begun == begun + 1
      store.put_event("meanwhile", {}, step=1)
      turn.set()
      assert all(await task)

  asyncio.run(main())


def test_weights_that_other_processes_read(tmp_path):
  """Of the newest checkpoint, or else written for them and removed again."""

  async def main():
    shared = tmp_path / "shared"
    async with made(tmp_path, snapshots=shared) as (work, _, checkpoints):
      core = EmulatedCore("cell 0", PROFILE)
      await work.rehost(core)
      got = await work.training_weights(core, 0)
      assert (got.version, got.path) == (0, str(checkpoints.path(0)))
      for version in (1, 2):  # two passes over an update
        await core.apply([], version)
        got = await work.training_weights(core, version)
        assert got.version == version
        assert pathlib.Path(got.path).is_relative_to(shared)
        await EmulatedCore("cell 1", PROFILE).join(got, version)
      await work.training_weights(core, 0)
      assert not list(shared.iterdir())
      # Engines are given what is committed, whether there is a core or not,
      # and need not verify what was verified for all.
      for giver in (core, None):
        got = await work.publishable(giver, 0)
        assert (got.version, got.path) == (0, str(checkpoints.path(0)))
        manifest.unchanged(got.path, got.verified)
        assert await work.training_weights(core, 0) == got
      path = checkpoints.path(0) / "state.json"
      path.write_bytes(path.read_bytes()[:-2] + b" \n")
      for giver in (core, None):
        with pytest.raises(manifest.ManifestError, match=r"state\.json is"):
          await work.publishable(giver, 0)
      with pytest.raises(manifest.ManifestError, match=r"state\.json is"):
        await work.training_weights(core, 0)

  asyncio.run(main())


def test_weights_that_are_read_while_an_update_is_committed(tmp_path):
  """A satellite that joins meanwhile still reads them when it is."""

  class Slow(EmulatedCore):
    async def save(self, directory, meta):
      await asyncio.sleep(0.05)
      await super().save(directory, meta)

  async def main():
    shared = tmp_path / "shared"
    async with made(tmp_path, snapshots=shared) as (work, *_):
      await consume(work, 1, (0, 1))
      core = Slow("cell 0", PROFILE)
      await core.join(None, 0)
      await core.apply([], 1)
      commit = asyncio.ensure_future(work.commit(core, 1, [SKIPPED]))
      await asyncio.sleep(0)
      got = await work.training_weights(core, 1)
      await commit
      manifest.verify(got.path)
      # Whoever asks next is given the checkpoint.
      assert (await work.training_weights(core, 1)).path != got.path
      assert not list(shared.iterdir())

  asyncio.run(main())


def test_groups_that_teach_nothing(tmp_path):
  """They are known when whole, by a resumed run too, and are counted."""

  async def main():
    config = dataclasses.replace(
      CONFIG,
      rollout=dataclasses.replace(CONFIG.rollout, resample_zero_variance=True),
    )
    async with made(tmp_path, config) as (work, *_):
      for group in (2, 5):
        work.admit(group, 0)
        for i in range(config.rollout.group_size):
          assert not work.flat(group)
          await work.run((group, i))
        assert work.flat(group)
      work.drop(2, "flat")
      await consume(work, 1, (0, 1))
      assert not work.flat(1)
      assert work.resumed().flat == (5,)
      core = EmulatedCore("cell 0", PROFILE)
      await core.join(None, 0)
      for update, replaced in ((1, 1), (2, 0)):
        await work.commit(core, update, [SKIPPED])
        assert work.position.row["group/resampled"] == replaced
        if update == 1:
          await consume(work, 2, (3, 4))
    async with made(tmp_path, config) as (work, *_):
      resumed = work.resumed()
      assert (resumed.flat, resumed.dropped) == ((5,), (2,))
      assert resumed.groups == ((5, 0),) and resumed.version == 2
      assert sorted(resumed.consumed) == [0, 1, 3, 4]
      assert resumed.finished == tuple(
        ((5, i), True) for i in range(config.rollout.group_size)
      )

  asyncio.run(main())
