"""The relay as a program: bytes both ways, ends, and where it listens."""

import asyncio
import contextlib
import hashlib
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from gyre.envs import relay

SCRIPT = pathlib.Path(relay.__file__)


@contextlib.contextmanager
def relaying(path, *port):
  """A relay to the socket at `path`; yields its port."""
  told = subprocess.run(
    [sys.executable, "-I", "-S", str(SCRIPT), str(path), *map(str, port)],
    capture_output=True,
    text=True,
    check=True,
    timeout=30,
  )
  number = int(told.stdout)
  try:
    yield number
  finally:
    for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
      with contextlib.suppress(OSError):
        words = entry.read_bytes().split(b"\0")
        if str(SCRIPT).encode() in words and str(path).encode() in words:
          os.kill(int(entry.parent.name), signal.SIGKILL)


async def answer(reader, writer):
  """Reads to the end, then says how much and what it was, at length."""
  data = await reader.read()
  digest = hashlib.sha256(data).hexdigest()
  writer.write(f"{len(data)} {digest}\n".encode())
  writer.write(data[::-1])
  await writer.drain()
  writer.close()


async def ask(port, data):
  """Sends, ends its own direction, reads to the end."""
  reader, writer = await asyncio.open_connection("127.0.0.1", port)
  writer.write(data)
  writer.write_eof()
  got = await reader.read()
  writer.close()
  return got


def test_many_connections_carry_much_both_ways(tmp_path):
  path = tmp_path / "s"

  async def main(port):
    server = await asyncio.start_unix_server(answer, path)
    async with server:
      sent = [os.urandom(n * 70001) for n in range(1, 21)]
      got = await asyncio.gather(*(ask(port, data) for data in sent))
    for data, reply in zip(sent, got, strict=True):
      digest = hashlib.sha256(data).hexdigest()
      assert reply == f"{len(data)} {digest}\n".encode() + data[::-1]

  with relaying(path) as port:
    asyncio.run(main(port))


def test_a_client_that_leaves_is_told_to_the_other_side(tmp_path):
  path = tmp_path / "s"

  async def main(port):
    ended = asyncio.Event()

    async def endless(reader, writer):
      with contextlib.suppress(OSError):
        while not reader.at_eof():
          writer.write(b"x" * 4096)
          await writer.drain()
          await asyncio.sleep(0)
      ended.set()
      writer.close()

    server = await asyncio.start_unix_server(endless, path)
    async with server:
      reader, writer = await asyncio.open_connection("127.0.0.1", port)
      await reader.readexactly(1 << 16)
      writer.transport.abort()
      await asyncio.wait_for(ended.wait(), 10)

  with relaying(path) as port:
    asyncio.run(main(port))


def test_without_the_socket_connections_end_and_the_relay_lives(tmp_path):
  path = tmp_path / "s"

  async def main(port):
    assert await ask(port, b"") == b""
    server = await asyncio.start_unix_server(answer, path)
    async with server:
      assert (await ask(port, b"now")).startswith(b"3 ")

  with relaying(path) as port:
    asyncio.run(main(port))


def test_it_takes_the_port_asked_for_or_a_free_one(tmp_path):
  with socket.create_server(("127.0.0.1", 0)) as other:
    taken = other.getsockname()[1]
    with relaying(tmp_path / "s", taken) as port:
      assert port != taken
  with relaying(tmp_path / "t", taken) as port:
    assert port == taken


def test_a_socket_deep_in_the_tree(tmp_path):
  deep = tmp_path / ("d" * 120)
  deep.mkdir()
  with socket.socket(socket.AF_UNIX) as listener:
    with pytest.raises(OSError):
      listener.bind(str(deep / "s"))
    folder = os.open(deep, os.O_RDONLY)
    listener.bind(f"/proc/self/fd/{folder}/s")
    os.close(folder)
    listener.listen()
    with (
      relaying(deep / "s") as port,
      socket.create_connection(("127.0.0.1", port)) as client,
    ):
      peer, _ = listener.accept()
      with peer:
        client.sendall(b"hello")
        assert peer.recv(5) == b"hello"
