"""Imported logs: steps, drift, masks and the audit."""

import dataclasses
import json

import hypothesis as hp
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers

from gyre.store.rollouts import RolloutStore
from gyre.trajectory import align, logs, select, tree


class Codec:
  """Byte-level BPE with two special tokens."""

  def __init__(self):
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.pre_tokenizer = level
    own.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=280,
      special_tokens=["<m>", "<e>"],
      initial_alphabet=sorted(level.alphabet()),
    )
    own.train_from_iterator(
      ["list the files in the directory done"] * 4, trainer
    )
    self._own = own

  def encode(self, text):
    return self._own.encode(text, add_special_tokens=False).ids

  def decode(self, ids):
    return self._own.decode([int(i) for i in ids], skip_special_tokens=False)


CODEC = Codec()
START, END = 0, 1


def turn(number, prompt, pieces, *, ended=True, role="main"):
  ids = [i for piece in pieces for i in CODEC.encode(piece)]
  ids += [END] * ended
  return align.Turn(
    call_id=f"{number:04d}",
    prompt=prompt,
    sampled=np.asarray(ids, np.int32),
    logprobs=-0.01 * np.arange(1, len(ids) + 1, dtype=np.float32) - number,
    versions=np.full(len(ids), number, np.int32),
    role=role,
  )


def aligned(turns, **kwargs):
  return align.align(
    turns,
    CODEC,
    execution_id="g/0",
    group_id="g",
    special_ids=kwargs.pop("special_ids", (START, END)),
    **kwargs,
  )


def chosen(calls, mode="multiplicity"):
  """All samples that the calls give; retries may sample the same tokens."""
  built = tree.build(calls)
  return select.select(
    built,
    execution_id="g/0",
    group_id="g",
    mode=mode,
    max_samples=None,
  ).samples


def check(alignment, turns, masked=()):
  """Every span that is not masked is in the loss bit for bit, no other is."""
  samples = chosen(alignment.calls)
  audit = align.audit(alignment.calls, samples)
  assert audit.drift_in_loss == 0
  trained = [t for t in turns if t.call_id not in masked]
  assert audit.sampled == audit.located == sum(len(t.sampled) for t in trained)
  # Sampled ids are never encoded again: a turn's ids stand in its call.
  for t, call in zip(turns, alignment.calls, strict=True):
    whole = np.concatenate([call.prompt_ids, call.completion_ids])
    assert whole[len(whole) - len(t.sampled) :].tolist() == t.sampled.tolist()
    assert bool(len(call.completion_ids)) == (t.call_id not in masked)
  return samples


P0 = "<m>user list<e><m>"

#: name: turns as (prompt, pieces), steps, masked turns.
CASES = {
  "a conversation": (
    [(P0, ["files"]), (P0 + "files<e><m>out<e><m>", ["done"])],
    ["", "strict"],
    [],
  ),
  "a split that is not canonical": (
    [
      (P0, ["fi", "l", "es in the dir", "ectory done, done, done, done"]),
      (
        P0 + "files in the directory done, done, done, done<e><m>out<e><m>",
        ["list"],
      ),
      (
        P0 + "files in the directory done, done, done, done<e><m>out<e><m>"
        "list<e><m>",
        ["done"],
      ),
    ],
    ["", "retokenized", "strict"],
    [1, 2],
  ),
  "an end that history writes otherwise": (
    [(P0, ["files", " "]), (P0 + "files<e><m>out<e><m>", ["done"])],
    ["", "normalized"],
    [1],
  ),
  "a prompt whose end history omits": (
    [
      (P0 + "<e>", ["files"]),
      (P0 + "files<e><m>out<e><m><e>", ["done"]),
    ],
    ["", "normalized"],
    [1],
  ),
  "an edited history": (
    [(P0, ["files"]), ("<m>user done<e><m>files<e><m>out<e><m>", ["done"])],
    ["", "split"],
    [],
  ),
  "what splits off after a repair is exact": (
    [
      (P0, ["f", "iles"]),
      (P0 + "files<e><m>out<e><m>", ["done"]),
      ("<m>summary: list<e><m>", ["the"]),
      ("<m>summary: list<e><m>the<e><m>", ["files"]),
    ],
    ["", "retokenized", "split", "strict"],
    [1],
  ),
  "a branch goes back to an earlier turn": (
    [
      (P0, ["files"]),
      (P0 + "files<e><m>out<e><m>", ["done"]),
      (P0 + "files<e><m>in<e><m>", ["the"]),
      (P0, ["directory"]),
      (P0 + "directory<e><m>out<e><m>", ["done"]),
      (P0 + "files<e><m>in<e><m>the<e><m>", ["list"]),
    ],
    ["", "strict", "strict", "split", "strict", "strict"],
    [],
  ),
  "of two retries the one that was taken up": (
    [
      (P0, ["done"]),
      (P0, ["f", "iles"]),
      (P0 + "files<e><m>out<e><m>", ["done"]),
    ],
    ["", "split", "retokenized"],
    [2],
  ),
}


