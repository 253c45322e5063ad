"""The router: whatever cells do, a call is one and equals itself undisturbed.

Engines here are of tests/rollout/hashing.py: a token is a hash of all before
it, so a call that goes on from anything but its own partial is seen.
"""

import asyncio
import dataclasses

import hashing
import numpy as np
import pytest
from routing import Told, check, request, run

from gyre.rollout import engine


def test_a_call_goes_where_its_execution_is():
  async def test(b):
    for i, cell in enumerate("abcab"):
      b.router.place(f"e{i}", cell)
    for i in range(5):
      b.call(request(f"e{i}", i))
    await b.check()
    for cell in "abc":
      went = [name for name, _ in b.engines[cell].seen]
      placed = b.router.executions(cell)
      assert went == [f"{e}#{e[1]}" for e in placed]
    assert b.router.cell_stats()["c"].finished == 1
    assert b.router.stats().finished == 5

  run(test)


def test_an_execution_nowhere_waits_and_one_that_may_be_anywhere_does_not():
  async def test(b):
    work = b.call(request())
    spread = [
      b.call(request(f"v{i}", i), b.router.anywhere()) for i in range(6)
    ]
    await asyncio.gather(*spread)
    assert not work.done() and b.router.stats().waiting == 1
    assert [len(e.seen) for e in b.all] == [2, 2, 2]
    b.router.place("e", "b")
    await b.check()
    assert b.engines["b"].seen[-1] == ("e#0", 3)

  run(test)


@pytest.mark.parametrize("times", [1, 7])
def test_a_moved_execution_keeps_its_tokens(times):
  async def test(b):
    b.router.place("e", "a")
    b.call(request(tokens=60, stop_ids=[1000]))
    for i in range(times):
      await b.sampled(5 * (i + 1))
      await b.router.move("e", "bca"[i % 3])
      assert not b.engines["abc"[i % 3]].live
    await b.check()
    starts = sorted(n for e in b.all for _, n in e.seen)
    assert len(starts) == times + 1
    assert starts[0] == 3 and all(
      3 + 5 * i <= n < 8 + 5 * i for i, n in enumerate(starts)
    )

  run(test)


def test_a_drained_cell_is_empty_and_admits_nobody():
  async def test(b):
    for i in range(4):
      b.router.place(f"e{i}", "a")
      b.call(request(f"e{i}", i))
      b.call(request(f"e{i}", 10 + i))
    await b.sampled(5)
    with pytest.raises(ValueError, match="e1 cannot move from a to a"):
      await b.router.drain("a", {"e1": "a"})
    left = await b.router.drain("a", {"e0": "b", "e1": "c"})
    assert left == ["e0", "e1", "e2", "e3"]
    source = b.engines["a"]
    assert not source.live
    source.admits = False
    assert b.router.serving == ("b", "c")
    assert b.router.executions("b") == ["e0"]
    first = [work for asked, work, _ in b.calls if asked.execution_id < "e2"]
    await asyncio.gather(*first)
    assert not any(w.done() for _, w, _ in b.calls if w not in first)
    # A new call of one that was left waits too.
    b.call(request("e2", 30))
    b.router.place("e2", "c")
    # Role back: those placed there again go on.
    b.router.place("e3", "a")
    await asyncio.sleep(0.01)
    source.admits = True
    b.router.serve("a")
    await b.check()

  run(test)


def test_moved_away_and_back_at_once_it_is_still_one_call():
  async def test(b):
    b.router.place("e", "a")
    b.call(request())
    await b.sampled(5)
    for cell in "ba":
      b.router.place("e", cell)
    await asyncio.sleep(0)
    for cell in "bab":
      b.router.place("e", cell)
      await asyncio.sleep(0)
      b.router.place("e", "a")
    await b.check()

  run(test)


def test_no_engine_with_older_weights_than_promised_is_asked():
  async def test(b):
    b.router.place("e", "a", version=2)
    b.router.place("f", "b")
    first, second = b.call(request()), b.call(request("f", 1, min_version=1))
    third = b.call(request("g", 2, min_version=1), b.router.anywhere())
    await asyncio.sleep(0.05)
    assert not (first.done() or second.done() or third.done())
    await b.engines["c"].load_weights(None, 1)  # not told to the router
    completion = await third
    assert set(completion.versions) == {1}
    await b.router.load_weights(None, 2)
    assert set((await first).versions) == set((await second).versions) == {2}
    await b.check()
    assert b.router.stats().version == 2

  run(test)


