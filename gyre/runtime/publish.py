"""Weights to engines.

An engine of this process takes the arrays. Others take a directory in the
Hugging Face layout that is complete, hashed and renamed before they see it.
Either way a version is published only after the checkpoint that holds it is
committed, so that no rollout carries a version whose weights are lost.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from gyre.models import load
from gyre.models.config import ModelConfig
from gyre.rollout.engine import Engine
from gyre.store import manifest
from gyre.types import Snapshot


class PublishError(RuntimeError):
  """An engine does not serve what was published."""


async def publish(engine: Engine, weights: Any, version: int) -> None:
  """Gives an engine new weights and checks that it serves them.

  Args:
    engine: the engine.
    weights: a parameter pytree (in process) or a Snapshot.
    version: of the weights, committed.

  Raises:
    PublishError: the engine still names another version.
  """
  if isinstance(weights, Snapshot):
    manifest.verify(weights.path)
  await engine.load_weights(weights, version)
  served = engine.stats().version
  if served != version:
    raise PublishError(
      f"published version {version}, the engine serves {served}"
    )


def write_snapshot(
  directory: str | os.PathLike,
  model_cfg: ModelConfig,
  params: Any,
  version: int,
  tokenizer_files: Mapping[str, str] | None = None,
) -> Snapshot:
  """Writes weights for engines of other processes.

  Args:
    directory: the parent, on tmpfs or a shared disk; the snapshot is
      directory/v000012.
    model_cfg: the model.
    params: its parameters.
    version: of the weights.
    tokenizer_files: file name -> text, written beside them.

  Returns:
    The committed snapshot: transformers and vLLM load its path.
  """
  final = pathlib.Path(directory) / f"v{version:06d}"
  final.parent.mkdir(parents=True, exist_ok=True)
  tmp = manifest.temporary(final)
  load.save_hf_dir(tmp, model_cfg, params, tokenizer_files=tokenizer_files)
  committed = manifest.commit(tmp, final, {"version": version})
  return Snapshot(version, str(final), committed.files)
