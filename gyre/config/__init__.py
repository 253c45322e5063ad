"""ConfigDict -> frozen dataclasses, checked once, at the edge.

A configuration file defines `get_config() -> ml_collections.ConfigDict` with
the sections of `Config`. Everything behind `from_config_dict` is typed.
"""

from gyre.config.checks import check
from gyre.config.reading import config_dict, from_config_dict
from gyre.config.sections import (
  Agent,
  Checkpoint,
  Config,
  ConfigError,
  Elastic,
  Eval,
  Harness,
  Learner,
  Mesh,
  Model,
  Optim,
  Rollout,
  Run,
  Sandbox,
  Tasks,
  Tokenizer,
  Trajectory,
  WarmStart,
)

__all__ = [
  "Agent",
  "Checkpoint",
  "Config",
  "ConfigError",
  "Elastic",
  "Eval",
  "Harness",
  "Learner",
  "Mesh",
  "Model",
  "Optim",
  "Rollout",
  "Run",
  "Sandbox",
  "Tasks",
  "Tokenizer",
  "Trajectory",
  "WarmStart",
  "check",
  "config_dict",
  "from_config_dict",
]
