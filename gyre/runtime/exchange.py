"""Arrays between processes of one machine: shared memory, hashed, no pickle.

A file in safetensors format is written on tmpfs and loses its name at once;
what is left is an open descriptor, that other processes of the same user open
by way of /proc. So the memory goes when its last holder ends, however it
ends. Who reads compares the content with the hash that came with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import uuid
from collections.abc import Iterator, Mapping

import numpy as np
import safetensors
import safetensors.numpy

from gyre.runtime.cell import CellError
from gyre.store import manifest

TMPFS = pathlib.Path("/dev/shm")
_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


class ExchangeError(CellError):
  """Arrays of another process cannot be had; the message is one line."""


@dataclasses.dataclass(frozen=True)
class ArrayFile:
  """What another process needs to know to read arrays.

  Attributes:
    path: "/proc/PID/fd/N" of a process that holds them.
    size: bytes of the file.
    sha256: of its content (hex).
  """

  path: str
  size: int
  sha256: str


_DTYPES = {
  "BOOL": np.bool_,
  "U8": np.uint8,
  "I8": np.int8,
  "U16": np.uint16,
  "I16": np.int16,
  "U32": np.uint32,
  "I32": np.int32,
  "U64": np.uint64,
  "I64": np.int64,
  "F16": np.float16,
  "F32": np.float32,
  "F64": np.float64,
  "C64": np.complex64,
}


def _views(content: np.ndarray) -> dict[str, np.ndarray]:
  """The arrays of a safetensors file, as views of its bytes.

  The library would map the file and copy, which for large arrays is most of
  what an exchange costs.
  """
  head = 8 + int(content[:8].view("<u8")[0])
  out = {}
  for name, about in json.loads(bytes(content[8:head])).items():
    if name == "__metadata__":
      continue
    start, end = about["data_offsets"]
    data = content[head + start : head + end]
    out[name] = data.view(_DTYPES[about["dtype"]]).reshape(about["shape"])
  return out


class Shared(Mapping[str, np.ndarray]):
  """Named arrays held in shared memory; read when first looked at.

  Attributes:
    file: by which another process opens them, while this one holds them.
  """

  def __init__(self, fd: int, size: int, sha256: str):
    """Owns the descriptor; `put` and `take` make these."""
    self._fd = fd
    self.file = ArrayFile(f"/proc/{os.getpid()}/fd/{fd}", size, sha256)
    self._arrays: dict[str, np.ndarray] | None = None

  def load(self) -> dict[str, np.ndarray]:
    """Returns copies of the arrays, that lie in one piece of memory.

    Raises:
      ExchangeError: the content is not what was hashed, or was closed.
    """
    if self._fd < 0:
      raise ExchangeError("the shared arrays were closed")
    content = np.empty(self.file.size, np.uint8)
    os.lseek(self._fd, 0, os.SEEK_SET)
    with open(self._fd, "rb", buffering=0, closefd=False) as f:
      done = 0
      while n := f.readinto(memoryview(content)[done:]):
        done += n
    found = hashlib.sha256(content[:done]).hexdigest()
    if found != self.file.sha256:
      raise ExchangeError(
        f"shared arrays are corrupt: sha256 {found[:16]}…, sent "
        f"{self.file.sha256[:16]}…"
      )
    try:
      return _views(content)
    except (IndexError, KeyError, TypeError, ValueError) as error:
      raise ExchangeError(f"shared arrays cannot be read: {error}") from None

  def close(self) -> None:
    """Lets go of the memory; again is fine."""
    fd, self._fd = self._fd, -1
    if fd >= 0:
      os.close(fd)

  def __del__(self):
    self.close()

  def _read(self) -> dict[str, np.ndarray]:
    if self._arrays is None:
      self._arrays = self.load()
    return self._arrays

  def __getitem__(self, name: str) -> np.ndarray:
    return self._read()[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._read())

  def __len__(self) -> int:
    return len(self._read())


def put(
  arrays: Mapping[str, np.ndarray], directory: str | os.PathLike
) -> Shared:
  """Writes arrays into shared memory.

  Args:
    arrays: name -> array (or what numpy takes for one) of a numeric dtype.
    directory: on tmpfs; nothing stays in it.

  Raises:
    ExchangeError: it cannot be written (memory is full), or a dtype that
      safetensors has not.
  """
  named = {k: np.ascontiguousarray(v) for k, v in arrays.items()}
  # ascontiguousarray makes [1] of what has no axes.
  named = {k: v.reshape(np.shape(arrays[k])) for k, v in named.items()}
  path = pathlib.Path(directory) / uuid.uuid4().hex
  try:
    safetensors.numpy.save_file(named, path)
    sha256 = manifest.file_sha256(path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
  except (OSError, KeyError, TypeError, safetensors.SafetensorError) as error:
    line = " ".join(str(error).split())[:200]
    raise ExchangeError(f"cannot share arrays: {line}") from None
  finally:
    path.unlink(missing_ok=True)
  return Shared(fd, os.fstat(fd).st_size, sha256)


def take(file: ArrayFile) -> Shared:
  """Opens arrays that another process holds; it may then let go of them.

  Raises:
    ExchangeError: not a descriptor's path, the process is gone, or a file of
      another size.
  """
  if not _PATH.fullmatch(file.path):
    raise ExchangeError(f"{file.path[:80]!r} is not a descriptor of a process")
  try:
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
  except OSError as error:
    raise ExchangeError(f"cannot open {file.path}: {error.strerror}") from None
  size = os.fstat(fd).st_size
  if size != file.size:
    os.close(fd)
    raise ExchangeError(f"{file.path} has {size} bytes, {file.size} were sent")
  return Shared(fd, size, file.sha256)


def add(
  a: Mapping[str, np.ndarray],
  b: Mapping[str, np.ndarray],
  *,
  in_place: bool = False,
) -> dict[str, np.ndarray]:
  """Gradient sums of two disjoint parts of a batch, as of both.

  By the last part of its name: "version" must agree, "..._max" is the
  larger, all else is added. Sums of nothing have no names.

  Args:
    a, b: by name.
    in_place: the arrays of `a` are overwritten.

  Raises:
    ExchangeError: names, shapes or versions differ.
  """
  if not a or not b:
    return dict(a or b)
  if a.keys() != b.keys():
    raise ExchangeError(f"sums differ in {sorted(a.keys() ^ b.keys())[:3]}")
  out = {}
  for name, x in a.items():
    x, y = np.asarray(x), np.asarray(b[name])
    if x.shape != y.shape:
      raise ExchangeError(f"sums: {name} is {x.shape} and {y.shape}")
    last = name.rpartition(".")[2]
    if last == "version":
      if x != y:
        raise ExchangeError(f"sums of versions {x} and {y}")
      out[name] = x
    else:
      combine = np.maximum if last.endswith("_max") else np.add
      out[name] = combine(x, y, out=x if in_place else None)
  return out
