"""The notebook runs from top to bottom on the sample kept beside it."""

import importlib
import json
import pathlib

import numpy as np
import pytest

from gyre.analysis import branches, executions, reading
from gyre.store.rollouts import RolloutStore

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments" / "notebooks"
SAMPLE = FOLDER / "sample_run"
NOTEBOOK = FOLDER / "rollout_trees.ipynb"


def _read():
  return json.loads(NOTEBOOK.read_text("utf-8"))


def test_no_output_is_kept():
  cells = [c for c in _read()["cells"] if c["cell_type"] == "code"]
  assert len(cells) >= 6
  assert all(c["outputs"] == [] for c in cells)
  assert all(c["execution_count"] is None for c in cells)


def test_the_sample_is_small_whole_and_of_no_one_machine():
  names = sorted(p.name for p in SAMPLE.iterdir())
  assert names == ["config.json", "rollouts.sqlite", "tokenizer.json"]
  content = (SAMPLE / "rollouts.sqlite").read_bytes()
  assert len(content) <= 300_000
  # No journal beside it: it opens where nothing can be written.
  assert content[18:20] == b"\x01\x01"
  ours = pathlib.Path.home(), pathlib.Path(__file__).parents[2]
  for path in SAMPLE.iterdir():
    for place in (b"/home/", *(bytes(p) for p in ours)):
      assert place not in path.read_bytes(), path.name


def test_the_sample_has_what_the_notebook_shows():
  with executions.open_store(SAMPLE) as store:
    rows = executions.load(store)
  assert {r.phase for r in rows} == {"train", "eval"}
  assert {r.status for r in rows} >= {"scored"}
  assert len({r.score for r in rows}) > 1
  # A harness that compacts its history and calls sub-agents made it.
  assert {role for r in rows for role in r.roles} == set(branches.ROLES)
  assert max(r.branches for r in rows) > 4
  for r in rows:
    read = reading.read(SAMPLE, r.id)
    assert read.pieces.known
    assert (read.trained is not None) == (r.phase == "train")
    said = read.history.logprob[read.history.multiplicity > 0]
    assert np.isfinite(said).all() and (said <= 0).all() and said.any()


def test_the_sample_is_cut_from_a_run_as_it_was(tmp_path, capsys, monkeypatch):
  """Cut again from the sample, all groups: nothing is lost or changed."""
  monkeypatch.syspath_prepend(FOLDER)
  module = importlib.import_module("make_sample")
  out = tmp_path / "again"
  given = [str(SAMPLE), "--out", str(out), "--train", "99", "--eval", "99"]
  assert module.main(given) == 0
  assert "bytes of rollouts" in capsys.readouterr().out
  with executions.open_store(SAMPLE) as a, executions.open_store(out) as b:
    assert executions.load(a) == executions.load(b)
    assert a.consumed() == b.consumed()
    for step in sorted(set(a.consumed().values())):
      for (x, ax), (y, ay) in zip(
        a.samples(step), b.samples(step), strict=True
      ):
        assert ax == ay and x.role == y.role
        for name in ("ids", "mask", "logprobs", "versions"):
          np.testing.assert_array_equal(getattr(x, name), getattr(y, name))
    for i in a.execution_ids():
      x, y = (branches.history(s.execution(i)) for s in (a, b))
      np.testing.assert_array_equal(x.tree.ids, y.tree.ids)
      np.testing.assert_array_equal(x.logprob, y.logprob)
  with (
    RolloutStore(tmp_path / "empty.sqlite") as store,
    pytest.raises(module.runs.RunError, match="no group that was trained on"),
  ):
    module.choose(store, 1, 1)


def test_the_notebook_runs():
  pytest.importorskip("ipykernel", reason="pip install -e '.[dev]'")
  nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[dev]'")
  import nbformat

  book = nbformat.read(NOTEBOOK, as_version=4)
  nbformat.validate(book)
  # Raises where a cell does.
  nbclient.NotebookClient(
    book, timeout=120, resources={"metadata": {"path": str(FOLDER)}}
  ).execute()
  outputs = {c["id"]: c["outputs"] for c in book.cells if c.cell_type == "code"}
  assert outputs["install"] == []
  with executions.open_store(SAMPLE) as store:
    ids = store.execution_ids()
  listed = outputs["table"][0]["data"]["text/html"]
  assert all(i in listed for i in ids)
  assert "compaction: call" in outputs["text"][0]["text"]
  picked = next(i for i in ids if i in outputs["pick"][0]["data"]["text/html"])
  assert outputs["text"][0]["text"].startswith(f"execution {picked}\n")
  page = outputs["page"][0]["data"]["text/html"]
  assert page.startswith("<div><iframe ") and picked in page
  assert outputs["shared"][0]["text"].count(" times\n") == min(8, len(ids))
