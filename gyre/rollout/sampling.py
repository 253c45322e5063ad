"""One token a row from logits, with the log-probability it was drawn with.

Each row draws one uniform number from its own key, fold_in(key(seed),
absolute position), and inverts the cumulative distribution: no key or draw
depends on the other rows. Summation runs over fixed columns of the
vocabulary, so a row's bits do not depend on its neighbours either.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

_COLUMNS = 256
_ONE_BITS = 0x3F800000


def position_uniform(
  seeds: UInt32[Array, "B"], positions: Int[Array, "B"]
) -> Float[Array, "B"]:
  """A uniform number in [0, 1) of each (seed, absolute position)."""

  def one(seed, position):
    return jax.random.uniform(
      jax.random.fold_in(jax.random.key(seed), position)
    )

  return jax.vmap(one)(seeds, positions)


def _threshold(p, holds) -> Float[Array, "B 1"]:
  """The largest t in [0, 1] for which holds(t) is true, row by row.

  Bisects over the bits of non-negative floats, which are ordered as integers;
  holds must be true at 0 and monotone.
  """
  low = jnp.zeros((p.shape[0], 1), jnp.int32)
  high = jnp.full((p.shape[0], 1), _ONE_BITS + 1, jnp.int32)

  def body(_, carry):
    low, high = carry
    middle = (low + high) // 2
    t = jax.lax.bitcast_convert_type(middle, jnp.float32)
    ok = holds(t)
    return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

  low, _ = jax.lax.fori_loop(0, 31, body, (low, high))
  return jax.lax.bitcast_convert_type(low, jnp.float32)


def cutoff(
  p: Float[Array, "B V"], top_k: Int[Array, "B"], top_p: Float[Array, "B"]
) -> Float[Array, "B 1"]:
  """The least probability that top-k, then top-p over what is left, keep.

  Args:
    p: unnormalised probabilities with maximum 1.
    top_k: keep the k largest and ties with the last of them; 0 is off.
    top_p: keep the smallest set of largest ones that holds this share, and
      ties with the last of them; 1 is off.

  Returns:
    What is at least this is kept; 0 keeps all.
  """
  k = jnp.where(top_k > 0, top_k, p.shape[1])[:, None]
  least = _threshold(p, lambda t: jnp.sum(p >= t, -1, keepdims=True) >= k)
  p = jnp.where(p >= least, p, 0.0)
  mass = jnp.sum(p, -1, keepdims=True) * top_p[:, None]
  t = _threshold(
    p, lambda t: jnp.sum(jnp.where(p >= t, p, 0.0), -1, keepdims=True) >= mass
  )
  return jnp.maximum(least, jnp.where(top_p[:, None] < 1, t, 0.0))


def _columns(z: Float[Array, "B V"]) -> Float[Array, "B R C"]:
  """Token i lies at row i // C, column i % C; padding is -inf.

  Sums over R run along vectors, where sums along the vocabulary would not.
  """
  pad = ((0, 0), (0, -z.shape[1] % _COLUMNS))
  z = jnp.pad(z, pad, constant_values=-jnp.inf)
  return z.reshape(z.shape[0], -1, _COLUMNS)


def _first(upto, weights, target):
  """The first index whose cumulative weight exceeds the target.

  Rounding may leave the target at the very end: the last that can be.
  """
  last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, -1)
  n = jnp.sum(upto <= target[:, None], -1)
  return jnp.minimum(n, last).astype(jnp.int32)


def _invert(
  z: Float[Array, "B R C"],
  top: Float[Array, "B 1"],
  least: Float[Array, "B 1"],
  u: Float[Array, "B"],
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """Draws from exp(z - top) where z is at least `least`, column by column.

  Returns:
    The token ids, and the sum that normalises.
  """

  def weights(z, top, least):
    return jnp.where(z >= least, jnp.exp(z - top), 0.0)

  sums = jnp.sum(weights(z, top[..., None], least[..., None]), 1)
  upto = jnp.cumsum(sums, -1)
  total = upto[:, -1]
  target = u * total
  column = _first(upto, sums, target)
  at = column[:, None]
  before = jnp.take_along_axis(upto - sums, at, 1)[:, 0]
  inside = jnp.take_along_axis(z, at[:, None], 2)[..., 0]
  inside = weights(inside, top, least)
  row = _first(jnp.cumsum(inside, -1), inside, target - before)
  return row * _COLUMNS + column, total


def sample(
  logits: Float[Array, "B V"],
  uniform: Float[Array, "B"],
  temperature: Float[Array, "B"],
  top_k: Int[Array, "B"],
  top_p: Float[Array, "B"],
  active: Bool[Array, "B"],
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """Draws a token a row: temperature, then top-k, then top-p.

  Args:
    logits: of the model.
    uniform: in [0, 1), one a row.
    temperature: 0 takes the argmax and records its log-probability at 1.
    top_k, top_p: as in `cutoff`.
    active: rows that matter; when none of them truncates, no pass is spent.

  Returns:
    Token ids int32 [B] and log-probabilities of the distribution sampled
    from, log softmax(logits / temperature) renormalised over what is kept.
  """
  logits = logits.astype(jnp.float32)
  greedy = temperature <= 0
  # Kept, since several passes read it, and the logits may lie by columns.
  z = jax.lax.optimization_barrier(
    logits / jnp.where(greedy, 1.0, temperature)[:, None]
  )
  columns = _columns(z)
  top = jnp.max(jnp.max(columns, 1), -1, keepdims=True)
  cuts = active & ~greedy & ((top_k > 0) | (top_p < 1))

  def least_kept():
    p = jnp.exp(z - top)
    t = cutoff(p, jnp.where(cuts, top_k, 0), jnp.where(cuts, top_p, 1.0))
    # A logit, for an exponential computed anew may differ in its last bit.
    return jnp.min(jnp.where(p >= t, z, jnp.inf), -1, keepdims=True)

  least = jax.lax.cond(
    jnp.any(cuts), least_kept, lambda: jnp.full_like(top, -jnp.inf)
  )
  token, total = _invert(columns, top, least, uniform)
  # The argmax is the slowest pass: taken only where it is asked for.
  token = jax.lax.cond(
    jnp.any(active & greedy),
    lambda: jnp.where(greedy, jnp.argmax(z, -1).astype(jnp.int32), token),
    lambda: token,
  )
  chosen = jnp.take_along_axis(z, token[:, None], -1)[:, 0]
  return token, jnp.minimum(chosen - top[:, 0] - jnp.log(total), 0.0)
