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


def test_sample_refuses_arrays_that_do_not_belong_together():
  arrays = dict(
    execution_id="g/0",
    group_id="g",
    runs=(np.arange(2), np.arange(0), np.arange(2, 5)),
    logprobs=[-1, -2],
    versions=[0, 0],
  )
  sample = types.Sample(trained=[1, 4], **arrays)
  np.testing.assert_array_equal(sample.ids, np.arange(5))
  np.testing.assert_array_equal(sample.mask, [0, 1, 0, 0, 1])
  for trained, said in [
    ([1], "differ in length"),
    ([0, 4], "position 0 .* no predictor"),
    ([1, 5], "position 5 is not in a sample of 5 ids"),
    ([2, 2], "must grow"),
    ([3, 1], "must grow"),
  ]:
    with pytest.raises(ValueError, match=said):
      types.Sample(trained=trained, **arrays)
  with pytest.raises(ValueError, match="differ in length"):
    types.Sample(trained=[1, 4], weights=[1.0], **arrays)


def test_num_sampled_counts_completions_of_all_calls():
  execution = types.Execution(
    execution_id="g/0",
    group_id="g",
    index=0,
    task_id="t",
    calls=(_call(), _call(call_id="1")),
  )
  assert execution.num_sampled == 4
