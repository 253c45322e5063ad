"""Tasks: Harbor task directories and tasks made in memory, one type.

A Harbor task is a directory:

  task.toml          limits, image, metadata
  instruction.md     what the agent is asked to do
  environment/       files, and an optional Dockerfile
  tests/test.sh      the verifier: writes /logs/verifier/
  solution/solve.sh  the reference solution (optional)

Field names and defaults of task.toml are Harbor's (harborframework.com/docs);
keys that gyre does not know are ignored, as Harbor ignores them. What only
gyre knows lives under [metadata.gyre]: kind, turns, solution_turns, expected.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import stat
import tomllib
from collections.abc import Mapping
from typing import Any

WORKDIR = "/app"
_GYRE_KEYS = ("solution_turns", "expected")
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)i?B?\s*$", re.I)
_MIB = {"K": 1 / 1024, "": 1 / 2**20, "M": 1.0, "G": 1024.0, "T": 2.0**20}


class TaskError(ValueError):
  """A task that cannot be loaded or written; the message is one line."""


@dataclasses.dataclass(frozen=True)
class FileSpec:
  """One file, directory or symbolic link of a task.

  Attributes:
    content: the bytes of a file (empty when `source` holds them).
    mode: permission bits; set-id and sticky bits are dropped.
    source: path on the host to read the bytes from, or "".
    link: target, when it is a symbolic link.
    directory: True for a directory (an empty one needs an entry).
  """

  content: bytes = b""
  mode: int = 0o644
  source: str = ""
  link: str = ""
  directory: bool = False

  def read(self) -> bytes:
    """The bytes, from memory or from `source`."""
    if self.source:
      return pathlib.Path(self.source).read_bytes()
    return self.content


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a task asks for; 0 leaves the configuration's own limit.

  Attributes:
    agent_timeout_s: [agent] timeout_sec, of the whole execution.
    verifier_timeout_s: [verifier] timeout_sec.
    build_timeout_s: [environment] build_timeout_sec, of an image.
    cpus: [environment] cpus.
    memory_mib: [environment] memory_mb (or the older memory = "2G").
    storage_mib: [environment] storage_mb (or storage = "10G").
    gpus: [environment] gpus.
  """

  agent_timeout_s: float = 0.0
  verifier_timeout_s: float = 600.0
  build_timeout_s: float = 600.0
  cpus: int = 0
  memory_mib: int = 0
  storage_mib: int = 0
  gpus: int = 0


@dataclasses.dataclass(frozen=True)
class Task:
  """A task of either kind: a Harbor directory or made in memory.

  Attributes:
    task_id: unique in its task set.
    instruction: what the agent is asked to do.
    files: path (relative to environment/) -> file. Without a Dockerfile they
      are the workspace that the agent starts in; with one they are its build
      context (image.py says what lands where).
    tests: path (relative to tests/) -> file; "test.sh" is the entry point.
    solution: path (relative to solution/) -> file; "solve.sh" or empty.
    solution_turns: the reference solution, one command a turn, or empty.
    limits: what the task asks for.
    metadata: [metadata]; gyre reads `kind` and `turns`.
    expected: ids of the assertions, frozen from the reference solution;
      empty when they are not known (verifier.freeze_expected finds them).
    workdir: where the agent starts.
    image: docker_image, or "".
    env, verifier_env, solution_env: extra environment variables.
    path: the directory it was loaded from, or "".
  """

  task_id: str
  instruction: str
  files: Mapping[str, FileSpec] = dataclasses.field(default_factory=dict)
  tests: Mapping[str, FileSpec] = dataclasses.field(default_factory=dict)
  solution: Mapping[str, FileSpec] = dataclasses.field(default_factory=dict)
  solution_turns: tuple[str, ...] = ()
  limits: Limits = dataclasses.field(default_factory=Limits)
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  expected: tuple[str, ...] = ()
  workdir: str = WORKDIR
  image: str = ""
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  verifier_env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  solution_env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  path: str = ""

  def __post_init__(self):
    for name in ("files", "tests", "solution"):
      for path in getattr(self, name):
        _check_relative(path, f"task {self.task_id}: {name}")
    if not self.workdir.startswith("/") or ".." in self.workdir.split("/"):
      raise TaskError(
        f"task {self.task_id}: workdir {self.workdir!r} must be absolute"
      )

  @property
  def kind(self) -> str:
    """metadata's kind, or "" ."""
    return str(self.metadata.get("kind", ""))

  @property
  def dockerfile(self) -> str:
    """Text of environment/Dockerfile, or "" without one."""
    spec = self.files.get("Dockerfile")
    return spec.read().decode("utf-8", "replace") if spec else ""


