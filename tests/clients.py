"""Real harnesses: where they are installed, and policies that know them."""

import functools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

# As tested; npm installs them below the temporary directory.
PACKAGES = {
  "claude-code": ("@anthropic-ai/claude-code", "2.1.197"),
  "qwen-code": ("@qwen-code/qwen-code", "0.15.10"),
  "codex": ("@openai/codex", "0.171.0"),
}
NODE = 20
# Tool -> what it calls a command, as the harnesses describe them.
SHELLS = {
  "Bash": lambda c: {"command": c, "description": "do it"},
  "bash": lambda c: {"command": c},
  "run_shell_command": lambda c: {"command": c, "is_background": False},
  "exec_command": lambda c: {"cmd": c},
  "shell_command": lambda c: {"command": c},
  "shell": lambda c: {"command": ["bash", "-c", c]},
}
# Tool -> what starts a sub-agent.
AGENTS = {
  "Agent": lambda p: {
    "description": "a part of it",
    "prompt": p,
    "subagent_type": "general-purpose",
  },
  "multi_agent_v1__spawn_agent": lambda p: {"message": p},
}
AGENTS["agent"] = AGENTS["Agent"]
WAIT = "multi_agent_v1__wait_agent"
ASKS = re.compile(
  r"detailed summary of|CHECKPOINT COMPACTION|state_snapshot|summarize our"
)
SUMMARY = (
  "<analysis>\nI looked around.\n</analysis>\n<summary>\n"
  "Of those here I looked around.\n</summary>"
)
MAIN = "This is what happened in the main conversation"


@functools.cache
def node():
  """Why no npm client can run here, or ""."""
  if shutil.which("npm") is None or shutil.which("node") is None:
    return f"needs npm and Node {NODE} or newer"
  said = subprocess.run(
    ["node", "--version"], capture_output=True, text=True, check=True
  ).stdout
  if int(said.strip().removeprefix("v").split(".")[0]) < NODE:
    return f"needs Node {NODE} or newer, this is {said.strip()}"
  return ""


def installed(name):
  """Where the harness is; installs it where it is not."""
  if name == "mini-swe-agent":
    if not pathlib.Path(sys.prefix, "bin", "mini").exists():
      pytest.skip("mini-swe-agent is not installed")
    return pathlib.Path(sys.prefix)
  if node():
    pytest.skip(node())
  package, version = PACKAGES[name]
  path = pathlib.Path(tempfile.gettempdir(), f"npm-{name}")
  about = path / "node_modules" / package / "package.json"
  if about.exists() and json.loads(about.read_text())["version"] == version:
    return path
  path.mkdir(exist_ok=True)
  done = subprocess.run(
    ["npm", "install", "--no-audit", "--no-fund", "--prefix", path,
     f"{package}@{version}"],
    capture_output=True, text=True, timeout=600, check=False,
  )  # fmt: skip
  if done.returncode:
    pytest.skip(f"npm install {package}: {done.stderr.strip()[-200:]}")
  return path


def called(tool, arguments):
  call = json.dumps({"name": tool, "arguments": arguments})
  return f"<tool_call>\n{call}\n</tool_call>"


def _offered(prompt):
  return re.findall(r'"name": ?"([A-Za-z_0-9]+)"', prompt)


class Solves:
  """Answers the main conversation with commands, one a call."""

  def __init__(self, commands):
    self.left = [*commands]

  def __call__(self, prompt):
    names = _offered(prompt)
    tool = next((t for t in SHELLS if t in names), None)
    if tool is None or not self.left:
      return "It is done."
    return called(tool, SHELLS[tool](self.left.pop(0)))


class Delegates:
  """Runs a command, has an agent run one, runs the rest; sums up when asked.

  task: what the user asks for. prompt: what it asks the agent for, no part of
  the task.
  """

  def __init__(self, task, first, prompt, agents, then=()):
    self.task, self.prompt = task, prompt
    self.first, self.agents, self.then = first, [agents], [*then]
    self.step = 0

  def __call__(self, prompt):
    names = _offered(prompt)
    mine = self.task in prompt or MAIN in prompt
    if ASKS.search(prompt[-9000:]):
      who = "main" if mine else "agent's"
      return SUMMARY.replace("I looked around", MAIN.replace("main", who))
    shell = next((t for t in SHELLS if t in names), None)
    if shell is None:
      return "A title"
    run = SHELLS[shell]
    if self.prompt in prompt and not mine:
      if not self.agents:
        return "The agent is done with all of it."
      return "For this I run it.\n" + called(shell, run(self.agents.pop()))
    agent = next((t for t in AGENTS if t in names), None)
    if agent is None:
      return "The agent is done with all of it."
    self.step += 1
    if self.step == 1:
      return "First.\n" + called(shell, run(self.first))
    if self.step == 2:
      return "Now the agent.\n" + called(agent, AGENTS[agent](self.prompt))
    started = re.search(r'agent_id\\*": ?\\*"([0-9a-f-]+)', prompt)
    if self.step == 3 and WAIT in names and started:
      options = {"targets": [started[1]], "timeout_ms": 20000}
      return called(WAIT, options)
    if self.then:
      return called(shell, run(self.then.pop(0)))
    return "It is done."
