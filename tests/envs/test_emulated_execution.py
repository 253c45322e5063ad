"""Emulated executions: their work is time, their calls are one conversation."""

import asyncio
import math

import numpy as np
import pytest
import virtual_time

from gyre.envs import emulated as executions
from gyre.rollout import emulated
from gyre.rollout.profile import Profile

PROFILE = Profile(nodes=1, slots=64, speedup=360, f=1, token_s=36, stream_s=36)


async def run(policy, work_s, **kw):
  named = {"execution_id": "g0/1", "group_id": "g0", "index": 1, "seed": 3}
  return await executions.run_execution(policy, work_s, PROFILE, **(named | kw))


@pytest.mark.parametrize("work_h", [0.001, 0.55, 1.92, 4.0])
def test_work_is_wall_time(work_h):
  got = virtual_time.run(run(emulated.EmulatedEngine(PROFILE), work_h * 3600))
  # An hour is 10 s; rounded to tokens of 0.1 s, at least one.
  assert got.t_end - got.t_start == pytest.approx(
    max(work_h * 10, 0.1), abs=0.051
  )
  assert got.outcome.status == "scored" and got.truncated == ""
  assert got.num_sampled == max(1, round(work_h * 100))


def test_calls_extend_one_another_and_nothing_depends_on_the_load():
  async def both():
    alone = await run(emulated.EmulatedEngine(PROFILE), 6000)
    policy = emulated.EmulatedEngine(PROFILE)
    others = [
      run(policy, 5000, execution_id=f"g1/{i}", group_id="g1", index=i)
      for i in range(8)
    ]
    beside, *_ = await asyncio.gather(run(policy, 6000), *others)
    return alone, beside

  alone, beside = virtual_time.run(both())
  assert len(alone.calls) == 6
  for a, b in zip(alone.calls, beside.calls, strict=True):
    np.testing.assert_array_equal(a.prompt_ids, b.prompt_ids)
    np.testing.assert_array_equal(a.completion_ids, b.completion_ids)
  for before, after in zip(alone.calls, alone.calls[1:], strict=False):
    so_far = np.concatenate([before.prompt_ids, before.completion_ids])
    np.testing.assert_array_equal(after.prompt_ids[: len(so_far)], so_far)
    assert after.parent_hint == before.call_id
  assert alone.outcome == beside.outcome


def test_the_timeout_cuts_and_scores():
  policy = emulated.EmulatedEngine(PROFILE)
  got = virtual_time.run(run(policy, 10_000, timeout_s=3600))
  assert got.t_end - got.t_start == pytest.approx(10, abs=0.02)
  assert got.truncated == "time"
  assert (got.outcome.status, got.outcome.timeout) == ("scored", "harness")
  assert 99 <= got.num_sampled <= 100
  lost = virtual_time.run(
    run(emulated.EmulatedEngine(PROFILE), 100, scored=False)
  )
  assert lost.outcome.score is None and math.isfinite(lost.t_end)
