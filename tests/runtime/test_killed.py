"""Any one process of an elastic run, killed at any moment.

A durable emulated run over processes: a controller, and a worker a cell with
its trainer and its engine. The acceptance line, 50 random moments:

  python -m pytest tests/runtime/test_killed.py -m slow -s
"""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import elastic_script
import pytest

from gyre.rollout.router import Router
from gyre.runtime import emulation as emulation_lib
from gyre.runtime import event_log
from gyre.store.database import StoreError
from gyre.store.rollouts import RolloutStore

HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 120


def start(directory):
  """The command; its own words go to a file."""
  directory.mkdir(exist_ok=True)
  with open(directory / "out.txt", "ab") as out:
    return subprocess.Popen(
      [sys.executable, HERE / "elastic_script.py", directory],
      stdout=out,
      stderr=out,
    )


def workers(controller):
  """Process ids of the cells that are up or starting."""
  task = pathlib.Path(f"/proc/{controller.pid}/task/{controller.pid}")
  try:
    return [int(pid) for pid in (task / "children").read_text().split()]
  except FileNotFoundError:
    return []


def finished(directory):
  """{id: tokens} of every execution that ended."""
  try:
    store = RolloutStore(directory / "rollouts.sqlite", readonly=True)
  except StoreError:
    return {}  # not even begun
  with store:
    return {
      name: [
        (c.completion_ids.tolist(), c.versions.tolist())
        for c in store.iter_calls(name)
      ]
      for name in store.execution_ids("train")
    }


def ended(controller, directory):
  """Waits for the end of a run that nobody kills any more."""
  try:
    code = controller.wait(TIMEOUT_S)
  except subprocess.TimeoutExpired:
    controller.kill()
    controller.wait()
    raise AssertionError(f"hangs: {said(directory)}") from None
  assert code == 0, said(directory)


def said(directory):
  """The last words of a run."""
  return (directory / "out.txt").read_text()[-4000:]


def check(directory, seen, controllers):
  """What holds of a run that ended, however often it was killed."""
  e = elastic_script.emulation()
  now = finished(directory)
  lost = [name for name in seen if now.get(name) != seen[name]]
  assert not lost, f"finished executions lost or changed: {lost}"
  with RolloutStore(directory / "rollouts.sqlite", readonly=True) as store:
    events = store.events(event_log.EVENT)
    books = event_log.audit(
      e.layout, e.law, [(r["step"], r["payload"]) for r in events]
    )
  assert not books.faults, books.faults[:5]
  assert books.lives == controllers
  trained = [g for groups in books.applied.values() for g in groups]
  assert len(trained) == len(set(trained)) == e.steps * e.law.batch
  assert max(d for *_, d in books.staleness) <= e.law.maximum()
  work = emulation_lib.EmulatedWork(e, Router(), directory=directory)
  assert work.position.step == e.steps
  assert sorted(work.position.consumed) == sorted(books.staleness)
  for group in trained:
    for index in range(e.law.group_size):
      assert work.name((group, index)) in now
  return books


def wait(controller, seconds, for_workers):
  """Waits so long, for workers from when there are any; False: it ended."""
  until = time.monotonic() + seconds
  while controller.poll() is None:
    now = time.monotonic()
    if for_workers and not workers(controller):
      until = max(until, now + 0.05)
    elif now >= until:
      return True
    time.sleep(0.01)
  return False


def kill_at_random(root, rng, times):
  """Kills a process at each of so many moments; runs begin anew as they end.

  Returns:
    (controllers, workers) killed.
  """
  killed = [0, 0]
  runs = 0
  while sum(killed) < times:
    directory, controllers, seen = root / f"run{runs}", 1, {}
    runs += 1
    controller = start(directory)
    try:
      while sum(killed) < times:
        one_worker = rng.random() < 0.6
        if not wait(controller, rng.uniform(0.05, 1.5), one_worker):
          break
        up = workers(controller)
        if one_worker:
          with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(up), signal.SIGKILL)
            killed[1] += 1
          continue
        controller.kill()
        controller.wait()
        killed[0] += 1
        seen |= finished(directory)
        controllers += 1
        controller = start(directory)
      ended(controller, directory)
    finally:
      controller.kill()
      controller.wait()
    # A controller that was killed before it began leaves no record.
    books = check_lives(directory, seen, controllers)
    print(f"{directory.name}: {controllers} lives, {books.deaths} deaths noted")
  return killed


def check_lives(directory, seen, controllers):
  """`check`, where a life may have ended before its first decision."""
  with RolloutStore(directory / "rollouts.sqlite", readonly=True) as store:
    began = sum(
      "Begin" in r["payload"]["event"] for r in store.events(event_log.EVENT)
    )
  assert began <= controllers
  return check(directory, seen, began)


def test_killed_a_few_times(tmp_path):
  seed = int(os.environ.get("GYRE_CRASH_SEED", "0"))
  kill_at_random(tmp_path, random.Random(seed), 4)


@pytest.mark.slow
def test_killed_at_50_random_moments(tmp_path):
  seed = int(os.environ.get("GYRE_CRASH_SEED", "1"))
  killed = kill_at_random(tmp_path, random.Random(seed), 50)
  print(f"killed: {killed[0]} controllers, {killed[1]} workers")
