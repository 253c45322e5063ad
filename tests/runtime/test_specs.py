"""What the processes of cells are started with."""

import toy_cells as toy

from gyre import config
from gyre.rollout.profile import Profile
from gyre.runtime import specs, worker


def test_a_jax_process_has_the_devices_of_its_mesh(monkeypatch):
  monkeypatch.setenv(
    "XLA_FLAGS", "--xla_dump_to=x --xla_force_host_platform_device_count=8"
  )
  made = toy.make_config()
  hf = toy.MODEL.to_hf()
  mesh = config.Mesh(data=1, fsdp=2, tensor=2)
  spec = specs.jax_spec("cell 1", made, hf, mesh=mesh)
  assert spec.env == {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_dump_to=x --xla_force_host_platform_device_count=4",
  }
  spec = specs.jax_spec("c", made, hf, devices=(2, 3), platform="cuda")
  assert spec.env["CUDA_VISIBLE_DEVICES"] == "2,3"
  assert spec.env["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform"
  # The configuration is JSON, and comes back as it was.
  assert config.from_config_dict(spec.options["config"]) == made


def test_an_emulated_process_builds_what_was_asked_for():
  profile = Profile(nodes=3, slots=5)
  spec = specs.emulated_spec("cell 0", profile, core=True, executions=32)
  core = worker.build_emulated(spec.name, dict(spec.options))
  assert type(core).__name__ == "EmulatedCore"
  assert (core.name, core.profile) == ("cell 0", profile)
