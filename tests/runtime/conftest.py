"""A finished run that the tests of this room share."""

import os

import jax
import pytest
import running


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
  """One device, and programs that stay compiled over the test's processes."""
  cache = os.environ.get("JAX_COMPILATION_CACHE_DIR")
  cache = cache or tmp_path_factory.mktemp("compiled")
  env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  return env | {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(cache),
  }


@pytest.fixture(scope="session")
def whole(tmp_path_factory, environment):
  """An uninterrupted run."""
  directory = tmp_path_factory.mktemp("whole") / "run"
  code, output = running.run(directory, environment)
  assert code == 0, output
  return directory


@pytest.fixture(scope="module")
def quick_compilation():
  """Toy programs run a few times: compile them with few optimisations."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)
