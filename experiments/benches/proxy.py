"""What the proxy adds to a call: many executions at once, over HTTP.

Clients in a process of their own hold conversations that grow call by call
with a tool call and its output. Of each call the time that the client waited,
less the time that the engine took for it, is what the proxy added: sockets,
JSON, matching, rendering, reading, recording. The engine says its tokens at a
given speed, so that what is measured is the proxy and not who gets the cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from peers import common

_TCP = socket.IPPROTO_TCP
PACKAGES = ("gyre", "starlette", "uvicorn", "tokenizers")
_TOOLS = [
  {
    "type": "function",
    "function": {
      "name": name,
      "description": "Does what its name says. " * 8,
      "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
      },
    },
  }
  for name in ("shell", "read", "write", "edit", "search", "task")
]
_SAID = (
  "I look at the files first.\n<tool_call>\n"
  '{"name": "shell", "arguments": {"command": "ls -l && wc -l *.txt"}}\n'
  "</tool_call>"
)


class Paced:
  """An engine that says the same at a given speed."""

  name = "paced"

  def __init__(self, renderer: Any, token_s: float):
    self._ids = [*renderer.encode(_SAID), renderer.end_id]
    self._token_s = token_s

  async def generate(self, request: Any, on_token: Any = None) -> Any:
    from gyre.rollout import engine

    ids = self._ids[: request.max_new_tokens]
    for i in ids:
      await asyncio.sleep(self._token_s)
      on_token(i, -0.5, 0)
    return engine.Completion(
      ids=np.asarray(ids, np.int32),
      logprobs=np.full(len(ids), -0.5, np.float32),
      versions=np.zeros(len(ids), np.int32),
      finish_reason="stop",
    )

  async def abort(self, request_id: str) -> bool:
    del request_id
    return False


class Timed:
  """Passes everything on and keeps how long each request took."""

  def __init__(self, engine: Any):
    self._engine, self.took = engine, {}

  def __getattr__(self, name: str) -> Any:
    return getattr(self._engine, name)

  async def generate(self, request: Any, on_token: Any = None) -> Any:
    start = time.perf_counter()
    completion = await self._engine.generate(request, on_token)
    self.took[request.request_id] = time.perf_counter() - start
    return completion


def _words(seed: int, n: int) -> str:
  rng = np.random.default_rng(seed)
  pool = "the file has lines of text and a number in each of them".split()
  return " ".join(pool[i] for i in rng.integers(0, len(pool), n))


def client(settings: str) -> None:
  """Holds the conversations; prints the seconds of each call as JSON.

  Args:
    settings: JSON of {host, port, keys} and those of `measure`.
  """
  s = json.loads(settings)

  async def ask(reader, writer, key, body) -> tuple[bytes, float]:
    data = json.dumps(body).encode()
    head = (
      "POST /v1/chat/completions HTTP/1.1\r\nhost: proxy\r\n"
      f"authorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    start = time.perf_counter()
    writer.write(head.encode() + data)
    headers = await reader.readuntil(b"\r\n\r\n")
    if not headers.startswith(b"HTTP/1.1 200"):
      raise RuntimeError(headers.decode(errors="replace"))
    if b"chunked" in headers.lower():
      parts = []
      while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
      await reader.readline()
      answer = b"".join(parts)
    else:
      at = headers.lower().index(b"content-length:") + 15
      answer = await reader.readexactly(int(headers[at:].split()[0]))
    return answer, time.perf_counter() - start

  def message(answer: bytes) -> dict[str, Any]:
    if not s["stream"]:
      return json.loads(answer)["choices"][0]["message"]
    out: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in answer.split(b"\n\n"):
      if line.startswith(b"data: {"):
        delta = json.loads(line[6:])["choices"][0]["delta"]
        out["content"] += delta.get("content") or ""
        calls = delta.get("tool_calls") or []
        out.setdefault("tool_calls", []).extend(calls)
    return out

  async def execution(n: int, key: str) -> list[float]:
    reader, writer = await asyncio.open_connection(
      s["host"], s["port"], limit=1 << 24
    )
    messages: list[dict[str, Any]] = [
      {"role": "system", "content": _words(0, s["system_words"])},
      {"role": "user", "content": _words(n, s["task_words"])},
    ]
    took = []
    await asyncio.sleep(n * s["spread_s"] / len(s["keys"]))
    for i in range(s["calls"]):
      body = {"model": "m", "messages": messages}
      body["tools"] = _TOOLS[: s["tools"]]
      body |= {"max_tokens": s["new"], "stream": s["stream"]}
      answer, seconds = await ask(reader, writer, key, body)
      took.append(seconds)
      said = message(answer)
      messages.append(said)
      output = _words(n * 1000 + i, s["output_words"])
      for call in said.get("tool_calls") or []:
        messages.append(
          {"role": "tool", "tool_call_id": call["id"], "content": output}
        )
      if messages[-1] is said:
        messages.append({"role": "user", "content": output})
    writer.close()
    return took

  async def main() -> list[list[float]]:
    return await asyncio.gather(
      *(execution(n, key) for n, key in enumerate(s["keys"]))
    )

  print(json.dumps(asyncio.run(main())))


def _renderer() -> Any:
  from gyre.harness import render, templates

  texts = [_words(n, 200) for n in range(20)] + [_SAID, json.dumps(_TOOLS)]
  tokenizer = render.train_tokenizer(texts, 1000, templates.CHATML_TOKENS)
  return render.Renderer(
    tokenizer, templates.CHATML, stop_tokens=(templates.CHATML_END,)
  )


@contextlib.asynccontextmanager
async def _served(app: Any):
  """Serves an ASGI app on a loopback port; yields the port."""
  import uvicorn

  class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
      yield

  # With its protocol named, asyncio turns Nagle's algorithm off.
  listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, _TCP)
  listener.bind(("127.0.0.1", 0))
  listener.listen(512)
  server = Server(uvicorn.Config(app, log_level="error", lifespan="off"))
  work = asyncio.ensure_future(server.serve([listener]))
  while not server.started:
    await asyncio.sleep(0.01)
  try:
    yield listener.getsockname()[1]
  finally:
    server.should_exit = True
    await work


async def _run(engine: Timed, renderer: Any, s: dict[str, Any]) -> Any:
  """Runs the clients; returns (their times, the calls of each execution)."""
  from gyre import config
  from gyre.harness import proxy

  proxy_ = proxy.Proxy(
    engine,
    renderer,
    rollout=config.Rollout(),
    max_context=s["max_context"],
  )
  keys = [
    proxy_.open(execution_id=f"e{n}", group_id="g", seed=0)
    for n in range(s["executions"])
  ]
  async with _served(proxy_.app) as port:
    asked = s | {"host": "127.0.0.1", "port": port, "keys": keys}
    process = await asyncio.create_subprocess_exec(
      sys.executable,
      "-c",
      f"from benches import proxy; proxy.client({json.dumps(asked)!r})",
      cwd=pathlib.Path(__file__).resolve().parents[1],
      stdout=subprocess.PIPE,
    )
    out, _ = await process.communicate()
    if process.returncode:
      raise RuntimeError(f"the clients ended with {process.returncode}")
    recorded = [await proxy_.close(key) for key in keys]
  return json.loads(out), recorded


def measure(
  executions: int = 64,
  calls: int = 8,
  new: int = 64,
  system_words: int = 600,
  task_words: int = 100,
  output_words: int = 300,
  tools: int = 6,
  token_s: float = 0.02,
  spread_s: float = 1.0,
  stream: bool = False,
  max_context: int = 16384,
) -> None:
  """Prints the JSON line.

  Args:
    executions: at once.
    calls: of each execution, one after the other.
    new: most tokens of a completion.
    system_words, task_words, output_words: of the system prompt, of the
      task and of a tool's output.
    tools: offered.
    token_s: seconds a token of the engine.
    spread_s: executions start within so many seconds.
    stream: whether answers are streamed.
    max_context: most tokens of a prompt and its completion.
  """
  s = dict(locals())
  renderer = _renderer()
  engine = Timed(Paced(renderer, token_s))
  with asyncio.Runner() as runner:
    start = time.perf_counter()
    waited, recorded = runner.run(_run(engine, renderer, s))
    seconds = time.perf_counter() - start
  added = [
    1e3 * (took - engine.took[f"e{n}#{i}"])
    for n, times in enumerate(waited)
    for i, took in enumerate(times)
  ]
  lengths = [len(c.prompt_ids) for calls_ in recorded for c in calls_]
  strict = sum(c.boundary == "strict" for calls_ in recorded for c in calls_)
  if not len(lengths) == len(added) == executions * calls:
    raise RuntimeError(
      f"{len(lengths)} calls recorded and {len(added)} answered of "
      f"{executions * calls}"
    )
  results = {
    "added_ms_median": statistics.median(added),
    "added_ms_p90": float(np.percentile(added, 90)),
    "added_ms_max": max(added),
    "engine_ms_median": 1e3 * statistics.median(engine.took.values()),
    "calls_per_s": len(added) / seconds,
    "prompt_tokens_mean": statistics.mean(lengths),
    "strict_share": strict / (executions * (calls - 1)),
  }
  common.emit("proxy", s, results, common.versions(*PACKAGES))
