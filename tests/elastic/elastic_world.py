"""A world that the scheduler acts on, kept by its own books.

It executes actions as a runtime would and checks each against what it knows
itself: who holds which device, which engine serves which version, where an
execution is, what was trained. It does not look into the scheduler's state.
"""

from __future__ import annotations

import collections
import dataclasses
import random

from gyre.elastic import scheduler as sched
from gyre.elastic.cells import Layout
from gyre.elastic.dispatch import Law


@dataclasses.dataclass
class Site:
  """A cell as the world sees it: who holds its devices, and what is there."""

  cell: sched.Cell
  holder: str  # engine, trainer, nobody (in transfer) or dead
  version: int | None = None  # that the engine serves
  runs: set = dataclasses.field(default_factory=set)
  trained: set = dataclasses.field(default_factory=set)  # groups in its sums
  life: int = 0
  target: str = ""  # of the transfer under way
  before: str = ""


class World:
  """Executes actions, and offers the events that may come next."""

  def __init__(
    self,
    layout: Layout,
    law: Law,
    steps: int,
    *,
    streaming: bool = True,
    policy: str = "waterlevel",
    endless: bool | None = None,
    resample: int = 0,
  ):
    self.law, self.steps = law, steps
    self.options = {
      "streaming": streaming,
      "policy": policy,
      "endless": endless,
      "resample": resample,
    }
    self.flat: set[int] = set()  # groups that teach nothing, once whole
    self.layout = layout
    self.state = sched.begin(layout, law, steps=steps, **self.options)
    self.sites = {}
    self._fresh_sites(0)
    self.core = layout.core.name
    self.core_lives = True
    self.time = 0.0
    self.version = 0
    self.published = 0
    self.admitted: dict[int, int] = {}
    self.ended: dict[int, dict[int, bool]] = {}
    self.waiting: set = set()  # admitted or interrupted, not running
    self.where: dict = {}
    self.started: set = set()
    self.claims: list[int] = []
    self.consumed: dict[int, int] = {}
    self.committed: list[int] = []
    self.dropped: dict[int, str] = {}
    self.staleness: list[int] = []
    self.applying = False
    self.told_drained = False
    self.publishing: int | None = None
    self.whole = layout.core
    self.wanted = len(layout.core.devices)
    self.resizing: tuple | None = None
    self.lent: str | None = None
    self.stopped = False
    self.past: list[sched.Event] = []
    self.log: list[tuple[sched.Event, tuple]] = []

  def _fresh_sites(self, version: int) -> None:
    self.sites = {}
    for cell in self.layout:
      trains = cell.kind == "trainer"
      self.sites[cell.name] = Site(
        cell, "trainer" if trains else "engine", None if trains else version
      )

  def resume(self, lost: int | None = None) -> tuple:
    """Every process ends; a new run goes on from what is stored.

    The executions of the unconsumed group `lost` had all just failed.
    """
    if lost is not None:
      for index in range(self.law.group_size):
        self.ended[lost][index] = False
        self.waiting.discard((lost, index))
        self.where.pop((lost, index), None)
    queued = [
      (group, version)
      for group, version in self.admitted.items()
      if group not in self.committed and group not in self.dropped
    ]
    for group in self.claims:
      del self.consumed[group]
    ended = {g: self.ended[g] for g, _ in queued}
    stored = sched.Resumed(
      version=self.version,
      groups=tuple(queued),
      finished=tuple(
        ((g, i), scored) for g in ended for i, scored in ended[g].items()
      ),
      flat=tuple(
        g for g in ended if g in self.flat and self._taught(g) is False
      ),
      consumed=tuple(self.committed),
      dropped=tuple(self.dropped),
      published=self.published,
    )
    self.state = sched.begin(
      self.layout, self.law, steps=self.steps, resume=stored, **self.options
    )
    self._fresh_sites(self.published)
    self.waiting |= set(self.where)
    self.where, self.claims, self.past = {}, [], []
    self.applying = self.told_drained = self.stopped = False
    self.publishing = self.resizing = self.lent = None
    self.core, self.core_lives = self.whole.name, True
    self.wanted = len(self.whole.devices)
    return self.begin()

  # What is so.

  @property
  def unfinished(self) -> int:
    return len(self.waiting) + len(self.where)

  @property
  def drained(self) -> bool:
    """Whether every group consumed for a full update is in someone's sums."""
    trained = set().union(*(s.trained for s in self.sites.values()))
    return len(self.claims) == self.law.batch and trained == set(self.claims)

  @property
  def committed_staleness(self) -> list[int]:
    """d of every group in a commit."""
    return [self.consumed[g] - 1 - self.admitted[g] for g in self.committed]

  @property
  def transfers(self) -> list[str]:
    return [n for n, s in self.sites.items() if s.target]

  # Events.

  def send(self, event: sched.Event) -> tuple:
    """Lets the scheduler decide on an event, and executes what it asks for."""
    before, drops = self.unfinished, len(self.dropped)
    former = self.state
    self.state, actions = sched.decide(former, event)
    if len(self.log) % 8 == 0:
      assert (self.state, actions) == sched.decide(former, event)
    self.past.append(event)
    self.log.append((event, actions))
    for action in actions:
      assert not self.stopped, f"{action} after Stop"
      getattr(self, f"_{type(action).__name__.lower()}")(action)
    self._check()
    if not isinstance(event, (sched.Begin, sched.Published)):
      replaced = (len(self.dropped) - drops) * self.law.group_size
      assert self.unfinished <= before + replaced, "w rose inside a burst"
    return actions

  def tick(self) -> float:
    self.time += 1.0
    return self.time

  def begin(self) -> tuple:
    return self.send(sched.Begin(self.time))

  def finish(self, execution, scored: bool = True) -> tuple:
    group, index = execution
    self.sites[self.where.pop(execution)].runs.discard(execution)
    self.ended[group][index] = scored
    flat = self._taught(group) is False
    return self.send(sched.Finished(self.tick(), execution, scored, flat))

  def _taught(self, group: int) -> bool | None:
    """Whether a group teaches something; None: it is not whole, or lost."""
    ended = self.ended[group]
    if len(ended) < self.law.group_size or not any(ended.values()):
      return None
    return group not in self.flat

  def train(self, name: str) -> None:
    """A training cell takes one micro-step of the claim queue, if any."""
    site = self.sites[name]
    taken = set().union(*(s.trained for s in self.sites.values()))
    for group in self.claims:
      if site.holder == "trainer" and group not in taken:
        site.trained.add(group)
        return

  def trains(self) -> list[str]:
    """Cells that can take a micro-step."""
    taken = set().union(*(s.trained for s in self.sites.values()))
    if not set(self.claims) - taken:
      return []
    return [n for n, s in self.sites.items() if s.holder == "trainer"]

  def dead(self) -> list[str]:
    return [n for n, s in self.sites.items() if s.holder == "dead"]

  def drain(self) -> tuple:
    assert self.drained and not self.told_drained
    self.told_drained = True
    return self.send(sched.Drained(self.tick(), self.version + 1))

  def commit(self) -> tuple:
    """The optimizer step is taken and committed."""
    assert self.applying
    self.applying = self.told_drained = False
    self.version += 1
    self.committed += self.claims
    self.claims = []
    for site in self.sites.values():
      site.trained.clear()
    return self.send(sched.Applied(self.tick(), self.version))

  def publish_done(self) -> tuple:
    version, self.publishing = self.publishing, None
    self.published = version
    for site in self.sites.values():
      if site.holder == "engine":
        site.version = version
    return self.send(sched.Published(self.tick(), version))

  def switch_done(self, name: str) -> tuple:
    site = self.sites[name]
    target, site.target = site.target, ""
    site.holder = "engine" if target == "rollout" else "trainer"
    site.version = self.published if target == "rollout" else None
    if target == "core":
      self.core, self.core_lives = name, True
    return self.send(sched.SwitchDone(self.tick(), name, site.ticket))

  def switch_fails(self, name: str) -> tuple:
    site = self.sites[name]
    site.target, site.holder = "", site.before
    return self.send(sched.SwitchFailed(self.tick(), name, site.ticket))

  def down(self, name: str) -> tuple:
    """A cell dies: its claims return; its executions wait for a place."""
    site = self.sites[name]
    life, site.life = site.life, site.life + 1
    if site.holder in ("trainer", "nobody"):
      self.applying = self.told_drained = False
    site.holder, site.target, site.version = "dead", "", None
    site.trained.clear()
    for execution in list(site.runs):
      del self.where[execution]
      self.waiting.add(execution)
    site.runs.clear()
    if name == self.core:
      self.core_lives = False
    if self.resizing and self.resizing[0] == name:
      self._resize_ends()
    return self.send(sched.CellDown(self.tick(), name, life))

  def up(self, name: str) -> tuple:
    site = self.sites[name]
    assert site.holder == "dead"
    site.holder = "idle"
    return self.send(sched.CellUp(self.tick(), name, site.life))

  def ask(self, devices: int) -> tuple:
    self.wanted = devices
    return self.send(sched.ask_resize(self.state, self.tick(), devices))

  def resized(self) -> tuple:
    """The core has its devices; those it gave up are a site of their own."""
    name, devices, ticket = self.resizing
    self.resizing = None
    self.sites.pop(self.lent, None)
    self.lent = None
    site = self.sites[name]
    gone = set(self.whole.devices) - set(devices)
    site.cell = dataclasses.replace(
      self.whole,
      devices=devices,
      divisible=False,
      slots=max(
        1, int(self.whole.slots * len(devices) / len(self.whole.devices))
      ),
    )
    if gone:
      self.lent = f"{name}-lent"
      slots = max(1, self.whole.slots - site.cell.slots)
      cell = sched.Cell(self.lent, tuple(sorted(gone)), slots, "standalone")
      self.sites[self.lent] = Site(cell, "idle", life=ticket)
    return self.send(sched.Resized(self.tick(), name, ticket))

  def resize_fails(self) -> tuple:
    name, _, ticket = self.resizing
    self._resize_ends()
    return self.send(sched.ResizeFailed(self.tick(), name, ticket))

  def _resize_ends(self) -> None:
    self.resizing = None
    if self.lent is not None:
      self.sites[self.lent].holder = "idle"

  # Actions.

  def _resize(self, a) -> None:
    self._serial()
    assert a.cell == self.core == self.whole.name and self.core_lives
    assert self.sites[a.cell].holder == "trainer"
    assert not self.claims and not self.applying, "resized amid an update"
    assert len(a.devices) == self.wanted
    lent = self.sites.get(self.lent)
    assert lent is None or not lent.runs, "the lent cell is not empty"
    if lent is not None:
      lent.holder, lent.version, lent.life = "dead", None, lent.life + 1
    self.resizing = (a.cell, a.devices, a.ticket)

  def _admit(self, a) -> None:
    assert a.group not in self.admitted
    assert a.version == self.published
    self.admitted[a.group] = a.version
    self.ended[a.group] = {}
    self.waiting |= {(a.group, i) for i in range(self.law.group_size)}

  def _place(self, execution, name: str) -> None:
    site = self.sites[name]
    assert site.holder == "engine", f"{name} does not serve: {site.holder}"
    # Engines never serve a version older than an execution was promised, and
    # all serve the same one.
    assert site.version == self.published >= self.admitted[execution[0]]
    site.runs.add(execution)
    assert len(site.runs) <= site.cell.slots, f"{name} is over its slots"
    self.where[execution] = name

  def _start(self, a) -> None:
    self.waiting.remove(a.execution)
    self._place(a.execution, a.cell)
    self.started.add(a.execution)

  def _migrate(self, a) -> None:
    assert a.execution in self.started and a.source != a.target
    if self.sites[a.source].holder == "dead":
      self.waiting.remove(a.execution)
    else:
      assert self.where[a.execution] == a.source
      self.sites[a.source].runs.remove(a.execution)
    self._place(a.execution, a.target)

  def _requeue(self, a) -> None:
    site = self.sites[self.where.pop(a.execution)]
    site.runs.remove(a.execution)
    self.waiting.add(a.execution)

  def _serial(self) -> None:
    assert self.publishing is None and not self.transfers
    assert self.resizing is None

  def _switch(self, a) -> None:
    self._serial()
    site = self.sites[a.cell]
    assert not site.runs, f"{a.cell} switches with {site.runs}"
    if a.role == "train":
      assert site.holder == "engine" and site.cell.kind != "standalone"
      assert self.core_lives and (
        a.cell == self.core or self.sites[self.core].holder == "trainer"
      ), "the core leaves first"
      self._something_to_train()
    else:
      assert site.holder in ("trainer", "idle") and site.cell.kind != "trainer"
      assert not self.applying or not site.trained
      # It hands its sums over; a core that serves keeps none.
      heir = self.sites[self.core]
      if a.cell != self.core and heir.holder == "trainer":
        heir.trained |= site.trained
      site.trained.clear()
    site.before, site.holder, site.target = site.holder, "nobody", a.role
    site.ticket = a.ticket

  def _something_to_train(self) -> None:
    assert self.claims and not self.applying

  def _rehost(self, a) -> None:
    self._serial()
    assert not self.core_lives
    site = self.sites[a.cell]
    assert not site.runs and site.cell.kind != "standalone"
    assert site.holder in ("trainer", "idle", "engine")
    site.before, site.holder, site.target = site.holder, "nobody", "core"
    site.ticket = a.ticket

  def _consume(self, a) -> None:
    assert a.update == self.version + 1 <= self.steps
    assert a.group not in self.consumed and a.group not in self.dropped
    if self.published < self.version and self.version % self.law.mu == 0:
      # The weights at a burst's end are on their way before the next begins.
      assert self.publishing == self.version
    ended = self.ended[a.group]
    assert len(ended) == self.law.group_size and any(ended.values())
    staleness = self.version - self.admitted[a.group]
    bound = self.law.maximum()
    assert bound is None or staleness <= bound or self.dropped
    if self.law.max_staleness is not None:
      assert staleness <= self.law.max_staleness
    self.staleness.append(staleness)
    self.consumed[a.group] = a.update
    self.claims.append(a.group)
    assert len(self.claims) <= self.law.batch

  def _apply(self, a) -> None:
    assert a.update == self.version + 1 and not self.applying
    assert self.drained and self.told_drained and self.publishing is None
    assert self.core_lives and self.sites[self.core].holder == "trainer"
    self.applying = True

  def _publish(self, a) -> None:
    self._serial()
    assert a.version == self.version and self.published < a.version
    assert a.version % self.law.mu == 0 or a.version == self.steps
    self.publishing = a.version

  def _drop(self, a) -> None:
    ended = self.ended[a.group]
    if a.reason == "lost":
      assert len(ended) == self.law.group_size and not any(ended.values())
    elif a.reason == "flat":
      assert (
        self._taught(a.group) is False and len(self.claims) < self.law.batch
      )
    else:
      # Nothing that keeps deadlines, or FIFO's maximum, ever comes to this.
      assert not self.state.plan.policy.deadlines
      assert self.law.window != 1 or "lost" in self.dropped.values()
      stale = self.version - self.admitted[a.group]
      assert stale > self.law.max_staleness
    assert a.group not in self.consumed
    self.dropped[a.group] = a.reason
    for execution in [e for e in self.where if e[0] == a.group]:
      self.sites[self.where.pop(execution)].runs.remove(execution)
    self.waiting = {e for e in self.waiting if e[0] != a.group}

  def _stop(self, a) -> None:
    assert self.version == self.published == self.steps
    for name, site in self.sites.items():
      back = site.holder in ("engine", "dead") or name == self.lent
      assert back or site.cell.kind == "trainer", "a cell is not back"
    self.stopped = True

  # What must hold after every event.

  def _check(self) -> None:
    owned = [d for s in self.sites.values() for d in s.cell.devices]
    assert len(set(owned)) == len(owned), "a device is owned twice"
    for site in self.sites.values():
      # Devices are held by one: what runs is in an engine that holds them,
      # what was summed in a trainer that does.
      assert not site.runs or site.holder == "engine"
      assert not site.trained or site.holder in ("trainer", "nobody")
    assert len(self.committed) == self.version * self.law.batch
    assert len(set(self.committed)) == len(self.committed)
    # No group is lost: each is unconsumed, in an update, or dropped.
    queued = set(self.admitted) - set(self.consumed) - set(self.dropped)
    assert queued == set(self.state.queue.groups)
    assert self.unfinished == self.state.work.unfinished
    if self.version < self.steps and not self.stopped:
      wanted = self._wanted()
      assert len(queued) == wanted, f"{len(queued)} groups, not {wanted}"
      given_back = self.lent and self.wanted != len(
        self.sites[self.whole.name].cell.devices
      )
      free = sum(
        s.cell.slots - len(s.runs)
        for n, s in self.sites.items()
        if s.holder == "engine" and not (given_back and n == self.lent)
      )
      assert not (self.waiting and free), "an execution waits beside free slots"

  def _wanted(self) -> int:
    """Unconsumed groups: Q_b less what was consumed since the boundary."""
    done = (self.version - self.published) * self.law.batch + len(self.claims)
    wanted = self.law.boundary - done
    if not self.state.plan.endless:
      rest = (self.steps - self.version) * self.law.batch - len(self.claims)
      wanted = min(wanted, rest)
    return wanted

  # A run without faults.

  def choices(self) -> list:
    """What may happen next if nothing fails, as calls."""
    able = []
    if self.where:
      able.append(lambda rng: self.finish(rng.choice(list(self.where))))
    able += [lambda _, n=n: self.switch_done(n) for n in self.transfers]
    if self.publishing is not None:
      able.append(lambda _: self.publish_done())
    if self.applying:
      able.append(lambda _: self.commit())
    elif self.drained and not self.told_drained:
      able.append(lambda _: self.drain())
    if self.resizing:
      able.append(lambda _: self.resized())
    able += [lambda _, n=n: self.train(n) for n in self.trains()]
    able += [lambda _, n=n: self.up(n) for n in self.dead()]
    return able

  def run(self, rng: random.Random, most: int = 1_000_000) -> World:
    """Until Stop, in a random order of events."""
    if not self.log:
      self.begin()
    for _ in range(most):
      if self.stopped:
        return self
      able = self.choices()
      assert able, "nothing can happen, and the run is not over"
      rng.choice(able)(rng)
    return self


def deltas(values) -> dict[int, float]:
  """Shares of each value."""
  count = collections.Counter(values)
  return {v: n / len(values) for v, n in count.items()}