@pytest.mark.parametrize("special_ids", [(START, END), ()])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_steps_and_masks(case, as_ids, special_ids):
  rows, steps, masked = CASES[case]
  turns = [
    turn(i, CODEC.encode(p) if as_ids else p, pieces)
    for i, (p, pieces) in enumerate(rows)
  ]
  masked = {f"{i:04d}" for i in masked}
  got = aligned(turns, special_ids=special_ids)
  assert [c.boundary for c in got.calls] == steps
  assert got.drifted == masked
  for step in ("strict", "normalized", "retokenized", "split"):
    assert got.stats[f"tito/{step}"] == steps.count(step)
  drift = sum(len(t.sampled) for t in turns if t.call_id in masked)
  assert got.stats["tito/context_drift"] == drift
  check(got, turns, masked)
  # Trained all the same when asked for; the count stays.
  kept = aligned(turns, special_ids=special_ids, mask_drift=False)
  assert kept.stats == got.stats and kept.drifted == masked
  check(kept, turns)
  # Text is never lost: each prompt reads as it was sent.
  for call, (prompt, _) in zip(kept.calls, rows, strict=True):
    assert CODEC.decode(call.prompt_ids) == prompt


def test_a_strict_turn_stands_after_the_sampled_ids_of_a_repaired_one():
  rows, _, _ = CASES["a split that is not canonical"]
  turns = [turn(i, p, pieces) for i, (p, pieces) in enumerate(rows)]
  calls = aligned(turns, mask_drift=False).calls
  whole = [[*c.prompt_ids.tolist(), *c.completion_ids.tolist()] for c in calls]
  assert whole[1][: len(whole[0])] == whole[0]
  assert whole[2][: len(whole[1])] == whole[1]
  assert whole[2][: len(whole[0])] != CODEC.encode(rows[2][0])[: len(whole[0])]
  assert [c.parent_hint for c in calls] == [None, "0000", "0001"]


LONG = "<m>" + "list the files in the directory é∀ " * 80


@pytest.mark.parametrize("special_ids", [(START, END), ()])
def test_a_long_prompt_in_other_tokens_is_the_same_text(special_ids):
  """Ids part at once, far from the end; the text does not."""
  single = [i for c in LONG[3:] for i in CODEC.encode(c)]
  first = turn(0, [START, *single, END, START], ["files"])
  second = turn(1, LONG + "<e><m>files<e><m>out<e><m>", ["done"])
  assert len(single) > 2 * len(CODEC.encode(LONG))
  got = aligned([first, second], special_ids=special_ids, mask_drift=False)
  assert got.calls[1].boundary == "retokenized"
  whole = [*first.prompt, *first.sampled]
  assert got.calls[1].prompt_ids[: len(whole)].tolist() == whole
  check(got, [first, second])


def test_long_prompts_of_other_texts_are_not_read_whole():
  read = []

  class Reads(Codec):
    def decode(self, ids):
      read.append(len(ids))
      return super().decode(ids)

  turns = [turn(0, LONG, ["x"]), turn(1, LONG.replace("list", "read"), ["y"])]
  got = align.align(turns, Reads(), execution_id="g/0", group_id="g")
  assert got.calls[1].boundary == "split"
  assert 0 < max(read) < len(CODEC.encode(LONG)) / 2


def test_the_audit_finds_every_kind_of_drift():
  rows, _, _ = CASES["a conversation"]
  turns = [turn(i, p, pieces) for i, (p, pieces) in enumerate(rows)]
  calls = aligned(turns).calls
  (sample,) = chosen(calls, mode="once")
  clean = align.audit(iter(calls), [sample])
  assert clean == align.Audit(clean.sampled, clean.sampled, 0)
  where = sample.trained

  def broken(**changes):
    return align.audit(calls, [dataclasses.replace(sample, **changes)])

  def without(keep):
    names = ("trained", "logprobs", "versions")
    return broken(**{name: getattr(sample, name)[keep] for name in names})

  # A context token that is trained, in place of the first sampled one.
  assert where[0] > 1
  moved = where.copy()
  moved[0] = 1
  assert broken(trained=moved).drift_in_loss == 1
  # A token, a logprob, a version that is another.
  ids = sample.ids.copy()
  ids[where[-1]] += 1
  assert broken(runs=(ids,)).drift_in_loss == 1
  logprobs = sample.logprobs.copy()
  logprobs[0] = np.nextafter(logprobs[0], np.float32(0))
  assert broken(logprobs=logprobs).drift_in_loss == 1
  versions = sample.versions.copy()
  versions[:2] += 1
  assert broken(versions=versions).drift_in_loss == 2
  # Another context: all that was sampled after it.
  ids = sample.ids.copy()
  ids[0] = END
  assert broken(runs=(ids,)).drift_in_loss == len(where)
  # What is left out of the mask is no drift, but it is not located.
  lost = without(slice(-2))
  assert lost.drift_in_loss == 0 and lost.located == clean.sampled - 2


