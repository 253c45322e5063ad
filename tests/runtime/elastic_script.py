"""A durable emulated run over processes, to be killed: elastic_script.py DIR.

Prints a line when its cells are up, and one when it has ended.
"""

import asyncio
import dataclasses
import pathlib
import sys

import elastic_runs

from gyre.runtime import emulated_run
from gyre.runtime.workers import Supervision
from gyre.store.rollouts import RolloutStore

SUPERVISION = Supervision(
  heartbeat_s=0.5, frozen_s=10.0, backoff_s=0.05, backoff_max_s=0.2,
  restarts=1000,
)  # fmt: skip


def emulation(speedup=25.0):
  """About 4 s over processes, undisturbed."""
  made = elastic_runs.emulation(steps=6, evaluated=2)
  profile = dataclasses.replace(made.profile, speedup=speedup)
  return dataclasses.replace(made, profile=profile)


def main(directory):
  """Runs, or goes on."""
  with RolloutStore(directory / "rollouts.sqlite") as store:
    outcome = asyncio.run(
      emulated_run.run_local(
        emulation(), directory, supervision=SUPERVISION, store=store
      )
    )
  print(f"ended: {len(outcome.staleness)} groups", flush=True)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
