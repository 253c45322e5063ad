"""Whole runs of the scheduler in a world that checks every action."""

import random

import dispatch_law
import pytest
from elastic_world import World

from gyre.elastic import cells, policies
from gyre.elastic import scheduler as sched
from gyre.elastic.cells import Cell, Layout
from gyre.elastic.dispatch import Law

LAYOUTS = {
  "fixed": cells.fixed_partition(2, 2, 5),
  "global": cells.global_switch(4, 5),
  "coarse": cells.coarse_switch(3, 1, 5),
  "fine": cells.fine_switch(4, 1, 5),
  "fine and standalone": cells.fine_switch(3, 1, 5, standalone_nodes=1),
}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("phi,mu", [(0, 1), (0.5, 3), (1.5, 1), (0, 4)])
def test_runs_to_the_end(name, streaming, phi, mu):
  law = Law(phi, mu, 4, 2, window=9)
  for seed in range(3):
    world = World(LAYOUTS[name], law, 2 * mu + 1, streaming=streaming)
    world.run(random.Random(seed))
    assert world.committed == list(world.consumed)
    assert sorted(world.committed) == list(range((2 * mu + 1) * 4))


def _of(world, kind):
  return [a for _, actions in world.log for a in actions if type(a) is kind]


def _cells(*names):
  return Layout(
    tuple(
      Cell(name, (i,), 4, "satellite" if i else "core")
      for i, name in enumerate(names)
    )
  )


def test_the_waterlevel():
  """A cell leaves iff what is unfinished fits the rest, the core first."""
  world = World(_cells("core", "a", "b"), Law(0, 1, 3, 4), 2)
  world.begin()
  assert [len(s.runs) for s in world.sites.values()] == [4, 4, 4]
  # Later cells stay longest, so they are filled first: group 0 runs on b.
  assert world.sites["b"].runs == {(0, i) for i in range(4)}
  for i in range(3):
    assert world.finish((0, i)) == ()
  # w = 8 <= C_R - C_e = 8, and group 0 is whole.
  actions = world.finish((0, 3))
  moved = [(2, i) for i in range(4)]
  assert actions == (
    sched.Consume(0, 1),
    *(sched.Migrate(e, "core", "b") for e in moved),
    sched.Switch("core", "train", 1),
  )
  # Transfers are serial: a waits until the core is in training.
  for i in range(4):
    assert not any(isinstance(a, sched.Switch) for a in world.finish((1, i)))
  actions = world.switch_done("core")
  assert actions == (sched.Switch("a", "train", 2),)


def test_nothing_to_train_on_nobody_leaves():
  world = World(_cells("core", "a"), Law(0, 1, 2, 2), 1)
  world.begin()
  world.finish((0, 0))
  world.finish((1, 0))
  # w = 2 would fit a alone, but no group is whole.
  assert not _of(world, sched.Switch)


def test_standalone_cells_are_filled_first():
  layout = cells.fine_switch(2, 1, 3, standalone_nodes=1)
  world = World(layout, Law(0, 1, 2, 2), 1)
  world.begin()
  assert [len(world.sites[n].runs) for n in ("pool", "cell1", "core")] == [
    3,
    1,
    0,
  ]


def test_without_streaming_a_burst_waits_for_all_its_groups():
  law = Law(0, 2, 2, 1)
  world = World(cells.global_switch(1, 8), law, 2, streaming=False)
  world.begin()
  for group in range(3):
    assert world.finish((group, 0)) == ()
  actions = world.finish((3, 0))
  assert actions[:2] == (sched.Consume(0, 1), sched.Consume(1, 1))
  assert actions[2:] == (sched.Switch("core", "train", 1),)


