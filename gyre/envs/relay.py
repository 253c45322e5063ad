"""Inside a sandbox: TCP on the loopback, forwarded to a unix socket.

  python3 relay.py SOCKET [PORT]

SDKs speak TCP; the sandbox's network is its own loopback and one socket of
the host. This program listens on 127.0.0.1 (at PORT if it is free), prints
the port, and serves from a process of its own until it is ended. It is run
from its text: the standard library only, nothing of gyre.
"""

import asyncio
import os
import socket
import sys

_CHUNK = 1 << 16
_BACKLOG = 128


async def _pump(reader, writer):
  """Copies until the source ends; the other direction goes on."""
  try:
    while data := await reader.read(_CHUNK):
      writer.write(data)
      await writer.drain()
    if writer.can_write_eof():
      writer.write_eof()
  except OSError:
    # Either side is gone: so is the other, for this direction.
    writer.close()


def _relay(path):
  async def serve(reader, writer):
    try:
      upstream_reader, upstream_writer = await asyncio.open_unix_connection(
        path
      )
    except OSError:
      writer.close()
      return
    try:
      await asyncio.gather(
        _pump(reader, upstream_writer), _pump(upstream_reader, writer)
      )
    finally:
      upstream_writer.close()
      writer.close()

  return serve


async def _serve(path, listener):
  server = await asyncio.start_server(
    _relay(path), sock=listener, limit=_CHUNK, backlog=_BACKLOG
  )
  await server.serve_forever()


def _listen(port):
  """A listening socket at `port`, or at any where that is taken."""
  for wanted in (port, 0):
    # Named, or asyncio would not send small pieces at once (TCP_NODELAY).
    listener = socket.socket(
      socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    try:
      listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      listener.bind(("127.0.0.1", wanted))
      listener.listen(_BACKLOG)
      return listener
    except OSError:
      listener.close()
      if not wanted:
        raise
  raise AssertionError("unreachable")


def main(argv):
  """Listens, tells the port, and leaves a process that forwards."""
  known = len(argv) == 2 or (len(argv) == 3 and argv[2].isdecimal())
  if not known or int((*argv, "0")[2]) > 65535:
    sys.exit("usage: relay.py SOCKET [PORT]")
  # Relative to its directory, a path fits into a socket's address.
  folder, name = os.path.split(argv[1])
  listener = _listen(int(argv[2]) if len(argv) > 2 else 0)
  sys.stdout.write(f"{listener.getsockname()[1]}\n")
  sys.stdout.flush()
  if os.fork():
    os._exit(0)
  os.chdir(folder or ".")
  null = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):
    os.dup2(null, fd)
  asyncio.run(_serve(name, listener))


if __name__ == "__main__":
  main(sys.argv)
