"""gyre, Async and Colocate over processes and the clock on the wall.

The acceptance line, three seeds at 1 h = 10 s, 5 minutes each:

  python -m pytest tests/runtime/test_emulated_run.py -m slow -s
"""

import asyncio

import pytest

from gyre.runtime import emulated_run
from gyre.sim import tables

DESIGNS = [d for d in tables.TABLE_1 if d.id in ("A0", "C0", "E0")]


def compare(directory, seed, *, steps, **options):
  """Speed-ups of gyre over the others: {id: (predicted, measured)}."""
  compared = asyncio.run(
    emulated_run.compare(
      DESIGNS, tables.CALIBRATION, directory, seed=seed, steps=steps, **options
    )
  )
  for c in compared:
    print(
      f"seed {seed} {c.design.id}: {c.measured.hours:.2f} h, predicted "
      f"{c.predicted.hours:.2f} h"
    )
    assert len(c.measured.staleness) == steps * c.design.law.batch
    shares = [row["emulated/share"] for _, row in c.measured.metrics]
    assert shares == pytest.approx([1.0] * steps)
  speed_ups = emulated_run.speed_ups(compared)
  for name, (predicted, measured) in speed_ups.items():
    print(f"seed {seed} over {name}: {measured:.3f}, predicted {predicted:.3f}")
  return speed_ups


def test_speed_ups_are_the_simulators(tmp_path):
  """At the fastest clock the machine keeps up with.

  The seconds that a busy machine adds are fewer emulated hours the slower the
  clock; a difference between run and simulator stays.
  """
  for speedup in (2400.0, 1200.0, 600.0):
    speed_ups = compare(
      tmp_path / f"{speedup:g}", 0, steps=4, speedup=speedup, calls=2
    )
    far = {
      name: pair
      for name, pair in speed_ups.items()
      if pair[1] != pytest.approx(pair[0], rel=0.1)
    }
    if not far:
      break
  assert not far


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_speed_ups_at_10_s_an_hour(tmp_path, seed):
  speed_ups = compare(tmp_path, seed, steps=tables.STEPS_1, speedup=360.0)
  for predicted, measured in speed_ups.values():
    assert measured == pytest.approx(predicted, rel=0.1)
