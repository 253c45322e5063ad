"""Branches cover the tree, and each has the reason that it was made with."""

import branching
import numpy as np
import pytest
from branching import CALL, HEAD, SUMMARY, Player, encode, pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.analysis import branches, reasons, tree_text
from gyre.analysis.runs import RunError
from gyre.types import Call, Execution


def _check_cover(execution):
  """Every call is found again on its branch and those it hangs from."""
  history = branches.history(execution)
  tokens = np.concatenate([b.tokens for b in history.branches])
  assert sorted(tokens.tolist()) == list(range(len(history.tree.ids)))
  assert len(history.branches) == len(history.tree.leaves())
  for i, call in enumerate(execution.calls):
    branch = next(b for b in history.branches if i in b.calls)
    parts, depth = [], len(call.prompt_ids) + len(call.completion_ids)
    while branch is not None:
      parts.append(branch.tokens[: depth - branch.depth])
      depth = branch.depth
      branch = history.branch(branch.parent) if branch.parent else None
    path = np.concatenate(parts[::-1])
    whole = np.concatenate([call.prompt_ids, call.completion_ids])
    np.testing.assert_array_equal(history.tree.ids[path], whole)
  times = np.zeros(len(history.tree.ids), int)
  for c in range(len(execution.calls)):
    times[history.tree.completion(c)] += 1
  np.testing.assert_array_equal(history.multiplicity, times)
  return history


@st.composite
def _executions(draw):
  """Up to eight calls whose prompts extend, cut or leave earlier ones."""
  ids = st.lists(st.integers(0, 3), min_size=1, max_size=5)
  calls, wholes = [], [[]]
  for i in range(draw(st.integers(1, 8))):
    base = draw(st.sampled_from(wholes))
    prompt = base[: draw(st.integers(0, len(base)))] + draw(ids)
    said = draw(ids)
    role = draw(st.sampled_from([*branches.ROLES, "other"]))
    finish = draw(st.sampled_from(["stop", "length"]))
    n = len(said)
    calls.append(
      Call(
        "e", "g", str(i), prompt, said, [-1.0] * n, [i] * n, finish, role=role
      )
    )
    wholes.append(prompt + said)
  return Execution("e", "g", 0, "t", calls=tuple(calls))


@settings(max_examples=150, deadline=None)
@given(_executions())
def test_branches_cover_every_tree_once(execution):
  history = _check_cover(execution)
  order = [b.name for b in history.branches]
  assert order == [branches.letters(i) for i in range(len(order))]
  leaving = [b for b in history.branches if b.reason is not None]
  assert len(leaving) == len(order) - 1
  for b in leaving:
    assert b.reason.kind in reasons.KINDS
    # A branch stands below the one that it leaves.
    assert not b.parent or order.index(b.parent) < order.index(b.name)
    older, newer = (execution.calls[i] for i in (b.older, b.newer))
    a, c = (
      [*x.prompt_ids.tolist(), *x.completion_ids.tolist()]
      for x in (older, newer)
    )
    assert b.older < b.newer
    assert a[: b.depth] == c[: b.depth]
    assert a[b.depth : b.depth + 1] != c[b.depth : b.depth + 1]
  assert tree_text.render(history).count("\n") > len(order)


def test_letters():
  assert [branches.letters(i) for i in (0, 25, 26, 51, 52, 702)] == (
    "A Z AA AZ BA AAA".split()
  )


def test_what_a_history_of_many_kinds_tells():
  history = _check_cover(branching.everything())
  found = {b.name: b for b in history.branches}
  assert found["A"].roles == ("main", "main_summary")
  assert found["A"].calls == (0, 1, 3)
  kinds = [(b.reason.kind, b.parent) for b in history.branches[1:]]
  assert kinds == [
    (reasons.RETRY, "A"),
    (reasons.SUB_AGENT, "A"),
    (reasons.COMPACTION, "A"),
  ]
  assert "from the summary of call 0003" in found["D"].reason.detail
  # "cat" of "cat notes.md" and of "cat todo.txt".
  assert (history.multiplicity == 2).sum() == len(encode("cat")) == 2


def _kind(play, name="B"):
  history = branches.history(play.execution(), pieces())
  return history.branch(name).reason.kind, history.branch(name)


def test_thinking_is_stripped_in_other_tokens_or_the_same():
  for kept in (CALL, "ls"):
    play = Player()
    play.call(HEAD, f"<think>Look at all files</think>{kept}<|end|>")
    play.call(HEAD + f"{kept}<|end|><|tool|>a<|assistant|>", "ok<|end|>")
    kind, branch = _kind(play)
    assert (kind, branch.behind) == (reasons.THINKING, False)
  # Nor is a tokenizer needed where the tokens are the same.
  assert branches.history(play.execution()).branches[1].reason.kind == kind
  # Two calls are on the later side now: it is the line, and what was
  # stripped was left behind.
  whole = play.calls[1].prompt_ids.tolist() + encode("ok<|end|><|tool|>")
  play.call(whole, "done<|end|>")
  kind, branch = _kind(play)
  assert (kind, branch.behind) == (reasons.THINKING, True)
  assert branch.calls == (0,)


