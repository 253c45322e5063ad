"""A run's executions as rows: what each did, what it got, how it branched."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import markupsafe
import rich.box
import rich.console
import rich.table
import rich.text

from gyre.analysis import branches as branches_lib
from gyre.analysis.pieces import printable
from gyre.analysis.runs import RunError
from gyre.store.rollouts import RolloutStore
from gyre.types import Execution

ROLLOUTS = "rollouts.sqlite"
PHASES = ("train", "eval", "warm")


@dataclasses.dataclass(frozen=True)
class Row:
  """One execution.

  Attributes:
    id: of the execution.
    phase: "train", "eval" or "warm".
    task: its task's id.
    version: weights at admission.
    status: of the outcome; "" before verification.
    score: the verifier's, or None.
    passed: assertions that hold, of all expected: "3/4"; "" without a report.
    calls: model calls.
    sampled: tokens that the policy sampled, over all calls.
    branches: leaves of its tree.
    roles: of its calls, in order of first appearance.
    truncated: the limit that cut it, or "".
    seconds: from its start to its end.
  """

  id: str
  phase: str
  task: str
  version: int
  status: str
  score: float | None
  passed: str
  calls: int
  sampled: int
  branches: int
  roles: tuple[str, ...]
  truncated: str
  seconds: float


COLUMNS = tuple(f.name for f in dataclasses.fields(Row))


def open_store(directory: pathlib.Path) -> RolloutStore:
  """Opens a run's rollouts for reading.

  Args:
    directory: of the run, or its rollouts.sqlite.

  Raises:
    RunError: there is no such file.
    StoreError: it is not one that gyre wrote.
  """
  path = directory if directory.is_file() else directory / ROLLOUTS
  if not path.is_file():
    raise RunError(f"{directory} holds no run: {path} is missing")
  return RolloutStore(path, readonly=True)


def row(execution: Execution, phase: str) -> Row:
  """Describes an execution that was run in `phase`."""
  e, o = execution, execution.outcome
  # One call is one branch; only others need their tree.
  branches = len(e.calls)
  if branches > 1:
    branches = len(branches_lib.build(e).leaves())
  return Row(
    id=e.execution_id,
    phase=phase,
    task=e.task_id,
    version=e.version,
    status=o.status if o else "",
    score=o.score if o else None,
    passed=f"{o.passed}/{o.total}" if o and o.total else "",
    calls=len(e.calls),
    sampled=e.num_sampled,
    branches=branches,
    roles=tuple(dict.fromkeys(c.role for c in e.calls)),
    truncated=e.truncated,
    seconds=max(e.t_end - e.t_start, 0.0),
  )


def load(store: RolloutStore, phase: str | None = None) -> list[Row]:
  """Returns the finished executions of a run, in order of dispatch.

  Args:
    store: of the run.
    phase: one of PHASES; None takes all.

  Raises:
    RunError: an unknown phase.
  """
  if phase not in (None, *PHASES):
    raise RunError(f"phase {phase!r} is not one of {', '.join(PHASES)}")
  return [
    row(execution, name)
    for name in PHASES
    if phase in (None, name)
    for group in store.groups(name)
    for execution in store.executions(group.group_id)
  ]


def find(store: RolloutStore, execution_id: str) -> Execution:
  """Returns an execution by its id, or by the only id that ends so.

  Raises:
    RunError: none, or several; says which are near.
  """
  execution = store.execution(execution_id)
  if execution is not None:
    return execution
  ids = store.execution_ids()
  near = [i for i in ids if i.endswith(execution_id)]
  if len(near) == 1 and (found := store.execution(near[0])) is not None:
    return found
  shown = ", ".join((near or ids)[:3]) or "none at all"
  which = "several ids end so" if near else "no id is or ends so; there are"
  raise RunError(
    f"execution {execution_id!r}: {which} ({len(near or ids)}): {shown}"
  )


def select(
  rows: Iterable[Row],
  *,
  status: str | None = None,
  role: str | None = None,
  task: str = "",
  min_branches: int = 0,
  truncated: bool | None = None,
) -> list[Row]:
  """Returns the rows that meet every condition given.

  Args:
    rows: in any order; it is kept.
    status: exactly this one.
    role: a call of this role was made.
    task: the task's id starts so.
    min_branches: at least this many.
    truncated: whether a limit cut it.
  """
  return [
    r
    for r in rows
    if status in (None, r.status)
    and (role is None or role in r.roles)
    and r.task.startswith(task)
    and r.branches >= min_branches
    and truncated in (None, bool(r.truncated))
  ]


def sort(
  rows: Iterable[Row], column: str, *, largest_first: bool = False
) -> list[Row]:
  """Sorts rows by a column; those without a score come last either way.

  Args:
    rows: any.
    column: one of COLUMNS.
    largest_first: turns the order.

  Raises:
    RunError: no such column.
  """
  if column not in COLUMNS:
    raise RunError(f"column {column!r} is not one of {', '.join(COLUMNS)}")
  rows = list(rows)
  known = [r for r in rows if getattr(r, column) is not None]
  unknown = [r for r in rows if getattr(r, column) is None]
  known.sort(key=lambda r: getattr(r, column), reverse=largest_first)
  return known + unknown


def as_dicts(rows: Iterable[Row]) -> list[dict[str, Any]]:
  """Returns plain dictionaries, for a data frame or JSON."""
  return [dataclasses.asdict(r) | {"roles": list(r.roles)} for r in rows]


_RIGHT = (
  "version",
  "score",
  "passed",
  "calls",
  "sampled",
  "branches",
  "seconds",
)


def _cell(value: Any) -> str:
  if value is None:
    return "-"
  if isinstance(value, float):
    return f"{value:.3f}" if math.isfinite(value) else str(value)
  if isinstance(value, tuple):
    value = " ".join(value)
  return f"{value:,}" if isinstance(value, int) else printable(str(value))


def table(rows: Sequence[Row], *, title: str = "") -> rich.table.Table:
  """Returns rows as a table for a console."""
  out = rich.table.Table(title=title or None, box=rich.box.SIMPLE_HEAD)
  for name in COLUMNS:
    right = name in _RIGHT
    out.add_column(
      name,
      justify="right" if right else "left",
      no_wrap=right or name == "id",
      overflow="fold",
    )
  for r in rows:
    out.add_row(*(rich.text.Text(_cell(getattr(r, n))) for n in COLUMNS))
  return out


def text(rows: Sequence[Row], *, title: str = "", width: int = 200) -> str:
  """Returns the same table as plain text of at most `width` columns."""
  console = rich.console.Console(
    width=width, color_system=None, force_jupyter=False
  )
  with console.capture() as captured:
    console.print(table(rows, title=title))
  lines = captured.get().splitlines()
  return "\n".join(line.rstrip() for line in lines) + "\n"


def html(rows: Iterable[Row]) -> str:
  """Returns the same table as HTML that scrolls where it finds no room."""

  def line(tag: str, cells: Iterable[str]) -> str:
    out = []
    for name, words in zip(COLUMNS, cells, strict=True):
      side = "right" if name in _RIGHT else "left"
      style = f"text-align: {side}; white-space: nowrap"
      out.append(f'<{tag} style="{style}">{markupsafe.escape(words)}</{tag}>')
    return f"<tr>{''.join(out)}</tr>"

  body = [line("td", (_cell(getattr(r, n)) for n in COLUMNS)) for r in rows]
  head = f"<thead>{line('th', COLUMNS)}</thead>"
  table = f"<table>{head}<tbody>{''.join(body)}</tbody></table>"
  return f'<div style="overflow-x: auto">{table}</div>'
