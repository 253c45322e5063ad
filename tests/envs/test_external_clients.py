"""Real harnesses in the sandbox, through gyre's proxy, on a shell task.

  python -m pytest tests/envs/test_external_clients.py -m "net or slow"

npm packages are installed once, below the temporary directory. The policy is
scripted: it knows each harness's tool for commands, and nothing else.
"""

import asyncio
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from gyre import config
from gyre.envs import external, launchers, scripted, serve
from gyre.envs.tasksets import shell
from gyre.harness import render, templates
from gyre.harness.proxy import Proxy
from gyre.trajectory import tree as tree_lib

PACKAGES = {
  "claude-code": "@anthropic-ai/claude-code",
  "qwen-code": "@qwen-code/qwen-code",
  "codex": "@openai/codex",
}
# Tool -> what it calls a command, as the harnesses describe them.
TOOLS = {
  "Bash": lambda c: {"command": c, "description": "do it"},
  "bash": lambda c: {"command": c},
  "run_shell_command": lambda c: {"command": c, "is_background": False},
  "exec_command": lambda c: {"cmd": c},
  "shell_command": lambda c: {"command": c},
  "shell": lambda c: {"command": ["bash", "-c", c]},
}
TASK = shell.make_task("write", 1, min_turns=2, max_turns=2)
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
BOX = config.Sandbox(
  backends=("bubblewrap", "process"),
  cpu_s=300.0,
  memory_mib=8192,
  disk_mib=1024,
  max_processes=512,
  max_files=4096,
)


def installed(name):
  """Where the harness is; installs it where it is not."""
  if name == "mini-swe-agent":
    if not pathlib.Path(sys.prefix, "bin", "mini").exists():
      pytest.skip("mini-swe-agent is not installed")
    return pathlib.Path(sys.prefix)
  path = pathlib.Path(tempfile.gettempdir(), f"npm-{name}")
  harness = config.Harness(name=name, path=str(path))
  path.mkdir(exist_ok=True)
  try:
    launchers.check_installed(harness)
  except config.ConfigError:
    npm = shutil.which("npm")
    if npm is None:
      pytest.skip("there is no npm")
    done = subprocess.run(
      [npm, "install", "--no-audit", "--no-fund", "--prefix", path,
       PACKAGES[name]],
      capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
      pytest.skip(f"npm install: {done.stderr.strip()[-200:]}")
  return path


class Policy:
  """Answers the main conversation with the solution, a command a call."""

  def __init__(self, name):
    self.left = [*TASK.solution_turns]
    if name == "mini-swe-agent":
      self.left.append(SUBMIT)
    self.prompts = []

  def __call__(self, prompt):
    self.prompts.append(prompt)
    tool = next(
      (t for t in TOOLS if re.search(rf'"name": ?"{t}"', prompt)), None
    )
    if tool is None or not self.left:
      return "It is done."
    call = {"name": tool, "arguments": TOOLS[tool](self.left.pop(0))}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def run(name, path, policy):
  tokenizer = render.train_tokenizer(
    shell.training_text(60), 600, templates.CHATML_TOKENS
  )
  renderer = render.Renderer(
    tokenizer, templates.CHATML, stop_tokens=(templates.CHATML_END,)
  )

  async def main():
    engine = scripted.ReplyingPolicy(policy, renderer)
    proxy = Proxy(
      engine, renderer, rollout=config.Rollout(), max_context=1 << 20
    )
    async with serve.served(proxy.app) as socket:
      return await external.run_external(
        TASK,
        proxy=proxy,
        socket=socket,
        harness=config.Harness(name=name, path=str(path)),
        sandbox=BOX,
        agent=config.Agent(harness_timeout_s=180.0, overall_timeout_s=300.0),
        retries=0,
        execution_id="g/0",
        group_id="g",
        index=0,
        seed=0,
        version=0,
      )

  return asyncio.run(main()), renderer


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    "mini-swe-agent",
    *(pytest.param(n, marks=pytest.mark.net) for n in PACKAGES),
  ],
)
def test_it_completes_a_shell_task(name):
  policy = Policy(name)
  execution, renderer = run(name, installed(name), policy)
  printed = execution.messages[-1]["content"]
  print(f"{name}: {len(execution.calls)} calls, roles "
        f"{[c.role for c in execution.calls]}")  # fmt: skip
  assert execution.outcome.score == 1.0, (execution.outcome, printed[-2000:])
  assert not policy.left, printed[-2000:]
  said = [renderer.completion_text(c.completion_ids) for c in execution.calls]
  assert sum("tool_call" in s for s in said) >= len(TASK.solution_turns)
  tree = tree_lib.build(execution.calls)
  for call in execution.calls:
    _, completion, logprobs, _ = tree.read(call.call_id)
    np.testing.assert_array_equal(completion, call.completion_ids)
    np.testing.assert_array_equal(logprobs, call.logprobs)
  # The commands are one conversation, extended as it was sampled.
  commands = [c for c, s in zip(execution.calls, said, strict=True)
              if "tool_call" in s]  # fmt: skip
  assert {c.role for c in commands} == {"main"}
