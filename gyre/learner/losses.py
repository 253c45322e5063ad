"""Policy losses, mismatch corrections, KL and aggregation over loss entries.

Every function takes entries `[M]` (types.Batch) and returns a value an entry,
computed in float32 (float64 where the inputs are). `aggregate` turns them into
a numerator, `denominator` counts what it is divided by; sums of both over
micro-steps, cells or shards are divided once, so the gradient does not depend
on how a batch was cut.

`proximal` is the policy that a ratio is taken against: the behaviour policy's
recorded logprobs, or those recomputed at the start of the batch (logp_old);
with the latter, entries are weighted by `behaviour_weight`: decoupled PPO
(2110.00641).

Sequence quantities (gspo, gmpo, sequence_mask) are segment sums over `sample`.
A sample split over micro-steps needs the sums of its whole, from a first pass
(`SequenceSums`); `check_whole` refuses it otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int

SEQUENCE_LOSSES = ("gspo", "gmpo")


class PolicyTerms(NamedTuple):
  """loss [M] to minimise; ratio [M] to the proximal policy; clipped [M], True
  where the clip cuts the entry's gradient."""

  loss: Float[Array, "M"]
  ratio: Float[Array, "M"]
  clipped: Bool[Array, "M"]


class SequenceSums(NamedTuple):
  """Sums over the whole sample of each entry, when it is split.

  Attributes:
    log_ratio: [M], weighted sum of the loss's log ratio (`log_ratio_term`).
    log_rho: [M], weighted sum of logp_old - logp_behaviour.
    min_log_rho: [M], its minimum.
  """

  log_ratio: Float[Array, "M"]
  log_rho: Float[Array, "M"]
  min_log_rho: Float[Array, "M"]


def _wide(*arrays):
  dtype = jnp.promote_types(jnp.result_type(*arrays), jnp.float32)
  out = tuple(jnp.asarray(a).astype(dtype) for a in arrays)
  return out if len(out) > 1 else out[0]


def dense_ids(ids: Int[Array, "M"]) -> Int[Array, "M"]:
  """Maps arbitrary ids to segment numbers below M, one an id."""
  return jnp.searchsorted(jnp.sort(ids), ids)


def per_sample_sum(
  values: Float[Array, "M"], sample: Int[Array, "M"]
) -> Float[Array, "M"]:
  """At each entry, the sum of `values` over the entries of its sample."""
  ids = dense_ids(sample)
  return jax.ops.segment_sum(values, ids, values.shape[0])[ids]


def check_whole(sample, weight, sample_weight) -> None:
  """Refuses samples that are not whole: weights here against `sample_weight`.

  Args:
    sample, weight, sample_weight: concrete arrays of one micro-step, any
      equal shape.

  Raises:
    ValueError: naming the first sample that is split, and both sums.
  """
  sample, weight = np.asarray(sample).reshape(-1), np.asarray(weight)
  weight, total = weight.reshape(-1), np.asarray(sample_weight).reshape(-1)
  live = weight > 0
  names, ids = np.unique(sample[live], return_inverse=True)
  here = np.bincount(ids, weight[live].astype(float), len(names))
  whole = np.zeros(len(names))
  whole[ids] = total[live]
  bad = np.flatnonzero(np.abs(here - whole) > 1e-4 * whole)
  if len(bad):
    i = bad[0]
    raise ValueError(
      f"sample {names[i]} is split: weight {here[i]:g} of {whole[i]:g} in this "
      "micro-step; a sequence ratio needs its whole or its two-pass sums"
    )


def ppo_clip(
  logp: Float[Array, "M"],
  proximal: Float[Array, "M"],
  advantage: Float[Array, "M"],
  *,
  eps_low: float = 0.2,
  eps_high: float = 0.2,
  dual_clip: float | None = None,
) -> PolicyTerms:
  """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) (1707.06347).

  Args:
    logp: current policy.
    proximal: logprobs the ratio is taken against.
    advantage: advantages.
    eps_low, eps_high: clip range; unequal as in DAPO (2503.14476).
    dual_clip: c > 1 bounds the loss by -c A where A < 0 (1912.09729).

  Returns:
    PolicyTerms.
  """
  logp, proximal, advantage = _wide(logp, proximal, advantage)
  ratio = jnp.exp(logp - stop_gradient(proximal))
  return _clipped(ratio, advantage, eps_low, eps_high, dual_clip)


