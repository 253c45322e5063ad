"""Token ids as text, one piece a token."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
import tokenizers

from gyre.analysis.runs import RunError

_BROKEN = "\ufffd"
_MAX_PARTS = 8  # tokens that one character can need
_SPACE = "\u2581"  # SentencePiece writes a space so


def printable(text: str) -> str:
  """`text` with what would move a terminal's cursor written as an escape."""
  return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Pieces:
  """What each id reads; without a tokenizer, its number.

  Attributes:
    known: whether there is a tokenizer.
    special: ids that no text can contain: end of turn and the like.
  """

  def __init__(self, tokenizer: tokenizers.Tokenizer | None = None):
    """Takes a tokenizer, or None to show numbers."""
    self._tokenizer = tokenizer
    self._alone: dict[int, str] = {}
    self.known = tokenizer is not None
    self.special: frozenset[int] = frozenset()
    if tokenizer is not None:
      added = tokenizer.get_added_tokens_decoder()
      self.special = frozenset(i for i, token in added.items() if token.special)

  @classmethod
  def load(cls, path: pathlib.Path) -> Pieces:
    """Reads a tokenizer.json, or the one in a directory.

    Raises:
      RunError: there is none, or it is none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
      text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
      raise RunError(f"cannot read the tokenizer {file}: {error}") from None
    try:
      return cls(tokenizers.Tokenizer.from_str(text))
    except Exception as error:  # tokenizers raises nothing more special
      raise RunError(f"{file} is no tokenizer: {error}") from None

  def _one(self, token: int) -> str:
    """The piece of a token that stands alone."""
    if token not in self._alone:
      self._alone[token] = self._decoded(token)
    return self._alone[token]

  def _decoded(self, token: int) -> str:
    written = self._tokenizer.id_to_token(token)
    if written is None:
      return f"<{token}>"
    text = self._tokenizer.decode([token], skip_special_tokens=False)
    if written.startswith(_SPACE) and not text.startswith(" "):
      return " " + text
    return text

  def text(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the pieces of `ids`, joined."""
    return "".join(self.of(ids))

  def message(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the text up to the first special token."""
    words = list(map(int, ids))
    end = next((i for i, t in enumerate(words) if t in self.special), None)
    return self.text(words[:end])

  def of(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """Returns one piece a token; joined they are the text.

    A character that several tokens share stands in the last of them, and the
    others are empty. Bytes that are no text are U+FFFD.
    """
    if self._tokenizer is None:
      return [f"{i} " for i in map(int, ids)]
    out: list[str] = []
    open_parts: list[int] = []
    for token in map(int, ids):
      piece = self._one(token)
      if _BROKEN not in piece:
        self._give_up(out, open_parts)
        out.append(piece)
        continue
      open_parts.append(token)
      whole = self._tokenizer.decode(open_parts, skip_special_tokens=False)
      out.append("")
      if _BROKEN not in whole:
        out[-1] = whole
        open_parts.clear()
      elif len(open_parts) >= _MAX_PARTS:
        self._give_up(out, open_parts)
    self._give_up(out, open_parts)
    return out

  def _give_up(self, out: list[str], open_parts: list[int]) -> None:
    """Shows parts that never made a character, each as it stands alone."""
    first = len(out) - len(open_parts)
    for i, token in enumerate(open_parts):
      out[first + i] = self._one(token)
    open_parts.clear()
