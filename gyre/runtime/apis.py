"""The model APIs that external harnesses of a run talk to."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import pathlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from gyre.config import Config, ConfigError
from gyre.envs import serve
from gyre.harness.proxy import Proxy
from gyre.harness.render import Renderer
from gyre.rollout import engine as engine_lib
from gyre.rollout.engine import Engine

# (instruction, solution turns) -> prompt -> what a policy that knows says.
Reference = Callable[[str, Sequence[str]], Callable[[str], str]]


class _Watched:
  """An engine whose failure is remembered: a harness only sees a status."""

  def __init__(self, engine: Engine):
    self._engine = engine
    self.failure: Exception | None = None

  def __getattr__(self, name: str) -> Any:
    return getattr(self._engine, name)

  async def generate(
    self,
    request: engine_lib.Request,
    on_token: engine_lib.OnToken | None = None,
  ) -> engine_lib.Completion:
    try:
      return await self._engine.generate(request, on_token)
    except engine_lib.Rejected:
      raise  # the request is at fault
    except Exception as e:
      self.failure = e
      raise


@dataclasses.dataclass(frozen=True)
class Api:
  """A proxy over an engine, and the socket at which it is served."""

  proxy: Proxy
  socket: pathlib.Path
  engine: _Watched

  def check(self) -> None:
    """Raises what the engine failed with, if it did.

    Raises:
      EngineError: the calls of a harness could not be answered, through no
        fault of its own. Or whatever else it was that the engine raised.
    """
    if self.engine.failure is not None:
      raise self.engine.failure


class Apis:
  """One proxy an engine, served from its first execution until `close`."""

  def __init__(self, config: Config, renderer: Renderer):
    """Takes what every proxy shares.

    Args:
      config: rollout and agent sections.
      renderer: messages to token ids.
    """
    self._config, self._renderer = config, renderer
    self._served: list[tuple[Engine, Api]] = []
    self._lock = asyncio.Lock()
    self._stack = contextlib.AsyncExitStack()

  @contextlib.asynccontextmanager
  async def serving(self, engine: Engine) -> AsyncIterator[Api]:
    """An Api over `engine` for the length of the block."""
    watched = _Watched(engine)
    proxy = Proxy(
      watched,
      self._renderer,
      rollout=self._config.rollout,
      max_context=self._config.agent.max_context,
      max_new_tokens=self._config.agent.max_new_tokens,
    )
    async with serve.served(proxy.app) as socket:
      yield Api(proxy, socket, watched)

  async def of(self, engine: Engine) -> Api:
    """The engine's Api, the same each time.

    Raises:
      SandboxError: its socket cannot be made.
    """
    async with self._lock:
      for known, api in self._served:
        if known is engine:
          return api
      api = await self._stack.enter_async_context(self.serving(engine))
      self._served.append((engine, api))
      return api

  async def close(self) -> None:
    """Serves no more."""
    self._served.clear()
    await self._stack.aclose()


def load_reference(path: str) -> Reference:
  """The `reference` of the Python file that warm_start.policy names.

  Raises:
    ConfigError: there is no such file, or no such function in it.
  """
  spec = importlib.util.spec_from_file_location("_gyre_reference", path)
  if spec is None or not pathlib.Path(path).is_file():
    raise ConfigError(f"warm_start.policy: {path} is no Python file")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except (ImportError, SyntaxError) as e:
    raise ConfigError(f"warm_start.policy: {path}: {e}") from None
  if not callable(getattr(module, "reference", None)):
    raise ConfigError(f"warm_start.policy: {path} has no function 'reference'")
  return module.reference
