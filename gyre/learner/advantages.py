"""Advantages of executions within their group, and GAE over entries.

Group statistics are over executions, never over samples or tokens; every
sample of an execution inherits its advantage. `grpo` and `rloo` run on the
host; `gae` is traceable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


class GroupAdvantages(NamedTuple):
  """What a group estimator returns.

  Attributes:
    values: [N] advantage of each execution, 0 where excluded.
    included: bool [N], False where the reward is missing or not finite: the
      execution must not be trained.
    zero_variance: bool [N], True for the included executions of a group whose
      rewards are all equal: their advantage is exactly 0.
    num_nonfinite: rewards that were NaN or infinite (missing ones, None, are
      excluded too but are not counted here).
  """

  values: np.ndarray
  included: np.ndarray
  zero_variance: np.ndarray
  num_nonfinite: int


def _read(
  rewards: Sequence[float | None] | np.ndarray, group: Sequence | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
  """Returns rewards [N], included [N], dense group ids [N], num_nonfinite."""
  missing = np.array([r is None for r in rewards], bool)
  if isinstance(rewards, np.ndarray) and rewards.dtype != object:
    values = rewards.astype(np.result_type(rewards.dtype, np.float32))
  else:
    values = np.array([np.nan if r is None else r for r in rewards], float)
  if values.shape != (len(group),):
    raise ValueError(
      f"rewards have shape {values.shape} but there are {len(group)} group ids"
    )
  included = np.isfinite(values)
  _, dense = np.unique(np.asarray(group), return_inverse=True)
  nonfinite = int(np.sum(~included & ~missing))
  return np.where(included, values, 0), included, dense.reshape(-1), nonfinite


def _segment(values: np.ndarray, ids: np.ndarray, n: int) -> np.ndarray:
  total = np.zeros(n, values.dtype)
  np.add.at(total, ids, values)
  return total


def _flat_groups(values, included, ids, n) -> np.ndarray:
  """bool [G]: all the included rewards of the group are equal."""
  high = np.full(n, -np.inf, values.dtype)
  low = np.full(n, np.inf, values.dtype)
  np.maximum.at(high, ids[included], values[included])
  np.minimum.at(low, ids[included], values[included])
  return ~(high > low)


def grpo(
  rewards: Sequence[float | None] | np.ndarray,
  group: Sequence | np.ndarray,
  *,
  normalize_std: bool = True,
  ddof: int = 1,
  eps: float = 1e-6,
) -> GroupAdvantages:
  """Group-relative advantage, A_i = (r_i - mean_g) / (std_g + eps).

  The variance is centred and two-pass. A group without variance, and a group
  left with one scored execution, gets exactly 0.

  Args:
    rewards: [N], one an execution; None where there is no score.
    group: [N], group of each execution, any hashable numpy values.
    normalize_std: divide by the standard deviation (DeepSeekMath, arXiv
      2402.03300); False is Dr. GRPO (arXiv 2503.20783).
    ddof: delta degrees of freedom of the variance.
    eps: added to the standard deviation.

  Returns:
    GroupAdvantages, in float64 unless `rewards` is a narrower array.
  """
  values, included, ids, nonfinite = _read(rewards, group)
  n = int(ids.max(initial=-1)) + 1
  count = _segment(included.astype(values.dtype), ids, n)
  mean = _segment(values, ids, n) / np.maximum(count, 1)
  flat = _flat_groups(values, included, ids, n) | (count < 2)
  live = included & ~flat[ids]
  centred = np.where(live, values - mean[ids], 0)
  # The mean itself is rounded; taking out the mean of the deviations makes
  # the second pass exact to first order.
  centred -= np.where(
    live, (_segment(centred, ids, n) / np.maximum(count, 1))[ids], 0
  )
  if normalize_std:
    dof = np.maximum(count - ddof, 1).astype(values.dtype)
    std = np.sqrt(_segment(centred**2, ids, n) / dof)
    centred = centred / (std[ids] + values.dtype.type(eps))
  out = np.where(live, centred, 0).astype(values.dtype)
  return GroupAdvantages(out, included, included & flat[ids], nonfinite)


def rloo(
  rewards: Sequence[float | None] | np.ndarray, group: Sequence | np.ndarray
) -> GroupAdvantages:
  """REINFORCE leave-one-out, A_i = r_i - mean of the others (2402.14740).

  Args:
    rewards: [N], one an execution; None where there is no score.
    group: [N], group of each execution.

  Returns:
    GroupAdvantages; a group with one scored execution gets 0.
  """
  values, included, ids, nonfinite = _read(rewards, group)
  n = int(ids.max(initial=-1)) + 1
  count = _segment(included.astype(values.dtype), ids, n)
  mean = _segment(values, ids, n) / np.maximum(count, 1)
  flat = _flat_groups(values, included, ids, n) | (count < 2)
  live = included & ~flat[ids]
  # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
  scale = count / np.maximum(count - 1, 1)
  out = np.where(live, (values - mean[ids]) * scale[ids], 0)
  out = out.astype(values.dtype)
  return GroupAdvantages(out, included, included & flat[ids], nonfinite)


def shuffled(result: GroupAdvantages, seed: int, step: int) -> GroupAdvantages:
  """A control: the advantages of a step dealt out anew over its executions.

  Which executions are trained, how many tokens they have and the advantages
  as a set stay; what an execution did no longer decides which one it gets. A
  policy trained so must not improve.

  Args:
    result: of `grpo` or `rloo`, over all executions of a step.
    seed, step: decide the permutation.

  Returns:
    GroupAdvantages with the values of included executions of groups with
    variance permuted, over group boundaries.
  """
  live = np.flatnonzero(result.included & ~result.zero_variance)
  rng = np.random.Generator(np.random.Philox(key=[seed, step]))
  values = result.values.copy()
  values[live] = result.values[rng.permutation(live)]
  return result._replace(values=values)


def gae(
  rewards: Float[Array, "M"],
  values: Float[Array, "M"],
  sample: Int[Array, "M"],
  *,
  gamma: float = 1.0,
  lam: float = 1.0,
  bootstrap: Float[Array, "M"] | None = None,
) -> tuple[Float[Array, "M"], Float[Array, "M"]]:
  """Generalised advantage estimation over each sample's entries (1506.02438).

  delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1}.
  T1 uses gamma = lam = 1 with the score on a sample's last entry.

  Args:
    rewards: [M], reward received at each entry.
    values: [M], the critic's value at each entry.
    sample: [M], sample ids; a sample's entries are contiguous, in time order.
    gamma: discount.
    lam: trace decay.
    bootstrap: [M], value of the state after a sample's last entry, read at
      that entry. None bootstraps across no end, truncated or not.

  Returns:
    (advantages [M], returns [M]); returns = advantages + values.
  """
  dtype = jnp.promote_types(jnp.result_type(rewards, values), jnp.float32)
  rewards, values = rewards.astype(dtype), values.astype(dtype)
  same = jnp.append(sample[1:] == sample[:-1], False)
  after = jnp.append(values[1:], jnp.zeros((1,), dtype))
  end = jnp.zeros_like(values) if bootstrap is None else bootstrap
  delta = rewards + gamma * jnp.where(same, after, end.astype(dtype)) - values
  decay = jnp.where(same, jnp.asarray(gamma * lam, dtype), 0)

  def combine(later, earlier):
    carry, scale = later
    delta, decay = earlier
    return delta + decay * carry, decay * scale

  advantages, _ = jax.lax.associative_scan(
    combine, (delta, decay), reverse=True
  )
  return advantages, advantages + values
