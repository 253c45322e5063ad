"""An app on a unix socket: reachable, leaves signals alone, ends."""

import asyncio
import signal
import stat

import httpx
import pytest

from gyre.envs import sandbox, serve


async def app(scope, receive, send):
  """Says the path; /slow never ends."""
  assert scope["type"] == "http"
  head = {"type": "http.response.start", "status": 200, "headers": []}
  await send(head)
  if scope["path"] == "/slow":
    await send({"type": "http.response.body", "body": b"x", "more_body": True})
    await asyncio.sleep(3600)
  body = scope["path"].encode()
  await send({"type": "http.response.body", "body": body})


def client(path):
  return httpx.AsyncClient(
    transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://gyre"
  )


def test_many_clients_get_their_answers_and_the_socket_goes():
  async def main():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    async with serve.served(app) as path:
      assert stat.S_ISSOCK(path.stat().st_mode)
      now = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
      assert now == before
      async with client(path) as http:
        got = await asyncio.gather(*(http.get(f"/{i}") for i in range(50)))
      assert [r.text for r in got] == [f"/{i}" for i in range(50)]
    return path

  path = asyncio.run(main())
  assert not path.parent.exists()


def test_the_end_does_not_wait_for_an_answer_without_end():
  async def main():
    http = None
    async with serve.served(app) as path:
      http = client(path)
      reply = await http.send(http.build_request("GET", "/slow"), stream=True)
      assert await anext(reply.aiter_raw()) == b"x"
    await http.aclose()
    return path

  assert not asyncio.run(main()).exists()


def test_two_at_once_and_an_error_within_the_block():
  async def main():
    with pytest.raises(RuntimeError, match="mine"):
      async with serve.served(app) as one, serve.served(app) as two:
        assert one != two
        raise RuntimeError("mine")
    return one, two

  assert not any(p.parent.exists() for p in asyncio.run(main()))


def test_a_socket_path_that_is_too_long_is_named(monkeypatch, tmp_path):
  deep = tmp_path / ("d" * 90)
  deep.mkdir()
  monkeypatch.setattr("tempfile.tempdir", str(deep))

  async def main():
    async with serve.served(app):
      raise AssertionError("it was served")

  with pytest.raises(sandbox.SandboxError, match="TMPDIR"):
    asyncio.run(main())
  assert not list(sandbox.base_directory().iterdir())
