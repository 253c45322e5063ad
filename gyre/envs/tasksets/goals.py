"""What a procedural task is made of: draws, goals, assertions, test.sh.

A *goal* is one thing asked for: a phrase, the command that does it, and
*checks*, shell conditions that hold afterwards and not before. A task is a
few goals in a row.

The closed word lists are small, so that a small vocabulary gives each word
one or two tokens; no word is part of another, so that grep finds what is
meant.
"""

from __future__ import annotations

import dataclasses
import io
import random
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from typing import TypeVar

from gyre.envs import task as task_lib

T = TypeVar("T")

#: Names of directories, and of files before their extension.
NAMES = (
  "data logs notes docs build cache media images reports backup music photos "
  "config tools letters recipes maps plans drafts games books films songs "
  "tickets orders users items jobs"
).split()

#: What files hold.
WORDS = (
  "red blue green pink gold gray apple pear plum fig lemon grape cat dog fox "
  "owl hen wolf oak elm pine rose lily fern sun moon star rain snow wind"
).split()

#: Names of variables, and in lower case of keys.
VARIABLES = "COLOR FRUIT CITY MODE LEVEL SIZE PORT HOST".split()

EXTENSIONS = ("txt", "md", "log")

MAX_CHECKS = 8


class Draw:
  """Random choices for one task, the same on every machine and Python.

  Only `random.Random.random` is used: the language promises its sequence.

  Attributes:
    files: path -> file, the workspace drawn so far.
  """

  def __init__(self, *key: object, site: int | None = 0):
    """Seeds the choices.

    Args:
      key: decides them all, but for conventions.
      site: decides the conventions; None draws them anew for each task.
    """
    self._key = "/".join(str(k) for k in key)
    self._site = self._key if site is None else str(site)
    self._rng = random.Random(self._key)
    self._names: set[str] = set()
    self.files: dict[str, task_lib.FileSpec] = {}

  def below(self, n: int) -> int:
    """An integer in [0, n)."""
    return int(self._rng.random() * n)

  def number(self, low: int, high: int) -> int:
    """An integer in [low, high]."""
    return low + self.below(high - low + 1)

  def pick(self, options: Sequence[T]) -> T:
    """One of `options`."""
    return options[self.below(len(options))]

  def convention(self, what: str, options: Sequence[T]) -> T:
    """The one of `options` that the site has for `what`."""
    rng = random.Random(f"convention/{what}/{self._site}")
    return options[int(rng.random() * len(options))]

  def sample(self, options: Sequence[T], n: int) -> list[T]:
    """`n` different ones of `options`, in random order."""
    left = list(options)
    return [left.pop(self.below(len(left))) for _ in range(n)]

  def name(self) -> str:
    """A name that this task has not used."""
    name = self.pick([n for n in NAMES if n not in self._names])
    self._names.add(name)
    return name

  def file(self, ext: str = "") -> str:
    """A file name that this task has not used."""
    return f"{self.name()}.{ext or self.pick(EXTENSIONS)}"

  def inner(self, folder: str, ext: str = "txt", n: int = 1) -> list[str]:
    """`n` different paths of files in `folder`, of one extension.

    Only names at the top are kept apart within a task.
    """
    return [f"{folder}/{name}.{ext}" for name in self.sample(NAMES, n)]

  def word(self) -> str:
    """A word."""
    return self.pick(WORDS)

  def put(self, path: str, text: str, mode: int = 0o644) -> str:
    """Adds a text file to the workspace; a newline ends it."""
    self.files[path] = task_lib.FileSpec(f"{text}\n".encode(), mode)
    return path

  def folder(self, path: str) -> str:
    """Adds an empty directory to the workspace."""
    self.files[path] = task_lib.FileSpec(directory=True, mode=0o755)
    return path


@dataclasses.dataclass(frozen=True)
class Goal:
  """One thing asked for.

  Attributes:
    text: the phrase, an imperative without capital and full stop.
    turns: commands that reach it, one a turn.
    checks: (name, shell condition) pairs; none holds before, nor in an empty
      workspace, all hold after.
    wrong: commands that look right and are not.
  """

  text: str
  turns: tuple[str, ...]
  checks: tuple[tuple[str, str], ...]
  wrong: tuple[str, ...] = ()


def quoted(text: str) -> str:
  """`text` as one word of the shell."""
  return shlex.quote(text)


def is_file(path: str) -> str:
  """Condition: `path` is a regular file, not a link."""
  return f"file {quoted(path)}"


