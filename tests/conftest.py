"""Eight host devices, CPU only unless GYRE_TEST_PLATFORM says otherwise."""

import os
import signal

# As from a terminal, where a script's background job ignores SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault(
  "JAX_PLATFORMS", os.environ.get("GYRE_TEST_PLATFORM", "cpu")
)
_FLAG = "--xla_force_host_platform_device_count=8"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
