"""The clairvoyant bound: equal where it is reached, never passed."""

import dataclasses
import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.elastic import policies
from gyre.elastic.cells import (
  coarse_switch,
  fine_switch,
  fixed_partition,
  global_switch,
)
from gyre.elastic.dispatch import Law
from gyre.sim.bound import lower_bound
from gyre.sim.clock import simulate
from gyre.sim.fluids import Costs
from gyre.sim.workload import LogNormal, Replay, Work

FREE = Costs(to_train=0.0, to_rollout=0.0)
STEPS = 6


def test_reached_by_a_run_that_wastes_nothing():
  # Equal works on full slots, then training on all nodes: no second is lost.
  # Three bursts of 6 + 4 / 2 = 8 s each.
  costs = dataclasses.replace(FREE, update_work=4.0)
  law = Law(0, 1, 2, 2)
  work = Replay({0: (Work(6.0), Work(6.0))})
  layout = global_switch(2, 2)
  run = simulate(layout, law, work, costs, steps=3, streaming=False)
  bound = lower_bound(law, work, costs, nodes=2, slots=2, steps=3)
  assert run.seconds == pytest.approx(24)
  assert bound == pytest.approx(24)


def test_by_latency_where_nodes_abound():
  # One group an update on many nodes: each burst lasts its longest execution.
  costs = dataclasses.replace(FREE, publish=2.0)
  work = Replay({0: (Work(3.0), Work(9.0))}, timeout=8.0)
  bound = lower_bound(Law(0, 1, 1, 2), work, costs, nodes=64, slots=4, steps=4)
  assert bound == pytest.approx(4 * 8 + 3 * 2)


def test_extra_groups_take_stragglers_out_of_a_burst():
  # phi = 1/2 of 2: of 3 groups the burst needs 2, the slow one can wait. In
  # the last burst without end it is left behind, else it is waited for.
  work = Replay({0: (Work(1.0),), 1: (Work(1.0),), 2: (Work(50.0),)})
  law = Law(0.5, 1, 2, 1)
  args = {"nodes": 64, "slots": 1, "steps": 1}
  assert lower_bound(law, work, FREE, **args) == pytest.approx(1.0)
  args["steps"] = 2
  endless = lower_bound(law, work, FREE, **args, endless=True)
  ended = lower_bound(law, work, FREE, **args)
  assert endless == pytest.approx(2.0) and ended >= endless


LAYOUTS = {
  "fixed": (fixed_partition(2, 2, 3), 4),
  "global": (global_switch(4, 3), 4),
  "coarse": (coarse_switch(3, 1, 3), 4),
  "fine": (fine_switch(4, 1, 3), 4),
}


POLICIES = {
  **policies.POLICIES,
  "eager": policies.Policy("eager", leaves=lambda state, cell: True),
}


def _foreseen(work, law, policy, longest_first):
  """The same groups, those admitted together in the order of their lengths.

  A policy that starts them as they come then is one that knows every work.
  """
  groups = law.batch * STEPS + (law.extra if policy.endless else 0)
  edges = range(law.boundary, groups, law.mu * law.batch)
  drawn = [
    tuple(work.work((g, i)) for i in range(law.group_size))
    for g in range(groups)
  ]
  ordered = []
  for first, end in itertools.pairwise((0, *edges, groups)):
    ordered += sorted(
      drawn[first:end],
      key=lambda works: max(work.seconds for work in works),
      reverse=longest_first,
    )
  return Replay(dict(enumerate(ordered)), timeout=work.timeout)


@settings(max_examples=60, deadline=None)
@given(
  name=st.sampled_from(sorted(LAYOUTS)),
  law=st.sampled_from([(0, 1), (0.5, 3), (1.5, 1), (0, 3), (1, 2), (2.5, 1)]),
  seed=st.integers(0, 10**6),
  sigma=st.sampled_from([0.0, 0.3, 1.0]),
  serial=st.sampled_from([0.0, 0.5, 1.0]),
  update=st.sampled_from([0.0, 40.0, 400.0]),
  alpha=st.sampled_from([0.6, 1.0]),
  timeout=st.sampled_from([60.0, 200.0, 1e9]),
  streaming=st.booleans(),
  policy=st.sampled_from(sorted(POLICIES)),
  longest_first=st.sampled_from([None, True, False]),
)
def test_no_run_passes_it(
  name,
  law,
  seed,
  sigma,
  serial,
  update,
  alpha,
  timeout,
  streaming,
  policy,
  longest_first,
):
  layout, nodes = LAYOUTS[name]
  work = LogNormal(
    mean=100.0,
    sigma=sigma,
    correlation=0.3,
    timeout=timeout,
    group_size=2,
    seed=seed,
  )
  costs = Costs(serial, 2.0, update, alpha, 1.0, 0.5, 3.0)
  policy, law = POLICIES[policy], Law(*law, 2, 2)
  if policy.deadlines:
    law = dataclasses.replace(law, max_staleness=law.fifo_max)
  bound = functools.partial(
    lower_bound,
    law,
    costs=costs,
    nodes=nodes,
    slots=3,
    steps=STEPS,
    endless=policy.endless,
  )
  least = bound(work)
  if longest_first is not None:
    work = _foreseen(work, law, policy, longest_first)
    assert bound(work) == pytest.approx(least)
  run = simulate(
    layout,
    law,
    work,
    costs,
    steps=STEPS,
    streaming=streaming,
    policy=policy,
  )
  assert run.seconds >= least * (1 - 1e-9)


def test_lost_groups_do_not_count():
  work = Replay({0: (Work(5.0, scored=False),), 1: (Work(7.0),)})
  bound = lower_bound(Law(0, 1, 1, 1), work, FREE, nodes=1, slots=1, steps=3)
  assert bound == pytest.approx(21.0)
  nothing = Replay({0: (Work(5.0, scored=False),)})
  with pytest.raises(ValueError, match="0 of 400 groups have a score"):
    lower_bound(Law(0, 1, 1, 1), nothing, FREE, nodes=1, slots=1, steps=3)


@pytest.mark.parametrize("nodes,slots", [(0.5, 1), (1, 0)])
def test_nothing_to_run_on_is_refused(nodes, slots):
  work = Replay({0: (Work(5.0),)})
  with pytest.raises(ValueError, match=f"got {nodes}, {slots}"):
    lower_bound(Law(0, 1, 1, 1), work, FREE, nodes=nodes, slots=slots, steps=1)
