"""The learner's step: packing, gradient, AdamW; one shape a process."""

from __future__ import annotations

import numpy as np
from benches import ours
from peers import common


def make_samples(batch: int, seq: int, prompt: int, vocab: int) -> list:
  """Returns `batch` samples of random ids with `seq` trained tokens each.

  Without a prompt every sample stands by itself and feeds `seq` tokens: its
  last target is fed to none. With one, all share it and are one group.
  """
  from gyre.types import Sample

  rng = np.random.default_rng(0)
  shared = ours.token_ids(rng, prompt or 1, vocab)
  out = []
  for i in range(batch):
    head = shared if prompt else ours.token_ids(rng, 1, vocab)
    ids = np.array(head + ours.token_ids(rng, seq, vocab), np.int32)
    out.append(
      Sample(
        execution_id=f"{0 if prompt else i}/{i}",
        group_id=str(0 if prompt else i),
        runs=(ids,),
        trained=np.arange(len(head), len(ids)),
        logprobs=np.full(seq, -10.0),
        versions=np.zeros(seq, np.int32),
      )
    )
  return out


def measure(
  model: str,
  batch: int,
  seq: int,
  prompt: int,
  dtype: str,
  layout: str = "stacked",
  remat: bool = False,
  repeat: int = 3,
) -> None:
  """Prints the JSON line of a train step.

  Args:
    model: Hugging Face directory.
    batch: samples.
    seq: trained tokens of each.
    prompt: tokens that all samples share before them; 0: none.
    dtype: of activations and products; masters and moments are f32.
    layout: of the parameter tree.
    remat: recompute layers in the backward pass.
    repeat: timed steps; the median is reported.
  """
  settings = dict(locals())
  import jax

  from gyre import config
  from gyre.learner import optim, packing, state, step
  from gyre.models import load
  from gyre.models import params as params_lib

  cfg, params = load.load_hf_dir(model, layout=layout)
  specs = params_lib.param_specs(cfg, layout=layout)
  samples = make_samples(batch, seq, prompt, cfg.vocab_size)
  rng = np.random.default_rng(1)
  advantages = {s.execution_id: rng.standard_normal() for s in samples}
  learner = config.Learner(loss="reinforce", aggregation="token_mean")
  optimizer_config = config.Optim(lr=1e-6)
  optimizer = optim.make_optimizer(optimizer_config, 100)
  update = step.make_update(
    cfg,
    learner,
    optimizer,
    optim.make_schedule(optimizer_config, 100),
    specs=specs,
    dtype=dtype,
    remat=remat,
  )
  states = [state.init_state(params, optimizer, jax.random.key(0))]
  del params

  def run(i):
    packed = packing.pack(
      samples,
      advantages,
      row_tokens=prompt + batch * seq if prompt else seq,
      micro_rows=1 if prompt else batch,
    )
    new, metrics = update(states.pop(), packed.batches)
    states.append(jax.block_until_ready(new))
    return packed, metrics

  packed, _ = run(0)
  secs, every = common.timed(run, repeat)
  results = {
    "tok_s": packed.tokens_flat / secs,
    "step_s": secs,
    "all_step_s": every,
    "tokens_flat": packed.tokens_flat,
    "tokens_trained": packed.tokens_trained,
    "tokens_padded": packed.tokens_padded,
    "entries": packed.num_entries,
    "peak_gib": ours.peak_gib(),
  }
  ours.emit("train", settings, results)
