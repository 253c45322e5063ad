"""Tables of the rollout store, and what each version of them added."""

from __future__ import annotations

VERSION = 3
#: Columns that a version added: (table, name, declaration, what an older file
#: has for it). Such a file is read, and brought up to date to be written.
ADDED = {
  2: (("calls", "boundary", "TEXT NOT NULL DEFAULT ''", "''"),),
  3: (
    ("samples", "weights", "BLOB", "NULL"),
    ("samples", "execution_weight", "REAL", "NULL"),
  ),
}

TABLES = """
CREATE TABLE groups (
  group_id TEXT PRIMARY KEY, phase TEXT NOT NULL, idx INTEGER NOT NULL,
  task_id TEXT NOT NULL, version INTEGER NOT NULL, consumed_step INTEGER
) STRICT;
CREATE INDEX groups_by_phase ON groups (phase, idx);
CREATE TABLE executions (
  execution_id TEXT PRIMARY KEY, group_id TEXT NOT NULL,
  idx INTEGER NOT NULL, task_id TEXT NOT NULL, version INTEGER NOT NULL,
  seed INTEGER NOT NULL, truncated TEXT NOT NULL, turns INTEGER NOT NULL,
  status TEXT, score REAL, outcome TEXT, messages TEXT NOT NULL,
  t_start REAL NOT NULL, t_end REAL NOT NULL
) STRICT;
CREATE INDEX executions_by_group ON executions (group_id, idx);
CREATE TABLE calls (
  execution_id TEXT NOT NULL, ordinal INTEGER NOT NULL,
  call_id TEXT NOT NULL, group_id TEXT NOT NULL,
  base INTEGER, base_len INTEGER NOT NULL, prompt BLOB NOT NULL,
  completion BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL,
  finish_reason TEXT NOT NULL, parent_hint TEXT, role TEXT NOT NULL,
  routing TEXT, t_start REAL NOT NULL, t_end REAL NOT NULL,
  engine TEXT NOT NULL, asked TEXT NOT NULL, used TEXT NOT NULL,
  boundary TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (execution_id, ordinal)
) STRICT, WITHOUT ROWID;
CREATE TABLE samples (
  step INTEGER NOT NULL, ordinal INTEGER NOT NULL,
  execution_id TEXT NOT NULL, group_id TEXT NOT NULL, role TEXT NOT NULL,
  advantage REAL, length INTEGER NOT NULL, base INTEGER, base_len INTEGER
  NOT NULL, ids BLOB NOT NULL, mask BLOB NOT NULL, logprobs BLOB NOT NULL,
  versions BLOB NOT NULL, weights BLOB, execution_weight REAL,
  PRIMARY KEY (step, ordinal)
) STRICT, WITHOUT ROWID;
CREATE TABLE events (
  event_id INTEGER PRIMARY KEY, step INTEGER NOT NULL, kind TEXT NOT NULL,
  payload TEXT NOT NULL, t REAL NOT NULL
) STRICT;
"""
