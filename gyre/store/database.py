"""The rollout store's file: schema, transactions, and what may be wrong.

One writer, any number of readers (write-ahead log).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from gyre.store import schema

_WAIT_S = 10
_LOG_BYTES = 1 << 22


class StoreError(RuntimeError):
  """The store refuses, cannot write or is damaged; the message is one line."""


class Database:
  """An SQLite file of the tables of `schema`, in one thread.

  Attributes:
    path: of the file.
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
    self._readonly = readonly
    self._stand_in: dict[str, str] = {}
    mode = "ro" if readonly else "rwc"
    uri = f"{self.path.absolute().as_uri()}?mode={mode}"
    try:
      self._db = sqlite3.connect(
        uri, uri=True, isolation_level=None, timeout=_WAIT_S
      )
    except sqlite3.Error as error:
      raise StoreError(f"cannot open {self.path}: {error}") from None
    try:
      self._open()
    except BaseException:
      self._db.close()
      raise

  def _open(self) -> None:
    """Makes the tables, or brings them up to date."""
    try:
      if not self._readonly:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
      version = self._db.execute("PRAGMA user_version").fetchone()[0]
      empty = not self._db.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
      raise StoreError(f"cannot open {self.path}: {error}") from None
    if empty and not self._readonly:
      with self.writing():
        for statement in schema.TABLES.split(";\n"):
          if statement.strip():
            self._db.execute(statement)
        self._db.execute(f"PRAGMA user_version={schema.VERSION}")
    elif not 1 <= version <= schema.VERSION:
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
    if self._readonly:
      self._stand_in = {name: value for _, name, _, value in missing}
    elif missing:
      with self.writing():
        for table, name, declaration, _ in missing:
          self._db.execute(
            f"ALTER TABLE {table} ADD COLUMN {name} {declaration}"
          )
        self._db.execute(f"PRAGMA user_version={schema.VERSION}")

  def column(self, name: str) -> str:
    """A column, or what stands in for it where the file is older."""
    return self._stand_in.get(name, name)

  def close(self) -> None:
    """Closes the file; everything reported is already on disk."""
    self._db.close()

  @contextlib.contextmanager
  def writing(self) -> Iterator[sqlite3.Connection]:
    """One transaction, flushed to disk at its end; undone where it fails."""
    try:
      self._db.execute("BEGIN IMMEDIATE")
      try:
        yield self._db
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

  def rows(self, query: str, args: Sequence[Any] = ()) -> Iterator[tuple]:
    """Yields the rows of a query, read as they are asked for."""
    try:
      for row in self._db.execute(query, args):  # noqa: UP028 (it may outlive us)
        yield row
    except sqlite3.Error as error:
      raise StoreError(f"cannot read {self.path}: {error}") from None

  def row(self, query: str, *args: Any) -> tuple | None:
    """The first row, or None."""
    return next(self.rows(query, args), None)

  @contextlib.contextmanager
  def reading(self, what: str) -> Iterator[None]:
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
