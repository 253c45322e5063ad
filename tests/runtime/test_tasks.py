"""Training, held-out and warm-start tasks never meet."""

import pytest

from gyre import config
from gyre.runtime.tasks import TaskSource

MODEL = {"source": "init", "hf_config": {"model_type": "llama"}}


def _source(**sections):
  values = {"model": MODEL, "tasks": {"max_turns": 1}, **sections}
  return TaskSource(config.from_config_dict(values))


def _content(task):
  return task.instruction, tuple(sorted(task.files.items()))


def test_splits_share_no_task():
  source = _source()
  seen = {
    split: {_content(source.get(split, i)) for i in range(60)}
    for split in ("train", "eval", "warm")
  }
  assert not seen["train"] & seen["eval"]
  assert not seen["train"] & seen["warm"]
  assert not seen["eval"] & seen["warm"]


def test_the_warm_start_may_show_other_kinds():
  source = _source(
    tasks={"max_turns": 1, "kinds": {"copy": 1.0}},
    warm_start={"steps": 1, "kinds": {"move": 1.0}},
  )
  kinds = {
    split: {source.get(split, i).metadata["kind"] for i in range(20)}
    for split in ("train", "eval", "warm")
  }
  assert kinds == {"train": {"copy"}, "eval": {"copy"}, "warm": {"move"}}


@pytest.mark.parametrize("section", ["tasks", "warm_start"])
def test_an_unknown_kind_is_named(section):
  with pytest.raises(config.ConfigError, match="juggle"):
    _source(**{section: {"kinds": {"juggle": 1.0}}})


def test_the_warm_start_may_show_the_conventions_of_any_site():
  def commands(split, **warm_start):
    source = _source(
      tasks={"max_turns": 1, "kinds": {"project": 1.0}, "site": 3},
      warm_start={"steps": 1, **warm_start},
    )
    turns = [source.get(split, i).solution_turns[0] for i in range(60)]
    return {turn.split("/")[-1] for turn in turns}

  assert commands("warm", any_site=True) == {"src", "lib", "code", "app"}
  assert len(commands("train", any_site=True)) == 1
  assert commands("warm") == commands("train") == commands("eval")