def _clipped(ratio, advantage, eps_low, eps_high, dual_clip=None):
  plain = -ratio * advantage
  near = -jnp.clip(ratio, 1 - eps_low, 1 + eps_high) * advantage
  loss, clipped = jnp.maximum(plain, near), near > plain
  if dual_clip:
    bound = -dual_clip * advantage
    cut = (advantage < 0) & (loss > bound)
    loss, clipped = jnp.where(cut, bound, loss), clipped | cut
  return PolicyTerms(loss, ratio, clipped)


def _sequence_ratio(term, weight, sample, sample_weight, total):
  """exp(weighted mean of term over its sample), differentiable by entry.

  The value is the sample's; the derivative at an entry is s * d(term), which
  after a mean over the sample is that of the sequence ratio itself.
  """
  term, weight, sample_weight = _wide(term, weight, sample_weight)
  if total is None:
    total = per_sample_sum(stop_gradient(term) * weight, sample)
  mean = total / jnp.where(sample_weight > 0, sample_weight, 1)
  return jnp.exp(stop_gradient(mean) + term - stop_gradient(term))


def gspo(
  logp: Float[Array, "M"],
  proximal: Float[Array, "M"],
  advantage: Float[Array, "M"],
  weight: Float[Array, "M"],
  sample: Int[Array, "M"],
  sample_weight: Float[Array, "M"],
  *,
  eps_low: float = 3e-4,
  eps_high: float = 4e-4,
  log_ratio_sum: Float[Array, "M"] | None = None,
) -> PolicyTerms:
  """Clipped sequence ratio, the geometric mean of token ratios (2507.18071).

  s = exp(sum_t w_t (logp_t - proximal_t) / sum_t w_t) in PPO's objective; in
  its token form, so that an entry carries its own share of the gradient.

  Args:
    logp, proximal, advantage: as for ppo_clip.
    weight: entry weights.
    sample: sample ids.
    sample_weight: sum of weights over the whole sample.
    eps_low, eps_high: clip range of s.
    log_ratio_sum: sum_t w_t (logp_t - proximal_t) over the whole sample, for
      samples split over micro-steps.

  Returns:
    PolicyTerms; ratio is s.
  """
  logp, proximal, advantage = _wide(logp, proximal, advantage)
  term = logp - stop_gradient(proximal)
  ratio = _sequence_ratio(term, weight, sample, sample_weight, log_ratio_sum)
  return _clipped(ratio, advantage, eps_low, eps_high)


def _gmpo_term(logp, proximal, advantage, eps_low, eps_high):
  """PPO's one-sided clip of the log ratio, and where it cuts."""
  term = logp - stop_gradient(proximal)
  near = jnp.clip(term, -eps_low, eps_high)
  cut = near * advantage < term * advantage
  return jnp.where(cut, near, term), cut


def gmpo(
  logp: Float[Array, "M"],
  proximal: Float[Array, "M"],
  advantage: Float[Array, "M"],
  weight: Float[Array, "M"],
  sample: Int[Array, "M"],
  sample_weight: Float[Array, "M"],
  *,
  eps_low: float = 0.4,
  eps_high: float = 0.4,
  log_ratio_sum: Float[Array, "M"] | None = None,
) -> PolicyTerms:
  """Geometric-mean policy optimisation (2507.20673).

  -A exp(sum_t w_t l_t / sum_t w_t), where l_t is the token's log ratio clipped
  to [-eps_low, eps_high] on the side that the advantage favours.

  Args: as for gspo; eps_low and eps_high bound the *log* ratio of a token, and
    log_ratio_sum is the sum of w_t l_t.

  Returns:
    PolicyTerms; ratio is the geometric mean of clipped ratios.
  """
  logp, proximal, advantage = _wide(logp, proximal, advantage)
  term, cut = _gmpo_term(logp, proximal, advantage, eps_low, eps_high)
  ratio = _sequence_ratio(term, weight, sample, sample_weight, log_ratio_sum)
  return PolicyTerms(-ratio * advantage, ratio, cut)


def cispo(
  logp: Float[Array, "M"],
  proximal: Float[Array, "M"],
  advantage: Float[Array, "M"],
  *,
  eps_low: float = 1.0,
  eps_high: float = 2.0,
) -> PolicyTerms:
  """-sg(clip(r, 1 - eps_low, 1 + eps_high)) A logp (2506.13585).

  Args: as for ppo_clip.

  Returns:
    PolicyTerms; no entry's gradient is ever cut: clipped says where the
    weight was.
  """
  logp, proximal, advantage = _wide(logp, proximal, advantage)
  ratio = stop_gradient(jnp.exp(logp - proximal))
  near = jnp.clip(ratio, 1 - eps_low, 1 + eps_high)
  return PolicyTerms(-near * advantage * logp, ratio, near != ratio)


