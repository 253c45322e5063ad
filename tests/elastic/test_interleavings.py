"""The scheduler under random interleavings of events, failures included."""

import dataclasses
import random

import dispatch_law
import pytest
from elastic_world import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
  RuleBasedStateMachine,
  initialize,
  invariant,
  precondition,
  rule,
)

from gyre.elastic import cells
from gyre.elastic import scheduler as sched
from gyre.elastic.cells import Cell, Layout
from gyre.elastic.dispatch import Law


def _divisible(*kinds):
  """Cells of which the first has four devices, and lends some of them."""
  first = Cell("core", (0, 1, 2, 3), 3, kinds[0], 4, divisible=True)
  others = [
    Cell(f"cell{i}", (3 + i,), 3, kind) for i, kind in enumerate(kinds[1:], 1)
  ]
  return Layout((first, *others))


LAYOUTS = (
  cells.fixed_partition(1, 1, 4),
  cells.fixed_partition(1, 2, 2),
  cells.global_switch(2, 3),
  cells.coarse_switch(2, 1, 3),
  cells.fine_switch(2, 1, 3),
  cells.fine_switch(4, 1, 2),
  cells.fine_switch(3, 1, 3, standalone_nodes=1),
  _divisible("core", "satellite"),
  _divisible("trainer", "standalone"),
  _divisible("core", "satellite", "standalone"),
)


@st.composite
def laws(draw):
  batch = draw(st.integers(1, 3))
  law = Law(
    phi=draw(st.integers(0, 2 * batch)) / batch,
    mu=draw(st.integers(1, 3)),
    batch=batch,
    group_size=draw(st.integers(1, 3)),
  )
  window = draw(st.sampled_from([None, 1, 2, 5]))
  over = draw(st.sampled_from([None, 0, 1, 2]))
  bound = None if over is None else law.fifo_max + over
  return Law(law.phi, law.mu, batch, law.group_size, window, bound)


def _kept(law, policy):
  """A law that a policy can keep."""
  if not sched.policies.POLICIES[policy].deadlines:
    return law
  bound = law.fifo_max if law.max_staleness is None else law.max_staleness
  return dataclasses.replace(law, window=None, max_staleness=bound)


class Interleavings(RuleBasedStateMachine):
  """Anything that can happen happens, at any moment."""

  @initialize(
    layout=st.sampled_from(LAYOUTS),
    law=laws(),
    bursts=st.integers(1, 3),
    streaming=st.booleans(),
    endless=st.sampled_from([None, False, True]),
    policy=st.sampled_from(sorted(sched.policies.POLICIES)),
  )
  def start(self, layout, law, bursts, streaming, endless, policy):
    law = _kept(law, policy)
    self.world = World(
      layout,
      law,
      bursts * law.mu,
      streaming=streaming,
      endless=endless,
      policy=policy,
    )
    self.world.begin()

  def _some(self, data, values):
    return data.draw(st.sampled_from(sorted(values)))

  @precondition(lambda self: self.world.where)
  @rule(data=st.data(), scored=st.sampled_from([True, True, True, False]))
  def finish(self, data, scored):
    world = self.world
    execution = self._some(data, world.where)
    if world.stopped:  # an endless run stops with some under way
      event = sched.Finished(world.tick(), execution, scored)
      assert sched.decide(world.state, event) == (world.state, ())
    else:
      world.finish(execution, scored)

  @precondition(lambda self: self.world.where)
  @rule(seed=st.integers(0, 99), count=st.integers(1, 12))
  def finish_some(self, seed, count):
    rng = random.Random(seed)
    for _ in range(count):
      if self.world.where and not self.world.stopped:
        self.world.finish(rng.choice(sorted(self.world.where)))

  @precondition(lambda self: self.world.transfers)
  @rule(fails=st.sampled_from([False, False, False, True]))
  def switch(self, fails):
    (name,) = self.world.transfers
    if fails:
      self.world.switch_fails(name)
    else:
      self.world.switch_done(name)

  @precondition(lambda self: self.world.publishing is not None)
  @rule()
  def publish(self):
    self.world.publish_done()

  @precondition(lambda self: self.world.trains())
  @rule(data=st.data())
  def train(self, data):
    self.world.train(self._some(data, self.world.trains()))

  @precondition(lambda self: self.world.trains() and self.world.claims)
  @rule(seed=st.integers(0, 99))
  def train_all(self, seed):
    rng = random.Random(seed)
    for _ in self.world.claims:
      trains = self.world.trains()
      if trains:
        self.world.train(rng.choice(trains))

  @precondition(lambda self: self.world.drained and not self.world.told_drained)
  @rule()
  def drain(self):
    self.world.drain()

  @precondition(lambda self: self.world.applying)
  @rule()
  def commit(self):
    self.world.commit()

  @rule(data=st.data())
  def down(self, data):
    alive = [n for n, s in self.world.sites.items() if s.holder != "dead"]
    if alive and data.draw(st.integers(0, 2)) == 0:
      self.world.down(self._some(data, alive))

  @precondition(lambda self: self.world.dead())
  @rule(data=st.data())
  def up(self, data):
    self.world.up(self._some(data, self.world.dead()))

  @precondition(lambda self: self.world.whole.divisible)
  @rule(devices=st.integers(1, 4))
  def ask(self, devices):
    self.world.ask(devices)

  @precondition(lambda self: self.world.resizing)
  @rule(fails=st.sampled_from([False, False, True]))
  def resize(self, fails):
    if fails:
      self.world.resize_fails()
    else:
      self.world.resized()

  @rule(now=st.sampled_from([False, False, False, False, True]))
  def cut(self, now):
    """The run ends here, and goes on from what is stored."""
    if now:
      self.world.resume()

  @rule(data=st.data())
  def again(self, data):
    """News heard before, in any order, changes nothing."""
    world = self.world
    event = data.draw(st.sampled_from(world.past))
    if isinstance(event, sched.Drained) and not world.told_drained:
      return  # a new one may be true; its source tells them in order
    if isinstance(event, sched.ResizeAsked):
      return  # a wish may be said again
    state = world.state
    assert sched.decide(state, event) == (state, ())

  @rule(
    group=st.integers(-1, 60),
    index=st.integers(-1, 4),
    number=st.integers(0, 9),
    name=st.sampled_from(["core", "cell1", "trainer", "nowhere"]),
  )
  def nonsense(self, group, index, number, name):
    """News that can't be changes nothing."""
    world, now = self.world, self.world.time
    events = [
      sched.SwitchDone(now, name, 10_000),
      sched.SwitchFailed(now, name, 10_000),
      sched.CellDown(now, name, 10_000),
      sched.CellUp(now, name, 10_000),
    ]
    unfinished = set(world.where) | world.waiting
    if (group, index) not in unfinished:
      events.append(sched.Finished(now, (group, index)))
    if number != world.version + 1:
      events += [sched.Drained(now, number), sched.Applied(now, number)]
    if number != world.publishing:
      events.append(sched.Published(now, number))
    state = world.state
    for event in events:
      assert sched.decide(state, event) == (state, ())

  @invariant()
  def something_can_happen(self):
    world = getattr(self, "world", None)
    if world is not None and not world.stopped:
      assert world.choices()

  def teardown(self):
    world = getattr(self, "world", None)
    if world is None:
      return
    _to_the_end(world)
    bursts = world.steps // world.law.mu
    burst = world.law.mu * world.law.batch
    if world.dropped or world.state.plan.endless:
      return
    if world.law.extra // burst < bursts:
      mean = sum(world.committed_staleness) / len(world.committed)
      assert mean == pytest.approx(
        dispatch_law.cold_start_mean(world.law, bursts)
      )


