"""The gradient of a batch is one cell's, whatever the membership history."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest
import toy_cells as toy
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.runtime.cell import CellError
from gyre.runtime.cell_worker import pad_rows
from gyre.runtime.claims import Claims
from gyre.runtime.trainer import mean_metrics

TOLERANCE = 1e-5
# Devices 0-1, 2-3, 4-5 and 6; the reference has device 7.
MEMBERS = (
  ("cell 1", (2, 1, 1), 2),
  ("cell 2", (1, 1, 2), 4),
  ("cell 3", (1, 1, 1), 6),
)


pytestmark = pytest.mark.usefixtures("quick_compilation")


class Members:
  """A core and satellites that do what a history says, over one claim queue.

  Attributes:
    core: a cell.Core; "cell 0".
    cells: name -> cell.Worker, the core among them.
    training: names of the cells that train.
  """

  def __init__(self, core, satellites):
    self.core = core
    self.cells = {c.name: c for c in (core, *satellites)}
    self.training: set[str] = set()
    self.handed: list = []
    self.version = 0

  async def join(self, name):
    """From the core's snapshot, in the middle of a batch or between two."""
    if name not in self.training:
      weights = None if name == "cell 0" else await self.core.weights()
      await self.cells[name].join(weights, self.version)
      self.training.add(name)

  async def step(self, name):
    """Claims a micro-step and trains it."""
    step = self.claims.claim(name) if name in self.training else None
    if step is not None:
      extras = await self.cells[name].work(step.batch, step.extras)
      self.claims.done(name, step.index, extras)

  async def kill(self, name, working):
    """Dies, in the middle of a micro-step too; its sums are gone."""
    if name not in self.training or name == "cell 0":
      return
    step = self.claims.claim(name) if working else None
    if step is not None:
      task = asyncio.create_task(self.cells[name].work(step.batch))
      await asyncio.sleep(0)
      task.cancel()
    self.claims.give_back(name)
    await self.cells[name].reset()
    self.training.discard(name)

  async def leave(self, name):
    """Goes back to serving; the core keeps what it has summed."""
    if name in self.training and name != "cell 0":
      await self._hand_over(name)
      self.training.discard(name)

  async def _hand_over(self, name):
    self.claims.hand_over(name)
    self.handed.append(await self.cells[name].sums())

  async def act(self, kind, name):
    """One event of a history."""
    if kind in ("kill", "kill working"):
      await self.kill(name, kind == "kill working")
    else:
      await getattr(self, kind)(name)

  async def update(self, batches, history, passes=1):
    """One update; the history is that of its first pass."""
    self.claims = Claims(self.version + 1)
    await self.join("cell 0")
    added, rows = 0, []
    for k in range(passes):
      for i, event in enumerate(history if k == 0 else ()):
        # Micro-steps stream in while cells come and go.
        if k == 0 and added < min(len(batches), i + 1):
          self.claims.add(batches[added])
          added += 1
        await self.act(*event)
      for batch in batches[added:]:
        self.claims.add(batch)
      added = len(batches)
      self.claims.seal()
      while not self.claims.drained:
        await asyncio.gather(*map(self.step, sorted(self.training)))
      for name in self.claims.members():
        await self._hand_over(name)
      last = k == passes - 1
      rows.append(
        await self.core.apply(self.handed, self.version + (1 if last else 0))
      )
      self.handed = []
      if not last:
        self.claims.next_pass()
        for name in sorted(self.training - {"cell 0"}):
          await self.cells[name].join(await self.core.weights(), self.version)
    self.version += 1
    for name in sorted(self.training - {"cell 0"}):
      await self.cells[name].join(await self.core.weights(), self.version)
    return rows


def _members(**learner):
  core = toy.core((1, 2, 1), **learner)
  return Members(core, [toy.satellite(*m, **learner) for m in MEMBERS])


async def _single(updates, passes=1, **learner):
  """The reference: one cell, one device; gradients and metrics by update."""
  core = toy.core((1, 1, 1), 7, **learner)
  out = []
  for u, batches in enumerate(updates):
    for k in range(passes):
      await core.join(None, u)
      for batch in batches:
        await core.work(batch)
      last = k == passes - 1
      row = await core.apply([await core.sums()], u + (1 if last else 0))
      out.append((toy.gradient(core), row))
  await core.close()
  return out


