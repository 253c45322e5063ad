"""A scripted engine, a served proxy, and checks that all proxy tests share."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import threading

import audited
import numpy as np
import uvicorn
from audited import logprob_of

from gyre import config
from gyre.harness import proxy as proxy_lib
from gyre.harness import render, templates
from gyre.rollout import engine as engine_lib

# As Qwen's: tools in the system prompt, calls as Hermes writes them, results
# of tools as the user's.
QWEN = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nCall with <tool_call>JSON</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name }}
{{- '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- elif m.role == 'user' or not loop.first %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_TEXTS = [
  "You work in a Linux shell. List the files in the directory, then stop.",
  '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}',
  "<|im_start|>user\nSummarise the conversation so far.<|im_end|>\n",
] * 3


def tokenizer():
  return render.train_tokenizer(
    _TEXTS, 500, (*templates.CHATML_TOKENS, *templates.MINIMAL_TOKENS)
  )


def renderer(template=QWEN, **options):
  return render.Renderer(
    tokenizer(), template, stop_tokens=(templates.CHATML_END,), **options
  )


class ScriptedEngine:
  """Says given texts, with given logprobs, through the engine protocol.

  answers: texts, ids, or functions of the prompt's text; in turn, or the one
  function for all. A request that goes on from a partial gets the rest.
  """

  name = "scripted"

  def __init__(self, renderer, answers, *, tick_s=None, split=0, version=3):
    self.renderer, self.tick_s, self.split = renderer, tick_s, split
    self.answers = answers if callable(answers) else list(answers)
    self.version, self.requests, self.aborts = version, [], []
    self._live, self._given, self.fail_at = {}, {}, None
    self.failure = engine_lib.EngineDown("the engine went down")
    self.give_up = []  # tokens after which the engine gives a request up

  def _whole(self, request):
    """The completion that this request gets, by its seed."""
    if request.seed not in self._given:
      text = self.renderer.decode(request.ids)
      answer = self.answers
      answer = answer(text) if callable(answer) else answer.pop(0)
      ids = answer
      if isinstance(answer, str):
        ids = [*self.encode(answer), self.renderer.end_id]
      self._given[request.seed] = (len(request.ids), list(ids))
    return self._given[request.seed]

  def encode(self, text):
    """Ids of `text`; with split, in pieces that the tokenizer would join."""
    if not self.split:
      return self.renderer.encode(text)
    pieces = [text[i : i + self.split] for i in range(0, len(text), self.split)]
    return [i for p in pieces for i in self.renderer.encode(p)]

  async def generate(self, request, on_token=None):
    self.requests.append(request)
    start, whole = self._whole(request)
    done = len(request.ids) - start
    give_up = self.give_up.pop(0) if self.give_up else None
    self._live[request.request_id] = True
    ids, logprobs, reason = [], [], "length"
    for i in whole[done : done + request.max_new_tokens]:
      if self.tick_s is not None:
        await asyncio.sleep(self.tick_s)
      if not self._live.get(request.request_id) or len(ids) == give_up:
        reason = "abort"
        break
      if self.fail_at is not None and done + len(ids) == self.fail_at:
        self.fail_at = None
        raise self.failure
      logprob = logprob_of(request.seed, start + done + len(ids), i)
      ids.append(i)
      logprobs.append(logprob)
      if on_token is not None:
        on_token(i, logprob, self.version)
      if i in request.stop_ids:
        reason = "stop"
        break
    self._live.pop(request.request_id, None)
    return engine_lib.Completion(
      ids=np.asarray(ids, np.int32),
      logprobs=np.asarray(logprobs, np.float32),
      versions=np.full(len(ids), self.version, np.int32),
      finish_reason=reason,
    )

  async def abort(self, request_id):
    self.aborts.append(request_id)
    return self._live.pop(request_id, None) is not None

  async def pause(self, keep=True):
    if not keep:
      self._live.clear()

  async def resume(self):
    pass

  async def load_weights(self, weights, version):
    self.version = version

  async def sleep(self):
    pass

  async def wake(self):
    pass

  def stats(self):
    return engine_lib.EngineStats(version=self.version)

  async def close(self):
    pass


class _Server(uvicorn.Server):
  @contextlib.contextmanager
  def capture_signals(self):
    yield


class Served:
  """A proxy on a loopback port, in a thread with a loop of its own."""

  def __init__(self, engine, renderer, **options):
    options = {"rollout": config.Rollout(), "max_context": 4096} | options
    self.engine, self.renderer = engine, renderer
    self.proxy = proxy_lib.Proxy(engine, renderer, **options)
    self._names = 0

  def __enter__(self):
    # With its protocol named, asyncio turns Nagle's algorithm off.
    self._socket = socket.socket(
      socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    self._socket.bind(("127.0.0.1", 0))
    self._socket.listen(128)
    self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
    self._server = _Server(
      uvicorn.Config(self.proxy.app, log_level="error", lifespan="off")
    )
    self._ready = threading.Event()
    self._thread = threading.Thread(target=self._serve)
    self._thread.start()
    assert self._ready.wait(20)
    return self

  def _serve(self):
    async def main():
      self.loop = asyncio.get_running_loop()
      work = asyncio.ensure_future(self._server.serve([self._socket]))
      while not self._server.started:
        await asyncio.sleep(0.01)
      self._ready.set()
      await work

    asyncio.run(main())

  def __exit__(self, *exc):
    self._server.should_exit = True
    self._server.force_exit = True
    self._thread.join(20)
    assert not self._thread.is_alive()

  def run(self, coroutine):
    """Runs a coroutine in the server's loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

  def open(self, **options):
    self._names += 1
    names = dict(execution_id=f"g/{self._names}", group_id="g", seed=11)
    return self.proxy.open(**names | options)

  def close(self, key):
    return self.run(self.proxy.close(key))

  def calls(self, key):
    async def read():
      return self.proxy.calls(key)

    return self.run(read())


