"""The decisions of a run as they are stored, and what they must obey.

One record a decision: {"event": {"Finished": {...}}, "actions": [{"Start":
{...}}, ...]}, under kind "elastic" in the store's events. `audit` keeps books
on who holds which device, where each execution is and what was trained, and
names what contradicts them. It does not know the scheduler.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gyre.elastic.cells import Layout
from gyre.elastic.dispatch import Law

EVENT = "elastic"

Record = Mapping[str, Any]


def record(event: Any, actions: Sequence[Any]) -> dict[str, Any]:
  """Returns a decision as JSON."""
  return {
    "event": _described(event),
    "actions": [_described(a) for a in actions],
  }


def _described(message: Any) -> dict[str, Any]:
  """{"Start": {"execution": [3, 1], "cell": "cell 0"}}."""
  return {type(message).__name__: dataclasses.asdict(message)}


@dataclasses.dataclass
class _Site:
  """A cell: its devices, who holds them, what is there.

  Attributes:
    devices: that are its.
    slots: executions that it may hold.
    holder: "engine", "trainer", "" in a transfer, or "dead".
    runs: executions there.
  """

  devices: tuple[int, ...]
  slots: int
  holder: str
  runs: set[tuple[int, int]] = dataclasses.field(default_factory=set)


class Audit:
  """What a log says, and where it contradicts itself.

  Attributes:
    faults: one line each; none in a good log.
    lives: how often the run began, resumes included.
    applied: groups of each update that was committed.
    staleness: (update, group, d) of each group trained.
    switches, migrations, deaths: how many there were.
  """

  def __init__(self, layout: Layout, law: Law):
    """Empty books.

    Args:
      layout: the cells of the run.
      law: its dispatch law.
    """
    self._layout, self._law = layout, law
    self.faults: list[str] = []
    self.lives = self.switches = self.migrations = self.deaths = 0
    self.applied: dict[int, tuple[int, ...]] = {}
    self.staleness: list[tuple[int, int, int]] = []
    self._versions: dict[int, int] = {}
    self._trained: dict[int, int] = {}
    self._dropped: set[int] = set()
    self._ended: set[tuple[int, int]] = set()
    self._sites: dict[str, _Site] = {}
    self._where: dict[tuple[int, int], str] = {}
    # Where executions ran whose cell died.
    self._interrupted: dict[tuple[int, int], str] = {}
    self._claims: dict[int, list[int]] = collections.defaultdict(list)
    self._transfer: tuple[str, Mapping[str, Any], str] | None = None
    self._at = 0

  def _fault(self, message: str) -> None:
    self.faults.append(f"record {self._at}: {message}")

  def add(self, step: int, payload: Record) -> None:
    """Takes the next record.

    Args:
      step: the trainer's version after the event.
      payload: the record.
    """
    self._at += 1
    ((name, event),) = payload["event"].items()
    getattr(self, f"_on_{name.lower()}", self._nothing)(event, step)
    for action in payload["actions"]:
      ((name, fields),) = action.items()
      getattr(self, f"_do_{name.lower()}", self._nothing)(fields, step)
    self._check_devices()

  def _nothing(self, fields: Record, step: int) -> None:
    del fields, step

  def _check_devices(self) -> None:
    """No device is held by two."""
    owner: dict[int, str] = {}
    for name, site in self._sites.items():
      if site.holder not in ("engine", "trainer"):
        continue
      for device in site.devices:
        if device in owner:
          self._fault(f"device {device} is held by {owner[device]} and {name}")
        owner[device] = name

  # Events.

  def _on_begin(self, event: Record, step: int) -> None:
    """All cells stand in their first roles, and nothing runs."""
    del event
    self.lives += 1
    if step in self._claims and step not in self.applied:
      self._commit(step)  # by a run that was killed before it could say so
    last = max(self.applied, default=step)
    if step != last:
      self._fault(f"goes on at version {step}, the last commit was {last}")
    self._claims.clear()
    self._where.clear()
    self._interrupted.clear()
    self._transfer = None
    self._sites = {
      cell.name: _Site(
        cell.devices,
        cell.slots,
        "trainer" if cell.kind == "trainer" else "engine",
      )
      for cell in self._layout
    }

  def _on_finished(self, event: Record, step: int) -> None:
    del step
    execution = tuple(event["execution"])
    if execution[0] in self._dropped:
      return
    if execution in self._ended:
      self._fault(f"execution {execution} ended twice")
    self._ended.add(execution)
    self._leave(execution)

  def _leave(self, execution: tuple[int, int]) -> None:
    self._interrupted.pop(execution, None)
    cell = self._where.pop(execution, None)
    if cell in self._sites:
      self._sites[cell].runs.discard(execution)

  def _answered(self, event: Record, *kinds: str) -> tuple | None:
    """The transfer that an event answers, which is over then."""
    if self._transfer is None or self._transfer[0] not in kinds:
      return None
    _, action, _ = self._transfer
    if event["cell"] != action["cell"]:
      return None
    if event["ticket"] not in (None, action["ticket"]):
      return None
    transfer, self._transfer = self._transfer, None
    return transfer

  def _on_switchdone(self, event: Record, step: int) -> None:
    del step
    if transfer := self._answered(event, "Switch", "Rehost"):
      to = transfer[1].get("role", "train")
      holder = "engine" if to == "rollout" else "trainer"
      self._sites[event["cell"]].holder = holder

  def _on_switchfailed(self, event: Record, step: int) -> None:
    del step
    if transfer := self._answered(event, "Switch", "Rehost"):
      self._sites[event["cell"]].holder = transfer[2]

  def _on_resized(self, event: Record, step: int) -> None:
    del step
    if not (transfer := self._answered(event, "Resize")):
      return
    site, keeps = self._sites[event["cell"]], tuple(transfer[1]["devices"])
    lent, whole = f"{event['cell']}-lent", self._layout.core
    site.devices, site.holder = keeps, "trainer"
    freed = tuple(d for d in whole.devices if d not in keeps)
    site.slots = max(1, whole.slots * len(keeps) // len(whole.devices))
    self._sites.pop(lent, None)
    if freed:
      slots = max(1, whole.slots - site.slots)
      self._sites[lent] = _Site(freed, slots, "")

  def _on_resizefailed(self, event: Record, step: int) -> None:
    del step
    if transfer := self._answered(event, "Resize"):
      self._sites[event["cell"]].holder = transfer[2]

  def _on_published(self, event: Record, step: int) -> None:
    del step
    kind, action, _ = self._transfer or ("", {}, "")
    if kind == "Publish" and action["version"] == event["version"]:
      self._transfer = None

  def _on_applied(self, event: Record, step: int) -> None:
    update = event["update"]
    if update == step and update not in self.applied:
      self._commit(update)

  def _commit(self, update: int) -> None:
    groups = self._claims.pop(update, [])
    if len(groups) != self._law.batch:
      self._fault(
        f"update {update} trained {len(groups)} groups, not {self._law.batch}"
      )
    for group in groups:
      if group in self._trained:
        self._fault(
          f"group {group} trained by updates {self._trained[group]}, {update}"
        )
      self._trained[group] = update
      if group in self._versions:
        staleness = update - 1 - self._versions[group]
        self.staleness.append((update, group, staleness))
    self.applied[update] = tuple(groups)

  def _on_celldown(self, event: Record, step: int) -> None:
    del step
    site = self._sites.get(event["cell"])
    if site is None or site.holder == "dead":
      return
    self.deaths += 1
    site.holder = "dead"
    for execution in list(site.runs):
      self._leave(execution)
      self._interrupted[execution] = event["cell"]
    if self._transfer is not None:
      kind, action, _ = self._transfer
      if kind != "Publish" and action["cell"] == event["cell"]:
        self._transfer = None

  # Actions.

  def _do_admit(self, action: Record, step: int) -> None:
    group, version = action["group"], action["version"]
    if group in self._versions:
      self._fault(f"group {group} admitted twice")
    if version > step:
      self._fault(
        f"group {group} admitted at {version}, the trainer's is {step}"
      )
    self._versions[group] = version

  def _place(self, execution: tuple[int, int], cell: str) -> None:
    self._leave(execution)
    site = self._sites.get(cell)
    if site is None or site.holder != "engine":
      holder = site.holder if site else "no cell"
      self._fault(f"execution {execution} placed on {cell}: {holder}")
      return
    if execution in self._ended:
      self._fault(f"execution {execution} starts again, though it ended")
    site.runs.add(execution)
    if len(site.runs) > site.slots:
      self._fault(f"{cell} holds {len(site.runs)} of {site.slots} executions")
    self._where[execution] = cell

  def _do_start(self, action: Record, step: int) -> None:
    del step
    execution = tuple(action["execution"])
    was = self._where.get(execution)
    if was is not None:
      self._fault(f"execution {execution} starts, though it runs on {was}")
    self._place(execution, action["cell"])

  def _do_migrate(self, action: Record, step: int) -> None:
    del step
    self.migrations += 1
    execution = tuple(action["execution"])
    was = self._where.get(execution, self._interrupted.get(execution))
    if was != action["source"]:
      self._fault(
        f"execution {execution} moves from {action['source']}, it is on {was}"
      )
    self._place(execution, action["target"])

  def _begin(self, kind: str, action: Record, was: tuple[str, ...]) -> None:
    """A transfer begins: one at a time, its cell empty and as expected."""
    if self._transfer is not None:
      self._fault(f"{kind} {action} during {self._transfer[:2]}")
    before = ""
    if "cell" in action:
      site = self._sites[action["cell"]]
      before = site.holder
      if before not in was:
        self._fault(f"{kind} of {action['cell']}, held by {before!r}")
      if before == "engine" and site.runs:
        self._fault(f"{action['cell']} leaves with {len(site.runs)} executions")
      site.holder = ""
    self._transfer = kind, action, before

  def _do_switch(self, action: Record, step: int) -> None:
    del step
    self.switches += 1
    to_rollout = action["role"] == "rollout"
    was = ("trainer", "dead", "") if to_rollout else ("engine",)
    self._begin("Switch", action, was)

  def _do_rehost(self, action: Record, step: int) -> None:
    del step
    self._begin("Rehost", action, ("engine", "trainer", "dead"))

  def _do_resize(self, action: Record, step: int) -> None:
    del step
    lent = self._sites.get(f"{action['cell']}-lent")
    if lent is not None:
      if lent.runs:
        self._fault(f"the lent cell ends with {len(lent.runs)} executions")
      lent.holder = "dead"
    self._begin("Resize", action, ("trainer",))

  def _do_publish(self, action: Record, step: int) -> None:
    del step
    self._begin("Publish", action, ())

  def _do_consume(self, action: Record, step: int) -> None:
    del step
    group, update = action["group"], action["update"]
    if group in self._trained or any(group in c for c in self._claims.values()):
      self._fault(f"group {group} consumed twice")
    if group in self._dropped:
      self._fault(f"group {group} consumed, though it was dropped")
    # A resumed run forgets what it decided after its last commit.
    staleness = update - 1 - self._versions.get(group, update - 1)
    bound = self._law.maximum()
    if bound is not None and staleness > bound:
      self._fault(
        f"group {group} consumed with staleness {staleness}, beyond {bound}"
      )
    self._claims[update].append(group)

  def _do_drop(self, action: Record, step: int) -> None:
    del step
    group = action["group"]
    self._dropped.add(group)
    for execution in [e for e in self._where if e[0] == group]:
      self._leave(execution)


def audit(
  layout: Layout, law: Law, records: Iterable[tuple[int, Record]]
) -> Audit:
  """Books over a whole log, resumes included.

  Args:
    layout: the cells of the run.
    law: its dispatch law.
    records: (step, payload) of each event of kind EVENT, in order.
  """
  books = Audit(layout, law)
  for step, payload in records:
    books.add(step, payload)
  return books
