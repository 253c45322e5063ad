"""One execution of a run, ready to be shown: tree, words, training."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from gyre.analysis import branches, executions, training, tree_html, tree_text
from gyre.analysis.pieces import Pieces
from gyre.analysis.runs import RunError

_FILE = "tokenizer.json"


def _config(directory: pathlib.Path) -> Mapping[str, Any]:
  """The resolved configuration, {} where there is none.

  Raises:
    RunError: config.json is not what a run writes.
  """
  path = directory / "config.json"
  if not path.is_file():
    return {}
  try:
    config = json.loads(path.read_text("utf-8"))["config"]
    return {k: dict(v) for k, v in config.items()}
  except (KeyError, TypeError, ValueError, AttributeError) as error:
    raise RunError(f"{path} is no run's configuration: {error}") from None


def tokenizer_of(directory: pathlib.Path) -> pathlib.Path | None:
  """Returns the tokenizer.json of a run, or None.

  It is looked for in the run's directory, then where the configuration's
  tokenizer or model lies.

  Args:
    directory: of the run.

  Raises:
    RunError: config.json is broken.
  """
  config = _config(directory)
  places = [str(directory)]
  for section, source in (("tokenizer", "file"), ("model", "hf")):
    named = config.get(section, {})
    if named.get("source") == source and named.get("path"):
      places.append(named["path"])
  for place in places:
    path = pathlib.Path(place).expanduser()
    path = path if path.is_file() else path / _FILE
    if path.is_file():
      return path
  return None


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
  """An execution and how it is shown.

  Attributes:
    history: its tree as branches.
    pieces: reads its ids.
    trained: what was trained of it, or None.
    lines_are_calls: all that its agent says is a command.
  """

  history: branches.History
  pieces: Pieces
  trained: training.Trained | None
  lines_are_calls: bool

  def text(self) -> str:
    """Returns the tree as text."""
    return tree_text.render(self.history, self.pieces)

  def html(self) -> str:
    """Returns the tree as a page."""
    return tree_html.render(
      self.history,
      self.pieces,
      trained=self.trained,
      lines_are_calls=self.lines_are_calls,
    )


def read(
  directory: pathlib.Path,
  execution_id: str,
  *,
  tokenizer: pathlib.Path | None = None,
) -> Reading:
  """Reads an execution of a run.

  Args:
    directory: of the run; nothing in it is changed.
    execution_id: its id, or the end of it that no other has.
    tokenizer: a tokenizer.json; default the run's, and none shows numbers.

  Raises:
    RunError: no such run, execution or tokenizer.
    StoreError: rollouts.sqlite cannot be read.
  """
  with executions.open_store(directory) as store:
    execution = executions.find(store, execution_id)
    path = tokenizer or tokenizer_of(directory)
    pieces = Pieces() if path is None else Pieces.load(path)
    history = branches.history(execution, pieces)
    trained = training.load(store, execution, history.tree)
  agent = _config(directory).get("agent", {})
  return Reading(history, pieces, trained, agent.get("tool_format") == "line")
