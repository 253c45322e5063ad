"""Reports of tiny runs that are written here as a run writes them."""

import importlib.util
import json
import pathlib
import xml.etree.ElementTree as ElementTree

import branching
import numpy as np
import pytest

from gyre.analysis import curves, report, runs
from gyre.store.rollouts import RolloutStore
from gyre.types import Execution, Group, Outcome

ROOT = pathlib.Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def _put(store, group, phase, passed):
  """A group of one execution a number; None is one that was not scored."""
  store.put_group(group, phase)
  for i, n in enumerate(passed):
    name = f"{group.group_id}/{i}"
    outcome = Outcome(status="eval_failed")
    if n is not None:
      outcome = Outcome(status="scored", passed=n, total=2)
    store.put_execution(
      Execution(
        name, group.group_id, i, group.task_id, group.version, outcome=outcome
      )
    )


def _write_run(directory, evaluations, steps=(0.25, 0.5), score="fraction"):
  """A run's files; evaluations: step -> task id -> passed (of 2) each."""
  directory.mkdir()
  body = {
    "config": {"learner": {"score": score}, "run": {"seed": 5}},
    "versions": {"jax": "1.2.3"},
  }
  (directory / "config.json").write_text(json.dumps(body))
  rows = [{"step": 0, "perf/eval_s": 2.0}]
  for i, mean in enumerate(steps, 1):
    rows.append({"step": i, "reward/mean": mean, "perf/step_s": 1.5})
  with RolloutStore(directory / "rollouts.sqlite") as store:
    _put(store, Group("train-0", 0, "copy-1-train-9", 0), "train", [1, 1])
    for step, tasks in evaluations.items():
      for i, (task, passed) in enumerate(tasks.items()):
        group = Group(f"eval-{step}-{i}", i, task, step)
        _put(store, group, "eval", passed)
      rows[step] |= {"eval/reward": 0.5, "eval/ci95": [0.25, 0.75]}
  lines = "".join(json.dumps(r) + "\n" for r in rows)
  # A line that was being written when the run was killed.
  (directory / "metrics.jsonl").write_text(lines + '{"step": 3, "rew')
  return directory


BEFORE = {
  "copy-1-eval-1": [0, 1],
  "copy-1-eval-2": [0],
  "move-1-eval-3": [2],
  "move-1-eval-4": [None],
}
AFTER = {
  "copy-1-eval-1": [2, 2],
  "copy-1-eval-2": [1],
  "move-1-eval-3": [1, None],
  "move-1-eval-4": [2],
}


@pytest.fixture
def run(tmp_path):
  return runs.load(_write_run(tmp_path / "a", {0: BEFORE, 2: AFTER}), "main")


def test_rewards_of_each_evaluation(run):
  assert run.held_out == {
    0: {"copy-1-eval-1": 0.25, "copy-1-eval-2": 0.0, "move-1-eval-3": 1.0},
    2: {
      "copy-1-eval-1": 1.0,
      "copy-1-eval-2": 0.5,
      "move-1-eval-3": 0.5,
      "move-1-eval-4": 1.0,
    },
  }
  assert len(run.rows) == 3


def test_the_score_is_the_run_s(tmp_path):
  path = _write_run(tmp_path / "b", {0: BEFORE, 2: AFTER}, score="binary")
  assert runs.load(path).held_out[2]["copy-1-eval-2"] == 0.0


def test_a_line_that_is_no_object_is_told(tmp_path):
  path = _write_run(tmp_path / "b", {0: BEFORE, 2: AFTER})
  (path / "metrics.jsonl").write_text('{"step": 1}\n3\n')
  with pytest.raises(runs.RunError, match=r"metrics\.jsonl"):
    runs.load(path)


def test_gain_is_paired_over_tasks_scored_in_both(run):
  g = runs.gain(run)
  assert (g.steps, g.n) == ((0, 2), 3)
  np.testing.assert_allclose([g.before, g.after], [1.25 / 3, 2 / 3])
  assert g.gain == pytest.approx(0.25)  # of .75, .5, -.5
  assert g.gain_ci[0] == pytest.approx(-0.5)
  assert g.gain_ci[1] == pytest.approx(0.75, abs=0.1)
  copies = runs.gain(run, "copy-")
  assert (copies.n, copies.gain) == (2, pytest.approx(0.625))
  assert runs.kinds(run) == ("copy", "move")


