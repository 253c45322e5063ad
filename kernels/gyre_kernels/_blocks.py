"""Which blocks of queries see which blocks of keys, and which pairs do.

A query q sees a key k if, by index, `k <= q < subtree_end[k]`, and, by
position, `q_pos - k_pos <= left` and `k_pos - q_pos <= right`; each bound may
be absent. Kept a block, the least and greatest of each quantity tell which
blocks of keys show a block of queries nothing and can be skipped.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Spec:
  """What is static about one attention call.

  Attributes:
    causal: keys after the query, by index, are hidden.
    left: greatest `q_pos - k_pos` that is visible; None: no bound.
    right: greatest `k_pos - q_pos` that is visible; None: no bound.
    softcap: scores become `softcap * tanh(score / softcap)`; None: they stay.
    scale: factor of the scores.
    block_q: queries a block.
    block_k: keys a block.
    kv_grad: whether keys and values get cotangents.
  """

  causal: bool
  left: int | None
  right: int | None
  softcap: float | None
  scale: float
  block_q: int
  block_k: int
  kv_grad: bool = True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rules:
  """The arrays that decide visibility, before or after cutting into blocks.

  Attributes:
    subtree_end: `[B, S]`, or None.
    q_positions: `[B, T]`, or None for the index.
    k_positions: `[B, S]`, or None for the index.
  """

  subtree_end: Array | None
  q_positions: Array | None
  k_positions: Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
  """Rules cut into I blocks of queries and J blocks of keys.

  Attributes:
    q_index: `[I, Q]`, index of each query on the axis of keys.
    k_index: `[J, C]`.
    subtree_end: `[J, B, C]`, or None.
    q_positions: `[I, B or 1, Q]`, or None where no window needs it.
    k_positions: `[J, B or 1, C]`, or None where no window needs it.
    last_end: `[J]`, greatest subtree_end of a block, or None.
    q_range: `[I]` least and greatest position of a block, or None.
    k_range: `[J]` the same for keys, or None.
  """

  q_index: Array
  k_index: Array
  subtree_end: Array | None
  q_positions: Array | None
  k_positions: Array | None
  last_end: Array | None
  q_range: tuple[Array, Array] | None
  k_range: tuple[Array, Array] | None


def num_blocks(length: int, block: int) -> int:
  """Blocks that cover a length; one for an empty one."""
  return max(1, -(-length // block))


def pad_to_blocks(x: Array, block: int, axis: int, value=0) -> Array:
  """Pads one axis to a multiple of the block; `value` "edge" repeats."""
  extra = num_blocks(x.shape[axis], block) * block - x.shape[axis]
  if not extra:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, extra)
  if value == "edge" and x.shape[axis]:
    return jnp.pad(x, widths, mode="edge")
  return jnp.pad(x, widths, constant_values=0 if value == "edge" else value)


def _cut(x: Array, block: int, value) -> Array:
  """`[B, L]` -> `[blocks, B, block]`."""
  x = pad_to_blocks(x, block, 1, value)
  return x.reshape(x.shape[0], -1, block).swapaxes(0, 1)


def _range(x: Array) -> tuple[Array, Array]:
  """Least and greatest value of each block, over all rows of the batch."""
  return x.min((1, 2)), x.max((1, 2))


def make_plan(spec: Spec, rules: Rules, num_q: int, num_k: int) -> Plan:
  """Cuts the rules into blocks."""
  q_index = jnp.arange(num_q, dtype=jnp.int32) + (num_k - num_q)
  k_index = jnp.arange(num_k, dtype=jnp.int32)
  end, q_pos, k_pos = rules.subtree_end, None, None
  if end is not None:
    end = _cut(end, spec.block_k, 0)
  if spec.left is not None or spec.right is not None:
    q_pos, k_pos = (
      _cut(index[None] if positions is None else positions, block, "edge")
      for positions, index, block in (
        (rules.q_positions, q_index, spec.block_q),
        (rules.k_positions, k_index, spec.block_k),
      )
    )
  return Plan(
    q_index=_cut(q_index[None], spec.block_q, "edge")[:, 0],
    k_index=_cut(k_index[None], spec.block_k, num_k)[:, 0],
    subtree_end=end,
    q_positions=q_pos,
    k_positions=k_pos,
    last_end=None if end is None else end.max((1, 2)),
    q_range=None if q_pos is None else _range(q_pos),
    k_range=None if k_pos is None else _range(k_pos),
  )


def to_visit(spec: Spec, plan: Plan, i: Array) -> tuple[Array, Array]:
  """Returns the blocks of keys that may show block i of queries something.

  Rows of a batch share loops, not masks: a block that one row needs is
  visited for all.

  Returns:
    `[J]` int32, the blocks to visit first, and how many they are.
  """
  seen = jnp.ones(plan.k_index.shape[0], bool)
  if spec.causal:
    seen &= plan.k_index[:, 0] <= plan.q_index[i, -1]
  if plan.last_end is not None:
    seen &= plan.q_index[i, 0] < plan.last_end
  if spec.left is not None:
    seen &= plan.q_range[0][i] - plan.k_range[1] <= spec.left
  if spec.right is not None:
    seen &= plan.k_range[0] - plan.q_range[1][i] <= spec.right
  (order,) = jnp.nonzero(seen, size=seen.shape[0], fill_value=0)
  return order.astype(jnp.int32), seen.sum(dtype=jnp.int32)


def visible(spec: Spec, plan: Plan, i, j, num_k: int) -> Array | None:
  """Returns the mask `[B or 1, Q, C]` of two blocks; None if all is visible."""
  q_index = plan.q_index[i][:, None]
  k_index = plan.k_index[j][None, :]
  masks = []
  if spec.causal:
    masks.append((k_index <= q_index)[None])
  if num_k % spec.block_k or not num_k:
    masks.append((k_index < num_k)[None])
  if plan.subtree_end is not None:
    masks.append(q_index < plan.subtree_end[j][:, None, :])
  if plan.q_positions is not None:
    gap = plan.q_positions[i][:, :, None] - plan.k_positions[j][:, None, :]
    if spec.left is not None:
      masks.append(gap <= spec.left)
    if spec.right is not None:
      masks.append(-gap <= spec.right)
  if not masks:
    return None
  mask = masks[0]
  for other in masks[1:]:
    mask = mask & other
  return mask