def test_the_core_stays_iff_the_next_batch_is_ready():
  stays = World(_cells("core", "a"), Law(2, 1, 1, 1), 4)
  goes = World(_cells("core", "a"), Law(2, 1, 1, 1), 4)
  for world, whole in ((stays, (0, 1, 2)), (goes, (0,))):
    world.begin()
    for group in whole:
      world.finish((group, 0))
    while world.published < 1 and not world.stopped:
      for name in list(world.transfers):
        world.switch_done(name)
      world.train("core")
      if world.applying:
        world.commit()
      elif world.publishing is not None:
        world.publish_done()
      elif world.drained and not world.told_drained:
        world.drain()
  back = [a for a in _of(stays, sched.Switch) if a.role == "rollout"]
  assert "core" not in [a.cell for a in back]
  while goes.transfers:
    goes.switch_done(goes.transfers[0])
  back = [a for a in _of(goes, sched.Switch) if a.role == "rollout"]
  assert "core" in [a.cell for a in back]


def test_a_failed_switch_rolls_back_and_is_tried_again():
  world = World(_cells("core", "a"), Law(0, 1, 1, 2), 1)
  world.begin()
  world.finish((0, 0))
  world.finish((0, 1))
  assert world.transfers == ["core"]
  actions = world.switch_fails("core")
  assert actions == (sched.Switch("core", "train", 2),)
  world.run(random.Random(0))


def test_a_lost_group_is_replaced_at_once():
  world = World(_cells("core", "a"), Law(0, 1, 1, 2), 1)
  world.begin()
  world.finish((0, 0), scored=False)
  actions = world.finish((0, 1), scored=False)
  assert actions[:2] == (sched.Drop(0, "lost"), sched.Admit(1, 0))
  assert len(_of(world, sched.Start)) == 4
  world.run(random.Random(0))
  assert world.committed == [1]
  assert world.dropped == {0: "lost"}


def test_a_partly_scored_group_is_trained():
  world = World(_cells("core", "a"), Law(0, 1, 1, 2), 1)
  world.begin()
  world.finish((0, 0), scored=False)
  assert sched.Consume(0, 1) in world.finish((0, 1))


def test_a_group_that_teaches_nothing_is_replaced():
  world = World(_cells("core", "a"), Law(0, 1, 1, 2), 1, resample=2)
  world.flat = {0, 1}
  world.begin()
  world.finish((0, 0))
  actions = world.finish((0, 1))
  assert actions[:2] == (sched.Drop(0, "flat"), sched.Admit(1, 0))
  world.run(random.Random(0))
  assert world.committed == [2]
  assert world.dropped == {0: "flat", 1: "flat"}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("phi,mu,window", [(0, 1, 1), (0, 3, 1), (0.5, 2, 9)])
def test_replacements_end(phi, mu, window, streaming):
  """At most `resample` times B an update, whatever comes."""
  law = Law(phi, mu, 2, 3, window=window)
  for seed, share in enumerate((0, 0.5, 1)):
    rng = random.Random(seed)
    world = World(_cells("core", "a"), law, 4, streaming=streaming, resample=2)
    world.flat = {g for g in range(99) if rng.random() < share}
    world.run(rng)
    assert len(world.committed) == 8
    flat = len(world.flat & set(world.committed))
    assert len(world.dropped) <= 4 * 4
    assert set(world.dropped.values()) <= {"flat"}
    if share == 1:
      assert (flat, len(world.dropped)) == (8, 16)
    elif flat:
      assert len(world.dropped) >= 4  # an update's share was used up


def test_in_order_of_admission_time_does_not_choose_what_is_replaced():
  """Nor does a resume."""
  law = Law(0, 2, 3, 2, window=1)
  flat = {g for g in range(99) if random.Random(g).random() < 0.6}
  seen = set()
  for seed in range(12):
    rng = random.Random(seed)
    world = World(_cells("core", "a"), law, 4, resample=1)
    world.flat = flat
    world.run(rng)
    seen.add((*world.consumed.items(), *sorted(world.dropped)))
  assert len(seen) == 1
  assert world.dropped and flat & set(world.committed)


