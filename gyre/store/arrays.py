"""Named arrays in safetensors files, written durably and atomically."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

import numpy as np
import safetensors
import safetensors.numpy

from gyre.store import manifest


class ArraysError(ValueError):
  """A file of arrays cannot be read; the message names it."""


def save_arrays(
  path: str | os.PathLike,
  arrays: Mapping[str, np.ndarray],
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Writes arrays to one safetensors file.

  Args:
    path: the file; replaced atomically if it exists.
    arrays: name -> array of any shape.
    metadata: strings to keep beside them.
  """
  path = pathlib.Path(path)
  tmp = path.with_name(f".tmp-{path.name}")
  safetensors.numpy.save_file(
    {k: np.ascontiguousarray(v) for k, v in arrays.items()},
    tmp,
    metadata=dict(metadata or {}),
  )
  manifest.fsync_path(tmp)
  os.replace(tmp, path)
  manifest.fsync_path(path.parent)


def load_arrays(
  path: str | os.PathLike,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """Reads what `save_arrays` wrote.

  Returns:
    The arrays and the metadata.

  Raises:
    ArraysError: the file is missing or is not a safetensors file.
  """
  try:
    with safetensors.safe_open(os.fspath(path), framework="numpy") as f:
      metadata = f.metadata() or {}
      names = list(f.keys())
      return {k: f.get_tensor(k) for k in names}, dict(metadata)
  except FileNotFoundError:
    raise ArraysError(f"{path} is missing") from None
  except safetensors.SafetensorError as error:
    raise ArraysError(f"{path} is not a safetensors file: {error}") from None
