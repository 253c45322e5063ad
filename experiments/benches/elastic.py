"""Async, Colocate and gyre of table 1, over the real conductor and processes.

Cells are processes that take time and compute nothing; what is measured is
what the controller, the router and the clock make of the scheduler's
decisions. Beside it, the simulator's prediction of the same configuration. The
three run side by side.
"""

from __future__ import annotations

import asyncio
import pathlib
import tempfile
import time

from benches import ours

DESIGNS = ("A0", "C0", "E0")


def measure(
  seed: int = 0, steps: int = 12, speedup: float = 360.0, calls: int = 6
) -> None:
  """Prints the JSON line of the three designs on one seed.

  Args:
    seed: of the executions' works.
    steps: updates.
    speedup: emulated seconds a second; 360: an hour takes 10 s.
    calls: of an execution.
  """
  settings = dict(locals())
  from gyre.runtime import emulated_run
  from gyre.sim import tables

  designs = [d for d in tables.TABLE_1 if d.id in DESIGNS]
  with tempfile.TemporaryDirectory(prefix="gyre-elastic-") as root:
    wall, cpu = time.perf_counter(), time.process_time()
    compared = asyncio.run(
      emulated_run.compare(
        designs,
        tables.CALIBRATION,
        pathlib.Path(root),
        seed=seed,
        steps=steps,
        speedup=speedup,
        calls=calls,
      )
    )
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
  results = {"cpu_share": cpu / wall}
  for c in compared:
    name = c.design.id.lower()
    results |= {
      f"{name}_h": c.measured.hours,
      f"{name}_predicted_h": c.predicted.hours,
      f"{name}_switches": c.measured.switches,
      f"{name}_migrations": c.measured.migrations,
    }
  for name, (predicted, measured) in emulated_run.speed_ups(compared).items():
    results[f"over_{name.lower()}"] = measured
    results[f"over_{name.lower()}_predicted"] = predicted
  ours.emit("elastic", settings, results)