def test_a_resumed_group_that_teaches_nothing_is_replaced():
  world = World(_cells("core", "a"), Law(0, 1, 2, 2), 1, resample=2)
  world.flat = {1}
  stored = sched.Resumed(
    version=0,
    groups=((0, 0), (1, 0)),
    finished=(((1, 0), True), ((1, 1), True)),
    flat=(1,),
  )
  state = sched.begin(
    world.layout, world.law, steps=1, resample=2, resume=stored
  )
  _, actions = sched.decide(state, sched.Begin(0.0))
  assert sched.Drop(1, "flat") in actions and sched.Admit(2, 0) in actions


def test_staleness_beyond_the_maximum_is_never_trained():
  """In completion order one group stays behind until it is too stale."""
  law = Law(1, 1, 2, 2, max_staleness=2)
  world = World(cells.fixed_partition(1, 1, 100), law, 8)
  rng = random.Random(0)
  world.begin()
  while not world.stopped:
    able = [e for e in world.where if e[0] != 0]
    others = [c for c in world.choices()[bool(world.where) :]]
    if others:
      rng.choice(others)(rng)
    else:
      world.finish(rng.choice(able))
  assert world.dropped[0] == "stale"
  assert max(world.staleness) <= 2
  assert set(world.dropped.values()) == {"stale"}
  assert len(set(world.committed)) == 16
  # Its replacement carried the version published at that moment.
  drop = next(
    actions for _, actions in world.log if sched.Drop(0, "stale") in actions
  )
  at = drop.index(sched.Drop(0, "stale"))
  assert any(isinstance(a, sched.Admit) for a in drop[at:])


def _core_trains(world, group_size):
  """Group 0 ends, and the core leaves for training."""
  world.begin()
  for i in range(group_size):
    world.finish((0, i))
  world.switch_done("core")
  return world


def test_a_cell_is_called_back_when_nothing_serves():
  """The last rollout cell dies for good: the core itself must serve."""
  world = _core_trains(World(_cells("core", "a"), Law(0, 1, 2, 4), 1), 4)
  assert world.down("a") == (sched.Switch("core", "rollout", 2),)
  actions = world.switch_done("core")
  assert {a.execution for a in actions} == {(1, i) for i in range(4)}
  for i in range(4):
    actions = world.finish((1, i))
  assert sched.Switch("core", "train", 3) in actions
  world.switch_done("core")
  while not world.stopped:
    # The return of `a` would be the last choice; it never comes to that.
    world.choices()[0](random.Random(0))
  assert world.dead() == ["a"]
  assert sorted(world.committed) == [0, 1]


def test_a_satellite_is_called_back_before_the_core():
  """What is unfinished no longer fits; the core goes on as others serve."""
  law = Law(0, 1, 3, 4)
  world = _core_trains(World(_cells("core", "a", "b"), law, 1), 4)
  for i in range(4):
    world.finish((1, i))
  world.switch_done("a")
  # Group 2 runs on b, which dies: 4 executions, and nothing serves.
  assert world.down("b") == (sched.Switch("a", "rollout", 3),)
  world.switch_done("a")
  assert world.sites["core"].holder == "trainer"
  world.run(random.Random(0))


def test_the_core_goes_on_while_others_serve():
  world = World(_cells("core", "a", "b"), Law(0, 1, 3, 4), 1)
  _core_trains(world, 4)
  # 8 executions are left, and 4 slots; but these serve.
  assert world.unfinished == 8
  assert world.down("b") == ()


def test_an_eager_policy_strands_no_execution():
  """A cell leaves only if what it runs fits the others' free slots."""
  eager = policies.Policy("eager", leaves=lambda state, cell: True)
  for seed in range(30):
    law = Law(0.5, 2, 4, 2)
    world = World(LAYOUTS["fine and standalone"], law, 6, policy=eager)
    world.run(random.Random(seed))
    assert len(world.committed) == 24


def test_a_resize_is_not_put_off_by_groups_that_wait():
  """Groups are whole at every moment, and yet an update ends."""
  world = World(_resizable("trainer"), Law(1, 1, 2, 1), 6)
  world.begin()
  for group in range(4):
    world.finish((group, 0))
  world.ask(4)
  while world.resizing is None:
    world.choices()[-1](random.Random(0))
    assert world.version <= 1
  assert world.state.queue.whole
  world.run(random.Random(0))


