"""ConfigDict -> frozen dataclasses, checked once, at the edge.

A configuration file defines `get_config() -> ml_collections.ConfigDict` with
the sections of `Config`. Everything behind `from_config_dict` is typed.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal

import ml_collections


class ConfigError(ValueError):
  """What the user asked for cannot be done; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Run:
  """seed; steps: optimizer steps; deterministic: all metrics but times are
  equal bit for bit from run to run, also of one that was killed and resumed.
  """

  seed: int = 0
  steps: int = 100
  deterministic: bool = False


@dataclasses.dataclass(frozen=True)
class Model:
  """Where the weights come from.

  source: "init" (random, from hf_config), "hf" (a Hugging Face directory at
  path) or "gguf" (a GGUF file at path; "package:NAME" finds it in an
  installed Python package). dtype: activations. remat: recompute layers in
  the backward pass. layout: "stacked" scans over layers, "layers" loops.
  """

  source: Literal["init", "hf", "gguf"] = "init"
  path: str = ""
  hf_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  dtype: Literal["float32", "bfloat16"] = "float32"
  remat: bool = False
  layout: Literal["stacked", "layers"] = "stacked"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """source: "model" (beside the weights), "file" (a tokenizer.json at path)
  or "train" (byte-level BPE of vocab_size learned from the task set's text).
  chat_template: jinja2 text; empty takes the model's own.
  """

  source: Literal["model", "file", "train"] = "model"
  path: str = ""
  vocab_size: int = 1024
  chat_template: str = ""


@dataclasses.dataclass(frozen=True)
class Tasks:
  """taskset: "shell" (procedural) or "harbor" (task directories under path).
  kinds: procedural kinds and their relative weights; empty means all, equal.
  site: whose conventions the tasks follow where their instruction leaves
  something open (kinds like "backup"; tasksets/conventions.py).
  max_turns: longest reference solution to draw. Training, held-out and
  warm-start tasks come from disjoint seed ranges.
  """

  taskset: Literal["shell", "harbor"] = "shell"
  path: str = ""
  eval_path: str = ""
  kinds: Mapping[str, float] = dataclasses.field(default_factory=dict)
  min_turns: int = 1
  max_turns: int = 6
  num_train: int = 1024
  seed: int = 0
  site: int = 0


@dataclasses.dataclass(frozen=True)
class Sandbox:
  """backend: first that works of these. "process" isolates nothing and is
  chosen only when named here. Limits are a sandbox's: seconds, MiB, counts.
  """

  backends: tuple[str, ...] = ("bubblewrap",)
  cpu_s: float = 60.0
  wall_s: float = 120.0
  memory_mib: int = 1024
  disk_mib: int = 256
  max_processes: int = 64
  max_files: int = 256
  max_output_bytes: int = 1 << 20
  concurrency: int = 8
  remote_url: str = ""


@dataclasses.dataclass(frozen=True)
class Agent:
  """The built-in loop. tool_format: how a completion carries its command:
  "line" (the text is the command), "fenced" (first ```-block) or "hermes"
  (<tool_call> JSON). examples: worked examples put in the prompt, of easy
  kinds in turn, or with examples_of "kind" of the kind that the task itself
  is; never of a task that is trained or evaluated.
  Limits: turns, sampled tokens a turn, tokens of the whole conversation,
  characters of a tool's output (cut in the middle), seconds a command.
  """

  system_prompt: str = ""
  tool_format: Literal["line", "fenced", "hermes"] = "hermes"
  examples: int = 0
  examples_of: Literal["easy", "kind"] = "easy"
  max_turns: int = 8
  max_new_tokens: int = 256
  max_context: int = 4096
  max_output_chars: int = 2000
  command_timeout_s: float = 10.0
  harness_timeout_s: float = 600.0
  overall_timeout_s: float = 1200.0


