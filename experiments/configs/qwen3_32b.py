"""Qwen3-32B on one host of 8 GPUs of 141 GB, shell tasks of up to 6 turns.

  python experiments/run.py --config experiments/configs/qwen3_32b.py
  python experiments/run.py --config experiments/configs/qwen3_32b.py \
    --mode compile    # anywhere: shapes, shardings, bytes a device

Weights: the Hugging Face directory at model.path. Not run to the end by us
yet: no expected score.
"""

from gyre import config

# Hugging Face, Qwen/Qwen3-32B, config.json.
QWEN3_32B = {
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 5120,
  "initializer_range": 0.02,
  "intermediate_size": 25600,
  "max_position_embeddings": 40960,
  "max_window_layers": 64,
  "model_type": "qwen3",
  "num_attention_heads": 64,
  "num_hidden_layers": 64,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000,
  "tie_word_embeddings": False,
  "use_sliding_window": False,
  "vocab_size": 151936,
}


def get_config():
  """Returns the configuration."""
  return config.config_dict(
    run={"steps": 200},
    model={
      "source": "hf",
      "path": "~/models/Qwen3-32B",
      "hf_config": QWEN3_32B,
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
      "num_pages": 4096,
      "prefill_chunk": 2048,
      "dtype": "bfloat16",
    },
    learner={"micro_rows": 2, "row_tokens": 8192},
    optim={"lr": 1e-6, "warmup_steps": 10},
    mesh={"fsdp": 2, "tensor": 4},
    eval={"every": 20, "n": 128},
  )
