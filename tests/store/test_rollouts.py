"""What goes in comes out bit for bit, whatever kills the writer."""

import dataclasses
import functools
import os
import pathlib
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import bits, chain, in_one_run, sample_of

from gyre.store import database
from gyre.store.database import StoreError
from gyre.store.rollouts import RolloutStore
from gyre.trajectory import tree
from gyre.types import Call, Execution, Group, Outcome, Sample

_seconds = st.floats(0, 1e10)
_int32 = st.integers(-(2**31), 2**31 - 1)
_float32 = st.floats(width=32, allow_nan=True)
_text = st.text(max_size=8)
_json = st.recursive(
  st.none() | st.booleans() | st.integers(-9, 9) | _text,
  lambda x: st.lists(x, max_size=3) | st.dictionaries(_text, x, max_size=3),
  max_leaves=6,
)


def _whole(cls, **values):
  """An object of which each field is given, so that none is forgotten."""
  assert values.keys() == {f.name for f in dataclasses.fields(cls)}
  return cls(**values)


@st.composite
def _executions(draw):
  calls = []
  for i in range(draw(st.integers(0, 4))):
    new = draw(st.lists(_int32, max_size=5))
    parent = None
    if calls and draw(st.booleans()):
      base = draw(st.sampled_from(calls))
      whole = [*base.prompt_ids.tolist(), *base.completion_ids.tolist()]
      new = whole[: draw(st.integers(0, len(whole)))] + new
      parent = draw(st.sampled_from([base.call_id, None, "gone"]))
    n = draw(st.integers(0, 4))
    calls.append(
      _whole(
        Call,
        execution_id="g/0",
        group_id="g",
        call_id=f"c{i}",
        parent_hint=parent,
        role=draw(_text),
        prompt_ids=new,
        completion_ids=draw(st.lists(_int32, min_size=n, max_size=n)),
        logprobs=draw(st.lists(_float32, min_size=n, max_size=n)),
        versions=draw(st.lists(_int32, min_size=n, max_size=n)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        routing=draw(st.none() | _text),
        t_start=draw(_seconds),
        t_end=draw(_seconds),
        engine=draw(_text),
        sampling_asked=draw(st.dictionaries(_text, _json, max_size=2)),
        sampling_used=draw(st.dictionaries(_text, _json, max_size=2)),
        boundary=draw(st.sampled_from(["", "strict", "split"])),
      )
    )
  outcome = draw(
    st.none()
    | st.builds(
      functools.partial(_whole, Outcome),
      status=st.sampled_from(["scored", "eval_failed"]),
      score=st.none() | st.floats(0, 1),
      passed=st.integers(0, 9),
      total=st.integers(0, 9),
      timeout=st.sampled_from(["none", "harness", "overall"]),
      detail=_text,
      assertions=st.dictionaries(_text, st.booleans(), max_size=3),
    )
  )
  return _whole(
    Execution,
    execution_id="g/0",
    group_id="g",
    index=draw(st.integers(0, 9)),
    task_id=draw(_text),
    version=draw(st.integers(0, 2**40)),
    seed=draw(st.integers(0, 2**62)),
    calls=tuple(calls),
    outcome=outcome,
    truncated=draw(_text),
    turns=draw(st.integers(0, 9)),
    messages=tuple(
      draw(st.lists(st.dictionaries(_text, _json, max_size=3), max_size=3))
    ),
    t_start=draw(_seconds),
    t_end=draw(_seconds),
  )


@st.composite
def _groups(draw):
  """A group of one execution."""
  execution = draw(_executions())
  return _whole(
    Group,
    group_id="g",
    index=draw(st.integers(0, 9)),
    task_id=execution.task_id,
    version=draw(st.integers(0, 2**40)),
    executions=(execution,),
  )


@st.composite
def _samples(draw, execution):
  """A path that may go along a call of the execution, and leave it."""
  ids = draw(st.lists(_int32, max_size=9))
  if execution.calls:
    call = draw(st.sampled_from(execution.calls))
    whole = [*call.prompt_ids.tolist(), *call.completion_ids.tolist()]
    ids = whole[: draw(st.integers(0, len(whole)))] + ids
  trained = draw(st.sets(st.integers(1, max(1, len(ids) - 1))))
  trained = sorted(x for x in trained if x < len(ids))
  n, cut = len(trained), draw(st.integers(0, len(ids)))

  def of_each(values):
    return st.lists(values, min_size=n, max_size=n)

  return _whole(
    Sample,
    execution_id="g/0",
    group_id="g",
    runs=(ids[:cut], ids[cut:]),
    trained=trained,
    logprobs=draw(of_each(_float32)),
    versions=draw(of_each(_int32)),
    role=draw(_text),
    weights=draw(st.none() | of_each(st.floats(0, 1e9))),
    execution_weight=draw(st.none() | st.floats(0, 1e9)),
  )


def _size_of(store, table, column):
  """Bytes that a blob column of a table holds in all."""
  row = store._file._db.execute(f"SELECT SUM(LENGTH({column})) FROM {table}")
  return row.fetchone()[0]


@settings(max_examples=60, deadline=None)
@given(_groups(), st.data())
def test_every_field_comes_back_bit_for_bit(group, data):
  (execution,) = group.executions
  samples = data.draw(st.lists(_samples(execution), max_size=3))
  advantage = data.draw(st.none() | st.floats(-9, 9))
  advantages = {} if advantage is None else {"g/0": advantage}
  with tempfile.TemporaryDirectory() as d:
    with RolloutStore(f"{d}/rollouts.sqlite") as store:
      store.put_group(group)
      store.put_execution(execution)
      store.put_samples(3, samples, advantages)
    with RolloutStore(f"{d}/rollouts.sqlite", readonly=True) as store:
      assert bits(store.execution("g/0")) == bits(execution)
      assert bits(store.group("g")) == bits(group)
      (listed,) = store.groups("train")
      assert bits(listed) == bits(dataclasses.replace(group, executions=()))
      back = store.samples(3)
  got = in_one_run(s for s, _ in back)
  assert bits(got) == bits(in_one_run(samples))
  assert [a for _, a in back] == [advantage] * len(samples)


def test_a_conversation_costs_its_length_once(tmp_path):
  with RolloutStore(tmp_path / "r.sqlite") as store:
    store.put_execution(chain(turns=50))
    stored = _size_of(store, "calls", "prompt") // 4
  assert stored == 100 + 49 * 3


def _branching(turns, seed=0, context=40, said=20, summary=12):
  """A long conversation that is compacted, rolled back, and delegates.

  Every fifth call a sub-agent answers under another system prompt that has a
  long text in common with its siblings'; every ninth rolls the conversation
  back to an earlier call; every `summary`-th is a summary, after which the
  conversation goes on from the middle of a prompt: no whole call is a prefix.
  """
  rng = np.random.default_rng(seed)

  def new(n):
    return rng.integers(0, 50_000, n).astype(np.int32)

  tools, main, calls = new(10 * context), new(10 * context), []
  history = [main]
  for i in range(turns):
    delegated = i % 5 == 4
    out = new(said)
    call = Call(
      execution_id="g/0",
      group_id="g",
      call_id=f"{i:04d}",
      prompt_ids=np.concatenate([tools, new(context)]) if delegated else main,
      completion_ids=out,
      logprobs=-rng.random(said),
      versions=np.full(said, i // 100),
      finish_reason="stop",
    )
    calls.append(call)
    if delegated:
      continue
    if i % 9 == 8:
      main = history[-2]
    elif i % summary == summary - 1:
      main = main[: (len(history[0]) + len(main)) // 2]
    else:
      main = np.concatenate([main, out])
    main = np.concatenate([main, new(context)])
    history.append(main)
  return tuple(calls)


def test_what_branches_share_is_stored_once(tmp_path):
  calls = _branching(120)
  unique = len(tree.build(calls).ids)
  sampled = sum(len(c.completion_ids) for c in calls)
  assert sum(len(c.prompt_ids) for c in calls) > 10 * unique
  execution = Execution("g/0", "g", 0, "t", calls=calls)
  with RolloutStore(tmp_path / "r.sqlite") as store:
    store.put_execution(execution)
    held = _size_of(store, "calls", "prompt")
    held += _size_of(store, "calls", "completion")
    assert held == 4 * unique
    assert _size_of(store, "calls", "logprobs") == 4 * sampled
    assert _size_of(store, "calls", "versions") == 4 * sampled
    back = store.execution("g/0")
    assert bits(back) == bits(execution)
    lazily = list(map(bits, store.iter_calls("g/0")))
    assert lazily == [bits(c) for c in calls]


def test_the_file_is_little_larger_than_what_it_holds(tmp_path):
  # Of this size the rows' other columns (350 bytes a call) no longer matter.
  calls = _branching(100, context=1000, said=500)
  unique = len(tree.build(calls).ids)
  sampled = sum(len(c.completion_ids) for c in calls)
  execution = Execution("g/0", "g", 0, "t", calls=calls)
  path = tmp_path / "r.sqlite"
  with RolloutStore(path) as store:
    store.put_execution(execution)
  assert path.stat().st_size <= 1.5 * (4 * unique + 8 * sampled)


def test_the_log_of_a_large_execution_is_given_back(tmp_path, monkeypatch):
  monkeypatch.setattr(database, "_LOG_BYTES", 1 << 16)
  path, log = tmp_path / "r.sqlite", tmp_path / "r.sqlite-wal"
  first, second = (chain(f"g/{i}", turns=20, prompt=40_000) for i in range(2))
  with RolloutStore(path) as store, RolloutStore(path, readonly=True) as reader:
    store.put_execution(first)
    assert log.stat().st_size == 0
    # A reader in the middle of something is neither waited for nor disturbed.
    calls = reader.iter_calls("g/0")
    next(calls)
    store.put_execution(second)
    assert log.stat().st_size > 1 << 16
    assert len(list(calls)) == 19
    mine = store.iter_calls("g/0")
    next(mine)
    store.put_event("e", {}, step=1)
    assert len(list(mine)) == 19
    store.put_event("e", {}, step=2)
    assert log.stat().st_size == 0
    assert bits(reader.execution("g/1")) == bits(second)


@pytest.mark.slow
@pytest.mark.parametrize("turns", [75, 150, 300])
def test_contexts_of_a_million_tokens(tmp_path, turns):
  """Prints the file's size and the seconds; run with -s."""
  calls = _branching(turns, context=6_300, said=1_600, summary=101)
  flat = sum(len(c.prompt_ids) + len(c.completion_ids) for c in calls)
  longest = max(len(c.prompt_ids) for c in calls)
  unique = len(tree.build(calls).ids)
  sampled = sum(len(c.completion_ids) for c in calls)
  execution = Execution("g/0", "g", 0, "t", calls=calls)
  path = tmp_path / "r.sqlite"
  with RolloutStore(path) as store:
    start = time.perf_counter()
    store.put_execution(execution)
    written = time.perf_counter() - start
    start = time.perf_counter()
    for a, b in zip(store.iter_calls("g/0"), calls, strict=True):
      assert bits(a) == bits(b)
    read = time.perf_counter() - start
    on_disk = sum(p.stat().st_size for p in tmp_path.iterdir())
  closed, one = path.stat().st_size, 4 * unique + 8 * sampled
  print(
    f"\n{turns} calls to {longest} tokens, {flat / 1e6:.1f}M flat, "
    f"{unique / 1e6:.3f}M unique, {sampled / 1e6:.3f}M sampled: file "
    f"{closed / one:.3f} of one copy ({one / 1e6:.1f} MB), {on_disk / one:.3f} "
    f"with its log while open; written in {written:.2f} s "
    f"({1e9 * written / flat:.1f} ns a flat token), compared in {read:.2f} s"
  )
  assert turns < 300 or longest > 1_000_000
  assert closed <= 1.5 * one


def test_what_samples_share_with_calls_is_stored_once(tmp_path):
  execution = chain(turns=3)
  sample = sample_of(execution)
  ids = sample.ids
  other = dataclasses.replace(sample, runs=(ids[::-1] + 1,))
  # One that leaves a call in the middle of its prompt.
  cut = len(ids) - 15
  early = dataclasses.replace(
    sample, runs=(ids[:cut], [5000]), trained=np.arange(cut - 6, cut + 1)
  )
  with RolloutStore(tmp_path / "r.sqlite") as store:
    store.put_execution(execution)
    for _ in range(2):  # the second replaces the first
      store.put_samples(5, [sample, other, early], {"g/0": 0.25})
    got = store.samples(5)
    assert _size_of(store, "samples", "ids") == 4 * len(ids) + 4
  assert [a for _, a in got] == [0.25] * 3
  want = in_one_run([sample, other, early])
  assert bits(in_one_run(s for s, _ in got)) == bits(want)


def test_groups_flags_events(tmp_path):
  with RolloutStore(tmp_path / "r.sqlite") as store:
    for i in (1, 0):
      store.put_group(Group(f"g{i}", i, "task", version=i))
      store.put_group(Group(f"g{i}", i, "task", version=i))
    store.put_group(Group("e0", 0, "task"), phase="eval")
    assert [g.group_id for g in store.groups("train")] == ["g0", "g1"]
    with pytest.raises(StoreError, match="g1"):
      store.put_group(Group("g1", 7, "task"))
    store.mark_consumed(["g0", "g1"], 3)
    store.set_consumed({"g1": 2})
    assert store.consumed() == {"g1": 2}
    store.put_execution(chain("g0/0", turns=1))
    with pytest.raises(StoreError, match="g0/0"):
      store.put_execution(chain("g0/0", turns=2))
    assert len(store.execution("g0/0").calls) == 1
    assert store.execution_ids("train") == ["g0/0"]
    assert store.execution_ids("eval") == []
    store.put_event("publish", {"version": 1}, step=1, t=2.5)
    assert store.events() == [
      {"step": 1, "kind": "publish", "payload": {"version": 1}, "t": 2.5}
    ]


def test_lengths_of_executions_are_told_without_their_calls(tmp_path):
  with RolloutStore(tmp_path / "rollouts.sqlite") as store:
    store.put_group(Group("b", 1, "t", 0))
    store.put_group(Group("a", 0, "t", 0))
    store.put_group(Group("e", 0, "t", 0), phase="eval")
    scored = Outcome("scored", 1.0)
    for group, index, outcome, end in (
      ("b", 0, None, 7.0),
      ("a", 1, scored, 5.5),
      ("a", 0, Outcome("eval_failed"), 3.0),
      ("e", 0, scored, 9.0),
    ):
      store.put_execution(
        Execution(
          f"{group}/{index}",
          group,
          index,
          "t",
          outcome=outcome,
          t_start=2.0,
          t_end=end,
        )
      )
    assert store.lengths() == [
      (0, 0, "eval_failed", 1.0),
      (0, 1, "scored", 3.5),
      (1, 0, None, 5.0),
    ]
    assert store.lengths("eval") == [(0, 0, "scored", 7.0)]


def test_executions_of_lost_weights_are_dropped(tmp_path):
  with RolloutStore(tmp_path / "r.sqlite") as store:
    for v in range(3):
      store.put_group(Group(f"g{v}", v, "t", version=v))
      e = dataclasses.replace(chain(f"g{v}/0", turns=2), version=v)
      store.put_execution(e)
    assert store.drop_newer(1) == ["g2/0"]
    assert store.execution_ids() == ["g0/0", "g1/0"]
    store.put_execution(chain("g2/0", turns=1))
    assert len(store.execution("g2/0").calls) == 1


def test_what_a_resumed_run_makes_again_is_forgotten(tmp_path):
  sample = Sample("g/0", "g", ([1, 2],), [1], [-1], [0])
  with RolloutStore(tmp_path / "r.sqlite") as store:
    store.put_execution(chain(turns=1))
    for step in (1, 2, 3):
      store.put_samples(step, [sample], {"g/0": 1.0})
      store.put_event("publish", {}, step=step)
    store.forget_after(2)
    assert [len(store.samples(s)) for s in (1, 2, 3)] == [1, 1, 0]
    assert [e["step"] for e in store.events()] == [1]


def test_readers_beside_the_writer(tmp_path):
  path = tmp_path / "r.sqlite"
  writer = RolloutStore(path)
  with writer as store, RolloutStore(path, readonly=True) as reader:
    assert reader.execution_ids() == []
    store.put_execution(chain(turns=2))
    assert reader.execution_ids() == ["g/0"]
    with pytest.raises(StoreError, match="readonly"):
      reader.put_execution(chain("g/1", turns=1))


_WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
import records
from gyre.store.rollouts import RolloutStore
store = RolloutStore(sys.argv[1])
start = len(store.execution_ids())
for i in range(start, start + 10**6):
  store.put_execution(records.chain(f"g{i:06d}/0", turns=3))
  print(i, flush=True)
"""


def test_killed_writer_loses_nothing_it_reported(tmp_path):
  path = tmp_path / "r.sqlite"
  here = str(pathlib.Path(__file__).parent)
  reported = -1
  for i in range(3):
    process = subprocess.Popen(
      [sys.executable, "-c", _WRITER, str(path), here],
      stdout=subprocess.PIPE,
      text=True,
    )
    reported = int(process.stdout.readline())
    time.sleep(0.05 * (i + 1))
    os.kill(process.pid, signal.SIGKILL)
    lines = process.stdout.read().split("\n")
    process.wait()
    whole = [int(x) for x in lines[:-1] if x]
    reported = max([reported, *whole])
    with RolloutStore(path) as store:
      ids = store.execution_ids()
      assert len(ids) in (reported + 1, reported + 2)
      for execution_id in ids:
        got = store.execution(execution_id)
        assert bits(got) == bits(chain(execution_id, turns=3))
  db = sqlite3.connect(path)
  assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
  db.close()


def test_a_full_disk_is_one_clear_error(tmp_path):
  with RolloutStore(tmp_path / "r.sqlite") as store:
    store.put_execution(chain("g0/0", turns=2))
    pages = store._file._db.execute("PRAGMA page_count").fetchone()[0]
    store._file._db.execute(f"PRAGMA max_page_count={pages + 1}")
    with pytest.raises(StoreError, match="full"):
      for i in range(1, 99):
        store.put_execution(chain(f"g{i}/0", turns=40))
    kept = store.execution_ids()
    for execution_id in kept:
      assert store.execution(execution_id) is not None
    assert "g0/0" in kept
