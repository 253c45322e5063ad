"""Claude Code, qwen-code and Codex, unmodified, with sub-agent and compaction.

  python -m pytest tests/harness/test_proxy_npm.py -m net

They run outside of any sandbox: the scripted policy asks only for `ls`, `wc`
and `echo`.
"""

import collections
import json
import os
import subprocess

import audited
import clients
import proxying
import pytest

TASK = "Do the main thing: have the lines counted and write a note."
PROMPT = "Count the lines of every file in this directory please."
# Roles of ends that there must be; how often it compacts is a client's own.
BRANCHES = ["main", "main", "main_summary", "sub_agent"]


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
  programs = clients.installed(name) / "node_modules" / ".bin"
  renderer = proxying.renderer()
  policy = clients.Delegates(
    TASK, "ls", PROMPT, "wc -l *", ["echo note > note.txt"]
  )
  engine = proxying.ScriptedEngine(renderer, policy, split=7)
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
        [programs / command[0], *command[1:]],
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
  # The main conversation and the sub-agent ran their commands.
  assert (work / "note.txt").read_text() == "note\n", (told, said)
  prompts = [renderer.decode(c.prompt_ids) for c in calls]
  assert any("3 a.txt" in p for p in prompts), (told, said)
  # Every call is recorded, and found again in the samples of every mode.
  proxying.check_recorded(calls, engine)
  assert proxying.check_extends(calls) >= 1
  assert calls[0].role == "main"
  # Branches: before and after the compaction, its summary, the sub-agent.
  ends = collections.Counter(c.role for c in audited.ends(calls))
  assert ends >= collections.Counter(BRANCHES), told
  opened = [
    (c.role, p)
    for c, p in zip(calls, prompts, strict=True)
    if c.parent_hint is None
  ]
  assert any(r == "main" and clients.MAIN in p for r, p in opened), told
  assert any(r == "sub_agent" and PROMPT in p for r, p in opened), told
