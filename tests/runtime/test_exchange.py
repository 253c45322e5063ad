"""Arrays through shared memory: whole or refused, and nothing left behind."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from gyre.runtime import exchange

_READ = """
import sys
from gyre.runtime import exchange
file = exchange.ArrayFile(sys.argv[1], int(sys.argv[2]), sys.argv[3])
print(float(exchange.take(file)["x"].sum()))
"""


def named():
  return {
    "x": np.arange(1 << 16, dtype=np.float32).reshape(256, -1),
    "scalar": np.asarray(3, np.int64),
    "none": np.zeros((0, 4), np.float64),
    "turned": np.arange(6, dtype=np.int32).reshape(2, 3).T,
  }


def test_another_process_reads_what_has_no_name(tmp_path):
  shared = exchange.put(named(), tmp_path)
  assert not list(tmp_path.iterdir())
  f = shared.file
  done = subprocess.run(
    [sys.executable, "-c", _READ, f.path, str(f.size), f.sha256],
    capture_output=True,
    text=True,
    check=True,
  )
  assert float(done.stdout) == float(named()["x"].sum())


def test_arrays_come_back_whole_and_outlive_their_maker(tmp_path):
  made = exchange.put(named(), tmp_path)
  taken = exchange.take(made.file)
  made.close()
  made.close()
  assert taken.keys() == named().keys()
  for name, x in named().items():
    assert taken[name].dtype == x.dtype and taken[name].shape == x.shape
    np.testing.assert_array_equal(taken[name], x)
  with pytest.raises(exchange.ExchangeError, match="closed"):
    made.load()


def test_descriptors_are_let_go(tmp_path):
  before = set(os.listdir("/proc/self/fd"))
  for _ in range(20):
    made = exchange.put(named(), tmp_path)
    exchange.take(made.file).load()
  del made
  gc.collect()
  assert set(os.listdir("/proc/self/fd")) == before


def test_a_flipped_bit_another_size_and_other_paths_are_refused(tmp_path):
  shared = exchange.put(named(), tmp_path)
  fd = os.open(shared.file.path, os.O_RDWR)
  where = shared.file.size // 2
  old = os.pread(fd, 1, where)[0]
  os.pwrite(fd, bytes([old ^ 4]), where)
  os.close(fd)
  with pytest.raises(exchange.ExchangeError, match="corrupt"):
    exchange.take(shared.file).load()
  file = shared.file
  longer = exchange.ArrayFile(file.path, file.size + 1, file.sha256)
  with pytest.raises(exchange.ExchangeError, match=str(file.size + 1)):
    exchange.take(longer)
  for path in ("/etc/passwd", "/proc/self/fd/1", "/proc/1/fd/../mem", ""):
    with pytest.raises(exchange.ExchangeError, match="not a descriptor"):
      exchange.take(exchange.ArrayFile(path, 1, ""))
  shared.close()
  with pytest.raises(exchange.ExchangeError, match="cannot open"):
    exchange.take(file)


def test_what_cannot_be_shared_is_refused(tmp_path):
  with pytest.raises(exchange.ExchangeError, match="cannot share"):
    exchange.put({"x": np.array(["text"])}, tmp_path)
  with pytest.raises(exchange.ExchangeError, match="cannot share"):
    exchange.put(named(), tmp_path / "missing")


def test_sums_are_added_by_name():
  a = {
    "grads.w": np.float32([1, 2]),
    "counts.staleness_max": np.int32(3),
    "version": np.int32(4),
  }
  b = {
    "grads.w": np.float32([10, 20]),
    "counts.staleness_max": np.int32(1),
    "version": np.int32(4),
  }
  got = exchange.add(a, b)
  np.testing.assert_array_equal(got["grads.w"], [11, 22])
  assert (got["counts.staleness_max"], got["version"]) == (3, 4)
  w = a["grads.w"]
  assert exchange.add(a, b, in_place=True)["grads.w"] is w
  np.testing.assert_array_equal(w, [11, 22])
  assert exchange.add({}, b) == b and exchange.add(a, {}) == a
  with pytest.raises(exchange.ExchangeError, match="4 and 5"):
    exchange.add(a, b | {"version": np.int32(5)})
  with pytest.raises(exchange.ExchangeError, match="more"):
    exchange.add(a, b | {"more": np.int32(5)})
  with pytest.raises(exchange.ExchangeError, match=r"\(2,\) and \(3,\)"):
    exchange.add(a, b | {"grads.w": np.zeros(3, np.float32)})
