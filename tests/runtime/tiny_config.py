"""A run of three steps that takes seconds: what the runtime's tests run."""

from gyre import config

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


def get_config():
  """Returns the configuration."""
  return config.config_dict(
    run={"steps": 3, "deterministic": True, "seed": 3},
    model={"hf_config": MODEL},
    tokenizer={"source": "train", "vocab_size": 512},
    tasks={"kinds": {"directory": 1.0, "write": 1.0}, "max_turns": 1},
    sandbox={"backends": ("process",), "concurrency": 4},
    agent={
      "tool_format": "line",
      "max_turns": 2,
      "max_new_tokens": 24,
      "max_context": 128,
    },
    rollout={
      "group_size": 4,
      "groups_per_step": 2,
      "max_slots": 8,
      "num_pages": 128,
      "prefill_chunk": 32,
    },
    learner={"row_tokens": 256, "micro_rows": 2},
    optim={"lr": 1e-3},
    eval={"every": 2, "n": 4},
    warm_start={"steps": 120, "tasks": 48, "rows": 2, "lr": 5e-3},
  )