def reinforce(
  logp: Float[Array, "M"],
  proximal: Float[Array, "M"],
  advantage: Float[Array, "M"],
) -> PolicyTerms:
  """-A logp; with advantage 1 it is supervised cross-entropy."""
  logp, proximal, advantage = _wide(logp, proximal, advantage)
  ratio = stop_gradient(jnp.exp(logp - proximal))
  return PolicyTerms(-advantage * logp, ratio, jnp.zeros(logp.shape, bool))


def log_ratio_term(
  loss: str, logp, proximal, advantage, *, eps_low: float, eps_high: float
) -> Float[Array, "M"]:
  """What a sequence loss averages over a sample: for the first of two passes.

  Args:
    loss: "gspo" or "gmpo".
    logp, proximal, advantage: as for the loss.
    eps_low, eps_high: as for the loss.

  Returns:
    [M]; its weighted sums over whole samples are SequenceSums.log_ratio.
  """
  logp, proximal, advantage = _wide(logp, proximal, advantage)
  if loss == "gmpo":
    return _gmpo_term(logp, proximal, advantage, eps_low, eps_high)[0]
  if loss == "gspo":
    return logp - proximal
  raise ValueError(f"loss {loss!r} has no sequence ratio: {SEQUENCE_LOSSES} do")


def behaviour_weight(
  logp_old: Float[Array, "M"], logp_behaviour: Float[Array, "M"]
) -> Float[Array, "M"]:
  """rho = exp(logp_old - logp_behaviour), detached."""
  logp_old, logp_behaviour = _wide(logp_old, logp_behaviour)
  return stop_gradient(jnp.exp(logp_old - logp_behaviour))


def tis(
  rho: Float[Array, "M"], *, low: float = 0.0, high: float = 2.0
) -> Float[Array, "M"]:
  """Truncated importance sampling: rho clipped to [low, high]."""
  return jnp.clip(_wide(rho), low, high)


def icepop(
  rho: Float[Array, "M"], *, low: float = 0.5, high: float = 5.0
) -> Float[Array, "M"]:
  """rho where low <= rho <= high, else 0 (Ring-1T, 2510.18855)."""
  rho = _wide(rho)
  return jnp.where((rho >= low) & (rho <= high), rho, 0)


def sequence_mask(
  logp_old: Float[Array, "M"],
  logp_behaviour: Float[Array, "M"],
  weight: Float[Array, "M"],
  sample: Int[Array, "M"],
  sample_weight: Float[Array, "M"],
  *,
  low: float = 0.5,
  high: float = 2.0,
  veto: float = 1e-4,
  sums: SequenceSums | None = None,
) -> Float[Array, "M"]:
  """1 for the entries of samples whose mismatch is small, else 0.

  A sample stays when the geometric mean of its rho lies in [low, high] and no
  entry's rho is below `veto`.

  Args:
    logp_old, logp_behaviour: the two policies that should agree.
    weight: entry weights; entries of weight 0 have no say.
    sample: sample ids.
    sample_weight: sum of weights over the whole sample.
    low, high: band of the geometric mean.
    veto: smallest ratio allowed at any entry.
    sums: two-pass sums, for samples split over micro-steps.

  Returns:
    [M] zeros and ones.
  """
  logp_old, logp_behaviour, weight, sample_weight = _wide(
    logp_old, logp_behaviour, weight, sample_weight
  )
  log_rho = stop_gradient(logp_old - logp_behaviour)
  log_rho = jnp.where(weight > 0, log_rho, 0)
  if sums is None:
    ids = dense_ids(sample)
    total = jax.ops.segment_sum(log_rho * weight, ids, len(ids))[ids]
    least = jax.ops.segment_min(log_rho, ids, len(ids))[ids]
  else:
    total, least = sums.log_rho, sums.min_log_rho
  mean = jnp.exp(total / jnp.where(sample_weight > 0, sample_weight, 1))
  keep = (mean >= low) & (mean <= high) & (jnp.exp(least) >= veto)
  return keep.astype(log_rho.dtype)


