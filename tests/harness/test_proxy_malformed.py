"""Requests with anything in the place of anything, and what models may say."""

import asyncio
import copy
import json

import httpx
import numpy as np
import proxying
import pytest

from gyre import config
from gyre.harness import (
  anthropic_messages,
  conversation,
  openai_chat,
  openai_responses,
  recorder,
  render,
  templates,
  tool_parsers,
  wire,
)
from gyre.harness import proxy as proxy_lib

SCHEMA = {"type": "object", "properties": {"a": {"type": "array"}}}
CHAT = {
  "model": "m",
  "stream": False,
  "n": 1,
  "max_tokens": 5,
  "temperature": 1.0,
  "seed": 3,
  "stop": ["q"],
  "tool_choice": "auto",
  "parallel_tool_calls": True,
  "response_format": {"type": "text"},
  "stream_options": {"include_usage": True},
  "tools": [
    {
      "type": "function",
      "function": {"name": "f", "description": "d", "parameters": SCHEMA},
    }
  ],
  "messages": [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
      "role": "assistant",
      "content": None,
      "reasoning_content": "t",
      "tool_calls": [
        {"id": "c", "function": {"name": "f", "arguments": '{"a":[1]}'}},
        {"id": "c", "function": {"name": "f", "arguments": "no JSON"}},
        {"id": "d", "function": {"name": "f", "arguments": "[1]"}},
      ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "out"},
    {"role": "user", "content": ""},
  ],
}
ANTHROPIC = {
  "model": "m",
  "max_tokens": 5,
  "stop_sequences": ["q"],
  "system": [{"type": "text", "text": "s", "cache_control": {}}],
  "thinking": {"type": "enabled", "budget_tokens": 3},
  "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
  "output_config": {"effort": "low"},
  "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
  "messages": [
    {"role": "user", "content": "hi"},
    {
      "role": "assistant",
      "content": [
        {"type": "thinking", "thinking": "t", "signature": "s"},
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}},
      ],
    },
    {
      "role": "user",
      "content": [
        {
          "type": "tool_result",
          "tool_use_id": "c",
          "content": [{"type": "text", "text": "out"}],
        },
        {"type": "text", "text": "go"},
      ],
    },
  ],
}
RESPONSES = {
  "model": "m",
  "max_output_tokens": 5,
  "instructions": "i",
  "reasoning": {"effort": "low"},
  "text": {"format": {"type": "text"}},
  "metadata": {"a": "b"},
  "previous_response_id": None,
  "tools": [
    {"type": "function", "name": "f", "parameters": SCHEMA},
    {"type": "custom", "name": "patch"},
    {
      "type": "namespace",
      "name": "ns",
      "tools": [{"type": "function", "name": "g", "parameters": {}}],
    },
  ],
  "input": [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
    {
      "type": "function_call",
      "call_id": "c",
      "name": "f",
      "arguments": "[1]",
      "namespace": "",
    },
    {
      "type": "custom_tool_call",
      "call_id": "d",
      "name": "patch",
      "input": "p",
    },
    {"type": "function_call_output", "call_id": "c", "output": "o"},
    {
      "type": "custom_tool_call_output",
      "call_id": "d",
      "output": [{"type": "input_text", "text": "o"}],
    },
  ],
}
REQUESTS = {
  "chat": (openai_chat, CHAT),
  "anthropic": (anthropic_messages, ANTHROPIC),
  "responses": (openai_responses, RESPONSES),
}
ODD = (
  *(None, True, -1, 1.5, 10**30, "", "x", "a\0b\u2028\U0001f600"),
  *([], [None], ["a"], [[]], {}, {"type": []}, {"a": None}, {"name": 1}),
)
# A template without a word of tools: the format writes them.
FORMATS = {
  "hermes": proxying.QWEN,
  "qwen_coder": templates.CHATML,
  "llama": templates.CHATML,
}


