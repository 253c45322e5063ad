"""Attention, decode and log-probability kernels for JAX."""

from gyre_kernels.attention import attention
from gyre_kernels.decode import paged_decode
from gyre_kernels.linear import linear
from gyre_kernels.logprob import linear_logprob
from gyre_kernels.prefix import merge, prefix_attention

__all__ = [
  "attention",
  "linear",
  "linear_logprob",
  "merge",
  "paged_decode",
  "prefix_attention",
]