def test_pairing_takes_out_what_tasks_differ_in(tmp_path):
  tasks = {f"copy-1-eval-{i}": [i % 2] for i in range(40)}
  better = {task: [n + 1 for n in passed] for task, passed in tasks.items()}
  g = runs.gain(runs.load(_write_run(tmp_path / "c", {0: tasks, 1: better})))
  assert g.gain_ci == (0.5, 0.5)
  assert g.before_ci[1] - g.before_ci[0] > 0.1


def test_first_and_last_of_many_evaluations(tmp_path):
  path = _write_run(tmp_path / "d", {0: BEFORE, 1: BEFORE, 2: AFTER})
  assert runs.gain(runs.load(path)).steps == (0, 2)


def test_report_shows_every_figure(run, tmp_path):
  control = runs.load(
    _write_run(tmp_path / "e", {0: BEFORE, 2: BEFORE}, steps=(0.3,) * 2),
    "control",
  )
  text = report.markdown([run, control], "title", "x.svg")
  assert "| main | 0 -> 2 | 3 | 0.417 [" in text
  assert "| +0.250 [-0.500, 0.750] | 3 + 2 |" in text
  assert "| +0.000 [0.000, 0.000] |" in text
  assert "| copy | 0.12 -> 0.75 (n 2) | 0.12 -> 0.12 (n 2) |" in text
  assert "| 2 | 0.500 | 0.300 |" in text
  assert "main: seed 5; jax 1.2.3." in text


def test_a_kind_that_one_run_lacks_is_an_empty_cell(run, tmp_path):
  lost = {**AFTER, "move-1-eval-3": [None], "move-1-eval-4": [None]}
  other = runs.load(_write_run(tmp_path / "g", {0: BEFORE, 2: lost}), "other")
  text = report.markdown([run, other], "title", "x.svg")
  assert "| move | 1.00 -> 0.50 (n 1) |  |" in text
  assert "| other | 0 -> 2 | 2 |" in text


def test_figure_draws_points_where_they_are(run):
  root = ElementTree.fromstring(report.figure([run], "a < b"))
  assert root.find(f"{SVG}text").text == "a < b"
  line = root.find(f"{SVG}polyline").get("points").split()
  (x1, y1), (x2, y2) = (map(float, p.split(",")) for p in line)
  dots = [
    (float(c.get("cx")), float(c.get("cy"))) for c in root.iter(SVG + "circle")
  ]
  assert [x for x, _ in dots] == pytest.approx([2 * x1 - x2, x2])
  # Rewards .25, .5 and evaluations of .5: a higher reward is further up.
  assert y1 > y2 and [y for _, y in dots] == pytest.approx([y2, y2])


