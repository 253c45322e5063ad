"""What the cells of a run work on: tasks, executions, groups, commits.

Durable before visible. A group is in the store before any of its executions
starts, and a finished execution before anything else happens to it; an
update's state and the ids of every group consumed are one commit; only then
are its weights published, and its line written. So there is one place to go on
from: the newest checkpoint, and what the store holds beside it.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gyre.config import Config
from gyre.elastic import scheduler as sched
from gyre.envs.task import Task
from gyre.rollout.router import Router
from gyre.runtime import collect, evaluate, publish, reshard, sampler
from gyre.runtime.cell import Core, Worker
from gyre.runtime.checkpoints import Checkpoints
from gyre.runtime.position import PHASE, Position, flat, group_id
from gyre.runtime.record import Record, peak_memory
from gyre.runtime.runner import Runner
from gyre.runtime.tasks import TaskSource
from gyre.runtime.updates import Update, score_group
from gyre.runtime.watch import Watch
from gyre.runtime.work import MicroSteps
from gyre.store import manifest
from gyre.store.rollouts import RolloutStore
from gyre.trajectory.score import reward
from gyre.types import Execution, Group, Snapshot

_WEIGHTS = "weights"


class RolloutError(RuntimeError):
  """No execution could be scored for long; the message says why."""


class RunWork:
  """A run's side of the conductor; see work.Work."""

  def __init__(
    self,
    config: Config,
    position: Position,
    *,
    tasks: TaskSource,
    runner: Runner,
    router: Router,
    store: RolloutStore,
    checkpoints: Checkpoints,
    record: Record,
    watch: Watch,
    row_multiple: int,
    wall_s: Callable[[], float],
    worker: Callable[[sched.Cell], Worker],
    snapshots: pathlib.Path | None = None,
  ):
    """Takes what the run is made of; nothing is done.

    Args:
      config: the run's.
      position: where it stands.
      tasks, runner, router, store, checkpoints, record, watch: of the run.
      row_multiple: rows of a micro-step are a multiple of it.
      wall_s: seconds that the run took so far, over all resumes.
      worker: makes the worker of a cell that a resize has brought about.
      snapshots: where weights of no checkpoint are written for cells of other
        processes; None: cells take arrays.
    """
    self.worker = worker
    self._snapshots = snapshots
    self.passes = config.learner.updates_per_batch
    self.ordered = config.run.deterministic
    self.position = position
    self._config, self._tasks, self._router = config, tasks, router
    self._store, self._checkpoints = store, checkpoints
    self._record, self._watch, self._wall_s = record, watch, wall_s
    self._row_multiple = row_multiple
    self._run = runner(router, config.rollout.temperature)
    self._evaluate = runner(router.anywhere(), config.eval.temperature)
    self._groups: dict[int, Group] = {}
    self._finished: dict[int, dict[int, Execution]] = collections.defaultdict(
      dict
    )
    self._updates: dict[int, Update] = {}
    self._unwritten = True
    self._lost = 0
    self._replaced = 0  # flat groups, for the present update
    self._sizes: dict[int, int] = {}
    self._stamps: dict[int, str] = {}  # version -> of its checkpoint
    self._storing = asyncio.Lock()
    dropped = self._dropped()
    for group in store.groups(PHASE):
      if group.group_id in position.consumed or group.index in dropped:
        continue
      self._groups[group.index] = group
      for execution in store.executions(group.group_id):
        self._finished[group.index][execution.index] = execution

  def _dropped(self) -> set[int]:
    return {e["payload"]["group"] for e in self._store.events("drop")}

  def resumed(self) -> sched.Resumed:
    """What the scheduler must know of the run to go on with it."""
    consumed = self.position.consumed
    return sched.Resumed(
      version=self.position.step,
      groups=tuple((g.index, g.version) for g in self._groups.values()),
      finished=tuple(
        ((group, index), self._reward(execution) is not None)
        for group, ended in self._finished.items()
        for index, execution in ended.items()
      ),
      flat=tuple(group for group in self._groups if self.flat(group)),
      consumed=tuple(
        g.index for g in self._store.groups(PHASE) if g.group_id in consumed
      ),
      dropped=tuple(sorted(self._dropped())),
    )

  def resize_after(
    self, sizes: Mapping[str, int], ask: Callable[[int], None]
  ) -> None:
    """Has the core resized after updates.

    Args:
      sizes: update -> devices; those of earlier updates hold at once.
      ask: the conductor's.
    """
    self._sizes = {int(k): v for k, v in sizes.items()}
    self._ask = ask
    past = [u for u in self._sizes if u <= self.position.step]
    if past:
      ask(self._sizes[max(past)])

  # Groups and executions.

  def admit(self, group: int, version: int) -> None:
    """See work.Work."""
    task = self._task(group)
    made = Group(group_id(group), group, task.task_id, version=version)
    self._store.put_group(made, PHASE)
    self._groups[group] = made

  def _task(self, group: int) -> Task:
    seed = self._config.run.seed
    index = sampler.task_of(group, num_tasks=self._tasks.num_train, seed=seed)
    return self._tasks.get("train", index)

  def name(self, execution: sched.Execution) -> str:
    """See work.Work."""
    return f"{group_id(execution[0])}/{execution[1]}"

  async def run(self, execution: sched.Execution) -> bool:
    """See work.Work."""
    number, index = execution
    dispatch = collect.dispatches(
      self._groups[number],
      self._task(number),
      self._config.rollout.group_size,
      self._config.run.seed,
    )[index]
    done = await self._run(dispatch)
    # One at a time: what the loop itself writes waits for few others.
    async with self._storing:
      await self._write(RolloutStore.put_execution, done)
    self._finished[number][index] = done
    scored = self._reward(done) is not None
    if scored:
      self._lost = 0
    return scored

  async def _write(self, put: Callable[..., None], *args: Any) -> None:
    """Stores what takes long, in a thread and with a store of its own.

    Args:
      put: method of RolloutStore.
      *args: of the method.
    """

    def written() -> None:
      with RolloutStore(self._store.path) as store:
        put(store, *args)

    await asyncio.to_thread(written)

  def _reward(self, execution: Execution) -> float | None:
    return reward(execution.outcome, self._config.learner.score)

  def flat(self, group: int) -> bool:
    """See work.Work."""
    rewards = [self._reward(e) for e in self._finished.get(group, {}).values()]
    return flat(rewards, self._config.rollout.group_size)

  def drop(self, group: int, reason: str) -> None:
    """See work.Work.

    Raises:
      RolloutError: as many groups were lost, one after the other, as an update
        takes.
    """
    step = self.position.step
    self._store.put_event("drop", {"group": group, "reason": reason}, step=step)
    del self._groups[group]
    executions = self._finished.pop(group, {})
    self._replaced += reason == "flat"
    self._lost = self._lost + 1 if reason == "lost" else 0
    if self._lost >= self._config.rollout.groups_per_step:
      details = [e.outcome.detail for e in executions.values() if e.outcome]
      raise RolloutError(
        f"step {step + 1}: no execution of {self._lost} groups could be "
        f"scored: {details[0] if details else 'no outcome'}"
      )

  # Updates.

  async def compose(self, update: int, group: int) -> MicroSteps:
    """See work.Work: a thread scores and packs, the loop goes on."""
    executions = self._finished[group]
    whole = dataclasses.replace(
      self._groups[group],
      executions=tuple(executions[i] for i in sorted(executions)),
    )
    making = self._updates.setdefault(
      update, Update(self._config, self._row_multiple)
    )

    def composed() -> MicroSteps:
      return making.add(score_group(whole, self._config))

    return await asyncio.to_thread(composed)

  def rest(self, update: int) -> MicroSteps:
    """See work.Work."""
    return self._updates[update].rest()

  async def keep(self, update: int) -> None:
    """See work.Work: the samples are stored, and their tokens audited."""
    made = self._updates[update]
    await self._write(RolloutStore.put_samples, update, *made.samples())
    await asyncio.to_thread(made.audit)

  async def training_weights(self, core: Core, version: int) -> Any:
    """See work.Work: arrays, or where other processes can read them."""
    if self._snapshots is None:
      return await core.weights()
    between = self._snapshots / _WEIGHTS  # two passes, or before a commit
    if between.exists():
      # Nobody else does: who joined has read it, who will is yet to ask.
      manifest.remove(between)
    if version == self.position.step:
      return await self._verified(version)
    return await core.snapshot(between)

  async def commit(
    self, core: Core, update: int, metrics: Sequence[Mapping[str, Any]]
  ) -> None:
    """See work.Work."""
    self._write_line({})
    made = self._updates[update]
    row = {"step": update, **made.metrics(update - 1, metrics)}
    row |= self._watch.take(
      self._router.stats().generated_tokens, row["dedup/tokens_trained"]
    )
    row["perf/peak_memory"] = peak_memory()
    if self._config.rollout.resample_zero_variance:
      row["group/resampled"] = self._replaced
    mine = [s.group.group_id for s in made.groups]
    position = dataclasses.replace(
      self.position,
      step=update,
      consumed=self.position.consumed | dict.fromkeys(mine, update),
      row=row,
      lengths=self._record.lengths(),
      wall_s=self._wall_s(),
    )
    await core.save(
      self._checkpoints.path(update), dataclasses.asdict(position)
    )
    self._committed(position)

  def _committed(self, position: Position) -> None:
    """An update's state and what it consumed are durable."""
    self.position, self._unwritten = position, True
    update, self._replaced = position.step, 0
    made = self._updates[update]
    mine = [s.group.group_id for s in made.groups]
    self._store.mark_consumed(mine, update)
    if update in self._sizes:
      self._ask(self._sizes[update])
    del self._updates[update]
    for scored in made.groups:
      del self._groups[scored.group.index]
      del self._finished[scored.group.index]
    if not self._ends_burst(update):
      self._write_line({})

  def _ends_burst(self, step: int) -> bool:
    """Whether a step is published; its line waits for its evaluation then."""
    return not step % self._config.elastic.mu or step == self._config.run.steps

  async def rehost(self, core: Core) -> int:
    """See work.Work.

    What is on disk decides: the core may have died after it committed an
    update, and before it could say so.
    """
    newest = self._checkpoints.steps()[-1]
    meta = await core.restore(self._checkpoints.path(newest))
    if newest > self.position.step:
      self._committed(Position(**meta))
    await core.join(None, newest)
    return newest

  # Publication, and what follows it.

  async def publishable(self, core: Core | None, version: int) -> Any:
    """See work.Work: the core's own, or those of a checkpoint."""
    arrays = core is not None and self._snapshots is None
    if arrays and version == self.position.step:
      return reshard.to_host(await core.weights())
    return await self._verified(version)

  async def _verified(self, version: int) -> Snapshot:
    """A checkpoint, verified once for all cells that will read it."""
    path = str(self._checkpoints.path(version))
    known = self._stamps.get(version, "")
    stamp = await asyncio.to_thread(manifest.checked, path, known)
    kept = {self.position.published, self.position.step, version}
    self._stamps = {v: s for v, s in self._stamps.items() if v in kept}
    self._stamps[version] = stamp
    return Snapshot(version, path, verified=stamp)

  async def deliver(self, weights: Any, version: int) -> None:
    """See work.Work: each engine is checked to use them."""
    await publish.publish_to_all(self._router, weights, version)

  async def published(self, version: int) -> None:
    """See work.Work: evaluates, and writes the step's line."""
    step = self.position.step
    self._store.put_event("publish", {"version": version}, step=step)
    self._watch.published(version)
    self.position.published = version
    if version < step and not self._ends_burst(step):
      self._write_line({})  # resumed in the middle of a burst
    if version < step or not self._unwritten:
      return
    row: dict[str, Any] = {}
    if self._record.written is None and self._evaluates(step):
      began = time.monotonic()
      row = await self._evaluation(step)
      row["perf/eval_s"] = time.monotonic() - began
    self._write_line(row)

  def _write_line(self, evaluated: Mapping[str, Any]) -> None:
    """Writes the line of the newest step, if that was not done."""
    if not self._unwritten:
      return
    self._unwritten = False
    step, best = self.position.step, self.position.best
    row = {**self.position.row, **evaluated}
    # Of a step whose line was written before the run was killed.
    row, self._record.written = self._record.written or row, None
    if row.get("eval/reward") is not None:
      best = self._checkpoints.offer_best(step, row["eval/reward"], best)
      self.position.evaluated = step
    self._record.step(row)
    self.position.best = best
    boundary = step - step % self._config.elastic.mu
    self._checkpoints.prune(best, {self.position.published, boundary})

  def _evaluates(self, step: int) -> bool:
    """Whether a step is evaluated: the first, the last, each `every`-th.

    Where that is no end of a burst, the end that follows it is.
    """
    every = self._config.eval.every
    if not (every and self._tasks.num_eval):
      return False
    due = self.position.evaluated // every if step else -1
    return step // every > due or step == self._config.run.steps

  async def _evaluation(self, step: int) -> dict[str, Any]:
    tasks = [self._tasks.get("eval", i) for i in range(self._tasks.num_eval)]
    with self._watch.evaluating(step):
      row, _ = await evaluate.evaluate(
        tasks,
        self._evaluate,
        self._config,
        step=step,
        version=step,
        store=self._store,
        progress=lambda done, total: self._record.progress.phase(
          "evaluation", done, total
        ),
      )
    return row
