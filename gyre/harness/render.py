"""Messages <-> token ids, append-only.

A conversation is rendered once, by the model's chat template; from then on it
only grows: the ids of the next prompt are those of the last one, the ids that
were sampled, and a *bridge*, the encoding of what the template writes after
the sampled message. Sampled tokens are never decoded and encoded again, so
every token is trained under exactly the context it was sampled in.

Templates that rewrite what came before (thinking stripped from earlier turns,
for one) allow no bridge; the caller then opens a branch with a new rendering.
"""

from __future__ import annotations

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

Message = Mapping[str, Any]

# Stands in for the sampled message where the template's own words after it
# are wanted. No template trims it and no tokenizer sees it.
_MARK = "\x02gyre\x03"


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


def _squeeze(text: str) -> str:
  return "".join(text.split())


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
    self._special = tuple(
      sorted((t.content for t in added.values() if t.special), key=len)
    )[::-1]

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
  ) -> str:
    """What the template writes for `messages`.

    Raises:
      TemplateError: the template refused them.
    """
    try:
      return self._template.render(
        messages=[self._clean(m) for m in messages],
        tools=list(tools) if tools else None,
        add_generation_prompt=add_generation_prompt,
        **self._args,
      )
    except (jinja2.TemplateError, TypeError) as e:
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

  def bridge(
    self,
    previous_ids: Sequence[int] | np.ndarray,
    messages_before: Sequence[Message],
    new_messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
  ) -> list[int] | None:
    """Ids that lead from a sampled message to the next one.

    The next prompt is `previous_ids + bridge`. The bridge holds the end of
    the sampled turn where it was cut by a limit, what the template writes
    between turns, the new messages and the next generation prompt.

    Args:
      previous_ids: prompt and completion of the last call, as sampled.
      messages_before: the conversation, the sampled message last, its content
        as `completion_text` gives it.
      new_messages: what follows it (a tool's output).
      tools: as given to `render`.

    Returns:
      The ids, or None where no bridge is exact: the template renders the
      earlier messages, or the text of the sampled one, otherwise now that
      more follows; or `messages_before` does not tell what was sampled.

    Raises:
      ValueError: the last message before is not the assistant's.
      TemplateError: the template refused the messages.
    """
    if not messages_before or messages_before[-1]["role"] != "assistant":
      raise ValueError("a bridge starts at a message of the assistant")
    *history, sampled = messages_before
    prompt = self.text(history, True, tools)
    after = self.text([*messages_before, *new_messages], True, tools)
    marked = self.text(
      [*history, {"role": "assistant", "content": _MARK}, *new_messages],
      True,
      tools,
    )
    before_mark, found, rest = marked.partition(_MARK)
    body = len(after) - len(rest)
    if (
      not found
      or not before_mark.startswith(prompt)
      or not after.startswith(prompt)
      or not after.endswith(rest)
      or body < len(prompt)
    ):
      return None
    said = _squeeze(after[len(prompt) : body])
    ids = self.encode(rest)
    ended = len(previous_ids) > 0 and int(previous_ids[-1]) in self.stop_ids
    tail = self._tail_text(previous_ids, ended, len(after) - len(prompt))
    # The template may write around what was said (an empty thinking block);
    # what was said must be there whole, and be what was sampled.
    content = sampled.get("content")
    own = self.neutral(content) if isinstance(content, str) else None
    if own is not None and not sampled.get("tool_calls"):
      own = _squeeze(own)
      if not said.endswith(own) or not tail.endswith(own):
        return None
    elif not tail.endswith(said):
      return None
    if ended and ids and ids[0] in self.stop_ids:
      return ids[1:]
    return ids

  def _tail_text(
    self, ids: Sequence[int] | np.ndarray, ended: bool, chars: int
  ) -> str:
    """Squeezed text of the last tokens, at least `chars` characters."""
    end = len(ids) - 1 if ended else len(ids)
    # A token holds at least one byte, a character at most four.
    start = max(0, end - 4 * chars - 8)
    return _squeeze(self.neutral(self.decode(ids[start:end])))


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
