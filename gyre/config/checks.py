"""What the options of a configuration must be, each and together."""

from __future__ import annotations

import math

from gyre.config.sections import Config, ConfigError


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
  "elastic.cells",
  "elastic.mu",
  "run.steps",
  "eval.samples",
  "eval.bootstrap",
  "warm_start.tasks",
  "warm_start.rows",
)

_NOT_NEGATIVE = (
  "eval.every",
  "eval.temperature",
  "eval.n",
  "warm_start.steps",
  "warm_start.warmup_steps",
  "optim.warmup_steps",
  "learner.kl_coef",
  "rollout.resample_limit",
  "rollout.engines",
  "elastic.standalone",
  "elastic.window",
  "elastic.slots",
  "elastic.restarts",
)

# No machine has more; on a CPU so many devices would be made.
_MOST_DEVICES = 4096
# So many updates' groups would be dispatched at once.
_MOST_AHEAD = 1000


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


def _check_run(config: Config) -> None:
  r, m, seed = config.rollout, config.model, config.run.seed
  _require(seed >= 0, f"run.seed must not be negative, got {seed}")
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
    m.source == "init" or bool(m.path),
    f"model.source {m.source!r} needs model.path",
  )
  _require(
    m.source != "init" or bool(m.hf_config),
    "model.source 'init' needs model.hf_config",
  )
  _require(bool(config.sandbox.backends), "sandbox.backends is empty")


def _check_agent(config: Config) -> None:
  r, a = config.rollout, config.agent
  _require(
    a.max_context <= r.page_size * r.num_pages,
    f"agent.max_context {a.max_context} does not fit the engine's cache of "
    f"{r.num_pages} pages x {r.page_size} tokens",
  )
  _require(
    a.max_new_tokens < a.max_context,
    f"agent.max_new_tokens {a.max_new_tokens} must be below "
    f"agent.max_context {a.max_context}",
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


def _check_elastic(config: Config) -> None:
  e, batch = config.elastic, config.rollout.groups_per_step
  _require(
    e.phi >= 0 and math.isfinite(e.phi),
    f"elastic.phi must be a number, not negative, got {e.phi}",
  )
  for name in ("phi", "mu"):
    value = getattr(e, name)
    _require(
      value <= _MOST_AHEAD,
      f"elastic.{name} {value} is more than {_MOST_AHEAD} updates",
    )
  whole = round(e.phi * batch)
  _require(
    abs(e.phi * batch - whole) < 1e-9,
    f"elastic.phi {e.phi} times rollout.groups_per_step {batch} is no whole "
    f"number of groups; the nearest elastic.phi is {whole / batch:g}",
  )
  _require(
    e.standalone < e.cells,
    f"elastic.standalone {e.standalone} of elastic.cells {e.cells} leaves none "
    "to train",
  )
  _require(
    not e.trainer or e.standalone == e.cells - 1 > 0,
    f"elastic.trainer needs engines beside it: elastic.standalone "
    f"{e.standalone} must be all others of elastic.cells {e.cells}",
  )
  width = config.mesh.size
  _require(
    e.cells * width <= _MOST_DEVICES,
    f"elastic.cells {e.cells} of {width} devices each are more than "
    f"{_MOST_DEVICES} devices",
  )
  engines = config.rollout.engines
  _require(
    engines <= width,
    f"rollout.engines {engines} need a device each, a cell has {width}",
  )
  _require(
    not e.resize or width > 1,
    f"elastic.resize {dict(e.resize)} divides the devices of the first cell: "
    "section mesh gives it 1, and must give it more",
  )
  for after, devices in e.resize.items():
    update = isinstance(after, str) and after.isascii() and after.isdigit()
    _require(
      update and type(devices) is int and 1 <= devices <= width,
      f"elastic.resize maps updates to 1 to {width} devices of the first cell, "
      f"got {after!r}: {devices!r}",
    )
    fixed = config.mesh.data * config.mesh.tensor
    _require(
      not devices % fixed,
      f"elastic.resize {after}: {devices} devices are no multiple of mesh.data "
      f"times mesh.tensor, {fixed}: mesh.fsdp alone is resized",
    )
  _require(
    not (e.resize and e.launcher == "local"),
    "elastic.resize needs elastic.launcher 'inprocess': a process holds its "
    f"cell's devices for good; they are {dict(e.resize)} and {e.launcher!r}",
  )
  least = -(-whole // batch) + e.mu - 1
  _require(
    e.max_staleness == -1 or e.max_staleness >= least,
    f"elastic.max_staleness {e.max_staleness} is below {least}, which phi "
    f"{e.phi} and mu {e.mu} imply",
  )
  _require(
    not (e.policy == "deadline" and (e.window or config.run.deterministic)),
    "elastic.policy 'deadline' needs elastic.window 0 and run.deterministic "
    f"False; they are {e.window} and {config.run.deterministic}",
  )
  _require(
    not (config.run.deterministic and (e.phi or e.window > 1)),
    "run.deterministic needs elastic.phi 0 and elastic.window 1 (or 0): what "
    f"runs over a publication is timed; they are {e.phi} and {e.window}",
  )


def _check_learner(config: Config) -> None:
  learner, context = config.learner, config.agent.max_context
  for name in ("lr", "weight_decay", "clip_norm"):
    value = getattr(config.optim, name)
    _require(
      0 <= value < math.inf,
      f"optim.{name} must be a number, not negative, got {value}",
    )
  _require(
    learner.row_tokens >= context,
    f"learner.row_tokens {learner.row_tokens} must hold the longest "
    f"conversation: agent.max_context {context}",
  )
  _require(
    learner.aggregation != "seq_mean_token_sum_norm"
    or learner.sum_norm_len > 0,
    "learner.aggregation 'seq_mean_token_sum_norm' needs "
    "learner.sum_norm_len > 0",
  )


def check(config: Config) -> Config:
  """Returns `config`, or raises ConfigError for values that contradict."""
  for path in _POSITIVE:
    section, name = path.split(".")
    value = getattr(getattr(config, section), name)
    _require(value > 0, f"{path} must be positive, got {value}")
  for path in _NOT_NEGATIVE:
    section, name = path.split(".")
    value = getattr(getattr(config, section), name)
    _require(value >= 0, f"{path} must not be negative, got {value}")
  _check_run(config)
  _check_agent(config)
  _check_trajectory(config)
  _check_harness(config)
  _check_learner(config)
  _check_elastic(config)
  return config
