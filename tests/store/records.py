"""Executions and samples to store, and all that they hold, to compare."""

import dataclasses

import numpy as np

from gyre.types import Call, Execution, Sample


def bits(x):
  """Nested plain form in which arrays are (dtype, shape, bytes)."""
  if isinstance(x, np.ndarray):
    return (str(x.dtype), x.shape, x.tobytes())
  if dataclasses.is_dataclass(x):
    return {
      f.name: bits(getattr(x, f.name)) for f in dataclasses.fields(type(x))
    }
  if isinstance(x, dict):
    return {k: bits(v) for k, v in x.items()}
  if isinstance(x, list | tuple):
    return [bits(v) for v in x]
  return x


def in_one_run(samples):
  """How a path is cut into runs is not kept."""
  return [dataclasses.replace(s, runs=(s.ids,)) for s in samples]


def chain(execution_id="g/0", turns=50, prompt=100):
  rng = np.random.default_rng(0)
  ids, calls = rng.integers(0, 999, prompt), []
  for i in range(turns):
    new = rng.integers(0, 999, 7)
    call = Call(
      execution_id=execution_id,
      group_id=execution_id.split("/")[0],
      call_id=f"{i}",
      parent_hint=f"{i - 1}" if i else None,
      prompt_ids=ids,
      completion_ids=new,
      logprobs=-rng.random(7),
      versions=[1] * 7,
      finish_reason="stop",
    )
    calls.append(call)
    ids = np.concatenate([ids, new, rng.integers(0, 999, 3)])
  return Execution(execution_id, call.group_id, 0, "t", calls=tuple(calls))


def sample_of(execution, **changes):
  """The last call of an execution."""
  last = execution.calls[-1]
  n = len(last.completion_ids)
  sample = Sample(
    execution_id=execution.execution_id,
    group_id=execution.group_id,
    runs=(last.prompt_ids, last.completion_ids),
    trained=len(last.prompt_ids) + np.arange(n),
    logprobs=last.logprobs,
    versions=last.versions,
  )
  return dataclasses.replace(sample, **changes)
