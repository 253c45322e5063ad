"""A whole engine on each of several devices, as one engine."""

import asyncio

import jax
import pytest
import virtual_time
from small_engines import (
  all_of,
  params_of,
  requests_of,
  same,
  small_engine,
)

from gyre.rollout import emulated, engine, fingerprint
from gyre.rollout.profile import Profile
from gyre.rollout.replicas import Replicas

PROFILE = Profile(
  nodes=1, slots=2, speedup=1, f=1, token_s=1, stream_s=1, publish_s=0
)


def emulations(n=2):
  return [emulated.EmulatedEngine(PROFILE, name=f"e.{i}") for i in range(n)]


def request(count, execution="", name=""):
  return engine.Request(
    ids=[5, 6, 7],
    max_new_tokens=count,
    execution_id=execution,
    request_id=name,
  )


def test_calls_are_shared_and_an_execution_stays_where_its_keys_are():
  async def main():
    engines = emulations()
    policy = Replicas(engines, slots=2, name="e")
    assert isinstance(policy, engine.Engine)
    assert isinstance(policy, fingerprint.Fingerprinted)

    def running():
      return [e.stats().running for e in engines]

    first = asyncio.ensure_future(policy.generate(request(9, "a")))
    await asyncio.sleep(0)
    assert running() == [1, 0]
    await policy.generate(request(2, "b"))
    assert engines[1].stats().finished == 1
    # Replica 0 is busier, and has what "a" needs.
    again = asyncio.ensure_future(policy.generate(request(9, "a")))
    await asyncio.sleep(0)
    assert running() == [2, 0]
    # It is full: the third call does not wait there, and has moved for good.
    third = asyncio.ensure_future(policy.generate(request(3, "a")))
    await asyncio.sleep(0)
    assert running() == [2, 1]
    await asyncio.gather(first, again, third)
    await policy.generate(request(1, "a"))
    assert [e.stats().finished for e in engines] == [2, 3]
    # Where all are full, calls wait where they belong.
    calls = [
      asyncio.ensure_future(policy.generate(request(4))) for _ in range(4)
    ]
    await asyncio.sleep(0)
    late = asyncio.ensure_future(policy.generate(request(1, "b")))
    await asyncio.sleep(0)
    assert policy.stats().running == 4 and engines[1].stats().waiting == 1
    await asyncio.gather(*calls, late)
    assert policy.stats().finished == 10 and policy.stats().total_pages == 4
    await policy.close()
    with pytest.raises(engine.EngineDown):
      await policy.generate(request(1, "a"))

  virtual_time.run(main())


def test_a_call_is_ended_by_name_wherever_it_is():
  async def main():
    policy = Replicas(emulations(3), slots=2, name="e")
    calls = [
      asyncio.ensure_future(policy.generate(request(9, name=str(i))))
      for i in range(6)
    ]
    await asyncio.sleep(2.5)
    with pytest.raises(engine.Rejected, match="'4' is being served"):
      await policy.generate(request(1, name="4"))
    assert await policy.abort("4") and not await policy.abort("none")
    assert (await calls[4]).finish_reason == "abort"
    calls[5].cancel()
    await asyncio.wait([calls[5]])
    assert policy.stats().running == 4
    await policy.pause(keep=False)
    assert policy.stats().paused
    for call in calls[:4]:
      assert len((await call).ids) == 2
    await policy.resume()
    await policy.load_weights(None, 3)
    assert (await policy.generate(request(1))).versions.tolist() == [3]
    with pytest.raises(engine.StaleVersion):
      await policy.load_weights(None, 2)

  virtual_time.run(main())


def test_no_replica_is_refused():
  with pytest.raises(ValueError, match="e needs at least one"):
    Replicas([], slots=1, name="e")


def test_on_two_devices_they_sample_what_one_does():
  requests = requests_of(12, seed=3)

  async def main():
    one = small_engine(deterministic=True, device=jax.devices()[3])
    await one.ready()
    whole = await all_of(one, requests)
    expected = one.fingerprint_of(params_of(1))
    await one.close()
    engines = [
      small_engine(deterministic=True, device=d) for d in jax.devices()[3:5]
    ]
    engines[1].name = "second"
    policy = Replicas(engines, slots=4, name="e")
    await policy.ready()
    compiled = policy.stats().compilations
    calls = asyncio.ensure_future(all_of(policy, requests))
    await asyncio.sleep(0.05)
    await policy.sleep()
    assert policy.stats().asleep
    await policy.load_weights(params_of(), 0)
    await policy.wake()
    for a, b in zip(whole, await calls, strict=True):
      same(a, b)
    assert all(e.stats().finished for e in engines)
    assert policy.stats().compilations == compiled
    # All must use what is published.
    await policy.load_weights(params_of(1), 1)
    assert await policy.difference(expected) == ""
    assert await policy.fingerprint() == expected
    await engines[1].load_weights(params_of(), 1)
    assert (await policy.difference(expected)).startswith("second: ")
    with pytest.raises(ValueError, match="second holds other weights than jax"):
      await policy.fingerprint()
    await policy.close()

  asyncio.run(asyncio.wait_for(main(), 120))
