"""The embedded engine: equality, versions, interruption, life cycle."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest
from small_engines import (
  FEW_MODES,
  MODES,
  V,
  all_of,
  compilations,
  interrupt,
  params_of,
  requests_of,
  rescore,
  same,
  small_engine,
  with_engine,
)

from gyre.rollout import engine


@pytest.mark.parametrize("deterministic", MODES)
def test_alone_equals_among_others_and_teacher_forced_rescoring(deterministic):
  requests = requests_of(32)

  async def test(e):
    together = await all_of(e, requests)
    e2 = [await e.generate(r) for r in requests[:6]]  # prefix cache is warm
    return together, e2, e.stats()

  together, again, stats = with_engine(test, deterministic=deterministic)
  alone = with_engine(
    lambda e: _sequence(e, requests[:6]), deterministic=deterministic
  )
  assert stats.hit_tokens > 0
  for request, completion in zip(requests, together, strict=True):
    assert len(completion.ids) == request.max_new_tokens
    assert completion.finish_reason == "length"
    gap = completion.logprobs - rescore(request, completion)
    assert np.abs(gap).max() <= 1e-4
    assert (completion.logprobs <= 0).all()
  atol = 0.0 if deterministic else 1e-5
  for a, b, c in zip(together, again, alone, strict=False):
    same(a, b, atol)
    same(a, c, atol)


async def _sequence(e, requests):
  return [await e.generate(r) for r in requests]


@pytest.mark.parametrize("deterministic", MODES)
def test_abort_and_resume_equals_uninterrupted(deterministic):
  request = dataclasses.replace(requests_of(1)[0], max_new_tokens=100)

  async def test(e):
    whole = await e.generate(request)
    others = asyncio.ensure_future(all_of(e, requests_of(8, seed=5)))
    seen = []
    running, known = await interrupt(
      e, request, lambda: e.abort("held"), lambda *token: seen.append(token)
    )
    assert known
    partial = await running
    await others
    assert partial.finish_reason == "abort"
    assert 20 <= len(partial.ids) < 100
    assert seen == list(
      zip(partial.ids, partial.logprobs, partial.versions, strict=True)
    )
    assert not await e.abort("held")
    rest = await e.generate(
      dataclasses.replace(
        request,
        ids=[*request.ids, *partial.ids],
        max_new_tokens=100 - len(partial.ids),
      )
    )
    return whole, partial, rest

  whole, partial, rest = with_engine(test, deterministic=deterministic)
  joined = dataclasses.replace(
    rest,
    ids=np.concatenate([partial.ids, rest.ids]),
    logprobs=np.concatenate([partial.logprobs, rest.logprobs]),
  )
  same(whole, joined, 0.0 if deterministic else 1e-5)


@pytest.mark.parametrize("deterministic", FEW_MODES)
def test_preemption_changes_nothing(deterministic):
  requests = [
    dataclasses.replace(r, max_new_tokens=60) for r in requests_of(12, seed=3)
  ]
  whole = with_engine(
    lambda e: all_of(e, requests), deterministic=deterministic
  )

  async def test(e):
    return await all_of(e, requests), e.stats()

  tight, stats = with_engine(test, deterministic=deterministic, num_pages=40)
  assert stats.preemptions > 0
  assert stats.reprefilled_tokens > 0
  assert stats.free_pages == stats.total_pages == 40
  for a, b in zip(whole, tight, strict=True):
    same(a, b, 0.0 if deterministic else 1e-5)


def test_nothing_compiles_after_warm_up():
  rng = np.random.default_rng(0)
  requests = [
    engine.Request(
      ids=rng.integers(0, V, rng.integers(1, 100)),
      max_new_tokens=int(rng.integers(1, 12)),
      temperature=float(rng.choice([0.0, 0.7, 1.0])),
      top_p=float(rng.choice([0.9, 1.0])),
      top_k=int(rng.choice([0, 5])),
      stop_ids=rng.integers(0, V, rng.integers(0, 12)),
      seed=i,
      cache_salt=str(rng.integers(2)),
    )
    for i in range(1000)
  ]

  async def test(e):
    programs = e.stats().compilations
    with compilations() as compiled:
      for i in (1, 7, 32, 960):
        await all_of(e, requests[:i])
        del requests[:i]
    assert e.stats().compilations == programs
    assert compiled == []
    return e.stats()

  stats = with_engine(test)
  assert stats.finished == 1000


@pytest.mark.parametrize("deterministic", MODES)
def test_new_weights_are_used_at_once_and_recorded_by_token(deterministic):
  request = dataclasses.replace(requests_of(1)[0], max_new_tokens=100)

  async def test(e):
    running, _ = await interrupt(e, request, e.pause)
    await e.load_weights(params_of(1), 4)
    assert e.stats().running == 0 and e.stats().waiting == 1
    await e.resume()
    mixed = await running
    fresh = await e.generate(request)
    with pytest.raises(engine.StaleVersion, match="version 4"):
      await e.load_weights(params_of(), 3)
    with pytest.raises(engine.StaleVersion, match="5 was asked for"):
      await e.generate(dataclasses.replace(request, min_version=5))
    return mixed, fresh, e.stats()

  mixed, fresh, stats = with_engine(test, deterministic=deterministic)
  old = int(np.sum(mixed.versions == 0))
  assert 0 < old < 100
  assert (mixed.versions[old:] == 4).all()
  scores = np.where(
    mixed.versions == 0,
    rescore(request, mixed),
    rescore(request, mixed, params_of(1)),
  )
  np.testing.assert_allclose(mixed.logprobs, scores, atol=1e-4)
  # A cached page of version 0 would show here.
  np.testing.assert_allclose(
    fresh.logprobs, rescore(request, fresh, params_of(1)), atol=1e-4
  )
  assert stats.version == 4
  assert stats.reprefilled_tokens > 0


def test_a_group_prefills_its_prompt_once():
  prompt = np.random.default_rng(0).integers(0, V, 100)
  group = [
    engine.Request(ids=prompt, max_new_tokens=9, seed=i) for i in range(8)
  ]
  for deterministic in MODES:

    async def test(e):
      return await all_of(e, group), e.stats()

    outs, stats = with_engine(test, deterministic=deterministic)
    assert stats.prefilled_tokens == 99
    assert len({tuple(o.ids) for o in outs}) > 1
    for request, out in zip(group, outs, strict=True):
      gap = out.logprobs - rescore(request, out)
      assert np.abs(gap).max() <= 1e-4


def test_salts_do_not_share_pages():
  request = engine.Request(ids=np.arange(80), max_new_tokens=2)

  async def test(e):
    await e.generate(request)
    await e.generate(dataclasses.replace(request, cache_salt="b"))
    other = e.stats().hit_tokens
    await e.generate(dataclasses.replace(request, cache_salt="b"))
    return other, e.stats().hit_tokens

  other, same = with_engine(test)
  assert other == 0
  assert same > 70


def test_stop_ids_end_a_completion_and_are_kept():
  request = dataclasses.replace(requests_of(1)[0], max_new_tokens=80)

  async def test(e):
    whole = await e.generate(request)
    stop = int(whole.ids[30])
    at = whole.ids.tolist().index(stop)
    unused = [i for i in range(V) if i not in whole.ids][:12]
    few, many = await all_of(
      e,
      [
        dataclasses.replace(request, stop_ids=(stop,)),
        # More than the program holds: found by the host.
        dataclasses.replace(request, stop_ids=(*unused, stop)),
      ],
    )
    return whole, at, few, many

  whole, at, *stopped = with_engine(test)
  for completion in stopped:
    assert completion.finish_reason == "stop"
    np.testing.assert_array_equal(completion.ids, whole.ids[: at + 1])


def test_pause_keeps_or_aborts():
  request = dataclasses.replace(requests_of(1)[0], max_new_tokens=100)

  async def test(e):
    whole = await e.generate(request)
    kept, _ = await interrupt(e, request, e.pause)
    before = e.stats()
    await asyncio.sleep(0.1)
    assert e.stats().generated_tokens == before.generated_tokens
    assert before.paused and before.running == 1
    await e.resume()
    same(whole, await kept, 1e-5)

    gone, _ = await interrupt(e, request, lambda: e.pause(keep=False))
    assert (await gone).finish_reason == "abort"
    await e.resume()

  with_engine(test)


def test_requests_that_can_never_fit_are_rejected_at_once():
  async def test(e):
    with pytest.raises(engine.Rejected, match="exceed the context of 256"):
      await e.generate(engine.Request(ids=[1] * 250, max_new_tokens=7))
    with pytest.raises(engine.Rejected, match="vocabulary"):
      await e.generate(engine.Request(ids=[V], max_new_tokens=5))
    twin = engine.Request(ids=[1], max_new_tokens=50, request_id="x")
    first = asyncio.ensure_future(e.generate(twin))
    await asyncio.sleep(0)
    with pytest.raises(engine.Rejected, match="'x' is being served"):
      await e.generate(twin)
    await first

  with_engine(test)


def test_a_cancelled_caller_frees_its_slot():
  async def test(e):
    request = engine.Request(ids=[1, 2], max_new_tokens=250)
    e.arm()
    task = asyncio.ensure_future(
      e.generate(dataclasses.replace(request, request_id="held"))
    )
    assert await asyncio.to_thread(e.reached.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    e.go.set()
    await e.generate(engine.Request(ids=[1, 2], max_new_tokens=1))
    assert e.stats().running == 0
    assert e.stats().free_pages == e.stats().total_pages

  with_engine(test)


def test_close_and_failure_answer_every_waiter():
  request = engine.Request(ids=[1, 2], max_new_tokens=250)

  async def closed():
    e = small_engine()
    waiting = asyncio.ensure_future(e.generate(request))
    await e.ready()
    await e.pause()
    await e.close()
    with pytest.raises(engine.EngineDown, match="closed"):
      await waiting
    with pytest.raises(engine.EngineDown, match="closed"):
      await e.generate(request)

  async def failed():
    e = small_engine()
    await e.ready()
    await e.pause()
    waiting = [asyncio.ensure_future(e.generate(request)) for _ in range(3)]
    await asyncio.sleep(0.05)
    jax.tree.leaves(e._batcher.params)[0].delete()  # a buffer lost under it
    await e.resume()
    for task in waiting:
      with pytest.raises(engine.EngineDown, match="failed"):
        await task
    with pytest.raises(engine.EngineDown, match="failed"):
      await e.generate(request)
    await e.close()

  asyncio.run(closed())
  asyncio.run(failed())


@pytest.mark.parametrize("deterministic", FEW_MODES)
def test_bf16_stays_near_f32_rescoring(deterministic):
  requests = requests_of(8)
  outs = with_engine(
    lambda e: all_of(e, requests), deterministic=deterministic, dtype="bfloat16"
  )
  gaps = [
    np.abs(o.logprobs - rescore(r, o))
    for r, o in zip(requests, outs, strict=True)
  ]
  assert np.concatenate(gaps).mean() < 0.05
