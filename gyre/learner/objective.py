"""The loss of a micro-step: policy, KL and entropy terms as configured.

Takes logprobs at loss entries, returns an un-normalised numerator and sums;
everything a metric needs is a sum (or a maximum), so that it does not depend
on how a batch is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.lax import stop_gradient

from gyre import config
from gyre.learner import losses
from gyre.types import Batch


@struct.dataclass
class Extras:
  """Optional [R, M] arrays beside a Batch; None where not given.

  Attributes:
    logp_old: proximal policy, recomputed at the start of the batch.
    logp_reference: of the KL term.
    sequence: losses.SequenceSums of [R, M], for samples that are split.
  """

  logp_old: Any = None
  logp_reference: Any = None
  sequence: Any = None


METRICS = (
  "policy",
  "kl",
  "entropy",
  "clipped",
  "abs_diff",
  "mismatch_kl",
  "staleness",
)


@struct.dataclass
class Counts:
  """Denominators and metric sums of one or many micro-steps.

  Attributes:
    denominator: what the loss numerator is divided by.
    tokens: sum of entry weights.
    sums: METRICS -> sum; the loss terms as aggregated, the rest weighted by
      entry.
    staleness_max: largest trainer version - entry version.
  """

  denominator: Any
  tokens: Any
  sums: dict[str, Any]
  staleness_max: Any


def zero_counts(dtype: Any = jnp.float32) -> Counts:
  """Counts of nothing; `dtype` is that of the logprobs."""
  return Counts(
    denominator=jnp.zeros((), jnp.float32),
    tokens=jnp.zeros((), jnp.float32),
    sums={name: jnp.zeros((), dtype) for name in METRICS},
    staleness_max=jnp.zeros((), jnp.int32),
  )


def add_counts(a: Counts, b: Counts) -> Counts:
  """Counts of the union of two disjoint parts."""
  return Counts(
    denominator=a.denominator + b.denominator,
    tokens=a.tokens + b.tokens,
    sums={name: a.sums[name] + b.sums[name] for name in METRICS},
    staleness_max=jnp.maximum(a.staleness_max, b.staleness_max),
  )


def needs_whole_samples(cfg: config.Learner) -> bool:
  """Whether the objective has a quantity of a whole sample."""
  return cfg.loss in losses.SEQUENCE_LOSSES or cfg.correction == "sequence_mask"


def policy_terms(cfg: config.Learner, logp, proximal, batch, sequence=None):
  """The configured policy loss over flat entries; see `losses`.

  Args:
    cfg: the learner; for gmpo eps_low and eps_high bound the log ratio.
    logp, proximal: [M].
    batch: a Batch of flat [M] arrays.
    sequence: losses.SequenceSums or None.

  Returns:
    losses.PolicyTerms.
  """
  eps = {"eps_low": cfg.eps_low, "eps_high": cfg.eps_high}
  a = batch.advantage
  if cfg.loss == "ppo_clip":
    return losses.ppo_clip(
      logp, proximal, a, dual_clip=cfg.dual_clip or None, **eps
    )
  if cfg.loss == "cispo":
    return losses.cispo(logp, proximal, a, **eps)
  if cfg.loss == "reinforce":
    return losses.reinforce(logp, proximal, a)
  loss = {"gspo": losses.gspo, "gmpo": losses.gmpo}[cfg.loss]
  return loss(
    logp,
    proximal,
    a,
    batch.weight,
    batch.sample,
    batch.sample_weight,
    log_ratio_sum=None if sequence is None else sequence.log_ratio,
    **eps,
  )


def correction(cfg: config.Learner, logp_old, batch, sequence=None):
  """The detached weight of an entry for logp_old against the behaviour."""
  rho = losses.behaviour_weight(logp_old, batch.logp_behaviour)
  band = {"low": cfg.correction_low, "high": cfg.correction_high}
  if cfg.correction == "none":
    return rho
  if cfg.correction == "tis":
    return losses.tis(rho, **band)
  if cfg.correction == "icepop":
    return losses.icepop(rho, **band)
  return losses.sequence_mask(
    logp_old,
    batch.logp_behaviour,
    batch.weight,
    batch.sample,
    batch.sample_weight,
    sums=sequence,
    **band,
  )


def flat_entries(batch: Batch) -> Batch:
  """Entry arrays [R, M] -> [R * M]; weight is 0 past a row's last entry."""
  m = batch.weight.shape[1]
  live = jnp.arange(m)[None] < batch.num_entries[:, None]
  names = (
    "logp_behaviour version advantage weight sample execution sample_weight "
    "execution_weight sample_first execution_first"
  ).split()
  flat = {n: getattr(batch, n).reshape(-1) for n in names}
  live = live.reshape(-1)
  flat["weight"] = jnp.where(live, flat["weight"], 0)
  for name in ("sample_first", "execution_first"):
    flat[name] = flat[name] & live
  return batch.__class__(
    **{f: flat.get(f, getattr(batch, f)) for f in batch.__dataclass_fields__}
  )


