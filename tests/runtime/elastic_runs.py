"""Small emulated runs, and cells that die and fail when they are told to."""

import asyncio
import dataclasses
import random

from gyre.elastic import scheduler as sched
from gyre.rollout.engine import EngineDown
from gyre.rollout.profile import Profile
from gyre.runtime import emulated_run
from gyre.runtime import emulation as emulation_lib
from gyre.runtime.cell import CellError
from gyre.runtime.emulated_cell import EmulatedCore
from gyre.sim import workload

PROFILE = Profile(
  speedup=1.0,
  f=0.9,
  x0=4.0,
  token_s=1.0,
  stream_s=2.0,
  update_s=30.0,
  alpha=0.97,
  join_s=1.0,
  serve_s=0.5,
  publish_s=0.5,
)
CALLS = (
  "serve",
  "join",
  "work",
  "sums",
  "reset",
  "init",
  "apply",
  "weights",
  "resize",
  "close",
)


def layout(cells=3, slots=6, kind="core", standalone=0):
  """A core (or a trainer) and satellites, and standalone cells."""
  kinds = [kind] + ["satellite"] * (cells - 1) + ["standalone"] * standalone
  return sched.Layout(
    tuple(
      sched.Cell(f"cell {i}", (i,), slots, k, 1.0) for i, k in enumerate(kinds)
    )
  )


def emulation(
  phi=0.5, mu=2, batch=4, size=2, steps=6, cells=None, window=1, **changes
):
  """A run of small executions: 6 s on average."""
  fields = {
    "layout": cells or layout(),
    "law": sched.Law(phi, mu, batch, size, window),
    "workload": workload.LogNormal(
      mean=6.0, sigma=0.6, correlation=0.3, group_size=size, timeout=60.0
    ),
    "profile": PROFILE,
    "steps": steps,
    "parts": 2,
    "calls": 2,
  }
  return emulation_lib.Emulation(**(fields | changes))


class UnevenWork(emulation_lib.EmulatedWork):
  """No two micro-steps of an update have the same share; they add up to 1.

  Attributes:
    composed: groups, in their order.
    kept: updates, in their order.
  """

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.composed, self.kept = [], []

  async def keep(self, update):
    self.kept.append(update)

  async def commit(self, core, update, metrics):
    assert update in self.kept
    await super().commit(core, update, metrics)

  async def compose(self, update, group):
    self.composed.append(group)
    place = len(self._claims.get(update, ()))
    made = await super().compose(update, group)
    parts, batch = self.emulation.parts, self.emulation.law.batch
    weights = [1 + 0.1 * n * n for n in range(batch * parts)]
    mine = weights[place * parts : (place + 1) * parts]
    return [
      (w / sum(weights), groups)
      for w, (_, groups) in zip(mine, made, strict=True)
    ]


class SlowWork(UnevenWork):
  """What is composed takes long, as it does of long executions."""

  busy = False

  async def compose(self, update, group):
    assert not self.busy
    self.busy = True
    await asyncio.sleep(0.5 + group % 3)
    self.busy = False
    return await super().compose(update, group)

  async def keep(self, update):
    await asyncio.sleep(60.0 * (update % 2))
    await super().keep(update)


class Mortal:
  """A cell that dies and comes back, and whose transfers can fail.

  Attributes:
    fails: "early" or "late": how the next serve or join does.
  """

  def __init__(self, make):
    self._make, self.fails = make, ""
    self.row_multiple, self.reference = 1, None
    self._inner = make()
    self.name = self._inner.name
    self.dead = None

  def born(self):
    """A new process: nothing is left of the old."""
    self._inner, self.dead = self._make(), None

  async def die(self):
    """Whatever was asked of it fails, and all that will be."""
    death = self._death()
    if not death.done():
      death.set_result(None)
      if self._inner.engine is not None:
        await self._inner.engine.close()

  def _death(self):
    if self.dead is None:
      self.dead = asyncio.get_running_loop().create_future()
    return self.dead

  @property
  def engine(self):
    return self._inner.engine

  @property
  def role(self):
    return self._inner.role

  def __getattr__(self, name):
    if name not in CALLS:
      raise AttributeError(name)
    return lambda *args: self._call(name, *args)

  async def _call(self, name, *args):
    fails = ""
    if name in ("serve", "join"):
      fails, self.fails = self.fails, ""
    death = self._death()
    if death.done():
      raise EngineDown(f"{self.name} is dead")
    if fails == "early":
      raise CellError(f"{self.name} cannot {name}")
    work = asyncio.ensure_future(getattr(self._inner, name)(*args))
    try:
      await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
      work.cancel()  # its process is told
      raise
    if death.done():
      work.cancel()
      await asyncio.gather(work, return_exceptions=True)
      raise EngineDown(f"{self.name} is dead")
    if fails == "late":
      # What it held is gone, and so is what it served.
      self._inner.role = "idle"
      await self._inner.reset()
      if self._inner.engine is not None:
        await self._inner.engine.sleep()
      raise CellError(f"{self.name} failed in {name}")
    return await work


