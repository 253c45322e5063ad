"""Cells over sub-meshes of eight host devices, and batches for them."""

import asyncio

import jax
import numpy as np

from gyre import config
from gyre.learner import packing, state
from gyre.models import params as params_lib
from gyre.models.config import ModelConfig
from gyre.runtime.cell_worker import CellWorker
from gyre.runtime.core_worker import CoreWorker
from gyre.runtime.trainer import Trainer
from gyre.types import Sample

VOCAB = 32
MODEL = ModelConfig(
  model_type="llama",
  vocab_size=VOCAB,
  hidden_size=16,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  mlp_dim=24,
  tie_embeddings=True,
  init_std=0.3,
)
# With b1 = 0 Adam's first moment is the normalised gradient itself.
OPTIM = config.Optim(lr=1e-3, b1=0.0, clip_norm=0.0)


def make_config(**learner):
  """A run's configuration around the toy model."""
  made = config.from_config_dict(
    config.config_dict(
      run={"steps": 8, "deterministic": True},
      model={"hf_config": MODEL.to_hf()},
      agent={"max_context": 32, "max_new_tokens": 8},
      rollout={
        "max_slots": 4,
        "page_size": 8,
        "num_pages": 32,
        "prefill_chunk": 8,
      },
      learner={"row_tokens": 48, "correction": "none", **learner},
      optim={"lr": OPTIM.lr, "b1": OPTIM.b1, "clip_norm": OPTIM.clip_norm},
    )
  )
  return made


def mesh(sizes, first=0):
  """A mesh of (data, fsdp, tensor) over devices from `first` on."""
  return state.make_mesh(config.Mesh(*sizes), jax.devices()[first:])


def params(seed=7):
  """Weights of the toy model."""
  return params_lib.init_params(
    params_lib.param_specs(MODEL), jax.random.key(seed)
  )


def samples(seed=0, groups=12, size=4):
  """Groups that share a prompt; sampled runs with a tool's output between."""
  rng = np.random.default_rng(seed)
  out = []
  for g in range(groups):
    prompt = rng.integers(1, VOCAB, 5 + g % 3)
    for i in range(size):
      n = rng.integers(2, 6, 3)
      parts = [rng.integers(1, VOCAB, k) for k in n]
      ids = np.concatenate([prompt, *parts])
      mask = np.repeat([False, True, False, True], [len(prompt), *n])
      trained = np.flatnonzero(mask)
      out.append(
        Sample(
          execution_id=f"g{g}/{i}",
          group_id=f"g{g}",
          runs=(ids.astype(np.int32),),
          trained=trained,
          logprobs=-rng.uniform(2, 5, len(trained)),
          versions=np.zeros(len(trained), np.int32),
        )
      )
  return out


def batches(seed=0, rows=2, groups=12):
  """Micro-steps of `rows` rows of one batch of groups."""
  made = samples(seed, groups)
  rng = np.random.default_rng(seed + 1)
  names = sorted({s.execution_id for s in made})
  advantages = dict(zip(names, rng.normal(size=len(names)), strict=True))
  return packing.pack(
    made, advantages, row_tokens=48, row_entries=48, micro_rows=rows, fixed=True
  ).batches


def _optimised():
  """What is compiled otherwise rounds otherwise: they are kept apart."""
  return not jax.config.values["jax_disable_most_optimizations"]


_TRAINERS = {}


def trainer(sizes, first=0, **learner):
  """A Trainer over a sub-mesh; its programs are compiled once a session."""
  key = (_optimised(), sizes, first, tuple(sorted(learner.items())))
  if key not in _TRAINERS:
    made = Trainer(MODEL, mesh(sizes, first), make_config(**learner))
    _TRAINERS[key] = made
  made = _TRAINERS[key]
  made.state = None
  return made


_PROGRAMS = {True: {}, False: {}}


def programs():
  """Compiled steps of engines, by device."""
  return _PROGRAMS[_optimised()]


def _cell(kind, name, sizes, first, learner):
  made, config = trainer(sizes, first, **learner), make_config(**learner)
  return kind(name, made, config, programs=programs())


def core(sizes=(1, 1, 1), first=0, **learner):
  """A core that has first weights; to be joined."""
  made = _cell(CoreWorker, "cell 0", sizes, first, learner)
  made.trainer.init(params(), seed=3)
  return made


def satellite(name, sizes=(1, 1, 1), first=0, **learner):
  """A cell without a state."""
  return _cell(CellWorker, name, sizes, first, learner)


def gradient(worker):
  """The normalised gradient of a core's last update, by name."""
  moments = [
    s
    for s in jax.tree.leaves(
      worker.trainer.state.opt_state, is_leaf=lambda x: hasattr(x, "mu")
    )
    if hasattr(s, "mu")
  ]
  return jax.tree.map(lambda x: np.asarray(x, np.float64), moments[0].mu)


def distance(got, want):
  """Largest relative L2 distance of a leaf."""

  def one(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)

  return max(jax.tree.leaves(jax.tree.map(one, got, want)))


def run(work):
  """Runs a coroutine."""
  return asyncio.run(work)
