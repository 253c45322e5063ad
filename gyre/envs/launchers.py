"""How each harness is started: a line of bash, variables and files.

Pure functions of the configuration and of one execution. Every harness gets
the base URL and the key of the model API as its SDK reads them; telemetry,
updates and whatever else would reach for a network that is not there is
turned off, and permissions are not asked for: the sandbox is the permission.

  mini-swe-agent  OpenAI Chat Completions, through litellm
  claude-code     Anthropic Messages
  qwen-code       OpenAI Chat Completions
  codex           OpenAI Responses
  command         whatever it speaks
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shlex
from collections.abc import Callable, Mapping

from gyre import config

#: Where the sandbox shows what gyre gives a harness, read-only.
DIRECTORY = "/opt/gyre/harness"
INSTRUCTION = f"{DIRECTORY}/instruction.md"

# Not after a $, where braces are the shell's own.
_PLACEHOLDER = re.compile(
  r"(?<!\$)\{(instruction|instruction_file|base_url|key|model|workdir|path"
  r"|python)\}"
)


@dataclasses.dataclass(frozen=True)
class Context:
  """What one execution tells its harness.

  Attributes:
    base_url: of the model API, without a version: http://127.0.0.1:PORT.
    key: the execution's own.
    instruction: what the agent is asked to do.
    workdir: where it works.
    python: an interpreter with the standard library.
  """

  base_url: str
  key: str
  instruction: str
  workdir: str
  python: str


@dataclasses.dataclass(frozen=True)
class Launch:
  """A harness about to be started.

  Attributes:
    line: bash, run in the working directory.
    env: variables beside the sandbox's own.
    files: path below the home directory -> text.
  """

  line: str
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  files: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _mini(harness: config.Harness, at: Context) -> Launch:
  words = ["mini", "--yolo", "--exit-immediately"]
  words += [f"--model=openai/{harness.model}", f"--task={at.instruction}"]
  env = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    # The model has no price.
    "MSWEA_COST_TRACKING": "ignore_errors",
    # litellm fetches its table of prices otherwise.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
  }
  return Launch(shlex.join([*words, *harness.args]), env)


def _claude(harness: config.Harness, at: Context) -> Launch:
  words = ["claude", "--print", "--dangerously-skip-permissions"]
  words += ["--model", harness.model, *harness.args, "--", at.instruction]
  env = {
    # Every kind of call is the policy's.
    "ANTHROPIC_MODEL": harness.model,
    "ANTHROPIC_SMALL_FAST_MODEL": harness.model,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": harness.model,
    "ANTHROPIC_DEFAULT_SONNET_MODEL": harness.model,
    "ANTHROPIC_DEFAULT_OPUS_MODEL": harness.model,
    "CLAUDE_CODE_SUBAGENT_MODEL": harness.model,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    # It changes with every call, so that no prompt would extend another.
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_COST_WARNINGS": "1",
  }
  return Launch(shlex.join(words), env)


def _qwen(harness: config.Harness, at: Context) -> Launch:
  words = ["qwen", "--yolo", "--auth-type=openai", f"--model={harness.model}"]
  words += [*harness.args, f"--prompt={at.instruction}"]
  settings = {
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
    "privacy": {"usageStatisticsEnabled": False},
    "security": {"auth": {"selectedType": "openai"}},
    "telemetry": {"enabled": False},
  }
  return Launch(
    shlex.join(words),
    {"OPENAI_MODEL": harness.model},
    {".qwen/settings.json": json.dumps(settings, indent=2)},
  )


def _codex(harness: config.Harness, at: Context) -> Launch:
  words = ["codex", "exec", "--skip-git-repo-check"]
  words += ["--dangerously-bypass-approvals-and-sandbox", *harness.args]
  # A string of JSON is one of TOML.
  model, url = json.dumps(harness.model), json.dumps(f"{at.base_url}/v1")
  settings = f"""\
model = {model}
model_provider = "gyre"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.gyre]
name = "gyre"
base_url = {url}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
  return Launch(
    shlex.join([*words, "--", at.instruction]),
    {},
    {".codex/config.toml": settings},
  )


