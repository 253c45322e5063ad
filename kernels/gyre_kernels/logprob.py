"""Log-probabilities of given tokens under a linear head, without all logits.

Blocks of tokens meet blocks of the vocabulary; the backward pass recomputes
each block's logits from the saved log-sum-exp (as in Wijmans et al., Cut Your
Losses in Large-Vocabulary Language Models, arXiv 2411.09009).
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

_TOKENS = 1024
_VOCAB = 8192


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
  directions. Products take the type of hidden, sums are f32.

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


def _forward(temperature, with_entropy, hidden, weight, targets):
  tokens, vocab = hidden.shape[0], weight.shape[0]
  wide = _check.wide_dtype(hidden.dtype)
  block = _vocab_block(vocab)
  wb = _cut(weight, block)
  first = jnp.arange(len(wb), dtype=jnp.int32) * block
  xb = _cut(hidden, _token_block(tokens))

  def of_tokens(x):
    def add(state, word_block):
      top, total, moment = state
      w, first = word_block
      s, _ = _logits(x, w, first, vocab, temperature)
      new = jnp.maximum(top, s.max(-1))
      p = jnp.exp(s - new[:, None])
      shrink = jnp.exp(top - new)
      if with_entropy:
        ps = jnp.where(p > 0, p * s, 0.0).sum(-1)
        moment = moment * shrink + ps
      return (new, total * shrink + p.sum(-1), moment), None

    zero = jnp.zeros(x.shape[0], wide)
    init = vary_as((zero - jnp.inf, zero, zero), x, weight)
    (top, total, moment), _ = lax.scan(add, init, (wb, first))
    return top + jnp.log(total), moment / total

  lse, mean = (y.reshape(-1)[:tokens] for y in lax.map(of_tokens, xb))
  chosen = weight[targets].astype(hidden.dtype)
  score = jnp.einsum("MD,MD->M", hidden, chosen, preferred_element_type=wide)
  return score / temperature - lse, lse - mean, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _logprob(temperature, with_entropy, hidden, weight, targets):
  """Returns the log-probabilities and, if asked, the entropies."""
  return _forward(temperature, with_entropy, hidden, weight, targets)[:2]


def _save(temperature, with_entropy, hidden, weight, targets):
  logp, entropy, lse = (
    checkpoint_name(x, name)
    for x, name in zip(
      _forward(temperature, with_entropy, hidden, weight, targets),
      ("logprob", "logprob_entropy", "logprob_lse"),
      strict=True,
    )
  )
  return (logp, entropy), (hidden, weight, targets, entropy, lse)


def _backward(temperature, with_entropy, saved, cotangents):
  hidden, weight, targets, entropy, lse = saved
  tokens, vocab = hidden.shape[0], weight.shape[0]
  wide = _check.wide_dtype(hidden.dtype)
  block = _vocab_block(vocab)
  wb = _cut(weight, block)
  first = jnp.arange(len(wb), dtype=jnp.int32) * block
  dlogp, dentropy = cotangents
  # d logit_v = dlogp (1[v = target] - p_v) - dentropy p_v (logit_v - mean).
  rows = (hidden, targets, lse, lse - entropy, dlogp, dentropy)
  rows = tuple(_cut(x, _token_block(tokens)) for x in rows)
  index = jnp.arange(len(rows[0]), dtype=jnp.int32)

  def of_words(dx, word_block):
    w, first = word_block

    def add(state, xs):
      dx, dw = state
      i, x, target, lse, mean, dlogp, dentropy = xs
      s, words = _logits(x, w, first, vocab, temperature)
      p = jnp.exp(s - lse[:, None])
      ds = -p * dlogp[:, None]
      ds += jnp.where(words == target[:, None], dlogp[:, None], 0.0)
      if with_entropy:
        spread = jnp.where(p > 0, s - mean[:, None], 0.0)
        ds -= p * spread * dentropy[:, None]
      ds = (ds / temperature).astype(x.dtype)
      dx = dx.at[i].add(dot("MV,VD->MD", ds, w.astype(x.dtype)))
      return (dx, dw + dot("MV,MD->VD", ds, x)), None

    dw = vary_as(jnp.zeros((block, hidden.shape[1]), wide), dx)
    (dx, dw), _ = lax.scan(add, (dx, dw), (index, *rows))
    return dx, dw.astype(weight.dtype)

  dx = vary_as(jnp.zeros(rows[0].shape, wide), hidden, weight, dlogp)
  dx, dw = lax.scan(of_words, dx, (wb, first))
  dx = dx.reshape(-1, hidden.shape[1])[:tokens].astype(hidden.dtype)
  return dx, dw.reshape(-1, hidden.shape[1])[:vocab], None


_logprob.defvjp(_save, _backward)
