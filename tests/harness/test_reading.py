"""A completion read token by token shows only what stays."""

import itertools

import hypothesis as hp
import hypothesis.strategies as st
import numpy as np
import proxying
import pytest

from gyre.harness import reading, tool_parsers, wire

TOOLS = (wire.Tool("shell"),)


def read(renderer, ids, **options):
  """Feeds ids; returns (reader, what was visible after each)."""
  reader = reading.Reader(
    renderer, tool_parsers.HERMES, **{"tools": TOOLS} | options
  )
  shown = []
  for i in ids:
    reader.feed(int(i))
    shown.append(reader.visible())
  return reader, shown


def finish(reader, ids, cut=False):
  ids = np.asarray(ids, np.int32)
  return reader.finish(ids, cut, lambda i: f"c{i}")


def test_half_a_character_is_not_shown(renderer):
  ids = renderer.encode("a∀é")
  assert len(ids) >= 5  # bytes
  reader, shown = read(renderer, ids)
  texts = list(dict.fromkeys(text for _, text in shown))
  assert texts == ["a", "a∀", "a∀é"]
  assert finish(reader, ids).text == "a∀é"


def test_bytes_that_are_no_character_do_not_hold_all_that_follows(renderer):
  broken = renderer.encode("∀")[:1]
  ids = broken * 20 + renderer.encode("and so on")
  reader, shown = read(renderer, ids)
  assert shown[-1][1].endswith("and so on")
  assert finish(reader, ids).text.startswith(shown[-1][1])


@pytest.mark.parametrize("pieces", [("STO", "P and"), ("S", "T", "O", "P")])
def test_a_stop_sequence_may_span_tokens(renderer, pieces):
  ids = [i for p in ("one ", *pieces) for i in renderer.encode(p)]
  reader, shown = read(renderer, [*ids, *ids], stop=("nix", "STOP"))
  assert reader.stop_sequence == "STOP"
  assert reader.text == "one "
  assert all(text in ("", "o", "on", "one") for _, text in shown)
  whole = renderer.decode(ids[: reader.stop_at])
  assert "STOP" in whole and "STOP" not in whole[:-5]
  assert finish(reader, ids[: reader.stop_at]).text == "one"


def test_the_first_of_several_stops_counts(renderer):
  reader, _ = read(renderer, renderer.encode("a b c"), stop=("c", "b", " b"))
  assert (reader.stop_sequence, reader.text) == (" b", "a")


def test_what_may_become_a_call_is_held(renderer):
  call = proxying.hermes("shell", "{}")
  ids = [*renderer.encode("Yes. " + call), renderer.end_id]
  reader, shown = read(renderer, ids)
  assert shown[-1][1] == "Yes."
  said = finish(reader, ids)
  assert said.text == "Yes."
  assert said.tool_calls == (wire.ToolCall("c0", "shell", "{}"),)
  # Without tools, or where calls are forbidden, it is text.
  for options in ({"tools": ()}, {"call_tools": False}):
    reader, shown = read(renderer, ids, **options)
    assert shown[-1][1].startswith("Yes. <tool_call>")
    assert finish(reader, ids).tool_calls == ()


def test_hidden_thinking_is_never_shown(renderer):
  ids = renderer.encode("<think>\nsecret\n</think>\n\nopen")
  for show in (False, True):
    reader, shown = read(renderer, ids, show_reasoning=show)
    said = finish(reader, ids)
    assert said.text == "open"
    assert said.reasoning == ("secret" if show else "")
    assert shown[-1] == (said.reasoning, "open")


@hp.given(
  seed=st.integers(0, 1 << 30),
  n=st.integers(0, 60),
  opened=st.booleans(),
  cut=st.booleans(),
  stop=st.sampled_from([(), ("e",), ("xyz", "\n")]),
)
def test_random_tokens_only_grow_into_the_whole(
  renderer, seed, n, opened, cut, stop
):
  ids = np.random.default_rng(seed).integers(0, renderer.vocab_size, n)
  reader, shown = read(renderer, ids, opened=opened, stop=stop)
  for before, after in itertools.pairwise(shown):
    assert after[0].startswith(before[0]) and after[1].startswith(before[1])
  said = finish(reader, ids[: reader.stop_at], cut)
  if shown:
    assert said.reasoning.startswith(shown[-1][0])
    assert said.text.startswith(shown[-1][1])


PIECES = ("a", " ", "\n", "é", "🙂", "ST", "OP", "STOP", "<", "tool_call>")
PIECES += ("<tool_call>", "</tool_call>", "<think>", "</think>", "{", "[")
PIECES += ("```json\n", '{"name": "f", "arguments": {}}', "<function=f>")
PIECES += ("</function>", "<parameter=a>", "</parameter>", "<|python_tag|>")


@hp.given(
  text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
  width=st.integers(1, 4),
  fmt=st.sampled_from(list(tool_parsers.FORMATS.values())),
  stop=st.sampled_from([(), ("STOP",), ("OP", "STOP"), ("é",), ("\n",)]),
  opened=st.booleans(),
)
@hp.example("STSTOP", 1, tool_parsers.HERMES, ("STOP",), False)
def test_what_looks_like_marks_and_stops_only_grows(
  renderer, text, width, fmt, stop, opened
):
  reader = reading.Reader(renderer, fmt, tools=TOOLS, stop=stop, opened=opened)
  ids, last = [], ("", "")
  cut = [text[i : i + width] for i in range(0, len(text), width)]
  for token in [i for part in cut for i in renderer.encode(part)]:
    ids.append(token)
    reader.feed(token)
    now = reader.visible()
    assert now[0].startswith(last[0]) and now[1].startswith(last[1])
    last = now
    if reader.stop_at is not None:
      break
  # The first stop text to be complete ends it, and none is left.
  assert (reader.stop_at is not None) == any(s in text for s in stop)
  assert not any(s in reader.text for s in stop)
  said = finish(reader, ids)
  assert said.reasoning.startswith(last[0]) and said.text.startswith(last[1])
