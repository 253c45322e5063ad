"""Log-probabilities of given tokens under a linear head, without all logits.

Blocks of tokens meet blocks of the vocabulary; the backward pass recomputes
each block's logits from the saved log-sum-exp (as in Wijmans et al., Cut Your
Losses in Large-Vocabulary Language Models, arXiv 2411.09009). Where all
logits are few they are kept instead: three products with the head, not four.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from gyre_kernels import _blocks, _check
from gyre_kernels._blockwise import dot
from gyre_kernels._manual import vary_as
from gyre_kernels.linear import by_rows

_TOKENS = 1024
_VOCAB = 8192
_KEEP = 2**29  # bytes of logits that are kept for the backward pass


def linear_logprob(
  hidden: Float[Array, "M D"],
  weight: Float[Array, "V D"],
  targets: Int[Array, "M"],
  *,
  temperature: float = 1.0,
  return_entropy: bool = False,
  implementation: str | None = None,
) -> Float[Array, "M"] | tuple[Float[Array, "M"], Float[Array, "M"]]:
  """Returns `log softmax(hidden @ weight.T / temperature)[targets]`.

  Memory holds a block of logits, 1,024 tokens by 8,192 words at most, in both
  directions; all logits, up to the backward pass, where they take no more than
  512 MiB. Products take the type of hidden, sums are f32.

  Args:
    hidden: hidden states that predict, f32, bf16 or f64.
    weight: the head, one row a word; cast block by block to hidden's type.
    targets: int32, the words whose probability is asked.
    temperature: divides the logits, positive.
    return_entropy: whether to return `-sum_v p_v log p_v` too; both results
      are differentiable in hidden and weight.
    implementation: None or "xla".

  Returns:
    The log-probabilities `[M]`, f32, and the entropies if asked, in nats.

  Raises:
    ValueError: for shapes that do not fit together or a temperature <= 0.
    NotImplementedError: for an implementation that lacks what is asked.
  """
  _check.check_implementation(implementation, "linear_logprob")
  tokens, size = hidden.shape
  _check.check_shape("weight", weight, (weight.shape[0], size))
  _check.check_shape("targets", targets, (tokens,))
  if temperature <= 0:
    raise ValueError(f"temperature {temperature} must be positive")
  args = (hidden, weight, targets)
  logp, entropy = _logprob(temperature, return_entropy, *vary_as(args, args))
  return (logp, entropy) if return_entropy else logp


def _vocab_block(vocab: int) -> int:
  """A block that divides the vocabulary, if one of fair size does."""
  if vocab <= _VOCAB:
    return max(1, vocab)
  for block in range(_VOCAB, _VOCAB // 4, -1):
    if vocab % block == 0:
      return block
  return -(-vocab // _blocks.num_blocks(vocab, _VOCAB))


def _cut(x: Array, block: int) -> Array:
  """`[L, ...]` -> `[blocks, block, ...]`, padded with zeros."""
  x = _blocks.pad_to_blocks(x, block, 0)
  return x.reshape(-1, block, *x.shape[1:])


def _token_block(tokens: int) -> int:
  return max(1, -(-tokens // _blocks.num_blocks(tokens, _TOKENS)))


def _logits(x, w, first, vocab, temperature):
  """Logits of a block, -inf past the vocabulary, and the index of its words."""
  words = first + jnp.arange(w.shape[0])
  s = dot("MD,VD->MV", x, w.astype(x.dtype)) / temperature
  if vocab % w.shape[0]:
    s = jnp.where(words < vocab, s, -jnp.inf)
  return s, words


def _add_block(state, s, with_entropy):
  """Takes a block of logits into (maximum, sum, sum of p s), each `[M]`."""
  top, total, moment = state
  new = jnp.maximum(top, s.max(-1))
  p = jnp.exp(s - new[:, None])
  shrink = jnp.exp(top - new)
  if with_entropy:
    ps = jnp.where(p > 0, p * s, 0.0).sum(-1)
    moment = moment * shrink + ps
  return new, total * shrink + p.sum(-1), moment


def _forward(temperature, with_entropy, keep, hidden, weight, targets):
  """Log-probabilities, entropies, log-sum-exps `[M]`, and logits or None."""
  tokens, vocab = hidden.shape[0], weight.shape[0]
  wide = _check.wide_dtype(hidden.dtype)
  block = _vocab_block(vocab)
  wb = _cut(weight, block)
  first = jnp.arange(len(wb), dtype=jnp.int32) * block

  def start(x):
    zero = jnp.zeros(x.shape[0], wide)
    return vary_as((zero - jnp.inf, zero, zero), x, weight)

  def of_tokens(x):
    def add(state, word_block):
      s, _ = _logits(x, *word_block, vocab, temperature)
      return _add_block(state, s, with_entropy), None

    (top, total, moment), _ = lax.scan(add, start(x), (wb, first))
    return top + jnp.log(total), moment / total

  kept = None
  if keep:
    state, kept = start(hidden), []
    for w, at in zip(wb, first, strict=True):
      kept.append(_logits(hidden, w, at, vocab, temperature)[0])
      state = _add_block(state, kept[-1], with_entropy)
    top, total, moment = state
    lse, mean = top + jnp.log(total), moment / total
  else:
    xb = _cut(hidden, _token_block(tokens))
    lse, mean = (y.reshape(-1)[:tokens] for y in lax.map(of_tokens, xb))
  chosen = weight[targets].astype(hidden.dtype)
  score = jnp.einsum("MD,MD->M", hidden, chosen, preferred_element_type=wide)
  return score / temperature - lse, lse - mean, lse, kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _logprob(temperature, with_entropy, hidden, weight, targets):
  """Returns the log-probabilities and, if asked, the entropies."""
  args = (hidden, weight, targets)
  return _forward(temperature, with_entropy, False, *args)[:2]


def _save(temperature, with_entropy, hidden, weight, targets):
  wide = _check.wide_dtype(hidden.dtype)
  keep = hidden.shape[0] * weight.shape[0] * wide.itemsize <= _KEEP
  args = (hidden, weight, targets)
  *sums, kept = _forward(temperature, with_entropy, keep, *args)
  names = ("logprob", "logprob_entropy", "logprob_lse")
  logp, entropy, lse = map(checkpoint_name, sums, names)
  return (logp, entropy), (hidden, weight, targets, entropy, lse, kept)


def _cotangent(temperature, with_entropy, s, words, row, dtype):
  """Cotangent of a block of logits, before the division by the temperature.

  d logit_v = dlogp (1[v = target] - p_v) - dentropy p_v (logit_v - mean).
  """
  target, lse, mean, dlogp, dentropy = row
  p = jnp.exp(s - lse[:, None])
  ds = -p * dlogp[:, None]
  ds += jnp.where(words == target[:, None], dlogp[:, None], 0.0)
  if with_entropy:
    spread = jnp.where(p > 0, s - mean[:, None], 0.0)
    ds -= p * spread * dentropy[:, None]
  return (ds / temperature).astype(dtype)


def _backward(temperature, with_entropy, saved, cotangents):
  hidden, weight, targets, entropy, lse, kept = saved
  rows = (targets, lse, lse - entropy, *cotangents)
  run = _backward_recompute if kept is None else _backward_kept
  dx, dw = run(temperature, with_entropy, hidden, weight, rows, kept)
  return dx.astype(hidden.dtype), dw[: len(weight)], None


def _backward_kept(temperature, with_entropy, hidden, weight, rows, kept):
  block = _vocab_block(len(weight))
  x_t = by_rows(hidden.T)
  dx, dw = 0.0, []
  for i, (s, w) in enumerate(zip(kept, _cut(weight, block), strict=True)):
    words = i * block + jnp.arange(block)
    ds = _cotangent(temperature, with_entropy, s, words, rows, hidden.dtype)
    dx += dot("MV,VD->MD", ds, w.astype(ds.dtype))
    dw_t = by_rows(dot("DM,MV->DV", x_t, ds))
    dw.append(by_rows(dw_t.T.astype(weight.dtype)))
  return dx, by_rows(jnp.concatenate(dw))


def _backward_recompute(temperature, with_entropy, hidden, weight, rows, _):
  tokens, vocab = hidden.shape[0], weight.shape[0]
  wide = _check.wide_dtype(hidden.dtype)
  block = _vocab_block(vocab)
  wb = _cut(weight, block)
  first = jnp.arange(len(wb), dtype=jnp.int32) * block
  rows = tuple(_cut(x, _token_block(tokens)) for x in (hidden, *rows))
  index = jnp.arange(len(rows[0]), dtype=jnp.int32)

  def of_words(dx, word_block):
    w, first = word_block

    def add(state, xs):
      dx, dw = state
      i, x, *row = xs
      s, words = _logits(x, w, first, vocab, temperature)
      ds = _cotangent(temperature, with_entropy, s, words, row, x.dtype)
      dx = dx.at[i].add(dot("MV,VD->MD", ds, w.astype(x.dtype)))
      return (dx, dw + dot("DM,MV->DV", by_rows(x.T), ds)), None

    dw = vary_as(jnp.zeros((hidden.shape[1], block), wide), dx)
    (dx, dw), _ = lax.scan(add, (dx, dw), (index, *rows))
    return dx, by_rows(dw).T.astype(weight.dtype)

  dx = vary_as(jnp.zeros(rows[0].shape, wide), *rows, weight)
  dx, dw = lax.scan(of_words, dx, (wb, first))
  size = hidden.shape[1]
  return dx.reshape(-1, size)[:tokens], dw.reshape(-1, size)


_logprob.defvjp(_save, _backward)
