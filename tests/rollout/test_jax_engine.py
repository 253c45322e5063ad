"""The embedded engine: equality, versions, interruption, life cycle."""

import asyncio
import contextlib
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gyre import config
from gyre.models import attention, transformer
from gyre.models import params as params_lib
from gyre.models.config import ModelConfig
from gyre.rollout import engine
from gyre.rollout.jax_engine import JaxEngine

V = 300
CFG = ModelConfig(
  "qwen3",
  vocab_size=V,
  hidden_size=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  mlp_dim=64,
  context_length=256,
  tie_embeddings=True,
  qk_norm=True,
  init_std=0.2,
  layer_windows=(None, 40),
)
MODES = [False, True]
# Where the other mode compiles many programs for one more test.
FEW_MODES = [pytest.param(False, marks=pytest.mark.slow), True]


@functools.cache
def _params(seed=0):
  return params_lib.init_params(
    params_lib.param_specs(CFG), jax.random.key(seed)
  )


class Held(JaxEngine):
  """Stops between dispatches when the request "held" has 20 tokens."""

  armed = False

  def _step(self):
    super()._step()
    live = self._by_name.get("held")
    if self.armed and live is not None and len(live.logprobs) >= 20:
      self.armed = False
      self.reached.set()
      self.go.wait(60)

  def arm(self):
    self.reached, self.go = threading.Event(), threading.Event()
    self.armed = True


async def _interrupt(e, request, command, on_token=None):
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


def _engine(deterministic=False, params=None, device=None, **rollout):
  settings = {
    "max_slots": 16,
    "prefill_chunk": 64,
    "num_pages": 1024,
    "page_size": 8,
  }
  settings |= rollout
  key = (deterministic, device, *sorted(settings.items()))
  e = Held(
    _params() if params is None else params,
    CFG,
    rollout=config.Rollout(**settings),
    deterministic=deterministic,
    device=device,
    programs=_PROGRAMS.get(key),
  )
  _PROGRAMS[key] = e._programs
  return e


def _requests(n, seed=0, **options):
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


def _with_engine(test, **options):
  """Runs `test(engine)` in a loop of its own, and closes the engine."""

  async def main():
    e = _engine(**options)
    await e.ready()
    try:
      return await asyncio.wait_for(test(e), 120)
    finally:
      await e.close()

  return asyncio.run(main())


async def _all(e, requests):
  return await asyncio.gather(*(e.generate(r) for r in requests))


def _same(a, b, atol=0.0):
  np.testing.assert_array_equal(a.ids, b.ids)
  np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=atol)


@functools.cache
def _scorer():
  @jax.jit
  def score(params, ids, temperature):
    at = jnp.arange(ids.shape[1])[None]
    hidden, _ = transformer.forward(
      params, CFG, ids, at, attention.packed_attend(None, at)
    )
    logits = transformer.logits(params, CFG, hidden)
    return jax.nn.log_softmax(logits / temperature)[0]

  return score


def _rescore(request, completion, params=None):
  """Teacher-forced log-probabilities of what was sampled."""
  n, m = len(request.ids), len(completion.ids)
  ids = np.zeros((1, CFG.context_length), np.int32)
  ids[0, : n + m] = [*request.ids, *completion.ids]
  params = _params() if params is None else params
  table = np.asarray(_scorer()(params, ids, request.temperature))
  return table[np.arange(n - 1, n + m - 1), completion.ids]


@pytest.mark.parametrize("deterministic", MODES)
def test_alone_equals_among_others_and_teacher_forced_rescoring(deterministic):
  requests = _requests(32)

  async def test(e):
    together = await _all(e, requests)
    e2 = [await e.generate(r) for r in requests[:6]]  # prefix cache is warm
    return together, e2, e.stats()

  together, again, stats = _with_engine(test, deterministic=deterministic)
  alone = _with_engine(
    lambda e: _sequence(e, requests[:6]), deterministic=deterministic
  )
  assert stats.hit_tokens > 0
  for request, completion in zip(requests, together, strict=True):
    assert len(completion.ids) == request.max_new_tokens
    assert completion.finish_reason == "length"
    gap = completion.logprobs - _rescore(request, completion)
    assert np.abs(gap).max() <= 1e-4
    assert (completion.logprobs <= 0).all()
  atol = 0.0 if deterministic else 1e-5
  for a, b, c in zip(together, again, alone, strict=False):
    _same(a, b, atol)
    _same(a, c, atol)


