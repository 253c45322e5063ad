"""From a task to an outcome, whoever plays it: sandbox, play, verification.

What the built-in agent and external harnesses have in common. A failure of the
sandbox or the verifier is tried again, in a new sandbox; the player's own
failures never are.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from gyre import config, types
from gyre.envs import sandbox as sandbox_lib

Play = Callable[[sandbox_lib.Sandbox], Awaitable[None]]
Verify = Callable[..., Awaitable[types.Outcome]]


async def verified(
  request: sandbox_lib.Request,
  play: Play,
  *,
  options: config.Sandbox,
  retries: int,
  verify: Verify,
) -> types.Outcome:
  """Sandbox, play, verification; again while failures allow it.

  Args:
    request: opens the sandbox that is played in.
    play: plays in it, from the beginning, and keeps the workspace.
    options: of the sandbox that is verified in.
    retries: further attempts after failures, in all.
    verify: scores the workspace; verifier.verify or one like it.

  Returns:
    The Outcome; "eval_failed" when no attempt is left. Its detail tells what
    of the workspace was not kept.
  """
  while True:
    try:
      async with sandbox_lib.opened(request) as box:
        await play(box)
        while True:
          outcome = await verify(
            request.task,
            box.workspace,
            options,
            deterministic=request.deterministic,
          )
          if outcome.status != "eval_failed" or retries <= 0:
            return _with_what_is_left_out(outcome, box.kept_without)
          retries -= 1
    except sandbox_lib.SandboxError as e:
      if retries <= 0:
        return types.Outcome(status="eval_failed", detail=str(e))
      retries -= 1


def _with_what_is_left_out(
  outcome: types.Outcome, left_out: Sequence[str]
) -> types.Outcome:
  if not left_out:
    return outcome
  # A name is the agent's: on one line, and not for ever.
  said = f"not kept: {' '.join(left_out[0].split())[:200]}"
  if more := len(left_out) - 1:
    said += f" and {more} more"
  detail = "; ".join(filter(None, (outcome.detail, said)))
  return dataclasses.replace(outcome, detail=detail)


async def within(
  limit_s: float | None, work: Awaitable[types.Outcome]
) -> types.Outcome:
  """The outcome of `work`; "discarded" where it takes longer than the limit.

  Args:
    limit_s: the overall timeout, or None for none.
    work: cancelled when time is up, and waited for.
  """
  try:
    async with asyncio.timeout(limit_s) as scope:
      return await work
  except TimeoutError:
    if not scope.expired():
      raise
    return types.Outcome(
      status="discarded",
      timeout="overall",
      detail=f"not finished within {limit_s} s",
    )


def with_timeout(outcome: types.Outcome, truncated: str) -> types.Outcome:
  """The outcome of what `truncated` cut: time cuts, and is still scored."""
  if truncated == "time" and outcome.status in ("scored", "no_artifact"):
    return dataclasses.replace(outcome, timeout="harness")
  return outcome
