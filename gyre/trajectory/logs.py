"""Logs of model calls from elsewhere: JSON lines to executions.

One JSON object a line, one line a model call, the calls of an execution in
order of start (executions may be interleaved):

  execution_id   text; which execution made the call
  prompt         text, or a list of ids: what the engine received
  completion     list of ids: what the engine sampled, its stop token included
  logprobs       list of numbers, one an id of `completion`
  versions       number, or one an id: the weights version; default 0
  group_id       text; default: execution_id up to its last "/"
  call_id        text; default: the position in the execution, "0000" the first
  finish_reason  "stop" (default), "length" or "abort"
  role           text; default "main"
  task_id        text; default "imported"
  t_start, t_end seconds since the epoch; default 0
  score          number; the last one of an execution is its outcome

Sampled *text* is refused: which ids were sampled cannot be told from it.
Other names are ignored.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, get_args

import numpy as np

from gyre.trajectory import align, ladder
from gyre.types import Execution, FinishReason, Outcome


class LogError(ValueError):
  """A line that is no call; the message names it, in one line."""


@dataclasses.dataclass(frozen=True)
class Imported:
  """What a log held.

  Attributes:
    executions: in order of their first line.
    stats: tito/*, summed over them.
  """

  executions: tuple[Execution, ...]
  stats: Mapping[str, int]


def _finite(value: Any) -> bool:
  """Whether it is a number that a float32 has."""
  return type(value) in (int, float) and abs(value) < 2.0**127


def _ids(record: Mapping[str, Any], name: str) -> np.ndarray:
  value = record.get(name)
  if not isinstance(value, list) or not all(
    type(x) is int and 0 <= x < 2**31 for x in value
  ):
    raise LogError(f"{name} must be a list of ids, not {str(value)[:40]!r}")
  return np.asarray(value, np.int32)


def _logprobs(record: Mapping[str, Any]) -> np.ndarray:
  value = record.get("logprobs")
  if not isinstance(value, list) or not all(map(_finite, value)):
    raise LogError("logprobs must be a list of finite numbers")
  return np.asarray(value, np.float32)


def _versions(record: Mapping[str, Any], length: int) -> np.ndarray:
  value = record.get("versions", 0)
  if type(value) is int:
    value = [value] * length
  return _ids({"versions": value}, "versions")


def _text(record: Mapping[str, Any], name: str, default: str) -> str:
  value = record.get(name, default)
  if not isinstance(value, str) or not value:
    raise LogError(f"{name} must be a text, not {str(value)[:40]!r}")
  return value


def _number(record: Mapping[str, Any], name: str) -> float:
  value = record.get(name, 0.0)
  if not _finite(value):
    raise LogError(f"{name} must be a finite number, not {str(value)[:40]!r}")
  return float(value)


def parse_turn(record: Mapping[str, Any], position: int) -> align.Turn:
  """Reads one line's object.

  Args:
    record: the object.
    position: of the call in its execution, 0-based.

  Raises:
    LogError: something is missing or of another kind.
  """
  sampled = _ids(record, "completion")
  prompt = record.get("prompt")
  if not isinstance(prompt, str):
    prompt = _ids(record, "prompt")
  if not len(prompt):
    raise LogError("prompt is empty")
  logprobs, versions = _logprobs(record), _versions(record, len(sampled))
  for name, values in (("logprobs", logprobs), ("versions", versions)):
    if len(values) != len(sampled):
      raise LogError(
        f"{len(values)} {name} for {len(sampled)} ids of the completion"
      )
  reason = record.get("finish_reason", "stop")
  known = get_args(FinishReason)
  if reason not in known:
    raise LogError(f"finish_reason {reason!r} is not one of {known}")
  return align.Turn(
    call_id=_text(record, "call_id", f"{position:04d}"),
    prompt=prompt,
    sampled=sampled,
    logprobs=logprobs,
    versions=versions,
    finish_reason=reason,
    role=_text(record, "role", "main"),
    t_start=_number(record, "t_start"),
    t_end=_number(record, "t_end"),
  )


@dataclasses.dataclass
class _Log:
  """The lines of one execution."""

  group_id: str
  task_id: str
  turns: dict[str, align.Turn] = dataclasses.field(default_factory=dict)
  score: float | None = None


def _read(lines: Iterable[str]) -> dict[str, _Log]:
  logs: dict[str, _Log] = {}
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
      if not isinstance(record, dict):
        raise LogError("not a JSON object")
      execution_id = _text(record, "execution_id", "")
      group_id = _text(
        record, "group_id", execution_id.rpartition("/")[0] or execution_id
      )
      log = logs.setdefault(
        execution_id, _Log(group_id, _text(record, "task_id", "imported"))
      )
      turn = parse_turn(record, len(log.turns))
      if turn.call_id in log.turns:
        raise LogError(f"call {turn.call_id} of {execution_id} is there twice")
      log.turns[turn.call_id] = turn
      if record.get("score") is not None:
        log.score = _number(record, "score")
    except (LogError, json.JSONDecodeError, RecursionError) as error:
      raise LogError(f"line {number}: {error}") from None
  return logs


def import_log(
  lines: Iterable[str],
  codec: ladder.Codec,
  *,
  special_ids: Collection[int] = (),
  mask_drift: bool = True,
) -> Imported:
  """Reads a log and aligns each execution's calls.

  Args:
    lines: of the log (an open file), in the format above.
    codec, special_ids, mask_drift: as of align.align.

  Raises:
    LogError: a line is not in that format.
  """
  stats: collections.Counter[str] = collections.Counter()
  executions = []
  for execution_id, log in _read(lines).items():
    aligned = align.align(
      log.turns.values(),
      codec,
      execution_id=execution_id,
      group_id=log.group_id,
      special_ids=special_ids,
      mask_drift=mask_drift,
    )
    stats.update(aligned.stats)
    index = execution_id.rpartition("/")[2]
    turns = list(log.turns.values())
    versions = [int(t.versions.min()) for t in turns if len(t.versions)]
    executions.append(
      Execution(
        execution_id=execution_id,
        group_id=log.group_id,
        index=int(index) if index.isdecimal() else 0,
        task_id=log.task_id,
        version=min(versions, default=0),
        calls=aligned.calls,
        outcome=None
        if log.score is None
        else Outcome(status="scored", score=log.score),
        turns=len(turns),
        t_start=min(t.t_start for t in turns),
        t_end=max(t.t_end for t in turns),
      )
    )
  return Imported(tuple(executions), dict(stats))