async def _sequence(e, requests):
  return [await e.generate(r) for r in requests]


@pytest.mark.parametrize("deterministic", MODES)
def test_abort_and_resume_equals_uninterrupted(deterministic):
  request = dataclasses.replace(_requests(1)[0], max_new_tokens=100)

  async def test(e):
    whole = await e.generate(request)
    others = asyncio.ensure_future(_all(e, _requests(8, seed=5)))
    seen = []
    running, known = await _interrupt(
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

  whole, partial, rest = _with_engine(test, deterministic=deterministic)
  joined = dataclasses.replace(
    rest,
    ids=np.concatenate([partial.ids, rest.ids]),
    logprobs=np.concatenate([partial.logprobs, rest.logprobs]),
  )
  _same(whole, joined, 0.0 if deterministic else 1e-5)


@pytest.mark.parametrize("deterministic", FEW_MODES)
def test_preemption_changes_nothing(deterministic):
  requests = [
    dataclasses.replace(r, max_new_tokens=60) for r in _requests(12, seed=3)
  ]
  whole = _with_engine(lambda e: _all(e, requests), deterministic=deterministic)

  async def test(e):
    return await _all(e, requests), e.stats()

  tight, stats = _with_engine(test, deterministic=deterministic, num_pages=40)
  assert stats.preemptions > 0
  assert stats.reprefilled_tokens > 0
  assert stats.free_pages == stats.total_pages == 40
  for a, b in zip(whole, tight, strict=True):
    _same(a, b, 0.0 if deterministic else 1e-5)


@contextlib.contextmanager
def _compilations():
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
    with _compilations() as compiled:
      for i in (1, 7, 32, 960):
        await _all(e, requests[:i])
        del requests[:i]
    assert e.stats().compilations == programs
    assert compiled == []
    return e.stats()

  stats = _with_engine(test)
  assert stats.finished == 1000


@pytest.mark.parametrize("deterministic", MODES)
def test_new_weights_are_used_at_once_and_recorded_by_token(deterministic):
  request = dataclasses.replace(_requests(1)[0], max_new_tokens=100)

  async def test(e):
    running, _ = await _interrupt(e, request, e.pause)
    await e.load_weights(_params(1), 4)
    assert e.stats().running == 0 and e.stats().waiting == 1
    await e.resume()
    mixed = await running
    fresh = await e.generate(request)
    with pytest.raises(engine.StaleVersion, match="version 4"):
      await e.load_weights(_params(), 3)
    with pytest.raises(engine.StaleVersion, match="5 was asked for"):
      await e.generate(dataclasses.replace(request, min_version=5))
    return mixed, fresh, e.stats()

  mixed, fresh, stats = _with_engine(test, deterministic=deterministic)
  old = int(np.sum(mixed.versions == 0))
  assert 0 < old < 100
  assert (mixed.versions[old:] == 4).all()
  scores = np.where(
    mixed.versions == 0,
    _rescore(request, mixed),
    _rescore(request, mixed, _params(1)),
  )
  np.testing.assert_allclose(mixed.logprobs, scores, atol=1e-4)
  # A cached page of version 0 would show here.
  np.testing.assert_allclose(
    fresh.logprobs, _rescore(request, fresh, _params(1)), atol=1e-4
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
      return await _all(e, group), e.stats()

    outs, stats = _with_engine(test, deterministic=deterministic)
    assert stats.prefilled_tokens == 99
    assert len({tuple(o.ids) for o in outs}) > 1
    for request, out in zip(group, outs, strict=True):
      gap = out.logprobs - _rescore(request, out)
      assert np.abs(gap).max() <= 1e-4


def test_salts_do_not_share_pages():
  request = engine.Request(ids=np.arange(80), max_new_tokens=2)

  async def test(e):
    await e.generate(request)
    await e.generate(dataclasses.replace(request, cache_salt="b"))
    other = e.stats().hit_tokens
    await e.generate(dataclasses.replace(request, cache_salt="b"))
    return other, e.stats().hit_tokens

  other, same = _with_engine(test)
  assert other == 0
  assert same > 70


def test_stop_ids_end_a_completion_and_are_kept():
  request = dataclasses.replace(_requests(1)[0], max_new_tokens=80)

  async def test(e):
    whole = await e.generate(request)
    stop = int(whole.ids[30])
    at = whole.ids.tolist().index(stop)
    unused = [i for i in range(V) if i not in whole.ids][:12]
    few, many = await _all(
      e,
      [
        dataclasses.replace(request, stop_ids=(stop,)),
        # More than the program holds: found by the host.
        dataclasses.replace(request, stop_ids=(*unused, stop)),
      ],
    )
    return whole, at, few, many

  whole, at, *stopped = _with_engine(test)
  for completion in stopped:
    assert completion.finish_reason == "stop"
    np.testing.assert_array_equal(completion.ids, whole.ids[: at + 1])


def test_pause_keeps_or_aborts():
  request = dataclasses.replace(_requests(1)[0], max_new_tokens=100)

  async def test(e):
    whole = await e.generate(request)
    kept, _ = await _interrupt(e, request, e.pause)
    before = e.stats()
    await asyncio.sleep(0.1)
    assert e.stats().generated_tokens == before.generated_tokens
    assert before.paused and before.running == 1
    await e.resume()
    _same(whole, await kept, 1e-5)

    gone, _ = await _interrupt(e, request, lambda: e.pause(keep=False))
    assert (await gone).finish_reason == "abort"
    await e.resume()

  _with_engine(test)


def _bytes_on(device):
  return sum(x.nbytes for x in jax.live_arrays() if device in x.devices())


@pytest.mark.parametrize("deterministic", MODES)
def test_sleep_frees_the_device_and_wake_goes_on_with_given_weights(
  deterministic,
):
  request = dataclasses.replace(_requests(1)[0], max_new_tokens=100)
  # Nothing else is on this device; the other mode's programs exist already.
  device = jax.devices()[3] if deterministic else None

  async def test(e):
    whole = await e.generate(request)
    before = await e.fingerprint()
    # A page more than asked for; float32.
    pages = 2 * CFG.num_layers * 1025 * 8 * 2 * 16 * 4
    memory = pages + sum(x.nbytes for x in jax.tree.leaves(_params()))
    given = jax.tree.map(jnp.copy, _params(1))
    held = _bytes_on(e.device)
    compiled = e.stats().compilations
    with _compilations() as compiled_now:
      slept, _ = await _interrupt(e, request, e.sleep)
      assert e.stats().asleep
      assert held - _bytes_on(e.device) >= memory
      assert not deterministic or _bytes_on(device) == 0
      waiting = asyncio.ensure_future(e.generate(request))
      await asyncio.sleep(0.05)
      with pytest.raises(ValueError, match="holds no weights"):
        await e.fingerprint()
      # Memory and weights come in any order.
      await e.wake()
      await asyncio.sleep(0.05)
      assert not waiting.done() and not slept.done()
      await e.load_weights(_params(), 0)
      assert await e.fingerprint() == before
      for completion in (await slept, await waiting):
        _same(whole, completion, 0.0 if deterministic else 1e-5)

      slept, _ = await _interrupt(e, request, e.sleep)
      with pytest.raises(engine.StaleVersion):
        await e.load_weights(given, -1)
      await e.load_weights(given, 5)
      for x in jax.tree.leaves(given):
        x.delete()
      assert not deterministic or _bytes_on(device) == 0
      assert e.stats().asleep and e.stats().version == 5
      assert not slept.done()
      await e.wake()
      mixed = await slept
    assert compiled_now == []
    assert e.stats().compilations == compiled
    old = int(np.sum(mixed.versions == 0))
    assert old >= 20 and set(mixed.versions[old:]) == {5}
    _same_start(whole, mixed, old, 0.0 if deterministic else 1e-5)
    scores = _rescore(request, mixed, _params(1))
    np.testing.assert_allclose(mixed.logprobs[old:], scores[old:], atol=1e-4)

  _with_engine(test, deterministic=deterministic, device=device)


def _same_start(a, b, n, atol):
  np.testing.assert_array_equal(a.ids[:n], b.ids[:n])
  np.testing.assert_allclose(a.logprobs[:n], b.logprobs[:n], rtol=0, atol=atol)


def test_two_engines_on_two_devices_are_equal_and_apart():
  requests = _requests(8, seed=2)
  devices = jax.devices()[3:5]  # the first has its programs already

  async def main():
    engines = [_engine(deterministic=True, device=d) for d in devices]
    for e in engines:
      await e.ready()
    apart = [await _all(e, requests) for e in engines]
    together = await asyncio.gather(*(_all(e, requests) for e in engines))
    # Other weights in one change nothing in the other.
    await engines[1].load_weights(_params(1), 1)
    mixed = await asyncio.gather(*(_all(e, requests) for e in engines))
    prints = [await e.fingerprint() for e in engines]
    for e, d in zip(engines, devices, strict=True):
      held = [*jax.tree.leaves(e._params), *jax.tree.leaves(e._kv)]
      assert all(x.devices() == {d} for x in held)
      await e.close()
    assert prints[0] != prints[1]
    return [*apart, *together, mixed[0]], mixed[1]

  same, other = asyncio.run(main())
  for outs in same[1:]:
    for a, b in zip(same[0], outs, strict=True):
      _same(a, b)
  for request, out in zip(requests, other, strict=True):
    gap = out.logprobs - _rescore(request, out, _params(1))
    assert np.abs(gap).max() <= 1e-4


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

  _with_engine(test)


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

  _with_engine(test)


def test_close_and_failure_answer_every_waiter():
  request = engine.Request(ids=[1, 2], max_new_tokens=250)

  async def closed():
    e = _engine()
    waiting = asyncio.ensure_future(e.generate(request))
    await e.ready()
    await e.pause()
    await e.close()
    with pytest.raises(engine.EngineDown, match="closed"):
      await waiting
    with pytest.raises(engine.EngineDown, match="closed"):
      await e.generate(request)

  async def failed():
    e = _engine()
    await e.ready()
    await e.pause()
    waiting = [asyncio.ensure_future(e.generate(request)) for _ in range(3)]
    await asyncio.sleep(0.05)
    jax.tree.leaves(e._params)[0].delete()  # a buffer lost under it
    await e.resume()
    for task in waiting:
      with pytest.raises(engine.EngineDown, match="failed"):
        await task
    with pytest.raises(engine.EngineDown, match="failed"):
      await e.generate(request)
    await e.close()

  asyncio.run(closed())
  asyncio.run(failed())


def test_the_givers_arrays_may_be_donated_afterwards():
  params = jax.tree.map(jnp.copy, _params())
  layers = params_lib.convert_layout(params, CFG, layout="layers")

  async def main():
    e = _engine(params=layers)
    await e.ready()
    for x in jax.tree.leaves(layers):
      x.delete()
    out = await e.generate(_requests(1)[0])
    await e.close()
    return out

  out = asyncio.run(main())
  gap = out.logprobs - _rescore(_requests(1)[0], out)
  assert np.abs(gap).max() <= 1e-4


@pytest.mark.parametrize("deterministic", FEW_MODES)
def test_bf16_stays_near_f32_rescoring(deterministic):
  requests = _requests(8)
  outs = _with_engine(
    lambda e: _all(e, requests), deterministic=deterministic, dtype="bfloat16"
  )
  gaps = [
    np.abs(o.logprobs - _rescore(r, o))
    for r, o in zip(requests, outs, strict=True)
  ]
  assert np.concatenate(gaps).mean() < 0.05
