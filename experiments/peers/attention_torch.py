"""torch scaled_dot_product_attention: causal, GQA; forward and backward.

Two ways to hold the keys are timed and the faster reported: "gqa"
(enable_gqa=True, kv heads as they are) and "repeat" (kv heads repeated to
the query heads, outside the timing).
"""

import argparse
import os

from common import emit, peak_rss_gib, timed, versions


def main():
  """Measures and prints one JSON line."""
  ap = argparse.ArgumentParser(description=__doc__)
  ap.add_argument("--heads", type=int, default=9)
  ap.add_argument("--kv-heads", type=int, default=3)
  ap.add_argument("--dim", type=int, default=64)
  ap.add_argument("--seq", type=int, default=2048)
  ap.add_argument("--dtype", default="float32")
  ap.add_argument("--device", default="cpu")
  ap.add_argument("--threads", type=int, default=os.cpu_count())
  ap.add_argument("--repeat", type=int, default=3)
  a = ap.parse_args()
  import torch
  from torch.nn.functional import scaled_dot_product_attention as sdpa

  torch.set_num_threads(a.threads)
  torch.manual_seed(0)

  def wait():
    if a.device == "cuda":
      torch.cuda.synchronize()

  def heads(n):
    return torch.randn(
      1,
      n,
      a.seq,
      a.dim,
      dtype=getattr(torch, a.dtype),
      device=a.device,
      requires_grad=True,
    )

  def measure(q, k, v, gqa):
    g = torch.randn_like(q)

    def forward(i):
      with torch.no_grad():
        sdpa(q, k, v, is_causal=True, enable_gqa=gqa)
      wait()

    def both(i):
      for p in (q, k, v):
        p.grad = None
      sdpa(q, k, v, is_causal=True, enable_gqa=gqa).backward(g)
      wait()

    return timed(forward, a.repeat)[0], timed(both, a.repeat)[0]

  q, k, v = heads(a.heads), heads(a.kv_heads), heads(a.kv_heads)
  n = a.heads // a.kv_heads
  repeated = [
    x.detach().repeat_interleave(n, 1).requires_grad_() for x in (k, v)
  ]
  modes = {
    "gqa": measure(q, k, v, True),
    "repeat": measure(q, *repeated, False),
  }
  fwd, both = (min(m[i] for m in modes.values()) for i in (0, 1))
  flop = 4 * a.heads * a.seq**2 * a.dim / 2  # the causal half
  res = {
    "fwd_ms": round(1e3 * fwd, 3),
    "fwd_bwd_ms": round(1e3 * both, 3),
    "fwd_gflops": round(flop / fwd / 1e9, 1),
    "fwd_bwd_gflops": round(3.5 * flop / both / 1e9, 1),
    "modes_s": modes,
    "peak_gib": peak_rss_gib(),
  }
  emit("attention_torch", vars(a), res, versions("torch"))


if __name__ == "__main__":
  main()
