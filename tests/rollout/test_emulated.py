"""The emulated engine: times by hand, identity of moved calls, the protocol."""

import asyncio
import dataclasses

import numpy as np
import pytest
import virtual_time
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre import types
from gyre.rollout import emulated, engine
from gyre.rollout.profile import Profile

# A token takes 1 s of an idle engine; the clock runs with the wall's.
PROFILE = Profile(
  nodes=1, slots=4, speedup=1, f=1, token_s=1, stream_s=1, publish_s=0
)


def make(**changes):
  return emulated.EmulatedEngine(dataclasses.replace(PROFILE, **changes))


def request(name, count, seed=1, prompt=(5, 6, 7), **kw):
  return engine.Request(
    ids=list(prompt), max_new_tokens=count, seed=seed, request_id=name, **kw
  )


async def timed(policy, *args):
  got = await policy.generate(*args)
  return asyncio.get_running_loop().time(), got


@pytest.mark.parametrize(
  "field,value",
  [("nodes", 0), ("slots", -1), ("speedup", float("inf")), ("f", 1.1)],
)
def test_a_profile_out_of_range_is_refused(field, value):
  with pytest.raises(ValueError, match=f"{field}.*{value}"):
    dataclasses.replace(PROFILE, **{field: value})


def test_it_is_an_engine():
  assert isinstance(make(), engine.Engine)


def test_calls_slow_each_other_by_the_law():
  # f = 0, x0 = 1, one node: two calls run at rate 1/2 each. The first is alone
  # for 3 s and does 3; then 2 of both take 4 s, and it ends at 7; the second
  # has 4 left, alone: it ends at 11.
  async def main():
    policy = make(f=0, x0=1)
    first = asyncio.ensure_future(timed(policy, request("a", 5)))
    await asyncio.sleep(3)
    second = asyncio.ensure_future(timed(policy, request("b", 6)))
    return [(await x)[0] for x in (first, second)]

  np.testing.assert_allclose(virtual_time.run(main()), [7, 11], atol=1e-6)


def test_load_is_a_node_and_the_clock_is_scaled():
  async def main():
    policy = make(f=0.5, x0=4, nodes=2, slots=8, speedup=360, token_s=36)
    calls = [timed(policy, request(str(i), 10)) for i in range(8)]
    return [x[0] for x in await asyncio.gather(*calls)]

  # 8 calls on 2 nodes are x0: rate 1, and 360 s are 1 s.
  np.testing.assert_allclose(virtual_time.run(main()), [1.0] * 8)


def test_what_finds_no_slot_waits_in_order():
  async def main():
    policy = make(slots=2)
    calls = [timed(policy, request(str(i), 2)) for i in range(5)]
    work = asyncio.gather(*calls)
    await asyncio.sleep(0.5)
    stats = policy.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (2, 3, 0)
    return [x[0] for x in await work]

  np.testing.assert_allclose(virtual_time.run(main()), [2, 2, 4, 4, 6])


def test_prefill_is_paid_again_after_new_weights_and_sleep():
  async def main():
    policy = make(prefill_s=0.1)
    work = asyncio.ensure_future(timed(policy, request("a", 10)))
    await asyncio.sleep(2.3)  # 0.3 of prefill, two tokens
    await policy.load_weights(None, 1)  # three and two again: 0.5
    await asyncio.sleep(1.5)  # and one more token
    await policy.sleep()
    await asyncio.sleep(6)
    await policy.wake()
    await asyncio.sleep(4)  # awake, and without weights
    policy.take(None, 1)  # six of context: 0.6
    end, got = await work
    stats = policy.stats()
    assert (stats.prefilled_tokens, stats.reprefilled_tokens) == (3, 11)
    return end, got.versions

  end, versions = virtual_time.run(main())
  np.testing.assert_allclose(end, 10 + 0.3 + 0.5 + 0.6 + 10)
  np.testing.assert_array_equal(versions, [0] * 2 + [1] * 8)