def test_each_token_has_the_version_that_sampled_it():
  async def test(b):
    await b.engines["b"].load_weights(None, 4)
    b.router.place("e", "a")
    work = b.call(request())
    await b.sampled(10)
    await b.router.move("e", "b")
    await b.check()
    versions = (await work).versions
    old = int(np.sum(versions == 0))
    assert 10 <= old < 15 and set(versions[old:]) == {4}

  run(test)


@pytest.mark.parametrize("how", ["dies", "hangs", "is failed", "is removed"])
def test_a_failed_cells_calls_go_on_with_what_was_streamed(how):
  downs = []

  async def test(b):
    b.router.place("e", "a")
    b.router.place("f", "a")
    b.call(request())
    b.call(request("f", 1))
    await b.sampled(10)
    source = b.engines["a"]
    if how == "dies":
      source.dead = "killed"
    elif how == "hangs":
      source.hung = True
      with pytest.raises(engine.EngineDown, match="did not give up"):
        await b.router.drain("a", {"e": "b"})
    elif how == "is failed":
      source.hung = True
      b.router.fail("a", engine.EngineDown("its process ended"))
    else:
      source.hung = True
      b.router.remove("a")
    await asyncio.sleep(0.05)
    assert not source.live
    assert len(b.calls[0][2].tokens) < 20 or how == "hangs"
    b.router.place("e", "b")
    if how == "is removed":
      assert downs == []
      b.router.place("f", "c")
    else:
      assert downs == ["a"]
      with pytest.raises(engine.EngineDown):
        b.router.serve("a")
      # A new engine under the old name; f's calls may have to be placed.
      b.new("a")
      b.router.place("f", "a")
    await b.check()
    began = {n for e in b.all[1:] for _, n in e.seen}
    assert min(began) >= 10
    assert b.router.stats().generated_tokens >= 120

  run(test, on_down=lambda cell, error: downs.append(cell))


def test_an_engine_that_dies_after_the_last_token_has_answered():
  class Last(hashing.HashingEngine):
    async def generate(self, asked, on_token=None):
      await super().generate(asked, on_token)
      raise engine.EngineDown("just now")

  async def test(b):
    b.router.place("e", "a")
    for asked in (
      request(),
      request(number=1, tokens=2000, stop_ids=[hashing.STOP]),
    ):
      b.router.add("a", Last("a"))
      await b.call(asked)
    await b.check()

  run(test)


def test_an_engine_that_was_left_is_heard_no_more():
  class Ghost(hashing.HashingEngine):
    async def generate(self, asked, on_token=None):
      self.speak = on_token
      return await super().generate(asked, on_token)

  async def test(b):
    b.router.add("a", Ghost("a"))
    b.router.place("e", "a")
    b.call(request())
    await b.sampled(5)
    ghost = b.router.engine("a")
    b.router.fail("a", engine.EngineDown("lost"))
    await asyncio.sleep(0.01)
    b.router.place("e", "b")
    await b.sampled(20)
    ghost.speak(2, -2.0, 0)
    await b.check()

  run(test)


@pytest.mark.parametrize("state", ["nowhere", "down", "older"])
def test_patience_ends_with_the_reason(state):
  async def test(b):
    kind, match = engine.EngineDown, "no cell served e for 0.2 s"
    if state == "down":
      b.router.place("e", "a")
      b.engines["a"].dead = "out of memory"
      match = "for 0.2 s: out of memory"
    elif state == "older":
      b.router.place("e", "a", version=3)
      kind, match = engine.StaleVersion, "a serves version 0, e was promised 3"
    with pytest.raises(kind, match=match):
      await b.call(request())
    b.check_idle()

  run(test, patience_s=0.2)


