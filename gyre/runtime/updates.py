"""From whole groups to micro-steps: one optimizer update, group by group.

Rewards, advantages, selection and |T_e| of a group need that group alone, so
its samples can be packed as soon as it is whole. Which groups share a
micro-step follows from the order of consumption, never from time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gyre.config import Config
from gyre.learner import advantages as advantages_lib
from gyre.learner.packing import Packed, pack
from gyre.runtime import metrics
from gyre.runtime.trainer import mean_metrics
from gyre.trajectory import select
from gyre.trajectory.score import reward
from gyre.types import Batch, Group, Sample


@dataclasses.dataclass(frozen=True)
class Scored:
  """A group after scoring.

  Attributes:
    group: with its executions, in order of index.
    scores: the reward of each, or None.
    advantages: execution_id -> advantage, of those to train.
    selections: what of each execution can be trained.
    flat: the rewards are all equal.
  """

  group: Group
  scores: tuple[float | None, ...]
  advantages: Mapping[str, float]
  selections: tuple[select.Selection, ...]
  flat: bool

  def trained(self) -> list[select.Selection]:
    """Returns the selections of the executions to train."""
    pairs = zip(self.group.executions, self.selections, strict=True)
    return [s for e, s in pairs if e.execution_id in self.advantages]

  def samples(self) -> list[Sample]:
    """Returns the samples to train."""
    return [s for selection in self.trained() for s in selection.samples]


def score_group(group: Group, config: Config) -> Scored:
  """Scores a group and gives each execution its advantage.

  Executions without a reward leave training; a group whose rewards are all
  equal teaches nothing: it is counted and not computed.
  """
  learner, seed = config.learner, config.run.seed
  executions = group.executions
  scores = tuple(reward(e.outcome, learner.score) for e in executions)
  names = [e.group_id for e in executions]
  if learner.advantage == "rloo":
    result = advantages_lib.rloo(scores, names)
  else:
    result = advantages_lib.grpo(
      scores,
      names,
      normalize_std=learner.normalize_std,
      ddof=learner.std_ddof,
    )
  if learner.shuffle_advantages:
    result = advantages_lib.shuffled(result, seed, group.index)
  trained = result.included & ~result.zero_variance
  return Scored(
    group=group,
    scores=scores,
    advantages={
      e.execution_id: float(a)
      for e, a, t in zip(executions, result.values, trained, strict=True)
      if t
    },
    selections=tuple(
      select.samples(e, config.trajectory, seed) for e in executions
    ),
    flat=bool(np.any(result.zero_variance)),
  )


class Update:
  """Groups consumed for an update, and the micro-steps that they fill.

  Attributes:
    groups: in order of consumption.
  """

  def __init__(self, config: Config, row_multiple: int):
    """No group yet.

    Args:
      config: learner, trajectory.
      row_multiple: rows of a micro-step are padded to a multiple of it.
    """
    self._config, self._row_multiple = config, row_multiple
    self.groups: list[Scored] = []
    self._packed: list[Packed] = []
    self._audit: Mapping[str, int] = {}
    self._pending: list[Scored] = []
    self._filled: Packed | None = None

  def add(self, scored: Scored) -> list[tuple[Batch, tuple[str, ...]]]:
    """Takes a group in.

    Returns:
      The micro-steps that are whole now, each with the ids of its groups.
    """
    self.groups.append(scored)
    together = self._pack([*self._pending, scored])
    if len(together.batches) <= 1:
      self._pending.append(scored)
      self._filled = together
      return []
    out = self.rest()
    alone = self._pack([scored])
    self._pending, self._filled = [scored], alone
    return out + (self.rest() if len(alone.batches) > 1 else [])

  def rest(self) -> list[tuple[Batch, tuple[str, ...]]]:
    """Returns what is not yet a whole micro-step, as one that is not full."""
    pending, filled = self._pending, self._filled
    self._pending, self._filled = [], None
    if filled is None:
      return []
    self._packed.append(filled)
    names = tuple(s.group.group_id for s in pending)
    return [(batch, names) for batch in filled.batches]

  def _pack(self, groups: Sequence[Scored]) -> Packed:
    learner = self._config.learner
    return pack(
      [s for g in groups for s in g.samples()],
      {k: v for g in groups for k, v in g.advantages.items()},
      row_tokens=learner.row_tokens,
      row_entries=learner.row_tokens,
      micro_rows=learner.micro_rows,
      row_multiple=self._row_multiple,
      fixed=True,
    )

  def samples(self) -> tuple[list[Sample], dict[str, float]]:
    """Returns what is trained, with the advantages of its executions."""
    samples = [s for g in self.groups for s in g.samples()]
    return samples, {k: v for g in self.groups for k, v in g.advantages.items()}

  def audit(self) -> None:
    """Looks up every token in the loss, for `metrics`; see token_audit."""
    self._audit = metrics.token_audit(
      [e for g in self.groups for e in g.group.executions],
      [s for g in self.groups for s in g.selections],
    )

  def metrics(
    self, version: int, passes: Sequence[Mapping[str, Any]]
  ) -> dict[str, Any]:
    """The update's line, but for times; after `audit`.

    Args:
      version: of the weights that it trained, before it.
      passes: metrics of each optimizer step over it.
    """
    executions = [e for g in self.groups for e in g.group.executions]
    scores = [s for g in self.groups for s in g.scores]
    stale = [version - e.version for e in executions]
    return {
      **metrics.rewards(executions, scores),
      **mean_metrics(passes if self._packed_any() else ()),
      "staleness/mean": float(np.mean(stale)),
      "staleness/max": int(max(stale)),
      "group/zero_variance": sum(g.flat for g in self.groups),
      "dedup/tokens_flat": sum(p.tokens_flat for p in self._packed),
      "dedup/tokens_trained": sum(p.tokens_trained for p in self._packed),
      **metrics.trajectories(
        [s for g in self.groups for s in (x.stats for x in g.trained())],
        self._config.trajectory.roles,
      ),
      **self._audit,
    }

  def _packed_any(self) -> bool:
    return any(p.batches for p in self._packed)