@settings(max_examples=60, deadline=None)
@given(
  cuts=st.lists(st.floats(0.0, 12.0), max_size=6),
  seed=st.integers(0, 2**32 - 1),
  count=st.integers(1, 40),
)
def test_a_call_moved_anywhere_goes_on_identically(cuts, seed, count):
  async def main():
    whole = await make().generate(request("whole", count, seed))
    parts, ids = [], [5, 6, 7]
    for cut in [*cuts, None]:
      policy, left = make(), count - len(ids) + 3
      if not left:
        break
      work = asyncio.ensure_future(
        policy.generate(request("a", left, seed, prompt=ids))
      )
      if cut is not None:
        await asyncio.sleep(cut)
        await policy.abort("a")
      parts.append(await work)
      ids += parts[-1].ids.tolist()
      await policy.close()
    return whole, parts

  whole, parts = virtual_time.run(main())
  for name in ("ids", "logprobs"):
    got = np.concatenate([getattr(p, name) for p in parts])
    np.testing.assert_array_equal(got, getattr(whole, name))
  assert len(whole.ids) == count
  assert parts[-1].finish_reason == "length"
  assert (whole.logprobs <= 0).all()
  assert whole.ids.max() < PROFILE.vocab_size


def test_a_stop_id_ends_a_call_and_is_kept():
  ids, _ = emulated.tokens(1, 3, 10, PROFILE.vocab_size)

  async def main():
    return await timed(make(), request("a", 10, stop_ids=(int(ids[4]),)))

  end, got = virtual_time.run(main())
  assert (end, got.finish_reason) == (5, "stop")
  np.testing.assert_array_equal(got.ids, ids[:5])


def test_tokens_are_streamed_in_order_before_the_answer():
  seen = []

  async def main():
    policy = make(stream_s=2)
    work = asyncio.ensure_future(
      policy.generate(request("a", 5), lambda *token: seen.append(token))
    )
    await asyncio.sleep(4.5)
    streamed = len(seen)
    await policy.load_weights(None, 7)
    return streamed, await work

  streamed, got = virtual_time.run(main())
  assert streamed == 4
  ids, logprobs, versions = zip(*seen, strict=True)
  np.testing.assert_array_equal(ids, got.ids)
  np.testing.assert_array_equal(np.float32(logprobs), got.logprobs)
  np.testing.assert_array_equal(versions, [0] * 4 + [7])


def test_pause_keeps_or_aborts():
  async def main():
    policy = make()
    kept = asyncio.ensure_future(timed(policy, request("a", 4)))
    await asyncio.sleep(1.5)
    await policy.pause()
    await asyncio.sleep(100)
    await policy.resume()
    end, _ = await kept
    cut = asyncio.ensure_future(policy.generate(request("b", 9)))
    await asyncio.sleep(3.5)
    await policy.pause(keep=False)
    got = await cut
    assert policy.stats().paused
    return end, got

  end, got = virtual_time.run(main())
  assert end == pytest.approx(104)
  assert (len(got.ids), got.finish_reason) == (3, "abort")


def test_new_weights_take_their_time_and_old_ones_are_refused():
  async def main():
    policy = make(publish_s=5)
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(policy.generate(request("a", 10)))
    await policy.load_weights(types.Snapshot(2, "nowhere"), 2)
    assert loop.time() == 5
    with pytest.raises(engine.StaleVersion, match=r"2.*older 1"):
      await policy.load_weights(None, 1)
    with pytest.raises(ValueError, match=r"version 4, not 5"):
      await policy.load_weights(types.Snapshot(4, "nowhere"), 5)
    with pytest.raises(engine.StaleVersion, match=r"version 2, 3 was asked"):
      await policy.generate(request("b", 1, min_version=3))
    return (await work).versions

  np.testing.assert_array_equal(virtual_time.run(main()), [0] * 5 + [2] * 5)


def test_close_and_cancel_and_refusals():
  async def main():
    policy = make(slots=1)
    gone = asyncio.ensure_future(policy.generate(request("a", 50)))
    waiting = asyncio.ensure_future(timed(policy, request("b", 2)))
    await asyncio.sleep(1)
    with pytest.raises(engine.Rejected, match="'a' is being served"):
      await policy.generate(request("a", 1))
    with pytest.raises(engine.Rejected, match="vocabulary"):
      await policy.generate(request("c", 1, prompt=[10**6]))
    gone.cancel()
    end, _ = await waiting  # it has the slot now
    assert end == 3
    assert not await policy.abort("a")
    left = asyncio.ensure_future(policy.generate(request("d", 50)))
    await asyncio.sleep(1)
    await policy.close()
    for call in (left, policy.generate(request("e", 1)), policy.sleep()):
      with pytest.raises(engine.EngineDown):
        await call
    assert policy.stats().running == 0

  virtual_time.run(main())
