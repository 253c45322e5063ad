"""Qwen3-8B or Qwen3-32B on one host of 8 GPUs, shell tasks of up to 6 turns.

  python experiments/run.py --config experiments/configs/qwen3.py:8b
  python experiments/run.py --config experiments/configs/qwen3.py:32b \
    --mode compile    # anywhere: shapes, shardings, bytes a device

32B is meant for GPUs of 141 GB. Weights: the Hugging Face directory at
model.path. Not run to the end by us yet: no expected score.
"""

from gyre import config

# Hugging Face, Qwen/Qwen3-8B and Qwen/Qwen3-32B, config.json.
SHARED = {
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "head_dim": 128,
  "hidden_act": "silu",
  "initializer_range": 0.02,
  "max_position_embeddings": 40960,
  "model_type": "qwen3",
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000,
  "tie_word_embeddings": False,
  "use_sliding_window": False,
  "vocab_size": 151936,
}
MODELS = {
  "8b": SHARED
  | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
  },
  "32b": SHARED
  | {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "max_window_layers": 64,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
  },
}
MESHES = {"8b": {"fsdp": 4, "tensor": 2}, "32b": {"fsdp": 2, "tensor": 4}}
NUM_PAGES = {"8b": 8192, "32b": 4096}
MICRO_ROWS = {"8b": 4, "32b": 2}


def get_config(size="8b"):
  """Returns the configuration of a size: what follows the colon."""
  if size not in MODELS:
    raise config.ConfigError(f"size {size!r} is not one of {', '.join(MODELS)}")
  return config.config_dict(
    run={"steps": 200},
    model={
      "source": "hf",
      "path": f"~/models/Qwen3-{size.upper()}",
      "hf_config": MODELS[size],
      "dtype": "bfloat16",
      "remat": True,
    },
    tasks={"max_turns": 6, "num_train": 4096},
    sandbox={"concurrency": 64},
    agent={
      "tool_format": "hermes",
      "max_turns": 12,
      "max_new_tokens": 1024,
      "max_context": 8192,
    },
    rollout={
      "group_size": 8,
      "groups_per_step": 16,
      "max_slots": 64,
      "page_size": 64,
      "num_pages": NUM_PAGES[size],
      "prefill_chunk": 2048,
      "dtype": "bfloat16",
    },
    learner={"micro_rows": MICRO_ROWS[size], "row_tokens": 8192},
    optim={"lr": 1e-6, "warmup_steps": 10},
    mesh=MESHES[size],
    eval={"every": 20, "n": 128},
  )
