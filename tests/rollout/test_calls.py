"""A model call is one, whatever the engine does to it meanwhile."""

import asyncio
import dataclasses

import numpy as np
import pytest

from gyre.rollout import calls, engine

WHOLE = list(range(10, 30))
REQUEST = engine.Request(
  ids=[1, 2, 3], max_new_tokens=20, seed=7, request_id="r"
)


class Counting:
  """Goes on counting from the prompt; gives up after `cuts` tokens each."""

  def __init__(self, cuts=(), tick_s=None, fail_at=None):
    self.cuts, self.tick_s, self.requests = list(cuts), tick_s, []
    self.live, self.aborts, self.fail_at = set(), 0, fail_at

  async def generate(self, request, on_token=None):
    self.requests.append(request)
    self.live.add(request.request_id)
    done = len(request.ids) - 3
    cut = self.cuts.pop(0) if self.cuts else None
    ids, reason = [], "stop"
    for i in WHOLE[done : done + request.max_new_tokens]:
      if request.request_id not in self.live or len(ids) == cut:
        reason = "abort"
        break
      if self.fail_at == i:
        raise engine.EngineDown("gone")
      ids.append(i)
      if on_token is not None:
        on_token(i, -float(i), len(self.requests))
      if self.tick_s is not None:
        await asyncio.sleep(self.tick_s)
    if len(ids) == cut:
      reason = "abort"
    self.live.discard(request.request_id)
    return engine.Completion(
      ids=np.asarray(ids, np.int32),
      logprobs=-np.asarray(ids, np.float32),
      versions=np.full(len(ids), len(self.requests), np.int32),
      finish_reason=reason,
    )

  async def abort(self, request_id):
    self.aborts += 1
    found = request_id in self.live
    self.live.discard(request_id)
    return found


def run(e, request=REQUEST, **options):
  told = []
  completion = asyncio.run(
    calls.generate(e, request, on_token=lambda *t: told.append(t), **options)
  )
  assert [t[0] for t in told] == completion.ids.tolist()
  assert [t[1] for t in told] == completion.logprobs.tolist()
  assert [t[2] for t in told] == completion.versions.tolist()
  return completion


@pytest.mark.parametrize("cuts", [(), (0,), (3,), (1, 0, 5), (4, 4, 4, 4)])
def test_what_an_engine_gives_up_goes_on_elsewhere(cuts):
  e = Counting(cuts)
  completion = run(e)
  assert completion.ids.tolist() == WHOLE
  assert completion.finish_reason == "stop"
  assert len(e.requests) == len(cuts) + 1
  for i, request in enumerate(e.requests):
    sampled = WHOLE[: sum(cuts[:i])]
    assert list(request.ids) == [1, 2, 3, *sampled]
    assert request.max_new_tokens == 20 - len(sampled)
    assert request.seed == 7


def test_given_up_at_its_last_token_it_is_full():
  completion = run(Counting((20,)))
  assert completion.ids.tolist() == WHOLE
  assert completion.finish_reason == "length"


def test_an_engine_that_gives_up_without_end_is_down():
  e = Counting((0,) * 1000)
  with pytest.raises(engine.EngineDown, match="64 times in a row"):
    run(e)
  # A token now and then is progress.
  again = Counting(([0] * 60 + [1]) * 4)
  assert run(again).ids.tolist() == WHOLE


@pytest.mark.parametrize("how", ["timeout", "until"])
def test_the_caller_ends_it_and_keeps_the_partial(how):
  e = Counting((2,), tick_s=0.01)

  async def main():
    until = asyncio.Event()
    options = {"timeout_s": 0.1} if how == "timeout" else {"until": until}
    asyncio.get_running_loop().call_later(0.1, until.set)
    return await calls.generate(e, REQUEST, **options)

  completion = asyncio.run(main())
  n = len(completion.ids)
  assert 2 < n < 20
  assert completion.ids.tolist() == WHOLE[:n]
  assert completion.finish_reason == "abort"
  assert not e.live


@pytest.mark.parametrize("how", ["timeout", "until"])
def test_ended_before_it_began_it_is_empty(how):
  e = Counting()

  async def main():
    until = asyncio.Event()
    until.set()
    options = {"timeout_s": 0.0} if how == "timeout" else {"until": until}
    return await calls.generate(e, REQUEST, **options)

  completion = asyncio.run(main())
  assert len(completion.ids) == 0 and completion.ids.dtype == np.int32
  assert completion.finish_reason == "abort"
  assert not e.requests


def test_cancelled_it_leaves_no_request():
  e = Counting(tick_s=0.01)

  async def main():
    work = asyncio.ensure_future(calls.generate(e, REQUEST))
    await asyncio.sleep(0.05)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
      await work

  asyncio.run(main())
  assert e.aborts == 1 and not e.live


def test_errors_of_the_engine_are_passed_on():
  with pytest.raises(engine.EngineDown, match="gone"):
    run(Counting(fail_at=15))
  request = dataclasses.replace(REQUEST, max_new_tokens=5)
  assert run(Counting(fail_at=15), request).ids.tolist() == WHOLE[:5]
