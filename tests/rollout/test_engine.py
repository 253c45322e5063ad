"""Requests are checked before an engine sees them."""

import dataclasses

import numpy as np
import pytest

from gyre.rollout import engine

_GOOD = engine.Request(ids=[1, 2, 3], max_new_tokens=5, stop_ids=(7,))


def _check(**changes):
  request = dataclasses.replace(_GOOD, **changes)
  return engine.check_request(request, vocab_size=10, max_context=8)


def test_good_requests_pass_as_int32():
  ids = _check(ids=np.array([1, 2, 3], np.int64))
  assert ids.dtype == np.int32
  assert ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"ids": []}, "shape"),
    ({"ids": [[1, 2]]}, "shape"),
    ({"ids": [1.5]}, "dtype"),
    ({"ids": [1, 10]}, r"\[1, 10\], the vocabulary has 10"),
    ({"ids": [-1, 3]}, r"\[-1, 3\]"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"max_new_tokens": 6}, "3 prompt and 6 new tokens exceed .* 8"),
    ({"temperature": -1.0}, "temperature is -1"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"top_p": 0.0}, "top_p 0.0"),
    ({"top_p": 1.5}, "top_p 1.5"),
    ({"top_k": -1}, "top_k is -1"),
    ({"seed": -1}, "seed -1"),
    ({"seed": 1 << 32}, "seed 4294967296"),
    ({"stop_ids": (10,)}, "stop id 10"),
  ],
)
def test_bad_requests_are_rejected(changes, message):
  with pytest.raises(engine.Rejected, match=message):
    _check(**changes)