async def _elastic(updates, histories, passes=1, **learner):
  members = _members(**learner)
  if learner.get("kl_coef"):
    for cell in members.cells.values():
      cell.reference = toy.params(11)
  out = []
  for batches, history in zip(updates, histories, strict=True):
    rows = await members.update(batches, history, passes)
    out.append((toy.gradient(members.core), rows[-1]))
  for cell in members.cells.values():
    await cell.close()
  return out


def _check(got, want):
  for (gradient, row), (expected, expected_row) in zip(got, want, strict=True):
    assert toy.distance(gradient, expected) <= TOLERANCE
    assert row.keys() == expected_row.keys()
    for name, value in expected_row.items():
      assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


ALL = [("join", name) for name, _, _ in MEMBERS]
HISTORIES = {
  "one cell": [],
  "four cells of different shapes": ALL,
  "one joins in the middle": [
    ("step", "cell 0"),
    ("step", "cell 0"),
    ("join", "cell 2"),
    ("step", "cell 2"),
  ],
  "one is killed in the middle": [
    *ALL,
    ("step", "cell 1"),
    ("step", "cell 2"),
    ("step", "cell 1"),
    ("kill working", "cell 1"),
    ("join", "cell 1"),
  ],
  "one leaves with its sums, another dies": [
    *ALL,
    ("step", "cell 1"),
    ("step", "cell 3"),
    ("leave", "cell 1"),
    ("kill", "cell 3"),
    ("join", "cell 1"),
  ],
}


@pytest.fixture(scope="module")
def updates():
  return [toy.batches(0), toy.batches(5)]


@pytest.fixture(scope="module")
def reference(updates):
  return toy.run(_single(updates))


@pytest.mark.parametrize("name", HISTORIES)
def test_gradients_are_those_of_one_cell(name, updates, reference):
  got = toy.run(_elastic(updates, [HISTORIES[name]] * 2))
  _check(got, reference)


@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_micro_steps_of_other_sizes(rows, reference):
  updates = [toy.batches(0, rows), toy.batches(5, rows)]
  got = toy.run(_elastic(updates, [ALL[:1] if rows == 1 else [], []]))
  _check(got, reference)


def test_later_passes_train_the_same_micro_steps(updates):
  want = toy.run(_single(updates, passes=2))[1::2]
  history = HISTORIES["one leaves with its sums, another dies"]
  got = toy.run(_elastic(updates, [history] * 2, passes=2))
  _check(got, want)


def test_the_reference_policy_lies_on_every_cell(updates):
  learner = {"kl_coef": 0.1}
  want = toy.run(_elastic(updates[:1], [[]], **learner))
  got = toy.run(_elastic(updates[:1], [ALL[:1]], **learner))
  assert want[0][1]["loss/kl"] > 1e-3
  _check(got, want)


EVENTS = st.lists(
  st.tuples(
    st.sampled_from(
      ["join", "join", "step", "step", "step", "kill", "kill working", "leave"]
    ),
    st.sampled_from(["cell 0", *(name for name, _, _ in MEMBERS)]),
  ),
  max_size=24,
)


@settings(max_examples=4, deadline=None)
@given(EVENTS)
def test_any_history_on_the_model(updates, reference, history):
  _check(toy.run(_elastic(updates[:1], [history])), reference[:1])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, min_size=2, max_size=2))
def test_many_histories_on_the_model(updates, reference, histories):
  _check(toy.run(_elastic(updates, histories)), reference)


class ToyCell:
  """A cell whose micro-step is a number and whose gradient is w * number."""

  def __init__(self, name):
    self.name = name
    self.weight = None
    self.total: dict[str, int] = {}

  async def join(self, weights, version):
    if self.total:
      raise CellError("sums were not taken")
    self.weight = self.own() if weights is None else weights

  async def work(self, batch, extras=None):
    await asyncio.sleep(0)
    total = self.total
    self.total = {
      "grad": total.get("grad", 0) + self.weight * batch,
      "count": total.get("count", 0) + 1,
    }
    return extras

  async def sums(self):
    taken, self.total = self.total, {}
    return taken

  async def reset(self):
    self.total = {}


