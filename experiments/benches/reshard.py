"""A train state from one mesh onto another: Orbax on tmpfs, device_put.

Weights and two moments of the model, f32, lie over eight devices as fsdp 8
and move to fsdp 4 × tensor 2, or to fsdp 4 on the first four, as a resized
core does; on a CPU the devices are the host's. Beside them, a plain copy of
as many bytes.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import tempfile
import time

from benches import ours
from peers import common

DEVICES = 8


def measure(
  model: str, half: bool = False, repeat: int = 3, tmpfs: str = "/dev/shm"
) -> None:
  """Prints the JSON line of a reshard.

  Args:
    model: Hugging Face directory.
    half: onto half of the devices.
    repeat: timed calls of each; the median is reported.
    tmpfs: where checkpoints are written.
  """
  settings = dict(locals())
  if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
  import jax
  import jax.numpy as jnp
  import numpy as np

  from gyre.models import load
  from gyre.models import params as params_lib
  from gyre.runtime import reshard

  n = min(DEVICES, jax.device_count())
  fewer = max(1, n // 2)
  shapes = {"from": (n, 1), "to": (fewer, 1 if half else min(2, n))}
  meshes = {k: _mesh(s) for k, s in shapes.items()}
  cfg, params = load.load_hf_dir(model, mesh=meshes["from"])
  state = {
    "params": params,
    "mu": jax.tree.map(jnp.zeros_like, params),
    "nu": jax.tree.map(jnp.ones_like, params),
  }
  specs = params_lib.param_specs(cfg)
  shardings = params_lib.param_shardings(specs, meshes["to"])
  targets = dict.fromkeys(state, shardings)
  here = jax.tree.map(lambda x: x.sharding, state)
  abstract = dict.fromkeys(state, params_lib.abstract_params(specs, shardings))
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  host = [np.asarray(x) for x in jax.tree.leaves(state)]
  spare = [np.empty_like(x) for x in host]

  with tempfile.TemporaryDirectory(dir=tmpfs, prefix="gyre-reshard-") as root:
    directory = pathlib.Path(root) / "state"

    def save(i):
      shutil.rmtree(directory, ignore_errors=True)
      reshard.save(state, directory)

    def restore(i, verified=False):
      jax.block_until_ready(
        reshard.restore(directory, abstract, verified=verified)[0]
      )

    def put(i):
      reshard.put(state, targets)

    def through(i):
      kept = reshard.put(state, here)
      began = time.perf_counter()
      reshard.through(pathlib.Path(root) / "through", kept, abstract)
      moved.append(time.perf_counter() - began)

    def copy(i):
      for source, target in zip(host, spare, strict=True):
        np.copyto(target, source)

    work = {
      "save": save,
      "restore": restore,
      "verified_restore": lambda i: restore(i, verified=True),
      "device_put": put,
      "copy": copy,
    }
    secs = {k: common.timed(f, repeat)[0] for k, f in work.items()}
    shutil.rmtree(directory)
    moved: list[float] = []
    for i in range(repeat + 1):
      through(i)
    secs["through"] = statistics.median(moved[1:])
  results = {f"{k}_gb_s": size / s / 1e9 for k, s in secs.items()}
  results |= {f"{k}_s": s for k, s in secs.items()}
  results |= {"bytes": size, "meshes": shapes, "devices": n}
  ours.emit("reshard", settings, results)


def _mesh(shape: tuple[int, int]):
  import jax

  n = shape[0] * shape[1]
  return jax.make_mesh(
    (1, *shape),
    ("data", "fsdp", "tensor"),
    axis_types=(jax.sharding.AxisType.Auto,) * 3,
    devices=jax.devices()[:n],
  )
