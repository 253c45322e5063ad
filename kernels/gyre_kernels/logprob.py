"""Log-probabilities of given tokens."""

from gyre_kernels import reference
from gyre_kernels._check import check_implementation


def linear_logprob(
  hidden,
  weight,
  targets,
  *,
  temperature=1.0,
  return_entropy=False,
  implementation=None,
):
  """See reference."""
  check_implementation(implementation, "linear_logprob")
  return reference.linear_logprob(
    hidden,
    weight,
    targets,
    temperature=temperature,
    return_entropy=return_entropy,
  )
