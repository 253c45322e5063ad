"""The conductor over emulated cells, under a clock that does not wait.

Whatever its cells do, the run ends, every group is trained once, and staleness
is the dispatch law's. The whole grid, and more histories of deaths:

  python -m pytest tests/runtime/test_conductor.py -m slow
"""

import asyncio
import collections
import dataclasses
import logging

import dispatch_law
import pytest
import virtual_time
from elastic_runs import (
  Mortal,
  SlowAgain,
  SlowSums,
  SlowWork,
  UnevenWork,
  check,
  conducted,
  disturb,
  emulation,
  layout,
  mortal,
  rng,
)

from gyre.elastic import scheduler as sched
from gyre.rollout.engine import EngineDown
from gyre.runtime import emulated_run, event_log
from gyre.runtime import emulation as emulation_lib
from gyre.sim import tables, workload

GRID = [(phi, mu) for phi in (0, 0.25, 0.5, 1, 1.5, 2.3) for mu in (1, 2, 3, 5)]
FEW = [(0, 1), (0.5, 3), (2.3, 1), (1.5, 2)]


def run_once(e, **options):
  """Runs it undisturbed; (run, outcome)."""

  async def main():
    run = emulated_run.EmulatedRun(e, make_work=UnevenWork, **options)
    return run, await conducted(run)

  return virtual_time.run(main())


# The law.


