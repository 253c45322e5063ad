"""Messages <-> token ids, append-only.

A conversation is rendered once, by the model's chat template; from then on it
only grows: the ids of the next prompt are those of the last one, the ids that
were sampled, and the encoding of what the template writes after the sampled
message. Sampled tokens are never decoded and encoded again while their text
stands, so every token is trained under exactly the context it was sampled in.

Templates that rewrite what came before (thinking stripped from earlier turns,
for one) do not allow that. The ladder of trajectory/ladder.py then decides,
before sampling, what is kept; whatever it says, the next prompt has the text
that the template writes for the conversation.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
import tokenizers

from gyre.harness import templates
from gyre.trajectory import ladder
from gyre.types import Boundary

Message = Mapping[str, Any]

# Stands in for the sampled message where the template's own words after it
# are wanted. No template trims it and no tokenizer sees it.
_MARK = "\x02gyre\x03"


# What a template's expressions raise over messages that they do not expect.
_FAILURES = (
  jinja2.TemplateError,
  ArithmeticError,
  AttributeError,
  LookupError,
  RecursionError,
  TypeError,
  ValueError,
)


class TemplateError(ValueError):
  """The chat template refused the messages, or cannot be compiled."""


class _Generation(jinja2.ext.Extension):
  """{% generation %} … {% endgeneration %}: marks what a model wrote.

  Templates of Hugging Face models use it to build training masks; here masks
  come from what was sampled, so that the body is all that is kept.
  """

  tags = {"generation"}  # noqa: RUF012 (jinja2's own protocol)

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(x: Any, indent: int | None = None, **kwargs: Any) -> str:
  # jinja2's own filter escapes <, > and & for HTML.
  kwargs.setdefault("ensure_ascii", False)
  return json.dumps(x, indent=indent, **kwargs)


def _raise(message: str) -> None:
  raise TemplateError(f"the chat template refused the messages: {message}")


def compile_template(
  text: str, now: datetime.datetime | None = None
) -> jinja2.Template:
  """Compiles a Hugging Face chat template in a sandboxed environment.

  Args:
    text: jinja2 source. `raise_exception`, `strftime_now`, `tojson`,
      `break`, `continue` and `{% generation %}` are available.
    now: what strftime_now tells; fixed here, so that a conversation that
      lasts over midnight keeps its history. Default: the epoch.

  Raises:
    TemplateError: a syntax error, with its line.
  """
  moment = now or datetime.datetime(1970, 1, 1)
  env = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[jinja2.ext.loopcontrols, _Generation],
  )
  env.filters["tojson"] = _tojson
  env.globals["raise_exception"] = _raise
  env.globals["strftime_now"] = moment.strftime
  try:
    return env.from_string(text)
  except jinja2.TemplateSyntaxError as e:
    raise TemplateError(f"chat template, line {e.lineno}: {e}") from None


@dataclasses.dataclass(frozen=True, eq=False)
class NextPrompt:
  """The prompt that goes on from a call.

  Attributes:
    ids: int32 [P], the whole prompt.
    step: of the ladder.
    text: what the template wrote, of which `ids` are the tokens.
    prompt_drop, sampled_drop: tokens at the ends of the call's prompt and of
      its completion that are not in `ids` (normalized only).
  """

  ids: np.ndarray
  step: Boundary
  text: str
  prompt_drop: int = 0
  sampled_drop: int = 0

  @property
  def extends(self) -> bool:
    """Whether the call's prompt and completion are a prefix of `ids`."""
    return self.step in ("strict", "retokenized")


