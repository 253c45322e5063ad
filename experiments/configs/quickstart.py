"""A small model learns to use a shell, from scratch, on a CPU.

  python experiments/run.py --config experiments/configs/quickstart.py

A short supervised phase on reference solutions of other seeds, then GRPO in
the real shell, on eight kinds of task in equal shares. Deterministic: the
same seed gives the same metrics, and a killed run goes on where it was.
"""

from gyre import config

MODEL = {
  "model_type": "qwen3",
  "hidden_size": 128,
  "intermediate_size": 384,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 32,
  "max_position_embeddings": 512,
  "rope_theta": 10000.0,
  "tie_word_embeddings": True,
}

KINDS = (
  "directory",
  "write",
  "append",
  "copy",
  "move",
  "remove",
  "permissions",
  "link",
)


def get_config():
  """Returns the configuration."""
  return config.config_dict(
    run={"steps": 40, "deterministic": True},
    model={"hf_config": MODEL},
    tokenizer={"source": "train", "vocab_size": 1024},
    tasks={"kinds": dict.fromkeys(KINDS, 1.0), "max_turns": 1},
    sandbox={"backends": ("bubblewrap", "process"), "concurrency": 8},
    agent={
      "tool_format": "line",
      "max_turns": 2,
      "max_new_tokens": 48,
      "max_context": 192,
      "max_output_chars": 200,
    },
    rollout={
      "group_size": 8,
      "groups_per_step": 8,
      "max_slots": 16,
      "page_size": 16,
      "num_pages": 512,
      "prefill_chunk": 64,
    },
    learner={"micro_rows": 4, "row_tokens": 512},
    optim={"lr": 3e-4, "warmup_steps": 2},
    eval={"every": 20, "n": 64},
    warm_start={"steps": 100, "tasks": 256, "rows": 4, "lr": 2e-3},
  )
