"""From calls to packed rows: a long execution, its store, bounded selection.

`long`: calls that each re-send their history are built into a tree, selected
and packed. `store`: the same execution in the rollout store, beside one copy
of its unique ids and of the logprobs and versions of what was sampled.
`bounds`: branching executions, recorded by a run or made here, selected with
J_max 1, 5 and without a bound, packed, and trained one step each.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from benches import ours
from peers import common

BOUNDS = {"1": 1, "5": 5, "all": 0}


def long_calls(
  calls: int, tokens: int, sampled: float = 0.3, copy: bool = True
) -> Iterator[Any]:
  """Yields calls whose contexts grow to `tokens`, each re-sending its history.

  Args:
    calls: how many.
    tokens: of the last call, with its completion.
    sampled: share of the new tokens of a call that it sampled.
    copy: whether each prompt is an array of its own, as a recorder hands it
      over, or a view of one history.
  """
  from gyre.types import Call

  rng = np.random.default_rng(0)
  history = rng.integers(0, 32000, tokens, dtype=np.int32)
  ends = np.linspace(0, tokens, calls + 1).astype(int)
  for i, (start, end) in enumerate(itertools.pairwise(ends)):
    n = max(1, int((end - start) * sampled))
    ids = history[:end].copy() if copy else history[:end]
    yield Call(
      execution_id="long/0",
      group_id="long",
      call_id=f"{i:06d}",
      prompt_ids=ids[: end - n],
      completion_ids=ids[end - n :],
      logprobs=-rng.exponential(size=n),
      versions=np.full(n, i // 10, np.int32),
      finish_reason="stop",
    )


def branching_execution(name: str, group: str, seed: int, scale: int):
  """An execution that compacts twice, calls sub-agents and retries.

  Args:
    name: its id.
    group: of it; executions of a group share their first prompt.
    seed: of its tokens and of where it branches.
    scale: tokens of a message, on average.
  """
  from gyre.types import Call, Execution

  rng = np.random.default_rng(seed)
  shared = np.random.default_rng(list(group.encode()))
  prompt = shared.integers(0, 4000, 4 * scale)
  calls: list[Call] = []

  def message():
    return rng.integers(0, 4000, rng.integers(scale // 2, 2 * scale))

  def talk(history, turns, role):
    """A conversation; one turn in six is sampled again from its middle."""
    for _ in range(turns):
      completion = message()
      again = 2 if rng.random() < 1 / 6 else 1
      for attempt in range(again):
        if attempt:
          keep = rng.integers(0, len(completion))
          completion = np.concatenate([completion[:keep], message()])
        calls.append(
          Call(
            execution_id=name,
            group_id=group,
            call_id=f"{len(calls):04d}",
            prompt_ids=history,
            completion_ids=completion,
            logprobs=-rng.exponential(size=len(completion)),
            versions=np.zeros(len(completion), np.int32),
            finish_reason="stop",
            role=role,
          )
        )
      history = np.concatenate([history, completion, message()])
      if role == "main" and rng.random() < 0.3:
        own = np.concatenate([prompt[:scale], message()])
        talk(own, int(rng.integers(2, 5)), "sub_agent")
    return history

  history = prompt
  for _ in range(3):
    history = talk(history, int(rng.integers(4, 8)), "main")
    talk(np.concatenate([history, message()]), 1, "main_summary")
    history = np.concatenate([prompt, message()])
  return Execution(name, group, 0, "branching", calls=tuple(calls))


def recorded(run: str, limit: int) -> list:
  """The branching executions of a run's directory.

  Args:
    run: the directory; it may still be written to.
    limit: about how many executions are looked at, in whole groups that lie
      evenly over the run.

  Raises:
    SystemExit: none of them branches.
  """
  from gyre.store.rollouts import RolloutStore
  from gyre.trajectory import tree

  path = pathlib.Path(run) / "rollouts.sqlite"
  with RolloutStore(path, readonly=True) as store:
    groups = store.groups("train")
    share = -(-len(store.execution_ids("train")) // limit)
    every = max(1, min(share, len(groups)))
    looked_at = [
      execution
      for group in groups[every // 2 :: every]
      for execution in store.executions(group.group_id)
    ]
  out = [e for e in looked_at if len(tree.build(e.calls).leaves()) > 1]
  if not out:
    raise SystemExit(
      f"{path}: of {len(looked_at)} executions none has more than one branch"
    )
  return out


def measure(part: str, **settings: Any) -> None:
  """Prints the JSON line of one part.

  Args:
    part: "long", "store" or "bounds".
    **settings: of it.
  """
  parts = {"long": _long, "store": _store, "bounds": _bounds}
  results = parts[part](**settings)
  ours.emit("trajectories", {"part": part} | settings, results)


def _long(calls: int, tokens: int, mode: str) -> dict[str, Any]:
  from gyre.learner import packing
  from gyre.trajectory import select, tree

  before = ours.peak_gib()
  began = time.perf_counter()
  built = tree.build(long_calls(calls, tokens))
  after_build = time.perf_counter()
  selection = select.select(
    built, execution_id="long/0", group_id="long", mode=mode
  )
  after_select = time.perf_counter()
  packed = packing.pack(selection.samples, None, row_tokens=tokens)
  end = time.perf_counter()
  sampled = sum(len(s.trained) for s in selection.samples)
  if packed.num_entries != sampled or selection.stats["dropped/main"]:
    raise SystemExit(f"{packed.num_entries} entries of {sampled} tokens")
  return {
    "build_s": after_build - began,
    "select_s": after_select - after_build,
    "pack_s": end - after_select,
    "total_s": end - began,
    "peak_gib": ours.peak_gib(),
    "imports_gib": before,
    "tokens_flat": selection.stats["tokens_flat"],
    "tokens_unique": selection.stats["tokens_unique"],
    "entries": packed.num_entries,
    "samples": len(selection.samples),
  }


def _store(calls: int, tokens: int) -> dict[str, Any]:
  from gyre.store.rollouts import RolloutStore
  from gyre.types import Execution, Group

  recorded_calls = tuple(long_calls(calls, tokens, copy=False))
  execution = Execution("long/0", "long", 0, "t", calls=recorded_calls)
  once = 4 * tokens + 8 * execution.num_sampled
  with tempfile.TemporaryDirectory(prefix="gyre-store-") as directory:
    path = pathlib.Path(directory) / "rollouts.sqlite"
    began = time.perf_counter()
    with RolloutStore(path) as store:
      store.put_group(Group("long", 0, "t"))
      store.put_execution(execution)
    seconds = time.perf_counter() - began
    size = sum(p.stat().st_size for p in path.parent.iterdir())
  return {"ratio": size / once, "bytes": size, "once": once, "put_s": seconds}


def _bounds(
  run: str, executions: int, scale: int, repeat: int
) -> dict[str, Any]:
  import jax
  import jax.numpy as jnp

  from gyre import config
  from gyre.learner import optim, packing, state, step
  from gyre.models import params as params_lib
  from gyre.models.config import ModelConfig

  if run:
    found = recorded(run, executions)
  else:
    found = [
      branching_execution(f"g{i // 4}/{i % 4}", f"g{i // 4}", i, scale)
      for i in range(executions)
    ]
  packed, results = {}, {}
  rng = np.random.default_rng(0)
  advantages = {e.execution_id: float(rng.standard_normal()) for e in found}
  for name, bound in BOUNDS.items():
    samples, stats = _selected(found, bound)
    packed[name] = samples
    results[f"trained_{name}"] = stats
  # Rows of an eighth of all, so that a step's time follows what is in it, but
  # not so long that attention is all that it takes.
  longest = max(s.length for s in packed["all"])
  whole = packing.pack(packed["all"], None, row_tokens=longest).tokens_trained
  row_tokens = packing.bucket(max(longest, min(whole // 8, 2048)))
  model = dict(_MODEL)
  largest = max(int(s.ids.max()) for s in packed["all"])
  model["vocab_size"] = packing.bucket(largest + 1)
  cfg = ModelConfig.from_hf(model)
  specs = params_lib.param_specs(cfg)
  optimizer_config = config.Optim(lr=1e-6)
  optimizer = optim.make_optimizer(optimizer_config, 100)
  schedule = optim.make_schedule(optimizer_config, 100)
  learner = config.Learner()
  micro_step = step.make_micro_step(cfg, learner, specs=specs)
  apply = step.make_apply(optimizer, schedule, specs=specs)
  params = params_lib.init_params(specs, jax.random.key(0))
  states = [state.init_state(params, optimizer, jax.random.key(0))]

  for name, samples in packed.items():
    made = packing.pack(
      samples,
      advantages,
      row_tokens=row_tokens,
      row_entries=row_tokens,
      fixed=True,
    )

    def run_step(i, made=made):
      old = states.pop()
      sums = step.zero_sums(old.params)
      for batch in made.batches:
        sums = micro_step(old.params, batch, sums)
      new, _ = apply(old, sums)
      states.append(jax.block_until_ready(new))

    results[f"step_{name}_s"] = common.timed(run_step, repeat)[0]
    results[f"rows_{name}"] = len(made.batches)
    results[f"packed_{name}"] = made.tokens_trained
  for name in ("1", "5"):
    for key, made in (("trained", "trained_{}"), ("step", "step_{}_s")):
      share = results[made.format(name)] / results[made.format("all")]
      results[f"{key}_{name}_of_all"] = share
    share = results[f"packed_{name}"] / results["packed_all"]
    results[f"packed_{name}_of_all"] = share
  results["executions"] = len(found)
  results["parameters"] = int(
    sum(jnp.size(x) for x in jax.tree.leaves(states[0].params))
  )
  return results


# Dense, 1.1M parameters besides the embedding of the run's vocabulary.
_MODEL = {
  "model_type": "qwen3",
  "hidden_size": 128,
  "intermediate_size": 384,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 4,
  "head_dim": 32,
  "max_position_embeddings": 1 << 20,
  "rope_theta": 10000.0,
  "tie_word_embeddings": True,
}


def _selected(executions, bound: int):
  """The samples of executions at a bound, and how many tokens they train."""
  from gyre import config
  from gyre.trajectory import select

  options = dataclasses.replace(config.Trajectory(), max_samples=bound)
  selections = [select.samples(e, options) for e in executions]
  samples = [s for selection in selections for s in selection.samples]
  return samples, sum(s.stats["tokens_trained"] for s in selections)