def test_an_engine_that_refuses_by_version_is_asked_again():
  class Late(hashing.HashingEngine):
    refusals = 2

    async def generate(self, asked, on_token=None):
      if self.refusals:
        self.refusals -= 1
        raise engine.StaleVersion("not yet")
      return await super().generate(asked, on_token)

  async def test(b):
    b.router.add("a", Late("a"))
    b.router.place("e", "a")
    b.call(request())
    await b.check()
    b.router.add("a", Late("a"))
    b.engines["a"] = b.router.engine("a")
    b.router.engine("a").refusals = 1000
    with pytest.raises(engine.StaleVersion, match="not yet"):
      await b.router.generate(request())

  run(test, patience_s=0.5)


def test_abort_returns_the_partial_wherever_the_call_is():
  async def test(b):
    b.router.place("e", "a")
    assert not await b.router.abort("e#0")
    running, waiting = b.call(request()), b.call(request("f", 1))
    await b.sampled(5, 0)
    for name in ("e#0", "f#1"):
      assert await b.router.abort(name)
    partial = await running
    assert partial.finish_reason == "abort" and 5 <= len(partial.ids) < 10
    asked, _, told = b.calls[0]
    check(asked, partial, told, partial=True)
    assert (await waiting).finish_reason == "abort"
    assert len((await waiting).ids) == 0
    # Between two cells.
    again = b.call(request(number=2))
    await b.sampled(5)
    b.router.place("e", "b")
    assert await b.router.abort("e#2")
    assert (await again).finish_reason == "abort"
    b.check_idle()

  run(test)


def test_an_engines_own_abort_is_passed_on():
  async def test(b):
    b.router.place("e", "a")
    work = b.call(request())
    await b.sampled(5)
    await b.engines["a"].abort("e#0")
    assert (await work).finish_reason == "abort"
    b.check_idle()

  run(test)


def test_pause_and_resume_hold_for_all_cells():
  async def test(b):
    b.router.place("e", "a")
    b.call(request())
    await b.sampled(5)
    await b.router.pause()
    b.new("d")
    b.router.place("f", "d")
    b.call(request("f", 1))
    seen = [len(told.tokens) for _, _, told in b.calls]
    await asyncio.sleep(0.02)
    assert [len(told.tokens) for _, _, told in b.calls] == seen
    assert b.router.stats().paused
    await b.router.resume()
    await b.check()

    works = [b.call(request(number=2)), b.call(request("g", 3))]
    await b.sampled(5, -2)
    await b.router.pause(keep=False)
    await b.router.resume()
    assert [(await w).finish_reason for w in works] == ["abort"] * 2
    b.check_idle()

  run(test)


def test_names_are_served_once_and_errors_passed_on():
  class Strict(hashing.HashingEngine):
    async def generate(self, asked, on_token=None):
      raise engine.Rejected("too long")

  async def test(b):
    b.router.place("e", "a")
    work = b.call(request())
    await b.sampled(1)
    with pytest.raises(engine.Rejected, match="'e#0' is being served"):
      await b.router.generate(request())
    await work
    b.router.add("b", Strict("b"))
    b.router.place("e", "b")
    with pytest.raises(engine.Rejected, match="too long"):
      await b.router.generate(request())
    for act in (b.router.engine, b.router.serve, b.router.executions):
      with pytest.raises(ValueError, match="no cell 'z'; there are: c, a, b"):
        act("z")
    nameless = dataclasses.replace(request(), request_id="")
    b.router.place("e", "a")
    told = Told()
    check(nameless, await b.router.generate(nameless, told), told)
    b.check_idle()

  async def reorder(b):
    b.router.add("a", b.engines["a"])
    await test(b)

  run(reorder)


def test_close_ends_every_call():
  async def test(b):
    b.router.place("e", "a")
    works = [b.call(request()), b.call(request("f", 1))]
    await b.sampled(5, 0)
    await b.router.close()
    for work in works:
      with pytest.raises(engine.EngineDown, match="router is closed"):
        await work
    with pytest.raises(engine.EngineDown, match="router is closed"):
      await b.router.generate(request())
    b.check_idle()
    assert b.engines["a"].dead is None

  run(test)


def test_counters_survive_their_engine():
  async def test(b):
    b.router.place("e", "a")
    await b.call(request())
    before = b.router.stats()
    assert before.generated_tokens == 60 and before.finished == 1
    b.new("a")
    b.router.remove("b")
    assert b.router.stats().generated_tokens == 60
    assert b.router.stats().total_pages == 0

  run(test)