def _command(harness: config.Harness, at: Context) -> Launch:
  values = {
    "instruction": at.instruction,
    "instruction_file": INSTRUCTION,
    "base_url": at.base_url,
    "key": at.key,
    "model": harness.model,
    "workdir": at.workdir,
    "path": str(root(harness) or ""),
    "python": at.python,
  }
  line = _PLACEHOLDER.sub(lambda m: shlex.quote(values[m[1]]), harness.command)
  return Launch(line)


_KNOWN: Mapping[
  str, tuple[str, Callable[[config.Harness, Context], Launch]]
] = {
  "mini-swe-agent": ("mini", _mini),
  "claude-code": ("claude", _claude),
  "qwen-code": ("qwen", _qwen),
  "codex": ("codex", _codex),
  "command": ("", _command),
}


def launch(harness: config.Harness, at: Context) -> Launch:
  """What starts `harness` for one execution.

  Args:
    harness: the configuration's section, with an external harness.
    at: the execution.
  """
  made = _KNOWN[harness.name][1](harness, at)
  env = {
    "OPENAI_BASE_URL": f"{at.base_url}/v1",
    "OPENAI_API_BASE": f"{at.base_url}/v1",
    "OPENAI_API_KEY": at.key,
    "ANTHROPIC_BASE_URL": at.base_url,
    "ANTHROPIC_API_KEY": at.key,
  }
  return dataclasses.replace(made, env=env | dict(made.env) | harness.env)


def script(made: Launch, search: str) -> str:
  """One command for the sandbox's shell: the files, then the harness.

  Args:
    made: of `launch`.
    search: directories to look for programs in first, with colons between.
  """
  lines = []
  for path, text in made.files.items():
    folder = shlex.quote(str(pathlib.PurePosixPath(path).parent))
    lines.append(f'mkdir -p "$HOME"/{folder}')
    lines.append(f'printf %s {shlex.quote(text)} >"$HOME"/{shlex.quote(path)}')
  exports = [f"export {k}={shlex.quote(v)}" for k, v in made.env.items()]
  if search:
    exports.append(f'export PATH={shlex.quote(search)}:"$PATH"')
  body = "\n".join([*lines, *exports, made.line])
  return f"(\n{body}\n)"


# What lies on this machine.


def root(harness: config.Harness) -> pathlib.Path | None:
  """harness.path, absolute."""
  return _absolute(harness.path) if harness.path else None


def _absolute(path: str) -> pathlib.Path:
  return pathlib.Path(path).expanduser().absolute()


def _base_of(environment: pathlib.Path) -> list[pathlib.Path]:
  """The interpreter's installation that a virtual environment stands on."""
  try:
    text = (environment / "pyvenv.cfg").read_text()
  except OSError:
    return []
  for line in text.splitlines():
    key, _, value = line.partition("=")
    if key.strip() == "home":
      home = pathlib.Path(value.strip())
      return [p.parent for p in dict.fromkeys((home, home.resolve()))]
  return []


def shown(harness: config.Harness) -> dict[str, pathlib.Path]:
  """Directories that the sandbox must show, each under its own path.

  A Python environment brings the interpreter that it stands on. What is below
  /usr is there already.
  """
  own = [_absolute(p) for p in (harness.path, *harness.mounts) if p]
  every = [q for p in own for q in (p, *_base_of(p))]
  return {str(p): p for p in every if not p.is_relative_to("/usr")}


def search_path(harness: config.Harness) -> str:
  """Where programs of the harness lie, for PATH."""
  own = [_absolute(p) for p in (harness.path, *harness.mounts) if p]
  places = [q for p in own for q in (p / "bin", p / "node_modules" / ".bin")]
  return ":".join(str(p) for p in places if p.is_dir())


def check_installed(harness: config.Harness) -> None:
  """Checks what the configuration names on this machine.

  Raises:
    config.ConfigError: a directory does not exist, or the program is not in it.
  """
  for option, paths in (("path", [harness.path]), ("mounts", harness.mounts)):
    for path in paths:
      if path and not _absolute(path).is_dir():
        raise config.ConfigError(f"harness.{option}: {path} is no directory")
  program = _KNOWN[harness.name][0]
  places = search_path(harness).split(":")
  if program and not any(pathlib.Path(p, program).exists() for p in places):
    raise config.ConfigError(
      f"harness.path {harness.path} has no {program}, neither in bin nor in "
      "node_modules/.bin"
    )
