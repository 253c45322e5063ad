"""Every family's template: a conversation extends its ids, or branches."""

import functools
import itertools
import json
import unicodedata

import families
import hypothesis as hp
import hypothesis.strategies as st
import numpy as np
import pytest

NAMES = tuple(families.FAMILIES)
TOOL = {
  "type": "function",
  "function": {"name": "shell", "parameters": {"type": "object"}},
}
renderer_of = functools.cache(families.renderer)

_TEXT = st.one_of(
  st.sampled_from(
    [
      "",
      "ls",
      " ls -l\n",
      "done",
      "a<|im_end|>b<｜User｜>",
      "é∀\u200b",
      "e\u0301",
    ]
  ),
  st.text(max_size=12),
)
_ARGUMENTS = st.fixed_dictionaries(
  {"command": _TEXT}, optional={"all": st.booleans(), "n": st.integers(0, 9)}
)
_CALLS = st.lists(_ARGUMENTS, min_size=1, max_size=2)
_NEW = st.one_of(
  st.lists(_TEXT, min_size=1, max_size=2).map(
    lambda texts: [{"role": "tool", "content": t} for t in texts]
  ),
  _TEXT.map(lambda t: [{"role": "user", "content": t}]),
)


@st.composite
def turns(draw, name):
  """(text sampled, the message sent back, how it ended, new messages)."""
  family = families.FAMILIES[name]
  text = draw(_TEXT)
  if draw(st.booleans()):
    text = f"<think>\n{draw(_TEXT)}\n</think>\n\n{text}"
  said = family.opens + text
  message = {"role": "assistant", "content": said}
  if family.write_call and draw(st.booleans()):
    calls = draw(_CALLS)[: 1 if name == "llama3" else 2]
    written = [family.write_call("shell", c) for c in calls]
    if draw(st.booleans()):  # spelled as the model likes
      written = [w.replace(": ", ":") for w in written]
    said = family.opens + "\n".join(written)
    message = {"role": "assistant", "content": said}
    if draw(st.booleans()):  # written again by the template
      functions = [{"name": "shell", "arguments": c} for c in calls]
      message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": f} for f in functions],
      }
  ending = draw(st.sampled_from((*family.stops, "")))
  return said, message, ending, draw(_NEW)


def sample(renderer, said, ending, draw):
  """Ids of `said` in pieces of any length: not what `encode` would give."""
  cuts = {
    draw(st.integers(0, len(said))) for _ in range(draw(st.integers(0, 4)))
  }
  if draw(st.booleans()):
    cuts = set(range(len(said)))
  bounds = sorted({0, len(said)} | cuts)
  raw = draw(st.sampled_from((True, False, False, False)))
  said = [said[a:b] for a, b in itertools.pairwise(bounds)]
  spelled = [c if raw else renderer.neutral(c) for c in said]
  ids = [i for piece in spelled for i in renderer.encode(piece)]
  # A stop in the middle would have ended the turn there.
  stop = next((k for k, i in enumerate(ids) if i in renderer.stop_ids), None)
  if stop is not None:
    return ids[: stop + 1]
  if ending:
    ids.append(renderer.tokenizer.token_to_id(ending))
  elif ids and draw(st.booleans()):
    ids = ids[: draw(st.integers(1, len(ids)))]  # cut by a limit
  return ids


def hides_special(renderer, ids):
  """Whether a special token is spelled in ordinary ones, as policies may."""
  read = renderer.encode(renderer.decode(ids))
  return sum(i in renderer.special_ids for i in ids) != sum(
    i in renderer.special_ids for i in read
  )


def composed(text):
  return unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("name", NAMES)
