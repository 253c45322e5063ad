"""The checks of audited.py fail for whatever is not as it was sampled."""

import dataclasses

import audited
import numpy as np
import pytest

from gyre.trajectory import select
from gyre.trajectory import tree as tree_lib
from gyre.types import Call

NAMES = dict(execution_id="g/0", group_id="g", finish_reason="stop")


def call(number, prompt, completion, **more):
  seed = more.pop("seed", number)
  n = len(prompt)
  return Call(
    **NAMES,
    call_id=f"{number:04d}",
    prompt_ids=prompt,
    completion_ids=completion,
    logprobs=[
      audited.logprob_of(seed, n + i, t) for i, t in enumerate(completion)
    ],
    versions=[3 + i % 2 for i in range(len(completion))],
    **more,
  )


# A turn, its retry that begins alike, what goes on from the first, and a
# sub-agent with a history of its own.
CALLS = (
  call(0, [1, 2], [5, 6, 7]),
  call(1, [1, 2], [5, 6, 8]),
  call(2, [1, 2, 5, 6, 7, 3], [9, 4], parent_hint="0000", boundary="strict"),
  call(3, [2, 2], [5, 5], role="sub_agent"),
)


def selected(mode):
  return select.select(
    tree_lib.build(CALLS),
    execution_id="g/0",
    group_id="g",
    mode=mode,
    max_samples=None,
  ).samples


def _changed(how):
  """Something else in the first sample."""
  return lambda samples: [
    dataclasses.replace(samples[0], **how(samples[0])),
    *samples[1:],
  ]


def _values(name, how):
  """Another value at the last trained token."""

  def change(sample):
    values = getattr(sample, name).copy()
    values[-1] = how(values[-1])
    return {name: values}

  return _changed(change)


def _other_id(at):
  def change(sample):
    ids = sample.ids.copy()
    ids[at(sample)] += 1
    return {"runs": (ids,)}

  return _changed(change)


def _last(sample):
  return sample.trained[-1]


def _context(sample):
  return next(
    i for i in range(1, sample.length) if i not in sample.trained.tolist()
  )


def _less(sample):
  names = ("trained", "logprobs", "versions")
  return {name: getattr(sample, name)[:-1] for name in names}


def _more(sample):
  at = int(np.searchsorted(sample.trained, _context(sample)))
  values = {"trained": _context(sample), "logprobs": 0.0, "versions": 3}
  return {
    name: np.insert(getattr(sample, name), at, value)
    for name, value in values.items()
  }


CHANGES = {
  "an id of what was sampled": _other_id(_last),
  "an id of its context": _other_id(_context),
  "the last bit of a logprob": _values(
    "logprobs", lambda x: np.nextafter(x, np.float32(1))
  ),
  "a version": _values("versions", lambda x: x + 1),
  "a token left out": _changed(_less),
  "context in the loss": _changed(_more),
  "a sample left out": lambda samples: samples[1:],
  "a sample taken twice": lambda samples: [*samples, samples[0]],
}


# By leaves a token may be trained with any number of paths.
NO_FAULT = ("leaf", "a sample taken twice")


@pytest.mark.parametrize(
  "mode, change",
  [(m, c) for m in select.MODES for c in CHANGES if (m, c) != NO_FAULT],
)
def test_what_is_not_as_it_was_sampled_fails(mode, change):
  samples = CHANGES[change](selected(mode))
  with pytest.raises(AssertionError):
    audited.check_samples(CALLS, samples, mode)


def test_a_retry_counts_in_one_mode_only():
  """Its opening was sampled twice: the modes differ, so do the checks."""
  with pytest.raises(AssertionError):
    audited.check_samples(CALLS, selected("once"), "multiplicity")
  with pytest.raises(AssertionError):
    audited.check_samples(CALLS, selected("multiplicity"), "once")


def test_branches_and_roles_are_those_that_happened():
  tree = audited.check(CALLS, ["main", "main", "sub_agent"])
  assert len(tree.leaves()) == 3
  with pytest.raises(AssertionError):
    audited.check(CALLS, ["main", "sub_agent"])
  with pytest.raises(AssertionError):
    audited.check(CALLS, ["main", "main", "main_summary"])
  # It claims to go on from a call whose ids it does not have.
  wrong = dataclasses.replace(CALLS[2], parent_hint="0001")
  with pytest.raises(AssertionError):
    audited.check_tree((*CALLS[:2], wrong, CALLS[3]))
