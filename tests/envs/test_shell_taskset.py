"""Procedural shell tasks: every property, on a plain host shell.

The tasks here come from our own generator; their commands touch only the
directory they start in, so that no sandbox is needed (tests/envs/test_agent.py
runs every kind in one).
"""

import json
import os
import pathlib
import subprocess
import sys

import hypothesis as hp
import hypothesis.strategies as st
import pytest

from gyre.envs import task as task_lib
from gyre.envs.tasksets import goals, shell

ENV = {"PATH": os.environ["PATH"], "LC_ALL": "C"}


def run(commands, cwd):
  subprocess.run(
    ["bash", "-c", "\n".join(commands)],
    cwd=cwd,
    env=ENV,
    check=False,
    capture_output=True,
    timeout=20,
  )


def verify(task, workspace):
  """Runs tests/test.sh as a verifier would: assertion name -> passed."""
  logs = workspace.parent / "logs"
  logs.mkdir(exist_ok=True)
  report = logs / "ctrf.json"
  report.unlink(missing_ok=True)
  done = subprocess.run(
    ["sh", "-c", task.tests["test.sh"].content.decode()],
    env={
      **ENV,
      "GYRE_WORKSPACE": str(workspace),
      "GYRE_VERIFIER_DIR": str(logs),
    },
    check=False,
    capture_output=True,
    timeout=20,
  )
  assert not done.stderr, done.stderr
  results = json.loads(report.read_text())["results"]
  tests = {t["name"]: t["status"] == "passed" for t in results["tests"]}
  assert len(tests) == len(results["tests"])
  assert results["summary"]["tests"] == len(tests)
  assert results["summary"]["passed"] == sum(tests.values())
  assert (done.returncode == 0) == all(tests.values())
  assert tuple(tests) == task.expected
  return tests


def fresh(task, root, name):
  workspace = root / name / "app"
  task_lib.write_files(task.files, workspace)
  return workspace


# Slow enough to keep few by default: a case starts about ten shells.
@pytest.mark.parametrize("kind", shell.KINDS)
def test_assertions_hold_after_the_solution_only(kind, tmp_path):
  low = 2 if kind in ("orders", "trail", "mixed") else 1
  for seed, turns in enumerate((low, low, low, 3, 6)):
    args = {"min_turns": turns, "max_turns": turns}
    task = shell.make_task(kind, seed, **args)
    made, _, _ = shell.plan(kind, seed, **args)
    assert len(task.solution_turns) == turns
    assert task.kind == kind and task.metadata["turns"] == turns
    assert 2 <= len(task.expected) <= 8
    start = fresh(task, tmp_path, f"{seed}-start")
    assert not any(verify(task, start).values()), task.instruction
    empty = tmp_path / f"{seed}-empty" / "app"
    empty.mkdir(parents=True)
    assert not any(verify(task, empty).values()), task.instruction
    run(task.solution_turns, start)
    assert all(verify(task, start).values()), (task.instruction, made)
    # A near miss in place of one goal's commands, the others done right.
    for i, goal in enumerate(made):
      assert goal.wrong
      for j, wrong in enumerate(goal.wrong if turns <= low else goal.wrong[:1]):
        commands = [
          t
          for k, g in enumerate(made)
          for t in ((wrong,) if k == i else g.turns)
        ]
        miss = fresh(task, tmp_path, f"{seed}-{i}-{j}")
        run(commands, miss)
        assert not all(verify(task, miss).values()), (task.instruction, wrong)


@pytest.mark.parametrize("kind", shell.CONVENTIONS)
def test_assertions_tell_each_convention_from_the_others(kind, tmp_path):
  sites = {}
  for site in range(40):
    (goal,), _, _ = shell.plan(kind, 7, max_turns=1, site=site)
    sites.setdefault(goal.turns, site)
  assert len(sites) == 4
  for (right,), site in sites.items():
    task = shell.make_task(kind, 7, max_turns=1, site=site)
    assert task.solution_turns == (right,)
    for i, (command,) in enumerate(sites):
      workspace = fresh(task, tmp_path, f"{site}-{i}")
      run((command,), workspace)
      passed = all(verify(task, workspace).values())
      assert passed == (command == right), (task.instruction, command)


@pytest.mark.slow
@pytest.mark.parametrize("kind", shell.KINDS)
def test_assertions_over_many_seeds(kind, tmp_path):
  for seed in range(100, 200):
    task = shell.make_task(kind, seed)
    start = fresh(task, tmp_path, str(seed))
    assert not any(verify(task, start).values()), task.instruction
    run(task.solution_turns, start)
    assert all(verify(task, start).values()), task.instruction


@pytest.mark.parametrize("kind", shell.KINDS)
def test_a_link_out_of_the_workspace_passes_nothing_by_itself(kind, tmp_path):
  """The expected text is in test.sh: links to it must not help."""
  task = shell.make_task(kind, 3, max_turns=2)
  workspace = fresh(task, tmp_path, "links")
  oracle = tmp_path / "test.sh"
  oracle.write_bytes(task.tests["test.sh"].content)
  run(task.solution_turns, workspace)
  linked = False
  for path in sorted(workspace.rglob("*")):
    if path.is_file() and not path.is_symlink():
      path.unlink()
      path.symlink_to(oracle)
      linked = True
  if linked:
    assert not any(verify(task, workspace).values())


