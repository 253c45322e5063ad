"""A lower bound on the time of any schedule under a dispatch law."""

from __future__ import annotations

import math

from gyre.elastic.dispatch import Law
from gyre.sim.fluids import Costs
from gyre.sim.workload import Workload


def lower_bound(
  law: Law,
  workload: Workload,
  costs: Costs,
  *,
  nodes: float,
  slots: float,
  steps: int,
  endless: bool = False,
) -> float:
  """Seconds below which no schedule can apply `steps` updates.

  The schedule bounded knows every work beforehand, divides the nodes between
  rollout and training as finely as it likes at any moment, moves anything
  anywhere, all for nothing; cells, switches, streaming and the order of
  consumption are its own. It keeps the law:
  publication after a burst, which takes `costs.publish`, and no more than Q_b
  unconsumed groups at a boundary.

  Proof. Let bursts be 0 .. M-1, C_b groups consumed and U_b updates applied by
  the end e_b of burst b, t_0 = 0 and t_b >= e_{b-1} + publish the boundary
  at which burst b's groups are admitted, A_b <= C_{b-1} + Q_b groups admitted
  before t_{b+1} (a group replaced leaves the count as it was).

  (1) Node-seconds. While l executions run a node, one of them uses 1/l of that
  node's time and gets 1/(f + (1-f)l/x0) of work a second, so a work X costs
  X(f/l + (1-f)/x0), which falls as l grows, and l <= slots. One that the
  timeout T ends uses T/l. So an execution costs at least
  min(X(f/slots + (1-f)/x0), T/slots) node-seconds, and a group the sum, R of
  several. Updates of V = the integral of n^alpha dt within D seconds cost the
  integral of n dt >= D (V/D)^(1/alpha): x^(1/alpha) is convex. For b <= c, of
  the C_c groups consumed by e_c at least C_c - A_{b-1} were admitted at t_b or
  later, among those up to A_c; and U_c - U_{b-1} updates were trained after
  e_{b-1}, since an update is trained after the one before it is applied. All
  of that happens in the D seconds between e_{b-1} (0 for b = 0) and e_c:

    nodes D >= R + D (V/D)^(1/alpha),  D = e_c - e_{b-1},
    R of the cheapest C_c - A_{b-1} of groups A_{b-1} .. A_c,
    V = (U_c - U_{b-1}) W.

  (2) Latency. An execution shares the pool at least with itself, so it lasts
  at least min(X(f + (1-f)/(nodes x0)), T); a group as long as its longest.
  With k = C_b - A_{b-1} >= 1, the last of the groups admitted at t_b that
  burst b consumes lasts at least the k-th smallest of these, and is trained
  after it: W/B node-seconds at no more than nodes^alpha:

    e_b >= t_b + (k-th smallest latency of groups A_{b-1} .. A_b)
               + W/B / nodes^alpha.

  The bound is the largest that (1) and (2) give for e_{M-1}, in order of b.

  Args:
    law: of dispatch; `window` is not used, and no group may be dropped as
      stale.
    workload: what executions need.
    costs: what things cost; switches are free here.
    nodes: all there are.
    slots: the most executions that a node holds.
    steps: updates.
    endless: whether groups are admitted that no update will consume; the
      choice among them is then the schedule's too.

  Raises:
    ValueError: fewer than one node or no slots.
  """
  if nodes < 1 or slots <= 0:
    raise ValueError(
      f"a bound needs >= 1 nodes and > 0 slots a node, got {nodes}, {slots}"
    )
  per_slot = costs.serial / slots + (1 - costs.serial) / costs.load
  alone = costs.slowdown(1 / nodes)
  total = steps * law.batch
  most = total + law.extra if endless else total
  price: list[float] = []
  latency: list[float] = []
  for group in _scored_groups(workload, law, most):
    works = [workload.work((group, i)).seconds for i in range(law.group_size)]
    timeout = workload.timeout
    price.append(sum(min(x * per_slot, timeout / slots) for x in works))
    latency.append(min(max(works) * alone, timeout))
  last = costs.update_work / law.batch / nodes**costs.alpha

  ends = [
    min((b + 1) * law.mu, steps) for b in range(math.ceil(steps / law.mu))
  ]
  admitted = [0] + [
    min(law.extra + (b + 1) * law.mu * law.batch, most)
    for b in range(len(ends))
  ]
  before = [0.0]  # e_{b-1}
  for c, applied in enumerate(ends):
    consumed = applied * law.batch
    end = before[c]
    for b in range(c + 1):
      new = sorted(price[admitted[b] : admitted[c + 1]])
      k = max(consumed - admitted[b], 0)
      updates = applied - (ends[b - 1] if b else 0)
      least = _least_seconds(
        sum(new[:k]), updates * costs.update_work, nodes, costs.alpha
      )
      end = max(end, before[b] + least)
    k = consumed - admitted[c]
    if k > 0:
      new = sorted(latency[admitted[c] : admitted[c + 1]])
      boundary = before[c] + (costs.publish if c else 0.0)
      end = max(end, boundary + new[k - 1] + last)
    before.append(end)
  return before[-1]


def _least_seconds(
  rollout: float, training: float, nodes: float, alpha: float
) -> float:
  """The least D with nodes D >= rollout + D (training/D)^(1/alpha)."""

  def enough(d: float) -> bool:
    return nodes * d >= rollout + d * (training / d) ** (1 / alpha)

  low, high = 0.0, 1.0
  while not enough(high):
    low, high = high, 2 * high
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (low, middle) if enough(middle) else (middle, high)
  return low


def _scored_groups(workload: Workload, law: Law, count: int) -> list[int]:
  """The first `count` groups of which an execution is scored.

  The others are lost, and replaced.

  Raises:
    ValueError: hardly any is.
  """
  found: list[int] = []
  for group in range(100 * count + 100):
    if len(found) == count:
      return found
    if any(workload.work((group, i)).scored for i in range(law.group_size)):
      found.append(group)
  raise ValueError(f"{len(found)} of {100 * count + 100} groups have a score")
