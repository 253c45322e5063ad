"""Groups to advantages: what is trained, and the control that cannot learn."""

import dataclasses

import numpy as np
import pytest

from gyre import config
from gyre.runtime import metrics
from gyre.runtime.controller import score_groups
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
      "learner": {"row_tokens": 4096, **learner},
      "trajectory": trajectory or {},
    }
  )


def test_groups_without_variance_are_counted_and_left_out():
  scored = score_groups(_groups([(0, 4), (2, 2), (1, 3)]), _config(), 1)
  assert scored.scores == [0, 1, 0.5, 0.5, 0.25, 0.75]
  assert scored.zero_variance == 1
  assert set(scored.advantages) == {"g0/0", "g0/1", "g2/0", "g2/1"}
  assert {s.group_id for s in scored.samples()} == {"g0", "g2"}
  assert len(scored.samples()) == len(scored.trained()) == 4
  assert len(scored.selections) == 6


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
    stats = [s.stats for s in score_groups([group], settings, 1).trained()]
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
  plain = score_groups(groups, _config(advantage=advantage), 3)
  control = _config(advantage=advantage, shuffle_advantages=True)
  out = score_groups(groups, control, 3)
  assert out.scores == plain.scores
  assert out.zero_variance == plain.zero_variance == 1
  assert out.advantages.keys() == plain.advantages.keys()
  assert sorted(out.advantages.values()) == sorted(plain.advantages.values())
  rewards = dict(
    zip([e.execution_id for e in out.executions], out.scores, strict=True)
  )

  def correlation(scored):
    pairs = [(rewards[k], v) for k, v in scored.advantages.items()]
    return np.corrcoef(np.array(pairs).T)[0, 1]

  assert correlation(plain) > 0.5
  assert abs(correlation(out)) < 0.25  # |r| of 160 within 3 sigma
  again = score_groups(groups, control, 3)
  assert again.advantages == out.advantages
  assert score_groups(groups, control, 4).advantages != out.advantages