def test_a_cut_turn_that_the_template_closed():
  play = Player()
  cut = play.call(HEAD, "I should look at all", finish="length")
  open_end = cut + encode("<|user|>go on<|assistant|>")
  play.call(cut + encode("<|end|><|user|>go on<|assistant|>"), "ok<|end|>")
  play.call(open_end, "ok<|end|>")
  assert _kind(play)[0] == reasons.LENGTH


def test_a_turn_s_end_that_the_template_writes_otherwise():
  play = Player()
  first = play.call(HEAD, f"{CALL}.\n<|end|>")
  prompt = first[:-2] + encode("<|end|><|tool|>a<|assistant|>")
  play.call(prompt, "ok<|end|>", parent="0000", boundary="normalized")
  kind, branch = _kind(play)
  assert kind == reasons.NORMALIZED
  assert "without its last 2 tokens" in branch.reason.detail


def test_the_same_text_in_other_tokens():
  play = Player()
  letters = [t for c in "look at all" for t in encode(c)]
  play.call(HEAD, [*letters, *encode("<|end|>")])
  prompt = HEAD + "look at all<|end|><|tool|>a<|assistant|>"
  assert encode("look at all") != letters
  play.call(prompt, "ok<|end|>")
  kind, branch = _kind(play)
  assert kind == reasons.RETOKENIZED
  assert "'l'" in branch.reason.detail


def test_an_edited_history():
  play = Player()
  play.call(HEAD, f"{CALL}<|end|>")
  play.call(
    HEAD.replace("files", "directory")
    + f"{CALL}<|end|><|tool|>found<|assistant|>",
    "ok<|end|>",
  )
  kind, branch = _kind(play)
  assert kind == reasons.EDITED
  assert "in place of" in branch.reason.detail


def test_a_part_of_the_history_dropped():
  play = Player()
  old = "<|user|>look at all of the files<|assistant|>ok<|end|>"
  kept = "<|user|>You are a sub agent. Read notes.md<|assistant|>"
  play.call("<|system|>You." + old + kept, "a<|end|>")
  play.call("<|system|>You." + kept, "b<|end|>")
  kind, branch = _kind(play)
  assert kind == reasons.DROPPED
  # "<|user|>" is common to both: the split lies behind it.
  assert f"leaves out {len(encode(old)):,} tokens" in branch.reason.detail


def test_calls_side_by_side_and_one_after_the_other():
  for times, wanted in (
    ((100, 200), reasons.OTHER_WAY),
    ((100, 102), reasons.PARALLEL),
  ):
    play = Player()
    first = play.call(HEAD, f"{CALL}<|end|>", t=1)
    for t, result in zip(times, ("café", "todo"), strict=True):
      more = encode(f"<|tool|>{result}<|assistant|>")
      play.call(first + more, "ok<|end|>", t=t)
    assert _kind(play)[0] == wanted


def test_a_summary_is_known_by_its_words_where_the_role_says_nothing():
  play = Player()
  first = play.call(HEAD, f"{CALL}<|end|>")
  play.call(first + encode("<|user|>Sum up.<|assistant|>"), SUMMARY)
  prompt = [*encode("<|system|>You are an agent.<|user|>So far: ")]
  prompt += encode(SUMMARY)[:-1] + encode("<|assistant|>")
  play.call(prompt, "rm notes.md<|end|>")
  kind, branch = _kind(play)
  assert kind == reasons.COMPACTION
  assert "what call 0001 wrote" in branch.reason.detail


def test_nothing_is_left_of_the_history():
  play = Player()
  play.call(HEAD, "ok<|end|>")
  play.call("<|user|>Read notes.md<|assistant|>", "ok<|end|>")
  kind, branch = _kind(play)
  assert (kind, branch.parent, branch.depth) == (reasons.NEW, "", 0)


def test_an_execution_without_calls():
  history = branches.history(Execution("e", "g", 0, "t"))
  assert history.branches == ()
  assert "calls: 0" in tree_text.render(history)


def test_calls_that_make_no_tree():
  call = Call("e", "g", "0", [1], [2], [0.0], [0], "stop")
  execution = Execution("e", "g", 0, "t", calls=(call, call))
  with pytest.raises(RunError, match="call 0 of execution e is there twice"):
    branches.history(execution)


def test_the_text_shows_both_sides_of_a_split():
  history = branches.history(branching.everything(), pieces())
  text = tree_text.render(history, pieces())
  assert "score 0.500 (1/2 assertions)" in text
  lines = text.splitlines()
  at = next(i for i, x in enumerate(lines) if " retry: " in x)
  assert lines[at - 1].startswith("├─ B [main] from A: ")
  assert lines[at + 1].endswith('cat"')
  assert 'older " notes.md<|end|>' in lines[at + 2]
  assert 'newer " todo.txt<|end|>' in lines[at + 3]
  # Without a tokenizer there is nothing to quote.
  assert '"' not in tree_text.render(branches.history(branching.everything()))
