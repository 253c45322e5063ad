"""What an emulated run is made of, and what its cells work on.

An execution is calls that take a drawn work, a micro-step is its share of an
update, and a commit a small directory; the rest is as in a real run. JAX-free.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.elastic import scheduler as sched
from gyre.envs.emulated import run_execution
from gyre.rollout.profile import Profile
from gyre.rollout.router import Router
from gyre.runtime.cell import Core, Worker
from gyre.runtime.emulated_cell import EmulatedCell
from gyre.sim import tables
from gyre.sim.workload import Workload
from gyre.store import manifest
from gyre.store.rollouts import RolloutStore
from gyre.types import Execution, Group, Snapshot

_PHASE = "train"
_STEP = "step_"


@dataclasses.dataclass(frozen=True)
class Emulation:
  """What is run; times are emulated seconds.

  Attributes:
    layout: the cells; their nodes and slots count, as in the simulator.
    law: of dispatch.
    workload: works of the executions.
    profile: costs; nodes and slots are each cell's own, publish_s the delay
      of a publication.
    steps: updates.
    streaming, policy: of the scheduler.
    parts: micro-steps a group.
    calls: of an execution, at most.
    passes, ordered: see work.Work.
    evaluated: calls that follow a publication, at any cell that serves.
  """

  layout: sched.Layout
  law: sched.Law
  workload: Workload
  profile: Profile
  steps: int
  streaming: bool = True
  policy: str = "waterlevel"
  parts: int = 8
  calls: int = 6
  passes: int = 1
  ordered: bool = False
  evaluated: int = 0

  def profile_of(self, cell: sched.Cell) -> Profile:
    """What one cell costs: its share of all that may train together."""
    trains = [c for c in self.layout if c.borrows or c.kind == "trainer"]
    return dataclasses.replace(
      self.profile,
      nodes=cell.nodes,
      slots=max(1, cell.slots),
      alpha_nodes=sum(c.nodes for c in trains),
      publish_s=0.0,
    )

  @property
  def executions(self) -> int:
    """Executions of an update, B * N."""
    return self.law.batch * self.law.group_size


def of_design(
  design: tables.Design,
  calibration: tables.Calibration,
  *,
  seed: int,
  steps: int,
  speedup: float = 360.0,
) -> Emulation:
  """A row of the simulator's tables; see tables.run_design.

  Args:
    design: the row.
    calibration: costs and works.
    seed: of the works.
    steps: updates.
    speedup: emulated seconds a second of the wall: 360 takes 10 s an hour.
  """
  costs = calibration.costs(design.nodes, design.law.batch)
  slots = calibration.slots * design.law.batch * design.law.group_size
  return Emulation(
    design.layout(slots),
    design.law,
    calibration.workload(seed),
    Profile(
      speedup=speedup,
      f=costs.serial,
      x0=costs.load,
      stream_s=720.0,
      update_s=costs.update_work,
      alpha=costs.alpha,
      join_s=costs.to_train,
      serve_s=costs.to_rollout,
      publish_s=costs.publish,
    ),
    steps,
    streaming=design.streaming,
    policy=design.policy,
    # In the simulator all that train finish an update together.
    parts=sum(c.kind != "standalone" for c in design.layout(slots)),
  )


@dataclasses.dataclass
class Position:
  """Where a run stands; a commit's meta holds it as JSON.

  Attributes:
    step: updates applied.
    consumed: (update, group, staleness) of each group trained.
  """

  step: int = 0
  consumed: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)


class EmulatedWork:
  """What emulated cells work on; see work.Work."""

  def __init__(
    self,
    emulation: Emulation,
    router: Router,
    *,
    directory: pathlib.Path | None = None,
    store: RolloutStore | None = None,
  ):
    """Takes up the newest commit, if there is one.

    Args:
      emulation: what is run.
      router: of the run.
      directory: of the commits; None: they are kept in memory.
      store: where executions are kept; None: nowhere.
    """
    self.emulation = emulation
    self.passes, self.ordered = emulation.passes, emulation.ordered
    self.executions: dict[sched.Execution, Execution] = {}
    self.metrics: list[tuple[int, Mapping[str, Any]]] = []
    self.evaluations: list[tuple[int, tuple[int, ...]]] = []
    self.applied: list[float] = []
    self._router, self._store = router, store
    self._commits = None if directory is None else directory / "commits"
    self._versions: dict[int, int] = {}
    self._claims: dict[int, list[int]] = {}
    if self._commits is not None:
      self._commits.mkdir(parents=True, exist_ok=True)
      manifest.clean_temporaries(self._commits)
    self.position = self._newest()
    self._served = self.position.step

  # Durable state.

  def _path(self, step: int) -> pathlib.Path:
    return self._commits / f"{_STEP}{step:06d}"

  def _steps(self) -> list[int]:
    names = [p.name for p in self._commits.glob(f"{_STEP}*")]
    return sorted(int(name.removeprefix(_STEP)) for name in names)

  def _newest(self) -> Position:
    """What was committed last, by whoever did."""
    if self._commits is None or not (steps := self._steps()):
      return Position()
    meta = manifest.verify(self._path(steps[-1])).meta["meta"]
    consumed = [tuple(row) for row in meta["consumed"]]
    return Position(meta["step"], consumed)

  def resumed(self) -> sched.Resumed | None:
    """What the scheduler must know to go on; None at the beginning."""
    if self._store is None:
      return None
    events = self._store.events("drop")
    dropped = {e["payload"]["group"] for e in events}
    consumed = {group for _, group, _ in self.position.consumed}
    open_groups = {
      g.index: g.version
      for g in self._store.groups(_PHASE)
      if g.index not in consumed | dropped
    }
    self._versions |= open_groups
    return sched.Resumed(
      version=self.position.step,
      groups=tuple(open_groups.items()),
      finished=tuple(
        ((group, index), status == "scored")
        for group, index, status, _ in self._store.lengths(_PHASE)
        if group in open_groups
      ),
      consumed=tuple(consumed),
      dropped=tuple(sorted(dropped)),
    )

  async def restore(self, core: Core) -> int:
    """Gives a core the last committed state; its version."""
    self.position = self._newest() if self._commits else self.position
    step = self.position.step
    if self._commits is None or not step:
      await core.init(None, 0, step)
    else:
      await core.restore(self._path(step))
    return step

  # work.Work.

  def worker(self, cell: sched.Cell) -> Worker:
    """See work.Work."""
    return EmulatedCell(
      cell.name,
      self.emulation.profile_of(cell),
      executions=self.emulation.executions,
    )

  def admit(self, group: int, version: int) -> None:
    """See work.Work."""
    self._versions[group] = version
    if self._store is not None:
      made = Group(f"group-{group:06d}", group, "emulated", version=version)
      self._store.put_group(made, _PHASE)

  def name(self, execution: sched.Execution) -> str:
    """See work.Work."""
    return f"group-{execution[0]:06d}/{execution[1]}"

  async def run(self, execution: sched.Execution) -> bool:
    """See work.Work."""
    group, index = execution
    workload, name = self.emulation.workload, self.name(execution)
    work = workload.work(execution)
    done = await run_execution(
      self._router,
      work.seconds,
      self.emulation.profile,
      execution_id=name,
      group_id=name.partition("/")[0],
      index=index,
      seed=group * self.emulation.law.group_size + index,
      version=self._versions[group],
      calls=self.emulation.calls,
      timeout_s=workload.timeout,
      scored=work.scored,
    )
    if self._store is not None:
      self._store.put_execution(done)
    self.executions[execution] = done
    return work.scored

  def flat(self, group: int) -> bool:
    """See work.Work; nothing has a reward."""
    del group
    return False

  def drop(self, group: int, reason: str) -> None:
    """See work.Work."""
    if self._store is not None:
      payload = {"group": group, "reason": reason}
      self._store.put_event("drop", payload, step=self.position.step)

  async def compose(
    self, update: int, group: int
  ) -> Sequence[tuple[float, tuple[str, ...]]]:
    """See work.Work; a micro-step is its share of an update."""
    self._claims.setdefault(update, []).append(group)
    parts = self.emulation.parts
    share = 1 / (self.emulation.law.batch * parts)
    return [(share, (f"group-{group:06d}",))] * parts

  def rest(self, update: int) -> Sequence[tuple[float, tuple[str, ...]]]:
    """See work.Work."""
    del update
    return ()

  async def keep(self, update: int) -> None:
    """See work.Work; executions are kept when they end."""
    del update

  async def training_weights(self, core: Core, version: int) -> Any:
    """See work.Work."""
    del version
    return await core.weights()

  async def commit(
    self, core: Core, update: int, metrics: Sequence[Mapping[str, Any]]
  ) -> None:
    """See work.Work."""
    now = asyncio.get_running_loop().time()
    rows = [
      (update, g, update - 1 - self._versions[g]) for g in self._claims[update]
    ]
    position = Position(update, [*self.position.consumed, *rows])
    if self._commits is not None:
      await core.save(self._path(update), dataclasses.asdict(position))
      self._prune(update)
    self.position = position
    self.applied.append(now)
    self.metrics += [(update, row) for row in metrics]
    del self._claims[update]

  def _prune(self, step: int) -> None:
    """Keeps the newest two, and those that engines may be given again."""
    kept = step - 1 - self.emulation.law.mu
    for old in [s for s in self._steps() if s < kept]:
      manifest.remove(self._path(old))

  async def publishable(self, core: Core | None, version: int) -> Any:
    """See work.Work; takes publish_s, but for what is served already."""
    if core is not None:
      await core.weights()
    if version > self._served:
      profile = self.emulation.profile
      await asyncio.sleep(profile.wall(profile.publish_s))
      self._served = version
    if self._commits is None or not version:
      return Snapshot(version, "")
    return Snapshot(version, str(self._path(version)))

  async def deliver(self, weights: Any, version: int) -> None:
    """See work.Work."""
    await self._router.load_weights(weights, version)

  async def published(self, version: int) -> None:
    """See work.Work; evaluates."""
    profile = self.emulation.profile
    policy = self._router.anywhere()
    got = await asyncio.gather(
      *(
        run_execution(
          policy,
          profile.token_s * 4,
          profile,
          execution_id=f"eval-{version}/{i}",
          group_id=f"eval-{version}",
          index=i,
          seed=i,
          calls=2,
        )
        for i in range(self.emulation.evaluated)
      )
    )
    versions = [v for e in got for c in e.calls for v in c.versions.tolist()]
    self.evaluations.append((version, tuple(versions)))

  async def rehost(self, core: Core) -> int:
    """See work.Work."""
    step = await self.restore(core)
    await core.join(None, step)
    return step
