"""Attention over blocks in plain JAX, forward and backward.

Memory is linear in length both ways: the forward pass keeps the output and its
log-sum-exp, the backward pass recomputes each block's scores from them (Dao
et al., FlashAttention, arXiv 2205.14135; FlashAttention-2, 2307.08691).
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from gyre_kernels import _blocks
from gyre_kernels._check import wide_dtype
from gyre_kernels._manual import vary_as


def dot(expr: str, a: Array, b: Array) -> Array:
  """A matrix product with f32 (f64) sums, operands in the type of b."""
  wide = wide_dtype(b.dtype)
  return jnp.einsum(
    expr,
    a.astype(b.dtype),
    b,
    preferred_element_type=wide,
    precision=lax.Precision.HIGHEST if b.dtype == wide else None,
  )


def _split_q(x: Array, block: int, num_kv: int) -> Array:
  """`[B, T, N, H]` -> `[I, B, K, Q, G, H]`."""
  x = _blocks.pad_to_blocks(x, block, 1)
  b, t, n, h = x.shape
  x = x.reshape(b, t // block, block, num_kv, n // num_kv, h)
  return x.transpose(1, 0, 3, 2, 4, 5)


def _join_q(x: Array, length: int) -> Array:
  """The inverse of `_split_q`."""
  i, b, k, q, g, h = x.shape
  x = x.transpose(1, 0, 3, 2, 4, 5).reshape(b, i * q, k * g, h)
  return x[:, :length]


def _split_k(x: Array, block: int) -> Array:
  """`[B, S, K, H]` -> `[J, B, K, C, H]`."""
  x = _blocks.pad_to_blocks(x, block, 1)
  b, s, k, h = x.shape
  if not s:
    x, s = jnp.zeros((b, block, k, h), x.dtype), block
  return x.reshape(b, s // block, block, k, h).transpose(1, 0, 3, 2, 4)


def _split_rows(x: Array, block: int, num_kv: int, value) -> Array:
  """`[B, N, T]` -> `[I, B, K, Q, G]`."""
  x = _blocks.pad_to_blocks(x, block, 2, value)
  b, n, t = x.shape
  x = x.reshape(b, num_kv, n // num_kv, t // block, block)
  return x.transpose(3, 0, 1, 4, 2)


def _join_rows(x: Array, length: int) -> Array:
  """The inverse of `_split_rows`."""
  i, b, k, q, g = x.shape
  return x.transpose(1, 2, 4, 0, 3).reshape(b, k * g, i * q)[..., :length]


def _scores(spec, plan, q, k, i, j, num_k):
  """Scores of two blocks `[B, K, Q, G, C]`, -inf where hidden, and their mask.

  Also returns the derivative of the cap, or None.
  """
  s = dot("BKQGH,BKCH->BKQGC", q, k) * spec.scale
  slope = None
  if spec.softcap is not None:
    t = jnp.tanh(s / spec.softcap)
    s, slope = spec.softcap * t, 1 - t * t
  mask = _blocks.visible(spec, plan, i, j, num_k)
  if mask is not None:
    s = jnp.where(mask[:, None, :, None, :], s, -jnp.inf)
  return s, slope


def _for_each(count, body, init):
  """fori_loop, or one plain call where there is a single block."""
  if isinstance(count, int) and count == 1:
    return body(0, init)
  return lax.fori_loop(0, count, body, init)


def _scan(body, carry, xs):
  """lax.scan, or one plain call for a leading axis of one."""
  if jax.tree.leaves(xs)[0].shape[0] > 1:
    return lax.scan(body, carry, xs)
  carry, ys = body(carry, jax.tree.map(lambda x: x[0], xs))
  return carry, jax.tree.map(lambda y: y[None], ys)


def _forward(spec, q, k, v, rules, sinks):
  batch, num_q, num_heads, _ = q.shape
  num_k, num_kv, head_v = v.shape[1:]
  groups = num_heads // num_kv
  wide = wide_dtype(q.dtype)
  plan = _blocks.make_plan(spec, rules, num_q, num_k)
  kb, vb = _split_k(k, spec.block_k), _split_k(v, spec.block_k)
  rows = (batch, num_kv, spec.block_q, groups)
  top = jnp.full(rows, -jnp.inf, wide)
  total = jnp.zeros(rows, wide)
  if sinks is not None:
    sink = sinks.astype(wide).reshape(num_kv, 1, groups)
    top, total = jnp.broadcast_to(sink, rows), jnp.ones(rows, wide)
  start = (top, total, jnp.zeros((*rows, head_v), wide))
  start = vary_as(start, q, k, v)

  def visit(carry, xs):
    i, q_i = xs
    order, count = _blocks.to_visit(spec, plan, i)

    def add(n, state):
      top, total, acc = state
      j = order[n]
      s, _ = _scores(spec, plan, q_i, kb[j], i, j, num_k)
      new = jnp.maximum(top, s.max(-1))
      safe = jnp.where(new == -jnp.inf, 0.0, new)
      p = jnp.exp(s - safe[..., None])
      shrink = jnp.exp(top - safe)
      total = total * shrink + p.sum(-1)
      pv = dot("BKQGC,BKCH->BKQGH", p, vb[j])
      return new, total, acc * shrink[..., None] + pv

    top, total, acc = _for_each(1 if len(kb) == 1 else count, add, start)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out = (acc / total[..., None]).astype(q.dtype)
    return carry, (out, jnp.where(some, top + jnp.log(total), -jnp.inf))

  index = jnp.arange(plan.q_index.shape[0], dtype=jnp.int32)
  qb = _split_q(q, spec.block_q, num_kv)
  _, (out, lse) = _scan(visit, (), (index, qb))
  return _join_q(out, num_q), _join_rows(lse, num_q)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise(spec, q, k, v, rules, sinks):
  """Returns `(out [B, T, N, H], lse [B, N, T])`."""
  return _forward(spec, q, k, v, rules, sinks)


def _save(spec, q, k, v, rules, sinks):
  out, lse = _forward(spec, q, k, v, rules, sinks)
  out = checkpoint_name(out, "attention_out")
  lse = checkpoint_name(lse, "attention_lse")
  return (out, lse), (q, k, v, rules, sinks, out, lse)


def _backward(spec, saved, cotangents):
  q, k, v, rules, sinks, out, lse = saved
  dout, dlse = cotangents
  num_q = q.shape[1]
  num_k, num_kv = k.shape[1:3]
  wide = wide_dtype(q.dtype)
  delta = jnp.einsum("BTNH,BTNH->BNT", dout, out, preferred_element_type=wide)
  # d score = p * (dp - delta + dlse), p = exp(score - lse).
  some = lse > -jnp.inf
  shift = jnp.where(some, dlse - delta, 0.0)
  lse = jnp.where(some, lse, 0.0)
  plan = _blocks.make_plan(spec, rules, num_q, num_k)
  kb, vb = _split_k(k, spec.block_k), _split_k(v, spec.block_k)
  index = jnp.arange(plan.q_index.shape[0], dtype=jnp.int32)
  xs = (
    index,
    _split_q(q, spec.block_q, num_kv),
    _split_q(dout, spec.block_q, num_kv),
    _split_rows(lse, spec.block_q, num_kv, jnp.inf),
    _split_rows(shift, spec.block_q, num_kv, 0.0),
  )

  def visit(carry, xs):
    i, q_i, do_i, lse_i, shift_i = xs
    order, count = _blocks.to_visit(spec, plan, i)
    # Queries and cotangents with H leading: dK and dV are then plain row-major
    # products (three times faster on XLA's CPU than contracting over rows).
    q_t, do_t = (jnp.moveaxis(x, -1, 2) for x in (q_i, do_i))

    def add(n, state):
      dq, dk, dv = state
      j = order[n]
      s, slope = _scores(spec, plan, q_i, kb[j], i, j, num_k)
      p = jnp.exp(s - lse_i[..., None])
      dp = dot("BKQGH,BKCH->BKQGC", do_i, vb[j])
      ds = p * (dp + shift_i[..., None])
      if slope is not None:
        ds *= slope
      ds = ds.astype(q.dtype)
      dq += dot("BKQGC,BKCH->BKQGH", ds, kb[j])
      if spec.kv_grad:
        p = p.astype(dout.dtype)
        dk = dk.at[j].add(dot("BKHQG,BKQGC->BKHC", q_t, ds))
        dv = dv.at[j].add(dot("BKHQG,BKQGC->BKHC", do_t, p))
      return dq, dk, dv

    zero = vary_as(jnp.zeros(q_i.shape, wide), q, k, v, dout)
    count = 1 if len(kb) == 1 else count
    dq, dk, dv = _for_each(count, add, (zero, *carry))
    return (dk, dv), (dq * spec.scale).astype(q.dtype)

  def empty(x):
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-2]) if spec.kv_grad else ()
    return vary_as(jnp.zeros(shape, wide), q, k, v, dout)

  (dk, dv), dq = _scan(visit, (empty(kb), empty(vb)), xs)
  dsinks = None
  if sinks is not None:
    share = jnp.exp(sinks.astype(wide)[:, None] - lse)
    dsinks = jnp.sum(share * shift, axis=(0, 2)).astype(sinks.dtype)
  if not spec.kv_grad:
    return _join_q(dq, num_q), None, None, None, dsinks
  dk, dv = (_join_kv(x, num_k) for x in (dk * spec.scale, dv))
  return (
    _join_q(dq, num_q),
    dk.astype(k.dtype),
    dv.astype(v.dtype),
    None,
    dsinks,
  )


def _join_kv(x: Array, length: int) -> Array:
  """`[J, B, K, H, C]` -> `[B, S, K, H]`."""
  j, b, k, h, c = x.shape
  return x.transpose(1, 0, 4, 2, 3).reshape(b, j * c, k, h)[:, :length]


blockwise.defvjp(_save, _backward)
