"""An engine whose tokens are hashes of all before them, and that can fail."""

import asyncio
import hashlib

import numpy as np

from gyre.rollout import engine

STOP = 0


def sampled(seed, ids):
  """The next token and its logprob, of a seed and all ids before it."""
  text = f"{seed} {list(map(int, ids))}".encode()
  digest = hashlib.sha256(text).digest()
  token = 1 + int.from_bytes(digest[:2], "big") % 999
  token = STOP if digest[2] < 4 else token
  return token, -int.from_bytes(digest[3:5], "big") / 4096


def whole(request):
  """All that a request samples: ids, logprobs, why it ends."""
  ids, logprobs = list(request.ids), []
  while len(logprobs) < request.max_new_tokens:
    token, logprob = sampled(request.seed, ids)
    ids.append(token)
    logprobs.append(logprob)
    if token in request.stop_ids:
      return ids[len(request.ids) :], logprobs, "stop"
  return ids[len(request.ids) :], logprobs, "length"


class HashingEngine:
  """One token a turn of the event loop.

  Attributes:
    admits: whether a request may come; else it is an error of the router.
    errors: what a router did wrong.
    live: requests under way.
    seen: (request id, tokens before the first of its own) of every request.
    hung: answers nothing any more, aborts and cancelling excepted.
  """

  def __init__(self, name, version=0):
    self.name, self.version = name, version
    self.admits, self.errors = True, []
    self.live, self.seen, self.names = {}, [], set()
    self.hung, self.dead, self.unheard = False, None, 0
    self.counts = dict.fromkeys(("generated_tokens", "finished"), 0)
    self.asleep = self.paused = False

  def _check(self):
    if self.dead is not None:
      raise engine.EngineDown(self.dead)

  async def generate(self, request, on_token=None):
    self._check()
    name = request.request_id
    if not self.admits or self.asleep:
      self.errors.append(f"{name} came to {self.name}, which does not serve")
    if request.min_version > self.version:
      self.errors.append(f"{name} came to version {self.version}")
      raise engine.StaleVersion(self.name)
    if name in self.names:
      self.errors.append(f"{name} came to {self.name} twice")
    self.names.add(name)
    self.seen.append((name, len(request.ids)))
    self.live[name] = True
    ids, logprobs, versions, reason = list(request.ids), [], [], "length"
    try:
      while len(logprobs) < request.max_new_tokens:
        await asyncio.sleep(0)
        while self.hung or self.paused:
          self._check()
          await asyncio.sleep(0.001)
        self._check()
        if not self.live[name]:
          reason = "abort"
          break
        token, logprob = sampled(request.seed, ids)
        ids.append(token)
        logprobs.append(logprob)
        versions.append(self.version)
        self.counts["generated_tokens"] += 1
        if on_token is not None:
          on_token(token, logprob, self.version)
        if token in request.stop_ids:
          reason = "stop"
          break
    finally:
      del self.live[name]
    self.counts["finished"] += 1
    return engine.Completion(
      ids=np.asarray(ids[len(request.ids) :], np.int32),
      logprobs=np.asarray(logprobs, np.float32),
      versions=np.asarray(versions, np.int32),
      finish_reason=reason,
    )

  async def abort(self, request_id):
    self._check()
    while self.hung:
      await asyncio.sleep(0.001)
    found = request_id in self.live
    if found:
      self.live[request_id] = False
    return found

  async def pause(self, keep=True):
    self._check()
    self.paused = True

  async def resume(self):
    self._check()
    self.paused = False

  async def load_weights(self, weights, version):
    self._check()
    if version < self.version:
      raise engine.StaleVersion(self.name)
    await asyncio.sleep(0)
    self.version = version

  async def sleep(self):
    self.asleep = True

  async def wake(self):
    self.asleep = False

  def stats(self):
    return engine.EngineStats(
      version=self.version,
      running=len(self.live),
      asleep=self.asleep,
      **self.counts,
    )

  async def close(self):
    self.dead = "closed"