def places(value, path=()):
  yield path
  if isinstance(value, dict | list):
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in inner:
      yield from places(below, (*path, key))


def put(value, path, new):
  if not path:
    return new
  out = whole = copy.deepcopy(value)
  for key in path[:-1]:
    whole = whole[key]
  whole[path[-1]] = new
  return out


def execution(renderer, fmt):
  return recorder.Execution(
    proxying.ScriptedEngine(renderer, []),
    renderer,
    fmt,
    execution_id="g/0",
    group_id="g",
    seed=0,
    temperature=1.0,
    rollout=config.Rollout(),
    max_context=4096,
  )


def serve(api, one, fmt, body):
  """All of a call that depends on the request; what is sent to the client."""
  asked = api.parse(body)
  one.prompt(asked)
  text = fmt.write("f", '{"a": [1]}')
  said = tool_parsers.parse(fmt, text, tools=asked.tools)
  assert len(said.calls) == 1
  calls = tuple(wire.ToolCall(f"c{i}", *c) for i, c in enumerate(said.calls))
  answer = wire.Answer(
    answer_id="0" * 24,
    created=0.0,
    said=wire.Said("said", "thought", calls),
    finish="tool_calls",
    stop_sequence=None,
    prompt_tokens=1,
    completion_tokens=1,
  )
  stream = api.Stream(asked, answer.answer_id, 0.0, 1)
  events = b"".join([*stream.open(), *stream.close(answer)])
  assert events.endswith(b"\n\n")
  return wire.encode(api.render(asked, answer))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("api", REQUESTS)
def test_anything_in_any_place_is_served_or_refused(api, name):
  module, body = REQUESTS[api]
  fmt = tool_parsers.FORMATS[name]
  one = execution(proxying.renderer(FORMATS[name]), fmt)
  assert serve(module, one, fmt, body)
  refused = served = 0
  for path in places(body):
    for odd in ODD:
      asked = put(body, path, odd)
      if not isinstance(asked, dict):
        continue  # refused before it is read, see test_proxy_faults
      try:
        assert serve(module, one, fmt, asked)
        served += 1
      except wire.ApiError as e:
        assert e.kind == "invalid" and "\n" not in e.message
        refused += 1
  assert refused > 100 and served > 100


def nested(depth):
  return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [100, 700, 950, 5_000, 100_000])
@pytest.mark.parametrize("name", tool_parsers.FORMATS)
def test_nested_arguments_are_a_call_or_text(name, depth):
  """A policy that repeats itself opens brackets without end."""
  renderer, fmt = proxying.renderer(), tool_parsers.FORMATS[name]
  tools = (wire.Tool("f", "", SCHEMA),)
  if name == "qwen_coder":
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{nested(depth)}\n"
    text += "</parameter>\n</function>\n</tool_call>"
  else:
    text = fmt.write("f", f'{{"a": {nested(depth)}}}')
  parsed = tool_parsers.parse(fmt, text, tools=tools)
  assert len(parsed.calls) == 1 or parsed.text == text
  quoted = fmt.write("f", json.dumps(json.dumps({"a": 1})[:-1] + nested(depth)))
  tool_parsers.parse(fmt, quoted, tools=tools)
  book = conversation.Book(renderer, fmt)
  calls = tuple(wire.ToolCall("c", *c) for c in parsed.calls)
  said = wire.Said(parsed.text, "", calls)
  user = wire.Message("user", "a")
  prompt = book.prompt([user], tools)
  ids = np.asarray([*renderer.encode(text[:2000]), renderer.end_id], np.int32)
  book.add(prompt, "0000", said, ids)
  result = wire.Message("tool", "o", tool_call_id="c")
  following = book.prompt([user, said.message(), result], tools)
  assert following.follows == "0000"
  # In another conversation the call is rendered anew, or refused.
  try:
    book.prompt([wire.Message("user", "b"), said.message(), result], tools)
  except wire.ApiError as e:
    assert e.kind == "invalid"


