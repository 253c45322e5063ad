"""What every execution of a run shares: worked examples by kind."""

import asyncio

import pytest

from gyre import config
from gyre.envs.tasksets import shell
from gyre.harness.render import minimal_renderer
from gyre.runtime import collect
from gyre.runtime.runner import Runner
from gyre.runtime.tasks import TaskSource
from gyre.types import Group


def _config(examples_of="kind", kinds=("copy", "move"), **tasks):
  return config.from_config_dict(
    {
      "model": {"hf_config": {"model_type": "qwen3"}},
      "tasks": {"max_turns": 1, "kinds": dict.fromkeys(kinds, 1.0), **tasks},
      "sandbox": {"backends": ("process",)},
      "agent": {
        "tool_format": "line",
        "examples": 3,
        "examples_of": examples_of,
        "max_turns": 1,
      },
    }
  )


def _renderer():
  return minimal_renderer(shell.training_text(20, max_turns=1), 512)


def _played(cfg, indices):
  """Instructions in the prompt of each task's reference run, own one last."""
  source, run = TaskSource(cfg), Runner(cfg, _renderer())(None, 1.0)
  out = []
  for i in indices:
    task = source.get("train", i)
    group = Group(f"g{i}", i, task.task_id)
    (dispatch,) = collect.dispatches(group, task, 1, 0)
    execution = asyncio.run(run(dispatch))
    assert execution.outcome.passed == execution.outcome.total > 0
    asked = [m["content"] for m in execution.messages if m["role"] == "user"]
    assert asked[-1] == task.instruction
    out.append((task.metadata["kind"], asked[:-1]))
  return out


def test_examples_of_the_task_s_kind():
  played = _played(_config(), range(6))
  assert {kind for kind, _ in played} == {"copy", "move"}
  for kind, shown in played:
    examples = shell.example_tasks(3, kinds=(kind,))
    assert shown == [t.instruction for t in examples]
    assert {t.metadata["kind"] for t in examples} == {kind}
    assert all("-example-" in t.task_id for t in examples)


def test_examples_follow_the_site():
  commands = set()
  for site in range(6):
    cfg = _config(kinds=("backup",), site=site)
    run = Runner(cfg, _renderer())(None, 1.0)
    task = TaskSource(cfg).get("train", 0)
    (dispatch,) = collect.dispatches(Group("g", 0, task.task_id), task, 1, 0)
    said = [
      m["content"]
      for m in asyncio.run(run(dispatch)).messages
      if m["role"] == "assistant"
    ]
    endings = {command.rpartition(".")[2] for command in said}
    assert len(said) == 4 and len(endings) == 1
    commands |= endings
  assert len(commands) > 1


def test_easy_examples_are_the_same_for_all():
  (_, first), (_, second) = _played(_config("easy"), (0, 1))
  assert first == second == [t.instruction for t in shell.example_tasks(3)]


def test_a_kind_without_worked_examples_is_named():
  cfg = _config(kinds=("copy", "trail"), max_turns=3)
  with pytest.raises(config.ConfigError, match="trail"):
    Runner(cfg, _renderer())


def test_task_directories_have_no_kinds():
  with pytest.raises(config.ConfigError, match="harbor"):
    _config(taskset="harbor", path="somewhere")
