"""What an emulated cell costs: the laws of its serving and its training."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Profile:
  """What an emulated cell costs; times in emulated seconds.

  The defaults are those of elastic.md's calibration, B = 16 and N = 8, for a
  cell of four nodes.

  Attributes:
    nodes: of the cell.
    slots: calls it runs at once; others wait.
    speedup: emulated seconds a second of wall time.
    f: part of a call's time that load has no effect on.
    x0: calls a node at which the rate is 1.
    token_s: work of one token.
    prefill_s: work of one token of context that is computed: once a call,
      and again after new weights or a sleep.
    stream_s: tokens are streamed at this interval, and at the end.
    update_s: node-seconds that training on one batch takes (W).
    alpha: n nodes take update_s / n^alpha.
    join_s, serve_s: a switch to training, and back.
    alpha_nodes: n of alpha's law, where cells train together: a cell is then
      nodes / alpha_nodes of them all; 0: the cell's own.
    publish_s: that an engine takes to load weights.
    vocab_size, max_context: what a request is checked against.
  """

  nodes: float = 4.0
  slots: int = 36
  speedup: float = 360.0
  f: float = 0.995
  x0: float = 16.0
  token_s: float = 72.0
  prefill_s: float = 0.0
  stream_s: float = 72.0
  update_s: float = 11.95 * 3600
  alpha: float = 0.972
  alpha_nodes: float = 0.0
  join_s: float = 8.52
  serve_s: float = 3.46
  publish_s: float = 0.031 * 3600
  vocab_size: int = 32_000
  max_context: int = 1 << 20

  def __post_init__(self):
    positive = ("nodes", "slots", "speedup", "x0", "token_s", "stream_s")
    for name in positive:
      value = getattr(self, name)
      if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"profile.{name} must be positive, got {value}")
    if not 0 <= self.f <= 1:
      raise ValueError(f"profile.f must be from 0 to 1, got {self.f}")
    times = ("prefill_s", "update_s", "join_s", "serve_s", "publish_s")
    for name in (*times, "alpha_nodes"):
      value = getattr(self, name)
      if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"profile.{name} must not be negative, got {value}")

  def rate(self, running: int) -> float:
    """Work done in an emulated second by each of `running` calls."""
    load = running / self.nodes
    return 1 / (self.f + (1 - self.f) * load / self.x0)

  def training_s(self, share: float) -> float:
    """Emulated seconds that the cell trains on a share of a batch."""
    together = self.alpha_nodes or self.nodes
    return share * self.update_s / (self.nodes * together ** (self.alpha - 1))

  def wall(self, emulated_s: float) -> float:
    """Seconds of the clock on the wall."""
    return emulated_s / self.speedup
