"""From the worker's thread to the loop of a request's caller."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib

import numpy as np

from gyre.rollout import engine


class Sink:
  """Where a request's tokens and answer go.

  Attributes:
    future: the answer.
  """

  def __init__(
    self, loop: asyncio.AbstractEventLoop, on_token: engine.OnToken | None
  ):
    """loop, on_token: the caller's."""
    self.future: concurrent.futures.Future = concurrent.futures.Future()
    self._loop = loop
    self._on_token = on_token

  def tokens(self, ids: np.ndarray, logprobs: np.ndarray, version: int) -> None:
    """Streams the tokens of a dispatch into the caller's loop."""
    if self._on_token is None or self.future.done() or not len(ids):
      return
    with contextlib.suppress(RuntimeError):  # the loop was closed
      self._loop.call_soon_threadsafe(
        self._tell, ids.tolist(), logprobs.tolist(), version
      )

  def _tell(self, ids: list[int], logprobs: list[float], version: int) -> None:
    for i, logprob in zip(ids, logprobs, strict=True):
      self._on_token(i, logprob, version)

  def answer(self, completion: engine.Completion) -> None:
    """Ends the request, unless the caller has gone."""
    if self.future.set_running_or_notify_cancel():
      self.future.set_result(completion)

  def fail(self, error: engine.EngineError) -> None:
    """Ends the request with an error, unless the caller has gone."""
    if self.future.set_running_or_notify_cancel():
      self.future.set_exception(error)