def steady(law, outcome):
  """Staleness of the groups of each burst in which the law holds."""
  bursts = collections.defaultdict(list)
  for update, _, d in outcome.staleness:
    bursts[(update - 1) // law.mu].append(d)
  first = -(-law.extra // (law.mu * law.batch)) + 1
  return [bursts[b] for b in sorted(bursts) if b >= first]


def lawful(phi, mu, window, bursts):
  """A run of whole bursts, and its law."""
  e = emulation(
    phi, mu, batch=20, size=1, steps=bursts * mu, cells=layout(3, 20),
    window=window, parts=1, calls=1,
  )  # fmt: skip
  run, outcome = run_once(e)
  check(run, outcome)
  return e.law, outcome


def check_fifo(phi, mu):
  law, outcome = lawful(phi, mu, window=1, bursts=-(-7 // mu) + 2)
  seen = steady(law, outcome)
  assert len(seen) >= 2
  for burst in seen:
    counts = collections.Counter(burst)
    pmf = {d: n / (law.mu * law.batch) for d, n in counts.items()}
    assert pmf == pytest.approx(dispatch_law.pmf(law))
  assert max(d for *_, d in outcome.staleness) == law.fifo_max


def check_window(phi, mu, window):
  bursts = -(-7 // mu) + 2
  law, outcome = lawful(phi, mu, window, bursts)
  staleness = [d for *_, d in outcome.staleness]
  assert max(staleness) <= law.maximum()
  mean = sum(staleness) / len(staleness)
  assert mean == pytest.approx(
    dispatch_law.cold_start_mean(law, bursts), abs=1e-12
  )


@pytest.mark.parametrize("phi,mu", FEW)
def test_staleness_is_the_laws_under_fifo(phi, mu):
  check_fifo(phi, mu)


@pytest.mark.parametrize("phi,mu", FEW)
def test_staleness_has_its_maximum_and_mean_under_a_window(phi, mu):
  check_window(phi, mu, window=30)


@pytest.mark.slow
@pytest.mark.parametrize("phi,mu", GRID)
def test_the_law_on_the_whole_grid(phi, mu):
  check_fifo(phi, mu)
  for window in (7, 40):
    check_window(phi, mu, window)


# What the simulator says.


@pytest.mark.parametrize("name", ["A0", "C0", "C1", "E0"])
def test_a_run_takes_the_hours_that_the_simulator_predicts(name):
  (design,) = [d for d in tables.TABLE_1 if d.id == name]
  e = emulation_lib.of_design(design, tables.CALIBRATION, seed=0, steps=3)
  e = dataclasses.replace(
    e,
    calls=2,
    profile=dataclasses.replace(e.profile, token_s=360, stream_s=3600),
  )
  run, outcome = run_once(e)
  check(run, outcome)
  predicted = tables.run_design(design, tables.CALIBRATION, 0, steps=3)
  assert outcome.hours == pytest.approx(predicted.hours, rel=0.05)
  assert abs(outcome.switches - predicted.switches) <= 8


# Cells that die, transfers that fail.

VARIANTS = {
  "three cells": {},
  "two passes": {"passes": 2},
  "ordered": {"ordered": True, "passes": 2},
  "evaluated": {"evaluated": 3},
  "composed slowly": {"passes": 2, "make_work": SlowWork},
  "handed over slowly": {"passes": 2, "kind": SlowSums},
  "taken again slowly": {"passes": 2, "kind": SlowAgain},
  "beside a pool": {
    "cells": layout(2, 8, standalone=1),
    "phi": 0,
    "mu": 1,
    "window": 9,
  },
  "async": {
    "cells": layout(1, 6, kind="trainer", standalone=2),
    "phi": 1.5,
    "mu": 1,
    "passes": 2,
  },
  "colocate": {
    "cells": layout(1, 12),
    "phi": 0,
    "streaming": False,
    "evaluated": 2,
  },
}


def check_disturbed(seed, variant):
  async def main():
    options = {"make_work": UnevenWork} | VARIANTS[variant]
    make_work, kind = options.pop("make_work"), options.pop("kind", None)
    r, e = rng(seed), emulation(**options)
    run = emulated_run.EmulatedRun(e, mortal(e, kind), make_work=make_work)
    every, fails = r.choice([3.0, 8.0, 20.0]), r.choice([0.0, 0.3, 1.0])
    outcome = await conducted(run, disturb(run, r, every=every, fails=fails))
    check(run, outcome)
    if e.evaluated:
      # Each evaluation ended, with tokens of its version or a later one.
      assert [v for v, _ in run.work.evaluations][-1] == e.steps
      for version, used in run.work.evaluations:
        assert used and min(used) >= version

  quietly(main)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_whose_cells_die_and_fail_ends_as_it_should(variant):
  for seed in range(6):
    check_disturbed(seed, variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_histories_of_deaths(variant):
  for seed in range(1000, 1150):
    check_disturbed(seed, variant)


def check_resized(seed):
  """A divisible core lends a device and takes it back, among deaths."""
  core = sched.Cell("cell 0", (0, 1), 8, "core", 2.0, divisible=True)
  others = [sched.Cell(f"cell {i}", (i + 1,), 5) for i in (1, 2)]

  async def main():
    r = rng(seed)
    e = emulation(cells=sched.Layout((core, *others)), steps=8)
    run = emulated_run.EmulatedRun(e, mortal(e), make_work=UnevenWork)
    make = run.work.worker
    run.work.worker = lambda cell: run.workers.setdefault(
      cell.name, Mortal(lambda: make(cell))
    )

    async def ask():
      while run.log.began is None:
        await asyncio.sleep(1.0)
      for devices in (1, 2, 1, 2):
        await asyncio.sleep(r.uniform(5.0, 40.0))
        run.conductor.ask_resize(devices)

    every = r.choice([5.0, 15.0, 1e9])
    await check_ends(run, ask(), disturb(run, r, every=every, fails=0.3))
    return sum("Resized" in made["event"] for _, made in run.log.records)

  return quietly(main)


async def check_ends(run, *beside):
  check(run, await conducted(run, *beside))


def quietly(main):
  """Runs under the clock that does not wait; deaths are not worth a word."""
  logging.disable(logging.WARNING)
  try:
    return virtual_time.run(main())
  finally:
    logging.disable(logging.NOTSET)


def test_a_core_that_lends_devices_among_deaths():
  assert sum(check_resized(seed) for seed in range(12)) >= 12


@pytest.mark.slow
def test_many_histories_of_resizes():
  assert sum(check_resized(seed) for seed in range(1000, 1300)) >= 300


def test_sums_are_handed_over_while_others_work():
  """An update waits for those of the last micro-step alone."""
  e = emulation(phi=0, mu=1, batch=5, steps=4, parts=3, window=9)
  cells = {
    cell.name: SlowSums(
      cell.name,
      dataclasses.replace(e.profile_of(cell), update_s=200.0 * (1 + i)),
      executions=e.executions,
    )
    for i, cell in enumerate(e.layout)
  }
  run, outcome = run_once(e, workers=cells)
  check(run, outcome)
  early = waits = 0
  for at in cells["cell 0"].applied:
    last = max(t for c in cells.values() for t in c.worked if t <= at)
    assert at - last == pytest.approx(SlowSums.hands_s)
    before = [b for c in cells.values() for b, end in c.handing if end <= at]
    early += sum(last - 100 < begin < last for begin in before)
    waits += 1
  assert waits == e.steps and early >= e.steps
  # Once an update, not whenever there is nothing to do.
  assert all(len(c.handing) <= e.steps for c in cells.values())


class TimedWork(UnevenWork):
  """When each publication began."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.begun = {}

  async def publishable(self, core, version):
    self.begun[version] = asyncio.get_running_loop().time()
    return await super().publishable(core, version)


def test_nobody_waits_for_satellites_that_take_the_weights_again():
  """At the end of a burst, they are to serve."""
  e = emulation(phi=0, mu=2, steps=4, window=9)

  async def main():
    run = emulated_run.EmulatedRun(e, mortal(e, SlowAgain), make_work=TimedWork)
    check(run, await conducted(run))
    return run.work

  work = virtual_time.run(main())
  for version in (2, 4):
    assert work.begun[version] == pytest.approx(work.applied[version - 1])


class Unheard(UnevenWork):
  """The core dies when it has committed update 2, before it says so.

  So does the next one, while others take its weights.
  """

  run_of = None

  async def _dies(self, cell):
    self.run_of.down(cell.name, "killed")
    await cell.die()
    self.run_of.workers[cell.name].born()
    self.run_of.up(cell.name)

  async def commit(self, core, update, metrics):
    await super().commit(core, update, metrics)
    if update == 2 and core.name == "cell 0":
      await self._dies(core)
      raise EngineDown(f"{core.name} is dead")

  async def rehost(self, core):
    version = await super().rehost(core)
    if version == 2 and core.name == "cell 1":
      asyncio.get_running_loop().call_later(
        SlowAgain.again_s / 2,
        lambda: asyncio.ensure_future(self._dies(core)),
      )
    return version


def test_a_commit_that_two_cores_do_not_live_to_tell_of():
  e = emulation(phi=0, steps=4, window=9)

  async def main():
    run = emulated_run.EmulatedRun(e, mortal(e, SlowAgain), make_work=Unheard)
    run.work.run_of = run
    check(run, await conducted(run))
    events = [made["event"] for _, made in run.log.records]
    lost = [e["CellDown"]["cell"] for e in events if "CellDown" in e]
    assert lost == ["cell 0", "cell 1"]

  quietly(main)


def test_a_run_that_is_stopped_while_groups_are_composed_leaves_nothing():
  begun = []

  class Endless(SlowWork):
    async def compose(self, update, group):
      if len(self.composed) == 5:
        begun.append(group)
        await asyncio.sleep(1e9)
      return await super().compose(update, group)

  async def main():
    run = emulated_run.EmulatedRun(emulation(), make_work=Endless)
    with pytest.raises(TimeoutError):
      await conducted(run, timeout_s=500.0)
    assert len(run.work.composed) == 5 and len(begun) == 1
    return asyncio.all_tasks() - {asyncio.current_task()}

  assert not virtual_time.run(main())


def test_executions_of_groups_that_are_lost_are_replaced():
  works = {
    g: (workload.Work(3.0, scored=g % 5 != 2), workload.Work(5.0, g % 5 != 2))
    for g in range(200)
  }
  e = emulation(workload=workload.Replay(works))
  run, outcome = run_once(e)
  books = check(run, outcome)
  assert all(g % 5 != 2 for groups in books.applied.values() for g in groups)


def test_an_undisturbed_run_samples_what_a_disturbed_one_does():
  e = emulation()

  def sampled(run):
    return {
      x: [c.completion_ids.tolist() for c in done.calls]
      for x, done in run.work.executions.items()
    }

  async def main():
    run = emulated_run.EmulatedRun(e, mortal(e))
    await conducted(run, disturb(run, rng(5), every=3.0))
    return run

  disturbed = quietly(main)
  whole, _ = run_once(e)
  assert sampled(whole) == sampled(disturbed)


# The audit finds what is wrong.


def test_the_audit_names_faults():
  e = emulation(steps=2)
  run, _ = run_once(e)
  records = run.log.records
  assert not event_log.audit(e.layout, e.law, records).faults

  def faults(change):
    made = [
      (step, {"event": r["event"], "actions": list(r["actions"])})
      for step, r in records
    ]
    change(made)
    return "\n".join(event_log.audit(e.layout, e.law, made).faults)

  def first(kind, made):
    for i, (_, r) in enumerate(made):
      for a in r["actions"]:
        if kind in a:
          return i, a
    raise AssertionError(kind)

  def twice(kind):
    def change(made):
      i, action = first(kind, made)
      made[i][1]["actions"].append(action)

    return change

  def without(kind):
    def change(made):
      i, action = first(kind, made)
      made[i][1]["actions"].remove(action)

    return change

  assert "starts, though it runs" in faults(twice("Start"))
  assert "consumed twice" in faults(twice("Consume"))
  assert "trained 3 groups, not 4" in faults(without("Consume"))
  assert "during" in faults(twice("Switch"))
  assert "admitted twice" in faults(twice("Admit"))

  def stolen(made):
    i, action = first("Switch", made)
    late = {"Start": {"execution": [0, 0], "cell": action["Switch"]["cell"]}}
    made[i][1]["actions"].append(late)

  assert "placed on cell 0" in faults(stolen)
  wide = sched.Layout(tuple(dataclasses.replace(c, slots=1) for c in e.layout))
  assert "of 1 executions" in "\n".join(
    event_log.audit(wide, e.law, records).faults
  )


# Resuming, over a real clock: files are written by threads.


def test_a_run_that_is_stopped_goes_on_from_its_files(tmp_path):
  from gyre.store.rollouts import RolloutStore

  e = emulation(steps=5, phi=0.5, mu=2)
  e = dataclasses.replace(
    e, profile=dataclasses.replace(e.profile, speedup=60.0)
  )
  records, done, lives = [], {}, 0

  async def life(after_s):
    with RolloutStore(tmp_path / "rollouts.sqlite") as store:
      run = emulated_run.EmulatedRun(e, directory=tmp_path, store=store)
      try:
        async with asyncio.timeout(after_s):
          return await run.run()
      except TimeoutError:
        return None
      finally:
        records.extend(run.log.records)
        assert not done.keys() & run.work.executions.keys()
        done.update(run.work.executions)

  outcome = None
  while outcome is None:
    lives += 1
    outcome = asyncio.run(life(0.25 * lives))
  assert lives > 1
  books = event_log.audit(e.layout, e.law, records)
  assert not books.faults and books.lives == lives
  trained = [g for groups in books.applied.values() for g in groups]
  assert len(set(trained)) == len(trained) == e.steps * e.law.batch
  assert sorted(outcome.staleness) == sorted(books.staleness)
  with RolloutStore(tmp_path / "rollouts.sqlite", readonly=True) as store:
    assert len(store.execution_ids("train")) == len(done)
