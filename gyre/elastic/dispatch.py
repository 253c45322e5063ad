"""The dispatch law, and the queue of groups that it speaks of.

B groups an update, μ updates a burst, φ extra boundary dispatch in units of B
groups. After replenishment at a boundary Q_b = (φ+μ)B groups are unconsumed.
Staleness is d = v_t − v_d: the trainer's version just before consumption, less
the published version at admission.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Law:
  """How much is dispatched, and in which order it is consumed.

  In steady state, for any consumption order that starves no group,
  E[d] = φ + (μ−1)/2.

  Attributes:
    phi: φ, extra boundary dispatch in units of `batch` groups.
    mu: μ, updates a burst.
    batch: B, groups an update.
    group_size: N, executions a group.
    window: W; groups i … i+W−1 may be consumed, i the oldest unconsumed. 1 is
      FIFO; None is plain completion order, which has no maximum.
    max_staleness: a group staler than this is dropped and replaced; None: no
      group is.
  """

  phi: float
  mu: int
  batch: int
  group_size: int
  window: int | None = None
  max_staleness: int | None = None

  def __post_init__(self):
    for name in ("mu", "batch", "group_size"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
    if self.phi < 0:
      raise ValueError(f"phi must be >= 0, got {self.phi}")
    if abs(self.phi * self.batch - self.extra) > 1e-9:
      raise ValueError(
        f"phi {self.phi} times batch {self.batch} is no whole number of "
        f"groups; the nearest phi is {self.extra / self.batch:g}"
      )
    if self.window is not None and self.window < 1:
      raise ValueError(f"window must be >= 1 or None, got {self.window}")
    if self.max_staleness is not None and self.max_staleness < self.fifo_max:
      raise ValueError(
        f"max_staleness {self.max_staleness} is below {self.fifo_max}, the "
        f"maximum of phi {self.phi}, mu {self.mu} under FIFO"
      )

  @property
  def extra(self) -> int:
    """φB, in groups."""
    return round(self.phi * self.batch)

  @property
  def boundary(self) -> int:
    """Q_b = (φ+μ)B, unconsumed groups after replenishment."""
    return self.extra + self.mu * self.batch

  @property
  def fifo_max(self) -> int:
    """⌈φ⌉ + μ − 1."""
    return -(-self.extra // self.batch) + self.mu - 1

  def maximum(self) -> int | None:
    """The largest d trained: ⌈φ⌉ + μ − 1 + ⌈(W−1)/B⌉, or the drop bound.

    None for plain completion order without a bound.
    """
    if self.window is None:
      return self.max_staleness
    bound = self.fifo_max + -(-(self.window - 1) // self.batch)
    if self.max_staleness is None:
      return bound
    return min(bound, self.max_staleness)

  def window_for(self, max_staleness: int) -> int:
    """The widest window whose maximum is `max_staleness`.

    Raises:
      ValueError: if even FIFO goes beyond it.
    """
    room = max_staleness - self.fifo_max
    if room < 0:
      raise ValueError(
        f"max_staleness {max_staleness} is below {self.fifo_max}, the maximum "
        f"of phi {self.phi}, mu {self.mu} under FIFO"
      )
    return 1 + room * self.batch

  def burst_end(self, version: int, steps: int) -> int:
    """The version at which the burst in which `version` is trained on ends."""
    return min((version // self.mu + 1) * self.mu, steps)


@dataclasses.dataclass(frozen=True)
class Group:
  """A group not yet consumed.

  Attributes:
    number: in order of admission.
    version: v_d, the published version at admission.
    left: executions not yet ended.
    scored: executions that ended with a score.
    flat: it is whole, and all its rewards are equal.
  """

  number: int
  version: int
  left: int
  scored: int = 0
  flat: bool = False


@dataclasses.dataclass(frozen=True)
class Queue:
  """Unconsumed groups.

  Attributes:
    groups: by number, in order of admission. Never changed in place.
    whole: numbers of those of which every execution ended, oldest first.
  """

  groups: Mapping[int, Group] = dataclasses.field(default_factory=dict)
  whole: tuple[int, ...] = ()

  def __len__(self) -> int:
    return len(self.groups)

  def admit(self, group: Group) -> Queue:
    """With one more at its end."""
    return Queue({**self.groups, group.number: group}, self.whole)

  def ended(self, number: int, scored: bool, flat: bool = False) -> Queue:
    """With one execution of a group ended."""
    old = self.groups[number]
    group = Group(
      number=number,
      version=old.version,
      left=old.left - 1,
      scored=old.scored + scored,
      flat=flat and old.left == 1,
    )
    whole = self.whole
    if not group.left:
      whole = tuple(sorted((*whole, number)))
    return Queue({**self.groups, number: group}, whole)

  def without(self, numbers: tuple[int, ...]) -> Queue:
    """Without these, consumed or dropped."""
    groups = dict(self.groups)
    for number in numbers:
      del groups[number]
    return Queue(groups, tuple(n for n in self.whole if n not in numbers))

  def eligible(self, window: int | None) -> tuple[int, ...]:
    """Whole groups inside the window, oldest first."""
    if window is None or not self.whole:
      return self.whole
    beyond = next(iter(self.groups)) + window
    return tuple(n for n in self.whole if n < beyond)

  def ready(self, window: int | None, most: int) -> tuple[int, ...]:
    """Up to `most` groups that can be consumed one after the other.

    The window moves as the oldest groups are consumed.
    """
    queue, taken = self, ()
    while len(taken) < most:
      now = queue.eligible(window)[: most - len(taken)]
      if not now:
        break
      queue, taken = queue.without(now), taken + now
    return taken

  def in_time(
    self, law: Law, update: int, room: int, most: int
  ) -> tuple[int, ...]:
    """Up to `most` groups whose consumption makes no other one too late.

    Group i may be consumed for update D_i = v_i + max_staleness + 1 at the
    latest, so u has `room` places left and each update after it B. Whole
    groups are taken oldest first; one is passed over if for some t < D it
    would take a place that the groups due by t all need, whole or not:

      #{i : D_i ≤ t} ≤ room + B(t − u)    for every t.

    This holds after every boundary, as Q_b ≤ (max_staleness + 1)B, and after
    a replacement; so no group is ever too stale, and one that is due will be
    whole: nothing is starved.

    Args:
      law: with `max_staleness`.
      update: u, that consumes.
      room: places left in it.
      most: groups wanted, of this update and the following.
    """
    count = collections.Counter(g.version for g in self.groups.values())
    versions = sorted(count)
    due = list(itertools.accumulate(count[v] for v in versions))
    spare = [
      room + law.batch * (v + law.max_staleness + 1 - update) - n
      for v, n in zip(versions, due, strict=True)
    ]
    taken: list[int] = []
    for number in self.whole:
      rank = versions.index(self.groups[number].version)
      full = any(due[k] and not spare[k] for k in range(rank))
      if full or len(taken) == most:
        continue
      taken.append(number)
      spare[:rank] = [places - 1 for places in spare[:rank]]
      due[rank:] = [groups - 1 for groups in due[rank:]]
    return tuple(taken)

  def stale(self, oldest: int) -> tuple[Group, ...]:
    """Groups admitted at a version before `oldest`.

    Versions do not fall in order of admission.
    """
    return tuple(
      itertools.takewhile(lambda g: g.version < oldest, self.groups.values())
    )
