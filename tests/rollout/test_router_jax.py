"""A live call whose engine changes role again and again is one call.

Two or three embedded engines on devices of their own, each put to sleep once
its calls have left it, woken and given its weights before the next comes.
"""

import asyncio

import jax
import numpy as np
import pytest
from small_model import small_model

from gyre import config
from gyre.rollout import engine
from gyre.rollout.jax_engine import JaxEngine
from gyre.rollout.router import Router

V = 300
TOKENS = 600
CFG, PARAMS = small_model(V, 0)


class Stepwise(JaxEngine):
  """Can be interrupted after every token."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self._batcher._steps = lambda prefilling: 1


_PROGRAMS = {}


def _engine(name, device, deterministic):
  key = (deterministic, device)
  e = Stepwise(
    PARAMS,
    CFG,
    rollout=config.Rollout(
      max_slots=8, prefill_chunk=64, num_pages=256, page_size=8
    ),
    deterministic=deterministic,
    device=device,
    name=name,
    programs=_PROGRAMS.get(key),
  )
  _PROGRAMS[key] = e.programs
  return e


def _requests(temperature):
  """The call that is watched, and two beside it."""
  rng = np.random.default_rng(1)
  return [
    engine.Request(
      ids=rng.integers(0, V, 40),
      max_new_tokens=TOKENS - 100 * i,
      temperature=temperature,
      seed=9 + i,
      request_id=f"e{i}#0",
      execution_id=f"e{i}",
    )
    for i in range(3)
  ]


class Turns:
  """Lets a call's teller say when so many tokens are there."""

  def __init__(self):
    self.tokens, self._waiting = [], None

  def __call__(self, *token):
    self.tokens.append(token)
    if self._waiting and len(self.tokens) >= self._waiting[0]:
      self._waiting[1].set()

  async def reach(self, n):
    self._waiting = (n, asyncio.Event())
    if len(self.tokens) < n:
      await self._waiting[1].wait()


async def _switch(router, source, target, engines):
  """One cell leaves rollout and comes back, the other takes what it had."""
  left = await router.drain(
    source, {e: target for e in router.executions(source)}
  )
  assert not engines[source]._batcher.requests
  await engines[source].sleep()
  assert engines[source].stats().asleep and "e0" in left
  return asyncio.ensure_future(_return(router, source, engines))


async def _return(router, cell, engines):
  await engines[cell].wake()
  await engines[cell].load_weights(PARAMS, 0)
  router.serve(cell)


async def _run(cells, points, temperature, deterministic):
  """The watched call, undisturbed and switched at these points.

  Returns:
    (undisturbed, switched) completions of each request, and the tokens at
    which the watched call's requests began.
  """
  devices = jax.devices()
  engines = {
    f"cell {i}": _engine(
      f"cell {i}", devices[i] if deterministic else devices[0], deterministic
    )
    for i in range(cells)
  }
  router, names = Router(patience_s=30.0), list(engines)
  for name, e in engines.items():
    await e.ready()
    router.add(name, e)
  requests = _requests(temperature)
  alone = [await engines["cell 0"].generate(r) for r in requests]

  for r in requests:
    router.place(r.execution_id, names[0])
  turns = [Turns() for _ in requests]
  works = [
    asyncio.ensure_future(router.generate(r, t))
    for r, t in zip(requests, turns, strict=True)
  ]
  begun, at, back = [], 0, {}
  for point in points:
    await turns[0].reach(point)
    begun.append(len(turns[0].tokens))
    target = (at + 1) % cells
    if names[target] in back:
      await back.pop(names[target])
    back[names[at]] = await _switch(router, names[at], names[target], engines)
    at = target
  switched = [await w for w in works]
  await asyncio.gather(*back.values())
  for r, t, c in zip(requests, turns, switched, strict=True):
    assert [x[0] for x in t.tokens] == c.ids.tolist(), r.request_id
    np.testing.assert_array_equal([x[1] for x in t.tokens], c.logprobs)
  stats = router.stats()
  assert stats.running == stats.waiting == 0
  assert stats.free_pages == stats.total_pages
  for e in engines.values():
    await e.close()
  return list(zip(alone, switched, strict=True)), begun


def _check(cells, switches, temperature, deterministic, seed=0):
  rng = np.random.default_rng(seed)
  # The watched call ends last; a switch may let a few tokens pass.
  points = np.sort(rng.choice(TOKENS - 60, switches, replace=False))
  pairs, begun = asyncio.run(
    _run(cells, points.tolist(), temperature, deterministic)
  )
  assert len(begun) == switches and begun[-1] < TOKENS
  for whole, switched in pairs:
    np.testing.assert_array_equal(whole.ids, switched.ids)
    assert whole.finish_reason == switched.finish_reason == "length"
    assert set(switched.versions.tolist()) == {0}
    if deterministic:
      np.testing.assert_array_equal(whole.logprobs, switched.logprobs)
    else:
      np.testing.assert_allclose(
        whole.logprobs, switched.logprobs, rtol=0, atol=1e-5
      )
  return np.diff([0, *begun])


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_fifty_switches_change_no_bit(temperature):
  steps = _check(2, 50, temperature, deterministic=True)
  assert len(steps) == 50


@pytest.mark.slow  # programs of a third device
def test_three_cells_take_turns():
  _check(3, 12, 1.0, deterministic=True, seed=3)


@pytest.mark.slow  # many more programs to compile
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_fifty_switches_otherwise_change_no_token(temperature):
  _check(2, 50, temperature, deterministic=False, seed=7)
