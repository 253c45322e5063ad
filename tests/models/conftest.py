"""A dense key/value cache as an AttendFn, in plain jnp, for the tests."""

import jax
import jax.numpy as jnp
import pytest


class DenseCache:
  """Keys and values of every position, attended to with a plain softmax."""

  @staticmethod
  def init_state(cfg, batch, length, layout):
    shape = (batch, length, cfg.num_kv_heads, cfg.head_dim)
    if layout == "layers":
      return tuple(
        (jnp.zeros(shape), jnp.zeros(shape)) for _ in range(cfg.num_layers)
      )
    shape = (cfg.num_layers, *shape)
    return jnp.zeros(shape), jnp.zeros(shape)

  @staticmethod
  def attend_at(start):
    """attend for tokens at cache rows start, start + 1, …"""

    def attend(q, k, v, state, *, window, softcap, sinks, scale):
      assert softcap is None and sinks is None
      keys = jax.lax.dynamic_update_slice_in_dim(state[0], k, start, 1)
      values = jax.lax.dynamic_update_slice_in_dim(state[1], v, start, 1)
      ratio = q.shape[2] // k.shape[2]
      i = start + jnp.arange(q.shape[1])[:, None]
      j = jnp.arange(keys.shape[1])[None, :]
      seen = j <= i if window is None else (j <= i) & (i - j <= window)
      scores = jnp.einsum("BTNH,BSNH->BNTS", q, jnp.repeat(keys, ratio, 2))
      scores = jnp.where(seen, scores * scale, -jnp.inf)
      weights = jax.nn.softmax(scores, -1)
      out = jnp.einsum("BNTS,BSNH->BTNH", weights, jnp.repeat(values, ratio, 2))
      return out, (keys, values)

    return attend


@pytest.fixture
def dense_cache():
  return DenseCache