def test_smooth_is_a_trailing_mean():
  assert curves.smooth([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]


def test_too_many_curves():
  with pytest.raises(ValueError, match="5 curves, at most 4"):
    curves.svg(
      [curves.Curve("", [1], [1])] * 5, title="", x_label="", y_label=""
    )


def _command():
  spec = importlib.util.spec_from_file_location(
    "report_command", ROOT / "experiments" / "report.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.main


def test_the_command_writes_both_files(tmp_path, capsys):
  path = _write_run(tmp_path / "f", {0: BEFORE, 2: AFTER})
  out = tmp_path / "results" / "tiny"
  assert _command()(["--run", f"trained={path}", "--out", str(out)]) == 0
  printed = capsys.readouterr().out
  assert printed.startswith("trained: 3 held-out tasks, 0.417 -> 0.667, gain")
  assert "![reward by step](tiny.svg)" in out.with_suffix(".md").read_text()
  ElementTree.parse(out.with_suffix(".svg"))


@pytest.mark.parametrize(
  "given,said",
  [
    ("x={}/nothing", "holds no run"),
    ("x={}/once/config.json", "holds no run"),
    ("x={}/other", "lacks config.learner.score"),
    ("no-name", "is not NAME=DIR"),
    ("x={}/once", "has 1 evaluations, a gain needs 2"),
  ],
)
def test_mistakes_are_one_line(tmp_path, capsys, given, said):
  _write_run(tmp_path / "once", {0: BEFORE})
  _write_run(tmp_path / "other", {0: BEFORE})
  (tmp_path / "other" / "config.json").write_text('{"config": []}')
  arguments = ["--run", given.format(tmp_path), "--out", str(tmp_path / "o")]
  assert _command()(arguments) == 2
  error = capsys.readouterr().err
  assert said in error and error.count("\n") == 1
  assert not (tmp_path / "o.md").exists()


def test_more_runs_than_colours_is_one_line(tmp_path, capsys):
  path = _write_run(tmp_path / "h", {0: BEFORE, 2: AFTER})
  given = [x for i in range(5) for x in ("--run", f"{i}={path}")]
  assert _command()([*given, "--out", str(tmp_path / "o")]) == 2
  error = capsys.readouterr().err
  assert "5 runs" in error and error.count("\n") == 1


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, capsys):
  path = _write_run(tmp_path / "i", {0: BEFORE, 2: AFTER})
  out = path / "config.json" / "o"
  assert _command()(["--run", f"a={path}", "--out", str(out)]) == 2
  error = capsys.readouterr().err
  assert "config.json" in error and error.count("\n") == 1


@pytest.fixture
def branched(tmp_path):
  """A run of one branching execution that was evaluated."""
  path = tmp_path / "run"
  path.mkdir()
  execution = branching.renamed(branching.everything(), "eval-0", 0)
  with RolloutStore(path / "rollouts.sqlite") as store:
    store.put_group(Group("eval-0", 0, "copy-1"), "eval")
    store.put_execution(execution)
  return path


def test_the_command_shows_executions(branched, capsys):
  assert _command()([str(branched), "--sort", "branches"]) == 0
  out = capsys.readouterr().out
  assert "1 of 1 executions" in out and "eval-0/0" in out
  assert _command()([str(branched), "--phase", "train"]) == 0
  assert "eval-0/0" not in capsys.readouterr().out


def test_the_command_shows_a_tree(branched, capsys):
  assert _command()([str(branched), "--tree", "eval-0/0"]) == 0
  out, err = capsys.readouterr()
  assert "compaction: call 0005 goes on from the summary" in out
  assert "no tokenizer.json was found" in err and "after" not in out
  branching.tokenizer().save(str(branched / "tokenizer.json"))
  assert _command()([str(branched), "--tree", "0/0"]) == 0
  out, err = capsys.readouterr()
  assert 'older " notes.md<|end|>' in out and not err


def test_the_tokenizer_is_where_the_configuration_says(branched, capsys):
  config = {"tokenizer": {"source": "file", "path": str(branched / "t.json")}}
  (branched / "config.json").write_text(json.dumps({"config": config}))
  branching.tokenizer().save(str(branched / "t.json"))
  assert _command()([str(branched), "--tree", "eval-0/0"]) == 0
  assert "<|end|>" in capsys.readouterr().out


def test_the_command_writes_a_page(branched, capsys):
  out = branched / "pages" / "tree.html"
  given = [str(branched), "--tree", "eval-0/0", "--html", str(out)]
  assert _command()(given) == 0
  said = capsys.readouterr().out
  assert said.startswith(f"{out}: 4 branches, ")
  page = out.read_text("utf-8")
  assert page.startswith("<!doctype html>") and "eval-0/0" in page


@pytest.mark.parametrize(
  "given,said",
  [
    ([], "name a RUN"),
    (["{}", "--tree", "other"], "there are (1): eval-0/0"),
    (["{}/none", "--tree", "eval-0/0"], "holds no run"),
    (["{}", "--html", "x"], "--html needs --tree"),
    (["{}", "--sort", "size"], "column 'size' is not one of"),
    (["{}", "--limit", "0"], "--limit is 0"),
    (["{}", "--limit", "few"], "invalid int value"),
    (["{}", "--phase", "test"], "invalid choice"),
    (["{}", "--run", "a=b"], "are two reports"),
    (["--run", "a=b"], "needs --out"),
    (["--tree", "a"], "name a RUN"),
    (["{}", "--tree", "eval-0/0", "--tokenizer", "{}/no"], "cannot read"),
    (["{}", "--tree", "eval-0/0", "--html", "{}/rollouts.sqlite/x"], "xists"),
    (["{}/broken"], "is malformed"),
  ],
)
def test_mistakes_about_one_run_are_one_line(branched, capsys, given, said):
  broken = branched / "broken" / "rollouts.sqlite"
  broken.parent.mkdir()
  content = bytearray((branched / "rollouts.sqlite").read_bytes())
  content[4096:] = b"\xff" * len(content[4096:])
  broken.write_bytes(content)
  try:
    status = _command()([g.format(branched) for g in given])
  except SystemExit as end:
    status = end.code
  assert status == 2
  out, error = capsys.readouterr()
  assert said in error and error.count("\n") - ("note:" in error) == 1
  assert not out
