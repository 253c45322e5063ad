"""What starts each harness: lines that bash reads back as they were meant."""

import dataclasses
import json
import os
import pathlib
import subprocess
import tomllib

import pytest

from gyre import config
from gyre.envs import launchers

TINY = {"model": {"source": "init", "hf_config": {"model_type": "llama"}}}
HARD = 'Say "it\'s" `id` $HOME {model} \\ \n-- done?'
AT = launchers.Context(
  base_url="http://127.0.0.1:8377",
  key="k e'y",
  instruction=HARD,
  workdir="/app",
  python="/usr/bin/python3",
)
KNOWN = {
  "mini-swe-agent": "mini",
  "claude-code": "claude",
  "qwen-code": "qwen",
  "codex": "codex",
}
_SHOW = """#!/bin/sh
printf '%s\\0' "$@" >"$OUT/args"
env -0 >"$OUT/env"
"""


def play(harness, tmp_path):
  """Runs a launch with a program that writes down how it was started."""
  bin_ = tmp_path / "node_modules" / ".bin"
  bin_.mkdir(parents=True)
  for name in (*KNOWN.values(), "tool"):
    (bin_ / name).write_text(_SHOW)
    (bin_ / name).chmod(0o755)
  harness = dataclasses.replace(harness, path=str(tmp_path))
  made = launchers.launch(harness, AT)
  home = tmp_path / "home"
  home.mkdir()
  env = {"PATH": os.environ["PATH"], "HOME": str(home), "OUT": str(tmp_path)}
  script = launchers.script(made, launchers.search_path(harness))
  subprocess.run(["bash", "-c", script], env=env, check=True)
  args = (tmp_path / "args").read_text().split("\0")[:-1]
  lines = (tmp_path / "env").read_text().split("\0")
  return args, dict(x.split("=", 1) for x in lines if x), home


@pytest.mark.parametrize("name", KNOWN)
def test_each_program_gets_instruction_url_and_key(name, tmp_path):
  harness = config.Harness(name=name, model="m x", args=("--more", "a b"))
  args, env, home = play(harness, tmp_path)
  assert sum(HARD in a for a in args) == 1
  assert args[args.index("--more") + 1] == "a b"
  urls = {k: v for k, v in env.items() if k.endswith("_BASE_URL")}
  assert urls == {
    "OPENAI_BASE_URL": "http://127.0.0.1:8377/v1",
    "ANTHROPIC_BASE_URL": "http://127.0.0.1:8377",
  }
  assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == "k e'y"
  if name == "codex":
    settings = tomllib.loads((home / ".codex" / "config.toml").read_text())
    assert settings["model"] == "m x"
    provider = settings["model_providers"][settings["model_provider"]]
    assert provider["base_url"] == "http://127.0.0.1:8377/v1"
    assert env[provider["env_key"]] == "k e'y"
  elif name == "qwen-code":
    settings = json.loads((home / ".qwen" / "settings.json").read_text())
    assert not settings["telemetry"]["enabled"]
    assert "--model=m x" in args
  else:
    assert any("m x" in a for a in args)


def test_a_command_s_placeholders_are_quoted(tmp_path):
  line = (
    "tool {instruction} {base_url} {key} {model} {workdir} {path} {python} "
    "{instruction_file} {other} ${OUT} x{1,2}"
  )
  args, _, _ = play(config.Harness(name="command", command=line), tmp_path)
  assert args == [
    HARD,
    "http://127.0.0.1:8377",
    "k e'y",
    "gyre",
    "/app",
    str(tmp_path),
    "/usr/bin/python3",
    launchers.INSTRUCTION,
    "{other}",
    str(tmp_path),
    "x1",
    "x2",
  ]


def test_the_configuration_s_variables_win(tmp_path):
  harness = config.Harness(
    name="claude-code", env={"DISABLE_TELEMETRY": "0", "MORE": "'x y'"}
  )
  _, env, _ = play(harness, tmp_path)
  assert env["DISABLE_TELEMETRY"] == "0" and env["MORE"] == "'x y'"


def test_python_environments_bring_their_interpreter(tmp_path):
  (tmp_path / "pyvenv.cfg").write_text("home = /opt/python/bin\nversion = 3\n")
  harness = config.Harness(
    name="mini-swe-agent", path=str(tmp_path), mounts=("/usr/lib/x", "/opt/y")
  )
  assert launchers.shown(harness) == {
    str(tmp_path): tmp_path,
    "/opt/python": pathlib.Path("/opt/python"),
    "/opt/y": pathlib.Path("/opt/y"),
  }


def test_what_is_not_installed_is_named(tmp_path):
  harness = config.Harness(name="codex", path=str(tmp_path / "nowhere"))
  with pytest.raises(config.ConfigError, match=r"harness\.path.*nowhere"):
    launchers.check_installed(harness)
  harness = dataclasses.replace(harness, path=str(tmp_path))
  with pytest.raises(config.ConfigError, match="has no codex"):
    launchers.check_installed(harness)
  (tmp_path / "bin").mkdir()
  (tmp_path / "bin" / "codex").touch()
  launchers.check_installed(harness)
  harness = dataclasses.replace(harness, mounts=("/nowhere",))
  with pytest.raises(config.ConfigError, match=r"harness\.mounts.*/nowhere"):
    launchers.check_installed(harness)


@pytest.mark.parametrize(
  "sections,needle",
  [
    ({"harness": {"name": "aider"}}, "harness.name"),
    ({"harness": {"name": "command"}}, "harness.command"),
    ({"harness": {"command": "x"}}, "harness.command"),
    ({"harness": {"name": "codex"}}, "harness.path"),
    (
      {"harness": {"name": "codex", "path": "x", "env": {"A B": "x"}}},
      "harness.env",
    ),
    (
      {"harness": {"name": "command", "command": "x", "args": ("y",)}},
      "harness.args",
    ),
    (
      {
        "harness": {"name": "command", "command": "x"},
        "run": {"deterministic": True},
      },
      "run.deterministic",
    ),
    (
      {
        "harness": {"name": "command", "command": "x"},
        "sandbox": {"backends": ("bubblewrap", "docker")},
      },
      "sandbox.backends",
    ),
    (
      {
        "harness": {"name": "command", "command": "x"},
        "agent": {"examples": 1},
      },
      "agent.examples",
    ),
    (
      {
        "harness": {"name": "command", "command": "x"},
        "warm_start": {"steps": 1},
      },
      "warm_start.policy",
    ),
    ({"warm_start": {"steps": 1, "policy": "x.py"}}, "warm_start.policy"),
  ],
)
def test_mistakes_of_the_section_are_one_line(sections, needle):
  with pytest.raises(config.ConfigError) as error:
    config.from_config_dict({**TINY, **sections})
  assert needle in str(error.value)
  assert "\n" not in str(error.value)
