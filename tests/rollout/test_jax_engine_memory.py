"""The embedded engine and its device: memory given back, engines apart."""

import asyncio
import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engines import (
  CFG,
  MODES,
  all_of,
  compilations,
  interrupt,
  params_of,
  requests_of,
  rescore,
  same,
  same_start,
  small_engine,
  with_engine,
)

from gyre.models import params as params_lib
from gyre.rollout import engine


def _arrays_on(device):
  return [x for x in jax.live_arrays() if device in x.devices()]


def _bytes_on(device, others=()):
  """Bytes of the arrays there, but for those of others."""
  known = {id(x) for x in others}
  return sum(x.nbytes for x in _arrays_on(device) if id(x) not in known)


@pytest.mark.parametrize("deterministic", MODES)
def test_sleep_frees_the_device_and_wake_goes_on_with_given_weights(
  deterministic,
):
  request = dataclasses.replace(requests_of(1)[0], max_new_tokens=100)
  # No params_of() is on this device; the other mode's programs exist already.
  device = jax.devices()[3] if deterministic else None
  others = _arrays_on(device)

  async def test(e):
    whole = await e.generate(request)
    before = await e.fingerprint()
    # A page more than asked for; float32.
    pages = 2 * CFG.num_layers * 1025 * 8 * 2 * 16 * 4
    memory = pages + sum(x.nbytes for x in jax.tree.leaves(params_of()))
    given = jax.tree.map(jnp.copy, params_of(1))
    held = _bytes_on(e.device)
    compiled = e.stats().compilations
    with compilations() as compiled_now:
      slept, _ = await interrupt(e, request, e.sleep)
      assert e.stats().asleep
      assert held - _bytes_on(e.device) >= memory
      assert not deterministic or _bytes_on(device, others) == 0
      waiting = asyncio.ensure_future(e.generate(request))
      await asyncio.sleep(0.05)
      with pytest.raises(ValueError, match="holds no weights"):
        await e.fingerprint()
      # Memory and weights come in any order.
      await e.wake()
      await asyncio.sleep(0.05)
      assert not waiting.done() and not slept.done()
      await e.load_weights(params_of(), 0)
      assert await e.fingerprint() == before
      for completion in (await slept, await waiting):
        same(whole, completion, 0.0 if deterministic else 1e-5)

      slept, _ = await interrupt(e, request, e.sleep)
      with pytest.raises(engine.StaleVersion):
        await e.load_weights(given, -1)
      await e.load_weights(given, 5)
      for x in jax.tree.leaves(given):
        x.delete()
      assert not deterministic or _bytes_on(device, others) == 0
      assert e.stats().asleep and e.stats().version == 5
      assert not slept.done()
      await e.wake()
      mixed = await slept
    assert compiled_now == []
    assert e.stats().compilations == compiled
    old = int(np.sum(mixed.versions == 0))
    assert old >= 20 and set(mixed.versions[old:]) == {5}
    same_start(whole, mixed, old, 0.0 if deterministic else 1e-5)
    scores = rescore(request, mixed, params_of(1))
    np.testing.assert_allclose(mixed.logprobs[old:], scores[old:], atol=1e-4)

  with_engine(test, deterministic=deterministic, device=device)


def test_two_engines_on_two_devices_are_equal_and_apart():
  requests = requests_of(8, seed=2)
  devices = jax.devices()[3:5]  # the first has its programs already

  async def main():
    engines = [small_engine(deterministic=True, device=d) for d in devices]
    for e in engines:
      await e.ready()
    apart = [await all_of(e, requests) for e in engines]
    together = await asyncio.gather(*(all_of(e, requests) for e in engines))
    # Other weights in one change nothing in the other.
    await engines[1].load_weights(params_of(1), 1)
    mixed = await asyncio.gather(*(all_of(e, requests) for e in engines))
    prints = [await e.fingerprint() for e in engines]
    for e, d in zip(engines, devices, strict=True):
      held = jax.tree.leaves((e._batcher.params, e._batcher.kv))
      assert all(x.devices() == {d} for x in held)
      await e.close()
    assert prints[0] != prints[1]
    return [*apart, *together, mixed[0]], mixed[1]

  alike, other = asyncio.run(main())
  for outs in alike[1:]:
    for a, b in zip(alike[0], outs, strict=True):
      same(a, b)
  for request, out in zip(requests, other, strict=True):
    gap = out.logprobs - rescore(request, out, params_of(1))
    assert np.abs(gap).max() <= 1e-4


def test_the_givers_arrays_may_be_donated_afterwards():
  """And it keeps none of them."""
  params = jax.tree.map(jnp.copy, params_of())

  async def main():
    layers = params_lib.convert_layout(params, CFG, layout="layers")
    given = [weakref.ref(x) for x in jax.tree.leaves(layers)]
    e = small_engine(params=layers)
    await e.ready()
    for x in jax.tree.leaves(layers):
      x.delete()
    del x, layers
    params.clear()
    gc.collect()
    assert all(x() is None for x in given)
    out = await e.generate(requests_of(1)[0])
    await e.close()
    return out

  out = asyncio.run(main())
  gap = out.logprobs - rescore(requests_of(1)[0], out)
  assert np.abs(gap).max() <= 1e-4
