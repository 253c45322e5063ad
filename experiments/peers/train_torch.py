"""Plain PyTorch: forward, backward and AdamW of a causal language model.

The loss is -mean(advantage * selected log-prob). One configuration a
process, so that the peak resident set is its own.

--loss naive    whole [B, T, V] logits, logsumexp and gather
       chunked  head and log-softmax over chunks of positions, recomputed in
                the backward pass
"""

import argparse
import os
import time

from common import emit, peak_rss_gib, versions


def parse():
  """Returns the command line's settings."""
  ap = argparse.ArgumentParser(description=__doc__)
  ap.add_argument("--model", required=True, help="Hugging Face directory")
  ap.add_argument("--batch", type=int, default=8)
  ap.add_argument("--seq", type=int, default=256)
  ap.add_argument(
    "--completion",
    type=int,
    default=0,
    help="train only the last so many tokens of each row; 0: all",
  )
  ap.add_argument("--ckpt", action="store_true", help="checkpoint layers")
  ap.add_argument("--bf16", action="store_true", help="autocast, f32 weights")
  ap.add_argument("--loss", choices=("naive", "chunked"), default="naive")
  ap.add_argument("--chunk", type=int, default=512)
  ap.add_argument("--compile", action="store_true")
  ap.add_argument("--threads", type=int, default=os.cpu_count())
  ap.add_argument("--repeat", type=int, default=3)
  return ap.parse_args()


def main():
  """Measures and prints one JSON line."""
  a = parse()
  os.environ["HF_HUB_OFFLINE"] = "1"
  import torch
  from torch.utils.checkpoint import checkpoint
  from transformers import AutoModelForCausalLM

  torch.set_num_threads(a.threads)
  torch.manual_seed(0)
  model = AutoModelForCausalLM.from_pretrained(
    a.model, dtype=torch.float32, attn_implementation="sdpa"
  )
  model.config.use_cache = False
  model.train()
  if a.ckpt:
    model.gradient_checkpointing_enable({"use_reentrant": False})
  body, head = model.model, model.lm_head
  if a.compile:
    body = torch.compile(body)
  opt = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
  vocab = min(40000, model.config.vocab_size)
  ids = torch.randint(3, vocab, (a.batch, a.seq + 1))
  x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
  trained = a.completion or a.seq
  adv = torch.randn(a.batch, 1).expand(a.batch, trained).reshape(-1)

  def logp(h, target):
    logits = head(h).float()
    return logits.gather(-1, target[:, None])[:, 0] - logits.logsumexp(-1)

  def step():
    marks = [time.perf_counter()]
    with torch.autocast("cpu", torch.bfloat16, enabled=a.bf16):
      h = body(input_ids=x, use_cache=False).last_hidden_state
      h = h[:, -trained:].reshape(-1, h.shape[-1])
      target = y[:, -trained:].reshape(-1)
      if a.loss == "naive":
        lp = logp(h, target)
      else:
        chunks = zip(h.split(a.chunk), target.split(a.chunk), strict=True)
        lp = torch.cat(
          [checkpoint(logp, *c, use_reentrant=False) for c in chunks]
        )
      loss = -(adv * lp).mean()
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    opt.step()
    opt.zero_grad(set_to_none=True)
    marks.append(time.perf_counter())
    loss.item()
    return [b - c for b, c in zip(marks[1:], marks, strict=False)]

  step()
  runs = sorted((step() for _ in range(a.repeat)), key=sum)
  mid = runs[len(runs) // 2]
  res = {
    "tok_s": round(a.batch * a.seq / sum(mid), 1),
    "step_s": round(sum(mid), 3),
    "fwd_s": round(mid[0], 3),
    "bwd_s": round(mid[1], 3),
    "opt_s": round(mid[2], 3),
    "all_step_s": [round(sum(r), 3) for r in runs],
    "peak_gib": peak_rss_gib(),
  }
  emit("train_torch", vars(a), res, versions("torch", "transformers"))


if __name__ == "__main__":
  main()
