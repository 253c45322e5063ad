"""A router over engines of hashing.py, its calls, and what they must be."""

import asyncio

import hashing

from gyre.rollout import engine
from gyre.rollout.router import Router


def request(execution_id="e", number=0, tokens=60, **options):
  return engine.Request(
    ids=[7, 8, 9 + number],
    max_new_tokens=tokens,
    seed=number,
    request_id=f"{execution_id}#{number}",
    execution_id=execution_id,
    **options,
  )


class Told:
  """What a caller was told of its tokens, one by one."""

  def __init__(self):
    self.tokens = []

  def __call__(self, *token):
    self.tokens.append(token)


def check(asked, completion, told, partial=False):
  """A completion is what the request samples undisturbed, or its beginning."""
  ids, logprobs, reason = hashing.whole(asked)
  n = len(completion.ids) if partial else len(ids)
  assert completion.ids.tolist() == ids[:n]
  assert completion.logprobs.tolist() == logprobs[:n]
  if not partial:
    assert completion.finish_reason == reason
  assert told.tokens == list(
    zip(
      completion.ids.tolist(),
      completion.logprobs.tolist(),
      completion.versions.tolist(),
      strict=True,
    )
  )


class Bench:
  """A router over engines, and the calls made through it."""

  def __init__(self, cells="abc", **options):
    self.router = Router(**{"patience_s": 20.0, "leave_s": 0.2} | options)
    self.engines, self.past, self.calls = {}, [], []
    self.all = []
    for name in cells:
      self.new(name)

  def new(self, name, version=0):
    self.engines[name] = hashing.HashingEngine(name, version)
    self.all.append(self.engines[name])
    self.router.add(name, self.engines[name])

  def call(self, asked, router=None):
    told = Told()
    work = asyncio.ensure_future((router or self.router).generate(asked, told))
    self.calls.append((asked, work, told))
    return work

  async def sampled(self, n, at=-1):
    """Waits until a call has been told of n tokens."""
    while len(self.calls[at][2].tokens) < n:
      assert not self.calls[at][1].done()
      await asyncio.sleep(0)

  async def check(self):
    """All calls end as they would undisturbed; nothing is left anywhere."""
    for asked, work, told in self.calls:
      check(asked, await work, told)
    self.check_idle()

  def check_idle(self):
    for e in self.all:
      assert not e.errors and not e.live, (e.name, e.errors, e.live)
    table = self.router._table
    assert not table.calls and not table._of
    assert not any(c.calls for c in table.cells.values())
    assert asyncio.all_tasks() == {asyncio.current_task()}


def run(test, *args, **options):
  unheard = []

  async def main():
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    async with asyncio.timeout(60):
      await test(Bench(*args, **options))

  asyncio.run(main())
  assert not unheard
