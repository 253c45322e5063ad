"""A small model learns to work in a harness that gyre knows nothing of.

  python experiments/run.py --config experiments/configs/delegating.py

The harness is a program of its own, experiments/harnesses/delegating.py: it
runs in the sandbox, speaks OpenAI Chat Completions, compacts its history and
calls sub-agents. gyre sees its model calls and the workspace that it leaves;
histories branch, and the branches are trained as one tree.

As in quickstart.py, a model from scratch is first shown the conventions of all
sites, here by a policy that answers the harness, and then learns those of one
site from what the verifier says. Not deterministic: the harness's clock is its
own.

Seen with seed 0 on 2 cores that did other work too: held-out 0.27 [0.20, 0.35]
after the supervised phase, 0.48 after 16 steps, 0.54 [0.43, 0.65] after all 32
(solved 0.05 -> 0.42), in 9.4 minutes; a step of 64 executions in 9 to 17 s.
"""

from gyre import config

HARNESS = "experiments/harnesses"
KINDS = ("finish", "note", "pack", "runnable")
MODEL = {
  "model_type": "qwen3",
  "hidden_size": 128,
  "intermediate_size": 384,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 4,
  "head_dim": 32,
  "max_position_embeddings": 512,
  "rope_theta": 10000.0,
  "tie_word_embeddings": True,
}


def get_config():
  """Returns the configuration."""
  return config.config_dict(
    run={"steps": 32},
    model={"hf_config": MODEL},
    tokenizer={"source": "train", "vocab_size": 1024},
    tasks={
      "kinds": dict.fromkeys(KINDS, 1.0),
      "min_turns": 2,
      "max_turns": 2,
    },
    sandbox={"backends": ("bubblewrap", "process"), "concurrency": 16},
    agent={
      "max_new_tokens": 32,
      "max_context": 192,
      "harness_timeout_s": 60.0,
      "overall_timeout_s": 120.0,
    },
    harness={
      "name": "command",
      "command": (
        "{python} {path}/delegating.py --model {model} --turns 5 "
        "--compact 110 --tokens 32 --output 60 {instruction}"
      ),
      "path": HARNESS,
    },
    rollout={
      "group_size": 4,
      "groups_per_step": 16,
      "max_slots": 32,
      "page_size": 16,
      "num_pages": 512,
      "prefill_chunk": 64,
    },
    learner={
      "updates_per_batch": 2,
      "micro_rows": 4,
      "row_tokens": 512,
    },
    optim={"lr": 3e-4, "warmup_steps": 10},
    eval={"every": 8, "n": 64},
    warm_start={
      "steps": 500,
      "tasks": 512,
      "any_site": True,
      "policy": f"{HARNESS}/delegating.py",
      "rows": 2,
      "lr": 2e-3,
    },
  )
