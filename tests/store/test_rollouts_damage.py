"""A file of rollouts that is cut short or overwritten in places."""

import shutil
import sqlite3

import numpy as np
import pytest

from gyre.store.database import StoreError
from gyre.store.rollouts import RolloutStore
from gyre.types import Call, Execution, Group, Outcome, Sample

TURNS = 12


def execution(name):
  rng = np.random.default_rng(len(name))
  ids, calls = rng.integers(0, 999, 60), []
  for i in range(TURNS):
    said = rng.integers(0, 999, 20)
    calls.append(
      Call(
        execution_id=name,
        group_id="g",
        call_id=f"{i:04d}",
        prompt_ids=ids,
        completion_ids=said,
        logprobs=-rng.random(20),
        versions=np.zeros(20),
        finish_reason="stop",
        sampling_asked={"temperature": 0.5},
      )
    )
    ids = np.concatenate([ids, said, rng.integers(0, 999, 30)])
  return Execution(
    execution_id=name,
    group_id="g",
    index=0,
    task_id="t",
    version=0,
    seed=0,
    calls=tuple(calls),
    outcome=Outcome("scored", 0.5, 1, 2, assertions={"a": True}),
    messages=({"role": "user", "content": "x" * 300},),
  )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  path = tmp_path_factory.mktemp("store") / "r.sqlite"
  with RolloutStore(path) as store:
    store.put_group(Group("g", 0, "t"))
    for name in ("g/0", "g/00", "g/000"):
      store.put_execution(execution(name))
    last = execution("g/0").calls[-1]
    n = len(last.prompt_ids)
    sample = Sample(
      execution_id="g/0",
      group_id="g",
      runs=(last.prompt_ids, last.completion_ids),
      trained=np.arange(n, n + 20),
      logprobs=last.logprobs,
      versions=last.versions,
    )
    store.put_samples(1, [sample], {"g/0": 0.5})
    store.put_event("publish", {"version": 1}, step=1)
    store.mark_consumed(["g"], 1)
  with sqlite3.connect(path, isolation_level=None) as db:
    db.execute("PRAGMA journal_mode=DELETE")
  db.close()
  return path


READERS = (
  lambda s: s.groups(),
  lambda s: s.group("g"),
  lambda s: s.consumed(),
  lambda s: s.execution("g/0"),
  lambda s: s.executions("g"),
  lambda s: s.execution_ids(),
  lambda s: s.execution_ids("train"),
  lambda s: s.lengths(),
  lambda s: s.samples(1),
  lambda s: s.events(),
  lambda s: s.drop_newer(9),
)


def read_all(path):
  """How many readers were refused; each tells in one line which file it is."""
  refused = 0
  for readonly in (True, False):
    for reader in READERS:
      try:
        with RolloutStore(path, readonly=readonly) as store:
          reader(store)
      except StoreError as error:
        refused += 1
        assert path.name in str(error) and "\n" not in str(error)
  return refused


def test_a_whole_file_is_read(written):
  assert read_all(written) == 0


@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.9, 0.99])
def test_a_file_cut_short_is_refused_or_read(written, tmp_path, part):
  path = tmp_path / "cut.sqlite"
  whole = written.read_bytes()
  path.write_bytes(whole[: int(len(whole) * part)])
  assert read_all(path) > 0


def test_a_file_overwritten_anywhere_is_refused_or_read(written, tmp_path):
  whole = bytearray(written.read_bytes())
  refused = 0
  for i, start in enumerate(range(0, len(whole), len(whole) // 24)):
    path = tmp_path / f"{i}.sqlite"
    damaged = whole.copy()
    junk = np.random.default_rng(i).integers(0, 256, 700, np.uint8).tobytes()
    damaged[start : start + len(junk)] = junk
    path.write_bytes(damaged)
    refused += read_all(path) > 0
  assert refused > 8


@pytest.mark.parametrize(
  "statement, what",
  [
    ("UPDATE calls SET logprobs = x'00'", "call 0000"),
    ("UPDATE calls SET versions = x'' WHERE ordinal = 3", "call 0003"),
    ("UPDATE calls SET asked = '{'", "call 0000"),
    ("UPDATE calls SET base_len = 9999 WHERE ordinal = 2", "call 0002"),
    ("UPDATE calls SET base = 99 WHERE ordinal = 4", "call 0004"),
    ("UPDATE executions SET outcome = '{\"colour\": 1}'", "execution g/0 "),
    ("UPDATE executions SET messages = 'x'", "execution g/0 "),
  ],
)
def test_what_is_damaged_is_named(written, tmp_path, statement, what):
  path = tmp_path / "r.sqlite"
  shutil.copy(written, path)
  db = sqlite3.connect(path)
  db.execute(statement)
  db.commit()
  db.close()
  with RolloutStore(path, readonly=True) as store:
    with pytest.raises(StoreError, match=f"{what}.*is damaged") as caught:
      store.execution("g/0")
    assert "\n" not in str(caught.value)
    # What does not need it is still read.
    assert store.execution_ids() == ["g/0", "g/00", "g/000"]


@pytest.mark.parametrize(
  "statement",
  [
    "UPDATE samples SET mask = x''",
    "UPDATE samples SET versions = x'00000000'",
    "UPDATE samples SET length = length - 8, mask = substr(mask, 2)",
    "DELETE FROM calls WHERE ordinal = 2",
  ],
)
def test_a_damaged_sample_is_named(written, tmp_path, statement):
  path = tmp_path / "r.sqlite"
  shutil.copy(written, path)
  db = sqlite3.connect(path)
  db.execute(statement)
  db.commit()
  db.close()
  store = RolloutStore(path, readonly=True)
  with store, pytest.raises(StoreError, match=r"sample of step 1.*is damaged"):
    store.samples(1)


def test_what_cannot_be_stored_is_not_called_stored(tmp_path):
  good = execution("g/0")
  with RolloutStore(tmp_path / "r.sqlite") as store:
    other = Execution(**{**vars(good), "execution_id": "g/1"})
    with pytest.raises(ValueError, match=r"call 0000 is of execution g/0"):
      store.put_execution(other)
    bad = Execution(**{**vars(good), "task_id": None})
    with pytest.raises(StoreError, match="cannot write"):
      store.put_execution(bad)
    assert store.execution_ids() == []
    store.put_execution(good)
    with pytest.raises(StoreError, match="g/0 is stored"):
      store.put_execution(good)