@hp.settings(deadline=None, max_examples=60)
@hp.given(st.data())
def test_logs_of_one_policy_are_located_whole(data):
  """Random conversations, edited and branching, in random splits."""
  words = st.sampled_from(["files", " done", "the", " ", "é∀", "list"])
  histories, turns = [[P0]], []
  for number in range(data.draw(st.integers(1, 6))):
    prompt = "".join(data.draw(st.sampled_from(histories)))
    said = "".join(data.draw(st.lists(words, min_size=1, max_size=3)))
    pieces = list(said) if data.draw(st.booleans()) else [said]
    ended = data.draw(st.booleans())
    turns.append(turn(number, prompt, pieces, ended=ended))
    back = data.draw(st.sampled_from([said, said.strip(), said + "!", "x"]))
    histories.append([f"{prompt}{back}<e><m>out<e><m>"])
  got = aligned(turns)
  check(got, turns, got.drifted)
  check(aligned(turns, mask_drift=False), turns)
  for call in got.calls:
    hp.event(call.boundary)


def line(**changes):
  record = {
    "execution_id": "g/3",
    "prompt": P0,
    "completion": CODEC.encode("files<e>"),
    "logprobs": [-0.5] * len(CODEC.encode("files<e>")),
  }
  record.update(changes)
  return json.dumps({k: v for k, v in record.items() if v is not None})


def test_a_log_becomes_executions(tmp_path):
  later = dict(prompt=P0 + "files<e><m>out<e><m>", versions=4, t_end=9.5)
  lines = [
    line(task_id="shell/7", score=0.0, t_start=2.0),
    "\n",
    line(execution_id="other", prompt=CODEC.encode(P0), role="sub_agent"),
    line(**later, score=0.75, finish_reason="length", unknown=1),
  ]
  got = logs.import_log(lines, CODEC, special_ids=(START, END))
  first, other = got.executions
  assert (first.execution_id, first.group_id, first.index) == ("g/3", "g", 3)
  assert (first.task_id, first.turns, first.version) == ("shell/7", 2, 0)
  assert first.outcome.score == 0.75 and other.outcome is None
  assert (first.t_start, first.t_end) == (0.0, 9.5)
  a, b = first.calls
  assert (a.call_id, b.call_id, b.parent_hint) == ("0000", "0001", "0000")
  assert b.boundary == "strict" and b.finish_reason == "length"
  assert set(b.versions.tolist()) == {4}
  assert other.calls[0].prompt_ids.tolist() == a.prompt_ids.tolist()
  assert other.calls[0].role == "sub_agent"
  assert got.stats["tito/strict"] == 1 and got.stats["tito/split"] == 0
  with RolloutStore(tmp_path / "r.sqlite") as store:
    store.put_execution(first)
    back = store.execution("g/3")
  assert [c.boundary for c in back.calls] == ["", "strict"]


N = len(CODEC.encode("files<e>"))


@pytest.mark.parametrize(
  "bad,message",
  [
    ("{", "line 2"),
    ("[]", "not a JSON object"),
    (line(execution_id=None), "execution_id must be a text"),
    (line(prompt=None), "prompt must be a list of ids"),
    (line(prompt=""), "prompt is empty"),
    (line(completion="files"), "completion must be a list of ids"),
    (line(completion=[True]), "completion must be a list of ids"),
    (line(logprobs=[0.0]), "1 logprobs for"),
    (line(logprobs=None), "logprobs must be a list"),
    (line(versions=[1]), "1 versions for"),
    (line(logprobs=[float("nan")] * N), "logprobs must be a list of finite"),
    (line(logprobs=[10**400] * N), "logprobs must be a list of finite"),
    (line(versions=[1.5] * N), "versions must be a list"),
    (line(versions=2**40), "versions must be a list"),
    (line(t_end=float("inf")), "t_end must be a finite number"),
    (line(score=10**400), "score must be a finite number"),
    ("[" * 100_000, "line 2"),
    (line(finish_reason="eos"), "finish_reason 'eos'"),
    (line(score="good"), "score must be a finite number"),
    (line(call_id="0000"), "call 0000 of g/3 is there twice"),
  ],
)
def test_a_line_that_is_no_call_is_named(bad, message):
  with pytest.raises(logs.LogError, match=r"^line 2: [^\n]*$") as error:
    logs.import_log([line(), bad], CODEC)
  assert message in str(error.value)
