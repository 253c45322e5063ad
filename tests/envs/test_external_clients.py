"""Real harnesses in the sandbox, through gyre's proxy, on a shell task.

  python -m pytest tests/envs/test_external_clients.py -m "net or slow"

npm packages are installed once (clients.py). The policy is scripted: it knows
each harness's tools for commands and sub-agents, and nothing else.
"""

import asyncio
import dataclasses
import itertools

import audited
import clients
import numpy as np
import pytest

from gyre import config
from gyre.envs import external, launchers, scripted, serve
from gyre.envs.tasksets import shell
from gyre.harness import render, templates
from gyre.harness.proxy import Proxy

TASK = shell.make_task("write", 1, min_turns=2, max_turns=2)
PROMPT = "Do the second half of what is left to do here please."
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
BOX = config.Sandbox(
  backends=("bubblewrap", "process"),
  cpu_s=300.0,
  memory_mib=8192,
  disk_mib=1024,
  max_processes=512,
  max_files=4096,
)


class Engine(scripted.ReplyingPolicy):
  """Says with given logprobs what a policy knows, and keeps what it said."""

  def __init__(self, reply, renderer):
    super().__init__(reply, renderer, version=4)
    self.said = {}

  async def generate(self, request, on_token=None):
    completion = await super().generate(request)
    start = len(request.ids)
    completion = dataclasses.replace(
      completion,
      logprobs=np.float32(
        [
          audited.logprob_of(request.seed, start + i, token)
          for i, token in enumerate(completion.ids.tolist())
        ]
      ),
    )
    assert request.seed not in self.said
    self.said[request.seed] = request, completion
    parts = (completion.ids, completion.logprobs, completion.versions)
    for token in zip(*parts, strict=True) if on_token else ():
      on_token(*token)
    return completion


def run(harness, policy, sandbox=BOX):
  """One execution in the sandbox, with what was sampled in it found again."""
  tokenizer = render.train_tokenizer(
    shell.training_text(60), 600, templates.CHATML_TOKENS
  )
  renderer = render.Renderer(
    tokenizer, templates.CHATML, stop_tokens=(templates.CHATML_END,)
  )
  engine = Engine(policy, renderer)

  async def main():
    proxy = Proxy(
      engine, renderer, rollout=config.Rollout(), max_context=1 << 20
    )
    async with serve.served(proxy.app) as socket:
      return await external.run_external(
        TASK,
        proxy=proxy,
        socket=socket,
        harness=harness,
        sandbox=sandbox,
        agent=config.Agent(harness_timeout_s=180.0, overall_timeout_s=300.0),
        retries=0,
        execution_id="g/0",
        group_id="g",
        index=0,
        seed=0,
        version=4,
      )

  execution = asyncio.run(main())
  calls = execution.calls
  print(f"{harness.name}: {len(calls)} calls")
  printed = execution.messages[-1]["content"]
  assert execution.outcome.score == 1.0, (execution.outcome, printed[-2000:])
  # Every call is recorded, as it was sampled.
  left = dict(engine.said)
  for call in calls:
    request, completion = left.pop(call.sampling_used["seed"])
    np.testing.assert_array_equal(call.prompt_ids, request.ids)
    np.testing.assert_array_equal(call.completion_ids, completion.ids)
    np.testing.assert_array_equal(call.logprobs, completion.logprobs)
    np.testing.assert_array_equal(call.versions, completion.versions)
  assert not left, "a call was sampled and not recorded"
  audited.check(calls)
  return calls, renderer, printed


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    "mini-swe-agent",
    *(pytest.param(n, marks=pytest.mark.net) for n in clients.PACKAGES),
  ],
)
def test_it_completes_a_shell_task(name):
  end = [SUBMIT] if name == "mini-swe-agent" else []
  policy = clients.Solves([*TASK.solution_turns, *end])
  path = clients.installed(name)
  calls, renderer, printed = run(
    config.Harness(name=name, path=str(path)), policy
  )
  assert not policy.left, printed[-2000:]
  # The commands are one conversation, extended as it was sampled.
  commands = [
    c
    for c in calls
    if "tool_call" in renderer.completion_text(c.completion_ids)
  ]
  assert len(commands) == len(TASK.solution_turns) + len(end)
  assert {c.role for c in commands} == {"main"}
  for before, after in itertools.pairwise(commands):
    assert after.parent_hint == before.call_id


@pytest.mark.slow
@pytest.mark.net
def test_claude_code_delegates_and_compacts_in_bubblewrap(bwrap_options):
  """Its sub-agent does half of the task; the other half is summed up."""
  path = clients.installed("claude-code")
  at = launchers.Context("", "", "", "", "")
  env = launchers.launch(config.Harness("claude-code"), at).env
  claude = "claude --print --dangerously-skip-permissions --model {model}"
  harness = config.Harness(
    name="command",
    path=str(path),
    command=f"{claude} -- {{instruction}} && {claude} --continue -- /compact"
    f" && {claude} --continue -- 'Is it done?'",
    env={k: v for k, v in env.items() if v},
  )
  first, second = TASK.solution_turns
  policy = clients.Delegates(TASK.instruction, first, PROMPT, second)
  calls, renderer, printed = run(
    harness, policy, dataclasses.replace(BOX, backends=bwrap_options.backends)
  )
  prompts = [renderer.decode(c.prompt_ids) for c in calls]
  told = [(c.call_id, c.parent_hint, c.role) for c in calls]
  assert "It is done." in printed, (printed, told)
  ends = sorted(c.role for c in audited.ends(calls))
  assert ends == ["main", "main", "main_summary", "sub_agent"], told
  opened = [
    (c.role, p)
    for c, p in zip(calls, prompts, strict=True)
    if c.parent_hint is None
  ]
  assert [role for role, _ in opened] == ["main", "sub_agent", "main"], told
  assert PROMPT in opened[1][1] and clients.MAIN in opened[2][1]
