"""Rows of executions that are stored here as a run stores them."""

import dataclasses
import xml.etree.ElementTree as ElementTree

import branching
import numpy as np
import pytest
from branching import Player

from gyre.analysis import branches, executions, training, tree_text
from gyre.analysis.pieces import Pieces
from gyre.analysis.runs import RunError
from gyre.store.database import StoreError
from gyre.store.rollouts import RolloutStore
from gyre.trajectory import select, tree
from gyre.types import Execution, Group, Outcome


def _plain(said="ls<|end|>"):
  play = Player()
  play.call(branching.HEAD, said)
  return play


@pytest.fixture
def run(tmp_path):
  """A training group of two, trained in step 4, and an evaluation."""
  branched = branching.renamed(branching.everything(), "train-0", 0)
  failed = branching.renamed(
    _plain().execution(outcome=Outcome("eval_failed"), truncated="tokens"),
    "train-0",
    1,
  )
  other = branching.renamed(_plain("cat<|end|>").execution(), "eval-0", 0)
  with RolloutStore(tmp_path / executions.ROLLOUTS) as store:
    store.put_group(Group("train-0", 0, "copy-1", 2))
    store.put_group(Group("eval-0", 0, "copy-1", 2), "eval")
    for e in (branched, failed, other):
      store.put_execution(e)
    found = select.select(
      tree.build(branched.calls),
      execution_id=branched.execution_id,
      group_id="train-0",
      max_samples=2,
    )
    store.put_samples(4, found.samples, {branched.execution_id: -1.25})
    store.mark_consumed(["train-0"], 4)
  return tmp_path


def _rows(run, phase=None):
  with executions.open_store(run) as store:
    return executions.load(store, phase)


def test_a_row_says_what_an_execution_did(run):
  rows = _rows(run)
  assert [r.id for r in rows] == ["train-0/0", "train-0/1", "eval-0/0"]
  said = sum(len(c.completion_ids) for c in branching.everything().calls)
  assert rows[0] == executions.Row(
    id="train-0/0",
    phase="train",
    task="copy-1",
    version=0,
    status="scored",
    score=0.5,
    passed="1/2",
    calls=6,
    sampled=said,
    branches=4,
    roles=("main", "main_summary", "sub_agent"),
    truncated="",
    seconds=60.5,
  )
  assert (rows[1].score, rows[1].truncated, rows[1].branches) == (
    None,
    "tokens",
    1,
  )
  assert [r.id for r in _rows(run, "eval")] == ["eval-0/0"]


def test_an_execution_that_nobody_verified_has_a_row():
  row = executions.row(Execution("e", "g", 0, "t", t_end=1.5), "train")
  assert (row.status, row.calls, row.branches, row.seconds) == ("", 0, 0, 1.5)


def test_selection_and_order(run):
  rows = _rows(run)

  def ids(found):
    return [r.id for r in found]

  assert ids(executions.select(rows, status="scored")) == [
    "train-0/0",
    "eval-0/0",
  ]
  assert ids(executions.select(rows, role="sub_agent")) == ["train-0/0"]
  assert ids(executions.select(rows, min_branches=2)) == ["train-0/0"]
  assert ids(executions.select(rows, truncated=True)) == ["train-0/1"]
  assert executions.select(rows, task="move") == []
  assert ids(executions.sort(rows, "sampled"))[-1] == "train-0/0"
  best = [dataclasses.replace(rows[2], score=0.75), *rows[:2]]
  for turned, first in ((False, "train-0/0"), (True, "eval-0/0")):
    order = ids(executions.sort(best, "score", largest_first=turned))
    assert order[0] == first and order[-1] == "train-0/1"
  with pytest.raises(RunError, match="column 'size' is not one of id, phase"):
    executions.sort(rows, "size")
  assert executions.as_dicts(rows)[0]["roles"][-1] == "sub_agent"


def test_the_table_shows_every_column(run):
  text = executions.text(_rows(run), title="three")
  assert "three" in text.splitlines()[0]
  for name in executions.COLUMNS:
    assert name in text
  assert "eval_failed" in text and "0.500" in text
  # A name is no markup.
  rows = [dataclasses.replace(_rows(run)[0], task="[red]copy")]
  assert "[red]copy" in executions.text(rows)


