"""The machine's limits: numpy and torch matmul of N^3, memory read."""

import argparse
import os

from common import emit, timed, versions


def main():
  """Measures and prints one JSON line."""
  ap = argparse.ArgumentParser(description=__doc__)
  ap.add_argument("--n", type=int, default=4096)
  ap.add_argument("--threads", type=int, default=os.cpu_count())
  ap.add_argument("--repeat", type=int, default=3)
  a = ap.parse_args()
  import numpy as np
  import torch

  torch.set_num_threads(a.threads)
  n, res = a.n, {}

  def measure(name, fn):
    secs, every = timed(fn, a.repeat)
    res[name] = {"gflops": round(2 * n**3 / secs / 1e9, 1), "secs": every}

  x = np.random.default_rng(0).standard_normal((n, n), dtype=np.float32)
  measure("numpy_f32", lambda i: x @ x)
  for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
    y = torch.from_numpy(x).to(dtype)
    out = torch.empty_like(y)
    measure(f"torch_{name}", lambda i, y=y, out=out: torch.mm(y, y, out=out))
  # Reading a buffer far larger than the caches bounds decoding at batch 1.
  big = torch.ones(2**28)  # 1 GiB
  secs, _ = timed(lambda i: big.sum(), a.repeat)
  res["read_gb_per_s"] = round(big.numel() * 4 / secs / 1e9, 2)
  emit("matmul_peak", vars(a), res, versions("torch", "numpy"))


if __name__ == "__main__":
  main()
