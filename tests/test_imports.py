"""The house rule: a room imports only rooms to its left."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = (
  "types config gyre_kernels models trajectory learner store rollout harness "
  "envs elastic sim runtime analysis"
).split()
ONLY = {
  "types": set(),
  "config": {"types"},
  "gyre_kernels": set(),
  "elastic": {"types"},
  "analysis": {"types", "trajectory", "store"},
}
# These never import JAX, so that the proxy, the store and the analysis start
# at once and run where JAX is not installed.
NO_JAX = "types config trajectory store elastic sim analysis".split()


def _sources():
  for path in sorted((ROOT / "gyre").rglob("*.py")):
    parts = path.relative_to(ROOT / "gyre").with_suffix("").parts
    if parts[0] != "__init__":
      yield parts[0], path
  for path in sorted((ROOT / "kernels" / "gyre_kernels").rglob("*.py")):
    yield "gyre_kernels", path


def _imported(path):
  """Every absolute module name that a file imports, at any depth."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (a.name for a in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
      yield node.module
      yield from (f"{node.module}.{a.name}" for a in node.names)


def _room_of(name):
  parts = name.split(".")
  if parts[0] == "gyre_kernels":
    return "gyre_kernels"
  if parts[0] == "gyre" and len(parts) > 1 and parts[1] in ROOMS:
    return parts[1]
  return None


@pytest.mark.parametrize(
  "room,path", list(_sources()), ids=lambda x: getattr(x, "name", x)
)
def test_room_imports_only_to_its_left(room, path):
  assert room in ROOMS, f"{path} is in no room"
  allowed = ONLY.get(room, set(ROOMS[: ROOMS.index(room)])) | {room}
  for name in _imported(path):
    target = _room_of(name)
    assert target is None or target in allowed, f"{path.name} imports {name}"
    if room in NO_JAX:
      assert name.split(".")[0] not in {"jax", "flax", "optax", "orbax"}, name


def test_no_module_is_too_long():
  for _, path in _sources():
    lines = len(path.read_text().splitlines())
    assert lines <= 600, f"{path} has {lines} lines"
