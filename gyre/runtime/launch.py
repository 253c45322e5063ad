"""What a run is made of, in one process: model, tokenizer, mesh, cell."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gyre.config import Config, ConfigError
from gyre.harness.render import Renderer, TemplateError, minimal_renderer
from gyre.learner import state as state_lib
from gyre.models import gguf, load, params
from gyre.models.config import ModelConfig
from gyre.runtime.tasks import TaskSource

TOKENIZER_TASKS = 1024
_VOCAB_MULTIPLE = 64


@dataclasses.dataclass(frozen=True)
class Launched:
  """What the configuration resolved to.

  Attributes:
    model_cfg: the model.
    renderer: its tokenizer and chat template.
    meshes: of the cells; the first is the core's.
    initial_params: makes or loads the first weights.
  """

  model_cfg: ModelConfig
  renderer: Renderer
  meshes: tuple[jax.sharding.Mesh, ...]
  initial_params: Callable[[], Any]


def use_compilation_cache(directory: pathlib.Path) -> pathlib.Path | None:
  """Keeps compiled programs over processes, so a second start is faster.

  JAX_COMPILATION_CACHE_DIR names another directory; GYRE_COMPILATION_CACHE=0
  turns it off.

  Args:
    directory: where, unless the environment says otherwise.

  Returns:
    The directory used, or None.
  """
  if os.environ.get("GYRE_COMPILATION_CACHE") == "0":
    return None
  named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
  path = pathlib.Path(named) if named else directory
  path.mkdir(parents=True, exist_ok=True)
  jax.config.update("jax_compilation_cache_dir", str(path))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
  return path


def cache_directory() -> pathlib.Path:
  """Returns where compiled programs are kept by default."""
  return pathlib.Path("~/.cache/gyre/jax").expanduser()


def cells_platform() -> str:
  """Returns the platform of JAX in the processes of cells.

  JAX_PLATFORMS names it; else it is the GPU where there is one and JAX can
  use it. This process need not have looked at its devices.
  """
  if named := os.environ.get("JAX_PLATFORMS"):
    return named
  found = any(pathlib.Path("/dev").glob("nvidia[0-9]*"))
  plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
  usable = any(importlib.util.find_spec(p) is not None for p in plugins)
  return "cuda" if found and usable else "cpu"


def visible(devices: Sequence[int]) -> tuple[int | str, ...]:
  """Returns accelerators as CUDA_VISIBLE_DEVICES names them for a cell.

  Args:
    devices: their numbers among those that this process may use.

  Raises:
    ConfigError: it may not use so many.
  """
  named = os.environ.get("CUDA_VISIBLE_DEVICES")
  if named is None:
    return tuple(devices)
  mine = [x.strip() for x in named.split(",") if x.strip()]
  if max(devices) >= len(mine):
    raise ConfigError(
      f"cells need {max(devices) + 1} devices, CUDA_VISIBLE_DEVICES names "
      f"{len(mine)}: {named!r}"
    )
  return tuple(mine[i] for i in devices)


def _cells_here(config: Config) -> int:
  """Cells whose devices this process holds.

  Where each has a process of its own, this one has a mesh on the CPU for the
  supervised phase.
  """
  e = config.elastic
  return 1 if e.launcher == "local" else e.cells


def cell_meshes(config: Config) -> tuple[jax.sharding.Mesh, ...]:
  """Returns the mesh of each cell of this process, over devices of its own.

  Raises:
    ConfigError: devices are missing; says how many.
  """
  m, cells = config.mesh, _cells_here(config)
  width = m.size
  devices, need = jax.devices(), cells * width
  if need > len(devices):
    have = len(devices)
    hint = ""
    if jax.default_backend() == "cpu":
      hint = (
        "; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count="
        f"{need} makes that many"
      )
    raise ConfigError(
      f"elastic.cells {cells} of mesh data {m.data} x fsdp {m.fsdp} x tensor "
      f"{m.tensor} need {need} devices, there are {have}: {need - have} "
      f"missing{hint}"
    )
  return tuple(
    state_lib.make_mesh(m, devices[i * width : (i + 1) * width])
    for i in range(cells)
  )


def use_host_devices(config: Config) -> None:
  """On a CPU, makes a device for each one that the cells need.

  Only before the first use of JAX's devices, and where nothing else says how
  many there are to be. Where cells have processes of their own, this one
  holds no accelerator.
  """
  if config.elastic.launcher == "local":
    jax.config.update("jax_platforms", "cpu")
  need = _cells_here(config) * config.mesh.size
  flags = os.environ.get("XLA_FLAGS", "")
  if need > 1 and "host_platform_device_count" not in flags:
    jax.config.update("jax_num_cpu_devices", need)


def _renderer(config: Config, tasks: TaskSource) -> Renderer:
  """The renderer, unless it lies in a GGUF file."""
  t = config.tokenizer
  if t.source == "train":
    try:
      return minimal_renderer(tasks.texts(TOKENIZER_TASKS), t.vocab_size)
    except ValueError as error:
      raise ConfigError(f"tokenizer: {error}") from None
  if t.source == "file":
    path = pathlib.Path(t.path).expanduser()
    root = path if path.is_dir() else path.parent
  elif config.model.source == "hf":
    root = load.resolve_path(config.model.path)
  else:
    raise ConfigError(
      f"tokenizer.source {t.source!r} with model.source "
      f"{config.model.source!r}: choose 'train' or 'file'"
    )
  try:
    return Renderer.from_directory(str(root), chat_template=t.chat_template)
  except (ValueError, TemplateError) as error:
    raise ConfigError(f"tokenizer: {error}") from None


def _check_vocabulary(cfg: ModelConfig, renderer: Renderer) -> None:
  if renderer.vocab_size > cfg.vocab_size:
    raise ConfigError(
      f"the tokenizer has {renderer.vocab_size} ids, the model's vocabulary "
      f"{cfg.vocab_size}"
    )


def published_config(hf: Mapping[str, Any]) -> ModelConfig:
  """Returns the model of a config.json's content.

  Raises:
    ConfigError: it is not supported.
  """
  try:
    return ModelConfig.from_hf(hf)
  except ValueError as error:
    raise ConfigError(f"model: {error}") from None


def _model_config(config: Config, renderer: Renderer) -> ModelConfig:
  """Of source "hf", or "init": then made for its tokenizer."""
  m = config.model
  if m.source == "hf":
    try:
      return ModelConfig.from_hf(load.resolve_path(m.path))
    except ValueError as error:
      raise ConfigError(f"model: {error}") from None
  hf = dict(m.hf_config)
  if "vocab_size" not in hf:
    size = math.ceil(renderer.vocab_size / _VOCAB_MULTIPLE)
    hf["vocab_size"] = size * _VOCAB_MULTIPLE
  return published_config(hf)


def launch(config: Config, tasks: TaskSource) -> Launched:
  """Resolves a configuration into what a run is made of.

  Args:
    config: the run's.
    tasks: texts for a tokenizer that is learned.

  Raises:
    ConfigError: something is missing or does not fit, in one line.
  """
  meshes, m = cell_meshes(config), config.model
  mesh = meshes[0]
  layout = m.layout
  if m.source == "gguf":
    try:
      cfg, _, tokenizer, template = gguf.load_gguf(m.path, layout=layout)
    except (ValueError, ImportError) as error:
      raise ConfigError(f"model: {error}") from None
    renderer = Renderer(
      tokenizer,
      config.tokenizer.chat_template or template,
      stop_ids=cfg.eos_ids,
    )
    _check_vocabulary(cfg, renderer)

    def from_gguf() -> Any:
      return gguf.load_gguf(m.path, layout=layout, mesh=mesh)[1]

    return Launched(cfg, renderer, meshes, from_gguf)
  renderer = _renderer(config, tasks)
  cfg = _model_config(config, renderer)
  _check_vocabulary(cfg, renderer)
  specs = params.param_specs(cfg, layout=layout, dtype=jnp.float32)

  def initial() -> Any:
    if m.source == "hf":
      try:
        return load.load_hf_dir(m.path, layout=layout, mesh=mesh)[1]
      except ValueError as error:
        raise ConfigError(f"model: {error}") from None
    key = jax.random.fold_in(jax.random.key(config.run.seed), 1)
    shardings = params.param_shardings(specs, mesh)
    make = jax.jit(
      lambda key: params.init_params(specs, key), out_shardings=shardings
    )
    return make(key)

  return Launched(cfg, renderer, meshes, initial)
