"""transformers `generate` at the cases of rollout_vllm.py, a batch at once."""

import argparse
import os

from common import (
  add_rollout_arguments,
  emit,
  peak_rss_gib,
  rollout_cases,
  rollout_rates,
  versions,
)


def main():
  """Measures and prints one JSON line."""
  ap = argparse.ArgumentParser(description=__doc__)
  ap.add_argument("--model", required=True, help="Hugging Face directory")
  ap.add_argument("--dtype", default="float32")
  ap.add_argument("--threads", type=int, default=os.cpu_count())
  ap.add_argument("--cache", help="cache_implementation, e.g. static")
  add_rollout_arguments(ap)
  a = ap.parse_args()
  os.environ["HF_HUB_OFFLINE"] = "1"
  import torch
  from transformers import AutoModelForCausalLM, GenerationConfig

  torch.set_num_threads(a.threads)
  torch.manual_seed(0)
  model = AutoModelForCausalLM.from_pretrained(
    a.model, dtype=getattr(torch, a.dtype)
  ).eval()
  model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=2)
  vocab = min(40000, model.config.vocab_size)

  def ids(n):
    return torch.randint(3, vocab, (n,)).tolist()

  def generate(prompts, new):
    x = torch.tensor(prompts)
    with torch.inference_mode():
      out = model.generate(
        x,
        attention_mask=torch.ones_like(x),
        max_new_tokens=new,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        cache_implementation=a.cache,
      )
    assert out.shape == (len(prompts), x.shape[1] + new), out.shape

  res = rollout_rates(rollout_cases(generate, ids, a), a)
  res["peak_gib"] = peak_rss_gib()
  emit("rollout_hf", vars(a), res, versions("torch", "transformers", "numpy"))


if __name__ == "__main__":
  main()
