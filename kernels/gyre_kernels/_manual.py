"""Types inside shard_map: over which manual mesh axes an array varies."""

import jax
from jax import Array, lax


def _varying(tree) -> set[str]:
  """Axes over which any leaf varies."""
  types = map(jax.typeof, jax.tree.leaves(tree))
  return set().union(*(t.manual_axis_type.varying for t in types))


def vary_as(x, *others):
  """Makes every leaf of x vary over the axes over which the others do.

  The values stay. A loop's first carry needs it, and a replicated argument of
  a custom_vjp, whose cotangent JAX then sums over the mesh.
  """
  axes = _varying(others)

  def vary(leaf: Array) -> Array:
    missing = tuple(sorted(axes - _varying(leaf)))
    return lax.pcast(leaf, missing, to="varying") if missing else leaf

  return jax.tree.map(vary, x) if axes else x