def _check_relative(path: str, where: str) -> None:
  parts = path.split("/")
  if path.startswith("/") or "\0" in path or not path or ".." in parts:
    raise TaskError(f"{where} path {path!r} must be relative, without '..'")


def _read_tree(root: pathlib.Path) -> dict[str, FileSpec]:
  """Every entry under `root`, sorted; contents stay on disk until read."""
  out: dict[str, FileSpec] = {}
  if not root.is_dir():
    return out
  for folder, dirs, names in os.walk(root):
    dirs.sort()
    for name in sorted(dirs + names):
      path = pathlib.Path(folder, name)
      rel = path.relative_to(root).as_posix()
      info = path.lstat()
      mode = stat.S_IMODE(info.st_mode) & 0o777
      if stat.S_ISLNK(info.st_mode):
        out[rel] = FileSpec(link=os.readlink(path), mode=mode)
      elif stat.S_ISDIR(info.st_mode):
        out[rel] = FileSpec(directory=True, mode=mode)
      elif stat.S_ISREG(info.st_mode):
        out[rel] = FileSpec(source=str(path), mode=mode)
      else:
        raise TaskError(f"{path}: neither a file, a directory nor a link")
  return out


def _mib(value: Any, where: str) -> int:
  """A size: a number is MiB, a string has a unit ("2G", "512M")."""
  if isinstance(value, str):
    match = _SIZE.match(value)
    if not match:
      raise TaskError(f"{where} is {value!r}; write a size such as '2G'")
    return int(float(match[1]) * _MIB[match[2].upper()])
  return int(_number(value, where))


def _number(value: Any, where: str) -> float:
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise TaskError(f"{where} must be a number, got {value!r}")
  if value < 0:
    raise TaskError(f"{where} must not be negative, got {value}")
  return value


