"""A procedural family of terminal tasks, seeded and reproducible.

Every task is a workspace, an instruction of one to six sub-goals, a tests/
test.sh of two to eight named assertions, and a reference solution of one
command a turn. No assertion holds in the workspace as it is given, nor in an
empty one; all hold after the solution.

A task belongs to one *split*, decided by a hash of its instruction and files:
training, held-out, warm-start and example tasks differ in content, not only
in seed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from gyre.envs import task as task_lib
from gyre.envs.tasksets import conventions, files, goals, system, text
from gyre.envs.tasksets.goals import Draw, Goal

Split = Literal["train", "eval", "warm", "example"]

MAX_TURNS = 6

# Of 16 hash values: how many belong to each split.
_SHARES = {"train": 8, "eval": 3, "warm": 4, "example": 1}


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of task: goals for a number of turns, and the fewest it needs."""

  plan: Callable[[Draw, int], list[Goal]]
  min_turns: int = 1


def _many(*goal: Callable[[Draw], Goal]) -> Kind:
  return Kind(lambda d, turns: [d.pick(goal)(d) for _ in range(turns)])


_SIMPLE = (
  files.directory,
  files.write,
  files.append,
  files.copy,
  files.move,
  files.remove,
  files.permissions,
  files.link,
)
_ALL = (
  *_SIMPLE,
  files.archive,
  text.edit,
  text.count,
  text.search,
  text.order,
  text.join,
  text.lines,
  text.columns,
  text.case,
  system.environment,
  system.program,
  system.json,
  system.process,
)

_KINDS: dict[str, Kind] = {
  "directory": _many(files.directory),
  "write": _many(files.write),
  "append": _many(files.append),
  "copy": _many(files.copy),
  "move": _many(files.move),
  "remove": _many(files.remove),
  "permissions": _many(files.permissions),
  "link": _many(files.link),
  "archive": _many(files.archive),
  "edit": _many(text.edit),
  "count": _many(text.count),
  "search": _many(text.search),
  "sort": _many(text.order),
  "join": _many(text.join),
  "lines": _many(text.lines),
  "columns": _many(text.columns),
  "case": _many(text.case),
  "environment": _many(system.environment),
  "script": _many(system.program),
  "json": _many(system.json),
  "process": _many(system.process),
  "backup": _many(conventions.backup),
  "discard": _many(conventions.discard),
  "note": _many(conventions.note),
  "runnable": _many(conventions.runnable),
  "pack": _many(conventions.pack),
  "listing": _many(conventions.listing),
  "project": _many(conventions.project),
  "finish": _many(conventions.finish),
  "orders": Kind(system.orders, 2),
  "trail": Kind(system.trail, 2),
  "mixed": Kind(_many(*_ALL).plan, 2),
}

#: Names of all kinds.
KINDS: tuple[str, ...] = tuple(_KINDS)

#: Kinds whose instruction leaves something to the conventions of the site.
CONVENTIONS: tuple[str, ...] = (
  "backup",
  "discard",
  "note",
  "runnable",
  "pack",
  "listing",
  "project",
  "finish",
)

#: Kinds whose one-turn tasks are one short command.
EASY: tuple[str, ...] = (
  "directory",
  "write",
  "append",
  "copy",
  "move",
  "remove",
  "permissions",
  "link",
)


def _turns(kind: str, seed: int, low: int, high: int) -> int:
  """Turns of the reference solution, in [low, high]."""
  if kind not in _KINDS:
    raise ValueError(f"no kind of task {kind!r}; there are {KINDS}")
  if not 1 <= low <= high <= MAX_TURNS:
    raise ValueError(
      f"turns must satisfy 1 <= min {low} <= max {high} <= {MAX_TURNS}"
    )
  least = max(low, _KINDS[kind].min_turns)
  if least > high:
    raise ValueError(
      f"tasks of kind {kind!r} take at least {least} turns, max_turns is {high}"
    )
  return Draw("turns", kind, seed, low, high).number(least, high)


def _fingerprint(instruction: str, draw: Draw) -> bytes:
  digest = hashlib.sha256(instruction.encode())
  for path in sorted(draw.files):
    digest.update(f"\0{path}\0".encode())
    digest.update(draw.files[path].content)
  return digest.digest()


def split_of(fingerprint: bytes) -> Split:
  """The split that a task of this fingerprint belongs to."""
  place = fingerprint[0] % 16
  for name, share in _SHARES.items():
    if place < share:
      return name
    place -= share
  raise AssertionError("the shares of the splits do not add up to 16")


def plan(
  kind: str,
  seed: int,
  *,
  min_turns: int = 1,
  max_turns: int = MAX_TURNS,
  split: Split | None = None,
  site: int | None = 0,
) -> tuple[list[Goal], Draw, str]:
  """Goals, workspace and instruction of a task, before it is one.

  Args, raises: as make_task.

  Returns:
    (goals, draw whose `files` is the workspace, instruction).
  """
  if split is not None and split not in _SHARES:
    raise ValueError(f"no split {split!r}; there are {tuple(_SHARES)}")
  turns = _turns(kind, seed, min_turns, max_turns)
  for attempt in itertools.count():
    draw = Draw(kind, seed, turns, attempt, site=site)
    made = _KINDS[kind].plan(draw, turns)
    words = ", then ".join(g.text for g in made)
    instruction = words[0].upper() + words[1:]
    if split in (None, split_of(_fingerprint(instruction, draw))):
      return made, draw, instruction
  raise AssertionError("unreachable")