def is_filled(path: str) -> str:
  """Condition: `path` is a regular file that is not empty."""
  return f"file {quoted(path)} && [ -s {quoted(path)} ]"


def is_text(path: str, text: str) -> str:
  """Condition: `path` holds `text`; newlines at its end are not compared."""
  return f"is {quoted(path)} {quoted(text)}"


def result(
  path: str, text: str, wrong: str
) -> dict[str, tuple[tuple[str, str], ...] | tuple[str, ...]]:
  """Checks and near misses of a goal that writes `text` to `path`."""
  lines = text.split("\n")
  first = (
    (f"{path}_starts", f"starts {quoted(path)} {quoted(lines[0])}")
    if len(lines) > 1
    else (f"{path}_filled", is_filled(path))
  )
  return {
    "checks": (first, (f"{path}_right", is_text(path, text))),
    "wrong": (wrong, f"touch {path}"),
  }


def tar_bytes(files: Mapping[str, str]) -> bytes:
  """A tar archive of text files, the same bytes every time."""
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
    for path, text in files.items():
      content = f"{text}\n".encode()
      info = tarfile.TarInfo(path)
      info.size, info.mode = len(content), 0o644
      tar.addfile(info, io.BytesIO(content))
  return out.getvalue()


def fold(
  goals: Sequence[Goal], limit: int = MAX_CHECKS
) -> list[tuple[str, str]]:
  """Assertions of a task: every check of every goal, at most `limit`.

  Each goal has at least one assertion; where there are more checks than the
  limit allows, a goal's last assertion is the conjunction of the rest.

  Args:
    goals: at most `limit`.
    limit: most assertions.

  Returns:
    (name, condition) pairs, names unique.
  """
  spare = limit - len(goals)
  out = []
  for i, goal in enumerate(goals):
    n = min(len(goal.checks), 1 + spare)
    spare -= n - 1
    kept, rest = goal.checks[: n - 1], goal.checks[n - 1 :]
    folded = " && ".join(f"{{ {c}; }}" for _, c in rest)
    for name, condition in (*kept, (rest[-1][0], folded)):
      out.append((f"{i + 1}_{name.replace('/', '_')}", condition))
  return out


_PRELUDE = """#!/bin/sh
# Checks the workspace; one named assertion a line.
LC_ALL=C
export LC_ALL
cd "${GYRE_WORKSPACE:-.}" || exit 1
logs=/logs/verifier
[ -z "$GYRE_VERIFIER_DIR" ] || logs=$GYRE_VERIFIER_DIR
total=0 passed=0 rows=
file() { [ -f "$1" ] && [ ! -L "$1" ]; }
folder() { [ -d "$1" ] && [ ! -L "$1" ]; }
is() { file "$1" && [ "$(head -c 65536 "$1")" = "$2" ]; }
starts() { file "$1" && [ "$(head -n 1 "$1")" = "$2" ]; }
ends() { file "$1" && [ "$(tail -n 1 "$1")" = "$2" ]; }
flat() { file "$1" && [ "$(tr -d '[:space:]' < "$1")" = "$2" ]; }
names() { file "$1" && [ "$(sed 's|.*/||' "$1" | sort)" = "$2" ]; }
mode() { [ ! -L "$1" ] && [ -e "$1" ] && stat -c %a "$1"; }
check() {
  total=$((total + 1)) status=failed
  if [ "$2" = 0 ]; then passed=$((passed + 1)) status=passed; fi
  row="{\\"name\\":\\"$1\\",\\"status\\":\\"$status\\",\\"duration\\":0}"
  rows="$rows${rows:+,}$row"
}
"""

_REPORT = """
cat > "$logs/ctrf.json" <<EOF
{"results":{"tool":{"name":"sh"},"summary":{"tests":$total,"passed":$passed,
"failed":$((total - passed)),"skipped":0,"pending":0,"other":0,
"start":0,"stop":0},"tests":[$rows]}}
EOF
[ "$passed" = "$total" ]
"""


def script(assertions: Sequence[tuple[str, str]]) -> str:
  """tests/test.sh: plain sh that reports assertions as CTRF JSON.

  It exits 0 when all hold. Nothing of the workspace is ever executed.
  """
  lines = [
    f"{{ {condition}; }} > /dev/null 2>&1; check {quoted(name)} $?"
    for name, condition in assertions
  ]
  return _PRELUDE + "\n".join(lines) + _REPORT
