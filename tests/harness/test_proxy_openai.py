"""The openai SDK against the proxy: Chat Completions and Responses."""

import json

import proxying
import pytest

openai = pytest.importorskip("openai", reason="needs the openai SDK")

TOOLS = [
  {
    "type": "function",
    "function": {
      "name": name,
      "description": "Runs a command.",
      "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
      },
    },
  }
  for name in ("shell", "look")
]
FLAT = [{"type": "function", **t["function"]} for t in TOOLS]
TWO_CALLS = "\n".join(
  (
    "I look.",
    proxying.hermes("shell", '{"command":  "ls -l"}'),
    proxying.hermes("look", '{"command": "a\\"b é", "deep": false}'),
  )
)


def client_of(served, key):
  return openai.OpenAI(
    base_url=served.url + "/v1", api_key=key, max_retries=0, timeout=20
  )


def chat(client, messages, stream, **options):
  """One answer: (message as a dict, finish_reason, usage)."""
  request = dict(model="m", messages=messages, **options)
  if not stream:
    answer = client.chat.completions.create(**request)
    choice = answer.choices[0]
    message = choice.message.model_dump(exclude_none=True)
    return message, choice.finish_reason, answer.usage
  request["stream_options"] = {"include_usage": True}
  with client.chat.completions.stream(**request) as events:
    deltas = [e.delta for e in events if e.type == "content.delta"]
    try:
      answer = events.get_final_completion()
    except openai.LengthFinishReasonError as e:
      answer = e.completion
  choice = answer.choices[0]
  message = choice.message.model_dump(exclude_none=True)
  assert "".join(deltas) == (message.get("content") or "")
  return message, choice.finish_reason, answer.usage


def sent_back(message):
  """As harnesses send an assistant's message back: JSON written anew."""
  out = {"role": "assistant", "content": message.get("content")}
  calls = []
  for call in message.get("tool_calls", []):
    arguments = json.loads(call["function"]["arguments"])
    function = {
      "name": call["function"]["name"],
      "arguments": json.dumps(
        dict(reversed(arguments.items())), separators=(",", ":")
      ),
    }
    calls.append({"id": call["id"], "type": "function", "function": function})
  return out | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("split", [0, 3])
