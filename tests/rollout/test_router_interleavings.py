"""Anything may happen to cells at any time; each call stays whole."""

import asyncio

import hashing
import hypothesis
import hypothesis.strategies as st
import pytest
from routing import check, request, run

from gyre.rollout import engine

OPS = (
  *("place", "move", "drain", "serve", "publish") * 2,
  *("cancel", "abort", "die", "hang", "replace", "remove"),
)


async def _disturb(b, data, executions):
  """One thing happens, of all that may."""
  pick = lambda xs: data.draw(st.sampled_from(list(xs)))  # noqa: E731
  router, op = b.router, pick(OPS)
  cells = list(b.engines)
  cell, execution = pick(cells), pick(executions)
  known = cell in router._table.cells
  if op in ("place", "move") and known:
    if op == "place":
      router.place(execution, cell)
    else:
      b.chores.append(asyncio.ensure_future(router.move(execution, cell)))
      await asyncio.sleep(0)  # asked for while the cell is known
  elif op == "drain" and known:
    targets = {
      e: c
      for e in router.executions(cell)
      if (c := pick([*router._table.cells, None])) not in (cell, None)
    }
    drain = asyncio.ensure_future(router.drain(cell, targets))
    b.chores.append(drain)
    await asyncio.sleep(0)
    if data.draw(st.booleans()):
      await asyncio.wait({drain}, timeout=5)
      assert drain.done()
      b.engines[cell].admits = cell in router.serving
  elif op == "serve" and known and router._table.cells[cell].down is None:
    b.engines[cell].admits = True
    router.serve(cell)
  elif op == "publish":
    b.version += 1
    b.chores.append(asyncio.ensure_future(router.load_weights(None, b.version)))
  elif op in ("cancel", "abort"):
    asked, work, _ = pick(b.calls)
    if op == "cancel":
      work.cancel()
    else:
      await router.abort(asked.request_id)
  elif op == "die":
    b.engines[cell].dead = "killed"
  elif op == "hang":
    b.engines[cell].hung = True
  elif op == "replace":
    b.new(cell, b.version)
  elif op == "remove" and known:
    router.remove(cell)


async def _settle(b, executions):
  """Every cell gets a sound engine, and every execution a cell."""
  for name in list(b.engines):
    b.new(name, b.version)
  for i, execution in enumerate(executions):
    b.router.place(execution, list(b.engines)[i % len(b.engines)])
  for chore in b.chores:
    await asyncio.wait({chore}, timeout=10)
    assert chore.done()
    if not chore.cancelled() and chore.exception() is not None:
      assert isinstance(chore.exception(), engine.EngineError)
  for asked, work, told in b.calls:
    try:
      completion = await work
    except asyncio.CancelledError:
      continue
    check(asked, completion, told, completion.finish_reason == "abort")
    versions = completion.versions
    assert (versions >= b.promised[asked.execution_id]).all()
  for e in b.all:
    e.hung = False
  await asyncio.sleep(0.01)
  b.check_idle()


def _interleave(data):
  async def test(b):
    b.version, b.chores, b.promised = 0, [], {}
    executions = [f"e{i}" for i in range(4)]
    for i, e in enumerate(executions):
      b.promised[e] = data.draw(st.sampled_from([0, 0, 1]))
      b.router.place(e, "abc"[i % 3], version=b.promised[e])
    for i in range(8):
      b.call(request(executions[i % 4], i, 40, stop_ids=[hashing.STOP]))
    for _ in range(data.draw(st.integers(1, 25))):
      for _ in range(data.draw(st.integers(0, 6))):
        await asyncio.sleep(0)
      await _disturb(b, data, executions)
    b.version += 1
    await _settle(b, executions)

  run(test, leave_s=0.02)


@hypothesis.settings(
  max_examples=150,
  deadline=None,
  suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(st.data())
def test_any_interleaving_leaves_each_call_whole(data):
  _interleave(data)


@pytest.mark.slow
@hypothesis.settings(
  max_examples=5000,
  deadline=None,
  suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(st.data())
def test_many_interleavings_leave_each_call_whole(data):
  _interleave(data)
