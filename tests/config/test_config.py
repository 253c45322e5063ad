"""The configuration is checked once, at the edge, by name."""

import dataclasses
import math

import ml_collections
import pytest

from gyre import config

TINY = {"model": {"source": "init", "hf_config": {"model_type": "llama"}}}


def _with(**sections):
  return {**TINY, **sections}


def test_defaults_resolve_and_are_frozen():
  resolved = config.from_config_dict(TINY)
  assert resolved.rollout.group_size == 8
  with pytest.raises(dataclasses.FrozenInstanceError):
    resolved.run.seed = 3


def test_config_dict_and_mapping_give_the_same():
  values = _with(run={"seed": 7}, sandbox={"backends": ("process",)})
  assert config.from_config_dict(
    ml_collections.ConfigDict(values)
  ) == config.from_config_dict(values)


def test_to_dict_round_trips():
  resolved = config.from_config_dict(_with(optim={"lr": 3e-4}))
  assert config.from_config_dict(resolved.to_dict()) == resolved


@pytest.mark.parametrize(
  "sections,needle",
  [
    ({"optim": {"learning_rate": 1.0}}, "optim.learning_rate"),
    ({"optimizer": {}}, "optimizer"),
    ({"run": {"steps": "many"}}, "run.steps"),
    ({"run": {"steps": 2.5}}, "run.steps"),
    ({"run": {"steps": True}}, "run.steps"),
    ({"run": {"deterministic": 1}}, "run.deterministic"),
    ({"run": {"seed": -1}}, "run.seed"),
    ({"agent": {"examples_of": "site"}}, "agent.examples_of"),
    (
      {
        "agent": {"examples_of": "kind", "examples": 1},
        "warm_start": {"any_site": True},
      },
      "warm_start.any_site",
    ),
    (
      {
        "agent": {"examples_of": "kind"},
        "tasks": {"taskset": "harbor", "path": "x"},
      },
      "agent.examples_of",
    ),
    ({"learner": {"loss": "ppo"}}, "learner.loss"),
    ({"sandbox": {"backends": "process"}}, "sandbox.backends"),
    ({"sandbox": {"backends": ()}}, "sandbox.backends"),
    ({"rollout": {"top_p": 0.9}}, "rollout.top_p"),
    ({"rollout": {"top_k": 5}}, "rollout.top_k"),
    ({"rollout": {"temperature": 0.0}}, "rollout.temperature"),
    ({"rollout": {"group_size": 0}}, "rollout.group_size"),
    ({"model": {"source": "hf"}}, "model.path"),
    ({"model": {"source": "init"}}, "model.hf_config"),
    ({"learner": {"row_tokens": 64}}, "learner.row_tokens"),
    ({"run": {"steps": 0}}, "run.steps"),
    ({"eval": {"every": -1}}, "eval.every"),
    ({"optim": {"lr": math.nan}}, "optim.lr"),
    ({"optim": {"lr": -1.0}}, "optim.lr"),
    ({"eval": {"samples": 0}}, "eval.samples"),
    ({"warm_start": {"steps": -1}}, "warm_start.steps"),
    ({"learner": {"kl_coef": -0.1}}, "learner.kl_coef"),
    ({"rollout": {"resample_limit": -1}}, "rollout.resample_limit"),
    ({"elastic": {"cells": 1_000_000}}, "elastic.cells 1000000"),
    ({"elastic": {"phi": math.nan}}, "elastic.phi"),
    ({"elastic": {"phi": math.inf}}, "elastic.phi"),
    ({"elastic": {"phi": 0.3}}, "the nearest elastic.phi is 0.25"),
    ({"elastic": {"mu": 1_000_000}}, "elastic.mu"),
    ({"elastic": {"policy": "fast"}}, "elastic.policy"),
    ({"elastic": {"max_staleness": 0, "mu": 2}}, "elastic.max_staleness"),
    ({"elastic": {"cells": 2, "standalone": 2}}, "elastic.standalone 2"),
    ({"rollout": {"engines": -1}}, "rollout.engines"),
    (
      {"rollout": {"engines": 3}, "mesh": {"data": 2}},
      "rollout.engines 3 need a device each, a cell has 2",
    ),
    ({"elastic": {"cells": 2, "trainer": True}}, "elastic.trainer"),
    ({"elastic": {"resize": {"1": 1}}}, "elastic.resize"),
    *(
      ({"mesh": {"data": 2}, "elastic": {"resize": wrong}}, "elastic.resize")
      for wrong in ({"x": 1}, {"²": 1}, {"1": 0}, {"1": 3}, {"1": True})
    ),
    (
      {"mesh": {"data": 2, "fsdp": 2}, "elastic": {"resize": {"1": 3}}},
      "3 devices are no multiple of mesh.data times mesh.tensor, 2",
    ),
    ({"trajectory": {"mode": "twice"}}, "trajectory.mode"),
    ({"trajectory": {"max_samples": -1}}, "trajectory.max_samples"),
    ({"trajectory": {"token_budget": -1}}, "trajectory.token_budget"),
    ({"trajectory": {"roles": ()}}, "trajectory.roles"),
    ({"trajectory": {"roles": ("main", "main")}}, "trajectory.roles"),
    (
      {"trajectory": {"unbiased": True, "max_samples": 3}},
      "trajectory.max_samples 3",
    ),
    (
      {"trajectory": {"unbiased": True, "token_budget": 9}},
      "trajectory.token_budget",
    ),
    (
      {
        "trajectory": {"unbiased": True},
        "learner": {"aggregation": "token_mean"},
      },
      "learner.aggregation",
    ),
    (
      {"trajectory": {"unbiased": True}, "learner": {"loss": "gspo"}},
      "learner.loss",
    ),
    ({"agent": {"max_context": 1 << 20}}, "agent.max_context"),
    (
      {"learner": {"aggregation": "seq_mean_token_sum_norm"}},
      "learner.sum_norm_len",
    ),
  ],
)
def test_mistakes_are_named_in_one_line(sections, needle):
  with pytest.raises(config.ConfigError) as error:
    config.from_config_dict(_with(**sections))
  assert needle in str(error.value)
  assert "\n" not in str(error.value)


def test_integers_are_accepted_where_a_float_is_meant():
  assert config.from_config_dict(_with(optim={"lr": 1})).optim.lr == 1.0
