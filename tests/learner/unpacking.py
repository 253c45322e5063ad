"""Samples read back from packed rows."""

import numpy as np

from gyre.types import Batch


def unpack(batch: Batch) -> dict[int, dict[str, np.ndarray]]:
  """Reads samples back from a packed batch, by sample number.

  Args:
    batch: one micro-step, on the host.

  Returns:
    sample number -> ids, up to its last trained token; trained, logprobs,
    versions and weights as a Sample has them; the scalars execution and
    advantage.

  Raises:
    ValueError: targets are not the ids that follow.
  """
  out = {}
  for r in range(batch.tokens.shape[0]):
    ends = batch.subtree_end[r, : batch.num_tokens[r]]
    count = int(batch.num_entries[r])
    for i in np.unique(batch.sample[r, :count]):
      at = np.flatnonzero(batch.sample[r, :count] == i)
      last = int(batch.entry_parent[r, at[-1]])
      path = np.flatnonzero(ends[: last + 1] > last)
      ids = np.append(batch.tokens[r, path], batch.entry_target[r, at[-1]])
      where = batch.positions[r, batch.entry_parent[r, at]] + 1
      if not np.array_equal(ids[where], batch.entry_target[r, at]):
        raise ValueError(f"sample {i}: targets disagree with its tokens")
      out[int(i)] = {
        "ids": ids,
        "trained": where,
        "logprobs": batch.logp_behaviour[r, at],
        "versions": batch.version[r, at],
        "weights": batch.weight[r, at],
        "execution": batch.execution[r, at[0]],
        "advantage": batch.advantage[r, at[0]],
      }
  return out
