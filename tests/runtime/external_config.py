"""A run of one step through a harness: what the runtime's tests run.

external_config.py:MARK puts MARK on the command line of every harness.
"""

import pathlib

from gyre import config

HARNESSES = pathlib.Path(__file__).parents[2] / "experiments" / "harnesses"
MODEL = {
  "model_type": "qwen3",
  "hidden_size": 64,
  "intermediate_size": 128,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "max_position_embeddings": 256,
  "rope_theta": 10000.0,
  "tie_word_embeddings": True,
}


def get_config(mark="gyre"):
  """Returns the configuration: 20 executions at once, some slower."""
  return config.config_dict(
    run={"steps": 1, "seed": 3},
    model={"hf_config": MODEL},
    tokenizer={"source": "train", "vocab_size": 512},
    tasks={
      "kinds": {"directory": 1.0, "write": 1.0},
      "min_turns": 2,
      "max_turns": 2,
    },
    sandbox={"backends": ("bubblewrap", "process"), "concurrency": 20},
    agent={"max_context": 256, "max_new_tokens": 32},
    harness={
      "name": "command",
      "model": mark,
      "path": str(HARNESSES),
      "command": (
        "bash -c 'sleep $((RANDOM % 8)); :' {model}; "
        "{python} {path}/delegating.py --model {model} --turns 3 "
        "--compact 100 --tokens 24 {instruction}"
      ),
    },
    rollout={
      "group_size": 4,
      "groups_per_step": 5,
      "max_slots": 8,
      "num_pages": 128,
      "prefill_chunk": 32,
    },
    learner={"row_tokens": 256, "micro_rows": 2},
    optim={"lr": 1e-3},
    eval={"every": 0},
    warm_start={
      "steps": 30,
      "tasks": 8,
      "rows": 2,
      "lr": 5e-3,
      "policy": str(HARNESSES / "delegating.py"),
    },
  )