def test_a_dead_rollout_cell_hands_its_executions_on():
  world = World(_cells("core", "a", "b"), Law(0, 1, 2, 4), 1)
  world.begin()
  running = sorted(world.sites["b"].runs)
  actions = world.down("b")
  assert actions == tuple(sched.Migrate(e, "b", "core") for e in running)
  # No slot is free now: what ran waits first in line, and starts again.
  lost = set(world.sites["a"].runs)
  assert world.down("a") == ()
  assert world.waiting == lost
  assert world.up("b") == (sched.Switch("b", "rollout", 1),)
  actions = world.switch_done("b")
  assert {a.execution for a in actions} == lost
  assert all(a.cell == "b" for a in actions)


def test_a_lost_core_is_rehosted_on_a_training_satellite():
  world = World(_cells("core", "a", "b"), Law(0, 1, 2, 4), 2)
  world.begin()
  for i in range(4):
    world.finish((0, i))
  world.switch_done("core")
  world.train("core")
  for i in range(4):
    world.finish((1, i))
  world.switch_done("a")
  actions = world.down("core")
  assert sched.Rehost("a", 4) in actions or world.transfers == ["b"]
  world.run(random.Random(1))
  assert world.core != "core"
  assert sorted(world.committed) == [0, 1, 2, 3]


def test_a_trainer_that_died_is_rehosted_on_itself():
  world = World(cells.fixed_partition(1, 1, 8), Law(1, 1, 2, 2), 3)
  world.begin()
  world.down("trainer")
  assert world.up("trainer") == (sched.Rehost("trainer", 1),)
  world.run(random.Random(0))
  assert len(world.committed) == 6


def test_news_of_an_earlier_life_changes_nothing():
  world = World(_cells("core", "a"), Law(0, 1, 1, 2), 1)
  world.begin()
  world.finish((0, 0))
  world.finish((0, 1))
  old = world.sites["core"].ticket
  world.down("core")
  world.up("core")
  state = world.state
  for event in (
    sched.SwitchDone(world.time, "core", old),
    sched.SwitchFailed(world.time, "core", old),
    sched.CellDown(world.time, "core", 0),
    sched.CellUp(world.time, "core", 0),
    sched.Finished(world.time, (0, 1)),
    sched.Finished(world.time, (9, 0)),
    sched.Drained(world.time, 2),
    sched.Applied(world.time, 1),
    sched.Published(world.time, 0),
    sched.SwitchDone(world.time, "nowhere"),
    sched.CellDown(world.time, "nowhere"),
    sched.Begin(world.time),
  ):
    assert sched.decide(state, event) == (state, ())
  world.run(random.Random(0))


