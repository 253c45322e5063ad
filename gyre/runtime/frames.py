"""Messages between the controller and its workers: msgpack in frames.

A frame is a magic number, a length, and a msgpack message of one of the kinds
below. Values are JSON's, bytes, numpy arrays, tuples, and the dataclasses of a
fixed table. Arrays above INLINE bytes go beside the frame, through shared
memory. What does not decode strictly is refused: nothing is ever executed or
looked up by a name that came from outside the table.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from gyre.runtime import exchange

INLINE = 1 << 18
MAX_FRAME = 1 << 28
PROTOCOL = 1

_HEAD = struct.Struct(">II")
_MAGIC = 0x47595245
_INLINE_ARRAY, _SHARED_ARRAY = 1, 2
_TAG = "$"

# Dataclasses that may cross. Modules are imported when first met, so that a
# worker without JAX stays without.
_TYPES = {
  "Request": "gyre.rollout.engine",
  "Completion": "gyre.rollout.engine",
  "EngineStats": "gyre.rollout.engine",
  "Snapshot": "gyre.types",
  "Batch": "gyre.types",
  "ArrayFile": "gyre.runtime.exchange",
  "Extras": "gyre.learner.objective",
  "SequenceSums": "gyre.learner.losses",
  "Mesh": "gyre.config",
}

# Errors that are raised in the controller as they were in the worker.
ERRORS = {
  "CellError": "gyre.runtime.cell",
  "CheckpointError": "gyre.runtime.reshard",
  "ConfigError": "gyre.config",
  "EngineDown": "gyre.rollout.engine",
  "ExchangeError": "gyre.runtime.exchange",
  "FrameError": "gyre.runtime.frames",
  "ManifestError": "gyre.store.manifest",
  "PublishError": "gyre.runtime.publish",
  "Rejected": "gyre.rollout.engine",
  "StaleVersion": "gyre.rollout.engine",
  "ValueError": "builtins",
}


class FrameError(RuntimeError):
  """A frame, or a value in it, is not what the protocol allows."""


class Hello(msgspec.Struct, tag="hello", forbid_unknown_fields=True):
  """A worker's first message."""

  name: str
  pid: int
  protocol: int


class Call(msgspec.Struct, tag="call", forbid_unknown_fields=True):
  """The controller asks for something; answered by Reply or Failure."""

  id: int
  method: str
  args: list[Any]
  stream: bool = False
  arrays: exchange.ArrayFile | None = None


class Cancel(msgspec.Struct, tag="cancel", forbid_unknown_fields=True):
  """The caller has gone."""

  id: int


class Reply(msgspec.Struct, tag="reply", forbid_unknown_fields=True):
  """What a call returned, and how the worker then was."""

  id: int
  value: Any
  role: str = ""
  stats: Any = None
  arrays: exchange.ArrayFile | None = None


class Failure(msgspec.Struct, tag="failure", forbid_unknown_fields=True):
  """What a call raised."""

  id: int
  error: str
  message: str
  role: str = ""


class Taken(msgspec.Struct, tag="taken", forbid_unknown_fields=True):
  """The controller has opened what came with Reply `id`."""

  id: int


class Tokens(msgspec.Struct, tag="tokens", forbid_unknown_fields=True):
  """Tokens of live calls: (call, ids, log-probabilities, versions)."""

  items: list[tuple[int, list[int], list[float], list[int]]]


class Ping(msgspec.Struct, tag="ping", forbid_unknown_fields=True):
  """Are you there?"""

  id: int


class Pong(msgspec.Struct, tag="pong", forbid_unknown_fields=True):
  """Yes."""

  id: int
  stats: Any = None


Message = Hello | Call | Cancel | Reply | Failure | Taken | Tokens | Ping | Pong


@dataclasses.dataclass(frozen=True)
class _Beside:
  """Stands for an array that came through shared memory."""

  name: str


def _ext(code: int, data: memoryview) -> Any:
  if code == _SHARED_ARRAY:
    return _Beside(str(data, "ascii"))
  if code != _INLINE_ARRAY:
    raise FrameError(f"a value of unknown kind {code}")
  dtype, shape, raw = msgspec.msgpack.decode(
    data, type=tuple[str, tuple[int, ...], bytes]
  )
  return np.frombuffer(raw, _dtype(dtype)).reshape(shape).copy()


def _dtype(name: str) -> np.dtype:
  dtype = np.dtype(name)
  if dtype.kind not in "biufc":
    raise FrameError(f"an array of dtype {name!r}")
  return dtype


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message, ext_hook=_ext)


