"""Attention over a long prefix and a chunk."""

from gyre_kernels import reference
from gyre_kernels._check import check_implementation
from gyre_kernels.reference import merge

__all__ = ["merge", "prefix_attention"]


def prefix_attention(
  q, k, v, prefix_k, prefix_v, *, implementation=None, **kwargs
):
  """See reference."""
  check_implementation(implementation, "prefix_attention")
  return reference.prefix_attention(q, k, v, prefix_k, prefix_v, **kwargs)