@dataclasses.dataclass(frozen=True)
class Harness:
  """Who holds the conversation: the built-in loop (section agent), or a
  program inside the sandbox that reaches nothing but gyre's model API. Of the
  agent section it keeps max_context and the two timeouts.

  name: "command" runs `command`; the others are programs installed at `path`:
  a Python environment (mini-swe-agent) or a directory with node_modules.
  command: a line of bash. {instruction} {base_url} {key} {model} {workdir}
  {path} {python} stand for what they name, quoted; python is an interpreter
  with the standard library. {instruction_file} holds the instruction.
  path: shown in the sandbox, read-only, under the same name; mounts: further
  such directories. args: further arguments of a known program. env: further
  variables. model: what the harness calls the model.
  """

  name: Literal[
    "builtin",
    "mini-swe-agent",
    "claude-code",
    "qwen-code",
    "codex",
    "command",
  ] = "builtin"
  command: str = ""
  path: str = ""
  mounts: tuple[str, ...] = ()
  args: tuple[str, ...] = ()
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  model: str = "gyre"

  @property
  def is_external(self) -> bool:
    """True where a program in the sandbox holds the conversation."""
    return self.name != "builtin"


@dataclasses.dataclass(frozen=True)
class Rollout:
  """Groups of executions and the embedded engine that serves them.

  groups_per_step groups of group_size executions feed one optimizer step.
  Engine: max_slots requests decode together; pages of page_size tokens;
  prefill in chunks of prefill_chunk tokens.
  """

  group_size: int = 8
  groups_per_step: int = 8
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  max_slots: int = 32
  page_size: int = 16
  num_pages: int = 2048
  prefill_chunk: int = 256
  dtype: Literal["float32", "bfloat16"] = "float32"
  resample_zero_variance: bool = False
  resample_limit: int = 2


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """Which tokens of an execution are trained; gyre.trajectory.select says how.

  mode: "once" (a token sampled several times trains its first sample),
  "multiplicity" (each call as if by itself) or "leaf" (each path from the root
  to a leaf as if by itself). max_samples: most paths an execution (0: all);
  token_budget: most tokens of those paths, shared ones once (0: no budget).
  unbiased: weights tokens by the chance of their path, instead of strict
  priority of roles. roles: highest priority first.
  """

  mode: Literal["once", "multiplicity", "leaf"] = "once"
  max_samples: int = 5
  token_budget: int = 0
  unbiased: bool = False
  roles: tuple[str, ...] = (
    "main",
    "main_summary",
    "sub_agent",
    "sub_agent_summary",
  )


@dataclasses.dataclass(frozen=True)
class Learner:
  """The objective (gyre.learner.advantages and losses say each in full).

  micro_rows rows of row_tokens tokens make a micro-step.
  shuffle_advantages: a control: the advantages of a step are permuted over
  its executions, so that nothing can be learned from them.
  """

  advantage: Literal["grpo", "rloo"] = "grpo"
  normalize_std: bool = True
  std_ddof: int = 1
  shuffle_advantages: bool = False
  score: Literal["fraction", "count20", "binary"] = "fraction"
  loss: Literal["ppo_clip", "gspo", "cispo", "gmpo", "reinforce"] = "ppo_clip"
  eps_low: float = 0.2
  eps_high: float = 0.2
  dual_clip: float = 0.0
  correction: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
  correction_low: float = 0.5
  correction_high: float = 2.0
  kl_kind: Literal["k1", "k2", "k3"] = "k3"
  kl_coef: float = 0.0
  entropy_coef: float = 0.0
  aggregation: Literal[
    "execution_mean",
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
  ] = "execution_mean"
  sum_norm_len: int = 0
  updates_per_batch: int = 1
  micro_rows: int = 1
  row_tokens: int = 4096


