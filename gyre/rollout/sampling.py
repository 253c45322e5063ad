"""One token a row from logits, with the log-probability it was drawn with.

Each row draws one uniform number from its own key, fold_in(key(seed),
absolute position), and inverts the cumulative distribution: no key or draw
depends on the other rows. Summation runs in fixed blocks along the
vocabulary, so a row's bits do not depend on its neighbours either.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

_BLOCK = 256
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


def truncate(
  p: Float[Array, "B V"], top_k: Int[Array, "B"], top_p: Float[Array, "B"]
) -> Float[Array, "B V"]:
  """Zeroes what top-k, then top-p over what is left, exclude.

  Args:
    p: unnormalised probabilities with maximum 1.
    top_k: keep the k largest and ties with the last of them; 0 is off.
    top_p: keep the smallest set of largest ones that holds this share, and
      ties with the last of them; 1 is off.
  """
  k = jnp.where(top_k > 0, top_k, p.shape[1])[:, None]
  t = _threshold(p, lambda t: jnp.sum(p >= t, -1, keepdims=True) >= k)
  p = jnp.where(p >= t, p, 0.0)
  mass = jnp.sum(p, -1, keepdims=True) * top_p[:, None]
  t = _threshold(
    p, lambda t: jnp.sum(jnp.where(p >= t, p, 0.0), -1, keepdims=True) >= mass
  )
  keep = (p >= t) | (top_p[:, None] >= 1)
  return jnp.where(keep, p, 0.0)


def _invert(p: Float[Array, "B V"], u: Float[Array, "B"]):
  """The first index whose cumulative sum exceeds u times the total."""
  B, V = p.shape
  pad = -V % _BLOCK
  blocks = jnp.pad(p, ((0, 0), (0, pad))).reshape(B, -1, _BLOCK)
  sums = jnp.sum(blocks, -1)
  upto = jnp.cumsum(sums, -1)
  total = upto[:, -1]
  target = u * total

  def first(cumulative, weights, target):
    # Rounding may leave the target at the very end: take the last that can be.
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, -1)
    n = jnp.sum(cumulative <= target[:, None], -1)
    return jnp.minimum(n, last).astype(jnp.int32)

  block = first(upto, sums, target)
  rows = jnp.arange(B)
  before = upto[rows, block] - sums[rows, block]
  inside = blocks[rows, block]
  index = first(jnp.cumsum(inside, -1), inside, target - before)
  return block * _BLOCK + index, total


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
    top_k, top_p: as in `truncate`.
    active: rows that matter; when none of them truncates, no pass is spent.

  Returns:
    Token ids int32 [B] and log-probabilities of the distribution sampled
    from, log softmax(logits / temperature) renormalised over what is kept.
  """
  logits = logits.astype(jnp.float32)
  greedy = temperature <= 0
  z = logits / jnp.where(greedy, 1.0, temperature)[:, None]
  best = jnp.argmax(z, -1).astype(jnp.int32)
  top = jnp.max(z, -1, keepdims=True)
  p = jnp.exp(z - top)
  cuts = active & ~greedy & ((top_k > 0) | (top_p < 1))
  k = jnp.where(greedy, 0, top_k)
  share = jnp.where(greedy, 1.0, top_p)
  p = jax.lax.cond(
    jnp.any(cuts), lambda p: truncate(p, k, share), lambda p: p, p
  )
  drawn, total = _invert(p, uniform)
  token = jnp.where(greedy, best, drawn)
  chosen = jnp.take_along_axis(z, token[:, None], -1)[:, 0]
  return token, jnp.minimum(chosen - top[:, 0] - jnp.log(total), 0.0)
