"""What of an execution was trained: the samples chosen, on its tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from gyre.analysis.runs import RunError
from gyre.store.rollouts import RolloutStore
from gyre.trajectory.tree import Tree
from gyre.types import Execution, Sample


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
  """The training of one execution.

  Attributes:
    step: the optimizer step that trained on it.
    advantage: its own, or None where the step kept none.
    samples: paths chosen.
    mask: bool [U], unique tokens that lie in a sample's mask.
  """

  step: int
  advantage: float | None
  samples: int
  mask: np.ndarray


def locate(tree: Tree, ids: np.ndarray) -> np.ndarray:
  """Returns the token indices of a path that begins at the root, int64 [L].

  Raises:
    RunError: the tree has no such path.
  """
  children: dict[tuple[int, int], int] = {}
  firsts = tree.ids[tree.start].tolist()
  for node, above in enumerate(tree.parent.tolist()):
    children[above, firsts[node]] = node
  node, done = -1, 0
  parts = [np.zeros(0, np.int64)]
  while done < len(ids):
    node = children.get((node, int(ids[done])), -2)
    if node >= 0:
      span = np.arange(tree.start[node], tree.stop[node])[: len(ids) - done]
      if np.array_equal(tree.ids[span], ids[done : done + len(span)]):
        parts.append(span)
        done += len(span)
        continue
    raise RunError(
      f"a sample of {len(ids)} tokens leaves the tree within {done} and the "
      "next node: samples and calls do not belong together"
    )
  return np.concatenate(parts)


def of_samples(
  tree: Tree, step: int, samples: Iterable[tuple[Sample, float | None]]
) -> Trained:
  """Lays an execution's samples on its tree.

  Args:
    tree: of the execution.
    step: that trained on them.
    samples: (sample, advantage) of this execution only.

  Raises:
    RunError: a sample is not of this tree.
  """
  mask = np.zeros(len(tree.ids), bool)
  advantage, n = None, 0
  for sample, own in samples:
    path = locate(tree, sample.ids)
    mask[path[sample.trained]] = True
    advantage, n = own, n + 1
  return Trained(step, advantage, n, mask)


def load(
  store: RolloutStore, execution: Execution, tree: Tree
) -> Trained | None:
  """Reads what was trained of an execution.

  Args:
    store: of its run.
    execution: one that is in it.
    tree: the execution's.

  Returns:
    None when its group was not trained on (yet, or ever).

  Raises:
    RunError: what is stored does not fit together.
  """
  step = store.consumed().get(execution.group_id)
  if step is None:
    return None
  mine = [
    (sample, advantage)
    for sample, advantage in store.samples(step)
    if sample.execution_id == execution.execution_id
  ]
  return of_samples(tree, step, mine)