@hp.settings(
  deadline=None, max_examples=60, suppress_health_check=list(hp.HealthCheck)
)
@hp.given(data=st.data())
def test_extending_a_conversation_extends_its_ids_or_branches(name, data):
  renderer, draw = renderer_of(name), data.draw
  tools = [TOOL] if draw(st.booleans()) else None
  messages = [{"role": "system", "content": "be brief"}]
  messages = messages if draw(st.booleans()) else []
  messages.append({"role": "user", "content": draw(_TEXT)})
  prompt = renderer.render(messages, tools=tools)
  text = renderer.text(messages, tools=tools)
  for _ in range(draw(st.integers(1, 4))):
    said, message, ending, new = draw(turns(name))
    sampled = sample(renderer, said, ending, draw)
    if "tool_calls" not in message:
      content = renderer.completion_text(sampled)
      message = {"role": "assistant", "content": content}
    before = [*messages, message]
    following = renderer.next_prompt(
      prompt, sampled, [*before, *new], prompt_text=text, tools=tools
    )
    hp.event(f"{name}: {following.step}")
    # Known text saves work and changes nothing.
    again = renderer.next_prompt(prompt, sampled, [*before, *new], tools=tools)
    assert again.extends == following.extends
    if again.extends or not hides_special(renderer, [*prompt, *sampled]):
      np.testing.assert_array_equal(again.ids, following.ids)
    # The text is what the template writes.
    ids = following.ids.tolist()
    written = [
      renderer.text([*before, *new], tools=tools, as_sampled=a)
      for a in (True, False)
    ]
    assert following.text in written
    assert composed(renderer.decode(ids)) == composed(following.text)
    # And every sampled id stands, except what is said to be dropped.
    whole = [*prompt, *sampled]
    s, u = following.prompt_drop, following.sampled_drop
    if following.extends:
      assert s == u == 0 and ids[: len(whole)] == whole
    elif following.step == "normalized":
      kept = [*prompt[: len(prompt) - s], *sampled[: len(sampled) - u]]
      assert ids[: len(kept)] == kept
      assert s + u > 0 and s <= 96 and u <= 16 and u < max(len(sampled), 1)
    if not following.extends:
      # A branch is opened only where the text does not stand, or is not as
      # the tokenizer would have it.
      said = renderer.decode(whole)
      plain = not families.FAMILIES[name].normalizer or said == composed(said)
      assert not (plain and any(w.startswith(said) for w in written))
    bridge = renderer.bridge(whole, before, new, tools)
    expected = ids[len(whole) :] if following.extends else None
    assert bridge == expected or (
      # A sampled generation prompt hides where the completion began.
      bridge is None and set(sampled[:-1]) & renderer.special_ids
    )
    messages, prompt, text = [*before, *new], ids, following.text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("end", ["\uff5c", "\uf8ff", "\u4e00", "\U0001f642"])
@pytest.mark.parametrize("bytes_left_out", [1, 2])
def test_a_turn_cut_inside_a_character(name, end, bytes_left_out):
  """Known text changes nothing; the decoder's word is not taken for more.

  Its bytes (EF BF BD) begin as those of some characters that may be cut.
  """
  renderer = renderer_of(name)
  messages = [{"role": "user", "content": "go"}]
  prompt, text = renderer.render(messages), renderer.text(messages)
  # A first turn in other tokens than the text's, so that nothing is strict.
  for said, cut in (("on it", 0), ("yes" + end, bytes_left_out)):
    sampled = [i for c in said for i in renderer.encode(c)]
    if cut:
      sampled = sampled[:-cut]
    content = renderer.completion_text(sampled)
    before = [*messages, {"role": "assistant", "content": content}]
    messages = [*before, {"role": "user", "content": "go on"}]
    known, found = (
      renderer.next_prompt(prompt, sampled, messages, prompt_text=t)
      for t in (text, None)
    )
    np.testing.assert_array_equal(found.ids, known.ids)
    assert renderer.decode(known.ids) == known.text
    if known.extends:
      n = len(prompt) + len(sampled)
      assert known.ids[:n].tolist() == [*prompt, *sampled]
      # The next token does not finish the character.
      after = renderer.decode(known.ids[n:])
      assert not after.startswith("\N{REPLACEMENT CHARACTER}")
    prompt, text = known.ids.tolist(), known.text


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sampled_as_it_is_encoded_is_strict(name):
  """Prompts that go on are then those of a new rendering, turn by turn."""
  renderer, family = renderer_of(name), families.FAMILIES[name]
  messages = [{"role": "user", "content": "list the files"}]
  ids = renderer.render(messages, tools=[TOOL])
  texts = ["ls -l", "it is done"]
  if family.write_call:
    texts.append(
      family.write_call("shell", {"command": "cat the file"}).strip()
    )
  steps = []
  for text in texts:
    said = family.opens + text
    end = "<|observation|>" if name == "glm" else family.end
    sampled = [*renderer.encode(said), renderer.tokenizer.token_to_id(end)]
    messages += [
      {"role": "assistant", "content": said},
      {"role": "tool", "content": "the directory"},
    ]
    following = renderer.next_prompt(ids, sampled, messages, tools=[TOOL])
    steps.append(following.step)
    ids = following.ids.tolist()
    assert ids == renderer.encode(following.text)
  # Prompts that end in thinking which history omits are repaired each time.
  opens = name in ("qwen3_off", "deepseek_r1")
  assert steps[0] == "normalized" if opens else set(steps) == {"strict"}


