"""A completion read while it is sampled: ids to text, thinking, calls.

Text is shown as soon as it is known to be text: not half a character, half a
stop sequence, or what may become a tool call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gyre.harness import render, tool_parsers, wire

_MAX_HELD = 16


class Reader:
  """Reads one completion.

  Attributes:
    text: decoded so far, without what follows a stop sequence.
    stop_sequence: the one that ended the completion, or None.
    stop_at: tokens up to the one that completed it, or None.
  """

  def __init__(
    self,
    renderer: render.Renderer,
    fmt: tool_parsers.Format,
    *,
    tools: Sequence[wire.Tool] = (),
    stop: Sequence[str] = (),
    opened: bool = False,
    call_tools: bool = True,
    parallel: bool = True,
    show_reasoning: bool = True,
  ):
    """Starts at the beginning of a completion.

    Args:
      renderer: decodes ids and names the stop tokens.
      fmt: of tool calls.
      tools: those offered.
      stop: texts that end the completion; they are not shown.
      opened: the prompt ended inside the thinking.
      call_tools: False leaves everything text.
      parallel: False drops all calls after the first.
      show_reasoning: False hides the thinking.
    """
    self._renderer, self._fmt, self._tools = renderer, fmt, tuple(tools)
    self._stop = tuple(s for s in stop if s)
    self._opened, self._call_tools = opened, call_tools and bool(tools)
    self._parallel, self._show = parallel, show_reasoning
    self._ids: list[int] = []
    self._prefix = self._read = 0
    self._settled: tuple[int, tuple[str, str]] = (-1, ("", ""))
    self.text = ""
    self.stop_sequence: str | None = None
    self.stop_at: int | None = None

  def feed(self, token: int) -> bool:
    """Takes the next id; True once a stop sequence is complete."""
    if self.stop_at is not None:
      return True
    self._ids.append(token)
    if token in self._renderer.stop_ids:
      return False
    before = self._renderer.decode(self._ids[self._prefix : self._read])
    after = self._renderer.decode(self._ids[self._prefix :])
    held = len(self._ids) - self._read
    # A character's last bytes may be still to come.
    if after.endswith("\ufffd") and held < _MAX_HELD:
      return False
    if len(after) > len(before):
      self._append(after[len(before) :])
      self._prefix, self._read = self._read, len(self._ids)
    return self.stop_at is not None

  def _append(self, new: str) -> None:
    known = len(self.text)
    self.text += new
    hits = []
    for stop in self._stop:
      at = self.text.find(stop, max(0, known - len(stop) + 1))
      if at >= 0:
        hits.append((at, stop))
    if hits:
      at, self.stop_sequence = min(hits)
      self.stop_at = len(self._ids)
      self.text = self.text[:at]

  def visible(self) -> tuple[str, str]:
    """(thinking, text) that may be shown by now; both only grow."""
    if self._settled[0] != len(self.text):
      reasoning, text = tool_parsers.settled(
        self._fmt,
        self.text,
        opened=self._opened,
        call_tools=self._call_tools,
        # Once one has ended the text, nothing of it can become another.
        stop=self._stop if self.stop_at is None else (),
      )
      shown = (reasoning if self._show else "", text)
      self._settled = (len(self.text), shown)
    return self._settled[1]

  def finish(
    self, ids: np.ndarray, cut: bool, call_id: Callable[[int], str]
  ) -> wire.Said:
    """The whole completion; begins with what was visible.

    Args:
      ids: all that was sampled and kept.
      cut: a limit, or a client that left, ended it.
      call_id: names the call of an index.
    """
    text = self.text
    if self.stop_at is None:
      whole = self._renderer.completion_text(ids)
      # Bytes that are no characters may decode otherwise piece by piece.
      text = whole if whole.startswith(text) else text
    parsed = tool_parsers.parse(
      self._fmt,
      text,
      tools=self._tools,
      opened=self._opened,
      cut=cut,
      call_tools=self._call_tools,
    )
    calls = parsed.calls if self._parallel else parsed.calls[:1]
    return wire.Said(
      text=parsed.text,
      reasoning=parsed.reasoning if self._show else "",
      tool_calls=tuple(
        wire.ToolCall(call_id(i), *c) for i, c in enumerate(calls)
      ),
    )
