"""Attention over one sequence a row: packed, shared prompts, trees, windows."""

from jax import Array
from jaxtyping import Float, Int

from gyre_kernels import _blocks, _check
from gyre_kernels._blockwise import blockwise
from gyre_kernels._manual import vary_as

# Queries a block, keys a block, most scores a block over all rows. Blocks whose
# scores stay in the cache win, smaller ones where siblings hide each other:
# chosen on 2 CPU cores with 9 query heads on 3 key heads of 64, at 8 rows of
# 256, one row of 2,048, 4 prompts of 64 with 8 completions of 64 each, and one
# of 512 with 8 of 128.
_PLAIN = (128, 256, 2**19)
_TREE = (128, 128, 2**18)
_MIN_BLOCK = 64


def _even(length: int, most: int) -> int:
  """The least block that needs no more blocks than `most` does."""
  return max(1, -(-length // _blocks.num_blocks(length, most)))


def _block_sizes(
  rows: int, num_q: int, num_k: int, tree: bool
) -> tuple[int, int]:
  """Queries and keys a block, for so many rows (batch times heads)."""
  block_q, block_k, most = _TREE if tree else _PLAIN
  while rows * block_q * block_k > most and block_k > _MIN_BLOCK:
    if block_k > block_q:
      block_k //= 2
    else:
      block_q //= 2
  return _even(num_q, block_q), _even(num_k, block_k)


def attention(
  q: Float[Array, "B T N H"],
  k: Float[Array, "B S K H"],
  v: Float[Array, "B S K H"],
  *,
  subtree_end: Int[Array, "B S"] | None = None,
  q_positions: Int[Array, "B T"] | None = None,
  k_positions: Int[Array, "B S"] | None = None,
  causal: bool = True,
  window: int | tuple[int | None, int | None] | None = None,
  softcap: float | None = None,
  sinks: Float[Array, "N"] | None = None,
  scale: float | None = None,
  return_lse: bool = False,
  implementation: str | None = None,
) -> Float[Array, "B T N H"] | tuple[Array, Array]:
  """Attends each query to the keys it may see, in memory linear in length.

  Queries are aligned with the end of the keys: query t has the index
  `S - T + t` on the axis of keys. It sees key k iff all of these hold:

  - `k <= index` if causal;
  - `index < subtree_end[k]` if given. In depth-first order of a tree of
    tokens, with `subtree_end[k]` the index after the last descendant of k,
    a query sees its ancestors and itself and nothing else. Packed sequences
    and prompts shared by several completions are trees of their own kind;
  - `q_pos - k_pos <= left` and `k_pos - q_pos <= right` for a window
    `(left, right)`; positions default to the index.

  `out = sum_k softmax(scores)_k v_k`, `scores = scale * q . k`, then
  `softcap * tanh(scores / softcap)`. A sink is one more logit a head, with a
  value of zero (Xiao et al., arXiv 2309.17453; OpenAI gpt-oss).

  A query that sees nothing gives 0, a log-sum-exp of -inf (its sink, if there
  are sinks) and zero gradients. Under `jax.checkpoint` the outputs are named
  "attention_out" and "attention_lse".

  Args:
    q: queries, f32, bf16 or f64.
    k: keys; K divides N, and query head n uses key head `n // (N / K)`.
    v: values; their head size may differ from that of the keys.
    subtree_end: int32, see above; None: every key stays visible.
    q_positions: int32 positions of queries, used by the window alone.
    k_positions: int32 positions of keys, used by the window alone.
    causal: whether later keys, by index, are hidden.
    window: an int bounds both sides, a pair is `(left, right)`, None in a
      pair leaves that side open. A query sees itself and `left` positions
      before: Hugging Face's `sliding_window` W is `window=W - 1`.
    softcap: cap of the scores.
    sinks: one logit a query head.
    scale: factor of the scores; default `H ** -0.5`.
    return_lse: whether to return the log-sum-exp too, differentiable.
    implementation: None or "xla".

  Returns:
    The output, in the shape (last axis: of v) and type of q; with return_lse
    also the natural log-sum-exp of the scores, sink included, `[B, N, T]`, f32.

  Raises:
    ValueError: for shapes or bounds that do not fit together.
    NotImplementedError: for an implementation that lacks what is asked.
  """
  _check.check_implementation(implementation, "attention")
  batch, num_q, num_heads, _ = q.shape
  num_k = k.shape[1]
  _check.check_keys(q, k, v, (batch, num_k))
  for name, x, length in (
    ("subtree_end", subtree_end, num_k),
    ("q_positions", q_positions, num_q),
    ("k_positions", k_positions, num_k),
  ):
    if x is not None:
      _check.check_shape(name, x, (batch, length))
  if sinks is not None:
    _check.check_shape("sinks", sinks, (num_heads,))
  out, lse = run(
    q,
    k,
    v,
    rules=_blocks.Rules(subtree_end, q_positions, k_positions),
    causal=causal,
    window=window,
    softcap=softcap,
    sinks=sinks,
    scale=scale,
  )
  return (out, lse) if return_lse else out


def run(
  q: Array,
  k: Array,
  v: Array,
  *,
  rules: _blocks.Rules,
  causal: bool,
  window: int | tuple[int | None, int | None] | None,
  softcap: float | None,
  sinks: Array | None,
  scale: float | None,
  kv_grad: bool = True,
) -> tuple[Array, Array]:
  """`attention` after its checks; `kv_grad=False` detaches keys and values."""
  left, right = _check.both_sides(window)
  rows = q.shape[0] * q.shape[2]
  tree = rules.subtree_end is not None
  block_q, block_k = _block_sizes(rows, q.shape[1], k.shape[1], tree)
  spec = _blocks.Spec(
    causal=causal,
    left=left,
    right=right,
    softcap=softcap,
    scale=q.shape[-1] ** -0.5 if scale is None else scale,
    block_q=block_q,
    block_k=block_k,
    kv_grad=kv_grad,
  )
  args = (q, k, v, rules, sinks)
  return blockwise(spec, *vary_as(args, args))
