"""What elastic.md states of staleness, for a Law: the tests' own formulas."""

import fractions


def mean(law):
  """E[d] in steady state, whatever the order: φ + (μ−1)/2."""
  return law.extra / law.batch + (law.mu - 1) / 2


def pmf(law):
  """P(d) in steady state under FIFO.

  A group at queue offset y ∈ [φ, φ+μ) has d = ⌊y⌋; with φ = n+θ,
  P(n) = (1−θ)/μ, P(n+1 … n+μ−1) = 1/μ each, P(n+μ) = θ/μ.
  """
  n, rest = divmod(law.extra, law.batch)
  share = {n + k: law.batch for k in range(law.mu)}
  share[n] -= rest
  if rest:
    share[n + law.mu] = rest
  return {d: k / (law.mu * law.batch) for d, k in share.items() if k}


def variance(law):
  """Var[d] in steady state under FIFO: (μ²−1)/12 + θ(1−θ)."""
  theta = fractions.Fraction(law.extra % law.batch, law.batch)
  return float(fractions.Fraction(law.mu**2 - 1, 12) + theta * (1 - theta))


def cold_start_mean(law, bursts):
  """Mean d over the first M bursts, whatever the order that ends them.

  With φ = aμ+ρ and M > a, φ + (μ−1)/2 − (φ + μa(a−1)/2 + aρ)/M.
  """
  a, rest = divmod(law.extra, law.mu * law.batch)
  assert bursts > a
  rho, phi = rest / law.batch, law.extra / law.batch
  lag = phi + law.mu * a * (a - 1) / 2 + a * rho
  return mean(law) - lag / bursts
