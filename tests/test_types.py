"""Records refuse arrays that cannot belong together."""

import numpy as np
import pytest

from gyre import types


def _call(**kwargs):
  base = dict(
    execution_id="g/0",
    group_id="g",
    call_id="0",
    prompt_ids=[1, 2],
    completion_ids=[3, 4],
    logprobs=[-1.0, -2.0],
    versions=[0, 0],
    finish_reason="stop",
  )
  return types.Call(**{**base, **kwargs})


def test_call_stores_fixed_dtypes():
  call = _call()
  assert call.prompt_ids.dtype == np.int32
  assert call.logprobs.dtype == np.float32
  assert call.versions.dtype == np.int32


@pytest.mark.parametrize(
  "field,value", [("logprobs", [-1.0]), ("versions", [0, 0, 0])]
)
def test_call_refuses_misaligned_arrays(field, value):
  with pytest.raises(ValueError, match="2 completion ids"):
    _call(**{field: value})


def test_sample_refuses_misaligned_arrays_and_a_trained_first_token():
  arrays = dict(
    execution_id="g/0",
    group_id="g",
    ids=np.arange(3, dtype=np.int32),
    logprobs=np.zeros(3, np.float32),
    versions=np.zeros(3, np.int32),
  )
  types.Sample(mask=np.array([False, True, True]), **arrays)
  with pytest.raises(ValueError, match="differ in length"):
    types.Sample(mask=np.array([False, True]), **arrays)
  with pytest.raises(ValueError, match="no predictor"):
    types.Sample(mask=np.array([True, True, True]), **arrays)


def test_num_sampled_counts_completions_of_all_calls():
  execution = types.Execution(
    execution_id="g/0",
    group_id="g",
    index=0,
    task_id="t",
    calls=(_call(), _call(call_id="1")),
  )
  assert execution.num_sampled == 4
