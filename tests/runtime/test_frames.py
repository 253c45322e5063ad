"""Frames: what may cross does so whole, everything else is refused."""

import asyncio
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gyre import types
from gyre.rollout import engine
from gyre.runtime import exchange, frames, remote

_DTYPES = st.sampled_from(["<f4", "<f8", "<i4", "<i8", "|u1", "|b1", "<f2"])
_ARRAYS = _DTYPES.flatmap(
  lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)
_VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(2**63), 2**63 - 1)
  | st.floats(allow_nan=False)
  | st.text(max_size=8)
  | st.binary(max_size=8)
  | _ARRAYS,
  lambda x: (
    st.lists(x, max_size=3)
    | st.lists(x, max_size=3).map(tuple)
    | st.dictionaries(
      st.text(max_size=5).filter(lambda k: not k.startswith("$")),
      x,
      max_size=3,
    )
  ),
  max_leaves=8,
)


def cross(value):
  """A value as the other side gets it."""
  beside = {}
  call = frames.Call(1, "m", [frames.pack(value, beside)])
  frame = frames.encode(call)
  got = frames.decode(frame[8:])
  return frames.unpack(got.args, beside)[0]


def assert_same(a, b):
  assert type(a) is type(b)
  if isinstance(a, np.ndarray):
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(a, b)
  elif isinstance(a, list | tuple):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
      assert_same(x, y)
  elif isinstance(a, dict):
    assert a.keys() == b.keys()
    for k in a:
      assert_same(a[k], b[k])
  else:
    assert a == b


@settings(max_examples=150, deadline=None)
@given(_VALUES)
def test_values_cross_whole(value):
  assert_same(cross(value), value)


def test_requests_completions_and_snapshots_cross():
  request = engine.Request(
    ids=np.arange(4, dtype=np.int32), max_new_tokens=3, stop_ids=(1, 2), seed=9
  )
  got = cross(request)
  assert isinstance(got, engine.Request)
  assert (got.stop_ids, got.seed, got.max_new_tokens) == ((1, 2), 9, 3)
  np.testing.assert_array_equal(got.ids, request.ids)
  snapshot = types.Snapshot(3, "/x/y", {"a": "b"})
  assert cross(snapshot) == snapshot
  assert cross(engine.EngineStats(running=2)) == engine.EngineStats(running=2)


def test_large_arrays_go_beside():
  beside = {}
  x = np.arange(frames.INLINE, dtype=np.int32)
  packed = frames.pack({"x": x, "small": x[:3]}, beside)
  assert len(beside) == 1
  assert len(frames.encode(frames.Call(1, "m", [packed]))) < 200
  got = frames.decode(frames.encode(frames.Call(1, "m", [packed]))[8:])
  np.testing.assert_array_equal(frames.unpack(got.args, beside)[0]["x"], x)
  with pytest.raises(frames.FrameError, match="'a0' did not come"):
    frames.unpack(got.args, {})


class _Odd:
  pass


@pytest.mark.parametrize(
  "value,what",
  [
    (_Odd(), "_Odd cannot be sent"),
    ({1: 2}, "key 1"),
    ({"$tuple": []}, "key '[$]tuple'"),
    (np.array([object()]), "dtype object"),
    ({1, 2}, "set cannot be sent"),
    (types.Outcome("scored"), "Outcome cannot be sent"),
  ],
)
def test_what_must_not_cross_is_refused_by_the_sender(value, what):
  with pytest.raises(frames.FrameError, match=what):
    frames.pack(value, {})


def _ext(dtype, shape, raw):
  body = msgspec.msgpack.encode((dtype, shape, raw))
  return msgspec.msgpack.Ext(1, body)


@pytest.mark.parametrize(
  "value",
  [
    _ext("O", (1,), b"\0" * 8),
    _ext("<f4", (3,), b"\0" * 4),
    _ext("<f4", (-1, 1), b"\0" * 5),
    _ext("nonsense", (1,), b"\0"),
    msgspec.msgpack.Ext(1, b"\xc1"),
    msgspec.msgpack.Ext(77, b"x"),
    {"$Popen": {"args": ["true"]}},
    {"$Request": {"nonsense": 1}},
    {"$Request": 5},
    {"$tuple": 5},
    {"$Snapshot": {"version": 1, "path": ""}, "more": 1},
  ],
)
def test_values_made_up_are_refused_by_the_receiver(value):
  frame = frames.encode(frames.Call(1, "m", [value]))
  with pytest.raises(frames.FrameError):
    frames.unpack(frames.decode(frame[8:]).args, {})


def read(data):
  async def main():
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await frames.read(reader)

  return asyncio.run(main())


def test_frames_are_read_or_refused():
  frame = frames.encode(frames.Ping(3))
  assert read(frame) == frames.Ping(3)
  for cut in range(len(frame)):
    with pytest.raises(EOFError):
      read(frame[:cut])
  with pytest.raises(frames.FrameError, match="begins with"):
    read(b"GET / HTTP/1.1\r\n\r\n")
  huge = struct.pack(">II", 0x47595245, frames.MAX_FRAME + 1)
  with pytest.raises(frames.FrameError, match=str(frames.MAX_FRAME + 1)):
    read(huge)
  for body in (
    {"type": "call", "id": 1, "method": "m", "args": [], "more": 1},
    {"type": "call", "id": "1", "method": "m", "args": []},
    {"type": "nonsense"},
    [1, 2],
  ):
    with pytest.raises(frames.FrameError, match="not a message"):
      frames.decode(msgspec.msgpack.encode(body))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_noise_is_refused(noise):
  with pytest.raises(frames.FrameError):
    frames.decode(noise)


@pytest.mark.parametrize("answered", [False, True])
def test_a_caller_that_goes_leaves_nothing_behind(tmp_path, answered):
  """Neither a call at work, nor what came with an answer just then."""

  async def main():
    sent = bytearray()

    class Writer:
      write = sent.extend

    link = remote.Link("cell 0", tmp_path)
    link.connect(Writer())
    asked = asyncio.ensure_future(link.build("emulated", {}))
    await asyncio.sleep(0)
    link.receive(frames.Reply(1, frames.pack({}, {})))
    await asked
    asked = asyncio.ensure_future(link.call("sums"))
    await asyncio.sleep(0)
    if answered:
      file = exchange.ArrayFile("/proc/1/fd/1", 1, "")
      link.receive(frames.Reply(2, frames.pack({}, {}), arrays=file))
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
      await asked
    return bytes(sent)

  async def messages(data):
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return [await frames.read(reader) for _ in range(3)]

  *_, last = asyncio.run(messages(asyncio.run(main())))
  assert last == (frames.Taken(2) if answered else frames.Cancel(2))