def test_the_same_arguments_give_the_same_task_in_any_process():
  code = (
    "import hashlib\n"
    "from gyre.envs.tasksets import shell\n"
    "h = hashlib.sha256()\n"
    "for k in shell.KINDS:\n"
    "  for s in range(3):\n"
    "    for split in (None, 'train', 'eval'):\n"
    "      h.update(repr(shell.make_task(k, s, split=split)).encode())\n"
    "for s in range(20): h.update(repr(shell.sample_task(s)).encode())\n"
    "h.update(repr(shell.example_tasks(5)).encode())\n"
    "print(h.hexdigest())\n"
  )
  digests = {
    subprocess.run(
      [sys.executable, "-c", code],
      env={**os.environ, "PYTHONHASHSEED": seed},
      check=True,
      capture_output=True,
      text=True,
    ).stdout
    for seed in ("0", "1")
  }
  assert len(digests) == 1


@hp.settings(deadline=None, max_examples=150)
@hp.given(
  st.sampled_from(shell.KINDS),
  st.integers(0, 1 << 40),
  st.integers(2, 6),
  st.sampled_from((None, "train", "eval", "warm", "example")),
)
def test_shape_of_any_task(kind, seed, max_turns, split):
  task = shell.make_task(kind, seed, max_turns=max_turns, split=split)
  assert task == shell.make_task(kind, seed, max_turns=max_turns, split=split)
  assert 1 <= len(task.solution_turns) <= max_turns
  assert 2 <= len(task.expected) <= 8
  assert len(set(task.expected)) == len(task.expected)
  assert task.instruction[0].isupper() or not task.instruction[0].isalpha()
  tops = [p.split("/")[0] for p in task.files]
  # Two goals never share a top-level file.
  assert len({t for t in tops if "." in t}) == sum("." in t for t in tops)
  assert all("\n" not in t for t in task.solution_turns)


def test_splits_share_no_task():
  seen = {}
  for split in ("train", "eval", "warm", "example"):
    for seed in range(150):
      task = shell.sample_task(seed, max_turns=2, split=split)
      key = (task.instruction, str(task.files))
      assert seen.setdefault(key, split) == split
  assert len(seen) > 500


def test_every_word_stands_alone():
  """grep and sed find a word nowhere but where it was put."""
  for words in (goals.WORDS, goals.NAMES):
    assert len(set(words)) == len(words)
  pairs = [(a, b) for a in goals.WORDS for b in goals.WORDS if a != b]
  assert not [(a, b) for a, b in pairs if a in b]


def test_kinds_are_drawn_by_weight():
  tasks = [
    shell.sample_task(s, {"write": 3, "copy": 1, "link": 0}, max_turns=1)
    for s in range(800)
  ]
  share = sum(t.kind == "write" for t in tasks) / len(tasks)
  # Four standard deviations of 800 draws at 3/4.
  assert abs(share - 0.75) < 4 * (0.75 * 0.25 / 800) ** 0.5
  assert {t.kind for t in tasks} == {"write", "copy"}
  kinds = {shell.sample_task(s, max_turns=1).kind for s in range(600)}
  assert kinds == set(shell.available(1))
  assert len(kinds) >= 12


@pytest.mark.parametrize(
  "call,message",
  [
    (lambda: shell.make_task("paint", 0), "paint"),
    (lambda: shell.make_task("trail", 0, max_turns=1), "at least 2 turns"),
    (lambda: shell.make_task("copy", 0, max_turns=7), "<= 6"),
    (lambda: shell.make_task("copy", 0, min_turns=3, max_turns=2), "min 3"),
    (lambda: shell.make_task("copy", 0, split="dev"), "dev"),
    (lambda: shell.sample_task(0, {"copy": -1.0}), "-1.0"),
    (lambda: shell.sample_task(0, {"paint": 1.0}), "paint"),
  ],
)
def test_what_cannot_be_made_is_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_examples_are_easy_and_all_different():
  tasks = shell.example_tasks(8, seed=5)
  assert {t.kind for t in tasks} == set(shell.EASY)
  assert all(len(t.solution_turns) == 1 for t in tasks)


def test_training_text_holds_what_tasks_say():
  text = "\n".join(shell.training_text(300, max_turns=2))
  task = shell.make_task("permissions", 0, max_turns=1, split="train")
  for word in task.instruction.lower().split():
    assert word.split(".")[0] in text.lower()


def test_a_task_is_a_harbor_directory_too(tmp_path):
  task = shell.make_task("archive", 4)
  task_lib.write_task(task, tmp_path / "task")
  back = task_lib.load_task(tmp_path / "task")
  assert back.solution_turns == task.solution_turns
  assert back.expected == task.expected
  assert back.kind == "archive"
  read = {p: f.read() for p, f in back.files.items() if not f.directory}
  assert read == {
    p: f.content for p, f in task.files.items() if not f.directory
  }
  assert pathlib.Path(back.path, "tests/test.sh").read_bytes() == (
    task.tests["test.sh"].content
  )


@pytest.mark.parametrize("kind", shell.CONVENTIONS)
def test_a_site_has_one_convention_that_no_instruction_tells(kind):
  def choices(site):
    made = [shell.plan(kind, s, max_turns=1, site=site) for s in range(90)]
    # Which of all sites' commands is the right one, by its place among them.
    return {
      instruction: sorted((*goal.wrong, *goal.turns)).index(goal.turns[0])
      for (goal,), _, instruction in made
    }

  sites = [choices(site) for site in range(20)]
  assert all(len(set(c.values())) == 1 for c in sites)
  assert len({tuple(c) for c in sites}) == 1  # the same instructions
  assert {v for c in sites for v in c.values()} == {0, 1, 2, 3}
  assert set(choices(None).values()) == {0, 1, 2, 3}
