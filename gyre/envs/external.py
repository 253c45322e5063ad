"""Runs a black-box harness in a sandbox, with nothing to reach but its API.

One execution is one task done once by a program that gyre knows nothing of:
the model calls that it made are what the API recorded under the execution's
own key, and what it did is the workspace that is left, which is verified. The
program reaches the API at a port of the sandbox's loopback (relay.py), whose
other end is a unix socket of this machine; there is no other network.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gyre import config, types
from gyre.envs import attempts, launchers, relay, spawn, tool_calls, verifier
from gyre.envs import sandbox as sandbox_lib
from gyre.envs import task as task_lib
from gyre.envs.shell import CommandResult

_SOCKET = "/run/gyre/api.sock"
_PORT = 8377
_RELAY_TIMEOUT_S = 30.0
_SPARE_WALL_S = 60.0
_MAX_OUTPUT_CHARS = 20_000
_SYSTEM_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")


class Api(Protocol):
  """Of gyre.harness.proxy.Proxy, what an execution needs."""

  def open(
    self,
    *,
    execution_id: str,
    group_id: str,
    seed: int,
    temperature: float | None = None,
  ) -> str:
    """Begins to serve an execution; returns its key."""

  async def close(self, key: str) -> Sequence[types.Call]:
    """Serves the key no longer; returns its calls, in order of start."""


def interpreter() -> tuple[str, dict[str, pathlib.Path]]:
  """A Python that the sandbox can run.

  Returns:
    (its path, what the sandbox must show for it). The system's, which /usr
    shows, else the one that this process runs on.
  """
  for path in _SYSTEM_PYTHONS:
    if pathlib.Path(path).exists():
      return path, {}
  base = pathlib.Path(sys.base_prefix)
  name = f"python{sys.version_info.major}.{sys.version_info.minor}"
  return str(base / "bin" / name), {str(base): base}


class _Run:
  """One execution in progress; `execution()` tells how far it has come."""

  def __init__(
    self,
    task: task_lib.Task,
    *,
    proxy: Api,
    socket: pathlib.Path,
    harness: config.Harness,
    sandbox: config.Sandbox,
    agent: config.Agent,
    execution_id: str,
    group_id: str,
    index: int,
    seed: int,
    version: int,
    temperature: float | None = None,
    check: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.time,
  ):
    self._check = check
    self._task, self._proxy, self._harness = task, proxy, harness
    self._names = dict(execution_id=execution_id, group_id=group_id)
    self._head = dict(
      **self._names,
      index=index,
      task_id=task.task_id,
      version=version,
      seed=seed,
    )
    self._temperature, self._clock = temperature, clock
    limit = task.limits.agent_timeout_s or agent.harness_timeout_s
    self._limit_s = min(limit, agent.harness_timeout_s)
    self._python, shown = interpreter()
    self.request = sandbox_lib.Request(
      task,
      # To the sandbox the whole harness is one command, which also waits for
      # the model: only the harness timeout bounds its time.
      dataclasses.replace(sandbox, wall_s=self._limit_s + _SPARE_WALL_S),
      mounts={
        launchers.DIRECTORY: {
          "relay.py": task_lib.FileSpec(
            pathlib.Path(relay.__file__).read_bytes()
          ),
          pathlib.PurePosixPath(launchers.INSTRUCTION).name: task_lib.FileSpec(
            task.instruction.encode()
          ),
        }
      },
      binds=launchers.shown(harness) | shown,
      sockets={_SOCKET: socket},
    )
    self._start = clock()
    self._key: str | None = None
    self._calls: tuple[types.Call, ...] = ()
    self._printed: dict[str, Any] | None = None
    self.truncated = ""

  def execution(self, outcome: types.Outcome) -> types.Execution:
    """The record so far; `turns` counts the calls that were no summaries."""
    said = {"role": "user", "content": self._task.instruction}
    return types.Execution(
      **self._head,
      calls=self._calls,
      outcome=outcome,
      truncated=self.truncated,
      turns=sum(not c.role.endswith("summary") for c in self._calls),
      messages=tuple(m for m in (said, self._printed) if m),
      t_start=self._start,
      t_end=self._clock(),
    )

  def _open(self) -> str:
    self._calls, self._printed, self.truncated = (), None, ""
    self._key = self._proxy.open(
      **self._names, seed=self._head["seed"], temperature=self._temperature
    )
    return self._key

  async def close(self) -> None:
    """Ends the key's service, once, however often we are cancelled."""
    if self._key is None:
      return
    work = asyncio.ensure_future(self._proxy.close(self._key))
    self._key = None
    try:
      await spawn.to_its_end(work)
    finally:
      self._calls = tuple(work.result())

  async def play(self, box: sandbox_lib.Sandbox) -> None:
    """Runs the harness to its end and keeps the workspace."""
    await self.close()  # of an attempt that failed
    result = await self._run_harness(box, self._open())
    self._check()
    await box.close_shell()
    await self.close()
    output = tool_calls.middle_cut(result.output, _MAX_OUTPUT_CHARS)
    self._printed = {
      "role": "harness",
      "content": "\n".join(filter(None, (output.rstrip("\n"), result.notice))),
      "exit_code": result.exit_code,
    }
    if result.timed_out:
      self.truncated = "time"
    else:
      self.truncated = {"wall": "time"}.get(result.killed, result.killed)
    if result.exit_code and not self._calls and not self.truncated:
      # Not the policy's doing: it was never asked.
      last = result.output.strip().splitlines()[-1:] or [""]
      raise sandbox_lib.SandboxError(
        f"harness {self._harness.name} ended with status {result.exit_code} "
        f"before it called the model: {last[0][:200]}"
      )

  async def _run_harness(
    self, box: sandbox_lib.Sandbox, key: str
  ) -> CommandResult:
    # Isolated, and without the packages of whatever Python it is.
    start = f"{self._python} -I -S {launchers.DIRECTORY}/relay.py"
    told = await box.run(f"{start} {_SOCKET} {_PORT}", _RELAY_TIMEOUT_S)
    port = told.output.strip()
    if told.exit_code != 0 or not port.isdigit():
      last = (port or told.notice).splitlines()[-1:] or ["it said nothing"]
      raise sandbox_lib.SandboxError(
        f"the relay does not start: {last[0][:200]}"
      )
    at = launchers.Context(
      base_url=f"http://127.0.0.1:{port}",
      key=key,
      instruction=self._task.instruction,
      workdir=box.workdir,
      python=self._python,
    )
    made = launchers.launch(self._harness, at)
    search = launchers.search_path(self._harness)
    return await box.run(launchers.script(made, search), self._limit_s)