class SlowSums(EmulatedCore):
  """Its sums are large, and on their way for long.

  Attributes:
    handing: (begin, end) of each time that it handed some over.
    worked, applied: end of each micro-step, begin of each optimizer step.
  """

  hands_s = 7.0

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.handing, self.worked, self.applied = [], [], []

  async def work(self, batch, extras=None):
    out = await super().work(batch, extras)
    self.worked.append(asyncio.get_running_loop().time())
    return out

  async def sums(self):
    begin = asyncio.get_running_loop().time()
    if self._micro_steps:
      await asyncio.sleep(self.hands_s)
      self.handing.append((begin, begin + self.hands_s))
    return await super().sums()

  async def apply(self, sums, version):
    self.applied.append(asyncio.get_running_loop().time())
    return await super().apply(sums, version)


class SlowAgain(EmulatedCore):
  """In training, it takes long to take later weights."""

  again_s = 20.0

  async def join(self, weights, version):
    if self.role == "train" and weights is not None:
      await asyncio.sleep(self.again_s)
    await super().join(weights, version)


def mortal(run_of, kind=None):
  """Cells of a run, each of them mortal, or of another kind."""

  def made(name):
    cell = emulated_run.cells(run_of)[name]
    if kind is None:
      return cell
    return kind(name, cell.profile, executions=run_of.executions)

  return {
    name: Mortal(lambda name=name: made(name))
    for name in emulated_run.cells(run_of)
  }


async def disturb(run, rng, *, every=4.0, fails=0.0, times=30):
  """Kills cells at random moments, and brings them back; transfers fail."""
  tasks = set()

  async def kill(name):
    cell = run.workers[name]
    news_first = rng.random() < 0.5
    if news_first:
      run.down(name, "killed")
    await cell.die()
    if not news_first:
      await asyncio.sleep(rng.choice([0.0, 0.01, 0.5]))
      run.down(name, "killed")
    await asyncio.sleep(rng.choice([0.05, 1.0, 5.0]))
    cell.born()
    run.up(name)
    busy.discard(name)

  busy = set()
  for _ in range(times):
    await asyncio.sleep(rng.expovariate(1 / every))
    name = rng.choice(sorted(run.workers))
    if name in busy:
      continue
    if rng.random() < fails and run.log.began is not None:
      run.workers[name].fails = rng.choice(["early", "late"])
    else:
      busy.add(name)
      tasks.add(asyncio.ensure_future(kill(name)))


async def conducted(run, *beside, timeout_s=5000.0):
  """Runs, with others beside it that end when it does."""
  tasks = [asyncio.ensure_future(x) for x in beside]
  try:
    async with asyncio.timeout(timeout_s):
      return await run.run()
  finally:
    for task in tasks:
      task.cancel()


def check(run, outcome):
  """What holds of every run that ends, whatever happened to its cells."""
  e = run.emulation
  books = run.audit()
  assert not books.faults, books.faults[:5]
  assert sorted(books.applied) == list(range(1, e.steps + 1))
  trained = [g for groups in books.applied.values() for g in groups]
  assert len(trained) == len(set(trained)) == e.steps * e.law.batch
  assert sorted(outcome.staleness) == sorted(books.staleness)
  consumed = [
    action["Consume"]["group"]
    for _, made in run.log.records
    for action in made["actions"]
    if "Consume" in action
  ]
  if isinstance(run.work, UnevenWork):
    assert run.work.composed == consumed
  bound = e.law.maximum()
  assert bound is None or max(d for *_, d in outcome.staleness) <= bound
  whole = {(g, i) for g in trained for i in range(e.law.group_size)}
  assert whole <= run.work.executions.keys()
  # Every micro-step is inside exactly one sum of each pass.
  heard = {update for update, _ in outcome.metrics}
  for update in heard:
    rows = [row for u, row in outcome.metrics if u == update]
    assert len(rows) == e.passes
    for row in rows:
      assert abs(row["emulated/share"] - 1) < 1e-9, (update, row)
      assert row["emulated/micro_steps"] == e.law.batch * e.parts
  return books


def rng(seed):
  """A generator of its own."""
  return random.Random(seed)


def changed(profile=PROFILE, **changes):
  """Another profile."""
  return dataclasses.replace(profile, **changes)
