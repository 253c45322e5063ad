import numpy as np
import pytest
import safetensors.numpy

from gyre.store import arrays


def test_round_trip_and_library(tmp_path):
  rng = np.random.default_rng(0)
  x = {
    "a": rng.normal(size=(3, 4)).astype(np.float32),
    "b.t": np.arange(12, dtype=np.int32).reshape(3, 4).T,
    "empty": np.zeros((0, 2), np.float16),
  }
  arrays.save_arrays(tmp_path / "x.safetensors", x, {"version": "3"})
  got, metadata = arrays.load_arrays(tmp_path / "x.safetensors")
  assert metadata == {"version": "3"}
  library = safetensors.numpy.load_file(tmp_path / "x.safetensors")
  for name, value in x.items():
    for other in (got, library):
      assert other[name].dtype == value.dtype
      np.testing.assert_array_equal(other[name], value)


def test_errors_name_the_file(tmp_path):
  with pytest.raises(arrays.ArraysError, match=r"none\.safetensors is missing"):
    arrays.load_arrays(tmp_path / "none.safetensors")
  (tmp_path / "bad.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
  with pytest.raises(arrays.ArraysError, match=r"bad\.safetensors"):
    arrays.load_arrays(tmp_path / "bad.safetensors")