@dataclasses.dataclass(frozen=True)
class Optim:
  """AdamW with f32 masters. schedule decays from lr to lr * final_ratio."""

  lr: float = 1e-5
  schedule: Literal["constant", "cosine", "linear"] = "constant"
  warmup_steps: int = 0
  final_ratio: float = 0.1
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Sizes of the mesh axes; their product is the number of devices used."""

  data: int = 1
  fsdp: int = 1
  tensor: int = 1


@dataclasses.dataclass(frozen=True)
class Eval:
  """n held-out tasks every `every` steps (0: never), `samples` each."""

  every: int = 10
  n: int = 64
  samples: int = 1
  temperature: float = 1.0
  bootstrap: int = 1000


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """keep: newest steps kept, beside the best by evaluation."""

  keep: int = 2


@dataclasses.dataclass(frozen=True)
class WarmStart:
  """Supervised steps on reference solutions of warm-start seeds (0: none).

  kinds: procedural kinds and their relative weights; empty takes tasks.kinds.
  any_site: whether conventions are those of another site in each task, so
  that the supervised phase shows all and tells none; else tasks.site's.
  policy: with an external harness, a Python file that says what a policy which
  knows the solution would answer it: its reference(instruction, turns) returns
  a function from the text of a prompt to the answer, for one execution.
  """

  steps: int = 0
  tasks: int = 256
  kinds: Mapping[str, float] = dataclasses.field(default_factory=dict)
  any_site: bool = False
  policy: str = ""
  rows: int = 4
  lr: float = 1e-3
  warmup_steps: int = 10


@dataclasses.dataclass(frozen=True)
class Config:
  """The resolved configuration of a run."""

  run: Run = dataclasses.field(default_factory=Run)
  model: Model = dataclasses.field(default_factory=Model)
  tokenizer: Tokenizer = dataclasses.field(default_factory=Tokenizer)
  tasks: Tasks = dataclasses.field(default_factory=Tasks)
  sandbox: Sandbox = dataclasses.field(default_factory=Sandbox)
  agent: Agent = dataclasses.field(default_factory=Agent)
  harness: Harness = dataclasses.field(default_factory=Harness)
  rollout: Rollout = dataclasses.field(default_factory=Rollout)
  trajectory: Trajectory = dataclasses.field(default_factory=Trajectory)
  learner: Learner = dataclasses.field(default_factory=Learner)
  optim: Optim = dataclasses.field(default_factory=Optim)
  mesh: Mesh = dataclasses.field(default_factory=Mesh)
  eval: Eval = dataclasses.field(default_factory=Eval)
  checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
  warm_start: WarmStart = dataclasses.field(default_factory=WarmStart)

  def to_dict(self) -> dict[str, Any]:
    """Plain nested dict, as written to a run's config.json."""
    return dataclasses.asdict(self)


def config_dict(**sections: Mapping[str, Any]) -> ml_collections.ConfigDict:
  """Every option at its default, but for those given; for `get_config()`.

  All options are there, so that --config.section.option=value overrides any.

  Args:
    **sections: section -> {option: value}.

  Returns:
    A ConfigDict that `from_config_dict` accepts.

  Raises:
    ConfigError: no such section or option.
  """
  values = Config().to_dict()
  for section, options in sections.items():
    for option, value in options.items():
      if option not in values.get(section, {}):
        raise ConfigError(f"no option {section}.{option}")
      values[section][option] = value
  return ml_collections.ConfigDict(values)


def _plain(value: Any) -> Any:
  if hasattr(value, "to_dict"):
    return value.to_dict()
  return value


