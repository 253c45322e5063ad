"""The ladder against trying every drop, and one case of each kind by hand."""

import dataclasses
from unittest import mock

import hypothesis as hp
import hypothesis.strategies as st
import pytest
import tokenizers

from gyre.trajectory import ladder


class Toy:
  """Words over a and b, the longest first; text and ids are one to one."""

  words = ("aab", "ab", "ba", "bb", "a", "b", "|", "é")

  def encode(self, text):
    out = []
    while text:
      word = next(w for w in self.words if text.startswith(w))
      out.append(self.words.index(word))
      text = text[len(word) :]
    return out

  def decode(self, ids):
    return "".join(self.words[i] for i in ids)


TOY = Toy()
_IDS = st.lists(st.integers(0, 6), max_size=7)


def tried(p, a, following, max_s, max_u):
  """(step, s, u) by the definition: every drop is tried."""
  if following[: len(p + a)] == p + a:
    return "strict", 0, 0
  goal = TOY.decode(following)
  if goal.startswith(TOY.decode(p + a)):
    return "retokenized", 0, 0
  begins = {len(TOY.decode(following[:k])) for k in range(len(following) + 1)}
  found = []
  for s in range(min(max_s, len(p)) + 1):
    for u in range(min(max_u, max(len(a) - 1, 0)) + 1):
      kept = TOY.decode(p[: len(p) - s] + a[: len(a) - u])
      if goal.startswith(kept) and len(kept) in begins:
        found.append((s + u, u, s))
  if not found:
    return "split", 0, 0
  _, u, s = min(found)
  return "normalized", s, u


@hp.settings(deadline=None, max_examples=400)
@hp.given(p=_IDS, a=_IDS, edit=st.data())
def test_the_first_step_that_holds_with_the_least_drop(p, a, edit):
  text = TOY.decode(p + a)
  # What follows is often near: the same text, cut and continued.
  cut = edit.draw(st.integers(0, len(text)))
  more = TOY.decode(edit.draw(_IDS))
  following = TOY.encode(text[:cut] + more)
  if edit.draw(st.booleans()):
    following = (p + a)[: edit.draw(st.integers(0, len(p + a)))] + following
  with (
    mock.patch.object(ladder, "MAX_PROMPT_DROP", 3),
    mock.patch.object(ladder, "MAX_SAMPLED_DROP", 2),
  ):
    repair = ladder.climb(p, a, following, TOY)
    got = repair.step, repair.prompt_drop, repair.sampled_drop
    assert got == tried(p, a, following, 3, 2)
  hp.event(repair.step)
  ids = repair.ids(p, a)
  # Whatever was decided, the next prompt has the text it should have, and
  # what is kept was not encoded again.
  assert TOY.decode(ids) == TOY.decode(following)
  if repair.step != "split":
    kept = p[: len(p) - repair.prompt_drop] + a[: len(a) - repair.sampled_drop]
    assert ids == kept + repair.suffix
  if repair.step in ("strict", "split"):
    assert ids == following


def ids(text):
  """One id a character or word: "ab ba" are two tokens."""
  return [i for part in text.split() for i in TOY.encode(part)]


CASES = {
  # name: (p, a, p', step, s, u, suffix)
  "strict": ("| a", "b |", "| a b | ba", "strict", 0, 0, "ba"),
  "nothing new": ("| a", "b |", "| a b |", "strict", 0, 0, ""),
  "the end is written otherwise": (
    *("| a", "b b |", "| a b b a", "normalized", 0, 1, "a"),
  ),
  "the prompt ends with what history omits": (
    *("| a |", "b b", "| a b b ba", "normalized", 1, 0, "ba"),
  ),
  "both": ("| a |", "b b |", "| a b b a", "normalized", 1, 1, "a"),
  "of two least drops the one that keeps what was sampled": (
    *("| é é", "é é", "| é é é |", "normalized", 1, 0, "|"),
  ),
  "other tokens": ("| a", "b a b |", "| a ba b | a", "retokenized", 0, 0, "a"),
  "a token lies across the end": (
    *("|", "b a", "| b aab", "retokenized", 0, 0, "ab"),
  ),
  "nothing sampled is left": ("| a", "b", "| a a", "split", 0, 0, "| a a"),
  "an edit at the start": ("| a", "b", "a a b", "split", 0, 0, "a a b"),
}


