"""What can go wrong with a sandbox; each message is one line."""

from __future__ import annotations


class SandboxError(RuntimeError):
  """The sandbox cannot do its work: nothing that the agent did is at fault."""


class SandboxUnavailable(SandboxError):
  """No backend can serve the task here; the message has each one's reason."""


class SnapshotError(SandboxError):
  """A workspace that cannot be read or written."""
