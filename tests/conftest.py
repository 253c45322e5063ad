"""Eight host devices, CPU only unless GYRE_TEST_PLATFORM says otherwise."""

import os

os.environ.setdefault(
  "JAX_PLATFORMS", os.environ.get("GYRE_TEST_PLATFORM", "cpu")
)
_FLAG = "--xla_force_host_platform_device_count=8"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
