"""Scores a kept workspace, in a sandbox that the agent never was in.

The workspace's tar is laid out in a fresh sandbox; /tests is shown read-only
from outside; /logs/verifier is an empty file system of that sandbox alone.
`bash /tests/test.sh` runs in the workspace, with nothing of the agent's shell:
no variable, no home, no /tmp, no process. After every process has ended the
reports are read by plain names, without following a link.

Precedence: ctrf.json, else junit.xml (results.xml, report.xml), else one
verdict for all: reward.txt, reward.json, else test.sh's exit status.

What stays open, as in any such verifier: tests that run programs which the
agent wrote run them as themselves. Read-only /tests, the read-only system and
the time limit bind those; a test should not trust what they print.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import pathlib
import weakref

from gyre import config, types
from gyre.envs import reports, sandbox, snapshot
from gyre.envs import task as task_lib

_ENV = {
  "TEST_DIR": "/tests",
  # Python must not import what the agent left in the working directory.
  "PYTHONSAFEPATH": "1",
  "PYTHONNOUSERSITE": "1",
}
_JUNIT = ("junit.xml", "results.xml", "report.xml")
_LOGS = "/logs/verifier"
_NOT_RUN = (126, 127)


@dataclasses.dataclass(frozen=True)
class Findings:
  """What one run of the tests left.

  Attributes:
    results: id -> passed, or None without a readable report.
    reward: of reward.txt, reward.json or the exit status, or None.
    failure: why the verifier itself failed, or "".
    blame: what the workspace did to the tests (a timeout, a limit), or "".
    detail: one line for people.
  """

  results: dict[str, bool] | None = None
  reward: float | None = None
  failure: str = ""
  blame: str = ""
  detail: str = ""


async def _report(box: sandbox.Sandbox) -> tuple[dict | None, list[str]]:
  """The per-assertion results, if a readable report has some."""
  problems = []
  sources = [("ctrf.json", reports.parse_ctrf)]
  sources += [(name, reports.parse_junit) for name in _JUNIT]
  for name, parse in sources:
    data, why = await box.read(f"{_LOGS}/{name}", reports.MAX_BYTES)
    if data is None:
      problems += [why] if why else []
      continue
    try:
      found = parse(data)
    except reports.ReportError as e:
      problems.append(str(e))
      continue
    if found:
      return found, problems
    problems.append(f"{name} has no test")
  return None, problems


async def _reward(box: sandbox.Sandbox) -> tuple[float | None, list[str]]:
  problems = []
  for name in ("reward.txt", "reward.json"):
    data, why = await box.read(f"{_LOGS}/{name}", 65536)
    if data is None:
      problems += [why] if why else []
      continue
    try:
      return reports.parse_reward(data), problems
    except reports.ReportError as e:
      problems.append(str(e))
  return None, problems


async def run_tests(
  task: task_lib.Task,
  workspace: pathlib.Path,
  options: config.Sandbox,
  *,
  deterministic: bool = False,
) -> Findings:
  """Runs the task's tests once over a kept workspace.

  Raises:
    sandbox.SandboxError: the sandbox failed.
  """
  timeout_s = task.limits.verifier_timeout_s
  request = sandbox.Request(
    task,
    dataclasses.replace(options, wall_s=timeout_s + 10),
    deterministic=deterministic,
    workspace=workspace,
    mounts={"/tests": task.tests},
    env=_ENV | dict(task.verifier_env),
    logs=True,
  )
  box = await sandbox.start_backend(request)
  try:
    run = await box.run("bash /tests/test.sh", timeout_s)
    await box.close_shell()
    results, problems = await _report(box)
    reward, more = (None, []) if results else await _reward(box)
  finally:
    await box.close()
  blame = failure = ""
  if run.timed_out:
    blame = f"the tests ran for more than {timeout_s:g} s"
  elif run.killed:
    blame = f"the tests were ended: {run.killed}"
  elif run.exit_code is None or run.restarted:
    blame = "the tests ended their own shell"
  if results is None and reward is None and not blame:
    if run.exit_code in _NOT_RUN or run.exit_code >= 128:
      failure = f"test.sh exited with status {run.exit_code}"
    else:
      reward = 1.0 if run.exit_code == 0 else 0.0
  last = run.output.strip().splitlines()[-1:] or [""]
  detail = "; ".join(x for x in (failure or blame, *problems, *more) if x)
  return Findings(results, reward, failure, blame, detail or last[0][:200])


def outcome(findings: Findings, expected: tuple[str, ...]) -> types.Outcome:
  """Counts what passed among the expected assertions.

  Ids that are not expected count nothing. Tests that a workspace made hang or
  exceed a limit score 0 where the reference solution is known to pass
  (`expected` is frozen), and are a failure of the evaluation where it is not.
  """
  if findings.failure:
    return types.Outcome("eval_failed", detail=findings.failure)
  results, reward = findings.results, findings.reward
  if results is not None:
    names = expected or tuple(sorted(results))
    passed = {name: results.get(name, False) for name in names}
  elif reward is not None and not findings.blame:
    names = expected or ("reward",)
    passed = dict.fromkeys(names, reward >= 1)
    if 0 < reward < 1:
      return types.Outcome(
        "scored", reward, 0, len(names), detail=findings.detail,
        assertions=passed,
      )  # fmt: skip
  elif expected:
    passed = dict.fromkeys(expected, False)
  else:
    return types.Outcome("eval_failed", detail=findings.detail)
  count = sum(passed.values())
  return types.Outcome(
    "scored",
    count / len(passed),
    count,
    len(passed),
    detail=findings.detail,
    assertions=passed,
  )


async def verify(
  task: task_lib.Task,
  workspace: pathlib.Path | None,
  options: config.Sandbox,
  *,
  deterministic: bool = False,
) -> types.Outcome:
  """Scores a kept workspace once.

  Args:
    task: with its tests, and `expected` where it is known.
    workspace: the tar that Sandbox.close_shell kept, or None.
    options: the configuration's section.
    deterministic: as in sandbox.open_sandbox.

  Returns:
    An Outcome: "scored" (0 included); "no_artifact", score 0, when there is
    no workspace, or an empty one for a task that starts with nothing;
    "eval_failed" when a sandbox or the verifier failed, which the caller may
    retry within its budget.
  """
  total = len(task.expected)
  if workspace is None or not workspace.exists():
    return types.Outcome("no_artifact", 0.0, 0, total, detail="no workspace")
  if not task.files and snapshot.is_empty(workspace):
    return types.Outcome("no_artifact", 0.0, 0, total, detail="empty workspace")
  try:
    findings = await run_tests(
      task, workspace, options, deterministic=deterministic
    )
  except sandbox.SandboxError as e:
    return types.Outcome("eval_failed", detail=str(e))
  return outcome(findings, task.expected)


def _digest(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


# Task directory or "", task id, digest of the workspace.
_Key = tuple[str, str, str]


class KnownOutcomes:
  """Verifies each workspace of a task once, for deterministic mode.

  There the verifier sees nothing but the task and the workspace, so equal
  workspaces have equal outcomes; the executions of a group often end in the
  same one. A failed evaluation is not remembered. One instance serves one run:
  a task is known by its directory and its id.
  """

  def __init__(self, limit: int = 4096):
    """Remembers the `limit` outcomes asked for last.

    Raises:
      ValueError: the limit is not positive.
    """
    if limit < 1:
      raise ValueError(f"limit {limit} must be positive")
    self._limit = limit
    # A lock lives as long as someone holds it or waits for it.
    self._locks: weakref.WeakValueDictionary[_Key, asyncio.Lock] = (
      weakref.WeakValueDictionary()
    )
    self._known: collections.OrderedDict[_Key, types.Outcome] = (
      collections.OrderedDict()
    )

  async def verify(
    self,
    task: task_lib.Task,
    workspace: pathlib.Path | None,
    options: config.Sandbox,
    *,
    deterministic: bool = False,
  ) -> types.Outcome:
    """As `verify`; only one of equal calls at the same time runs the tests."""
    if not deterministic or workspace is None or not workspace.exists():
      return await verify(task, workspace, options, deterministic=deterministic)
    digest = await asyncio.to_thread(_digest, workspace)
    key = (task.path, task.task_id, digest)
    lock = self._locks.setdefault(key, asyncio.Lock())
    async with lock:
      if key not in self._known:
        outcome = await verify(task, workspace, options, deterministic=True)
        if outcome.status == "eval_failed":
          return outcome
        self._known[key] = outcome
        if len(self._known) > self._limit:
          self._known.popitem(last=False)
      self._known.move_to_end(key)
      return self._known[key]


async def solve(
  task: task_lib.Task,
  options: config.Sandbox,
  *,
  deterministic: bool = False,
) -> tuple[sandbox.Sandbox, str]:
  """Runs the reference solution; close the sandbox that comes back.

  Returns:
    (a sandbox whose workspace is kept, what the solution printed).

  Raises:
    task_lib.TaskError: the task has no solution.
    sandbox.SandboxError: the sandbox failed.
  """
  if not task.solution and not task.solution_turns:
    raise task_lib.TaskError(f"task {task.task_id} has no reference solution")
  by_script = not task.solution_turns
  box = await sandbox.start_backend(
    sandbox.Request(
      task,
      options,
      deterministic=deterministic,
      mounts={"/solution": task.solution} if by_script else {},
      env=task.solution_env,
    )
  )
  printed = []
  try:
    turns = ("bash /solution/solve.sh",) if by_script else task.solution_turns
    for turn in turns:
      printed.append((await box.run(turn)).output)
    await box.close_shell()
  except BaseException:
    await box.close()
    raise
  return box, "".join(printed)


async def freeze_expected(
  task: task_lib.Task,
  options: config.Sandbox,
  *,
  deterministic: bool = False,
) -> task_lib.Task:
  """The task with the ids of its assertions, as its solution passes them.

  Raises:
    task_lib.TaskError: it has no solution, or the solution does not pass.
    sandbox.SandboxError: the sandbox failed.
  """
  box, _ = await solve(task, options, deterministic=deterministic)
  try:
    findings = await run_tests(
      task, box.workspace, options, deterministic=deterministic
    )
  finally:
    await box.close()
  found = outcome(findings, ())
  if found.status != "scored" or found.passed < found.total:
    failed = [name for name, ok in found.assertions.items() if not ok]
    raise task_lib.TaskError(
      f"task {task.task_id}: its solution fails {failed or 'its tests'} "
      f"({found.detail})"
    )
  names = tuple(sorted(findings.results)) if findings.results else ()
  return dataclasses.replace(task, expected=names)
