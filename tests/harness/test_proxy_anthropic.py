"""The anthropic SDK against the proxy: Messages and count_tokens."""

import json

import httpx
import proxying
import pytest

anthropic = pytest.importorskip("anthropic", reason="needs the anthropic SDK")

TOOLS = [
  {
    "name": name,
    "description": "Runs a command.",
    "input_schema": {
      "type": "object",
      "properties": {"command": {"type": "string"}},
      "required": ["command"],
    },
  }
  for name in ("shell", "look")
]
TWO_CALLS = "\n".join(
  (
    "<think>\nFirst the list.\n</think>\n\nI look.",
    proxying.hermes("shell", '{"command":  "ls -l"}'),
    proxying.hermes("look", '{"command": "a\\"b é", "deep": false}'),
  )
)


def client_of(served, key, **how):
  how = how or {"api_key": key}
  return anthropic.Anthropic(
    base_url=served.url, max_retries=0, timeout=20, **how
  )


def say(client, messages, stream, **options):
  request = dict(model="m", max_tokens=300, messages=messages) | options
  if not stream:
    return client.messages.create(**request)
  with client.messages.stream(**request) as events:
    pieces = "".join(events.text_stream)
    answer = events.get_final_message()
  texts = [b.text for b in answer.content if b.type == "text"]
  assert pieces == "".join(texts)
  return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_messages_with_parallel_calls_are_recorded(renderer, stream, thinking):
  with proxying.serve(
    renderer, [TWO_CALLS, "Both done.", "bye"], split=3
  ) as served:
    key = served.open()
    how = {"auth_token": key} if thinking else {"api_key": key}
    client = client_of(served, key, **how)
    options = {"tools": TOOLS}
    options["system"] = [
      {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
      {
        "type": "text",
        "text": "You work.",
        "cache_control": {"type": "ephemeral"},
      },
    ]
    if thinking:
      options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    messages = [{"role": "user", "content": "List."}]
    answer = say(client, messages, stream, **options)
    kinds = [b.type for b in answer.content]
    assert kinds == ["thinking"] * thinking + ["text"] + ["tool_use"] * 2
    if thinking:
      assert answer.content[0].thinking == "First the list."
      assert answer.content[0].signature
    assert answer.stop_reason == "tool_use"
    first, second = answer.content[-2:]
    assert (first.name, first.input) == ("shell", {"command": "ls -l"})
    assert second.input == {"command": 'a"b é', "deep": False}
    usage = answer.usage
    # The harness drops the thinking and writes the payload anew.
    blocks = [
      b.model_dump(exclude_none=True)
      for b in answer.content
      if b.type != "thinking"
    ]
    blocks[-1]["input"] = dict(reversed(second.input.items()))
    messages[0]["content"] = [{"type": "text", "text": "List."}]
    messages.append({"role": "assistant", "content": blocks})
    results = [
      {
        "type": "tool_result",
        "tool_use_id": b.id,
        "content": [{"type": "text", "text": "ok"}],
      }
      for b in (first, second)
    ]
    messages.append({"role": "user", "content": results})
    options["system"][0]["text"] = "x-anthropic-billing-header: cch=2;"
    answer = say(client, messages, stream, **options)
    assert [b.text for b in answer.content] == ["Both done."]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    messages += [
      {"role": "assistant", "content": answer.content},
      {"role": "user", "content": "And?"},
    ]
    counted = client.messages.count_tokens(
      model="m", messages=messages, tools=TOOLS, system=options["system"]
    )
    say(client, messages, stream, **options)
    recorded = served.close(key)
  assert len(recorded) == 3
  proxying.check_recorded(recorded, served.engine, ["main"])
  assert proxying.check_extends(recorded) == 2
  assert usage.input_tokens == len(recorded[0].prompt_ids)
  assert usage.output_tokens == len(recorded[0].completion_ids)
  assert counted.input_tokens == len(recorded[2].prompt_ids)
  assert "billing" not in renderer.decode(recorded[2].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_messages_complete_a_shell_task(renderer, stream, tmp_path):
  task = proxying.ShellTask(tmp_path)
  with proxying.serve(renderer, task.policy, split=3) as served:
    key = served.open()
    client = client_of(served, key)
    options = {"tools": TOOLS, "system": task.system}
    messages = [{"role": "user", "content": task.user}]
    while True:
      answer = say(client, messages, stream, **options)
      messages.append({"role": "assistant", "content": answer.content})
      if answer.stop_reason != "tool_use":
        break
      results = [
        {
          "type": "tool_result",
          "tool_use_id": block.id,
          "content": task.run(block.input["command"]),
        }
        for block in answer.content
        if block.type == "tool_use"
      ]
      messages.append({"role": "user", "content": results})
    recorded = served.close(key)
  task.check(answer.content[0].text, recorded, served.engine)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences_and_limits(renderer, stream):
  with proxying.serve(renderer, ["one END two", "a b c d e f"]) as served:
    client = client_of(served, served.open())
    messages = [{"role": "user", "content": "count"}]
    answer = say(client, messages, stream, stop_sequences=["END"])
    assert answer.content[0].text == "one"
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence == "END"
    answer = say(client, messages, stream, max_tokens=2)
    assert answer.stop_reason == "max_tokens"


def test_one_call_at_a_time_where_the_harness_says_so(renderer):
  with proxying.serve(renderer, [TWO_CALLS]) as served:
    client = client_of(served, served.open())
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    messages = [{"role": "user", "content": "List."}]
    answer = say(client, messages, False, tools=TOOLS, tool_choice=choice)
    assert [b.type for b in answer.content] == ["text", "tool_use"]


def test_events_have_the_order_that_the_api_has(renderer):
  with proxying.serve(renderer, [TWO_CALLS], tick_s=0.0) as served:
    body = {
      "model": "m",
      "max_tokens": 300,
      "stream": True,
      "tools": TOOLS,
      "thinking": {"type": "adaptive"},
      "messages": [{"role": "user", "content": "List."}],
    }
    headers = {"x-api-key": served.open()}
    with httpx.stream(
      "POST", served.url + "/v1/messages", json=body, headers=headers
    ) as response:
      assert response.headers["content-type"].startswith("text/event-stream")
      text = response.read().decode()
  names, depth = [], 0
  for block in text.strip().split("\n\n"):
    name, data = block.split("\n")
    value = json.loads(data.removeprefix("data: "))
    assert name.removeprefix("event: ") == value["type"]
    if value["type"] == "content_block_start":
      assert (
        value["index"] == len([n for n in names if n.endswith("start")]) - 1
      )
      depth += 1
    depth -= value["type"] == "content_block_stop"
    assert 0 <= depth <= 1
    names.append(value["type"])
  assert names[0] == "message_start"
  assert names[-2:] == ["message_delta", "message_stop"]
  assert names.count("content_block_start") == 4


def test_prefill_and_foreign_tools_are_refused(renderer):
  with proxying.serve(renderer, []) as served:
    client = client_of(served, served.open())
    user = {"role": "user", "content": "a"}
    with pytest.raises(anthropic.BadRequestError, match="prefill"):
      say(client, [user, {"role": "assistant", "content": "{"}], False)
    with pytest.raises(anthropic.BadRequestError, match="no content"):
      say(client, [{"role": "user", "content": []}], False)
    image = {"type": "image", "source": {"type": "url", "url": "http://a"}}
    with pytest.raises(anthropic.BadRequestError, match="text only"):
      say(client, [{"role": "user", "content": [image]}], False)
    bash = {"type": "bash_20250124", "name": "bash"}
    with pytest.raises(anthropic.BadRequestError, match="bash_20250124"):
      say(client, [user], False, tools=[bash])
