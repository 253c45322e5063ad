"""Executions whose histories part in every way that has a name."""

import dataclasses
import functools

import numpy as np

from gyre.analysis.pieces import Pieces
from gyre.harness import render
from gyre.types import Call, Execution, Outcome

MARKS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_TEXTS = (
  "You are an agent. You are a sub agent. List the files of the directory.",
  "<think>I should look at all of the files before anything else</think>",
  '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call>',
  "summary: the files notes.md and todo.txt were found and notes.md was read",
  "naïve café 漢字 🙂 rm -rf / && echo </script><!--",
)


@functools.cache
def tokenizer():
  """A byte-level tokenizer with the marks of gyre's own template."""
  return render.train_tokenizer(_TEXTS * 8, 420, list(MARKS))


@functools.cache
def pieces():
  """Reads its ids."""
  return Pieces(tokenizer())


def encode(text):
  """Ids of text; ids stay as they are."""
  if not isinstance(text, str):
    return list(text)
  return tokenizer().encode(text, add_special_tokens=False).ids


class Player:
  """Makes the calls of one execution, one after another."""

  def __init__(self):
    self.calls = []
    self._rng = np.random.default_rng(7)

  def call(
    self,
    prompt,
    said,
    role="main",
    *,
    parent=None,
    finish="stop",
    t=0,
    boundary="",
  ):
    """Adds a call; returns its prompt and completion, as ids."""
    prompt, said = encode(prompt), encode(said)
    n, i = len(said), len(self.calls)
    start = float(t or 10 * i)
    self.calls.append(
      Call(
        execution_id="train-0/0",
        group_id="train-0",
        call_id=f"{i:04d}",
        prompt_ids=prompt,
        completion_ids=said,
        logprobs=np.log(self._rng.uniform(0.02, 1, n)),
        versions=np.full(n, 3 + i // 3),
        finish_reason=finish,
        parent_hint=parent,
        role=role,
        t_start=start,
        t_end=start + 5,
        boundary=boundary,
      )
    )
    return prompt + said

  def execution(self, **more):
    """The execution of all calls so far."""
    outcome = Outcome(
      "scored",
      0.5,
      1,
      2,
      assertions={"copied <b>": True, "kept": False},
    )
    given = {"task_id": "copy-1", "outcome": outcome, "t_end": 60.5} | more
    return Execution(
      "train-0/0", "train-0", 0, calls=tuple(self.calls), **given
    )


HEAD = "<|system|>You are an agent.<|user|>List the files.<|assistant|>"
CALL = _TEXTS[2]
SUMMARY = _TEXTS[3] + "<|end|>"


def everything():
  """A main line with a retry, a compaction and a sub-agent; six calls."""
  play = Player()
  first = play.call(HEAD, f"<think>look</think>{CALL}<|end|>")
  listed = first + encode("<|tool|>notes.md café 🙂 </script><|assistant|>")
  second = play.call(listed, "cat notes.md<|end|>", parent="0000")
  play.call(listed, "cat todo.txt<|end|>", parent="0000")
  asked = second + encode("<|user|>Write a summary.<|assistant|>")
  play.call(asked, SUMMARY, "main_summary", parent="0001")
  play.call(
    "<|system|>You are a sub agent.<|user|>List.<|assistant|>",
    "done<|end|>",
    "sub_agent",
  )
  again = "<|system|>You are an agent.<|user|>"
  play.call(f"{again}{_TEXTS[3]}<|assistant|>", "rm notes.md<|end|>")
  return play.execution()


def long(tokens=100_000, turns=40):
  """One branch of so many tokens, most of them context."""
  play, rng = Player(), np.random.default_rng(3)
  words = encode(_TEXTS[0])
  share = tokens // turns
  ids = encode(HEAD)
  for _ in range(turns):
    ids = play.call(ids, f"{CALL}<|end|>")
    ids += encode("<|tool|>") + rng.choice(words, share - 60).tolist()
    ids += encode("<|assistant|>")
  ids = play.call(ids, "the needle is here<|end|>")
  return play.execution()


def renamed(execution, group, index):
  """The same execution under another group and index."""
  name = f"{group}/{index}"
  calls = tuple(
    dataclasses.replace(c, execution_id=name, group_id=group)
    for c in execution.calls
  )
  return dataclasses.replace(
    execution, execution_id=name, group_id=group, index=index, calls=calls
  )