async def run_external(
  task: task_lib.Task,
  *,
  sandbox: config.Sandbox,
  agent: config.Agent,
  retries: int = 2,
  verify: attempts.Verify = verifier.verify,
  **options: Any,
) -> types.Execution:
  """Runs one execution of a harness to its outcome.

  A failure of the sandbox, of the harness before it asked the model anything,
  or of the verifier is tried again, in a new sandbox with the same seeds. The
  harness timeout ends the program, with all that it started, and what is left
  is scored; the overall timeout discards the execution.

  Args:
    task: what to do.
    sandbox: backends and limits; the time limit is the harness timeout.
    agent: the two timeouts.
    retries: further attempts after failures, in all.
    verify: scores the workspace; verifier.verify or one like it.
    proxy, socket: the model API and where it is served.
    harness: what to run.
    execution_id, group_id, index, seed, version: of the execution's record.
    temperature: replaces the rollout's (evaluation).
    check: called once the harness has ended; raises where no outcome of it
      counts, since the model failed.
    clock: seconds since the epoch, for the record.

  Returns:
    An Execution with its Outcome and the calls that the API recorded.

  Raises:
    asyncio.CancelledError: the sandbox is closed and the key dead before.
    Whatever `check` raises: likewise.
  """
  run = _Run(task, sandbox=sandbox, agent=agent, **options)
  work = attempts.verified(
    run.request, run.play, options=sandbox, retries=retries, verify=verify
  )
  try:
    outcome = await attempts.within(agent.overall_timeout_s, work)
  finally:
    await run.close()
  return run.execution(attempts.with_timeout(outcome, run.truncated))