def _coerce(value: Any, kind: Any, where: str) -> Any:
  """Returns `value` as `kind`, or raises ConfigError naming `where`."""
  value = _plain(value)
  origin = typing.get_origin(kind)
  if origin is Literal:
    choices = typing.get_args(kind)
    if value not in choices:
      raise ConfigError(f"{where} is {value!r}; choose one of {choices}")
    return value
  if dataclasses.is_dataclass(kind):
    return _build(kind, value, where)
  if origin is tuple:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
      raise ConfigError(f"{where} must be a tuple, got {value!r}")
    return tuple(
      _coerce(v, typing.get_args(kind)[0], f"{where}[{i}]")
      for i, v in enumerate(value)
    )
  if origin is not None and issubclass(origin, Mapping):
    if not isinstance(value, Mapping):
      raise ConfigError(f"{where} must be a mapping, got {value!r}")
    return dict(value)
  if kind is bool or isinstance(value, bool):
    if kind is not bool or not isinstance(value, bool):
      raise ConfigError(f"{where} must be {kind.__name__}, got {value!r}")
    return value
  if kind is float and isinstance(value, int):
    return float(value)
  if not isinstance(value, kind):
    raise ConfigError(f"{where} must be {kind.__name__}, got {value!r}")
  return value


def _build(cls: type, values: Any, where: str) -> Any:
  values = _plain(values)
  if not isinstance(values, Mapping):
    raise ConfigError(f"{where} must be a section, got {values!r}")
  hints = typing.get_type_hints(cls)
  names = [f.name for f in dataclasses.fields(cls)]
  prefix = f"{where}." if where else ""
  for name in values:
    if name not in names:
      raise ConfigError(f"no option {prefix}{name}; there are {names}")
  return cls(**{k: _coerce(v, hints[k], prefix + k) for k, v in values.items()})


def _require(ok: bool, message: str) -> None:
  if not ok:
    raise ConfigError(message)


_POSITIVE = (
  "rollout.group_size",
  "rollout.groups_per_step",
  "rollout.max_slots",
  "rollout.page_size",
  "rollout.num_pages",
  "rollout.prefill_chunk",
  "learner.micro_rows",
  "learner.row_tokens",
  "learner.updates_per_batch",
  "mesh.data",
  "mesh.fsdp",
  "mesh.tensor",
  "agent.max_turns",
  "agent.max_new_tokens",
  "agent.max_context",
  "checkpoint.keep",
  "sandbox.concurrency",
  "tasks.num_train",
)


# Sandboxes that can show a harness and the socket of its API.
_HARNESS_BACKENDS = ("bubblewrap", "process")


def _check_harness(config: Config) -> None:
  h, warm, named = config.harness, config.warm_start, config.harness.is_external
  who = f"harness.name {h.name!r}"
  _require(
    (h.name == "command") == bool(h.command.strip()),
    f"{who} with harness.command {h.command!r}: a command is what the name "
    "'command' runs, and needs",
  )
  _require(
    not named or h.name == "command" or bool(h.path),
    f"{who} needs harness.path, where it is installed",
  )
  _require(
    h.name != "command" or not h.args,
    f"harness.args {h.args} belong into harness.command",
  )
  wrong = [k for k in h.env if not k.isidentifier()]
  wrong += [k for k, v in h.env.items() if not isinstance(v, str)]
  _require(not wrong, f"harness.env must map names to text: {wrong}")
  _require(
    not (named and config.run.deterministic),
    f"run.deterministic needs the built-in loop: the clock of {who} is its own",
  )
  others = sorted(set(config.sandbox.backends) - set(_HARNESS_BACKENDS))
  _require(
    not (named and others),
    f"{who} runs in sandbox.backends {_HARNESS_BACKENDS}, not in {others}",
  )
  _require(
    not (named and config.agent.examples),
    f"agent.examples {config.agent.examples} are the built-in loop's; {who} "
    "writes its own prompts",
  )
  _require(
    named if warm.policy else not (named and warm.steps),
    f"warm_start.policy {warm.policy!r} with {who}: it says what a policy that "
    "knows the solution answers an external harness in the warm_start.steps",
  )