@pytest.mark.parametrize(
  "expression",
  [
    "1 // 0",
    "'a'.index('b')",
    "[].pop()",
    "none.x.y",
    "range(10**9)",
    "raise_exception('no')",
    "'x' + 1",
  ],
)
def test_what_a_template_raises_is_told(expression):
  made = proxying.renderer("{{ " + expression + " }}")
  with pytest.raises(render.TemplateError, match="the chat template"):
    made.text([{"role": "user", "content": "a"}])


def test_a_fault_of_the_proxy_has_the_shape_of_the_api(renderer, monkeypatch):
  """A program's error: nothing that a request is known to cause."""

  class Broken(Exception):
    pass

  def fail(*args, **kwargs):
    raise Broken

  monkeypatch.setattr(renderer, "encode", fail)
  app = proxy_lib.Proxy(
    proxying.ScriptedEngine(renderer, []),
    renderer,
    rollout=config.Rollout(),
    max_context=99,
  )
  key = app.open(execution_id="g/0", group_id="g", seed=0)

  async def ask(path, body):
    # As uvicorn does, the application's exception is passed on as well.
    transport = httpx.ASGITransport(app=app.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://p") as c:
      return await c.post(path, json=body, headers={"x-api-key": key})

  hi = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
  openai = asyncio.run(ask("/v1/chat/completions", hi))
  assert openai.status_code == 500
  assert openai.json()["error"]["type"] == "server_error"
  assert "Broken" in openai.json()["error"]["message"]
  anthropic = asyncio.run(ask("/v1/messages", hi)).json()
  assert anthropic["error"]["type"] == "api_error"
  responses = asyncio.run(ask("/v1/responses", {"input": "a"}))
  assert responses.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
  "method, path",
  [
    ("POST", "/v1/nothing"),
    ("GET", "/v1/messages"),
    ("POST", "/v1/chat/completions/"),
    ("TRACE", "/v1/responses"),
    ("POST", "/a%0d%0aset-cookie:%20b"),
    ("GET", "/%00%ff"),
  ],
)
def test_what_is_not_served_is_told_in_the_api_s_shape(renderer, method, path):
  app = proxy_lib.Proxy(
    proxying.ScriptedEngine(renderer, []),
    renderer,
    rollout=config.Rollout(),
    max_context=99,
  )

  async def ask(headers):
    transport = httpx.ASGITransport(app=app.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://p") as c:
      return await c.request(method, path, headers=headers)

  for headers in ({}, {"anthropic-version": "2023-06-01"}):
    answer = asyncio.run(ask(headers))
    assert answer.status_code == 404
    told = answer.json()["error"]
    assert told["type"] == "not_found_error" and "\n" not in told["message"]
    theirs = bool(headers) or "messages" in path
    assert ("request_id" in answer.json()) == theirs


def test_a_thousand_executions_at_once(renderer):
  engine = proxying.ScriptedEngine(renderer, lambda text: text[-40:-32])
  app = proxy_lib.Proxy(
    engine, renderer, rollout=config.Rollout(), max_context=999
  )
  keys = [
    app.open(execution_id=f"g/{i}", group_id="g", seed=i) for i in range(1000)
  ]

  async def main():
    transport = httpx.ASGITransport(app=app.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://p") as c:
      answers = await asyncio.gather(
        *(
          c.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": f"{i:08d}"}]},
            headers={"x-api-key": key},
          )
          for i, key in enumerate(keys)
        )
      )
    return answers, [await app.close(key) for key in keys]

  answers, recorded = asyncio.run(main())
  for i, (answer, calls) in enumerate(zip(answers, recorded, strict=True)):
    assert answer.status_code == 200
    (call,) = calls
    assert call.execution_id == f"g/{i}"
    said = renderer.completion_text(call.completion_ids)
    assert answer.json()["choices"][0]["message"]["content"] == said.strip()
    assert f"{i:08d}" in renderer.decode(call.prompt_ids)
