"""The virtual clock against closed forms and conservation laws."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from gyre.elastic import policies, scheduler
from gyre.elastic.cells import (
  Cell,
  Layout,
  fine_switch,
  fixed_partition,
  global_switch,
)
from gyre.elastic.dispatch import Law
from gyre.sim import tables
from gyre.sim.clock import mean_and_spread, simulate
from gyre.sim.fluids import Costs, SimulationError
from gyre.sim.workload import LogNormal, Replay, Work

FREE = Costs(to_train=0.0, to_rollout=0.0)


def _node_seconds(run, layout, role):
  nodes = {cell.name: cell.nodes for cell in layout.cells}
  return sum(
    nodes[s.cell] * (s.end - s.start) for s in run.spans if s.role == role
  )


def _fixed(*works):
  """A workload of one group of the given works, again and again."""
  return Replay({0: tuple(Work(float(w)) for w in works)})


def test_one_execution_on_one_cell():
  costs = Costs(
    serial=0.75,
    load=2.0,
    update_work=100.0,
    alpha=0.5,
    to_train=8.0,
    to_rollout=3.0,
    publish=5.0,
  )
  run = simulate(
    global_switch(4, 1),
    Law(0, 1, 1, 1),
    _fixed(60.0),
    costs,
    steps=3,
    streaming=False,
  )
  # One execution on 4 nodes: load 1/4, slowed by 0.75 + 0.25 * (1/4)/2.
  # Training: 100 / sqrt(4).
  update = 60.0 * (0.75 + 0.25 * 0.25 / 2) + 8.0 + 50.0
  between = 5.0 + 3.0
  want = [update + i * (update + between) for i in range(3)]
  assert run.applied == pytest.approx(want)
  assert run.seconds == pytest.approx(want[-1])
  assert [d for *_, d in run.staleness] == [0, 0, 0]
  assert run.switches == 5 and run.executions == 3
  roles = [s.role for s in run.spans][:4]
  assert roles == ["rollout", "to_train", "train", "to_rollout"]


@pytest.mark.parametrize("order", [(1, 2, 4), (4, 1, 2)])
def test_a_pool_that_is_only_shared_is_processor_sharing(order):
  # f = 0 and x0 = 1 on one node: n executions run at rate 1/n each.
  run = simulate(
    global_switch(1, 3),
    Law(0, 1, 1, 3),
    _fixed(*order),
    dataclasses.replace(FREE, serial=0.0, load=1.0),
    steps=1,
    streaming=False,
  )
  assert sorted(run.durations) == pytest.approx([3.0, 5.0, 7.0])
  assert run.seconds == pytest.approx(7.0)


def test_slots_make_executions_wait():
  # Two slots, works 3, 5, 4: the third starts when the first ends.
  run = simulate(
    global_switch(1, 2), Law(0, 1, 1, 3), _fixed(3, 5, 4), FREE, steps=1
  )
  assert run.seconds == pytest.approx(7.0)
  assert run.rollout_busy == pytest.approx(12 / 14)


def test_a_wall_timeout_ends_an_execution():
  w = Replay({0: (Work(3.0), Work(50.0))}, timeout=10.0)
  run = simulate(global_switch(1, 2), Law(0, 1, 1, 2), w, FREE, steps=2)
  assert run.applied == pytest.approx([10.0, 20.0])
  assert sorted(run.durations) == pytest.approx([3.0, 3.0, 10.0, 10.0])


def test_cells_that_join_share_what_is_left_of_an_update():
  # Two cells of one slot; works 2 and 6, one group each, 10 node-seconds an
  # update of two groups (5 each). At 2 the core leaves: by 6 it has trained
  # the first group alone (4 of 5), then the satellite joins with the second
  # group: 1 + 5 left on two nodes, 3 more seconds.
  w = Replay({0: (Work(2.0),), 1: (Work(6.0),)})
  run = simulate(
    fine_switch(2, 1, 1),
    Law(0, 1, 2, 1),
    w,
    dataclasses.replace(FREE, update_work=10.0),
    steps=1,
  )
  assert run.seconds == pytest.approx(9.0)
  assert run.train_busy == pytest.approx(1.0)
  assert _node_seconds(run, fine_switch(2, 1, 1), "train") == 7 + 3


@pytest.mark.parametrize(
  "phi,mu", [(0, 1), (0.5, 1), (0.5, 3), (1.5, 1), (0, 4), (1.25, 2)]
)
@pytest.mark.parametrize("window", [None, 1, 9])
def test_mean_staleness_is_the_law_s(phi, mu, window):
  law = Law(phi, mu, 4, 2, window=window)
  bursts = 12
  run = simulate(
    fine_switch(4, 1, 6),
    law,
    LogNormal(mean=100.0, sigma=0.6, group_size=2, seed=1),
    dataclasses.replace(FREE, update_work=60.0, publish=1.0),
    steps=bursts * mu,
  )
  # Cold start of M bursts, phi = a*mu + rho.
  a, rho = divmod(phi, mu)
  want = phi + (mu - 1) / 2
  want -= (phi + mu * a * (a - 1) / 2 + a * rho) / bursts
  if window == 1:
    assert run.max_staleness <= np.ceil(phi) + mu - 1
  elif window:
    assert run.max_staleness <= np.ceil(phi) + mu - 1 + 2
  assert run.mean_staleness == pytest.approx(want)


def _layouts():
  return {
    "fixed": fixed_partition(2, 2, 6),
    "global": global_switch(4, 6),
    "fine": fine_switch(4, 1, 6, standalone_nodes=1),
  }


@pytest.mark.parametrize("name", ["fixed", "global", "fine"])
@pytest.mark.parametrize("streaming", [False, True])
def test_work_is_conserved(name, streaming):
  work = LogNormal(mean=100.0, sigma=0.5, correlation=0.3, group_size=4, seed=2)
  costs = Costs(serial=1.0, update_work=500.0, to_train=2.0, to_rollout=1.0)
  law = Law(0.5, 2, 4, 4)
  layout = _layouts()[name]
  run = simulate(layout, law, work, costs, steps=10, streaming=streaming)
  # At f = 1 an execution lasts as long as its work, wherever it ran.
  want = [work.work((g, i)).seconds for g in range(40) for i in range(4)]
  assert sorted(run.durations) == pytest.approx(sorted(want))
  # At alpha = 1 an update takes its node-seconds, whoever came and went.
  trained = run.train_busy * _node_seconds(run, layout, "train")
  assert trained == pytest.approx(5000.0)
  # Every group once.
  assert sorted(g for _, g, _ in run.staleness) == list(range(40))
  counts = collections.Counter(u for u, *_ in run.staleness)
  assert set(counts.values()) == {4} and len(counts) == 10
  # The roles of a cell follow each other without a gap.
  for cell in _layouts()[name]:
    spans = [s for s in run.spans if s.cell == cell.name]
    assert spans[0].start == 0 and spans[-1].end == run.seconds
    for s, t in itertools.pairwise(spans):
      assert s.end == t.start and s.role != t.role


def test_groups_without_a_score_are_replaced():
  w = Replay({0: (Work(1.0),), 1: (Work(2.0, scored=False),)})
  run = simulate(global_switch(1, 4), Law(0, 1, 2, 1), w, FREE, steps=2)
  assert run.dropped >= 1
  assert len(run.staleness) == 4
  assert all(group % 2 == 0 for _, group, _ in run.staleness)


class _Shuffled:
  """Another future: what is unfinished at `time` has other work left."""

  def __init__(self, base, left, seed):
    self.timeout = base.timeout
    self._base = base
    names = sorted(left)
    order = np.random.default_rng(seed).permutation(len(names))
    swapped = [left[names[j]] for j in order]
    self._work = {
      name: base.work(name).seconds - left[name] + other
      for name, other in zip(names, swapped, strict=True)
    }

  def work(self, execution):
    if execution in self._work:
      return Work(self._work[execution])
    return self._base.work(execution)


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_decisions_do_not_depend_on_the_future(policy, share):
  # At f = 1 an execution has done as much as it has run: what is left of each
  # that is unfinished at `time` is known, and is dealt out anew among them.
  work = LogNormal(mean=100.0, sigma=0.5, correlation=0.4, group_size=4, seed=4)
  costs = Costs(update_work=300.0, publish=5.0)
  layout = fine_switch(4, 1, 6)
  law = tables.guaranteed(Law(0.5, 2, 4, 4), None, policy)

  def run(w):
    return simulate(layout, law, w, costs, steps=8, policy=policy, record=True)

  first = run(work)
  at = int(share * len(first.decisions))
  time = (first.decisions[at][0].time + first.decisions[at + 1][0].time) / 2
  left = {}
  for event, actions in first.decisions:
    if event.time > time:
      break
    if isinstance(event, scheduler.Finished):
      left.pop(event.execution)
    for a in actions:
      if isinstance(a, scheduler.Admit):
        left |= {(a.group, i): None for i in range(4)}
      if isinstance(a, scheduler.Start):
        left[a.execution] = event.time
  left = {
    name: work.work(name).seconds - (0 if t is None else time - t)
    for name, t in left.items()
  }
  assert len(left) > 4 and min(left.values()) > 0
  other = run(_Shuffled(work, left, seed=1))

  def past(result):
    return [x for x in result.decisions if x[0].time <= time]

  assert len(past(first)) > 10
  assert past(other) == past(first)
  assert other.decisions != first.decisions


def _ask(monkeypatch, *actions):
  """A scheduler whose first decision is these actions."""
  monkeypatch.setattr(scheduler, "decide", lambda s, e: (s, actions))
  return simulate(
    global_switch(1, 1), Law(0, 1, 1, 1), _fixed(1.0), FREE, steps=1
  )


@pytest.mark.parametrize(
  "actions,match",
  [
    ([scheduler.Start((0, 0), "core")] * 2, "1 slots are taken"),
    (
      [scheduler.Switch("core", "train"), scheduler.Start((0, 0), "core")],
      "whose role is to_train",
    ),
    (
      [scheduler.Start((0, 0), "core"), scheduler.Switch("core", "train")],
      "core leaves with 1 executions",
    ),
    ([scheduler.Switch("core", "rollout")], "whose role is rollout"),
    ([scheduler.Admit(0, 0), scheduler.Consume(0, 1)], "1 executions unfin"),
    ([scheduler.Apply(1)], "before it is drained"),
    ([scheduler.Rehost("core")], "no Rehost"),
    ([], "nothing can happen after 0 s: 0 of 1 updates"),
  ],
)
def test_what_cannot_be_is_refused(monkeypatch, actions, match):
  with pytest.raises(SimulationError, match=match):
    _ask(monkeypatch, *actions)


@pytest.mark.parametrize(
  "bad",
  [
    {"serial": 1.2},
    {"load": 0.0},
    {"alpha": 0.0},
    {"update_work": -1.0},
    {"publish": -2.0},
  ],
)
def test_costs_out_of_range_are_refused(bad):
  with pytest.raises(ValueError, match=str(next(iter(bad.values())))):
    Costs(**bad)


def test_mean_and_spread():
  assert mean_and_spread([3.0]) == (3.0, 0.0)
  mean, spread = mean_and_spread([1.0, 2.0, 3.0, 4.0])
  assert mean == 2.5 and spread == pytest.approx(np.std([1, 2, 3, 4], ddof=1))


def test_cells_of_a_layout_keep_their_size():
  # A pool of two unequal standalone cells beside a trainer.
  layout = Layout(
    (
      Cell("t", (0,), 0, "trainer", 1),
      Cell("a", (1,), 1, "standalone", 1),
      Cell("b", (2, 3), 2, "standalone", 2),
    )
  )
  run = simulate(layout, Law(0, 1, 1, 3), _fixed(1, 1, 1), FREE, steps=2)
  assert _node_seconds(run, layout, "rollout") == pytest.approx(3 * 2.0)
  assert run.seconds == pytest.approx(2.0)
