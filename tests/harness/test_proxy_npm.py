"""Claude Code, qwen-code and Codex, unmodified, with sub-agent and compaction.

  python -m pytest tests/harness/test_proxy_npm.py -m net

They run as installed by tests/envs/test_external_clients.py, here outside of
any sandbox: the scripted policy asks only for `ls`, `wc` and `echo`.
"""

import json
import os
import pathlib
import re
import subprocess
import tempfile

import numpy as np
import proxying
import pytest

from gyre.trajectory import tree as tree_lib

TASK = "Do the main thing: have the lines counted and write a note."
PROMPT = "Count the lines of every file in this directory please."
SUMMARY = (
  "<analysis>\nI looked around.\n</analysis>\n<summary>\n"
  "Of those here I looked around.\n</summary>"
)
MAIN = "This is what happened in the main conversation"
SHELLS = {
  "Bash": lambda c: {"command": c, "description": "do it"},
  "run_shell_command": lambda c: {"command": c, "is_background": False},
  "exec_command": lambda c: {"cmd": c},
}
AGENTS = {
  "Agent": {"description": "count", "prompt": PROMPT},
  "agent": {"description": "count", "prompt": PROMPT},
  "multi_agent_v1__spawn_agent": {"message": PROMPT},
}
for _name in ("Agent", "agent"):
  AGENTS[_name]["subagent_type"] = "general-purpose"
WAIT = "multi_agent_v1__wait_agent"
ASKS = re.compile(
  r"detailed summary of|CHECKPOINT COMPACTION|state_snapshot|summarize our"
)


def called(tool, arguments):
  return proxying.hermes(tool, json.dumps(arguments))


class Policy:
  """Starts an agent that counts, waits for it, writes a note."""

  def __init__(self):
    self.step, self.noted = 0, False

  def __call__(self, prompt):
    names = re.findall(r'"name": ?"([A-Za-z_0-9]+)"', prompt)
    if ASKS.search(prompt[-9000:]):
      who = "main" if TASK in prompt or MAIN in prompt else "agent's"
      return SUMMARY.replace("I looked around", MAIN.replace("main", who), 1)
    shell = next((t for t in SHELLS if t in names), None)
    if shell is None:
      return "A title"
    run = SHELLS[shell]
    if PROMPT in prompt and TASK not in prompt and MAIN not in prompt:
      if "<tool_response>" in prompt:
        return "There are 3 lines in all of them."
      return "Counting.\n" + called(shell, run("wc -l *"))
    agent = next((t for t in AGENTS if t in names), None)
    if agent is None:
      return "There are 3 lines in all of them."
    self.step += 1
    if self.step == 1:
      return "First.\n" + called(shell, run("ls"))
    if self.step == 2:
      return "Now the agent.\n" + called(agent, AGENTS[agent])
    started = re.search(r'agent_id\\*": ?\\*"([0-9a-f-]+)', prompt)
    if self.step == 3 and WAIT in names and started:
      options = {"targets": [started[1]], "timeout_ms": 20000}
      return called(WAIT, options)
    if not self.noted:
      self.noted = True
      return called(shell, run("echo note > note.txt"))
    return "It is done."


def claude(url, key, home):
  del home
  env = {
    "ANTHROPIC_BASE_URL": url,
    "ANTHROPIC_API_KEY": key,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "IS_SANDBOX": "1",
  }
  for kind in ("", "SMALL_FAST_", "DEFAULT_HAIKU_"):
    env[f"ANTHROPIC_{kind}MODEL"] = "policy"
  words = ["claude", "--print", "--dangerously-skip-permissions"]
  words += ["--model", "policy"]
  says = [[TASK], ["--continue", "--", "/compact"]]
  says.append(["--continue", "--", "Is it done?"])
  return env, [[*words, *s] for s in says]


def qwen(url, key, home):
  (home / ".qwen").mkdir()
  settings = {
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
    "privacy": {"usageStatisticsEnabled": False},
    "security": {"auth": {"selectedType": "openai"}},
    "telemetry": {"enabled": False},
    "model": {"chatCompression": {"contextPercentageThreshold": 0.001}},
  }
  (home / ".qwen" / "settings.json").write_text(json.dumps(settings))
  env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
  words = ["qwen", "--yolo", "--auth-type=openai", "--model=policy"]
  return env, [[*words, f"--prompt={TASK}"]]


def codex(url, key, home):
  (home / ".codex").mkdir()
  (home / ".codex" / "config.toml").write_text(f"""\
model = "policy"
model_provider = "gyre"
check_for_update_on_startup = false
model_auto_compact_token_limit = 30300
[analytics]
enabled = false
[model_providers.gyre]
name = "gyre"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
""")
  words = ["codex", "exec", "--skip-git-repo-check"]
  words.append("--dangerously-bypass-approvals-and-sandbox")
  return {"OPENAI_API_KEY": key}, [[*words, "--", TASK]]


@pytest.mark.net
@pytest.mark.slow
@pytest.mark.parametrize(
  "name, launch",
  [("claude-code", claude), ("qwen-code", qwen), ("codex", codex)],
)
def test_sub_agent_and_compaction_are_branches(name, launch, tmp_path):
  root = pathlib.Path(tempfile.gettempdir(), f"npm-{name}", "node_modules")
  if not (root / ".bin").is_dir():
    pytest.skip(f"{name} is not installed below {root.parent}")
  renderer = proxying.renderer()
  engine = proxying.ScriptedEngine(renderer, Policy(), split=7)
  home, work = tmp_path / "home", tmp_path / "work"
  home.mkdir()
  work.mkdir()
  (work / "a.txt").write_text("1\n2\n3\n")
  said = []
  with proxying.Served(engine, renderer, max_context=1 << 20) as served:
    key = served.open()
    env, commands = launch(served.url, key, home)
    env |= {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb"}
    for command in commands:
      done = subprocess.run(
        [root / ".bin" / command[0], *command[1:]],
        cwd=work,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
      )
      said.append(f"{done.returncode} {done.stdout} {done.stderr}")
    calls = served.close(key)
  told = [
    (c.call_id, c.parent_hint, c.boundary, c.role, len(c.prompt_ids))
    for c in calls
  ]
  print(*told, sep="\n")
  assert (work / "note.txt").read_text() == "note\n", (told, said)
  proxying.check_recorded(calls, engine)
  assert proxying.check_extends(calls) >= 1
  assert {c.role for c in calls} >= {"main", "main_summary", "sub_agent"}
  assert calls[0].role == "main"
  # The tree gives every call back, and has a branch for each opening.
  tree = tree_lib.build(calls)
  for call in calls:
    prompt, completion, logprobs, _ = tree.read(call.call_id)
    np.testing.assert_array_equal(prompt, call.prompt_ids)
    np.testing.assert_array_equal(completion, call.completion_ids)
    np.testing.assert_array_equal(logprobs, call.logprobs)
  opened = {c.prompt_ids.tobytes() for c in calls if c.parent_hint is None}
  assert 3 <= len(opened) <= len(tree.leaves())