def _check_trajectory(config: Config) -> None:
  t, learner = config.trajectory, config.learner
  for name in ("max_samples", "token_budget"):
    value = getattr(t, name)
    _require(value >= 0, f"trajectory.{name} must not be negative, got {value}")
  _require(
    bool(t.roles) and len(set(t.roles)) == len(t.roles),
    f"trajectory.roles must name each role once, got {t.roles}",
  )
  if not t.unbiased:
    return
  _require(
    t.max_samples == 0 or t.max_samples >= len(t.roles),
    f"trajectory.unbiased draws a path of each role: trajectory.max_samples "
    f"{t.max_samples} must be 0 or at least {len(t.roles)}",
  )
  _require(
    t.token_budget == 0,
    "trajectory.unbiased draws a fixed number of paths: "
    f"trajectory.token_budget must be 0, got {t.token_budget}",
  )
  _require(
    learner.aggregation == "execution_mean",
    "trajectory.unbiased estimates the mean over an execution's tokens: "
    "learner.aggregation must be 'execution_mean', got "
    f"{learner.aggregation!r}",
  )
  sequence = [
    x
    for x in (learner.loss, learner.correction)
    if x in ("gspo", "gmpo", "sequence_mask")
  ]
  _require(
    not sequence,
    "trajectory.unbiased estimates sums over tokens: learner.loss or "
    f"learner.correction {sequence} is no such sum",
  )


def check(config: Config) -> Config:
  """Returns `config`, or raises ConfigError for values that contradict."""
  for path in _POSITIVE:
    section, name = path.split(".")
    value = getattr(getattr(config, section), name)
    _require(value > 0, f"{path} must be positive, got {value}")
  r, a, m = config.rollout, config.agent, config.model
  _require(
    config.run.seed >= 0,
    f"run.seed must not be negative, got {config.run.seed}",
  )
  _require(
    r.temperature > 0,
    f"rollout.temperature must be positive, got {r.temperature}",
  )
  _require(
    r.top_p == 1.0 and r.top_k == 0,
    "training rollouts sample the full distribution: rollout.top_p must be "
    f"1 and rollout.top_k 0, got {r.top_p} and {r.top_k}",
  )
  _require(
    config.agent.max_context <= r.page_size * r.num_pages,
    f"agent.max_context {a.max_context} does not fit the engine's cache of "
    f"{r.num_pages} pages x {r.page_size} tokens",
  )
  _require(
    a.max_new_tokens < a.max_context,
    f"agent.max_new_tokens {a.max_new_tokens} must be below "
    f"agent.max_context {a.max_context}",
  )
  _require(
    m.source == "init" or bool(m.path),
    f"model.source {m.source!r} needs model.path",
  )
  _require(
    m.source != "init" or bool(m.hf_config),
    "model.source 'init' needs model.hf_config",
  )
  _require(
    a.examples_of == "easy" or config.tasks.taskset == "shell",
    f"agent.examples_of 'kind' needs tasks.taskset 'shell', which has kinds; "
    f"it is {config.tasks.taskset!r}",
  )
  _require(
    not (config.warm_start.any_site and a.examples_of == "kind" and a.examples),
    "warm_start.any_site contradicts agent.examples_of 'kind': the worked "
    f"examples follow tasks.site {config.tasks.site}",
  )
  _require(bool(config.sandbox.backends), "sandbox.backends is empty")
  _check_trajectory(config)
  _check_harness(config)
  _require(
    config.learner.row_tokens >= a.max_context,
    f"learner.row_tokens {config.learner.row_tokens} must hold the longest "
    f"conversation: agent.max_context {a.max_context}",
  )
  _require(
    config.learner.aggregation != "seq_mean_token_sum_norm"
    or config.learner.sum_norm_len > 0,
    "learner.aggregation 'seq_mean_token_sum_norm' needs "
    "learner.sum_norm_len > 0",
  )
  return config


def from_config_dict(config_dict: Any) -> Config:
  """Builds the checked, frozen configuration.

  Args:
    config_dict: an ml_collections.ConfigDict or a nested mapping.

  Returns:
    A Config.

  Raises:
    ConfigError: an unknown option, a wrong type, or values that contradict;
      the message names the option.
  """
  return check(_build(Config, config_dict, ""))
