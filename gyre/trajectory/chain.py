"""Training samples of an execution whose calls extend one another.

A call continues the longest open sample whose ids are a prefix of its prompt;
anything else starts a new sample. Every sampled token lies in exactly one
mask, under exactly the context it was sampled in, and is never re-encoded.
"""

from __future__ import annotations

import hashlib

import numpy as np

from gyre.types import Call, Execution, Sample


class _Chain:
  """An open sample: its ids so far and a running digest of them."""

  def __init__(self, role: str):
    self.role = role
    self.length = 0
    self.trained = 0
    self.digest = hashlib.blake2b(digest_size=16)
    self.parts: list[tuple[np.ndarray, ...]] = []

  def append(self, ids, mask: bool, logprobs, versions) -> None:
    if not len(ids):
      return
    self.parts.append((ids, np.full(len(ids), mask), logprobs, versions))
    self.digest.update(ids.tobytes())
    self.length += len(ids)
    if mask:
      self.trained = self.length

  def context(self, ids) -> None:
    self.append(
      ids,
      False,
      np.zeros(len(ids), np.float32),
      np.full(len(ids), -1, np.int32),
    )


def _longest_open(
  prompt: np.ndarray, open_by_end: dict[tuple[int, bytes], _Chain]
) -> _Chain | None:
  """The longest chain that `prompt` extends: one pass over the prompt."""
  digest, done, found = hashlib.blake2b(digest_size=16), 0, None
  for length in sorted({n for n, _ in open_by_end}):
    if length > len(prompt):
      break
    digest.update(prompt[done:length].tobytes())
    done = length
    found = open_by_end.get((length, digest.digest()), found)
  return found


def _extend(
  call: Call, chains: list[_Chain], ends: dict[tuple[int, bytes], _Chain]
) -> None:
  chain = _longest_open(call.prompt_ids, ends)
  if chain is None:
    chain = _Chain(call.role)
    chains.append(chain)
  else:
    del ends[chain.length, chain.digest.digest()]
  chain.context(call.prompt_ids[chain.length :])
  chain.append(call.completion_ids, True, call.logprobs, call.versions)
  chain.role = call.role
  # Two chains may come to the same ids (independent retries that sampled the
  # same tokens): the first stays open.
  ends.setdefault((chain.length, chain.digest.digest()), chain)


def samples(execution: Execution) -> list[Sample]:
  """Chains an execution's calls by exact prefix.

  Args:
    execution: its calls, in order of start. Those with an empty completion
      teach nothing and are passed over.

  Returns:
    Samples in order of their first call, each cut after its last sampled
    token. A truncated execution yields every token that it sampled.

  Raises:
    ValueError: a call sampled from an empty prompt (its first token has no
      predictor).
  """
  chains: list[_Chain] = []
  ends: dict[tuple[int, bytes], _Chain] = {}
  for call in execution.calls:
    if not len(call.completion_ids):
      continue
    if not len(call.prompt_ids):
      raise ValueError(
        f"call {call.call_id} of execution {call.execution_id} has an empty "
        f"prompt but {len(call.completion_ids)} completion ids"
      )
    _extend(call, chains, ends)
  out = []
  for chain in chains:
    ids, mask, logprobs, versions = (
      np.concatenate(part)[: chain.trained]
      for part in zip(*chain.parts, strict=True)
    )
    out.append(
      Sample(
        execution_id=execution.execution_id,
        group_id=execution.group_id,
        ids=ids.astype(np.int32),
        mask=mask,
        logprobs=logprobs.astype(np.float32),
        versions=versions.astype(np.int32),
        role=chain.role,
      )
    )
  return out
