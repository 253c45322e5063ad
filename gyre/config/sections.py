"""The sections of a configuration: frozen dataclasses with their defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal


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
  agent section it keeps max_context, max_new_tokens (a call's, and less where
  the program asks for less) and the two timeouts.

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
  engines: of a cell, each a whole one on a device of its own, which share the
  cell's calls (0: one on each of its devices).
  Engine: max_slots requests decode together; pages of page_size tokens;
  prefill in chunks of prefill_chunk tokens. resample_zero_variance: groups
  whose rewards are all equal are not trained but replaced, up to
  resample_limit times groups_per_step an update.
  """

  group_size: int = 8
  groups_per_step: int = 8
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  engines: int = 0
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
  """Sizes of the mesh axes; `size`, their product, is the devices used."""

  data: int = 1
  fsdp: int = 1
  tensor: int = 1

  @property
  def size(self) -> int:
    """Devices of the mesh."""
    return self.data * self.fsdp * self.tensor


@dataclasses.dataclass(frozen=True)
class Elastic:
  """How devices move between rollout and training (gyre.elastic).

  cells: equal cells, each a mesh of its own (section mesh) with an engine; the
  first holds the optimizer, and the others follow it into training one by one.
  One cell switches as a whole. trainer: the first only trains. standalone: so
  many of the last only serve. Both, with 2 cells, are a fixed partition.
  phi, mu: groups for phi further updates are dispatched ahead, and weights are
  published every mu updates; mean staleness is phi + (mu - 1) / 2.
  max_staleness: groups older than this are never trained (-1: one more than
  phi and mu imply; with run.deterministic, what they imply). It is kept by
  policy "deadline" (those that would be too old next are waited for), or by a
  window: only the `window` oldest groups may be trained next (0: as many as
  max_staleness allows). policy: "waterlevel" (a cell leaves when what is
  unfinished fits the others), "steady" (the same, and dispatch does not fade
  at the end of a run) or "deadline" (steady, with deadlines); "auto" is
  "waterlevel" in order of dispatch with run.deterministic, else "deadline"
  unless there is a window.
  streaming: a group is trained as soon as it is whole; else an update waits
  for all of its groups. slots: executions a cell holds (0: rollout.max_slots
  of each engine; more suits agents that mostly wait for tools: calls queue).
  resize: after an update, on how many of its devices the first cell trains;
  the others serve, until it takes them back. {"3": 4, "6": 8}.
  launcher: "inprocess" (cells share this process) or "local" (a process each).
  restarts: of a cell's process that dies again and again; then the run goes on
  without the cell.
  """

  cells: int = 1
  trainer: bool = False
  standalone: int = 0
  phi: float = 0.0
  mu: int = 1
  max_staleness: int = -1
  window: int = 0
  streaming: bool = True
  policy: Literal["auto", "waterlevel", "steady", "deadline"] = "auto"
  slots: int = 0
  resize: Mapping[str, int] = dataclasses.field(default_factory=dict)
  launcher: Literal["inprocess", "local"] = "inprocess"
  restarts: int = 8


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
  elastic: Elastic = dataclasses.field(default_factory=Elastic)
  eval: Eval = dataclasses.field(default_factory=Eval)
  checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
  warm_start: WarmStart = dataclasses.field(default_factory=WarmStart)

  def to_dict(self) -> dict[str, Any]:
    """Plain nested dict, as written to a run's config.json."""
    return dataclasses.asdict(self)
