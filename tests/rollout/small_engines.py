"""Embedded engines of a small model, and what their answers must be."""

import asyncio
import contextlib
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import small_model

from gyre import config
from gyre.models import attention, transformer
from gyre.models import params as params_lib
from gyre.rollout import engine
from gyre.rollout.jax_engine import JaxEngine

V = 300


CFG = dataclasses.replace(
  small_model(V, 0)[0], context_length=256, layer_windows=(None, 40)
)


MODES = [False, True]


# Where the other mode compiles many programs for one more test.
FEW_MODES = [pytest.param(False, marks=pytest.mark.slow), True]


@functools.cache
def params_of(seed=0):
  return params_lib.init_params(
    params_lib.param_specs(CFG), jax.random.key(seed)
  )


class Held(JaxEngine):
  """Stops between dispatches when the request "held" has 20 tokens."""

  armed = False

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self._one = self._batcher.step
    self._batcher.step = self._step

  def _step(self):
    self._one()
    live = self._batcher.requests.get("held")
    if self.armed and live is not None and len(live.logprobs) >= 20:
      self.armed = False
      self.reached.set()
      self.go.wait(60)

  def arm(self):
    self.reached, self.go = threading.Event(), threading.Event()
    self.armed = True


async def interrupt(e, request, command, on_token=None):
  """Runs command() when the request has sampled 20 tokens or a few more.

  Returns:
    The task that generates, and what the command returned.
  """
  e.arm()
  request = dataclasses.replace(request, request_id="held")
  task = asyncio.ensure_future(e.generate(request, on_token))
  assert await asyncio.to_thread(e.reached.wait, 60)
  done = asyncio.ensure_future(command())
  await asyncio.sleep(0)  # the command is posted
  e.go.set()
  return task, await done


_PROGRAMS = {}


def small_engine(deterministic=False, params=None, device=None, **rollout):
  settings = {
    "max_slots": 16,
    "prefill_chunk": 64,
    "num_pages": 1024,
    "page_size": 8,
  }
  settings |= rollout
  key = (deterministic, device, *sorted(settings.items()))
  e = Held(
    params_of() if params is None else params,
    CFG,
    rollout=config.Rollout(**settings),
    deterministic=deterministic,
    device=device,
    programs=_PROGRAMS.get(key),
  )
  _PROGRAMS[key] = e.programs
  return e


def requests_of(n, seed=0, **options):
  rng = np.random.default_rng(seed)
  return [
    engine.Request(
      ids=rng.integers(0, V, rng.integers(1, 120)),
      max_new_tokens=int(rng.integers(1, 40)),
      seed=i,
      **{"temperature": 0.8} | options,
    )
    for i in range(n)
  ]


def with_engine(test, **options):
  """Runs `test(engine)` in a loop of its own, and closes the engine."""

  async def main():
    e = small_engine(**options)
    await e.ready()
    try:
      return await asyncio.wait_for(test(e), 120)
    finally:
      await e.close()

  return asyncio.run(main())


async def all_of(e, requests):
  return await asyncio.gather(*(e.generate(r) for r in requests))


def same(a, b, atol=0.0):
  np.testing.assert_array_equal(a.ids, b.ids)
  np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=atol)


@functools.cache
def scorer():
  @jax.jit
  def score(params, ids, temperature):
    at = jnp.arange(ids.shape[1])[None]
    hidden, _ = transformer.forward(
      params, CFG, ids, at, attention.packed_attend(None, at)
    )
    logits = transformer.logits(params, CFG, hidden)
    return jax.nn.log_softmax(logits / temperature)[0]

  return score


def rescore(request, completion, params=None):
  """Teacher-forced log-probabilities of what was sampled."""
  n, m = len(request.ids), len(completion.ids)
  ids = np.zeros((1, CFG.context_length), np.int32)
  ids[0, : n + m] = [*request.ids, *completion.ids]
  params = params_of() if params is None else params
  table = np.asarray(scorer()(params, ids, request.temperature))
  return table[np.arange(n - 1, n + m - 1), completion.ids]


def same_start(a, b, n, atol):
  np.testing.assert_array_equal(a.ids[:n], b.ids[:n])
  np.testing.assert_allclose(a.logprobs[:n], b.logprobs[:n], rtol=0, atol=atol)


@contextlib.contextmanager
def compilations():
  """A list of what is compiled meanwhile."""
  compiled, listening = [], True

  def listen(name, *_, **__):
    if listening and "backend_compile" in name:
      compiled.append(name)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield compiled
  seen = len(compiled)
  jax.jit(lambda x: x * 3)(jnp.ones(7))
  assert len(compiled) > seen  # the listener hears compilations
  del compiled[seen:]
  listening = False
