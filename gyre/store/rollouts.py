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

import contextlib
import json
import os
import pathlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gyre.store import rows, schema
from gyre.trajectory.prefixes import Prefixes
from gyre.types import Call, Execution, Group, Sample

_WAIT_S = 10
_LOG_BYTES = 1 << 22


class StoreError(RuntimeError):
  """The store refuses, cannot write or is damaged; the message is one line."""


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
    self.path = pathlib.Path(path)
    self.readonly = readonly
    self._stand_in: dict[str, str] = {}
    mode = "ro" if readonly else "rwc"
    uri = f"{self.path.absolute().as_uri()}?mode={mode}"
    try:
      self._db = sqlite3.connect(
        uri, uri=True, isolation_level=None, timeout=_WAIT_S
      )
      if not readonly:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
      version = self._db.execute("PRAGMA user_version").fetchone()[0]
      empty = not self._db.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
      raise StoreError(f"cannot open {self.path}: {error}") from None
    if empty and not readonly:
      with self._transaction():
        for statement in schema.TABLES.split(";\n"):
          if statement.strip():
            self._db.execute(statement)
        self._db.execute(f"PRAGMA user_version={schema.VERSION}")
    elif not 1 <= version <= schema.VERSION:
      self._db.close()
      raise StoreError(
        f"{self.path} has schema {version}, this gyre reads {schema.VERSION}"
      )
    else:
      self._bring_up_to_date(version)

  def _bring_up_to_date(self, version: int) -> None:
    """Adds the columns that are missing, or, where it may not, their values."""
    missing = [
      column
      for added, columns in schema.ADDED.items()
      if added > version
      for column in columns
    ]
    if self.readonly:
      self._stand_in = {name: value for _, name, _, value in missing}
    elif missing:
      with self._transaction():
        for table, name, declaration, _ in missing:
          self._db.execute(
            f"ALTER TABLE {table} ADD COLUMN {name} {declaration}"
          )
        self._db.execute(f"PRAGMA user_version={schema.VERSION}")

  def _column(self, name: str) -> str:
    return self._stand_in.get(name, name)

  def close(self) -> None:
    """Closes the file; everything reported is already on disk."""
    self._db.close()

  def __enter__(self) -> RolloutStore:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  @contextlib.contextmanager
  def _transaction(self) -> Iterator[None]:
    try:
      self._db.execute("BEGIN IMMEDIATE")
      try:
        yield
      except BaseException:
        if self._db.in_transaction:
          self._db.execute("ROLLBACK")
        raise
      self._db.execute("COMMIT")
    except sqlite3.Error as error:
      if self._db.in_transaction:
        self._db.execute("ROLLBACK")
      raise StoreError(f"cannot write {self.path}: {error}") from error
    self._empty_log()

  def _rows(self, query: str, args: Sequence[Any] = ()) -> Iterator[tuple]:
    """Yields the rows of a query, read as they are asked for."""
    try:
      for row in self._db.execute(query, args):  # noqa: UP028 (it may outlive us)
        yield row
    except sqlite3.Error as error:
      raise StoreError(f"cannot read {self.path}: {error}") from None

  def _row(self, query: str, *args: Any) -> tuple | None:
    return next(self._rows(query, args), None)

  @contextlib.contextmanager
  def _reading(self, what: str) -> Iterator[None]:
    """Names what is damaged where its rows are not what was written."""
    try:
      yield
    except (ValueError, TypeError, KeyError) as error:
      raise StoreError(
        f"{self.path}: {what} is damaged: {error or type(error).__name__}"
      ) from None

  def _empty_log(self) -> None:
    """Gives back the log that a large execution filled, once none reads it."""
    log = self.path.with_name(self.path.name + "-wal")
    if log.exists() and log.stat().st_size > _LOG_BYTES:
      self._db.execute("PRAGMA busy_timeout=0")
      # Locked while an iterator of our own reads: then after the next write.
      with contextlib.suppress(sqlite3.OperationalError):
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
      self._db.execute(f"PRAGMA busy_timeout={1000 * _WAIT_S}")

  # Groups.

  def put_group(self, group: Group, phase: str = "train") -> None:
    """Registers a dispatched group; the same one twice is accepted.

    Raises:
      StoreError: another group of that id is there.
    """
    row = (group.group_id, phase, group.index, group.task_id, group.version)
    with self._transaction():
      old = self._db.execute(
        "SELECT group_id, phase, idx, task_id, version FROM groups"
        " WHERE group_id = ?",
        row[:1],
      ).fetchone()
      if old is None:
        self._db.execute("INSERT INTO groups VALUES (?,?,?,?,?,NULL)", row)
      elif old != row:
        raise StoreError(f"group {group.group_id} is {old}, not {row}")

  def groups(self, phase: str | None = None) -> list[Group]:
    """Returns the groups in dispatch order, without their executions."""
    where, args = ("", ()) if phase is None else (" WHERE phase = ?", (phase,))
    found = self._rows(
      f"SELECT group_id, idx, task_id, version FROM groups{where}"
      " ORDER BY phase, idx, group_id",
      args,
    )
    return [Group(*row) for row in found]

  def group(self, group_id: str) -> Group | None:
    """Returns a group with its finished executions, or None."""
    row = self._row(
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
    with self._transaction():
      self._db.execute("UPDATE groups SET consumed_step = NULL")
      self._db.executemany(
        "UPDATE groups SET consumed_step = ? WHERE group_id = ?",
        [(step, group_id) for group_id, step in consumed.items()],
      )

  def mark_consumed(self, group_ids: Iterable[str], step: int) -> None:
    """Flags groups as trained by `step`, whose manifest is committed."""
    with self._transaction():
      self._db.executemany(
        "UPDATE groups SET consumed_step = ? WHERE group_id = ?",
        [(step, g) for g in group_ids],
      )

  def consumed(self) -> dict[str, int]:
    """Returns group_id -> step of the groups flagged as consumed."""
    return dict(
      self._rows(
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
      with self._transaction():
        self._db.execute(
          f"INSERT INTO executions VALUES ({','.join('?' * 14)})",
          rows.of_execution(e),
        )
        self._db.executemany(
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
      self._rows(
        "SELECT base, MAX(ordinal) FROM calls WHERE execution_id = ?"
        " AND base IS NOT NULL GROUP BY base",
        (execution_id,),
      )
    )
    found = self._rows(
      "SELECT call_id, group_id, base, base_len, prompt, completion, logprobs,"
      " versions, finish_reason, parent_hint, role, routing, t_start, t_end,"
      f" engine, asked, used, {self._column('boundary')} FROM calls"
      " WHERE execution_id = ? ORDER BY ordinal",
      (execution_id,),
    )
    tokens: dict[int, np.ndarray] = {}
    for ordinal, row in enumerate(found):
      with self._reading(f"call {row[0]} of execution {execution_id}"):
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
        base, shared, prompt, completion = self._row(
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
    row = self._row(
      "SELECT execution_id, group_id, idx, task_id, version, seed, truncated,"
      " turns, outcome, messages, t_start, t_end FROM executions"
      " WHERE execution_id = ?",
      execution_id,
    )
    if row is None:
      return None
    calls = tuple(self.iter_calls(execution_id))
    with self._reading(f"execution {execution_id}"):
      return rows.execution(row, calls)

  def executions(self, group_id: str) -> list[Execution]:
    """Returns a group's finished executions in order of index."""
    found = self._rows(
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
    return [r[0] for r in self._rows(query + " ORDER BY 1", args)]

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
    found = self._rows(
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
    found = self._rows(
      "SELECT execution_id FROM executions WHERE version > ? ORDER BY 1",
      (version,),
    )
    ids = [r[0] for r in found]
    if ids:
      with self._transaction():
        one = [(i,) for i in ids]
        self._db.executemany("DELETE FROM calls WHERE execution_id = ?", one)
        self._db.executemany(
          "DELETE FROM executions WHERE execution_id = ?", one
        )
        self._db.execute("DELETE FROM groups WHERE version > ?", (version,))
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
    with self._transaction():
      self._db.execute("DELETE FROM samples WHERE step = ?", (step,))
      self._db.executemany(
        f"INSERT INTO samples VALUES ({','.join('?' * 15)})", stored
      )

  def samples(self, step: int) -> list[tuple[Sample, float | None]]:
    """Returns (sample, advantage) of a step, in the order of packing."""
    found = self._rows(
      "SELECT execution_id, group_id, role, advantage, length, base, base_len,"
      f" ids, mask, logprobs, versions, {self._column('weights')},"
      f" {self._column('execution_weight')} FROM samples WHERE step = ?"
      " ORDER BY ordinal",
      (step,),
    )
    out, known = [], {}
    for row in list(found):
      with self._reading(f"a sample of step {step}, execution {row[0]},"):
        runs = self._runs(row[0], *row[5:7], known)
        out.append((rows.sample(row, runs), row[3]))
    return out

  # Events.

  def put_event(
    self, kind: str, payload: Mapping[str, Any], *, step: int, t: float = 0.0
  ) -> None:
    """Appends an event: a kind and JSON content, at a step and time [s]."""
    with self._transaction():
      self._db.execute(
        "INSERT INTO events (step, kind, payload, t) VALUES (?,?,?,?)",
        (step, kind, rows.text(dict(payload)), t),
      )

  def events(self, kind: str | None = None) -> list[dict[str, Any]]:
    """Returns the events in order, of one kind or all."""
    query = "SELECT step, kind, payload, t FROM events"
    args: tuple[str, ...] = ()
    if kind is not None:
      query, args = query + " WHERE kind = ?", (kind,)
    with self._reading("an event"):
      return [
        {"step": r[0], "kind": r[1], "payload": json.loads(r[2]), "t": r[3]}
        for r in self._rows(query + " ORDER BY event_id", args)
      ]

  def forget_after(self, step: int) -> None:
    """Forgets samples of later steps and events from `step` on.

    A resumed run makes them again.
    """
    with self._transaction():
      self._db.execute("DELETE FROM samples WHERE step > ?", (step,))
      self._db.execute("DELETE FROM events WHERE step >= ?", (step,))
