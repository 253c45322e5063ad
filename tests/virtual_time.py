"""An event loop whose clock jumps to the next timer instead of waiting."""

import asyncio
import selectors


class _Selector(selectors.DefaultSelector):
  """Instead of waiting for a timer, moves the loop's clock on to it."""

  def __init__(self):
    super().__init__()
    self.now = 0.0

  def select(self, timeout=None):
    if timeout is None or timeout <= 0:
      return super().select(timeout)
    ready = super().select(0)
    if not ready:
      self.now += timeout
    return ready


class Loop(asyncio.SelectorEventLoop):
  """Only for what waits for timers alone: no threads, processes, sockets."""

  def __init__(self):
    self._jumping = _Selector()
    super().__init__(self._jumping)

  def time(self):
    return self._jumping.now


def run(main):
  """asyncio.run(main) in no time."""
  with asyncio.Runner(loop_factory=Loop) as runner:
    return runner.run(main)
