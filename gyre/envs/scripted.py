"""Engines that know the answers: they replay reference solutions.

Put in place of a model, one makes the agent loop, or an external harness,
record supervised transcripts with exactly the ids that a policy would be
trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gyre.envs import task as task_lib
from gyre.envs import tool_calls
from gyre.harness import render
from gyre.rollout import engine as engine_lib


class ScriptedPolicy:
  """An Engine for one execution: completion i is turn i of a solution.

  After the last turn it says that it is done. Log-probabilities are 0.

  Attributes:
    requests: those served, in order.
  """

  def __init__(
    self,
    turns: Sequence[str] | task_lib.Task,
    renderer: render.Renderer,
    tool_format: str,
    *,
    version: int = 0,
  ):
    """Writes the completions.

    Args:
      turns: commands, or a task whose solution_turns they are.
      renderer: encodes them, and names the token that ends a turn.
      tool_format: as agent.tool_format.
      version: recorded with every token.

    Raises:
      ValueError: the task has no solution_turns.
    """
    if isinstance(turns, task_lib.Task):
      if not turns.solution_turns:
        raise ValueError(f"task {turns.task_id} has no solution_turns")
      turns = turns.solution_turns
    texts = [tool_calls.write(tool_format, c) for c in turns]
    self._completions = [
      [*renderer.encode(text), renderer.end_id]
      for text in (*texts, tool_calls.DONE)
    ]
    self._version = version
    self.requests: list[engine_lib.Request] = []

  def _next(self, request: engine_lib.Request) -> list[int]:
    del request  # it is the next turn's, whatever it says
    turn = min(len(self.requests), len(self._completions) - 1)
    return self._completions[turn]

  async def generate(
    self,
    request: engine_lib.Request,
    on_token: engine_lib.OnToken | None = None,
  ) -> engine_lib.Completion:
    """The next completion, cut at request.max_new_tokens."""
    whole = self._next(request)
    self.requests.append(request)
    ids = whole[: request.max_new_tokens]
    if on_token is not None:
      for i in ids:
        on_token(i, 0.0, self._version)
    return engine_lib.Completion(
      ids=np.asarray(ids, np.int32),
      logprobs=np.zeros(len(ids), np.float32),
      versions=np.full(len(ids), self._version, np.int32),
      finish_reason="stop" if len(ids) == len(whole) else "length",
    )

  async def abort(self, request_id: str) -> bool:
    """Nothing ever waits."""
    del request_id
    return False

  async def pause(self, keep: bool = True) -> None:
    """Nothing runs between calls."""
    del keep

  async def resume(self) -> None:
    """Nothing was paused."""

  async def load_weights(self, weights: Any, version: int) -> None:
    """Takes the version number; there are no weights."""
    del weights
    if version < self._version:
      raise engine_lib.StaleVersion(
        f"version {version} is below the one served, {self._version}"
      )
    self._version = version

  async def sleep(self) -> None:
    """Holds no memory."""

  async def wake(self) -> None:
    """Holds no memory."""

  def stats(self) -> engine_lib.EngineStats:
    """The version and how many requests were answered."""
    return engine_lib.EngineStats(
      version=self._version, finished=len(self.requests)
    )

  async def close(self) -> None:
    """Holds nothing."""


class ReplyingPolicy(ScriptedPolicy):
  """An Engine for one execution of a harness: a function knows the answers.

  A harness asks in conversations of its own making (compacted, a sub-agent's),
  which a list of turns cannot follow.
  """

  def __init__(
    self,
    reply: Callable[[str], str],
    renderer: render.Renderer,
    *,
    version: int = 0,
  ):
    """Takes the function.

    Args:
      reply: from the text of a prompt to what is said next.
      renderer: decodes and encodes, and names the token that ends a turn.
      version: recorded with every token.
    """
    super().__init__((), renderer, "line", version=version)
    self._reply, self._renderer = reply, renderer

  def _next(self, request: engine_lib.Request) -> list[int]:
    said = self._reply(self._renderer.decode(request.ids))
    return [*self._renderer.encode(said), self._renderer.end_id]