@pytest.mark.parametrize("case", CASES)
def test_cases(case):
  p, a, following, step, s, u, suffix = CASES[case]
  repair = ladder.climb(ids(p), ids(a), ids(following), TOY)
  assert dataclasses.astuple(repair) == (step, ids(suffix), s, u)


@pytest.mark.parametrize(
  "s,u,step",
  [
    (96, 16, "normalized"),
    (97, 0, "split"),
    (0, 17, "split"),
    (96, 0, "normalized"),
    (0, 16, "normalized"),
  ],
)
def test_the_limits_are_96_and_16(s, u, step):
  bar, a, e = TOY.encode("|") + TOY.encode("a") + TOY.encode("é")
  prompt, sampled = [bar, bar] + [a] * s, [e] * 3 + [bar] * u
  following = [bar, bar] + [e] * 3 + [a, e]
  repair = ladder.climb(prompt, sampled, following, TOY)
  assert repair.step == step
  if step == "normalized":
    assert (repair.prompt_drop, repair.sampled_drop) == (s, u)


class Bytes:
  """A tokenizer whose tokens may end inside a character."""

  def __init__(self):
    self._own = tokenizers.Tokenizer(tokenizers.models.BPE())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    self._own.pre_tokenizer = level
    self._own.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=300, initial_alphabet=sorted(level.alphabet())
    )
    self._own.train_from_iterator(["ab é∀ ab ∀ ∃"] * 3, trainer)

  def encode(self, text):
    return self._own.encode(text, add_special_tokens=False).ids

  def decode(self, ids):
    return self._own.decode(list(ids), skip_special_tokens=False)


BYTES = Bytes()


@hp.settings(deadline=None)
@hp.given(st.lists(st.integers(0, 255), max_size=8), st.text("aé∀∃\ufffd"))
def test_ends_cut_the_text_where_tokens_end(noise, text):
  for ids in (noise, BYTES.encode(text), [*noise, *BYTES.encode(text)]):
    whole = BYTES.decode(ids)
    ends = list(ladder.ends(ids, BYTES))
    assert len(ends) == len(ids)
    for k, end in enumerate(ends, 1):
      if end >= 0:
        assert whole[:end] == BYTES.decode(ids[:k])
        assert whole[end:] == BYTES.decode(ids[k:])
    assert not ends or ends[-1] == len(whole)
    if "\ufffd" not in whole:
      # Only tokens inside a character have no end.
      clean = [
        BYTES.decode(ids[:k])[-1] != "\ufffd" for k in range(1, len(ids))
      ]
      assert [end >= 0 for end in ends[:-1]] == clean


@hp.settings(deadline=None)
@hp.given(st.text("ab é∀", max_size=6), st.text("ab é∀", max_size=6), st.data())
def test_characters_of_several_tokens_are_kept_whole(before, said, data):
  """Byte by byte is no canonical split; a cut character is never kept."""
  p = BYTES.encode(before)
  a = [i for c in said for b in c.encode() for i in [_byte(b)]]
  cut = data.draw(st.integers(0, len(a)))
  after = data.draw(st.text("ab∀", max_size=3))
  kept = BYTES.decode(a[:cut]).rstrip("\ufffd")
  following = BYTES.encode(before + kept + after)
  repair = ladder.climb(p, a, following, BYTES)
  ids = repair.ids(p, a)
  assert BYTES.decode(ids) == before + kept + after
  hp.event(repair.step)


def _byte(b):
  """The token of one byte."""
  # GPT-2's alphabet: printable bytes are themselves, others come after 255.
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  letter = (
    chr(b)
    if b in plain
    else chr(256 + [i for i in range(256) if i not in plain].index(b))
  )
  return BYTES._own.token_to_id(letter)


def test_counts():
  got = ladder.counts(["", "strict", "split", "strict", "normalized"])
  assert got == {
    "tito/strict": 2,
    "tito/normalized": 1,
    "tito/retokenized": 0,
    "tito/split": 1,
  }
