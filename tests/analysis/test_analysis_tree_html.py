"""The page holds all that is known of the tree, and asks for nothing else."""

import base64
import dataclasses
import hashlib
import html.parser
import itertools
import json
import re

import branching
import numpy as np
import pytest
from branching import pieces

from gyre.analysis import blocks, branches, training, tree_html
from gyre.trajectory import select
from gyre.types import Execution


class _Page(html.parser.HTMLParser):
  """Elements with their attributes, and the text inside each kind."""

  def __init__(self, text):
    super().__init__(convert_charrefs=True)
    self.elements, self.texts, self._open = [], {}, []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.elements.append((tag, dict(attrs)))
    if tag not in ("meta", "input"):
      self._open.append((tag, dict(attrs)))

  def handle_endtag(self, tag):
    assert self._open.pop()[0] == tag, f"</{tag}> ends another element"

  def handle_data(self, data):
    if self._open:
      tag, attrs = self._open[-1]
      key = (tag, attrs.get("id", attrs.get("class")))
      self.texts.setdefault(key, []).append(data)


def _made(execution=None, read=None):
  execution = execution or branching.everything()
  history = branches.history(execution, read or pieces())
  found = select.select(
    history.tree, execution_id="train-0/0", group_id="train-0", max_samples=1
  )
  trained = training.of_samples(
    history.tree, 4, [(s, 0.5) for s in found.samples]
  )
  text = tree_html.render(history, read or pieces(), trained=trained)
  page = _Page(text)
  data = json.loads("".join(page.texts["script", "data"]))
  return history, trained, text, page, data


def _spread(runs):
  return [
    v for v, n in zip(runs[::2], runs[1::2], strict=True) for _ in "x" * n
  ]


def test_every_call_can_be_read_from_the_page():
  history, trained, _, _, data = _made()
  branches_of = {b["name"]: b for b in data["branches"]}
  ids = [data["ids"][t] for t in data["tokens"]]
  texts = [data["vocab"][t] for t in data["tokens"]]
  by, times, versions, advantage = (
    _spread(data[k]) for k in ("call", "times", "version", "advantage")
  )
  logprobs = np.array(data["logprob"]) / 1000
  for i, call in enumerate(history.execution.calls):
    own = next(b for b in history.branches if i in b.calls)
    path, end = [], len(call.prompt_ids) + len(call.completion_ids)
    while True:
      shown = branches_of[own.name]
      path = [*range(shown["first"], shown["first"] + end - own.depth), *path]
      if not own.parent:
        break
      end, own = own.depth, history.branch(own.parent)
    whole = [*call.prompt_ids.tolist(), *call.completion_ids.tolist()]
    assert [ids[t] for t in path] == whole
    assert "".join(texts[t] for t in path) == pieces().text(whole)
    said = path[len(call.prompt_ids) :]
    for k, t in enumerate(said):
      if times[t] > 1:
        samples = {c: (p, v) for c, p, v in data["samples"][str(t)]}
        assert len(samples) == times[t]
        p, version = samples[i]
      else:
        assert by[t] == i and str(t) not in data["samples"]
        p, version = logprobs[t], versions[t]
      assert p == pytest.approx(float(call.logprobs[k]), abs=6e-4)
      assert version == call.versions[k]
  assert sum(a == "p1" for a in advantage) == trained.mask.sum()
  untrained = history.tree.trainable().sum() - trained.mask.sum()
  assert sum(a == "u" for a in advantage) == untrained > 0
  assert data["advantages"]["p1"] == "trained in step 4, advantage +0.5000"


def test_blocks_cover_each_branch_and_splits_lie_where_they_are():
  history, _, _, _, data = _made()
  at = {b.name: i for i, b in enumerate(history.branches)}
  for shown, b in zip(data["branches"], history.branches, strict=True):
    edges = [shown["first"]]
    for first, last, _, _, _, folds in shown["blocks"]:
      assert first == edges[-1] < last
      assert all(first <= f[0] < f[1] <= last for f in folds)
      edges.append(last)
    assert edges[-1] == shown["last"]
    assert shown["last"] - shown["first"] == len(b.tokens)
    if b.parent:
      parent = data["branches"][at[b.parent]]
      depth = shown["at"] - parent["first"] + parent["depth"]
      assert depth == b.depth and parent["first"] < shown["at"]


def test_the_page_needs_nothing_and_allows_nothing_else():
  _, _, text, page, _ = _made()
  attributes = [(t, k, v) for t, a in page.elements for k, v in a.items()]
  for tag, name, value in attributes:
    assert name not in ("src", "style", "srcset", "data", "action"), tag
    assert not name.startswith("on"), f"{tag} {name}"
    if name == "href":
      assert value.startswith("#")
  assert "@import" not in text and "url(" not in text
  assert not re.search(r"\b(https?|ws)://", text)
  assert not {t for t, _ in page.elements} & {"link", "iframe", "img", "object"}
  policy = next(
    a["content"]
    for t, a in page.elements
    if a.get("http-equiv") == "Content-Security-Policy"
  )
  rules = dict(r.strip().split(" ", 1) for r in policy.split(";"))
  assert rules["default-src"] == "'none'"

  def digest(kind):
    body = re.search(rf"<{kind}>(.*?)</{kind}>", text, re.S)[1]
    sum_ = hashlib.sha256(body.encode()).digest()
    return f"'sha256-{base64.b64encode(sum_).decode()}'"

  assert rules["style-src"] == digest("style")
  assert rules["script-src"] == digest("script")