def kl(
  logp: Float[Array, "M"], logp_reference: Float[Array, "M"], kind: str = "k3"
) -> Float[Array, "M"]:
  """Estimates of KL(policy || reference) at sampled tokens, as *values*.

  With d = logp_reference - logp: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1
  (Schulman 2020). k1 and k3 are unbiased, k3 has low variance.
  """
  logp, logp_reference = _wide(logp, logp_reference)
  d = logp_reference - logp
  if kind == "k1":
    return -d
  if kind == "k2":
    return jnp.square(d) / 2
  if kind == "k3":
    return jnp.expm1(d) - d
  raise ValueError(f"kl kind {kind!r} is not one of k1, k2, k3")


def kl_loss(
  logp: Float[Array, "M"],
  logp_reference: Float[Array, "M"],
  kind: str = "k3",
  *,
  logp_behaviour: Float[Array, "M"] | None = None,
) -> Float[Array, "M"]:
  """KL(policy || reference) as a loss term: the value of `kl` with the
  unbiased gradient w (logp - logp_reference) grad logp.

  Differentiating a k1 value gives a gradient of mean 0, a k3 value that of the
  *reversed* KL. The gradient here is that of k3 weighted by the ratio, and the
  same for every kind.

  Args:
    logp: current policy.
    logp_reference: reference policy; a constant.
    kind: of the value.
    logp_behaviour: the policy that sampled, if it is not the current one: the
      importance weight is w = sg(exp(logp - logp_behaviour)), else 1.

  Returns:
    [M] loss terms.
  """
  logp, logp_reference = _wide(logp, logp_reference)
  weight = jnp.ones_like(logp)
  if logp_behaviour is not None:
    weight = stop_gradient(jnp.exp(logp - _wide(logp_behaviour)))
  value = stop_gradient(weight * kl(logp, logp_reference, kind))
  slope = stop_gradient(weight * (logp - logp_reference))
  return value + slope * (logp - stop_gradient(logp))


AGGREGATIONS = (
  "execution_mean",
  "token_mean",
  "seq_mean_token_mean",
  "seq_mean_token_sum",
  "seq_mean_token_sum_norm",
)


def aggregate(
  loss: Float[Array, "M"],
  weight: Float[Array, "M"],
  sample_weight: Float[Array, "M"],
  execution_weight: Float[Array, "M"],
  kind: str,
  *,
  max_len: int = 0,
) -> Float[Array, ""]:
  """Numerator of an aggregation: un-normalised, additive over any cut.

  Args:
    loss: a value an entry; ignored (whatever it is) where weight is 0.
    weight: entry weights.
    sample_weight: sum of weights over each entry's whole sample.
    execution_weight: |T_e|, the same over its whole execution.
    kind: "execution_mean" (mean over an execution's tokens, then over
      executions), "token_mean", "seq_mean_token_mean", "seq_mean_token_sum" or
      "seq_mean_token_sum_norm" (the last divided by max_len; Dr. GRPO).
    max_len: of seq_mean_token_sum_norm.

  Returns:
    The numerator; divide by the sum of `denominator`.
  """
  loss, weight = _wide(loss, weight)
  live = weight > 0
  if kind == "execution_mean":
    weight = weight / jnp.where(live, execution_weight, 1)
  elif kind == "seq_mean_token_mean":
    weight = weight / jnp.where(live, sample_weight, 1)
  elif kind == "seq_mean_token_sum_norm":
    if max_len <= 0:
      raise ValueError(f"{kind} needs max_len > 0, got {max_len}")
    weight = weight / max_len
  elif kind not in AGGREGATIONS:
    raise ValueError(f"aggregation {kind!r} is not one of {AGGREGATIONS}")
  return jnp.sum(jnp.where(live, loss, 0) * weight)


def denominator(
  weight: Float[Array, "M"],
  sample_first: Bool[Array, "M"],
  execution_first: Bool[Array, "M"],
  kind: str,
) -> Float[Array, ""]:
  """What an aggregation is divided by: tokens, samples or executions.

  A sample or an execution counts where its first entry lies, so that sums over
  micro-steps are sums of integers: the same bits however a batch is cut (for
  token_mean, where weights are integers; below 2^24).

  Args:
    weight: entry weights.
    sample_first, execution_first: as in Batch.
    kind: as for aggregate.

  Returns:
    The count.
  """
  weight = _wide(weight)
  if kind == "token_mean":
    return weight.sum()
  first = execution_first if kind == "execution_mean" else sample_first
  if kind not in AGGREGATIONS:
    raise ValueError(f"aggregation {kind!r} is not one of {AGGREGATIONS}")
  return first.astype(weight.dtype).sum()