def serve(renderer, answers, *, split=0, tick_s=None, **options):
  """A proxy over an engine that gives these answers."""
  engine = ScriptedEngine(renderer, answers, split=split, tick_s=tick_s)
  return Served(engine, renderer, **options)


def check_recorded(calls, engine, branches=None):
  """Every sampled token stands in a record bit for bit, under its prompt.

  And from there in the tree and in the samples of every mode; see audited.

  Args:
    calls: all of one execution.
    engine: that sampled them, and nothing else.
    branches: roles of the tree's leaves, in any order; None: whichever.

  Returns:
    The tree.
  """
  first = {}
  for request in engine.requests:
    first.setdefault(request.seed, request)
  assert len(calls) == len({c.call_id for c in calls})
  for call in calls:
    seed = call.sampling_used["seed"]
    request = first.pop(seed)
    start, whole = engine._given[seed]
    np.testing.assert_array_equal(call.prompt_ids, request.ids)
    assert len(request.ids) == start
    n = len(call.completion_ids)
    assert call.completion_ids.tolist() == whole[:n]
    assert call.logprobs.dtype == np.float32
    assert call.logprobs.tolist() == [
      logprob_of(seed, start + i, t) for i, t in enumerate(whole[:n])
    ]
    assert call.prompt_ids.dtype == call.completion_ids.dtype == np.int32
  assert not first, "a request was sampled and not recorded"
  return audited.check(calls, branches)


def check_extends(calls):
  """Strict and retokenized prompts begin with all ids of their parents.

  Returns:
    How many do.
  """
  known = {c.call_id: c for c in calls}
  extended = 0
  for call in calls:
    assert (call.parent_hint is None) == (call.boundary in ("", "split"))
    if call.boundary not in ("strict", "retokenized"):
      continue
    parent = known[call.parent_hint]
    before = np.concatenate([parent.prompt_ids, parent.completion_ids])
    np.testing.assert_array_equal(call.prompt_ids[: len(before)], before)
    assert len(call.prompt_ids) > len(before)
    extended += 1
  return extended


def hermes(name, arguments):
  return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n' + (
    "</tool_call>"
  )


class ShellTask:
  """Commands that really run, for a policy that reads what they print.

  Two calls at once, then one of what these printed, then the result in words.
  """

  system, user = "You work in a shell.", "How many lines are there?"

  def __init__(self, directory):
    self.directory, self.ran = directory, []

  def policy(self, prompt):
    """What is said next."""
    printed = re.findall(r"<tool_response>\n(\d+)\n", prompt)
    if not printed:
      return "I write.\n" + "\n".join(
        hermes("shell", json.dumps({"command": command}))
        for command in ("printf 'a\nb\n' >'é \"1\"'", "seq 3 >n; wc -l <n")
      )
    if len(printed) == 1:
      command = f"expr {printed[0]} + $(wc -l <é*) | tee sum"
      return hermes("shell", json.dumps({"command": command}))
    return f"There are {printed[1]} lines."

  def run(self, command):
    """Runs a command of the policy's; returns what it prints."""
    self.ran.append(command)
    return subprocess.run(
      ["bash", "-c", command],
      cwd=self.directory,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=20,
      check=False,
    ).stdout

  def check(self, said, calls, engine):
    """It was done, and every call of it is found in the samples."""
    assert said == "There are 5 lines."
    assert (self.directory / "sum").read_text() == "5\n"
    assert (self.directory / 'é "1"').read_text() == "a\nb\n"
    assert len(self.ran) == 3 == len(calls)
    assert check_extends(calls) == 2
    assert [c.role for c in calls] == ["main"] * 3
    check_recorded(calls, engine, ["main"])
