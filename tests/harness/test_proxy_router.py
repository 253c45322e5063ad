"""The proxy over a router: cells change role under a streaming client."""

import asyncio
import threading
import time

import numpy as np
import proxying
import pytest
from small_model import small_model

from gyre import config
from gyre.rollout.jax_engine import JaxEngine
from gyre.rollout.router import Router

openai = pytest.importorskip("openai", reason="needs the openai SDK")

ROLLOUT = config.Rollout(
  max_slots=8, prefill_chunk=64, num_pages=512, page_size=8
)
CELLS = ("cell 0", "cell 1")


class Slow(JaxEngine):
  """A token a dispatch, with time between, so that a switch comes between."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self._batcher._steps = self._one

  def _one(self, prefilling):
    time.sleep(0.002)
    return 1


@pytest.fixture(scope="module")
def made(renderer):
  """Two engines, and their weights."""
  cfg, params = small_model(renderer.vocab_size, seed=1)
  engines = {}
  for name in CELLS:
    engines[name] = Slow(
      params,
      cfg,
      rollout=ROLLOUT,
      deterministic=True,
      name=name,
      programs=engines[CELLS[0]].programs if engines else None,
    )
  for e in engines.values():
    asyncio.run(e.ready())
  yield engines, params
  for e in engines.values():
    asyncio.run(e.close())


class Cells:
  """Puts each cell to sleep in turn while the other serves."""

  def __init__(self, served, engines, params, most):
    self.served, self.engines, self.params = served, engines, params
    self.router, self.switches, self._at = served.engine, 0, 0
    self._most = most

  async def switch(self):
    """What a role transfer there and back does to a cell."""
    source, target = CELLS[self._at], CELLS[1 - self._at]
    await self.router.drain(
      source, {e: target for e in self.router.executions(source)}
    )
    await self.engines[source].sleep()
    await self.engines[source].load_weights(self.params, 0)
    await self.engines[source].wake()
    self.router.serve(source)
    self._at = 1 - self._at
    self.switches += 1

  def __enter__(self):
    self._done = threading.Event()
    self._thread = threading.Thread(target=self._run)
    self._thread.start()
    return self

  def _run(self):
    rng = np.random.default_rng(4)
    while not self._done.is_set() and self.switches < self._most:
      if self.router.stats().running:
        self.served.run(self.switch())
      time.sleep(rng.uniform(0.005, 0.04))

  def __exit__(self, *exc):
    self._done.set()
    self._thread.join()


def _play(made, renderer, temperature, switches):
  """Streams three turns, while cells switch at most so many times.

  Returns:
    (texts, calls, switches): what the client read, what was recorded.
  """
  engines, params = made
  router = Router(patience_s=30.0)
  rollout = config.Rollout(**{**vars(ROLLOUT), "temperature": temperature})
  with proxying.Served(
    router, renderer, rollout=rollout, max_context=1024
  ) as served:

    async def place():
      for name, e in engines.items():
        router.add(name, e)
      router.place("g/1", CELLS[0])

    served.run(place())
    key = served.open(execution_id="g/1", group_id="g", seed=5)
    client = openai.OpenAI(
      base_url=served.url + "/v1", api_key=key, timeout=60, max_retries=0
    )
    texts = []
    chat = [{"role": "user", "content": "go"}]

    with Cells(served, engines, params, switches) as cells:
      for turn in range(3):
        pieces = list(
          client.chat.completions.create(
            model="m", messages=chat, stream=True, max_tokens=120
          )
        )
        texts.append("".join(p.choices[0].delta.content or "" for p in pieces))
        texts.append(pieces[-1].choices[0].finish_reason)
        chat.append({"role": "assistant", "content": texts[-2]})
        chat.append({"role": "user", "content": f"on {turn}"})
    calls = served.close(key)
    assert router.stats().running == router.stats().waiting == 0
  return texts, calls, cells.switches


def _same(a, b):
  assert a.call_id == b.call_id and a.finish_reason == b.finish_reason
  for mine, its in (
    (a.prompt_ids, b.prompt_ids),
    (a.completion_ids, b.completion_ids),
    (a.logprobs, b.logprobs),
    (a.versions, b.versions),
  ):
    np.testing.assert_array_equal(mine, its)


def _check(made, renderer, temperature, switches):
  texts, calls, _ = _play(made, renderer, temperature, 0)
  again, recorded, seen = _play(made, renderer, temperature, switches)
  assert again == texts  # a client that saw an error would have raised
  assert len(calls) == len(recorded) == 3
  for a, b in zip(calls, recorded, strict=True):
    _same(a, b)
  return seen


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
def test_a_streaming_client_notices_none_of_fifty(made, renderer, temperature):
  seen = 0
  while seen < 50:
    now = _check(made, renderer, temperature, 50)
    assert now
    seen += now
