"""Which tasks a run trains on, is evaluated on and is warm-started on.

The three never meet: a procedural task's content decides its split, and
task directories are given apart.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator
from typing import Literal

from gyre.config import Config, ConfigError
from gyre.envs import task as task_lib
from gyre.envs.task import Task
from gyre.envs.tasksets import shell

Split = Literal["train", "eval", "warm"]

# Seeds of one tasks.seed do not run into those of the next.
_SEED_STRIDE = 1_000_003


class TaskSource:
  """The tasks of a configuration, made or loaded when asked for."""

  def __init__(self, config: Config):
    """Checks that there are tasks.

    Args:
      config: tasks, eval.n, warm_start.

    Raises:
      ConfigError: no task directories where the configuration says, or
        a phase that needs tasks which there are none of.
    """
    self._tasks = config.tasks
    self._warm_kinds = config.warm_start.kinds or config.tasks.kinds
    self._warm_site = None if config.warm_start.any_site else config.tasks.site
    self._dirs: dict[Split, list[pathlib.Path]] = {}
    if config.tasks.taskset == "shell":
      self.num_train, self.num_eval = config.tasks.num_train, config.eval.n
      self._try_one()
      return
    self._dirs["train"] = _directories(config.tasks.path, "tasks.path")
    self.num_train = len(self._dirs["train"])
    self.num_eval = 0
    if config.eval.every:
      held_out = _directories(config.tasks.eval_path, "tasks.eval_path")
      self._dirs["eval"] = held_out
      self.num_eval = min(config.eval.n, len(held_out))
    if config.warm_start.steps:
      raise ConfigError(
        "warm_start.steps needs the procedural task set (tasks.taskset "
        "'shell'): a task directory's solution is no transcript"
      )

  def _try_one(self) -> None:
    try:
      self.get("train", 0)
      self.get("warm", 0)
    except ValueError as error:
      raise ConfigError(f"tasks: {error}") from None

  def get(self, split: Split, index: int) -> Task:
    """Returns a task; the same one each time.

    Args:
      split: "train", "eval" or "warm".
      index: below num_train or num_eval; any for "warm".

    Raises:
      task_lib.TaskError: its directory is broken; the message names it.
    """
    if split in self._dirs:
      return _load(str(self._dirs[split][index]))
    t, warm = self._tasks, split == "warm"
    return shell.sample_task(
      t.seed * _SEED_STRIDE + index,
      self._warm_kinds if warm else t.kinds,
      min_turns=t.min_turns,
      max_turns=t.max_turns,
      split=split,
      site=self._warm_site if warm else t.site,
    )

  def texts(self, n: int) -> Iterator[str]:
    """Yields text to learn a tokenizer from, of `n` tasks.

    Raises:
      ConfigError: the task set is not procedural.
    """
    if self._dirs:
      raise ConfigError(
        "tokenizer.source 'train' needs the procedural task set "
        "(tasks.taskset 'shell')"
      )
    t = self._tasks
    return shell.training_text(
      n,
      t.kinds,
      seed=t.seed * _SEED_STRIDE,
      min_turns=t.min_turns,
      max_turns=t.max_turns,
    )


@functools.lru_cache(maxsize=4096)
def _load(path: str) -> Task:
  return task_lib.load_task(path)


def _directories(path: str, option: str) -> list[pathlib.Path]:
  if not path:
    raise ConfigError(f"tasks.taskset 'harbor' needs {option}")
  root = pathlib.Path(path).expanduser()
  found = sorted(p.parent for p in root.glob("*/task.toml"))
  if not found:
    raise ConfigError(f"{option} {path} holds no task directories")
  return found
