"""Keys, limits, and clients and engines that break off."""

import asyncio
import json
import socket
import threading
import time

import httpx
import proxying
import pytest

from gyre import config
from gyre.harness import proxy as proxy_lib

PATHS = {
  "chat": "/v1/chat/completions",
  "responses": "/v1/responses",
  "anthropic": "/v1/messages",
}
APIS = list(PATHS)
LONG = "one two three four five six seven eight nine ten " * 4


def body_of(api, text="hi", **more):
  if api == "responses":
    return {"model": "m", "input": text, **more}
  body = {"model": "m", "messages": [{"role": "user", "content": text}]}
  return body | ({"max_tokens": 300} if api == "anthropic" else {}) | more


def headers_of(api, key):
  if api == "anthropic":
    return {"x-api-key": key, "anthropic-version": "2023-06-01"}
  return {"Authorization": f"Bearer {key}"}


def post(served, api, key, body=None, *, path="", **headers):
  data = body if isinstance(body, bytes) else json.dumps(body or body_of(api))
  return httpx.post(
    served.url + PATHS[api] + path,
    content=data,
    headers=headers_of(api, key) | headers,
    timeout=30,
  )


def check_error(response, api, status, kind, message):
  """The error has the shape of its API."""
  assert response.status_code == status, response.text
  value = response.json()
  if api == "anthropic":
    assert value["type"] == "error" and value["request_id"]
    assert value["error"]["type"] == kind[0]
  else:
    assert set(value["error"]) == {"message", "type", "param", "code"}
    assert value["error"]["type"] == kind[1]
  assert message in value["error"]["message"]
  return value


@pytest.fixture(scope="module")
def idle(renderer):
  """A proxy whose engine is never asked."""
  with proxying.serve(renderer, []) as served:
    yield served
    assert not served.engine.requests


def wait_for(condition, timeout_s=10):
  end = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < end, "it never came true"
    time.sleep(0.01)


@pytest.mark.parametrize("api", APIS)
def test_no_key_no_service(renderer, api):
  with proxying.serve(renderer, ["x"] * 3) as served:
    key, other = served.open(), served.open()
    assert key != other and len(key) > 40
    assert post(served, api, key).status_code == 200
    kind = ("authentication_error", "authentication_error")
    for wrong in ("-", "sk-gyre-0", key[:-1], key.upper()):
      check_error(post(served, api, wrong), api, 401, kind, "")
    served.close(key)
    check_error(post(served, api, key), api, 401, kind, key[:11])
    assert key not in post(served, api, key).text
    assert post(served, api, other).status_code == 200
    assert len(served.close(other)) == 1
    count = served.url + "/v1/messages/count_tokens"
    for path in (served.url + "/v1/models", served.url + "/v1/models/m"):
      assert httpx.get(path).status_code == 401
    assert httpx.post(count, json=body_of("anthropic")).status_code == 401
  assert len(served.engine.requests) == 2