def test_what_was_said_cannot_end_the_page():
  execution = branching.everything()
  history, _, text, page, data = _made(execution)
  assert text.count("</script>") == 2 and text.count("<script") == 2
  assert "</script>" in "".join(data["vocab"][t] for t in data["tokens"])
  assert ("li", None) in page.texts
  assert " copied <b>" in page.texts["li", None]
  assert [b.name for b in history.branches] == [
    a["id"].removeprefix("branch-") for t, a in page.elements if t == "section"
  ]
  why = [t for k, v in page.texts.items() for t in v if k == ("p", "why")]
  assert any("summary of call 0003" in t for t in why)


def test_ids_of_anchors_are_there_once():
  _, _, _, page, _ = _made()
  ids = [a["id"] for _, a in page.elements if "id" in a]
  assert len(ids) == len(set(ids))
  hrefs = {a["href"][1:] for _, a in page.elements if "href" in a}
  assert hrefs <= set(ids)


def test_tool_calls_and_thinking_are_folded():
  *_, data = _made()
  found = [
    (f[2], "".join(data["vocab"][t] for t in data["tokens"][f[0] : f[1]]))
    for b in data["branches"]
    for block in b["blocks"]
    for f in block[5]
  ]
  kinds = [kind for kind, _ in found]
  assert kinds == ["thinking", "tool call"]
  assert "look" in found[0][1]
  assert branching.CALL in found[1][1]
  kinds = [(b[2], b[3]) for b in data["branches"][0]["blocks"]]
  assert kinds[:5] == [
    ("system", "context"),
    ("user", "context"),
    ("assistant", "sampled"),
    ("tool", "tool result"),
    ("assistant", "sampled"),
  ]
  # A title is of its own message.
  assert data["branches"][0]["blocks"][3][4] == "notes.md café 🙂 </script>"


def test_a_line_is_a_call_where_the_run_says_so():
  mark = [False, False, True, False, False, True]
  sampled = np.array([0, 0, 0, 1, 1, 1], bool)
  text = ["<|user|>", "go", "<|assistant|>", "ls", " -l", "<|end|>"]
  mark[0] = True

  def cut(lines):
    found = blocks.cut(text, sampled, mark, lines_are_calls=lines)
    return [(b.start, b.stop, b.role) for b in found], found[-1].folds

  shape = [(0, 2, "user"), (2, 6, "assistant")]
  assert cut(False) == (shape, ())
  assert cut(True) == (shape, (blocks.Fold(3, 5, "tool call", "ls -l"),))


def test_without_a_tokenizer_sampling_alone_cuts_blocks():
  execution = branching.everything()
  history = branches.history(execution)
  data = json.loads(
    "".join(_Page(tree_html.render(history)).texts["script", "data"])
  )
  # Head, two calls, one result, a request, a summary.
  kinds = [b[3] for b in data["branches"][0]["blocks"]]
  assert kinds == ["context", "sampled"] * 3
  assert data["vocab"][0] == f"{data['ids'][0]} "
  assert all(b[5] == [] for x in data["branches"] for b in x["blocks"])


def test_an_execution_without_calls_has_a_page():
  history = branches.history(Execution("e", "g", 0, "t"))
  page = _Page(tree_html.render(history))
  assert "No call was recorded." in page.texts["p", None]


def test_logprobs_that_are_no_numbers_leave_a_page():
  execution = branching.everything()
  bad = itertools.cycle([float("nan"), float("-inf"), float("inf")])
  calls = [
    dataclasses.replace(c, logprobs=[next(bad) for _ in c.logprobs])
    for c in execution.calls
  ]
  execution = dataclasses.replace(execution, calls=tuple(calls))

  def refuse(word):
    raise ValueError(f"{word} is not JSON")

  page = _Page(tree_html.render(branches.history(execution)))
  text = "".join(page.texts["script", "data"])
  data = json.loads(text, parse_constant=refuse)
  assert len(data["logprob"]) == len(data["tokens"])
  assert min(data["logprob"]) == -1e7 and data["samples"]


def test_a_page_of_many_tokens_is_small():
  execution = branching.long(20_000, 20)
  history, _, text, _, data = _made(execution)
  assert len(data["tokens"]) == len(history.tree.ids) > 19_000
  assert len(text) < 12 * len(data["tokens"])


def _luminance(colour):
  channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
  linear = [
    c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
    for c in channels
  ]
  return np.dot([0.2126, 0.7152, 0.0722], linear)


def _contrast(a, b):
  low, high = sorted((_luminance(a), _luminance(b)))
  return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("side", [0, 1], ids=["light", "dark"])
def test_colours_can_be_read(side):
  """WCAG 2.2 AA: text 4.5 : 1 on every ground that it can have."""
  css = tree_html._part("tree.css")
  pairs = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", css)
  colour = {name: values[side] for name, *values in pairs}
  grounds = {n for n in colour if re.fullmatch(r"[lnpv]\d|z|hit", n)}
  assert len(grounds) == 20
  for ground in grounds | {"ground", "raised"}:
    assert _contrast(colour["text"], colour[ground]) >= 4.5, ground
  for ground in ("ground", "raised"):
    for ink in ("muted", "link"):
      assert _contrast(colour[ink], colour[ground]) >= 4.5, (ink, ground)
  # Neighbours of a legend differ by more than hue.
  for a, b in (("l0", "l2"), ("l2", "l4"), ("p1", "p2"), ("n1", "n2")):
    assert _contrast(colour[a], colour[b]) >= 1.2, (a, b)


def test_every_logprob_has_a_colour():
  assert list(tree_html.BOUNDS) == sorted(tree_html.BOUNDS, reverse=True)
  assert len(tree_html._LOGPROBS) == len(tree_html.BOUNDS) + 1
  for value, key in (
    (-2, "n2"),
    (-0.1, "n1"),
    (0, "z"),
    (0.2, "p1"),
    (1, "p2"),
  ):
    assert tree_html.advantage_class(value) == key