class Renderer:
  """A tokenizer and a chat template.

  Attributes:
    tokenizer: the `tokenizers.Tokenizer`.
    chat_template: jinja2 source.
    stop_ids: ids that end a model's turn, sorted.
    vocab_size: rows that an embedding needs: the largest id plus one.
  """

  def __init__(
    self,
    tokenizer: tokenizers.Tokenizer,
    chat_template: str,
    *,
    stop_tokens: Sequence[str] = (),
    stop_ids: Sequence[int] = (),
    bos_token: str = "",
    eos_token: str = "",
    template_args: Mapping[str, Any] | None = None,
    now: datetime.datetime | None = None,
  ):
    """Checks that everything named exists.

    Args:
      tokenizer: encodes without adding tokens of its own.
      chat_template: jinja2 source, as in Hugging Face models.
      stop_tokens: tokens that end a turn, by their text.
      stop_ids: the same by their ids; the union is used.
      bos_token, eos_token: handed to the template; eos_token ends a turn too.
      template_args: more variables of the template (enable_thinking=False).
      now: see compile_template.

    Raises:
      ValueError: a stop token is not in the vocabulary, or there is none.
      TemplateError: the template does not compile.
    """
    self.tokenizer = tokenizer
    self.chat_template = chat_template
    self._template = compile_template(chat_template, now)
    self._args = {
      **(template_args or {}),
      "bos_token": bos_token,
      "eos_token": eos_token,
    }
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    self.vocab_size = max(vocab.values(), default=-1) + 1
    stops = {int(i) for i in stop_ids}
    for token in (*stop_tokens, *([eos_token] if eos_token else [])):
      if token not in vocab:
        raise ValueError(f"stop token {token!r} is not in the vocabulary")
      stops.add(vocab[token])
    if not stops or not all(0 <= i < self.vocab_size for i in stops):
      raise ValueError(
        f"stop ids {sorted(stops)} must name tokens below {self.vocab_size}"
      )
    self.stop_ids = tuple(sorted(stops))
    added = tokenizer.get_added_tokens_decoder()
    self._special_text = {i: t.content for i, t in added.items() if t.special}
    self._special = tuple(sorted(self._special_text.values(), key=len))[::-1]

  @classmethod
  def from_directory(
    cls, path: str, *, chat_template: str = "", **kwargs: Any
  ) -> Renderer:
    """Reads a Hugging Face directory.

    tokenizer.json, tokenizer_config.json, chat_template.jinja and
    generation_config.json; the last two are optional.

    Args:
      path: the directory.
      chat_template: replaces the model's own.
      **kwargs: as for the constructor.

    Raises:
      ValueError: a file is missing or no chat template is found.
    """
    root = pathlib.Path(path)
    if not (root / "tokenizer.json").is_file():
      raise ValueError(f"{root}: no tokenizer.json")

    def read(name: str) -> dict[str, Any]:
      file = root / name
      return json.loads(file.read_text()) if file.is_file() else {}

    config = read("tokenizer_config.json")
    own = config.get("chat_template") or ""
    if (root / "chat_template.jinja").is_file():
      own = (root / "chat_template.jinja").read_text()
    if isinstance(own, list):
      own = next((t["template"] for t in own if t["name"] == "default"), "")
    if not (chat_template or own):
      raise ValueError(f"{root}: no chat template; give one")
    eos = read("generation_config.json").get("eos_token_id", [])

    def token(name: str) -> str:
      value = config.get(name) or ""
      return value["content"] if isinstance(value, dict) else value

    kwargs.setdefault("bos_token", token("bos_token"))
    kwargs.setdefault("eos_token", token("eos_token"))
    kwargs.setdefault("stop_ids", eos if isinstance(eos, list) else [eos])
    return cls(
      tokenizers.Tokenizer.from_file(str(root / "tokenizer.json")),
      chat_template or own,
      **kwargs,
    )

  @functools.cached_property
  def end_id(self) -> int:
    """The stop id that the template writes after a message of the model."""
    said = [{"role": "user", "content": "a"}]
    said.append({"role": "assistant", "content": _MARK})
    rest = self.encode(self.text(said, False).partition(_MARK)[2])
    return rest[0] if rest and rest[0] in self.stop_ids else self.stop_ids[0]

  @functools.cached_property
  def special_ids(self) -> frozenset[int]:
    """Ids of the special tokens: text can always be cut before one."""
    return frozenset(self._special_text)

  def neutral(self, text: str) -> str:
    """`text` in which no special token can be read.

    A tool's output may hold "<|im_end|>"; a space after its first character
    keeps it from ending the message.
    """
    for token in self._special:
      if token in text:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text

  def _clean(self, value: Any) -> Any:
    if isinstance(value, str):
      return self.neutral(value)
    if isinstance(value, Mapping):
      return {k: self._clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
      return [self._clean(v) for v in value]
    return value

  def text(
    self,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    as_sampled: bool = False,
  ) -> str:
    """What the template writes for `messages`.

    Args:
      messages: the conversation.
      add_generation_prompt: whether the model is to speak next.
      tools: descriptions for the template.
      as_sampled: leaves special tokens in the assistant's messages: what was
        sampled may hold them (a call of a tool, in some families).

    Raises:
      TemplateError: the template refused them.
    """
    try:
      return self._template.render(
        messages=[
          m if as_sampled and m.get("role") == "assistant" else self._clean(m)
          for m in messages
        ],
        tools=list(tools) if tools else None,
        add_generation_prompt=add_generation_prompt,
        **self._args,
      )
    except TemplateError:
      raise
    except _FAILURES as e:
      raise TemplateError(f"the chat template failed: {e}") from e

  def encode(self, text: str) -> list[int]:
    """Ids of `text`, special tokens in it recognised, none added."""
    return self.tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`, special tokens included."""
    return self.tokenizer.decode(
      [int(i) for i in ids], skip_special_tokens=False
    )

  def completion_text(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of a completion without the stop token that ended it."""
    ids = list(ids)
    if ids and int(ids[-1]) in self.stop_ids:
      ids.pop()
    return self.decode(ids)

  def render(
    self,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
  ) -> list[int]:
    """Ids of a whole conversation, ready to be continued.

    Raises:
      TemplateError: the template refused the messages.
    """
    return self.encode(self.text(messages, add_generation_prompt, tools))

  def next_prompt(
    self,
    prompt_ids: Sequence[int] | np.ndarray,
    sampled_ids: Sequence[int] | np.ndarray,
    messages: Sequence[Message],
    *,
    prompt_text: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
  ) -> NextPrompt:
    """The prompt of a conversation that may go on from a call.

    Its text is what the template writes for `messages`; as many tokens of the
    call are kept as the ladder allows, and what they leave is encoded.

    Args:
      prompt_ids: of the call, [P].
      sampled_ids: of the call, [C], the stop token included.
      messages: the whole conversation. A sampled message stands if its
        content is `completion_text`, the text of tool calls included.
      prompt_text: `text` of the NextPrompt that prompt_ids are from, or what
        the template wrote for them. It saves comparing all of the prompt.
      tools: as given to `render`.

    Raises:
      TemplateError: the template refused the messages.
    """
    prompt = np.asarray(prompt_ids, np.int32)
    sampled = np.asarray(sampled_ids, np.int32).tolist()
    found: list[NextPrompt] = []
    for as_sampled in (True, False):
      text = self.text(messages, True, tools, as_sampled=as_sampled)
      if found and text == found[0].text:
        break
      found.append(self._goes_on(prompt, sampled, text, prompt_text))
      if found[-1].extends:
        return found[-1]
    # What a branch begins with is read without special tokens, if it can be.
    return next((f for f in found if f.step != "split"), found[-1])

  def _goes_on(
    self,
    prompt: np.ndarray,
    sampled: list[int],
    text: str,
    prompt_text: str | None,
  ) -> NextPrompt:
    """The ids of `text`, with as much of a call as the ladder keeps."""
    start, following = self._after_agreement(prompt, text, prompt_text)
    tail = prompt[start:].tolist()
    repair = ladder.climb(tail, sampled, following, self, of_text=True)
    rest = np.asarray(repair.ids(tail, sampled), np.int32)
    return NextPrompt(
      ids=np.concatenate([prompt[:start], rest]),
      step=repair.step,
      text=text,
      prompt_drop=repair.prompt_drop,
      sampled_drop=repair.sampled_drop,
    )

  def _after_agreement(
    self, prompt: np.ndarray, text: str, prompt_text: str | None
  ) -> tuple[int, list[int]]:
    """Where to compare a prompt with a text that may go on from it.

    Returns:
      (index of the special token in the prompt before which all is as in the
      text, or 0; the ids of the text from that token on).
    """
    if prompt_text is not None and text.startswith(prompt_text):
      start = len(prompt) - 1
      while start > 0 and int(prompt[start]) not in self._special_text:
        start -= 1
      token = self._special_text.get(int(prompt[start])) if start > 0 else ""
      at = prompt_text.rfind(token) if token else 0
      if self.encode(prompt_text[at:]) == prompt[start:].tolist():
        return start, self.encode(text[at:])
    # Token by token would part at the first split that is not canonical.
    whole = self.encode(text)
    start = other = 0
    special = list(self.special_ids)
    pairs = zip(
      np.flatnonzero(np.isin(prompt, special)).tolist(),
      np.flatnonzero(np.isin(whole, special)).tolist(),
      strict=False,
    )
    for a, b in pairs:
      mine, its = prompt[start:a].tolist(), whole[other:b]
      if prompt[a] != whole[b] or (
        mine != its and self.decode(mine) != self.decode(its)
      ):
        break
      start, other = a, b
    return start, whole[other:]

  def bridge(
    self,
    previous_ids: Sequence[int] | np.ndarray,
    messages_before: Sequence[Message],
    new_messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
  ) -> list[int] | None:
    """Ids that lead from a sampled message to the next one.

    `next_prompt` for a caller who has prompt and completion in one, and cares
    only for what extends them. The bridge holds the end of the sampled turn
    where it was cut by a limit, what the template writes between turns, the
    new messages and the next generation prompt.

    Args:
      previous_ids: prompt and completion of the last call, as sampled.
      messages_before: the conversation, the sampled message last, its content
        as `completion_text` gives it.
      new_messages: what follows it (a tool's output).
      tools: as given to `render`.

    Returns:
      The ids, or None where the next prompt does not extend `previous_ids`.

    Raises:
      ValueError: the last message before is not the assistant's.
      TemplateError: the template refused the messages.
    """
    if not messages_before or messages_before[-1]["role"] != "assistant":
      raise ValueError("a bridge starts at a message of the assistant")
    before = self.text(messages_before[:-1], True, tools, as_sampled=True)
    # The prompt ends as its text does, from its last special token on.
    at = max((before.rfind(token) for token in self._special), default=0)
    tail = self.encode(before[max(at, 0) :])
    ids = np.asarray(previous_ids, np.int32)
    end = next(
      (
        i
        for i in range(len(ids), len(tail) - 1, -1)
        if ids[i - len(tail) : i].tolist() == tail
      ),
      None,
    )
    if end is None:
      return None
    following = self.next_prompt(
      ids[:end],
      ids[end:],
      [*messages_before, *new_messages],
      prompt_text=before if self.decode(ids[:end]) == before else None,
      tools=tools,
    )
    return following.ids[len(ids) :].tolist() if following.extends else None


def train_tokenizer(
  texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]
) -> tokenizers.Tokenizer:
  """Learns a byte-level BPE: every text can be encoded and decoded exactly.

  The same texts in the same order give the same tokenizer.

  Args:
    texts: what to learn from.
    vocab_size: entries wanted, special tokens and the 256 bytes included;
      short texts give fewer.
    special_tokens: get the first ids, in this order.

  Raises:
    ValueError: vocab_size does not hold the bytes and the special tokens.
  """
  least = 256 + len(special_tokens)
  if vocab_size < least:
    raise ValueError(
      f"vocab_size {vocab_size} must hold 256 bytes and "
      f"{len(special_tokens)} special tokens: at least {least}"
    )
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=list(special_tokens),
    initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer=trainer)
  return tokenizer


def minimal_renderer(texts: Iterable[str], vocab_size: int) -> Renderer:
  """A trained tokenizer behind templates.MINIMAL, for a model from scratch."""
  tokenizer = train_tokenizer(texts, vocab_size, templates.MINIMAL_TOKENS)
  return Renderer(tokenizer, templates.MINIMAL, stop_tokens=(templates.END,))