def _section(data: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
  value = data.get(name, {})
  if not isinstance(value, dict):
    raise TaskError(f"{where}: {name} must be a table, got {value!r}")
  return value


def _strings(value: Any, where: str) -> dict[str, str]:
  if not isinstance(value, dict):
    raise TaskError(f"{where} must be a table, got {value!r}")
  for k, v in value.items():
    if not isinstance(v, str):
      raise TaskError(f"{where}.{k} must be a string, got {v!r}")
  return dict(value)


def _limits(data: Mapping[str, Any], where: str) -> Limits:
  agent = _section(data, "agent", where)
  verifier = _section(data, "verifier", where)
  env = _section(data, "environment", where)

  def number(section, name, key, default):
    value = _number(section.get(key, default), f"{where}: {name}.{key}")
    if key in section and key.endswith("timeout_sec") and value == 0:
      raise TaskError(f"{where}: {name}.{key} must be positive, got 0")
    return value

  def size(new, old):
    if env.get(new) is not None:
      return _mib(env[new], f"{where}: environment.{new}")
    return _mib(env.get(old, 0), f"{where}: environment.{old}")

  return Limits(
    agent_timeout_s=float(number(agent, "agent", "timeout_sec", 0)),
    verifier_timeout_s=float(
      number(verifier, "verifier", "timeout_sec", 600.0)
    ),
    build_timeout_s=float(
      number(env, "environment", "build_timeout_sec", 600.0)
    ),
    cpus=int(number(env, "environment", "cpus", 0)),
    memory_mib=size("memory_mb", "memory"),
    storage_mib=size("storage_mb", "storage"),
    gpus=int(number(env, "environment", "gpus", 0)),
  )


def _text(path: pathlib.Path) -> str:
  try:
    return path.read_text()
  except FileNotFoundError:
    raise TaskError(f"{path.parent}: no {path.name}") from None
  except UnicodeDecodeError as e:
    raise TaskError(f"{path}: not UTF-8 text ({e.reason})") from None


def _without_canary(text: str) -> str:
  """Drops the leading comment lines that mark benchmark data."""
  lines = text.splitlines(keepends=True)
  while lines and (
    not lines[0].strip()
    or ("canary" in lines[0].lower() and lines[0].startswith(("#", "<!--")))
  ):
    lines.pop(0)
  return "".join(lines)


def load_task(directory: str | os.PathLike[str]) -> Task:
  """Loads and checks a Harbor task directory.

  Args:
    directory: holds task.toml, instruction.md, tests/test.sh and, optionally,
      environment/ and solution/solve.sh.

  Returns:
    A Task whose task_id is [task] name, else the directory's name.

  Raises:
    TaskError: something is missing or malformed; one line that names it.
  """
  root = pathlib.Path(directory).resolve()
  if not root.is_dir():
    raise TaskError(f"{root}: no such task directory")
  toml = root / "task.toml"
  try:
    data = tomllib.loads(_text(toml))
  except tomllib.TOMLDecodeError as e:
    raise TaskError(f"{toml}: {e}") from None
  where = str(toml)
  if data.get("steps"):
    raise TaskError(f"{where}: multi-step tasks ([[steps]]) are not supported")
  environment = _section(data, "environment", where)
  if environment.get("os", "linux") != "linux":
    raise TaskError(
      f"{where}: environment.os {environment['os']!r} is not linux"
    )
  image = environment.get("docker_image") or ""
  if not isinstance(image, str):
    raise TaskError(f"{where}: environment.docker_image must be a string")
  metadata = dict(_section(data, "metadata", where))
  gyre = dict(_section(metadata, "gyre", f"{where}: metadata"))
  metadata.pop("gyre", None)
  for key in _GYRE_KEYS:
    if not all(isinstance(v, str) for v in gyre.get(key, [])):
      raise TaskError(f"{where}: metadata.gyre.{key} must be strings")
  tests = _read_tree(root / "tests")
  if "test.sh" not in tests or tests["test.sh"].directory:
    raise TaskError(f"{root}: no tests/test.sh")
  instruction = _without_canary(_text(root / "instruction.md")).strip()
  if not instruction:
    raise TaskError(f"{root}: instruction.md is empty")
  solution = _read_tree(root / "solution")
  if solution and "solve.sh" not in solution:
    raise TaskError(f"{root}: solution/ has no solve.sh")
  turns, expected = (tuple(gyre.pop(k, ())) for k in _GYRE_KEYS)
  return Task(
    task_id=str(_section(data, "task", where).get("name") or root.name),
    instruction=instruction,
    files=_read_tree(root / "environment"),
    tests=tests,
    solution=solution,
    solution_turns=turns,
    expected=expected,
    limits=_limits(data, where),
    metadata={**metadata, **gyre},
    workdir=environment.get("workdir") or WORKDIR,
    image=image,
    env=_strings(environment.get("env", {}), f"{where}: environment.env"),
    verifier_env=_strings(
      _section(data, "verifier", where).get("env", {}), f"{where}: verifier.env"
    ),
    solution_env=_strings(
      _section(data, "solution", where).get("env", {}), f"{where}: solution.env"
    ),
    path=str(root),
  )


def _toml_value(value: Any) -> str:
  if isinstance(value, bool):
    return "true" if value else "false"
  if isinstance(value, int | float):
    return repr(value)
  if isinstance(value, str):
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
  if isinstance(value, list | tuple):
    return "[" + ", ".join(_toml_value(v) for v in value) + "]"
  if isinstance(value, Mapping):
    inner = ", ".join(
      f"{json.dumps(str(k))} = {_toml_value(v)}" for k, v in value.items()
    )
    return "{ " + inner + " }"
  raise TaskError(f"task.toml cannot hold a {type(value).__name__}: {value!r}")


def _toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
  lines = ['schema_version = "1.1"']
  for name, values in sections.items():
    if values:
      lines += ["", f"[{name}]"]
      lines += [
        f"{k if re.fullmatch(r'[A-Za-z0-9_-]+', k) else json.dumps(k)} = "
        f"{_toml_value(v)}"
        for k, v in values.items()
      ]
  return "\n".join(lines) + "\n"


def write_files(files: Mapping[str, FileSpec], root: str | os.PathLike[str]):
  """Writes a tree of FileSpec under `root` (created); nothing is followed."""
  base = pathlib.Path(root)
  base.mkdir(parents=True, exist_ok=True)
  directories = []
  for rel in sorted(files):
    spec, path = files[rel], base / rel
    path.parent.mkdir(parents=True, exist_ok=True)
    if spec.directory:
      path.mkdir(exist_ok=True)
      directories.append((path, spec.mode & 0o777))
    elif spec.link:
      path.symlink_to(spec.link)
    else:
      flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
      fd = os.open(path, flags, 0o600)
      with os.fdopen(fd, "wb") as f:
        f.write(spec.read())
        os.fchmod(fd, spec.mode & 0o777)
  for path, mode in reversed(directories):
    path.chmod(mode)


def write_task(task: Task, directory: str | os.PathLike[str]) -> None:
  """Writes `task` as a Harbor task directory; load_task reads it back.

  A task that knows only solution_turns gets a solve.sh made of them.

  Raises:
    TaskError: `directory` exists and is not empty.
  """
  root = pathlib.Path(directory)
  if root.exists() and any(root.iterdir()):
    raise TaskError(f"{root}: exists and is not empty")
  root.mkdir(parents=True, exist_ok=True)
  limits = task.limits
  gyre: dict[str, Any] = {}
  if task.solution_turns:
    gyre["solution_turns"] = list(task.solution_turns)
  if task.expected:
    gyre["expected"] = list(task.expected)
  agent, environment = {}, {"build_timeout_sec": limits.build_timeout_s}
  if limits.agent_timeout_s:
    agent["timeout_sec"] = limits.agent_timeout_s
  for key, value in (
    ("docker_image", task.image),
    ("cpus", limits.cpus),
    ("memory_mb", limits.memory_mib),
    ("storage_mb", limits.storage_mib),
    ("gpus", limits.gpus),
    ("workdir", task.workdir if task.workdir != WORKDIR else ""),
  ):
    if value:
      environment[key] = value
  verifier = {"timeout_sec": limits.verifier_timeout_s}
  text = _toml(
    {
      "task": {"name": task.task_id},
      "metadata": task.metadata,
      "metadata.gyre": gyre,
      "agent": agent,
      "verifier": verifier,
      "verifier.env": task.verifier_env,
      "environment": environment,
      "environment.env": task.env,
      "solution.env": task.solution_env,
    }
  )
  (root / "task.toml").write_text(text)
  (root / "instruction.md").write_text(task.instruction + "\n")
  write_files(task.files, root / "environment")
  write_files(task.tests, root / "tests")
  solution = dict(task.solution)
  if not solution and task.solution_turns:
    script = "#!/bin/bash\n" + "\n".join(task.solution_turns) + "\n"
    solution["solve.sh"] = FileSpec(script.encode(), 0o755)
  if solution:
    write_files(solution, root / "solution")
