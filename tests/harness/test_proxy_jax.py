"""The proxy in front of the embedded engine, on a tiny random model."""

import asyncio
import threading
import time

import audited
import numpy as np
import proxying
import pytest
from small_model import small_model

from gyre import config
from gyre.rollout.jax_engine import JaxEngine

openai = pytest.importorskip("openai", reason="needs the openai SDK")
anthropic = pytest.importorskip("anthropic", reason="needs the anthropic SDK")

ROLLOUT = config.Rollout(
  max_slots=8, prefill_chunk=64, num_pages=512, page_size=8
)
TOOL = {
  "name": "shell",
  "description": "Runs.",
  "input_schema": {"type": "object"},
}


class Watched:
  """Passes everything on, and keeps what the engine was given and said."""

  def __init__(self, engine):
    self.engine, self.seen, self.live = engine, [], 0

  def __getattr__(self, name):
    return getattr(self.engine, name)

  async def generate(self, request, on_token=None):
    self.live += 1
    completion = await self.engine.generate(request, on_token)
    self.live -= 1
    self.seen.append((request, completion))
    return completion


@pytest.fixture(scope="module")
def engine(renderer):
  cfg, params = small_model(renderer.vocab_size, seed=1)
  engine = JaxEngine(params, cfg, rollout=ROLLOUT, deterministic=True)
  asyncio.run(engine.ready())
  yield engine
  asyncio.run(engine.close())


def serve(engine, renderer, **options):
  watched = Watched(engine)
  return proxying.Served(
    watched, renderer, rollout=ROLLOUT, max_context=1024, **options
  )


def check(calls, watched):
  """Records are what the engine was given and said, bit for bit."""
  seen = {r.seed: (r, c) for r, c in watched.seen}
  assert len(calls) == len(seen) == len(watched.seen)
  for call in calls:
    request, completion = seen[call.sampling_used["seed"]]
    for mine, its in (
      (call.prompt_ids, request.ids),
      (call.completion_ids, completion.ids),
      (call.logprobs, completion.logprobs),
      (call.versions, completion.versions),
    ):
      np.testing.assert_array_equal(mine, its)
      assert mine.dtype == its.dtype
    assert np.all(call.logprobs <= 0) and len(call.completion_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdks_talk_to_a_random_model(engine, renderer, stream):
  with serve(engine, renderer) as served:
    keys = [served.open(), served.open()]
    one = openai.OpenAI(
      base_url=served.url + "/v1", api_key=keys[0], timeout=60
    )
    two = anthropic.Anthropic(base_url=served.url, api_key=keys[1], timeout=60)
    chat = [{"role": "user", "content": "go"}]
    messages = [{"role": "user", "content": "go"}]
    for turn in range(4):
      common = {"model": "m", "max_tokens": 12 + turn}
      if stream:
        pieces = one.chat.completions.create(
          messages=chat, stream=True, **common
        )
        text = "".join(p.choices[0].delta.content or "" for p in pieces)
        with two.messages.stream(
          messages=messages, tools=[TOOL], **common
        ) as events:
          answer = events.get_final_message()
      else:
        said = one.chat.completions.create(messages=chat, **common)
        text = said.choices[0].message.content
        answer = two.messages.create(messages=messages, tools=[TOOL], **common)
      chat += [{"role": "assistant", "content": text}]
      chat += [{"role": "user", "content": f"on {turn}"}]
      content = answer.content or "nothing"
      messages += [{"role": "assistant", "content": content}]
      messages += [{"role": "user", "content": f"on {turn}"}]
    recorded = [served.close(key) for key in keys]
  check([*recorded[0], *recorded[1]], served.engine)
  for calls in recorded:
    assert len(calls) == 4
    audited.check(calls)
    assert proxying.check_extends(calls) >= 2
  assert [c.parent_hint for c in recorded[0]] == [None, "0000", "0001", "0002"]


def test_a_call_interrupted_at_the_engine_is_the_same_call(engine, renderer):
  """A pause that gives slots away, in the middle: nothing changes."""

  def once(interrupt):
    with serve(engine, renderer) as served:
      key = served.open(execution_id="g/7", group_id="g", seed=5)
      client = openai.OpenAI(
        base_url=served.url + "/v1", api_key=key, timeout=60
      )
      done = threading.Event()

      def disturb():
        while not done.is_set():
          if served.engine.live:
            served.run(engine.pause(keep=False))
            served.run(engine.resume())
          time.sleep(0.02)

      thread = threading.Thread(target=disturb)
      if interrupt:
        thread.start()
      client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "go"}],
        max_tokens=120,
        extra_body={"stop": ["never said by it"]},
      )
      done.set()
      if interrupt:
        thread.join()
      (call,) = served.close(key)
      return call, len(served.engine.seen)

  whole, requests = once(False)
  again, resent = once(True)
  assert requests == 1 and resent > 1
  np.testing.assert_array_equal(whole.completion_ids, again.completion_ids)
  np.testing.assert_array_equal(whole.logprobs, again.logprobs)
  assert whole.finish_reason == again.finish_reason
