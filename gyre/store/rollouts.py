"""Rollouts in one SQLite file: executions, calls, groups, samples, events.

One writer, any number of readers (write-ahead log). A finished execution is
one transaction, flushed to disk before it returns, so that a killed process
loses none that was reported. Token arrays are little-endian blobs; a call
stores which earlier call of its execution shares the longest prefix with its
prompt, how long that is, and only what follows, so that a conversation of n
turns costs its length once, not n times, and so does what branches have in
common.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gyre.store import rows
from gyre.store.database import Database, StoreError
from gyre.trajectory.prefixes import Prefixes
from gyre.types import Call, Execution, Group, Sample


class RolloutStore:
  """The rollouts of one run. Use one object in one thread.

  Whatever reads or writes raises StoreError where the file is damaged.
  """

  def __init__(self, path: str | os.PathLike, *, readonly: bool = False):
    """Opens the file, creating it unless `readonly`.

    Args:
      path: rollouts.sqlite.
      readonly: never write; fails when the file is missing.

    Raises:
      StoreError: missing, unreadable or of another schema version.
    """
    self._file = Database(path, readonly=readonly)
    self.path, self.readonly = self._file.path, readonly

  def close(self) -> None:
    """Closes the file; everything reported is already on disk."""
    self._file.close()

  def __enter__(self) -> RolloutStore:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  # Groups.

  def put_group(self, group: Group, phase: str = "train") -> None:
    """Registers a dispatched group; the same one twice is accepted.

    Raises:
      StoreError: another group of that id is there.
    """
    row = (group.group_id, phase, group.index, group.task_id, group.version)
    with self._file.writing() as db:
      old = db.execute(
        "SELECT group_id, phase, idx, task_id, version FROM groups"
        " WHERE group_id = ?",
        row[:1],
      ).fetchone()
      if old is None:
        db.execute("INSERT INTO groups VALUES (?,?,?,?,?,NULL)", row)
      elif old != row:
        raise StoreError(f"group {group.group_id} is {old}, not {row}")

  def groups(self, phase: str | None = None) -> list[Group]:
    """Returns the groups in dispatch order, without their executions."""
    where, args = ("", ()) if phase is None else (" WHERE phase = ?", (phase,))
    found = self._file.rows(
      f"SELECT group_id, idx, task_id, version FROM groups{where}"
      " ORDER BY phase, idx, group_id",
      args,
    )
    return [Group(*row) for row in found]

  def group(self, group_id: str) -> Group | None:
    """Returns a group with its finished executions, or None."""
    row = self._file.row(
      "SELECT group_id, idx, task_id, version FROM groups WHERE group_id = ?",
      group_id,
    )
    if row is None:
      return None
    return Group(*row, executions=tuple(self.executions(group_id)))

  def set_consumed(self, consumed: Mapping[str, int]) -> None:
    """Derives the consumed flags from a manifest: group_id -> step.

    Every other group is unconsumed afterwards.
    """
    with self._file.writing() as db:
      db.execute("UPDATE groups SET consumed_step = NULL")
      db.executemany(
        "UPDATE groups SET consumed_step = ? WHERE group_id = ?",
        [(step, group_id) for group_id, step in consumed.items()],
      )

  def mark_consumed(self, group_ids: Iterable[str], step: int) -> None:
    """Flags groups as trained by `step`, whose manifest is committed."""
    with self._file.writing() as db:
      db.executemany(
        "UPDATE groups SET consumed_step = ? WHERE group_id = ?",
        [(step, g) for g in group_ids],
      )

  def consumed(self) -> dict[str, int]:
    """Returns group_id -> step of the groups flagged as consumed."""
    return dict(
      self._file.rows(
        "SELECT group_id, consumed_step FROM groups"
        " WHERE consumed_step IS NOT NULL"
      )
    )

  # Executions.

  def put_execution(self, execution: Execution) -> None:
    """Stores a finished execution durably, in one transaction.

    Raises:
      StoreError: it is already there, or it cannot be written.
      ValueError: a call is another execution's.
    """
    e = execution
    for call in e.calls:
      if call.execution_id != e.execution_id:
        raise ValueError(
          f"call {call.call_id} is of execution {call.execution_id}, not "
          f"{e.execution_id}"
        )
    known, calls = Prefixes(), []
    for i, call in enumerate(e.calls):
      base, shared = known.match(call.prompt_ids)
      known.add(i, call.prompt_ids, call.completion_ids)
      calls.append(rows.of_call(call, i, base, shared))
    try:
      # Others wait while this one writes.
      with self._file.writing() as db:
        db.execute(
          f"INSERT INTO executions VALUES ({','.join('?' * 14)})",
          rows.of_execution(e),
        )
        db.executemany(
          f"INSERT INTO calls VALUES ({','.join('?' * 20)})", calls
        )
    except StoreError as error:
      name = getattr(error.__cause__, "sqlite_errorname", "")
      if name == "SQLITE_CONSTRAINT_PRIMARYKEY":
        raise StoreError(f"execution {e.execution_id} is stored") from None
      raise

  def iter_calls(self, execution_id: str) -> Iterator[Call]:
    """Yields an execution's calls in order, bit for bit.

    Holds the tokens only of calls that later ones share a prefix with, so that
    an execution whose calls each re-send a long history fits in memory.
    """
    last_use = dict(
      self._file.rows(
        "SELECT base, MAX(ordinal) FROM calls WHERE execution_id = ?"
        " AND base IS NOT NULL GROUP BY base",
        (execution_id,),
      )
    )
    found = self._file.rows(
      "SELECT call_id, group_id, base, base_len, prompt, completion, logprobs,"
      " versions, finish_reason, parent_hint, role, routing, t_start, t_end,"
      f" engine, asked, used, {self._file.column('boundary')} FROM calls"
      " WHERE execution_id = ? ORDER BY ordinal",
      (execution_id,),
    )
    tokens: dict[int, np.ndarray] = {}
    for ordinal, row in enumerate(found):
      with self._file.reading(f"call {row[0]} of execution {execution_id}"):
        base, shared = row[2:4]
        prompt_ids = rows.array(row[4], "<i4")
        if base is not None:
          before = tokens[base][:shared]
          rows.same(shared, len(before), "shared ids")
          prompt_ids = np.concatenate([before, prompt_ids])
          if last_use[base] == ordinal:
            del tokens[base]
        call = rows.call(execution_id, row, prompt_ids)
      if ordinal in last_use:
        tokens[ordinal] = np.concatenate([prompt_ids, call.completion_ids])
      yield call

  def _runs(
    self, execution_id: str, ordinal: int | None, length: int, known: dict
  ) -> list[np.ndarray]:
    """The first `length` tokens of a call, as views of what `known` keeps.

    Args:
      execution_id, ordinal: of the call.
      length: of what is asked for.
      known: (execution, call) -> (base, tokens shared with it, the others).
    """
    parts: list[np.ndarray] = []
    while length:
      key = execution_id, ordinal
      if key not in known:
        base, shared, prompt, completion = self._file.row(
          "SELECT base, base_len, prompt, completion FROM calls"
          " WHERE execution_id = ? AND ordinal = ?",
          *key,
        )
        known[key] = base, shared, rows.array(prompt + completion, "<i4")
      ordinal, shared, own = known[key]
      if length > shared:
        parts.append(own[: length - shared])
      length = min(length, shared)
    return parts[::-1]

  def execution(self, execution_id: str) -> Execution | None:
    """Returns a finished execution, bit for bit, or None."""
    row = self._file.row(
      "SELECT execution_id, group_id, idx, task_id, version, seed, truncated,"
      " turns, outcome, messages, t_start, t_end FROM executions"
      " WHERE execution_id = ?",
      execution_id,
    )
    if row is None:
      return None
    calls = tuple(self.iter_calls(execution_id))
    with self._file.reading(f"execution {execution_id}"):
      return rows.execution(row, calls)

  def executions(self, group_id: str) -> list[Execution]:
    """Returns a group's finished executions in order of index."""
    found = self._file.rows(
      "SELECT execution_id FROM executions WHERE group_id = ? ORDER BY idx",
      (group_id,),
    )
    return [self.execution(row[0]) for row in list(found)]

  def execution_ids(self, phase: str | None = None) -> list[str]:
    """Returns the ids of all finished executions, of one phase or all."""
    query = "SELECT execution_id FROM executions"
    args: tuple[str, ...] = ()
    if phase is not None:
      query += " JOIN groups USING (group_id) WHERE groups.phase = ?"
      args = (phase,)
    return [r[0] for r in self._file.rows(query + " ORDER BY 1", args)]

  def lengths(
    self, phase: str = "train"
  ) -> list[tuple[int, int, str | None, float]]:
    """Returns how long the finished executions took, without reading them.

    Args:
      phase: of the groups.

    Returns:
      (index of its group, index in it, status, seconds) of each, in order;
      status is None where it was never verified.
    """
    found = self._file.rows(
      "SELECT groups.idx, executions.idx, status, t_end - t_start"
      " FROM executions JOIN groups USING (group_id) WHERE phase = ?"
      " ORDER BY 1, 2",
      (phase,),
    )
    return list(found)

  def drop_newer(self, version: int) -> list[str]:
    """Forgets executions sampled by weights newer than `version`.

    They can exist only when a newer checkpoint was removed by hand: their
    weights are gone, so nothing may be trained on them.

    Returns:
      The ids dropped.
    """
    found = self._file.rows(
      "SELECT execution_id FROM executions WHERE version > ? ORDER BY 1",
      (version,),
    )
    ids = [r[0] for r in found]
    if ids:
      with self._file.writing() as db:
        one = [(i,) for i in ids]
        db.executemany("DELETE FROM calls WHERE execution_id = ?", one)
        db.executemany("DELETE FROM executions WHERE execution_id = ?", one)
        db.execute("DELETE FROM groups WHERE version > ?", (version,))
    return ids

  # Samples.

  def put_samples(
    self,
    step: int,
    samples: Sequence[Sample],
    advantages: Mapping[str, float],
  ) -> None:
    """Stores what a step trained on, replacing that step's samples.

    Args:
      step: the optimizer step.
      samples: in the order of packing; ids that a call of the execution
        holds are stored by reference.
      advantages: execution_id -> advantage.
    """
    known: dict[str, Prefixes] = {}
    stored = []
    for i, s in enumerate(samples):
      if s.execution_id not in known:
        known[s.execution_id] = Prefixes()
        for j, call in enumerate(self.iter_calls(s.execution_id)):
          known[s.execution_id].add(j, call.prompt_ids, call.completion_ids)
      base, shared = known[s.execution_id].match(*s.runs)
      advantage = advantages.get(s.execution_id)
      stored.append(rows.of_sample(s, step, i, advantage, base, shared))
    with self._file.writing() as db:
      db.execute("DELETE FROM samples WHERE step = ?", (step,))
      db.executemany(
        f"INSERT INTO samples VALUES ({','.join('?' * 15)})", stored
      )

  def samples(self, step: int) -> list[tuple[Sample, float | None]]:
    """Returns (sample, advantage) of a step, in the order of packing."""
    found = self._file.rows(
      "SELECT execution_id, group_id, role, advantage, length, base, base_len,"
      f" ids, mask, logprobs, versions, {self._file.column('weights')},"
      f" {self._file.column('execution_weight')} FROM samples WHERE step = ?"
      " ORDER BY ordinal",
      (step,),
    )
    out, known = [], {}
    for row in list(found):
      with self._file.reading(f"a sample of step {step}, execution {row[0]},"):
        runs = self._runs(row[0], *row[5:7], known)
        out.append((rows.sample(row, runs), row[3]))
    return out

  # Events.

  def put_event(
    self, kind: str, payload: Mapping[str, Any], *, step: int, t: float = 0.0
  ) -> None:
    """Appends an event: a kind and JSON content, at a step and time [s]."""
    with self._file.writing() as db:
      db.execute(
        "INSERT INTO events (step, kind, payload, t) VALUES (?,?,?,?)",
        (step, kind, rows.text(dict(payload)), t),
      )

  def events(self, kind: str | None = None) -> list[dict[str, Any]]:
    """Returns the events in order, of one kind or all."""
    query = "SELECT step, kind, payload, t FROM events"
    args: tuple[str, ...] = ()
    if kind is not None:
      query, args = query + " WHERE kind = ?", (kind,)
    with self._file.reading("an event"):
      return [
        {"step": r[0], "kind": r[1], "payload": json.loads(r[2]), "t": r[3]}
        for r in self._file.rows(query + " ORDER BY event_id", args)
      ]

  def forget_after(self, step: int) -> None:
    """Forgets samples of later steps and events from `step` on.

    A resumed run makes them again.
    """
    with self._file.writing() as db:
      db.execute("DELETE FROM samples WHERE step > ?", (step,))
      db.execute("DELETE FROM events WHERE step >= ?", (step,))
