"""What the peer scripts share: timing, rates, memory, the JSON line.

Standard library only: these files run in the peers' own interpreters.
"""

import json
import os
import platform
import resource
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version


def peak_rss_gib():
  """Returns the peak resident set of this process, GiB."""
  return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)


def cpu_model():
  """Returns the processor's name."""
  with open("/proc/cpuinfo") as f:
    for line in f:
      if line.startswith("model name"):
        return line.split(":", 1)[1].strip()
  return platform.processor()


def timed(fn, repeat=3, warmup=1):
  """Times `fn(i)`, called with a fresh index each time.

  Returns:
    (median seconds, all seconds) of `repeat` calls after `warmup` calls.
  """
  for i in range(warmup):
    fn(i)
  secs = []
  for i in range(repeat):
    t = time.perf_counter()
    fn(warmup + i)
    secs.append(time.perf_counter() - t)
  return statistics.median(secs), [round(s, 4) for s in secs]


def versions(*names):
  """Returns {package: version or None}, the interpreter included."""
  out = {"python": platform.python_version()}
  for name in names:
    try:
      out[name] = version(name)
    except PackageNotFoundError:
      out[name] = None
  return out


def emit(script, settings, results, vers):
  """Prints the one JSON line of a measurement."""
  line = {
    "script": script,
    "settings": settings,
    "results": results,
    "versions": vers,
    "cpu": cpu_model(),
    "cores": os.cpu_count(),
  }
  print(json.dumps(line), flush=True)


def add_rollout_arguments(parser):
  """The rollout cases' sizes; every rollout script takes the same."""
  parser.add_argument("--batch", type=int, default=32)
  parser.add_argument("--prompt", type=int, default=128)
  parser.add_argument("--new", type=int, default=128)
  parser.add_argument("--prefill-batch", type=int, default=8)
  parser.add_argument("--prefill-len", type=int, default=1024)
  parser.add_argument("--shared", type=int, default=512)
  parser.add_argument("--shared-batch", type=int, default=16)
  parser.add_argument(
    "--tail", type=int, default=16, help="own tokens after the shared prefix"
  )
  parser.add_argument("--repeat", type=int, default=3)
  parser.add_argument(
    "--only", default="", help="comma-separated subset of the cases"
  )


def add_rescore_argument(parser):
  """For scripts that compare recorded logprobs with f32 rescoring."""
  parser.add_argument(
    "--rescore", type=int, default=16, help="requests to rescore; 0: none"
  )


def rollout_cases(generate, ids, a):
  """The rollout cases as {name: fn(i)}.

  Args:
    generate: generate(prompts, new) samples exactly `new` tokens a prompt.
    ids: ids(n) returns n fresh random token ids, so that no case meets
      another's prefix cache.
    a: the parsed rollout arguments.
  """

  def fresh(batch, length, new):
    return lambda i: generate([ids(length) for _ in range(batch)], new)

  def shared(new):
    def run(i):
      head = ids(a.shared)
      generate([head + ids(a.tail) for _ in range(a.shared_batch)], new)

    return run

  cases = {
    "gen": fresh(a.batch, a.prompt, a.new),
    "gen_one_token": fresh(a.batch, a.prompt, 1),
    "prefill": fresh(a.prefill_batch, a.prefill_len, 1),
    "shared_gen": shared(a.new),
    "shared_prefill": shared(1),
    "batch1": fresh(1, a.prompt, a.new),
    "batch1_one_token": fresh(1, a.prompt, 1),
  }
  only = [c for c in a.only.split(",") if c] or list(cases)
  for c in only:
    if c not in cases:
      sys.exit(f"--only names {c!r}; there are {', '.join(cases)}")
  return {c: cases[c] for c in only}


def rollout_rates(cases, a):
  """Times the cases and derives tokens per second and milliseconds a token.

  Decode-only rates come from the difference of a whole generation and one
  of a single token, which is the prefill and the first sample.
  """
  t = {c: timed(fn, a.repeat) for c, fn in cases.items()}
  s = {c: median for c, (median, _) in t.items()}
  res = {"secs": {c: [round(m, 4), every] for c, (m, every) in t.items()}}

  def rate(name, tokens, *names):
    if all(n in s for n in names):
      secs = s[names[0]] - sum(s[n] for n in names[1:])
      res[name] = round(tokens / secs, 1)

  rate("gen_tok_s", a.batch * a.new, "gen")
  decoded = a.batch * (a.new - 1)
  rate("decode_only_tok_s", decoded, "gen", "gen_one_token")
  rate("prefill_tok_s", a.prefill_batch * a.prefill_len, "prefill")
  length = a.shared + a.tail
  rate(
    "shared_prefill_effective_tok_s", a.shared_batch * length, "shared_prefill"
  )
  rate("shared_gen_tok_s", a.shared_batch * a.new, "shared_gen")
  rate("batch1_tok_s", a.new, "batch1")
  if "batch1" in s and "batch1_one_token" in s:
    each = (s["batch1"] - s["batch1_one_token"]) / (a.new - 1)
    res["batch1_ms_per_token"] = round(1e3 * each, 2)
    res["batch1_ttft_ms"] = round(1e3 * s["batch1_one_token"], 1)
  return res


def logprob_gap(recorded, rescored):
  """Mean and maximum |recorded − rescored| over all sampled tokens."""
  gaps = [
    abs(x - y)
    for xs, ys in zip(recorded, rescored, strict=True)
    for x, y in zip(xs, ys, strict=True)
  ]
  return {
    "logprob_gap_mean": sum(gaps) / len(gaps),
    "logprob_gap_max": max(gaps),
    "logprob_gap_tokens": len(gaps),
  }