def make_task(
  kind: str,
  seed: int,
  *,
  min_turns: int = 1,
  max_turns: int = MAX_TURNS,
  split: Split | None = None,
  site: int | None = 0,
) -> task_lib.Task:
  """Makes one task.

  Args:
    kind: one of KINDS.
    seed: any integer; the same arguments give the same task, bit for bit.
    min_turns, max_turns: bounds of the length of the reference solution.
    split: only tasks of this split; None takes any.
    site: whose conventions hold for what an instruction leaves open; None
      draws them anew for each task.

  Returns:
    A Task with solution_turns and the ids of its assertions.

  Raises:
    ValueError: no such kind or split, or turns that it cannot have.
  """
  made, draw, instruction = plan(
    kind,
    seed,
    min_turns=min_turns,
    max_turns=max_turns,
    split=split,
    site=site,
  )
  solution = tuple(t for g in made for t in g.turns)
  assertions = goals.fold(made)
  return task_lib.Task(
    task_id=f"{kind}-{len(solution)}-{split or 'any'}-{seed}",
    instruction=instruction,
    files=dict(sorted(draw.files.items())),
    tests={
      "test.sh": task_lib.FileSpec(goals.script(assertions).encode(), 0o755)
    },
    solution_turns=solution,
    metadata={
      "kind": kind,
      "turns": len(solution),
    },
    expected=tuple(name for name, _ in assertions),
  )


def available(max_turns: int) -> tuple[str, ...]:
  """Kinds that have tasks of at most `max_turns` turns."""
  return tuple(k for k, v in _KINDS.items() if v.min_turns <= max_turns)


def sample_task(
  seed: int,
  kinds: Mapping[str, float] | None = None,
  *,
  min_turns: int = 1,
  max_turns: int = MAX_TURNS,
  split: Split | None = None,
  site: int | None = 0,
) -> task_lib.Task:
  """Makes a task of a random kind.

  Args:
    seed: decides the kind and the task.
    kinds: kind -> relative weight; empty or None means all that fit into
      max_turns, equally.
    min_turns, max_turns, split, site: as for make_task.

  Raises:
    ValueError: a weight is negative, none is positive, or as make_task.
  """
  weights = dict(kinds) if kinds else dict.fromkeys(available(max_turns), 1.0)
  unknown = sorted(set(weights) - set(KINDS))
  if unknown:
    raise ValueError(f"no kind of task {unknown[0]!r}; there are {KINDS}")
  total = sum(weights.values())
  if total <= 0 or min(weights.values()) < 0:
    raise ValueError(f"weights of kinds must be positive, got {weights}")
  ordered = sorted(k for k, w in weights.items() if w > 0)
  place = Draw("kind", seed).below(1 << 30) / (1 << 30) * total
  for kind in ordered:
    place -= weights[kind]
    if place < 0:
      break
  return make_task(
    kind,
    seed,
    min_turns=min_turns,
    max_turns=max_turns,
    split=split,
    site=site,
  )


def example_tasks(
  n: int, *, seed: int = 0, kinds: Sequence[str] = EASY, site: int | None = 0
) -> list[task_lib.Task]:
  """`n` one-turn tasks of the example split, for worked examples.

  They take turns through `kinds`, so that no two are alike while they last.
  """
  order = Draw("examples", seed).sample(kinds, len(kinds))
  return [
    make_task(
      order[i % len(order)], seed + i, max_turns=1, split="example", site=site
    )
    for i in range(n)
  ]


def text_of(task: task_lib.Task) -> str:
  """What a model reads and writes over a task: text for a tokenizer."""
  parts = [task.instruction, *task.solution_turns]
  for spec in task.files.values():
    try:
      parts.append(spec.content.decode())
    except UnicodeDecodeError:
      continue
  return "\n".join(parts)


def training_text(
  n: int,
  kinds: Mapping[str, float] | None = None,
  *,
  seed: int = 0,
  min_turns: int = 1,
  max_turns: int = MAX_TURNS,
) -> Iterator[str]:
  """Texts to learn a tokenizer from: `n` warm-start tasks and every word.

  The tasks follow the conventions of all sites.

  Args:
    n: tasks to draw.
    kinds, min_turns, max_turns: as for sample_task.
    seed: of the first; the following ones count up.
  """
  for i in range(n):
    yield text_of(
      sample_task(
        seed + i,
        kinds,
        min_turns=min_turns,
        max_turns=max_turns,
        split="warm",
        site=None,
      )
    )
  # As they stand in instructions and commands, after a space.
  for word in (*goals.NAMES, *goals.WORDS):
    yield f" {word}" * 8
