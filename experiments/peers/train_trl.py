"""TRL's GRPOTrainer with transformers generation: seconds a GRPO step.

A step is split into generation, scoring and optimisation. Prompts are exactly
--prompt-len tokens and completions exactly --new tokens (min_new_tokens), so
that token counts are fixed.
"""

import argparse
import os
import statistics
import tempfile
import time

from common import emit, peak_rss_gib, versions


def digit_reward(completions, **_):
  """Returns the number of digits of each completion."""
  return [float(sum(c.isdigit() for c in text)) for text in completions]


def parse():
  """Returns the command line's settings."""
  ap = argparse.ArgumentParser(description=__doc__)
  ap.add_argument("--model", required=True, help="Hugging Face directory")
  ap.add_argument("--prompts", type=int, default=4)
  ap.add_argument("--group", type=int, default=8)
  ap.add_argument("--prompt-len", type=int, default=64)
  ap.add_argument("--new", type=int, default=64)
  ap.add_argument(
    "--micro", type=int, default=32, help="sequences per micro-batch"
  )
  ap.add_argument("--steps", type=int, default=3)
  ap.add_argument("--warmup", type=int, default=1)
  ap.add_argument("--beta", type=float, default=0.0)
  ap.add_argument(
    "--no-ckpt",
    action="store_true",
    help="gradient_checkpointing=False (TRL's default is True)",
  )
  ap.add_argument(
    "--bf16", action="store_true", help="bf16=True (TRL's default); else fp32"
  )
  ap.add_argument("--threads", type=int, default=os.cpu_count())
  return ap.parse_args()


def make_prompts(a, tok):
  """Returns texts of exactly a.prompt_len tokens."""
  text = (
    "Count the apples, pears and plums in the baskets and tell how many "
    "there are. "
  )
  out = []
  for i in range(a.prompts):
    ids = tok(f"Question {i}: " + text * 20)["input_ids"][: a.prompt_len]
    out.append(tok.decode(ids))
    assert len(tok(out[-1])["input_ids"]) == a.prompt_len
  return out


def timed_trainer(trainer_class, callback_class):
  """Returns (trainer class, callback, seconds a step) with clocks inside."""
  spent = {"generate": 0.0, "prepare": 0.0, "train_step": 0.0, "tokens": 0}
  rows = []

  class Timed(trainer_class):
    def _generate_single_turn(self, *args, **kw):
      t = time.perf_counter()
      out = super()._generate_single_turn(*args, **kw)
      spent["generate"] += time.perf_counter() - t
      spent["tokens"] += sum(len(c) for c in out[0])
      return out

    def _generate_and_score_completions(self, *args, **kw):
      t = time.perf_counter()
      out = super()._generate_and_score_completions(*args, **kw)
      spent["prepare"] += time.perf_counter() - t
      return out

    def training_step(self, *args, **kw):
      t = time.perf_counter()
      out = super().training_step(*args, **kw)
      spent["train_step"] += time.perf_counter() - t
      return out

  class Marks(callback_class):
    def on_step_begin(self, *_, **__):
      self.t = time.perf_counter()
      for k in spent:
        spent[k] = 0

    def on_step_end(self, *_, **__):
      rows.append({"total": time.perf_counter() - self.t, **spent})

  return Timed, Marks(), rows


def main():
  """Measures and prints one JSON line."""
  a = parse()
  os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
  import torch

  torch.set_num_threads(a.threads)
  from datasets import Dataset
  from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
  from trl import GRPOConfig, GRPOTrainer

  tok = AutoTokenizer.from_pretrained(a.model)
  repeats = a.steps + a.warmup
  data = Dataset.from_dict({"prompt": make_prompts(a, tok) * repeats})
  trainer_class, marks, rows = timed_trainer(GRPOTrainer, TrainerCallback)
  n = a.prompts * a.group
  with tempfile.TemporaryDirectory() as out:
    cfg = GRPOConfig(
      output_dir=out,
      use_cpu=True,
      bf16=a.bf16,
      report_to="none",
      save_strategy="no",
      logging_steps=1,
      disable_tqdm=True,
      per_device_train_batch_size=a.micro,
      gradient_accumulation_steps=n // a.micro,
      num_generations=a.group,
      max_completion_length=a.new,
      max_steps=repeats,
      learning_rate=1e-6,
      beta=a.beta,
      gradient_checkpointing=not a.no_ckpt,
      shuffle_dataset=False,
      generation_kwargs={"min_new_tokens": a.new},
    )
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
    trainer = trainer_class(
      model=model,
      args=cfg,
      reward_funcs=digit_reward,
      train_dataset=data,
      processing_class=tok,
      callbacks=[marks],
    )
    trainer.train()
  logs = [h for h in trainer.state.log_history if "step_time" in h]
  use = rows[a.warmup :]
  med = {k: statistics.median(r[k] for r in use) for k in use[0]}
  optim = statistics.median(r["total"] - r["prepare"] for r in use)
  results = {
    "step_s": round(med["total"], 3),
    "generate_s": round(med["generate"], 3),
    "score_s": round(med["prepare"] - med["generate"], 3),
    "optimise_s": round(optim, 3),
    "all_step_s": [round(r["total"], 3) for r in rows],
    "completion_tokens": med["tokens"],
    "gen_tok_s": round(med["tokens"] / med["generate"], 1),
    "trained_tok_s": round(n * (a.prompt_len + a.new) / optim, 1),
    "completion_tok_per_step_s": round(med["tokens"] / med["total"], 1),
    "trl_step_time": [round(h["step_time"], 3) for h in logs],
    "rewards": [round(h["reward"], 3) for h in logs],
    "attn": model.config._attn_implementation,
    "peak_gib": peak_rss_gib(),
  }
  vers = versions("trl", "torch", "transformers", "accelerate")
  emit("train_trl", vars(a), results, vers)


if __name__ == "__main__":
  main()
