"""The embedded engine: continuous batching over paged keys and values.

An asyncio API over one worker thread that owns a batcher, with the scheduler,
the pages and the weights; commands reach it between dispatches, so a request
can be interrupted at any token.

Equality. Sampling depends on nothing but a request's logits, seed and
positions. In deterministic mode the logits do too, bit for bit: every token,
of a prompt or sampled, is one row of one program of one shape. XLA's CPU
matrix products give a row the same bits whatever the other rows hold and
wherever it stands, when the shape is the same; attention reads keys in fixed
blocks of absolute positions, where blocks unseen by a row leave its sums
unchanged; the vocabulary is summed over fixed columns. So neither the other
requests, nor a prefix-cache hit, nor where a prompt was cut, preempted or
resumed changes a bit. Otherwise prefill runs in wide chunks, decode in the
smallest window that fits, else over the pages, and equality holds to rounding.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import jax

from gyre import config
from gyre.models.config import ModelConfig
from gyre.rollout import batcher, engine, fingerprint, schedule, shapes, sink
from gyre.rollout import programs as programs_lib


class JaxEngine:
  """An `engine.Engine` on one JAX device of this process."""

  def __init__(
    self,
    params: Any,
    model_cfg: ModelConfig,
    *,
    version: int = 0,
    rollout: config.Rollout | None = None,
    max_context: int = 0,
    deterministic: bool = False,
    device: Any = None,
    name: str = "jax",
    programs: programs_lib.Programs | None = None,
  ):
    """Starts the worker, which copies the weights and compiles.

    Args:
      params: parameter pytree in any layout; copied.
      model_cfg: the model.
      version: of the weights.
      rollout: slots, pages, chunk and dtype.
      max_context: longest prompt and completion together; 0 means the
        model's, or what the pages hold if that is less.
      deterministic: bit-equal whatever else runs (see the module).
      device: a jax.Device; None means the first.
      name: of the engine.
      programs: compiled steps of another engine of the same settings and
        device, to share.

    Raises:
      ValueError: programs of another model, dtype or shapes.
    """
    self.name = name
    self.model_cfg = model_cfg
    self._rollout = r = rollout or config.Rollout()
    capacity = r.num_pages * r.page_size
    self.max_context = min(max_context or model_cfg.context_length, capacity)
    chosen = shapes.choose(r, self.max_context, deterministic)
    self._device = device or jax.devices()[0]
    self._programs = programs or programs_lib.Programs(
      model_cfg, chosen, r.dtype, self._device
    )
    mine = (model_cfg, chosen, str(r.dtype), self._device)
    if self._programs.settings != mine:
      raise ValueError(f"programs of {self._programs.settings}, not {mine}")
    self._batcher = batcher.Batcher(
      params,
      self._programs,
      version=version,
      max_slots=r.max_slots,
      deterministic=deterministic,
      name=name,
    )
    self._closed = False
    self._error: engine.EngineDown | None = None
    self._commands: collections.deque = collections.deque()
    self._wakeup = threading.Condition()
    self._ready: concurrent.futures.Future = concurrent.futures.Future()
    self._thread = threading.Thread(
      target=self._run, name=f"engine-{name}", daemon=True
    )
    self._thread.start()

  # The asyncio side.

  async def ready(self) -> None:
    """Returns when everything is compiled; raises EngineDown if that fails."""
    await asyncio.shield(asyncio.wrap_future(self._ready))

  async def generate(
    self,
    request: engine.Request,
    on_token: engine.OnToken | None = None,
  ) -> engine.Completion:
    """See engine.Engine."""
    ids = engine.check_request(
      request,
      vocab_size=self.model_cfg.vocab_size,
      max_context=self.max_context,
    )
    live = schedule.Live(
      request=request,
      name=request.request_id,
      ids=ids.tolist(),
      prompt=len(ids),
      arrival=0,
      stops=frozenset(int(i) for i in request.stop_ids),
      sink=sink.Sink(asyncio.get_running_loop(), on_token),
    )
    try:
      await self._call(lambda: self._batcher.submit(live))
      return await asyncio.wrap_future(live.sink.future)
    except asyncio.CancelledError:
      self._post(lambda: self._batcher.abort(live), concurrent.futures.Future())
      raise

  async def abort(self, request_id: str) -> bool:
    """See engine.Engine."""
    return await self._call(lambda: self._abort(request_id))

  async def pause(self, keep: bool = True) -> None:
    """See engine.Engine."""
    await self._call(lambda: self._batcher.pause(keep))

  async def resume(self) -> None:
    """See engine.Engine."""
    await self._call(self._batcher.resume)

  async def load_weights(self, weights: Any, version: int) -> None:
    """See engine.Engine; takes arrays, whose reader checks what it read."""
    await self._call(lambda: self._batcher.load(weights, version))

  async def sleep(self) -> None:
    """See engine.Engine; nothing is kept but the requests' ids."""
    await self._call(self._batcher.sleep)

  async def wake(self) -> None:
    """See engine.Engine."""
    await self._call(self._batcher.wake)

  async def fingerprint(self) -> fingerprint.Fingerprint:
    """Of the weights that it computes with, on its device.

    Raises:
      ValueError: it has none: it sleeps, or slept and was given none.
    """
    return await self._call(self._fingerprint)

  async def difference(self, expected: fingerprint.Fingerprint) -> str:
    """See fingerprint.Fingerprinted."""
    return fingerprint.difference(expected, await self.fingerprint())

  def fingerprint_of(self, weights: Any) -> fingerprint.Fingerprint:
    """See fingerprint.Fingerprinted."""
    return fingerprint.of(weights, self.model_cfg, self._rollout.dtype)

  async def close(self) -> None:
    """See engine.Engine."""
    with self._wakeup:
      self._closed = True
      self._wakeup.notify()
    await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

  @property
  def programs(self) -> programs_lib.Programs:
    """Its compiled steps, for another engine of this device to share."""
    return self._programs

  @property
  def device(self) -> Any:
    """Where weights, pages and programs live."""
    return self._device

  @property
  def version(self) -> int:
    """Version of the weights being served."""
    return self._batcher.version

  def stats(self) -> engine.EngineStats:
    """See engine.Engine; read without stopping the worker."""
    return self._batcher.stats()

  def _down(self) -> engine.EngineDown:
    return self._error or engine.EngineDown(f"engine {self.name} is closed")

  def _post(self, command: Callable[[], Any], future) -> None:
    with self._wakeup:
      if self._closed:
        future.set_exception(self._down())
        return
      self._commands.append((command, future))
      self._wakeup.notify()

  async def _call(self, command: Callable[[], Any]) -> Any:
    """Runs a command in the worker, between dispatches."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    self._post(command, future)
    return await asyncio.shield(asyncio.wrap_future(future))

  # The worker's side.

  def _run(self) -> None:
    try:
      self._batcher.start()
      self._ready.set_result(None)
      while self._take_commands():
        self._batcher.step()
      error = None
    except Exception as e:
      error = engine.EngineDown(
        f"engine {self.name} failed: {type(e).__name__}: {e}"
      )
      error.__cause__ = e
    self._shut(error)

  def _shut(self, error: engine.EngineDown | None) -> None:
    with self._wakeup:
      self._error = error
      self._closed = True
      commands = list(self._commands)
      self._commands.clear()
    if not self._ready.done():
      self._ready.set_exception(self._down())
    for _, future in commands:
      future.set_exception(self._down())
    for live in self._batcher.clear():
      live.sink.fail(self._down())

  def _take_commands(self) -> bool:
    """Runs what was posted; waits while there is nothing to do."""
    while True:
      with self._wakeup:
        while not self._closed and not self._commands and self._batcher.idle:
          self._wakeup.wait()
        if self._closed:
          return False
        if not self._commands:
          return True
        command, future = self._commands.popleft()
      try:
        result = command()
      except (engine.EngineError, ValueError, OSError) as e:
        future.set_exception(e)
      except BaseException:
        future.set_exception(
          engine.EngineDown(f"engine {self.name} failed in a command")
        )
        raise
      else:
        future.set_result(result)

  def _abort(self, request_id: str) -> bool:
    return self._batcher.abort(self._batcher.requests.get(request_id))

  def _fingerprint(self) -> fingerprint.Fingerprint:
    if self._batcher.params is None:
      raise ValueError(f"engine {self.name} holds no weights")
    return self.fingerprint_of(self._batcher.params)
