"""The directory of a run: who holds it, what it was made with, its files.

Text files that grow (metrics.jsonl, log.txt, timeline.json) are cut back to
the length that the newest checkpoint recorded, so that a resumed run leaves
the file that an uninterrupted one would: no line twice, none missing.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers

from gyre.config import Config, ConfigError

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
# What a run may go on with under other values.
_FREE = (
  "run.steps",
  "elastic.launcher",
  "elastic.restarts",
  "rollout.engines",
)


class Lock:
  """An exclusive hold on a run's directory, gone with the process."""

  def __init__(self, directory: pathlib.Path):
    """Takes the hold.

    Raises:
      ConfigError: another process has it.
    """
    path = directory / ".lock"
    self._file = open(path, "a+")  # noqa: SIM115
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self._file.seek(0)
      holder = self._file.read().strip() or "unknown"
      self._file.close()
      raise ConfigError(
        f"{directory} is in use by another run (process {holder}); wait for "
        "it or choose another --workdir"
      ) from None
    self._file.truncate(0)
    self._file.write(f"{os.getpid()}\n")
    self._file.flush()

  def release(self) -> None:
    """Lets the directory go."""
    self._file.close()


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens nested mappings to {"section.option": value}."""
  out: dict[str, Any] = {}
  for key, value in tree.items():
    name = f"{prefix}{key}"
    if isinstance(value, Mapping) and value:
      out.update(flatten(value, f"{name}."))
    else:
      out[name] = value
  return out


def versions() -> dict[str, str]:
  """Returns the versions of jax, jaxlib and gyre."""
  return {p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "gyre")}


def _as_json(config: Config) -> dict[str, Any]:
  return json.loads(json.dumps(config.to_dict()))


def read_config(directory: pathlib.Path) -> dict[str, Any] | None:
  """Returns what config.json holds, or None when there is none.

  Raises:
    ConfigError: it cannot be read.
  """
  path = directory / CONFIG
  try:
    return json.loads(path.read_text())
  except FileNotFoundError:
    return None
  except ValueError as error:
    raise ConfigError(f"{path} is not JSON: {error}") from None


def check_config(
  directory: pathlib.Path, config: Config, free: tuple[str, ...] = _FREE
) -> None:
  """Refuses to go on in `directory` under another configuration.

  Args:
    directory: of the run.
    config: as asked for now.
    free: options, or whole sections ("eval."), that may differ.

  Raises:
    ConfigError: names the options that differ, with both values; run.steps
      may be raised, never lowered.
  """
  old = read_config(directory)
  if old is None:
    return
  before, now = flatten(old.get("config", {})), flatten(_as_json(config))
  missing = object()
  differing = []
  for name in sorted(before.keys() | now.keys()):
    a, b = before.get(name, missing), now.get(name, missing)
    if a != b and not name.startswith(free):
      a, b = ("unset" if v is missing else repr(v) for v in (a, b))
      differing.append(f"{name} was {a}, is {b}")
  if differing:
    raise ConfigError(
      f"{directory} holds a run of another configuration: "
      + "; ".join(differing)
    )
  steps = before.get("run.steps", 0)
  if "run.steps" in free and config.run.steps < steps:
    raise ConfigError(
      f"{directory} holds a run of {steps} steps; run.steps "
      f"{config.run.steps} may be raised, not lowered"
    )


def write_config(directory: pathlib.Path, config: Config) -> None:
  """Writes config.json: the resolved configuration and versions."""
  body = {"config": _as_json(config), "versions": versions()}
  write_text(directory / CONFIG, json.dumps(body, indent=2) + "\n")


def write_tokenizer(
  directory: pathlib.Path, tokenizer: tokenizers.Tokenizer
) -> None:
  """Writes tokenizer.json: what reads the ids of rollouts.sqlite."""
  write_text(directory / TOKENIZER, tokenizer.to_str())


def write_text(path: pathlib.Path, text: str) -> None:
  """Replaces a small text file atomically and durably."""
  tmp = path.with_name(f".tmp-{path.name}")
  with open(tmp, "w") as f:
    f.write(text)
    f.flush()
    os.fsync(f.fileno())
  os.replace(tmp, path)


def size(path: pathlib.Path) -> int:
  """Returns a file's length in bytes, 0 when it is missing."""
  try:
    return path.stat().st_size
  except FileNotFoundError:
    return 0


def cut(path: pathlib.Path, length: int) -> None:
  """Cuts a file back to `length` bytes; a shorter one stays as it is."""
  if size(path) > length:
    os.truncate(path, length)