def objective(
  cfg: config.Learner,
  logp,
  entropy,
  batch: Batch,
  extras: Extras,
  version,
):
  """Un-normalised loss of a micro-step and its counts.

  Args:
    cfg: the learner.
    logp: [R, M], of each entry's target under the current policy.
    entropy: [R, M] of the policy at each entry, or None: then the metric is
      the estimate -logp, and there must be no bonus.
    batch: the micro-step.
    extras: optional logprobs. Without logp_old the ratio is taken against the
      behaviour policy; a correction without logp_old takes logp_old =
      stop_gradient(logp), at no cost (streaming).
    version: of the current weights.

  Returns:
    (numerator, Counts); the loss is numerator / denominator, each summed over
    all micro-steps of the batch.
  """
  e = flat_entries(batch)
  live = e.weight > 0
  flat = lambda x: None if x is None else x.reshape(-1)  # noqa: E731
  logp = jnp.where(live, flat(logp), 0)
  old, reference = flat(extras.logp_old), flat(extras.logp_reference)
  sequence = extras.sequence
  if sequence is not None:
    sequence = losses.SequenceSums(*(flat(x) for x in sequence))
  if old is None and cfg.correction != "none":
    old = stop_gradient(logp)
  proximal = e.logp_behaviour if old is None else old
  terms = policy_terms(cfg, logp, proximal, e, sequence)
  policy = terms.loss
  if old is not None:
    policy = policy * correction(cfg, old, e, sequence)

  def numerator(x):
    return losses.aggregate(
      x,
      e.weight,
      e.sample_weight,
      e.execution_weight,
      cfg.aggregation,
      max_len=cfg.sum_norm_len,
    )

  policy = total = numerator(policy)
  kl = jnp.zeros_like(total)
  if reference is not None:
    kl = numerator(
      losses.kl_loss(
        logp, reference, cfg.kl_kind, logp_behaviour=e.logp_behaviour
      )
    )
    total = total + cfg.kl_coef * kl
  entropy = -stop_gradient(logp) if entropy is None else flat(entropy)
  entropy = numerator(entropy)
  if cfg.entropy_coef:
    total = total - cfg.entropy_coef * entropy

  detached = stop_gradient(logp)
  age = jnp.where(live, version - e.version, 0)

  def weighed(x):
    return jnp.sum(jnp.where(live, x, 0) * e.weight, dtype=logp.dtype)

  sums = {
    "policy": policy,
    "kl": kl,
    "entropy": entropy,
    "clipped": weighed(terms.clipped),
    "abs_diff": weighed(jnp.abs(detached - e.logp_behaviour)),
    "mismatch_kl": weighed(losses.kl(e.logp_behaviour, detached, "k3")),
    "staleness": weighed(age),
  }
  counts = Counts(
    denominator=losses.denominator(
      e.weight, e.sample_first, e.execution_first, cfg.aggregation
    ),
    tokens=e.weight.sum(),
    sums={k: stop_gradient(v).astype(logp.dtype) for k, v in sums.items()},
    staleness_max=age.max(),
  )
  return total, counts


def metrics(counts: Counts) -> dict[str, Any]:
  """The metrics by name, from the counts of a whole batch."""
  over_loss = jnp.maximum(counts.denominator, 1)
  over_tokens = jnp.maximum(counts.tokens, 1)
  s = counts.sums
  return {
    "loss/policy": s["policy"] / over_loss,
    "loss/kl": s["kl"] / over_loss,
    "loss/entropy": s["entropy"] / over_loss,
    "ratio/clip_fraction": s["clipped"] / over_tokens,
    "mismatch/logprob_abs_diff": s["abs_diff"] / over_tokens,
    "mismatch/kl": s["mismatch_kl"] / over_tokens,
    "staleness/mean": s["staleness"] / over_tokens,
    "staleness/max": counts.staleness_max,
  }


def sequence_sums(
  learner: config.Learner,
  batches: Sequence[Batch],
  logp: Sequence[jax.Array],
  logp_old: Sequence[jax.Array] | None = None,
) -> list[losses.SequenceSums]:
  """Second pass's sums from the first: whole samples over all micro-steps.

  Args:
    learner: the objective.
    batches: every micro-step of the batch.
    logp: [R, M] each, current policy (from make_score).
    logp_old: [R, M] each, the proximal policy if it is not the behaviour's.

  Returns:
    For each micro-step what Extras.sequence takes.
  """
  n = 1 + max(int(np.max(b.sample)) for b in batches)
  total, rho = np.zeros(n), np.zeros(n)
  least = np.zeros(n)
  for i, (b, lp) in enumerate(zip(batches, logp, strict=True)):
    lp = np.asarray(lp, np.float64)
    old = lp if logp_old is None else np.asarray(logp_old[i], np.float64)
    behaviour = np.asarray(b.logp_behaviour, np.float64)
    streaming = logp_old is None and learner.correction == "none"
    proximal = behaviour if streaming else old
    live = np.asarray(b.weight) > 0
    ids, w = np.asarray(b.sample)[live], np.asarray(b.weight)[live]
    if learner.loss in losses.SEQUENCE_LOSSES:
      term = losses.log_ratio_term(
        learner.loss,
        lp,
        proximal,
        b.advantage,
        eps_low=learner.eps_low,
        eps_high=learner.eps_high,
      )
      np.add.at(total, ids, w * np.asarray(term)[live])
    log_rho = (old - behaviour)[live]
    np.add.at(rho, ids, w * log_rho)
    np.minimum.at(least, ids, log_rho)
  return [
    losses.SequenceSums(
      *(x[np.maximum(b.sample, 0)] for x in (total, rho, least))
    )
    for b in batches
  ]
