"""An execution of a given work: model calls, and no sandbox.

For emulated engines (rollout/emulated.py): what an agent asks of a router, in
the same order and under the same names, with nothing run between the calls.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import numpy as np

from gyre import types
from gyre.rollout import calls as calls_lib
from gyre.rollout import emulated, engine
from gyre.rollout.profile import Profile

_ASSERTIONS = 4


def _outcome(seed: int, scored: bool, truncated: str) -> types.Outcome:
  """A score that depends on the seed alone."""
  if not scored:
    return types.Outcome("eval_failed", detail="emulated failure")
  ids, _ = emulated.tokens(seed, 0, 1, _ASSERTIONS + 1)
  passed = int(ids[0])
  return types.Outcome(
    "scored",
    score=passed / _ASSERTIONS,
    passed=passed,
    total=_ASSERTIONS,
    timeout="harness" if truncated else "none",
  )


async def run_execution(
  policy: engine.Engine,
  work_s: float,
  profile: Profile,
  *,
  execution_id: str,
  group_id: str,
  index: int,
  seed: int,
  version: int = 0,
  task_id: str = "emulated",
  calls: int = 6,
  prompt_tokens: int = 16,
  observed_tokens: int = 4,
  timeout_s: float = math.inf,
  scored: bool = True,
  clock: Callable[[], float] | None = None,
) -> types.Execution:
  """Runs an execution: calls in a row, each prompt extending the one before.

  The work is rounded to whole tokens, at least one a call, and spread evenly
  over the calls.

  Args:
    policy: the router, or an engine.
    work_s: its work, emulated seconds at rate 1.
    profile: token_s, speedup and vocabulary of the engines.
    execution_id, group_id, index, seed, version, task_id: as in Execution.
    calls: model calls; fewer where there are fewer tokens.
    prompt_tokens: of the first call.
    observed_tokens: that the environment adds between two calls.
    timeout_s: wall timeout in emulated seconds; the execution is cut there,
      and scored as it is.
    scored: False ends it as a failed evaluation.
    clock: seconds since the epoch; default the event loop's time.

  Returns:
    The execution with its outcome.

  Raises:
    EngineDown, Rejected, StaleVersion: of the engine.
  """
  loop = asyncio.get_running_loop()
  clock = clock or loop.time
  started, vocab_size = clock(), profile.vocab_size
  deadline = loop.time() + profile.wall(timeout_s)
  total = max(1, round(work_s / profile.token_s))
  count = min(calls, total)
  prompt, _ = emulated.tokens(seed, 0, prompt_tokens, vocab_size)
  done: list[types.Call] = []
  truncated = ""
  for number in range(count):
    share = total * (number + 1) // count - total * number // count
    request = engine.Request(
      ids=prompt,
      max_new_tokens=share,
      seed=calls_lib.call_seed(seed, group_id, execution_id, number),
      request_id=f"{execution_id}#{number}",
      execution_id=execution_id,
    )
    left = None if math.isinf(deadline) else deadline - loop.time()
    begin = clock()
    got = await calls_lib.generate(policy, request, timeout_s=left)
    if got.finish_reason == "abort":
      truncated = "time"
    if len(got.ids):
      done.append(
        types.Call(
          execution_id=execution_id,
          group_id=group_id,
          call_id=f"{number:04d}",
          parent_hint=f"{number - 1:04d}" if number else None,
          prompt_ids=prompt,
          completion_ids=got.ids,
          logprobs=got.logprobs,
          versions=got.versions,
          finish_reason=got.finish_reason,
          t_start=begin,
          t_end=clock(),
          engine=getattr(policy, "name", ""),
          boundary="strict" if number else "",
        )
      )
    if truncated:
      break
    told, _ = emulated.tokens(seed, len(prompt), observed_tokens, vocab_size)
    prompt = np.concatenate([prompt, got.ids, told])
  return types.Execution(
    execution_id=execution_id,
    group_id=group_id,
    index=index,
    task_id=task_id,
    version=version,
    seed=seed,
    calls=tuple(done),
    outcome=_outcome(seed, scored, truncated),
    truncated=truncated,
    turns=len(done),
    t_start=started,
    t_end=clock(),
  )
