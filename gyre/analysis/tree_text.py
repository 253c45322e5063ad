"""The tree of one execution as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gyre.analysis.branches import Branch, History
from gyre.analysis.pieces import Pieces, printable
from gyre.types import Call

_CONTEXT = 16  # tokens shown on either side of a split
_DEEP = 6  # levels of indentation
_WIDTH = 72  # characters of quoted text


def _spans(numbers: Sequence[int], names: Sequence[str]) -> str:
  """ "0000-0002, 0005": runs of calls by their names."""
  out: list[list[int]] = []
  for n in numbers:
    if out and out[-1][1] == n - 1:
      out[-1][1] = n
    else:
      out.append([n, n])
  return ", ".join(
    names[a] if a == b else f"{names[a]}-{names[b]}" for a, b in out
  )


def facts(history: History) -> list[tuple[str, str]]:
  """Returns (name, value) of what an execution was and got."""
  e, o = history.execution, history.execution.outcome
  sampled = history.multiplicity > 0
  again = int((history.multiplicity > 1).sum())
  out = [("task", e.task_id)]
  status = o.status if o else "not verified"
  if o and o.score is not None:
    status += f", score {o.score:.3f}"
  if o and o.total:
    status += f" ({o.passed}/{o.total} assertions)"
  out.append(("outcome", status))
  if e.truncated:
    out.append(("cut by", e.truncated))
  unique = len(history.tree.ids)
  ratio = f", {history.flat / unique:.1f} times" if unique else ""
  out += [
    ("calls", f"{len(e.calls):,}"),
    ("branches", f"{len(history.branches):,}"),
    ("tokens", f"{unique:,} unique of {history.flat:,} sent{ratio}"),
    ("sampled", f"{int(sampled.sum()):,} unique of {e.num_sampled:,}"),
  ]
  if again:
    out.append(("more than once", f"{again:,} tokens"))
  versions = np.unique(history.version[sampled]).tolist()
  out.append(("weights", ", ".join(map(str, versions)) or "none"))
  return out


def heading(history: History, branch: Branch) -> str:
  """Returns a branch's one line: where it lies and what was sampled on it."""
  names = [c.call_id for c in history.execution.calls]
  sampled = history.multiplicity[branch.tokens] > 0
  parts = [f"{branch.depth:,} to {branch.end:,}"]
  if branch.calls:
    word = "call" if len(branch.calls) == 1 else "calls"
    parts.append(f"{word} {_spans(branch.calls, names)}")
  parts.append(f"{int(sampled.sum()):,} of {len(branch.tokens):,} sampled")
  if (again := int((history.multiplicity[branch.tokens] > 1).sum())) > 0:
    parts.append(f"{again:,} more than once")
  return ", ".join(parts)


def around(
  history: History, branch: Branch, pieces: Pieces
) -> tuple[str, str, str] | None:
  """Texts at a split: before it, then how the older and the newer call go on.

  Returns:
    None for a branch that splits from nothing.
  """
  if branch.reason is None:
    return None
  calls = history.execution.calls
  older, newer = calls[branch.older], calls[branch.newer]
  at = branch.depth

  def on(call: Call) -> str:
    # Prompts are long; only what is near the split is joined.
    start = max(at - len(call.prompt_ids), 0)
    rest = call.completion_ids[start : start + _CONTEXT]
    near = np.concatenate([call.prompt_ids[at : at + _CONTEXT], rest])
    return pieces.text(near[:_CONTEXT])

  first = max(at - _CONTEXT, 0)
  before = newer.prompt_ids[first:at]
  if at > len(newer.prompt_ids):
    n = len(newer.prompt_ids)
    tail = newer.completion_ids[max(first - n, 0) : at - n]
    before = np.concatenate([newer.prompt_ids[first:], tail])
  return pieces.text(before), on(older), on(newer)


def _quote(text: str, *, end: bool = False) -> str:
  """Text in one line of at most _WIDTH characters; `end` keeps its end."""
  shown = printable(text)
  if len(shown) > _WIDTH:
    shown = "…" + shown[1 - _WIDTH :] if end else shown[: _WIDTH - 1] + "…"
  return f'"{shown}"'


def _why(branch: Branch) -> str:
  if branch.reason is None:
    return ""
  left = "left behind, " if branch.behind else ""
  return f"{left}{branch.reason.kind}: {branch.reason.detail}"


def render(history: History, pieces: Pieces | None = None) -> str:
  """Draws the tree.

  Args:
    history: of the execution.
    pieces: reads ids; without a tokenizer no text is shown.

  Returns:
    Lines: the execution's facts, then a branch each, under the branch it
    leaves, with its reason and the text around the split.
  """
  out = [f"execution {history.execution.execution_id}"]
  out += [f"  {name}: {value}" for name, value in facts(history)]
  out.append("")
  children: dict[str, list[Branch]] = {}
  for branch in history.branches:
    children.setdefault(branch.parent, []).append(branch)
  # (branch, prefix of its own line, prefix of what hangs below it)
  todo = [(b, "", "") for b in reversed(children.get("", []))]
  while todo:
    branch, first, rest = todo.pop()
    parent = f" from {branch.parent}" if branch.parent else ""
    out.append(
      f"{first}{branch.name} [{', '.join(branch.roles) or 'no call'}]{parent}: "
      f"{heading(history, branch)}"
    )
    below = children.get(branch.name, [])
    bar = rest + ("│ " if below else "  ")
    if branch.reason is not None:
      out.append(f"{bar}  {_why(branch)}")
    texts = around(history, branch, pieces) if pieces and pieces.known else None
    if texts is not None:
      out.append(f"{bar}  after {_quote(texts[0], end=True)}")
      out.append(f"{bar}  older {_quote(texts[1])}")
      out.append(f"{bar}  newer {_quote(texts[2])}")
    deep = len(rest) >= 3 * _DEEP
    for i, child in enumerate(reversed(below)):
      if deep:
        todo.append((child, f"{rest}├─ ", rest))
      else:
        last = i == 0
        todo.append(
          (
            child,
            rest + ("└─ " if last else "├─ "),
            rest + ("   " if last else "│  "),
          )
        )
  return "\n".join(map(printable, out)) + "\n"