def _law(rng):
  batch = rng.randint(1, 3)
  phi = rng.randint(0, 2 * batch) / batch
  mu, size = rng.randint(1, 3), rng.randint(1, 3)
  over = rng.choice([None, 0, 1, 2])
  bound = None if over is None else Law(phi, mu, batch, size).fifo_max + over
  return Law(phi, mu, batch, size, rng.choice([None, 1, 2, 5]), bound)


def _adversary(world, rng):
  """One thing that should not happen, or nothing."""
  act = rng.choice(["down", "fail", "ask", "cut", "unscored", "again", "again"])
  alive = [n for n, s in world.sites.items() if s.holder != "dead"]
  if act == "down" and alive:
    world.down(rng.choice(alive))
  elif act == "fail" and world.transfers:
    world.switch_fails(world.transfers[0])
  elif act == "fail" and world.resizing:
    world.resize_fails()
  elif act == "ask" and world.whole.divisible:
    world.ask(rng.randint(1, 4))
  elif act == "cut" and rng.random() < 0.3:
    world.resume()
  elif act == "unscored" and world.where:
    world.finish(rng.choice(sorted(world.where)), False)
  elif act == "again":
    event = rng.choice(world.past)
    if not isinstance(event, (sched.Drained, sched.ResizeAsked)):
      assert sched.decide(world.state, event) == (world.state, ())


def _walk(seed):
  """A long run with an adversary; some starve the oldest executions."""
  rng = random.Random(seed)
  policy = rng.choice(sorted(sched.policies.POLICIES))
  law = _kept(_law(rng), policy)
  world = World(
    rng.choice(LAYOUTS),
    law,
    rng.randint(1, 5) * law.mu,
    streaming=rng.random() < 0.5,
    endless=rng.choice([None, True, False]),
    policy=policy,
  )
  world.begin()
  starves = rng.random() < 0.3
  for _ in range(rng.randint(5, 200)):
    if world.stopped:
      break
    if rng.random() < 0.2:
      _adversary(world, rng)
    elif starves and world.where and rng.random() < 0.6:
      world.finish(max(world.where))
    else:
      rng.choice(world.choices())(rng)
  _to_the_end(world)
  return world


def _to_the_end(world):
  """When nothing fails any more a run comes to its end."""
  for name in world.dead():
    if not world.stopped and name in world.sites:
      world.up(name)
  world.run(random.Random(0), 20_000)
  assert world.stopped
  assert len(world.committed) == world.steps * world.law.batch
  assert not set(world.committed) & set(world.dropped)


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_walks(first):
  for seed in range(first, first + 100):
    _walk(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 21_000, 1000))
def test_many_walks(first):
  for seed in range(first, first + 1000):
    _walk(seed)


_COMMON = {
  "deadline": None,
  "suppress_health_check": list(HealthCheck),
}
TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
  max_examples=500, stateful_step_count=25, **_COMMON
)


class TestManyInterleavings(Interleavings.TestCase):
  """The same, for long."""

  settings = settings(max_examples=20_000, stateful_step_count=25, **_COMMON)


TestManyInterleavings.pytestmark = [pytest.mark.slow]
