"""mini-swe-agent, unmodified, does a shell task through the proxy."""

import importlib.util
import json
import os
import subprocess
import sys

import proxying
import pytest

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec("minisweagent") is None,
  reason="needs mini-swe-agent",
)


def bash(command):
  return proxying.hermes("bash", json.dumps({"command": command}))


def test_mini_swe_agent_completes_a_task(tmp_path):
  renderer = proxying.renderer()
  answers = [
    "I look.\n" + bash("ls") + "\n" + bash("echo 'a \"b\"' > é.txt"),
    "No call.",
    "Now I count.\n" + bash("wc -l < é.txt > lines; cat lines"),
    bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
  ]
  engine = proxying.ScriptedEngine(renderer, answers, split=3)
  work, home = tmp_path / "work", tmp_path / "home"
  work.mkdir()
  home.mkdir()
  with proxying.Served(engine, renderer, max_context=20_000) as served:
    key = served.open()
    env = {
      "HOME": str(home),
      "PATH": os.environ["PATH"],
      "OPENAI_BASE_URL": served.url + "/v1",
      "OPENAI_API_KEY": key,
      "MSWEA_CONFIGURED": "true",
      "MSWEA_SILENT_STARTUP": "1",
      "MSWEA_COST_TRACKING": "ignore_errors",
      "MSWEA_GLOBAL_CONFIG_DIR": str(home),
      "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    options = ["--yolo", "--exit-immediately", "--model=openai/policy"]
    options.append("--task=Count the lines.")
    done = subprocess.run(
      [sys.executable, "-m", "minisweagent.run.mini", *options],
      cwd=work,
      env=env,
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
    )
    calls = served.close(key)
  assert done.returncode == 0, done.stderr
  assert (work / "é.txt").read_text() == 'a "b"\n'
  assert (work / "lines").read_text().strip() == "1"
  assert len(calls) == 4, done.stdout
  # What was no call ends a branch.
  proxying.check_recorded(calls, engine, ["main"] * 2)
  # It leaves out what was no call, and tells the format instead: a branch.
  assert [c.parent_hint for c in calls] == [None, "0000", "0000", "0002"]
  assert proxying.check_extends(calls) == 3
  assert {c.role for c in calls} == {"main"}
  last = renderer.decode(calls[-1].prompt_ids)
  assert "Count the lines." in last and "No call" not in last
