"""SIGTERM while harnesses start and run: the run ends, and they with it."""

import asyncio
import os
import signal
import threading

import external_config
import pytest

from gyre import config
from gyre.envs import sandbox, scripted
from gyre.envs.tasksets import shell
from gyre.harness.render import minimal_renderer
from gyre.runtime import collect, main
from gyre.runtime.runner import Runner
from gyre.runtime.tasks import TaskSource
from gyre.types import Group


async def executions(runner, engine, cfg, count):
  """Runs executions until they are done, which they never are."""
  source = TaskSource(cfg)
  run = runner(engine, 1.0)
  try:
    async with asyncio.TaskGroup() as tasks:
      for i in range(count):
        task = source.get("train", i)
        group = Group(f"g{i}", i, task.task_id)
        (one,) = collect.dispatches(group, task, 1, 0)
        tasks.create_task(run(one))
  finally:
    await runner.close()


def test_sigterm_at_any_moment_ends_all_of_it():
  cfg = config.from_config_dict(external_config.get_config())
  renderer = minimal_renderer(shell.training_text(60), 512)
  engine = scripted.ScriptedPolicy(["sleep 60"], renderer, "line")
  ours = f"{os.getpid()}-"
  # Should a signal come before the run listens, it is not the tests' end.
  before = signal.signal(signal.SIGTERM, lambda *_: None)
  try:
    for i in range(8):
      runner = Runner(cfg, renderer)
      again = threading.Timer(
        0.02 + 0.06 * i, os.kill, (os.getpid(), signal.SIGTERM)
      )
      again.start()
      with pytest.raises(KeyboardInterrupt):
        main._until_done(executions(runner, engine, cfg, 6))
      again.join()
      left = [p.name for p in sandbox.base_directory().iterdir()]
      left = [n for n in left if n.startswith(ours) and "-shared" not in n]
      assert not left, i
  finally:
    signal.signal(signal.SIGTERM, before)
