"""The tree of one execution as one HTML page that needs nothing else.

Style, script and data stand in the page; a content security policy of its own
allows exactly these, by their hashes, and no connection. Tokens are drawn as
they come near the window, so that an execution of a hundred thousand opens at
once.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any

import jinja2
import markupsafe
import numpy as np

from gyre.analysis import blocks, tree_text
from gyre.analysis.branches import Branch, History
from gyre.analysis.pieces import Pieces
from gyre.analysis.training import Trained

#: Log-probabilities at and above which a token gets the next stronger colour.
BOUNDS = (-0.05, -0.25, -0.7, -1.6, -3.0)
_LOGPROBS = (
  ("l0", "≥ −0.05 (95%)"),
  ("l1", "≥ −0.25 (78%)"),
  ("l2", "≥ −0.7 (50%)"),
  ("l3", "≥ −1.6 (20%)"),
  ("l4", "≥ −3 (5%)"),
  ("l5", "below"),
)
_ADVANTAGES = (
  ("n2", "≤ −1"),
  ("n1", "below 0"),
  ("z", "0"),
  ("p1", "above 0"),
  ("p2", "≥ 1"),
)
_COLOURS = 8  # versions that look different


def _part(name: str) -> str:
  page = importlib.resources.files("gyre.analysis") / "page" / name
  return page.read_text("utf-8")


def _hash(text: str) -> str:
  digest = hashlib.sha256(text.encode()).digest()
  return f"'sha256-{base64.b64encode(digest).decode()}'"


def _json(data: Any) -> str:
  """JSON that cannot end the element it stands in."""
  text = json.dumps(
    data, ensure_ascii=False, allow_nan=False, separators=(",", ":")
  )
  for c in "<>&\u2028\u2029":
    text = text.replace(c, f"\\u{ord(c):04x}")
  return text


def _runs(values: Sequence[Any]) -> list[Any]:
  """[value, times, value, times, …]"""
  out: list[Any] = []
  for v in values:
    if out and out[-2] == v:
      out[-1] += 1
    else:
      out += [v, 1]
  return out


def _finite(logprobs: np.ndarray) -> np.ndarray:
  """Log-probabilities that JSON has; what is none is as good as impossible."""
  bound = 1e4
  return np.nan_to_num(logprobs, nan=-bound, posinf=bound, neginf=-bound)


def advantage_class(advantage: float) -> str:
  """Returns the colour of an advantage."""
  if advantage == 0:
    return "z"
  return ("p" if advantage > 0 else "n") + ("2" if abs(advantage) >= 1 else "1")


def _advantages(
  history: History, order: np.ndarray, trained: Trained | None
) -> tuple[list[str], dict[str, str]]:
  """A class for each token, and what each class says."""
  sampled = history.multiplicity[order] > 0
  if trained is None:
    return [""] * len(order), {"": "not trained on"}
  own = trained.advantage
  key = "z" if own is None else advantage_class(own)
  value = "unknown" if own is None else f"{own:+.4f}"
  mask = trained.mask[order]
  names = np.where(mask, key, np.where(sampled, "u", ""))
  return names.tolist(), {
    key: f"trained in step {trained.step}, advantage {value}",
    "u": f"sampled, in no sample of step {trained.step}",
  }


def _samples(history: History, order: np.ndarray) -> dict[int, list[Any]]:
  """Of tokens sampled more than once: (call, logprob, version) of each."""
  tree = history.tree
  index = {c.call_id: i for i, c in enumerate(history.execution.calls)}
  numbers = [index[c] for c in tree.call_ids]
  out = {}
  for at in np.flatnonzero(history.multiplicity[order] > 1).tolist():
    span = slice(*tree.sample_start[order[at] : order[at] + 2].tolist())
    out[at] = [
      [numbers[c], round(float(p), 4), v]
      for c, p, v in zip(
        tree.sample_call[span].tolist(),
        _finite(tree.logprobs[span]).tolist(),
        tree.versions[span].tolist(),
        strict=True,
      )
    ]
  return out


def _vocabulary(
  ids: np.ndarray, pieces: Sequence[str]
) -> tuple[list[tuple[int, str]], list[int]]:
  """Each (id, piece) once, and for each token which of them it is."""
  known: dict[tuple[int, str], int] = {}
  tokens = [
    known.setdefault(pair, len(known))
    for pair in zip(ids.tolist(), pieces, strict=True)
  ]
  return list(known), tokens


def _data(
  history: History,
  pieces: Pieces,
  trained: Trained | None,
  lines_are_calls: bool,
) -> dict[str, Any]:
  """What the script draws; tokens in order of branches."""
  branches = history.branches
  first = np.cumsum([0, *(len(b.tokens) for b in branches)]).tolist()
  order = np.concatenate([np.zeros(0, np.int64), *(b.tokens for b in branches)])
  ids = history.tree.ids[order]
  texts: list[str] = []
  for b in branches:
    texts += pieces.of(history.tree.ids[b.tokens])
  vocabulary, tokens = _vocabulary(ids, texts)
  at = {b.name: i for i, b in enumerate(branches)}
  advantages, words = _advantages(history, order, trained)
  shown = []
  for i, b in enumerate(branches):
    parent = at.get(b.parent)
    split = -1
    if parent is not None:
      split = first[parent] + b.depth - branches[parent].depth
    cut = blocks.cut(
      texts[first[i] : first[i + 1]],
      history.multiplicity[b.tokens] > 0,
      [t in pieces.special for t in history.tree.ids[b.tokens].tolist()],
      lines_are_calls=lines_are_calls,
      text=pieces.known,
    )
    shown.append(
      {
        "name": b.name,
        "depth": b.depth,
        "first": first[i],
        "last": first[i + 1],
        "at": split,
        "why": f"{b.reason.kind}: {b.reason.detail}" if b.reason else "",
        "blocks": [_block(block, first[i]) for block in cut],
      }
    )
  return {
    "vocab": [text for _, text in vocabulary],
    "ids": [i for i, _ in vocabulary],
    "special": [int(i in pieces.special) for i, _ in vocabulary],
    "tokens": tokens,
    "logprob": np.rint(_finite(history.logprob[order]) * 1000)
    .astype(int)
    .tolist(),
    "call": _runs(history.call[order].tolist()),
    "version": _runs(history.version[order].tolist()),
    "times": _runs(history.multiplicity[order].tolist()),
    "advantage": _runs(advantages),
    "advantages": words,
    "samples": _samples(history, order),
    "bounds": list(BOUNDS),
    "versions": _versions(history),
    "calls": [c.call_id for c in history.execution.calls],
    "branches": shown,
  }


def _block(block: blocks.Block, first: int) -> list[Any]:
  folds = [
    [first + f.start, first + f.stop, f.kind, f.title] for f in block.folds
  ]
  place = [first + block.start, first + block.stop]
  return [*place, block.role, block.kind, block.title, folds]


def _versions(history: History) -> list[int]:
  return np.unique(history.version[history.multiplicity > 0]).tolist()


def _colours(history: History, trained: Trained | None) -> list[dict[str, Any]]:
  """The switch: what can be shown, with its legend."""
  versions = _versions(history)
  legend = [(f"v{i % _COLOURS}", str(v)) for i, v in enumerate(versions)]
  if len(versions) > 3 * _COLOURS:
    legend = [(f"v{i}", f"version {i} modulo 8 of them") for i in range(8)]
  why = "" if trained else "not trained on: there is no advantage"
  advantages = [*_ADVANTAGES, ("u", "sampled, not trained")]
  return [
    {"name": "logprob", "title": "", "known": True, "legend": _LOGPROBS},
    {
      "name": "advantage",
      "title": why,
      "known": trained is not None,
      "legend": advantages,
    },
    {"name": "version", "title": "", "known": True, "legend": legend},
  ]


def _branch(history: History, branch: Branch, pieces: Pieces) -> dict[str, Any]:
  reason = branch.reason
  words = tree_text.around(history, branch, pieces)
  return {
    "name": branch.name,
    "roles": ", ".join(branch.roles) or "no call",
    "parent": branch.parent,
    "depth": f"{branch.depth:,}",
    "kind": reason.kind if reason else "",
    "detail": reason.detail if reason else "",
    "behind": branch.behind,
    "heading": tree_text.heading(history, branch),
    "around": words and [w.replace("\n", "↵\n") for w in words],
  }


def _calls(history: History) -> list[dict[str, Any]]:
  of = {c: b.name for b in history.branches for c in b.calls}
  return [
    {
      "id": c.call_id,
      "role": c.role,
      "branch": of.get(i, ""),
      "prompt": f"{len(c.prompt_ids):,}",
      "sampled": f"{len(c.completion_ids):,}",
      "finish": c.finish_reason,
      "seconds": f"{max(c.t_end - c.t_start, 0):.2f}",
      "parent": c.parent_hint or "",
      "boundary": c.boundary,
    }
    for i, c in enumerate(history.execution.calls)
  ]


def render(
  history: History,
  pieces: Pieces | None = None,
  *,
  trained: Trained | None = None,
  lines_are_calls: bool = False,
) -> str:
  """Writes the page.

  Args:
    history: of the execution.
    pieces: reads ids; default shows their numbers.
    trained: what was trained of it; None where nothing was.
    lines_are_calls: all that the agent says is a command (the run's
      agent.tool_format is "line").

  Returns:
    The text of an HTML file.
  """
  pieces = pieces or Pieces()
  css, js = _part("tree.css"), _part("tree.js")
  data = _json(_data(history, pieces, trained, lines_are_calls))
  outcome = history.execution.outcome
  facts = tree_text.facts(history)
  if trained is not None:
    samples = f"{trained.samples} sample" + "s" * (trained.samples != 1)
    tokens = int(trained.mask.sum())
    words = f"step {trained.step}: {tokens:,} tokens in {samples}"
    facts.append(("trained", words))
  environment = jinja2.Environment(
    autoescape=True, undefined=jinja2.StrictUndefined
  )
  return environment.from_string(_part("tree.html")).render(
    title=history.execution.execution_id,
    policy="default-src 'none'; base-uri 'none'; form-action 'none'; "
    f"style-src {_hash(css)}; script-src {_hash(js)}",
    css=markupsafe.Markup(css),
    js=markupsafe.Markup(js),
    data=markupsafe.Markup(data),
    facts=facts,
    colours=_colours(history, trained),
    assertions=sorted(outcome.assertions.items()) if outcome else [],
    passed=f"{outcome.passed} of {outcome.total} hold" if outcome else "",
    calls=_calls(history),
    branches=[_branch(history, b, pieces) for b in history.branches],
    text=tree_text.render(history, pieces),
  )
