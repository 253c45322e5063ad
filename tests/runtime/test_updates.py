"""Groups to advantages: what is trained, and the control that cannot learn."""

import dataclasses

import numpy as np
import pytest

from gyre import config
from gyre.learner.packing import pack
from gyre.runtime import metrics
from gyre.runtime.updates import Update, score_group
from gyre.types import Call, Execution, Group, Outcome


def _execution(group, index, passed):
  name = f"{group}/{index}"
  call = Call(
    execution_id=name,
    group_id=group,
    call_id="0000",
    prompt_ids=[1, 2],
    completion_ids=[3, 4],
    logprobs=[-1.0, -1.0],
    versions=[0, 0],
    finish_reason="stop",
  )
  outcome = Outcome(status="scored", passed=passed, total=4)
  return Execution(name, group, index, "task", calls=(call,), outcome=outcome)


def _groups(table):
  return [
    Group(
      f"g{i}",
      i,
      "task",
      executions=tuple(
        _execution(f"g{i}", j, passed) for j, passed in enumerate(row)
      ),
    )
    for i, row in enumerate(table)
  ]


def _config(trajectory=None, **learner):
  return config.from_config_dict(
    {
      "model": {"hf_config": {"model_type": "qwen3"}},
      "agent": {"max_context": 32, "max_new_tokens": 16},
      "learner": learner,
      "trajectory": trajectory or {},
    }
  )


def _score(groups, settings):
  return [score_group(g, settings) for g in groups]


def test_groups_without_variance_are_counted_and_left_out():
  scored = _score(_groups([(0, 4), (2, 2), (1, 3)]), _config())
  assert [s.scores for s in scored] == [(0, 1), (0.5, 0.5), (0.25, 0.75)]
  assert [s.flat for s in scored] == [False, True, False]
  assert [set(s.advantages) for s in scored] == [
    {"g0/0", "g0/1"},
    set(),
    {"g2/0", "g2/1"},
  ]
  assert [len(s.samples()) for s in scored] == [2, 0, 2]
  assert [len(s.selections) for s in scored] == [2, 2, 2]


@pytest.mark.parametrize("order", [1, -1])
def test_micro_steps_follow_from_the_order_of_consumption(order):
  """Each group in one of them, none overfull, the last as it is."""
  table = np.random.default_rng(1).integers(0, 5, (13, 4)).tolist()
  settings = _config(row_tokens=32, micro_rows=1)
  groups = _score(_groups(table), settings)[::order]
  update, made = Update(settings, row_multiple=2), []
  for group in groups:
    made += update.add(group)
  assert 0 < len(made) < len(groups)
  made += update.rest()
  assert not update.rest()
  names = [name for _, inside in made for name in inside]
  assert names == [g.group.group_id for g in groups]
  for batch, inside in made:
    assert batch.tokens.shape == (2, 32)
    samples = [
      s for g in groups if g.group.group_id in inside for s in g.samples()
    ]
    whole = pack(
      samples,
      {k: v for g in groups for k, v in g.advantages.items()},
      row_tokens=32,
      row_entries=32,
      row_multiple=2,
      fixed=True,
    )
    (expected,) = whole.batches
    for field in dataclasses.fields(batch):
      a, b = getattr(batch, field.name), getattr(expected, field.name)
      np.testing.assert_array_equal(a, b)
  trained, _ = update.samples()
  assert len(trained) == sum(len(g.samples()) for g in groups)


def test_the_configuration_of_trajectories_decides_what_is_trained():
  """Four retries of one prompt: paths, and samples a token."""
  (group,) = _groups([(0, 4)])
  retries = [
    dataclasses.replace(
      execution,
      calls=tuple(
        dataclasses.replace(
          execution.calls[0], call_id=str(i), completion_ids=[3, 4 + i]
        )
        for i in range(4)
      ),
    )
    for execution in group.executions
  ]
  group = dataclasses.replace(group, executions=tuple(retries))

  def counts(**trajectory):
    settings = _config(trajectory=trajectory)
    stats = [s.stats for s in score_group(group, settings).trained()]
    out = metrics.trajectories(stats, settings.trajectory.roles)
    return [
      out[f"trajectory/{k}"]
      for k in ("paths", "tokens_trained", "dropped/main")
    ]

  assert counts() == [8, 10, 0]
  assert counts(max_samples=1) == [2, 4, 6]
  assert counts(mode="multiplicity") == [8, 16, 0]
  assert counts(mode="leaf", max_samples=0) == [8, 16, 0]
  assert counts(token_budget=5) == [4, 6, 4]


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_shuffled_advantages_are_the_same_of_other_executions(advantage):
  rng = np.random.default_rng(0)
  groups = _groups([*rng.integers(0, 5, (20, 8)).tolist(), [1] * 8])
  plain = _score(groups, _config(advantage=advantage))
  control = _config(advantage=advantage, shuffle_advantages=True)
  out = _score(groups, control)
  for a, b in zip(plain, out, strict=True):
    assert a.scores == b.scores and a.flat == b.flat
    assert a.advantages.keys() == b.advantages.keys()
    assert sorted(a.advantages.values()) == sorted(b.advantages.values())

  def correlation(scored):
    pairs = [
      (reward, s.advantages[e.execution_id])
      for s in scored
      for e, reward in zip(s.group.executions, s.scores, strict=True)
      if e.execution_id in s.advantages
    ]
    return np.corrcoef(np.array(pairs).T)[0, 1]

  assert correlation(plain) > 0.5
  assert abs(correlation(out)) < 0.25  # |r| of 160 within 3 sigma
  again = _score(groups, control)
  assert [s.advantages for s in again] == [s.advantages for s in out]
