"""What the process of a cell is started with."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.config import Config, Mesh
from gyre.rollout.profile import Profile

_HOST_DEVICES = "--xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class Spec:
  """One cell's process.

  Attributes:
    name: of the cell.
    kind: "emulated" or "jax"; see worker.BUILDERS.
    options: JSON for the builder; "core" makes it the core.
    env: variables beside this process's, such as JAX_PLATFORMS, XLA_FLAGS
      and CUDA_VISIBLE_DEVICES.
  """

  name: str
  kind: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)


def emulated_spec(
  name: str,
  profile: Profile,
  *,
  core: bool = False,
  devices: int = 1,
  executions: int = 128,
) -> Spec:
  """The process of an emulated cell; see emulated_cell.EmulatedCell."""
  options = {
    "core": core,
    "profile": dataclasses.asdict(profile),
    "devices": devices,
    "executions": executions,
  }
  return Spec(name, "emulated", options)


def jax_spec(
  name: str,
  config: Config,
  model: Mapping[str, Any],
  *,
  core: bool = False,
  mesh: Mesh | None = None,
  devices: Sequence[int] | None = None,
  platform: str = "cpu",
  compilation_cache: str = "",
) -> Spec:
  """The process of a cell with the trainer and the embedded engine.

  Args:
    name: of the cell.
    config: the run's.
    model: its Hugging Face config (ModelConfig.to_hf()).
    core: it is the core.
    mesh: sizes of its mesh; None: config.mesh.
    devices: accelerators that the process sees, and no other does; on a CPU
      it has as many host devices as given, or as the mesh needs.
    platform: of JAX in the process.
    compilation_cache: directory of compiled programs, kept over its lives.
  """
  sizes = mesh or config.mesh
  options = {
    "core": core,
    "config": config.to_dict(),
    "model": dict(model),
    "mesh": dataclasses.asdict(sizes),
  }
  if compilation_cache:
    options["compilation_cache"] = compilation_cache
  env = {"JAX_PLATFORMS": platform}
  if platform == "cpu":
    count = len(devices or ()) or sizes.size
    others = os.environ.get("XLA_FLAGS", "").split()
    flags = [f for f in others if not f.startswith(_HOST_DEVICES)]
    env["XLA_FLAGS"] = " ".join([*flags, f"{_HOST_DEVICES}={count}"])
  else:
    if devices is not None:
      env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    # The default pool gives nothing back to the engine, nor it to this one.
    env["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
  return Spec(name, "jax", options, env)