def test_the_same_table_as_html(run):
  rows = _rows(run)
  rows[0] = dataclasses.replace(rows[0], task="<b>copy</b>")
  root = ElementTree.fromstring(executions.html(rows))
  head, *lines = [[c.text for c in line] for line in root.iter("tr")]
  assert tuple(head) == executions.COLUMNS and len(lines) == 3
  first = dict(zip(head, lines[0], strict=True))
  assert first["task"] == "<b>copy</b>"
  assert (first["score"], first["passed"]) == ("0.500", "1/2")
  assert first["roles"] == "main main_summary sub_agent"
  assert lines[1][head.index("score")] == "-"


def test_an_execution_is_found_by_the_end_of_its_id(run):
  with executions.open_store(run) as store:
    assert executions.find(store, "eval-0/0").group_id == "eval-0"
    assert executions.find(store, "-0/1").execution_id == "train-0/1"
    with pytest.raises(RunError, match="several ids end so"):
      executions.find(store, "/0")
    with pytest.raises(RunError, match=r"there are \(3\): eval-0/0, "):
      executions.find(store, "nothing")


def test_what_is_no_run(tmp_path):
  with pytest.raises(RunError, match="holds no run"):
    executions.open_store(tmp_path)
  (tmp_path / executions.ROLLOUTS).write_text("words, no database at all")
  with pytest.raises(StoreError, match="cannot open"):
    executions.open_store(tmp_path)


def test_what_is_printed_moves_no_cursor(tmp_path):
  hostile = "\x1b[2J\r\n\x07\u202e\u2028"
  played = _plain(f"ls {hostile}<|end|>").execution(truncated=hostile)
  played = dataclasses.replace(played, task_id=hostile)
  with RolloutStore(tmp_path / executions.ROLLOUTS) as store:
    store.put_group(Group(played.group_id, 0, hostile))
    store.put_execution(played)
  shown = executions.text(_rows(tmp_path)) + tree_text.render(
    branches.history(played)
  )
  assert "x1b" in shown
  assert all(c.isprintable() for line in shown.split("\n") for c in line)


def test_training_lies_on_the_tree(run):
  with executions.open_store(run) as store:
    execution = executions.find(store, "train-0/0")
    own = tree.build(execution.calls)
    trained = training.load(store, execution, own)
    assert training.load(store, executions.find(store, "eval-0/0"), own) is None
    samples = [s for s, _ in store.samples(4)]
  assert (trained.step, trained.advantage, trained.samples) == (4, -1.25, 2)
  # Masks of one execution are apart: their sizes add up.
  assert trained.mask.sum() == sum(len(s.trained) for s in samples)
  assert not (trained.mask & ~own.trainable()).any()
  for s in samples:
    path = training.locate(own, s.ids)
    np.testing.assert_array_equal(own.ids[path], s.ids)
    np.testing.assert_array_equal(trained.mask[path[s.trained]], True)
  with pytest.raises(RunError, match="do not belong together"):
    training.locate(own, np.array([1, 10**6]))


def test_pieces_join_to_the_text():
  text = "naïve café 漢字 🙂 龍<|end|> and\nmore"
  ids = branching.encode(text)
  read = branching.pieces()
  assert read.text(ids) == "".join(read.of(ids)) == text
  assert len(read.of(ids)) == len(ids)
  # The first bytes of a character that never comes.
  cut = next(
    ids[: i + 1] for i, p in enumerate(read.of(ids)) if p == "" and i > 4
  )
  assert read.of(cut)[-1] == "\ufffd"
  assert read.message(ids) == "naïve café 漢字 🙂 龍"


def test_pieces_without_a_tokenizer_are_numbers(tmp_path):
  assert Pieces().text([5, 17]) == "5 17 "
  with pytest.raises(RunError, match="cannot read the tokenizer"):
    Pieces.load(tmp_path)
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(RunError, match="is no tokenizer"):
    Pieces.load(tmp_path)
  branching.tokenizer().save(str(tmp_path / "tokenizer.json"))
  assert Pieces.load(tmp_path).of(branching.encode("<|end|>")) == ["<|end|>"]
