"""Files of earlier and of other schemas."""

import dataclasses
import os
import pathlib
import sqlite3

import numpy as np
import pytest
from records import bits, chain, in_one_run, sample_of

from gyre.store.database import StoreError
from gyre.store.rollouts import RolloutStore

_SCHEMA_2 = """
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
  versions BLOB NOT NULL, PRIMARY KEY (step, ordinal)
) STRICT, WITHOUT ROWID;
CREATE TABLE events (
  event_id INTEGER PRIMARY KEY, step INTEGER NOT NULL, kind TEXT NOT NULL,
  payload TEXT NOT NULL, t REAL NOT NULL
) STRICT;
"""


def _old_file(path, version, execution, sample):
  """A file of an earlier schema, made by that schema's own SQL."""
  with RolloutStore(path.with_name("new.sqlite")) as store:
    store.put_execution(execution)
    store.put_samples(1, [sample], {"g/0": 0.5})
  schema = _SCHEMA_2
  if version == 1:
    schema = schema.replace("  boundary TEXT NOT NULL DEFAULT '',\n", "")
    assert "boundary" not in schema
  db = sqlite3.connect(path)
  db.executescript(schema)
  db.execute("ATTACH ? AS new", (str(path.with_name("new.sqlite")),))
  for table in ("executions", "calls", "samples"):
    names = [x[1] for x in db.execute(f"PRAGMA main.table_info({table})")]
    names = ", ".join(names)
    db.execute(f"INSERT INTO main.{table} SELECT {names} FROM new.{table}")
  db.commit()
  db.execute(f"PRAGMA user_version={version}")
  db.close()


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_file_is_read_and_brought_up_to_date(tmp_path, version):
  path, execution = tmp_path / "r.sqlite", chain(turns=3)
  sample = sample_of(execution)
  _old_file(path, version, execution, sample)
  before = path.read_bytes()
  with RolloutStore(path, readonly=True) as store:
    assert bits(store.execution("g/0")) == bits(execution)
    ((back, advantage),) = store.samples(1)
  assert path.read_bytes() == before
  assert (
    bits(in_one_run([back])) == bits(in_one_run([sample])) and advantage == 0.5
  )
  newer = chain("g/1", turns=1)
  newer = dataclasses.replace(
    newer, calls=(dataclasses.replace(newer.calls[0], boundary="strict"),)
  )
  weighted = sample_of(
    newer, weights=np.arange(7) / 3, execution_weight=20 / 3, role="sub_agent"
  )
  for _ in range(2):
    with RolloutStore(path) as store:
      assert bits(store.execution("g/0")) == bits(execution)
      if store.execution("g/1") is None:
        store.put_execution(newer)
        store.put_samples(2, [weighted], {})
  with RolloutStore(path, readonly=True) as store:
    assert store.execution("g/1").calls[0].boundary == "strict"
    got = [s for step in (1, 2) for s, _ in store.samples(step)]
  assert bits(in_one_run(got)) == bits(in_one_run([sample, weighted]))


def test_other_schema_is_refused(tmp_path):
  path = tmp_path / "r.sqlite"
  RolloutStore(path).close()
  db = sqlite3.connect(path)
  db.execute("PRAGMA user_version=99")
  db.close()
  (tmp_path / "junk").write_bytes(b"not a database, surely" * 99)
  errors = []
  for name, message, readonly in (
    ("r.sqlite", r"schema 99.*reads 3", False),
    ("none.sqlite", r"none\.sqlite", True),
    ("junk", "junk", False),
  ):
    with pytest.raises(StoreError, match=message) as error:
      RolloutStore(tmp_path / name, readonly=readonly)
    errors.append(error)
  # No file stays open for as long as somebody holds the error.
  opened = [
    os.path.realpath(p) for p in pathlib.Path("/proc/self/fd").iterdir()
  ]
  assert not [p for p in opened if p.startswith(str(tmp_path))] and errors