def test_models_are_listed_in_each_shape(renderer):
  with proxying.serve(renderer, []) as served:
    key = served.open()
    for api in ("chat", "anthropic"):
      headers = headers_of(api, key)
      listed = httpx.get(served.url + "/v1/models", headers=headers).json()
      assert [m["id"] for m in listed["data"]] == ["policy"]
      one = httpx.get(served.url + "/v1/models/a/b", headers=headers).json()
      assert one["id"] == "a/b"
    assert httpx.head(served.url + "/").status_code == 200
    gone = httpx.post(served.url + "/v1/embeddings", headers=headers)
    check_error(gone, "anthropic", 404, ("not_found_error",), "/v1/embeddings")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
  "body, message",
  [
    (b"{", "not valid JSON"),
    (b"[1]", "must be a JSON object"),
    (b"", "not valid JSON"),
    (
      b'{"model": "m", "max_tokens": 3, "input": "\\ud800", "messages": '
      b'[{"role": "user", "content": "\\ud800"}]}',
      "not valid JSON",
    ),
    (b'{"a": ' * 100_000, "not valid JSON"),
    ({"model": "m"}, ""),
    ({"model": "m", "messages": 3, "input": 3}, "must be"),
    ({"model": "m", "messages": [3], "input": [3]}, "must be an object"),
    (
      {"messages": [{"role": "king", "content": "a"}]}
      | {"input": [{"role": "king", "content": "a"}]},
      "king",
    ),
    (
      {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
      | {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
      "text only",
    ),
    ({"temperature": "hot"}, "temperature"),
    ({"stream": "yes"}, "stream must be bool"),
    ({"tools": [{"type": "function"}]}, "tools"),
  ],
)
def test_malformed_requests_are_refused(idle, api, body, message):
  if isinstance(body, dict) and "model" not in body:
    body = body_of(api) | body
  response = post(idle, api, idle.open(), body)
  kind = ("invalid_request_error", "invalid_request_error")
  check_error(response, api, 400, kind, message)


@pytest.mark.parametrize(
  "more", [{"n": 2}, {"logprobs": True}, {"functions": [{}]}]
)
def test_what_would_be_ignored_wrongly_is_refused(idle, more):
  response = post(idle, "chat", idle.open(), body_of("chat", **more))
  kind = ("", "invalid_request_error")
  value = check_error(response, "chat", 400, kind, next(iter(more)))
  assert value["error"]["param"] == next(iter(more))


def test_harmless_parameters_are_ignored(renderer):
  with proxying.serve(renderer, ["x"] * 3) as served:
    key = served.open()
    more = {"n": 1, "user": "u", "metadata": {"a": "b"}, "store": False}
    more |= {"unheard_of": [1]}
    for api in APIS:
      given = more | ({"n": None} if api == "responses" else {})
      assert post(served, api, key, body_of(api, **given)).status_code == 200


@pytest.mark.parametrize("api", APIS)
def test_limits_of_body_and_context(renderer, api):
  with proxying.serve(
    renderer, ["x"] * 2, max_body_bytes=20_000, max_context=200
  ) as served:
    key = served.open()
    response = post(served, api, key, body_of(api, "a" * 20_001))
    kind = ("request_too_large", "invalid_request_error")
    check_error(response, api, 413, kind, "20000 bytes")
    # Ten times what is read at all: whoever still writes may be cut off.
    try:
      response = post(served, api, key, body_of(api, "a" * 5_000_000))
      check_error(response, api, 413, kind, "20000 bytes")
    except httpx.TransportError as e:
      assert isinstance(e, httpx.WriteError | httpx.ReadError)
    response = post(served, api, key, body_of(api, "0 1 2 3 4 5 6 7 " * 50))
    kind = ("invalid_request_error", "invalid_request_error")
    value = check_error(response, api, 400, kind, "> 200 maximum")
    if api != "anthropic":
      assert value["error"]["code"] == "context_length_exceeded"
    # What fits is cut at the context's end.
    assert post(served, api, key).status_code == 200
    (call,) = served.close(key)
  used = call.sampling_used["max_new_tokens"]
  assert used + len(call.prompt_ids) <= 200


def test_slow_bodies_end_and_broken_ones_leave_nothing(renderer):
  with proxying.serve(renderer, [], body_timeout_s=0.3) as served:
    key = served.open()
    head = (
      "POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n"
      f"x-api-key: {key}\r\n\r\n" + '{"a'
    )
    place = served.url.removeprefix("http://").split(":")
    with socket.create_connection((place[0], int(place[1])), 10) as broken:
      broken.sendall(head.encode())
    with socket.create_connection((place[0], int(place[1])), 10) as slow:
      slow.sendall(head.encode())
      # Head and body may come apart; the server closes at the end.
      said = b"".join(iter(lambda: slow.recv(4096), b""))
    assert said.startswith(b"HTTP/1.1 408") and b"timeout_error" in said
    assert served.close(key) == ()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_keeps_one_call(renderer, api, stream):
  """Cancelled at the engine, the partial kept; asked again, it goes on."""
  with proxying.serve(renderer, [LONG], tick_s=0.02) as served:
    key, engine = served.open(), served.engine
    body = body_of(api, stream=stream)
    with (
      pytest.raises(httpx.ReadTimeout),
      httpx.stream(
        "POST",
        served.url + PATHS[api],
        json=body,
        headers=headers_of(api, key),
        timeout=httpx.Timeout(10, read=0.3),
      ) as response,
    ):
      if stream:
        next(response.iter_raw())
        time.sleep(0.2)
        raise httpx.ReadTimeout("we go")
    wait_for(lambda: served.calls(key))
    (partial,) = served.calls(key)
    n = len(partial.completion_ids)
    assert partial.finish_reason == "abort" and n > 0
    assert engine.aborts and not engine._live
    engine.tick_s = None
    again = post(served, api, key, body_of(api))
    assert again.status_code == 200 and LONG.strip()[:20] in again.text
    (call,) = served.close(key)
  first, second = engine.requests
  assert second.ids.tolist() == [
    *first.ids.tolist(),
    *partial.completion_ids.tolist(),
  ]
  assert second.seed == first.seed
  assert second.max_new_tokens == first.max_new_tokens - n
  assert call.call_id == partial.call_id and call.finish_reason == "stop"
  proxying.check_recorded([call], engine)


def test_a_retry_of_a_call_under_way_joins_it(renderer):
  with proxying.serve(renderer, [LONG], tick_s=0.01) as served:
    key, answers = served.open(), []
    threads = [
      threading.Thread(
        target=lambda n=n: answers.append(
          post(
            served, "chat", key, **{"x-stainless-retry-count": str(n)}
          ).json()
        )
      )
      for n in range(3)
    ]
    for thread in threads:
      thread.start()
      wait_for(lambda: served.engine.requests)
    for thread in threads:
      thread.join()
    # And one whose answer was lost on the way.
    late = post(served, "chat", key, **{"x-stainless-retry-count": "1"})
    calls = served.close(key)
  assert len(calls) == 1 and len(served.engine.requests) == 1
  texts = {a["choices"][0]["message"]["content"] for a in answers}
  assert texts == {LONG.strip()} and len(answers) == 3
  assert late.json()["id"] == answers[0]["id"]


def test_the_same_question_asked_anew_is_another_sample(renderer):
  with proxying.serve(renderer, ["one", "two"]) as served:
    key = served.open()
    texts = [
      post(served, "chat", key).json()["choices"][0]["message"]["content"]
      for _ in range(2)
    ]
    calls = served.close(key)
  assert texts == ["one", "two"]
  assert [c.call_id for c in calls] == ["0000", "0001"]
  assert calls[0].sampling_used["seed"] != calls[1].sampling_used["seed"]
  proxying.check_recorded(calls, served.engine)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fail_at", [0, 4])
def test_an_engine_that_goes_down_fails_one_attempt(
  renderer, api, stream, fail_at
):
  with proxying.serve(renderer, [LONG]) as served:
    key = served.open()
    served.engine.fail_at = fail_at
    response = post(served, api, key, body_of(api, stream=stream))
    if stream and fail_at and response.status_code == 200:
      assert "went down" in response.text
    else:
      kind = ("api_error", "server_error")
      check_error(response, api, 503, kind, "went down")
    again = post(served, api, key)
    assert again.status_code == 200
    (call,) = served.close(key)
  assert len(served.engine.requests) == 2
  proxying.check_recorded([call], served.engine)
  assert call.finish_reason == "stop"


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fail_at", [0, 4])
def test_a_fault_that_no_engine_tells_of_is_500(
  renderer, api, stream, fail_at, caplog
):
  """In the API's own shape, one line in the log, the call a failed one."""
  with proxying.serve(renderer, [LONG]) as served:
    key = served.open()
    served.engine.fail_at = fail_at
    served.engine.failure = KeyError("never\nthought of")
    response = post(served, api, key, body_of(api, stream=stream))
    if stream and fail_at and response.status_code == 200:
      assert "the model failed: KeyError" in response.text
    else:
      kind = ("api_error", "server_error")
      check_error(response, api, 500, kind, "the model failed: KeyError")
    assert "thought of" not in response.text
    failed = served.calls(key)
    assert [len(c.completion_ids) for c in failed] == [fail_at] * bool(fail_at)
    assert all(c.finish_reason == "abort" for c in failed)
    (line,) = [r for r in caplog.records if r.name.startswith("gyre.")]
    assert line.levelname == "ERROR" and "\n" not in line.getMessage()
    assert "call 0000 of g/1 failed: KeyError" in line.getMessage()
    # Asked again it goes on.
    assert post(served, api, key).status_code == 200
    (call,) = served.close(key)
  proxying.check_recorded([call], served.engine, ["main"])
  assert call.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_switch_of_the_cell_is_not_seen(renderer, stream):
  with proxying.serve(renderer, [LONG]) as served:
    key = served.open()
    served.engine.give_up = [3, 0, 5]
    response = post(served, "chat", key, body_of("chat", stream=stream))
    if stream:
      events = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.split("\n\n")
        if line.startswith("data: {")
      ]
      text = "".join(
        e["choices"][0]["delta"].get("content", "") for e in events
      )
    else:
      text = response.json()["choices"][0]["message"]["content"]
    calls = served.close(key)
  assert text == LONG.strip()
  assert len(served.engine.requests) == 4 and len(calls) == 1
  proxying.check_recorded(calls, served.engine)