def test_a_chat_with_parallel_calls_is_recorded_as_it_was(
  renderer, stream, split
):
  answers = [TWO_CALLS, "Both done.", "Once <more", "bye"]
  with proxying.serve(renderer, answers, split=split) as served:
    key = served.open()
    client = client_of(served, key)
    messages = [
      {"role": "system", "content": "You work."},
      {"role": "user", "content": [{"type": "text", "text": "List."}]},
    ]
    said, reason, usage = chat(client, messages, stream, tools=TOOLS)
    assert reason == "tool_calls" and said["content"] == "I look."
    calls = said["tool_calls"]
    assert [c["function"]["name"] for c in calls] == ["shell", "look"]
    assert json.loads(calls[1]["function"]["arguments"]) == {
      "command": 'a"b é',
      "deep": False,
    }
    assert len({c["id"] for c in calls}) == 2
    messages.append(sent_back(said))
    for call in reversed(calls):
      messages.append(
        {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
      )
    said, reason, _ = chat(client, messages, stream, tools=TOOLS)
    assert (said["content"], reason) == ("Both done.", "stop")
    messages += [sent_back(said), {"role": "user", "content": "More."}]
    said, reason, _ = chat(client, messages, stream, tools=TOOLS)
    assert said["content"] == "Once <more"
    messages += [sent_back(said), {"role": "user", "content": "End."}]
    said, _, _ = chat(client, messages, stream, tools=TOOLS)
    recorded = served.close(key)
  assert len(recorded) == 4
  proxying.check_recorded(recorded, served.engine, ["main"])
  assert proxying.check_extends(recorded) == 3
  assert [c.role for c in recorded] == ["main"] * 4
  assert usage.prompt_tokens == len(recorded[0].prompt_ids)
  assert usage.completion_tokens == len(recorded[0].completion_ids)
  assert recorded[0].versions.tolist() == [3] * usage.completion_tokens
  first = renderer.decode(recorded[0].prompt_ids)
  assert first.count('"name": "shell"') == 1 and "You work." in first


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_completes_a_shell_task(renderer, stream, tmp_path):
  task = proxying.ShellTask(tmp_path)
  with proxying.serve(renderer, task.policy, split=3) as served:
    key = served.open()
    client = client_of(served, key)
    messages = [
      {"role": "system", "content": task.system},
      {"role": "user", "content": task.user},
    ]
    while True:
      said, reason, _ = chat(client, messages, stream, tools=TOOLS)
      messages.append(sent_back(said))
      if reason != "tool_calls":
        break
      for call in said["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        answer = {"role": "tool", "tool_call_id": call["id"]}
        messages.append(answer | {"content": task.run(command)})
    recorded = served.close(key)
  task.check(said["content"], recorded, served.engine)


@pytest.mark.parametrize("stream", [False, True])
def test_the_trainer_decides_how_to_sample(renderer, stream):
  with proxying.serve(renderer, ["x"], max_new_tokens=50) as served:
    key = served.open(temperature=0.5)
    asked = {"temperature": 0.1, "top_p": 0.3, "seed": 5, "max_tokens": 40}
    asked |= {"presence_penalty": 0.5}
    messages = [{"role": "user", "content": "hi"}]
    chat(client_of(served, key), messages, stream, **asked)
    (call,) = served.close(key)
  (request,) = served.engine.requests
  assert call.sampling_asked == asked
  assert request.temperature == 0.5 == call.sampling_used["temperature"]
  assert (request.top_p, request.top_k) == (1.0, 0)
  assert request.max_new_tokens == 40
  assert request.seed == call.sampling_used["seed"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences_end_the_text_and_the_call(renderer, stream):
  answers = ["one, two; STOP three", "never ends here", "z"]
  with proxying.serve(renderer, answers, tick_s=0.001) as served:
    key = served.open()
    client = client_of(served, key)
    messages = [{"role": "user", "content": "count"}]
    said, reason, _ = chat(client, messages, stream, stop=["STOP", "\n\n"])
    assert (said["content"], reason) == ("one, two;", "stop")
    messages += [sent_back(said), {"role": "user", "content": "on"}]
    said, reason, _ = chat(client, messages, stream, max_tokens=3)
    assert reason == "length"
    messages += [sent_back(said), {"role": "user", "content": "on"}]
    chat(client, messages, stream)
    recorded = served.close(key)
  proxying.check_recorded(recorded, served.engine, ["main"])
  assert proxying.check_extends(recorded) == 2
  text = renderer.decode(recorded[0].completion_ids)
  assert "STOP" in text and not text.endswith("three")
  assert [c.finish_reason for c in recorded] == ["stop", "length", "stop"]


def responses(client, stream, **request):
  """A Response, streamed or not."""
  if not stream:
    return client.responses.create(model="m", **request)
  with client.responses.stream(model="m", **request) as events:
    deltas = "".join(
      e.delta for e in events if e.type == "response.output_text.delta"
    )
    answer = events.get_final_response()
  assert deltas == answer.output_text
  return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
def test_responses_with_parallel_calls(renderer, stream, stateful):
  with proxying.serve(renderer, [TWO_CALLS, "Both done."], split=2) as served:
    key = served.open()
    client = client_of(served, key)
    items = [{"role": "user", "content": "List."}]
    common = {"instructions": "You work.", "tools": FLAT}
    answer = responses(client, stream, input=items, **common)
    assert answer.status == "completed"
    kinds = [item.type for item in answer.output]
    assert kinds == ["message", "function_call", "function_call"]
    assert answer.output_text == "I look."
    outputs = [
      {"type": "function_call_output", "call_id": i.call_id, "output": "ok"}
      for i in answer.output[1:]
    ]
    if stateful:
      common["previous_response_id"] = answer.id
      items = outputs
    else:
      # One by one, each with its result, the JSON written anew.
      items.append(answer.output[0].model_dump(exclude_none=True))
      for item, output in zip(answer.output[1:], outputs, strict=True):
        again = item.model_dump(exclude_none=True)
        again["arguments"] = json.dumps(json.loads(item.arguments), indent=1)
        items += [again, output]
    answer = responses(client, stream, input=items, **common)
    assert answer.output_text == "Both done."
    recorded = served.close(key)
  proxying.check_recorded(recorded, served.engine, ["main"])
  assert proxying.check_extends(recorded) == 1
  assert answer.usage.input_tokens == len(recorded[1].prompt_ids)
  assert answer.usage.output_tokens == len(recorded[1].completion_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
def test_responses_complete_a_shell_task(renderer, stream, stateful, tmp_path):
  task = proxying.ShellTask(tmp_path)
  with proxying.serve(renderer, task.policy, split=3) as served:
    key = served.open()
    client = client_of(served, key)
    common = {"instructions": task.system, "tools": FLAT}
    items = [{"role": "user", "content": task.user}]
    while True:
      answer = responses(client, stream, input=items, **common)
      said = [i.model_dump(exclude_none=True) for i in answer.output]
      outputs = [
        {
          "type": "function_call_output",
          "call_id": item["call_id"],
          "output": task.run(json.loads(item["arguments"])["command"]),
        }
        for item in said
        if item["type"] == "function_call"
      ]
      if not outputs:
        break
      if stateful:
        common["previous_response_id"], items = answer.id, outputs
      else:
        items = [*items, *said, *outputs]
    recorded = served.close(key)
  task.check(answer.output_text, recorded, served.engine)


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tools_take_text(renderer, stream):
  said = proxying.hermes("patch", '{"input": "*** a\\n+b"}')
  with proxying.serve(renderer, [said, "ok"]) as served:
    key = served.open()
    client = client_of(served, key)
    tools = [{"type": "custom", "name": "patch", "description": "Patches."}]
    answer = responses(client, stream, input="Patch.", tools=tools)
    (item,) = answer.output
    assert (item.type, item.name) == ("custom_tool_call", "patch")
    assert item.input == "*** a\n+b"
    items = [
      {"role": "user", "content": "Patch."},
      item.model_dump(exclude_none=True),
      {
        "type": "custom_tool_call_output",
        "call_id": item.call_id,
        "output": [{"type": "input_text", "text": "done"}],
      },
    ]
    responses(client, stream, input=items, tools=tools)
    recorded = served.close(key)
  proxying.check_recorded(recorded, served.engine, ["main"])
  assert proxying.check_extends(recorded) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_a_namespace_keep_their_names(renderer, stream):
  said = proxying.hermes("git__log", '{"n": 3}')
  with proxying.serve(renderer, [said, "ok"]) as served:
    key = served.open()
    client = client_of(served, key)
    inner = {"type": "function", "name": "log", "parameters": {}}
    space = {"type": "namespace", "name": "git", "tools": [inner]}
    tools = [space | {"description": "g"}, {"type": "web_search"}]
    answer = responses(client, stream, input="Log.", tools=tools)
    (item,) = answer.output
    assert (item.namespace, item.name) == ("git", "log")
    items = [
      {"role": "user", "content": "Log."},
      {"type": "reasoning", "summary": []},
      item.model_dump(exclude_none=True),
      {"type": "function_call_output", "call_id": item.call_id, "output": "a"},
    ]
    responses(client, stream, input=items, tools=tools)
    recorded = served.close(key)
  proxying.check_recorded(recorded, served.engine, ["main"])
  assert proxying.check_extends(recorded) == 1
  assert "web_search" not in renderer.decode(recorded[0].prompt_ids)


def test_an_answer_cut_by_a_limit_is_incomplete(renderer):
  with proxying.serve(renderer, ["words and words"] * 2) as served:
    client = client_of(served, served.open())
    answer = client.responses.create(model="m", input="hi", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