def go_on(name, said, new, *, ending=None, history=(), content=None, **kwargs):
  """One turn of a family: (call's ids, what follows)."""
  renderer, family = renderer_of(name), families.FAMILIES[name]
  history = [*history, {"role": "user", "content": "list the files"}]
  prompt = renderer.render(history)
  ids = [i for piece in said for i in renderer.encode(piece)]
  ending = family.end if ending is None else ending
  if ending:
    ids.append(renderer.tokenizer.token_to_id(ending))
  message = {"role": "assistant", "content": renderer.completion_text(ids)}
  message.update(content or {})
  following = renderer.next_prompt(
    prompt, ids, [*kwargs.get("sent", history), message, *new]
  )
  return renderer, prompt, ids, following


USER = [{"role": "user", "content": "and the directory"}]
RESULT = [{"role": "tool", "content": "out"}]
THINKS = ["<think>\nso\n</think>\n\n", "ls -l the files"]
CALL = {"command": "ls -l", "all": True}
FUNCTION = {
  "type": "function",
  "function": {"name": "shell", "arguments": CALL},
}
STRUCTURED = {"content": "", "tool_calls": [FUNCTION]}
COMPACT = json.dumps(
  {"name": "shell", "arguments": CALL}, separators=(",", ":")
)

#: name, sampled pieces, new messages, options, step, (s, u).
CASES = {
  "canonical": ("smollm2", ["ls -l"], RESULT, {}, "strict", (0, 0)),
  "a split that is not canonical": (
    *("smollm2", ["l", "s the f", "iles"], RESULT, {}, "retokenized", (0, 0)),
  ),
  "thinking kept before a result": (
    *("qwen3", THINKS, RESULT, {}, "strict", (0, 0)),
  ),
  "thinking stripped before a question": (
    *("qwen3", THINKS, USER, {}, "split", (0, 0)),
  ),
  "thinking never stripped": (
    *("qwen3_kept", THINKS, USER, {}, "strict", (0, 0)),
  ),
  "an empty block of the prompt left out of history": (
    *("qwen3_off", ["ls -l"], USER, {}, "normalized", (6, 0)),
  ),
  "thinking that the prompt opens stripped": (
    *("deepseek_r1", ["so</think>ls"], USER, {}, "split", (0, 0)),
  ),
  "tool JSON as the template writes it": (
    "qwen2.5",
    [families.FAMILIES["qwen2.5"].write_call("shell", CALL)],
    RESULT,
    {"content": STRUCTURED},
    "strict",
    (0, 0),
  ),
  "tool JSON written anew": (
    "qwen2.5",
    [f"<tool_call>\n{COMPACT}\n</tool_call>"],
    RESULT,
    {"content": STRUCTURED},
    "split",
    (0, 0),
  ),
  "tool JSON restored": (
    "qwen2.5",
    [f"<tool_call>\n{COMPACT}\n</tool_call>"],
    RESULT,
    {},
    "strict",
    (0, 0),
  ),
  "special tokens of a call": (
    "deepseek",
    [families.FAMILIES["deepseek"].write_call("shell", CALL)],
    RESULT,
    {},
    "strict",
    (0, 0),
  ),
  "a newline after the end token": (
    *("smollm2", ["ls"], USER, {}, "strict", (0, 0)),
  ),
  "no newline after the end token": (
    *("llama3", ["ls"], USER, {}, "strict", (0, 0)),
  ),
  "another end token": (
    "smollm2",
    ["ls -l"],
    USER,
    {"ending": "<|endoftext|>"},
    "normalized",
    (0, 1),
  ),
  "the next role's token as the end": (
    *("glm", ["\nls"], RESULT, {"ending": "<|observation|>"}, "strict", (0, 0)),
  ),
  "another role's token as the end": (
    *("glm", ["\nls"], RESULT, {"ending": "<|user|>"}, "normalized", (0, 1)),
  ),
  "a truncated turn": (
    *("smollm2", ["ls -l the fi"], USER, {"ending": ""}, "strict", (0, 0)),
  ),
  "a turn cut inside a character": (
    *(
      "smollm2",
      ["done \u2200"],
      USER,
      {"ending": "cut"},
      "retokenized",
      (0, 0),
    ),
  ),
  "an end that is trimmed": (
    *("llama3", ["ls -l", "\n"], USER, {}, "normalized", (0, 2)),
  ),
  "a start that is trimmed": (
    *("llama3", [" ", "ls -l"], USER, {}, "split", (0, 0)),
  ),
  "a default system prompt": (
    *("qwen2.5", ["ls"], USER, {}, "strict", (0, 0)),
  ),
  "a default system prompt replaced": (
    "qwen2.5",
    ["ls"],
    USER,
    {
      "sent": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "list the files"},
      ]
    },
    "split",
    (0, 0),
  ),
  "an edited question": (
    "smollm2",
    ["ls"],
    USER,
    {"sent": [{"role": "user", "content": "list no files"}]},
    "split",
    (0, 0),
  ),
  "an edited answer": (
    *("smollm2", ["ls -l"], USER, {"content": {"content": "cat"}}),
    *("split", (0, 0)),
  ),
  "an answer whose end is edited": (
    *("smollm2", ["ls", " -", "l"], USER, {"content": {"content": "ls -a"}}),
    *("normalized", (0, 2)),
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_of_boundary_has_its_step(case):
  name, said, new, options, step, drops = CASES[case]
  if options.get("ending") == "cut":
    # The last character's first byte only, as a limit would leave it.
    renderer = renderer_of(name)
    prompt = renderer.render([USER[0]])
    sampled = [i for piece in said for i in renderer.encode(piece)][:-1]
    content = renderer.completion_text(sampled)
    assert content.endswith("\ufffd")
    messages = [USER[0], {"role": "assistant", "content": content}, *new]
    following = renderer.next_prompt(prompt, sampled, messages)
  else:
    renderer, prompt, sampled, following = go_on(name, said, new, **options)
  assert following.step == step
  assert (following.prompt_drop, following.sampled_drop) == drops
  whole, ids = [*prompt, *sampled], following.ids.tolist()
  assert (ids[: len(whole)] == whole) == (step in ("strict", "retokenized"))
  if step in ("strict", "split"):
    assert ids == renderer.encode(following.text)
  if "cut" not in options.values():
    assert renderer.decode(ids) == following.text


def test_a_split_keeps_what_stands_before_it():
  """Turns before the edit keep their ids, canonical or not."""
  renderer = renderer_of("smollm2")
  messages = [{"role": "user", "content": "list"}]
  prompt = np.asarray(renderer.render(messages))
  end = renderer.end_id
  for pieces in (["l", "s"], ["sh", "ell"]):
    sampled = [*(i for p in pieces for i in renderer.encode(p)), end]
    said = {"role": "assistant", "content": "".join(pieces)}
    messages += [said, {"role": "tool", "content": "out"}]
    last = prompt
    following = renderer.next_prompt(prompt, sampled, messages)
    assert following.step == "retokenized"
    prompt = following.ids
  edited = [*messages[:-2], {"role": "user", "content": "no"}]
  branch = renderer.next_prompt(last, sampled, edited)
  assert branch.step == "split"
  assert renderer.decode(branch.ids) == renderer.text(edited)
  first = [*renderer.encode("l"), *renderer.encode("s")]
  at = len(renderer.render(messages[:1]))
  assert branch.ids[at : at + len(first)].tolist() == first
  assert len(renderer.encode("ls")) < len(first)
