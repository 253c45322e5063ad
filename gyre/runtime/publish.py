"""Weights to engines.

An engine of this process takes the arrays. Others take a directory that is
complete, hashed and renamed before they see it. Either way a version is
published only after the checkpoint that holds it is committed, so that no
rollout carries a version whose weights are lost.
"""

from __future__ import annotations

import asyncio
from typing import Any

from gyre.rollout.engine import Engine, EngineDown, EngineError
from gyre.rollout.fingerprint import Fingerprint, Fingerprinted
from gyre.rollout.router import Router
from gyre.store import manifest
from gyre.types import Snapshot


class PublishError(RuntimeError):
  """An engine does not use what was published."""


async def publish(
  engine: Engine,
  weights: Any,
  version: int,
  expected: Fingerprint | None = None,
) -> None:
  """Gives an engine new weights and checks that it uses them.

  Live requests wait meanwhile, so that nothing is sampled from weights that
  were not checked.

  Args:
    engine: the engine, awake.
    weights: a parameter pytree (in process) or a Snapshot.
    version: of the weights, committed.
    expected: fingerprint.of the trainer's weights in the engine's dtype;
      None takes that of `weights`, if they are arrays and the engine tells
      its own.

  Raises:
    PublishError: the engine still names another version, or computes with
      other weights. It is left paused.
  """
  if isinstance(weights, Snapshot):
    await asyncio.to_thread(manifest.checked, weights.path, weights.verified)
  elif expected is None and isinstance(engine, Fingerprinted):
    expected = await asyncio.to_thread(engine.fingerprint_of, weights)
  paused, wrong = engine.stats().paused, ""
  await engine.pause()
  try:
    await engine.load_weights(weights, version)
    served = engine.stats().version
    if served != version:
      wrong = f"the engine serves {served}"
    elif expected is not None:
      wrong = await engine.difference(expected)
  finally:
    if not paused and not wrong:
      await engine.resume()
  if wrong:
    raise PublishError(f"published version {version}: {wrong}")


async def publish_to_all(
  router: Router,
  weights: Any,
  version: int,
) -> dict[str, Exception]:
  """Publishes to every cell that serves; one that does not pass is failed.

  Args:
    router: over the cells.
    weights, version: as for `publish`.

  Returns:
    Cells that failed, and why: their executions are to be placed elsewhere.
  """
  cells = router.serving
  results = await asyncio.gather(
    *(publish(router.engine(c), weights, version) for c in cells),
    return_exceptions=True,
  )
  failed = {}
  for cell, result in zip(cells, results, strict=True):
    if isinstance(result, EngineError | PublishError):
      failed[cell] = result
      router.fail(cell, EngineDown(str(result)))
    elif result is not None:
      raise result
    elif cell in router.serving:
      router.serve(cell)  # wakes who waits for this version
  return failed