class ToyCore(ToyCell):
  """Weights are integers, so that every history must agree exactly."""

  def __init__(self):
    super().__init__("cell 0")
    self.value = 3

  def own(self):
    return self.value

  async def weights(self):
    return self.value

  async def apply(self, sums, version):
    grad = sum(s.get("grad", 0) for s in sums)
    count = sum(s.get("count", 0) for s in sums)
    self.value = (self.value * 31 + grad * 7 + count) % 1_000_003
    self.weight = self.value
    return {"count": count}


@settings(max_examples=200, deadline=None)
@given(
  st.lists(EVENTS, min_size=1, max_size=3), st.integers(0, 9), st.integers(1, 2)
)
def test_any_history_on_a_toy(histories, n, passes):
  async def run(histories):
    members = Members(ToyCore(), [ToyCell(name) for name, _, _ in MEMBERS])
    out = []
    for u, history in enumerate(histories):
      batches = [10 * u + i for i in range(n)]
      rows = await members.update(batches, history, passes)
      out.append((members.core.value, rows))
    return out

  assert toy.run(run(histories)) == toy.run(run([[]] * len(histories)))


def test_in_the_order_of_micro_steps_it_matters_not_who_claimed(updates):
  """As deterministic mode does: sums of each micro-step, in their order."""

  async def run(claimants):
    core = toy.core((1, 1, 1), 6)
    other = toy.satellite("cell 1", (1, 1, 1), 7)
    await core.join(None, 0)
    await other.join(await core.weights(), 0)
    sums = []
    for i, batch in enumerate(updates[0]):
      cell = (core, other)[claimants[i % len(claimants)]]
      await cell.work(batch)
      sums.append(await cell.sums())
    await core.apply(sums, 1)
    return core

  a, b = toy.run(run([0])), toy.run(run([1, 0, 1]))
  bits = [
    [np.asarray(x).tobytes() for x in jax.tree.leaves(c.trainer.state.params)]
    for c in (a, b)
  ]
  assert bits[0] == bits[1]


def test_a_batch_without_micro_steps_leaves_the_weights(updates):
  async def run():
    core = toy.core((1, 2, 1))
    await core.join(None, 0)
    before = jax.device_get(await core.weights())
    row = await core.apply([await core.sums(), {}], 1)
    assert row["optim/grad_norm"] == 0
    after = jax.device_get(await core.weights())
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert int(core.trainer.state.version) == 1
    assert int(core.trainer.state.step) == 0

  toy.run(run())
  assert mean_metrics([])["staleness/max"] == 0


def test_misuse_is_one_line(updates):
  async def run():
    core = toy.core((1, 2, 1))
    cell = toy.satellite("cell 1", (2, 1, 1), 2)
    with pytest.raises(
      CellError, match="cell 1 is in role 'idle', not 'train'"
    ):
      await cell.work(updates[0][0])
    with pytest.raises(CellError, match="cell 0 holds version 0, not 4"):
      await core.join(None, 4)
    await core.join(None, 0)
    await cell.join(await core.weights(), 0)
    await cell.work(updates[0][0])
    with pytest.raises(CellError, match="holds sums at version 0"):
      await cell.join(await core.weights(), 0)
    sums = await cell.sums()
    await core.apply([], 1)
    with pytest.raises(CellError, match="sums of version 0, cell 0 holds 1"):
      await core.apply([sums], 2)
    await cell.join(await core.weights(), 1)
    await cell.work(updates[0][0])
    sums = dict(await cell.sums())
    del sums["grads.embed"]
    with pytest.raises(CellError, match=r"disagree .* grads\.embed"):
      await core.apply([sums], 2)

  toy.run(run())


def test_rows_are_padded_to_any_mesh():
  (batch, *_) = toy.batches(rows=3)
  padded = pad_rows(batch, 4)
  assert padded.tokens.shape[0] == 4 and padded.num_entries[3] == 0
  assert pad_rows(padded, 2) is padded
  for f in dataclasses.fields(batch):
    np.testing.assert_array_equal(
      getattr(padded, f.name)[:3], getattr(batch, f.name)
    )
