"""Records as rows of the rollout store, and back, bit for bit.

Token arrays are little-endian blobs. What reads a row raises ValueError,
TypeError or KeyError where it is not one that was written.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from gyre.types import Call, Execution, Outcome, Sample


def blob(x: Any, dtype: str) -> bytes:
  """An array as bytes; dtype "<i4", "<f4" or "<f8"."""
  return np.ascontiguousarray(x, dtype).tobytes()


def array(data: bytes, dtype: str) -> np.ndarray:
  """What `blob` wrote, in a memory of its own."""
  return np.frombuffer(data, dtype).astype(dtype[1:], copy=True)


def text(x: Any) -> str:
  """JSON."""
  return json.dumps(x, sort_keys=True)


def same(told: int, found: int, what: str) -> None:
  """Checks a count.

  Raises:
    ValueError: they differ.
  """
  if told != found:
    raise ValueError(f"{found} {what} where {told} were written")


def _bits(data: bytes, count: int) -> np.ndarray:
  """The first `count` bits; numpy reads past the end where some lack."""
  same(-(-count // 8), len(data), "bytes of a mask")
  return np.unpackbits(np.frombuffer(data, np.uint8), count=count)


def of_execution(e: Execution) -> tuple:
  """A row of the table executions; its calls have their own."""
  o = e.outcome
  row = (e.execution_id, e.group_id, e.index, e.task_id, e.version, e.seed)
  row += (e.truncated, e.turns, o and o.status, o and o.score)
  row += (o and text(dataclasses.asdict(o)),)
  return (*row, text([dict(m) for m in e.messages]), e.t_start, e.t_end)


def execution(row: tuple, calls: tuple[Call, ...]) -> Execution:
  """An execution.

  Args:
    row: execution_id, group_id, idx, task_id, version, seed, truncated, turns,
      outcome, messages, t_start, t_end.
    calls: its own.
  """
  return Execution(
    execution_id=row[0],
    group_id=row[1],
    index=row[2],
    task_id=row[3],
    version=row[4],
    seed=row[5],
    calls=calls,
    outcome=None if row[8] is None else Outcome(**json.loads(row[8])),
    truncated=row[6],
    turns=row[7],
    messages=tuple(json.loads(row[9])),
    t_start=row[10],
    t_end=row[11],
  )


def of_call(c: Call, ordinal: int, base: int | None, shared: int) -> tuple:
  """A row of the table calls.

  Args:
    c: the call.
    ordinal: its place in the execution.
    base: ordinal of the call that has the first ids of its prompt, or None.
    shared: how many these are.
  """
  row = (c.execution_id, ordinal, c.call_id, c.group_id, base, shared)
  row += (blob(c.prompt_ids[shared:], "<i4"), blob(c.completion_ids, "<i4"))
  row += (blob(c.logprobs, "<f4"), blob(c.versions, "<i4"))
  row += (c.finish_reason, c.parent_hint, c.role, c.routing)
  row += (c.t_start, c.t_end, c.engine, text(dict(c.sampling_asked)))
  return (*row, text(dict(c.sampling_used)), c.boundary)


def call(execution_id: str, row: tuple, prompt_ids: np.ndarray) -> Call:
  """A call.

  Args:
    execution_id: whose it is.
    row: call_id, group_id, base, base_len, prompt, completion, logprobs,
      versions, finish_reason, parent_hint, role, routing, t_start, t_end,
      engine, asked, used, boundary.
    prompt_ids: whole.
  """
  return Call(
    execution_id=execution_id,
    call_id=row[0],
    group_id=row[1],
    prompt_ids=prompt_ids,
    completion_ids=array(row[5], "<i4"),
    logprobs=array(row[6], "<f4"),
    versions=array(row[7], "<i4"),
    finish_reason=row[8],
    parent_hint=row[9],
    role=row[10],
    routing=row[11],
    t_start=row[12],
    t_end=row[13],
    engine=row[14],
    sampling_asked=json.loads(row[15]),
    sampling_used=json.loads(row[16]),
    boundary=row[17],
  )


def of_sample(
  s: Sample,
  step: int,
  ordinal: int,
  advantage: float | None,
  base: int | None,
  shared: int,
) -> tuple:
  """A row of the table samples; base and shared as for a call."""
  row = (step, ordinal, s.execution_id, s.group_id, s.role, advantage)
  row += (s.length, base, shared, blob(s.ids[shared:], "<i4"))
  row += (np.packbits(s.mask).tobytes(), blob(s.logprobs, "<f4"))
  row += (blob(s.versions, "<i4"),)
  row += (None if s.weights is None else blob(s.weights, "<f8"),)
  return (*row, s.execution_weight)


def sample(row: tuple, runs: Sequence[np.ndarray]) -> Sample:
  """A sample.

  Args:
    row: execution_id, group_id, role, advantage, length, base, base_len, ids,
      mask, logprobs, versions, weights, execution_weight.
    runs: the ids that a call of its execution holds.
  """
  made = Sample(
    execution_id=row[0],
    group_id=row[1],
    runs=(*runs, array(row[7], "<i4")),
    trained=np.flatnonzero(_bits(row[8], row[4])),
    logprobs=array(row[9], "<f4"),
    versions=array(row[10], "<i4"),
    role=row[2],
    weights=None if row[11] is None else array(row[11], "<f8"),
    execution_weight=row[12],
  )
  same(row[4], made.length, "ids")
  return made
