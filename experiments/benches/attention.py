"""`gyre_kernels.attention`, forward and backward, one shape a process."""

from __future__ import annotations

import functools
from typing import Any

from benches import ours
from peers import common


def measure(
  seq: int,
  dtype: str,
  heads: int = 9,
  kv_heads: int = 3,
  dim: int = 64,
  repeat: int = 3,
) -> None:
  """Prints the JSON line of causal attention.

  Args:
    seq: T, queries and keys.
    dtype: of q, k and v.
    heads: N. kv_heads: K. dim: H.
    repeat: timed calls; the median is reported.
  """
  settings = dict(locals())
  import gyre_kernels
  import jax
  import jax.numpy as jnp

  shapes = ((1, seq, n, dim) for n in (heads, kv_heads, kv_heads, heads))
  keys = jax.random.split(jax.random.key(0), 4)
  q, k, v, g = (
    jax.random.normal(key, shape, jnp.dtype(dtype))
    for key, shape in zip(keys, shapes, strict=True)
  )
  attend = functools.partial(gyre_kernels.attention, causal=True)

  @jax.jit
  def both(q, k, v, g):
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(g)

  fwd = _seconds(jax.jit(attend), (q, k, v), repeat)
  fwd_bwd = _seconds(both, (q, k, v, g), repeat)
  flop = 4 * heads * seq**2 * dim / 2  # the causal half
  results = {
    "fwd_ms": 1e3 * fwd,
    "fwd_bwd_ms": 1e3 * fwd_bwd,
    "fwd_gflops": flop / fwd / 1e9,
    "fwd_bwd_gflops": 3.5 * flop / fwd_bwd / 1e9,
    "peak_gib": ours.peak_gib(),
  }
  ours.emit("attention", settings, results)


def _seconds(fn: Any, args: tuple[Any, ...], repeat: int) -> float:
  import jax

  return common.timed(lambda i: jax.block_until_ready(fn(*args)), repeat)[0]
