"""The built-in agent: a model, a shell, and a conversation between them.

One execution is one task done once: the loop below records every model call
exactly as it was made, then the workspace that was left is verified. Nothing
here knows what the engine is; `scripted.ScriptedPolicy` passes through the
same lines.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gyre import config, types
from gyre.envs import attempts, tool_calls, verifier
from gyre.envs import sandbox as sandbox_lib
from gyre.envs import task as task_lib
from gyre.envs.shell import CommandResult
from gyre.harness import render
from gyre.rollout import calls
from gyre.rollout import engine as engine_lib


@dataclasses.dataclass(frozen=True)
class Turn:
  """What `on_turn` is told: one model call and what came of it.

  Attributes:
    execution_id: whose.
    index: of the call, 0-based.
    text: what the model said.
    command: what was run, or None.
    output: what went back to the model.
    tokens: sampled in the call.
  """

  execution_id: str
  index: int
  text: str
  command: str | None
  output: str
  tokens: int


OnTurn = Callable[[Turn], None]


def example_messages(
  tasks: Sequence[task_lib.Task], agent: config.Agent
) -> list[dict[str, Any]]:
  """Worked examples as a conversation: instruction, command, next one.

  Where the agent has more than one turn, each example also shows the empty
  output and how the end is said.

  Raises:
    ValueError: a task has not exactly one solution turn.
  """
  out: list[dict[str, Any]] = []
  for task in tasks:
    if len(task.solution_turns) != 1:
      raise ValueError(
        f"example {task.task_id} has {len(task.solution_turns)} solution "
        "turns, a worked example has 1"
      )
    said = tool_calls.write(agent.tool_format, task.solution_turns[0])
    out.append({"role": "user", "content": task.instruction})
    out.append({"role": "assistant", "content": said})
    if agent.max_turns > 1:
      out.append(tool_calls.result_message(agent.tool_format, ""))
      out.append({"role": "assistant", "content": tool_calls.DONE})
  return out


def prompt_messages(
  task: task_lib.Task,
  agent: config.Agent,
  *,
  examples: Sequence[task_lib.Task] = (),
  template_has_tools: bool = False,
) -> list[dict[str, Any]]:
  """The conversation before the model speaks.

  Args:
    task: gives the instruction.
    agent: tool format, system prompt, number of examples.
    examples: one-turn tasks; the first agent.examples of them are shown.
    template_has_tools: the chat template describes the tools itself.

  Raises:
    ValueError: fewer examples than asked for.
  """
  if len(examples) < agent.examples:
    raise ValueError(
      f"agent.examples is {agent.examples}, only {len(examples)} were given"
    )
  system = tool_calls.system_prompt(
    agent.tool_format, agent.system_prompt, template_has_tools
  )
  messages = [{"role": "system", "content": system}] if system else []
  messages += example_messages(examples[: agent.examples], agent)
  return [*messages, {"role": "user", "content": task.instruction}]


def tool_text(result: CommandResult, agent: config.Agent) -> str:
  """What the model reads of a command: output, then what went wrong."""
  output = tool_calls.middle_cut(
    result.output.rstrip("\n"), agent.max_output_chars
  )
  note = result.notice
  if not note and result.exit_code:
    note = f"[exit {result.exit_code}]"
  return "\n".join(part for part in (output, note) if part)


class _Loop:
  """One execution in progress; `execution()` tells how far it has come."""

  def __init__(
    self,
    task: task_lib.Task,
    *,
    engine: engine_lib.Engine,
    renderer: render.Renderer,
    agent: config.Agent,
    rollout: config.Rollout,
    execution_id: str,
    group_id: str,
    index: int,
    seed: int,
    version: int,
    examples: Sequence[task_lib.Task] = (),
    temperature: float | None = None,
    deterministic: bool = False,
    on_turn: OnTurn | None = None,
    clock: Callable[[], float] = time.time,
    engine_name: str = "",
  ):
    self._task, self._engine, self._renderer = task, engine, renderer
    self._agent, self._rollout = agent, rollout
    self._names = dict(
      execution_id=execution_id,
      group_id=group_id,
    )
    self._head = dict(
      **self._names,
      index=index,
      task_id=task.task_id,
      version=version,
      seed=seed,
    )
    self._temperature = (
      rollout.temperature if temperature is None else temperature
    )
    self._deterministic, self._on_turn = deterministic, on_turn
    self._clock, self._engine_name = clock, engine_name
    has_tools = (
      agent.tool_format == "hermes" and "tools" in renderer.chat_template
    )
    self._tools = [tool_calls.SHELL_TOOL] if has_tools else None
    self._examples = tuple(examples)
    self._start = clock()
    self._deadline: float | None = None
    self.reset()

  def reset(self) -> None:
    """Back to the instruction, for another attempt in a new sandbox."""
    self._messages = prompt_messages(
      self._task,
      self._agent,
      examples=self._examples,
      template_has_tools=self._tools is not None,
    )
    self._calls: list[types.Call] = []
    self._turns = 0
    self.truncated = ""

  def execution(self, outcome: types.Outcome | None = None) -> types.Execution:
    """The record so far."""
    return types.Execution(
      **self._head,
      calls=tuple(self._calls),
      outcome=outcome,
      truncated=self.truncated,
      turns=self._turns,
      messages=tuple(self._messages),
      t_start=self._start,
      t_end=self._clock(),
    )

  def _time_left(self) -> float | None:
    """Seconds before the harness timeout; None in deterministic mode."""
    if self._deadline is None:
      return None
    return self._deadline - asyncio.get_running_loop().time()

  async def run(self, box: sandbox_lib.Sandbox) -> None:
    """Talks until the model ends, or a limit does (then `truncated`)."""
    limit = self._agent.harness_timeout_s
    if self._task.limits.agent_timeout_s:
      limit = min(limit, self._task.limits.agent_timeout_s)
    self._deadline = (
      None if self._deterministic else asyncio.get_running_loop().time() + limit
    )
    written = self._renderer.text(self._messages, tools=self._tools)
    prompt = render.NextPrompt(
      np.asarray(self._renderer.encode(written), np.int32), "", written
    )
    parent = None
    for turn in range(self._agent.max_turns):
      room = self._agent.max_context - len(prompt.ids)
      if room < 1:
        self.truncated = "context"
        return
      call = await self._call(prompt, parent, room)
      if call is None:
        return
      text = self._renderer.completion_text(call.completion_ids)
      self._messages.append({"role": "assistant", "content": text})
      if call.finish_reason == "length":
        full = len(call.completion_ids) >= room
        self.truncated = "context" if full else "tokens"
      parsed = tool_calls.parse(
        self._agent.tool_format, text, cut=call.finish_reason == "length"
      )
      last = self.truncated in ("context", "time")
      if parsed.ends or last:
        self._tell(turn, text, None, "", call)
        return
      output, go_on = await self._act(box, parsed)
      message = tool_calls.result_message(self._agent.tool_format, output)
      self._tell(turn, text, parsed.command, output, call)
      self._messages.append(message)
      if not go_on:
        return
      # Where the template rewrites what came before, a new branch begins.
      prompt = self._renderer.next_prompt(
        call.prompt_ids,
        call.completion_ids,
        self._messages,
        prompt_text=prompt.text,
        tools=self._tools,
      )
      parent = call.call_id if prompt.extends else None
    self.truncated = "turns"

  async def _call(
    self, prompt: render.NextPrompt, parent: str | None, room: int
  ) -> types.Call | None:
    """One model call, recorded; None when no time is left for it."""
    left = self._time_left()
    if left is not None and left <= 0:
      self.truncated = "time"
      return None
    number = len(self._calls)
    execution_id = self._names["execution_id"]
    sampling = {
      "temperature": self._temperature,
      "top_p": self._rollout.top_p,
      "top_k": self._rollout.top_k,
      "max_new_tokens": min(self._agent.max_new_tokens, room),
      "seed": calls.call_seed(
        self._head["seed"], self._names["group_id"], execution_id, number
      ),
    }
    request = engine_lib.Request(
      ids=prompt.ids,
      stop_ids=self._renderer.stop_ids,
      request_id=f"{execution_id}#{number}",
      execution_id=execution_id,
      **sampling,
    )
    start = self._clock()
    completion = await calls.generate(self._engine, request, timeout_s=left)
    if completion.finish_reason == "abort":
      self.truncated = "time"
      if not len(completion.ids):
        return None
    call = types.Call(
      **self._names,
      call_id=f"{number:04d}",
      parent_hint=parent,
      prompt_ids=request.ids,
      completion_ids=completion.ids,
      logprobs=completion.logprobs,
      versions=completion.versions,
      finish_reason=completion.finish_reason,
      t_start=start,
      t_end=self._clock(),
      engine=self._engine_name or type(self._engine).__name__,
      sampling_asked=sampling,
      sampling_used=sampling,
      boundary=prompt.step,
    )
    self._calls.append(call)
    return call

  async def _act(
    self, box: sandbox_lib.Sandbox, parsed: tool_calls.Parsed
  ) -> tuple[str, bool]:
    """Runs the command, if there is one.

    Returns:
      (what the model is told, whether it may go on).
    """
    self._turns += 1
    if parsed.command is None:
      return parsed.error, True
    limit, left = self._agent.command_timeout_s, self._time_left()
    if left is not None:
      limit = min(limit, max(left, 0.01))
    result = await box.run(parsed.command, limit)
    left = self._time_left()
    if left is not None and left <= 0:
      self.truncated = "time"
    elif result.exhausted:
      self.truncated = "cpu" if result.killed == "cpu" else "time"
    return tool_text(result, self._agent), self.truncated not in ("time", "cpu")

  def _tell(
    self,
    index: int,
    text: str,
    command: str | None,
    output: str,
    call: types.Call,
  ) -> None:
    if self._on_turn is not None:
      self._on_turn(
        Turn(
          execution_id=call.execution_id,
          index=index,
          text=text,
          command=command,
          output=output,
          tokens=len(call.completion_ids),
        )
      )


async def run_execution(
  task: task_lib.Task, *, box: sandbox_lib.Sandbox, **options: Any
) -> types.Execution:
  """Runs the agent loop in an open sandbox; verifies nothing.

  Args:
    task: what to do.
    box: a started sandbox with the task's workspace.
    **options: as for run_and_verify, without `sandbox` and `retries`.

  Returns:
    An Execution whose outcome is None.
  """
  loop = _Loop(task, **options)
  await loop.run(box)
  return loop.execution()


async def run_and_verify(
  task: task_lib.Task,
  *,
  sandbox: config.Sandbox,
  agent: config.Agent,
  deterministic: bool = False,
  retries: int = 2,
  verify: attempts.Verify = verifier.verify,
  **options: Any,
) -> types.Execution:
  """Runs one execution from an empty conversation to its outcome.

  A failure of the sandbox or the verifier is tried again, in a new sandbox,
  with the same seeds; the agent's own failures never are. The harness timeout
  ends the conversation and what is left is scored; the overall timeout
  discards the execution.

  Args:
    task: what to do.
    sandbox: backends and limits.
    agent: tool format and limits.
    deterministic: no limit is in wall time.
    retries: further attempts after failures, in all.
    verify: scores the workspace; verifier.verify or one like it.
    engine, renderer: the policy and its token ids.
    rollout: temperature.
    execution_id, group_id, index, seed, version: of the execution's record.
    examples: one-turn tasks for agent.examples.
    temperature: replaces rollout.temperature (evaluation).
    on_turn: called after each turn.
    clock: seconds since the epoch, for the records.
    engine_name: recorded with each call.

  Returns:
    An Execution with its Outcome.

  Raises:
    EngineError: of the engine; the sandbox is closed before.
    asyncio.CancelledError: likewise.
  """
  loop = _Loop(task, agent=agent, deterministic=deterministic, **options)

  async def play(box: sandbox_lib.Sandbox) -> None:
    loop.reset()
    await loop.run(box)
    await box.close_shell()

  work = attempts.verified(
    sandbox_lib.Request(task, sandbox, deterministic=deterministic),
    play,
    options=sandbox,
    retries=retries,
    verify=verify,
  )
  limit = None if deterministic else agent.overall_timeout_s
  outcome = await attempts.within(limit, work)
  return loop.execution(attempts.with_timeout(outcome, loop.truncated))
