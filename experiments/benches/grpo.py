"""A whole GRPO step: generate, reward, pack, train, new weights served.

Generation goes through the embedded engine, where a group's prompt is
prefilled once; the learner trains it once.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from benches import ours


def _load(model: str, hf_config: Mapping[str, Any] | None, layout: str):
  """(cfg, params) of a directory, or random ones of a configuration."""
  import jax

  from gyre.models import load
  from gyre.models import params as params_lib
  from gyre.models.config import ModelConfig

  if hf_config is None:
    return load.load_hf_dir(model, layout=layout)
  cfg = ModelConfig.from_hf(hf_config)
  specs = params_lib.param_specs(cfg, layout=layout)
  return cfg, params_lib.init_params(specs, jax.random.key(0))


def make_executions(prompts, group: int, completions, version: int) -> list:
  """The records of a step's executions: one call each, unscored."""
  from gyre.types import Call, Execution

  out = []
  for i, done in enumerate(completions):
    g, index = divmod(i, group)
    call = Call(
      execution_id=f"{g}/{index}",
      group_id=str(g),
      call_id="0",
      prompt_ids=prompts[g],
      completion_ids=done.ids,
      logprobs=done.logprobs,
      versions=done.versions,
      finish_reason=done.finish_reason,
    )
    out.append(
      Execution(
        execution_id=call.execution_id,
        group_id=call.group_id,
        index=index,
        task_id=str(g),
        version=version,
        calls=(call,),
      )
    )
  return out


def measure(
  dtype: str,
  model: str = "",
  hf_config: Mapping[str, Any] | None = None,
  prompts: int = 4,
  group: int = 8,
  prompt_len: int = 64,
  new: int = 64,
  steps: int = 3,
  warmup: int = 2,
  layout: str = "stacked",
) -> None:
  """Prints the JSON line of a GRPO step.

  Args:
    dtype: of the engine, and of the learner's activations and products.
    model: Hugging Face directory.
    hf_config: a configuration to draw random weights of, instead.
    prompts: groups a step.
    group: completions a prompt.
    prompt_len, new: tokens of each prompt and completion.
    steps, warmup: timed steps, after so many others.
    layout: of the learner's parameter tree.
  """
  settings = dict(locals())
  cfg, params = _load(model, hf_config, layout)
  rows = []
  with asyncio.Runner() as runner:
    cycle = _Cycle(runner, cfg, params, settings)
    del params
    for _ in range(warmup + steps):
      rows.append(cycle.step())
    cycle.close()
  use = rows[warmup:]
  results = {k: statistics.median(r[k] for r in use) for k in use[0]}
  results["all_step_s"] = [r["step_s"] for r in rows]
  results["gen_tok_s"] = prompts * group * new / results["generate_s"]
  results["peak_gib"] = ours.peak_gib()
  ours.emit("grpo", settings, results)


class _Cycle:
  """Engine and learner of one process, and a step of both."""

  def __init__(self, runner: asyncio.Runner, cfg, params, settings):
    import jax

    from gyre import config
    from gyre.learner import optim, state, step
    from gyre.models import params as params_lib

    s = self.settings = settings
    self.cfg, self.runner = cfg, runner
    self.rng = np.random.default_rng(0)
    n, length = s["prompts"] * s["group"], s["prompt_len"] + s["new"]
    self.engine = ours.open_engine(
      params,
      cfg,
      s["dtype"],
      max_slots=n,
      num_pages=2 * n * -(-length // 16),
      max_context=length,
    )
    runner.run(self.engine.ready())
    optimizer_config = config.Optim(lr=1e-6)
    total = s["steps"] + s["warmup"]
    optimizer = optim.make_optimizer(optimizer_config, total)
    self.update = step.make_update(
      cfg,
      config.Learner(),
      optimizer,
      optim.make_schedule(optimizer_config, total),
      specs=params_lib.param_specs(cfg, layout=s["layout"]),
      dtype=s["dtype"],
    )
    self.state = state.init_state(params, optimizer, jax.random.key(0))

  def step(self) -> dict[str, float]:
    """One GRPO step; returns its seconds and token counts."""
    import jax

    from gyre.learner import advantages, packing
    from gyre.trajectory import select

    s = self.settings
    marks = [time.perf_counter()]
    heads = [
      ours.token_ids(self.rng, s["prompt_len"], self.cfg.vocab_size)
      for _ in range(s["prompts"])
    ]
    requests = [p for p in heads for _ in range(s["group"])]
    version = self.engine.version
    done = self.runner.run(
      ours.generate(self.engine, requests, s["new"], seed=1000 * version)
    )
    marks.append(time.perf_counter())
    executions = make_executions(heads, s["group"], done, version)
    rewards = [float(np.mean(c.ids % 2)) for c in done]
    grouped = advantages.grpo(rewards, [e.group_id for e in executions])
    options = config.Trajectory()
    selections = [select.samples(e, options) for e in executions]
    samples = [s for selection in selections for s in selection.samples]
    packed = packing.pack(
      samples,
      {
        e.execution_id: a
        for e, a in zip(executions, grouped.values, strict=True)
      },
      row_tokens=s["prompt_len"] + s["group"] * s["new"],
      micro_rows=s["prompts"],
    )
    self.state, _ = self.update(self.state, packed.batches)
    jax.block_until_ready(self.state)
    marks.append(time.perf_counter())
    self.runner.run(self.engine.load_weights(self.state.params, version + 1))
    marks.append(time.perf_counter())
    secs = np.diff(marks).tolist()
    return {
      "step_s": marks[-1] - marks[0],
      "generate_s": secs[0],
      "optimise_s": secs[1],
      "publish_s": secs[2],
      "tokens_flat": packed.tokens_flat,
      "tokens_trained": packed.tokens_trained,
      "tokens_padded": packed.tokens_padded,
    }

  def close(self) -> None:
    """Ends the engine."""
    self.runner.run(self.engine.close())