def test_closing_a_key_cancels_what_is_under_way(renderer):
  with proxying.serve(renderer, [LONG], tick_s=0.02) as served:
    key, answers = served.open(), []
    thread = threading.Thread(
      target=lambda: answers.append(post(served, "chat", key))
    )
    thread.start()
    wait_for(lambda: served.engine._live)
    time.sleep(0.1)
    (call,) = served.close(key)
    thread.join()
    assert call.finish_reason == "abort" and len(call.completion_ids)
    assert not served.engine._live
  check_error(answers[0], "chat", 503, ("", "server_error"), "cancelled")


def test_too_many_calls_at_once_are_refused(renderer):
  with proxying.serve(renderer, [LONG] * 3, tick_s=0.01, max_live=2) as served:
    key, answers = served.open(), []
    threads = [
      threading.Thread(target=lambda: answers.append(post(served, "chat", key)))
      for _ in range(2)
    ]
    for thread in threads:
      thread.start()
    wait_for(lambda: len(served.engine._live) == 2)
    response = post(served, "chat", key)
    check_error(response, "chat", 429, ("", "rate_limit_error"), "2 calls")
    for thread in threads:
      thread.join()
    assert [a.status_code for a in answers] == [200, 200]
    assert len(served.close(key)) == 2


def asgi(proxy, key, body, send, gone=None):
  """Calls the app as a server would; `send` sees each message."""
  data = [{"type": "http.request", "body": json.dumps(body).encode()}]

  async def receive():
    if data:
      return data.pop()
    await (gone or asyncio.Event()).wait()
    return {"type": "http.disconnect"}

  scope = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "path": "/v1/chat/completions",
    "raw_path": b"/v1/chat/completions",
    "root_path": "",
    "scheme": "http",
    "query_string": b"",
    "headers": [(b"authorization", f"Bearer {key}".encode())],
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 2),
  }
  return proxy.app(scope, receive, send)


@pytest.mark.parametrize("how", ["stalls", "resets"])
def test_a_client_that_takes_nothing_is_left(renderer, how):
  engine = proxying.ScriptedEngine(renderer, [LONG], tick_s=0.01)
  proxy = proxy_lib.Proxy(
    engine,
    renderer,
    rollout=config.Rollout(),
    max_context=1000,
    send_timeout_s=0.2,
  )
  sent = []

  async def send(message):
    sent.append(message)
    if len(sent) == 3:
      if how == "resets":
        raise OSError("connection lost")
      await asyncio.Event().wait()

  async def main():
    key = proxy.open(execution_id="g/0", group_id="g", seed=0)
    await asgi(proxy, key, body_of("chat", stream=True), send)
    assert len(sent) == 3
    return await proxy.close(key)

  (call,) = asyncio.run(main())
  assert call.finish_reason == "abort" and not engine._live


def test_a_silent_stream_is_kept_alive(renderer):
  with proxying.serve(renderer, ["x"], tick_s=0.3, keep_alive_s=0.1) as served:
    for api in APIS:
      served.engine.answers = ["x"]
      response = post(served, api, served.open(), body_of(api, stream=True))
      assert response.text.count("ping") >= 1, api
