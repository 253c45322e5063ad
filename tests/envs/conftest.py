"""Sandboxes for the tests of this room."""

import asyncio
import functools

import pytest

from gyre import config
from gyre.envs import sandbox
from gyre.envs import task as task_lib


@functools.cache
def _refusal(backend):
  async def probe():
    options = config.Sandbox(backends=(backend,))
    box = await sandbox.open_sandbox(options, task_lib.Task("probe", "x"))
    await box.close()

  try:
    asyncio.run(probe())
  except sandbox.SandboxUnavailable as e:
    return str(e)
  return ""


@pytest.fixture
def bwrap_options():
  """Options for the bubblewrap backend; skips where the host refuses it."""
  if _refusal("bubblewrap"):
    pytest.skip(_refusal("bubblewrap"))
  return config.Sandbox(backends=("bubblewrap",))


@pytest.fixture(params=["bubblewrap", "process"])
def local_options(request):
  """Options for each backend that runs on this machine."""
  if request.param == "bubblewrap" and _refusal("bubblewrap"):
    pytest.skip(_refusal("bubblewrap"))
  return config.Sandbox(backends=(request.param,))