def test_an_unknown_policy_is_refused():
  with pytest.raises(ValueError, match="policy 'tide' is none of"):
    sched.begin(_cells("core"), Law(0, 1, 1, 1), steps=1, policy="tide")
  with pytest.raises(
    ValueError, match="deadline with window 3 and max_staleness None"
  ):
    law = Law(0, 1, 1, 1, window=3)
    sched.begin(_cells("core"), law, steps=1, policy="deadline")
  with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
    sched.begin(_cells("core"), Law(0, 1, 1, 1), steps=0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_cut_run_loses_and_repeats_nothing(name):
  """Cut at every kind of moment; what is done stays done, once."""
  law = Law(0.5, 2, 4, 2, window=1)
  whole = World(LAYOUTS[name], law, 6).run(random.Random(0))
  for seed in range(12):
    rng = random.Random(seed)
    world = World(LAYOUTS[name], law, 6)
    world.begin()
    for _ in range(3):
      for _ in range(rng.randrange(60)):
        if not world.stopped:
          rng.choice(world.choices())(rng)
      if not world.stopped:
        world.resume()
    world.run(rng)
    # FIFO: the same groups in the same updates, admitted at the same versions.
    assert world.committed == whole.committed
    assert world.consumed == whole.consumed
    assert world.admitted == whole.admitted
    ends = [e for e, _ in world.log if isinstance(e, sched.Finished)]
    assert len({e.execution for e in ends}) == len(ends) == 48


def test_a_group_lost_at_the_cut_is_dropped_at_the_beginning():
  world = World(LAYOUTS["fine"], Law(0.5, 2, 4, 2), 4)
  world.begin()
  actions = world.resume(lost=3)
  assert actions[0] == sched.Drop(3, "lost")
  assert sched.Admit(10, 0) in actions
  world.run(random.Random(0))
  assert 3 not in world.committed


def test_more_steps_go_on_from_a_published_end():
  """The end of a run ends a burst that may be short."""
  law = Law(0.5, 3, 2, 1, window=1)
  world = World(LAYOUTS["fine"], law, 4).run(random.Random(0))
  assert world.published == 4
  world.steps = 9
  world.resume()
  world.run(random.Random(0))
  assert len(world.committed) == 18
  assert max(world.staleness) <= law.maximum()


@pytest.mark.parametrize(
  "changes,words",
  [
    ({"consumed": (0,)}, "1 groups in commits at version 2"),
    ({"groups": ((1, 0),)}, r"groups \[1\] are both in commits"),
    ({"published": 1}, "published version 1 at version 2 ends no burst"),
  ],
)
def test_a_stored_run_that_contradicts_itself_is_refused(changes, words):
  fields = {"version": 2, "groups": ((4, 2),), "consumed": (0, 1, 2, 3)}
  with pytest.raises(ValueError, match=words):
    sched.begin(
      LAYOUTS["fine"],
      Law(0, 2, 2, 1),
      steps=4,
      resume=sched.Resumed(**(fields | changes)),
    )


def test_the_steady_policy_keeps_the_law_to_the_end():
  """Q_b is full at the last boundary too, and E[d] is the same."""
  law = Law(0.5, 3, 4, 2)
  d = {}
  for policy in ("waterlevel", "steady"):
    world = World(LAYOUTS["fine"], law, 60, policy=policy)
    world.run(random.Random(5))
    d[policy] = sum(world.staleness) / len(world.staleness)
    surplus = len(world.admitted) - len(world.committed)
    assert surplus == (law.extra if policy == "steady" else 0)
  assert d["waterlevel"] == pytest.approx(dispatch_law.cold_start_mean(law, 20))
  assert d["steady"] == pytest.approx(
    dispatch_law.cold_start_mean(law, 20), abs=0.05
  )


def _resizable(kind):
  second = "standalone" if kind == "trainer" else "satellite"
  core = Cell("core", tuple(range(8)), 8, kind, 8, divisible=True)
  return Layout((core, Cell("other", (8, 9), 8, second, 2)))


@pytest.mark.parametrize("kind", ["trainer", "core"])
def test_half_the_core_is_lent_and_taken_back(kind):
  world = World(_resizable(kind), Law(0.5, 2, 4, 2), 12)
  rng = random.Random(3)
  sizes = []
  asked = {20: 4, 90: 8}
  world.begin()
  while not world.stopped:
    if len(world.log) in asked:
      world.ask(asked.pop(len(world.log)))
    rng.choice(world.choices())(rng)
    size = len(world.sites["core"].cell.devices)
    if not sizes or sizes[-1] != size:
      sizes.append(size)
  assert sizes == [8, 4, 8]
  lent = [a for a in _of(world, sched.Start) if a.cell == "core-lent"]
  assert lent, "the lent devices served nothing"
  # One log of consumed groups throughout.
  assert sorted(world.committed) == list(range(48))


def test_a_resize_that_cannot_be_is_refused():
  state = World(_cells("core", "a"), Law(0, 1, 1, 1), 1).state
  with pytest.raises(ValueError, match="core core is not divisible"):
    sched.ask_resize(state, 0.0, 1)
  state = World(_resizable("core"), Law(0, 1, 1, 1), 1).state
  with pytest.raises(ValueError, match="9 devices for the core; it needs 1"):
    sched.ask_resize(state, 0.0, 9)