def pack(value: Any, beside: dict[str, np.ndarray]) -> Any:
  """Returns a value as msgpack can hold it.

  Args:
    value: what is sent.
    beside: arrays too large to send inline are put here.

  Raises:
    FrameError: a type that must not cross.
  """
  if value is None or isinstance(value, bool | int | float | str | bytes):
    return value
  if isinstance(value, np.generic):
    return value.item()
  if isinstance(value, np.ndarray) or hasattr(value, "__array__"):
    return _pack_array(np.asarray(value), beside)
  if isinstance(value, list):
    return [pack(x, beside) for x in value]
  if isinstance(value, tuple):
    return {f"{_TAG}tuple": [pack(x, beside) for x in value]}
  if isinstance(value, exchange.Shared):
    return pack(value.file, beside)
  if isinstance(value, Mapping):
    for key in value:
      if not isinstance(key, str) or key.startswith(_TAG):
        raise FrameError(f"a mapping with the key {key!r}")
    return {k: pack(v, beside) for k, v in value.items()}
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  name = type(value).__name__
  if dataclasses.is_dataclass(value) and _TYPES.get(name):
    fields = dataclasses.fields(value)
    body = {f.name: pack(getattr(value, f.name), beside) for f in fields}
    return {_TAG + name: body}
  raise FrameError(f"a {type(value).__name__} cannot be sent")


def _pack_array(x: np.ndarray, beside: dict[str, np.ndarray]) -> Any:
  if x.dtype.kind not in "biufc":
    raise FrameError(f"an array of dtype {x.dtype} cannot be sent")
  if x.nbytes > INLINE:
    name = f"a{len(beside)}"
    beside[name] = x
    return msgspec.msgpack.Ext(_SHARED_ARRAY, name.encode())
  body = (x.dtype.str, x.shape, x.tobytes())
  return msgspec.msgpack.Ext(_INLINE_ARRAY, msgspec.msgpack.encode(body))


def unpack(value: Any, beside: Mapping[str, np.ndarray]) -> Any:
  """The inverse of `pack`.

  Raises:
    FrameError: an unknown type, or an array that did not come.
  """
  if isinstance(value, list):
    return [unpack(x, beside) for x in value]
  if isinstance(value, _Beside):
    if value.name not in beside:
      raise FrameError(f"array {value.name!r} did not come with its frame")
    return beside[value.name]
  if not isinstance(value, dict):
    return value
  tag = next(iter(value), "")
  if not (isinstance(tag, str) and tag.startswith(_TAG)):
    return {k: unpack(v, beside) for k, v in value.items()}
  name, body = tag[len(_TAG) :], unpack(value[tag], beside)
  if len(value) != 1 or (name != "tuple" and name not in _TYPES):
    raise FrameError(f"a value of unknown type {name!r}")
  try:
    if name == "tuple":
      return tuple(body)
    return getattr(importlib.import_module(_TYPES[name]), name)(**body)
  except (TypeError, ValueError) as error:
    raise FrameError(f"not a {name}: {error}") from None


def raised(failure: Failure) -> Exception | None:
  """The error that a Failure tells of; None where it is not in the table."""
  module = ERRORS.get(failure.error)
  if module is None:
    return None
  return getattr(importlib.import_module(module), failure.error)(
    failure.message
  )


def encode(message: Message) -> bytes:
  """A message as a frame; its values are packed already.

  Raises:
    FrameError: it is larger than a frame may be.
  """
  body = _encoder.encode(message)
  if len(body) > MAX_FRAME:
    raise FrameError(f"a message of {len(body)} bytes, at most {MAX_FRAME}")
  return _HEAD.pack(_MAGIC, len(body)) + body


def decode(body: bytes) -> Message:
  """The message of a frame's body.

  Raises:
    FrameError: it is none.
  """
  try:
    return _decoder.decode(body)
  except (
    msgspec.MsgspecError,
    TypeError,
    ValueError,
    RecursionError,
    UnicodeDecodeError,
  ) as error:
    line = " ".join(str(error).split())[:200]
    raise FrameError(f"not a message: {line}") from None


async def read(reader: asyncio.StreamReader) -> Message:
  """The next message.

  Raises:
    EOFError: the peer has closed, or died in the middle of a frame.
    FrameError: what came is no message.
  """
  try:
    magic, size = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if magic != _MAGIC:
      raise FrameError(f"a frame begins with {magic:#010x}, not {_MAGIC:#010x}")
    if size > MAX_FRAME:
      raise FrameError(f"a frame of {size} bytes, at most {MAX_FRAME}")
    body = await reader.readexactly(size)
  except (asyncio.IncompleteReadError, ConnectionError):
    raise EOFError("the connection ended") from None
  return decode(body)
