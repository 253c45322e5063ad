"""Decoding from pages."""

from gyre_kernels import reference
from gyre_kernels._check import check_implementation


def paged_decode(
  q, k_pages, v_pages, page_table, lengths, *, implementation=None, **kwargs
):
  """See reference."""
  check_implementation(implementation, "paged_decode")
  return reference.paged_decode(
    q, k_pages, v_pages, page_table, lengths, **kwargs
  )
