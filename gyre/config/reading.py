"""ConfigDict -> frozen dataclasses, with a name for whatever is wrong."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal

import ml_collections

from gyre.config.checks import check
from gyre.config.sections import Config, ConfigError


def config_dict(**sections: Mapping[str, Any]) -> ml_collections.ConfigDict:
  """Every option at its default, but for those given; for `get_config()`.

  All options are there, so that --config.section.option=value overrides any.

  Args:
    **sections: section -> {option: value}.

  Returns:
    A ConfigDict that `from_config_dict` accepts.

  Raises:
    ConfigError: no such section or option.
  """
  values = Config().to_dict()
  for section, options in sections.items():
    for option, value in options.items():
      if option not in values.get(section, {}):
        raise ConfigError(f"no option {section}.{option}")
      values[section][option] = value
  return ml_collections.ConfigDict(values)


def _plain(value: Any) -> Any:
  if hasattr(value, "to_dict"):
    return value.to_dict()
  return value


def _coerce(value: Any, kind: Any, where: str) -> Any:
  """Returns `value` as `kind`, or raises ConfigError naming `where`."""
  value = _plain(value)
  origin = typing.get_origin(kind)
  if origin is Literal:
    choices = typing.get_args(kind)
    if value not in choices:
      raise ConfigError(f"{where} is {value!r}; choose one of {choices}")
    return value
  if dataclasses.is_dataclass(kind):
    return _build(kind, value, where)
  if origin is tuple:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
      raise ConfigError(f"{where} must be a tuple, got {value!r}")
    return tuple(
      _coerce(v, typing.get_args(kind)[0], f"{where}[{i}]")
      for i, v in enumerate(value)
    )
  if origin is not None and issubclass(origin, Mapping):
    if not isinstance(value, Mapping):
      raise ConfigError(f"{where} must be a mapping, got {value!r}")
    return dict(value)
  if kind is bool or isinstance(value, bool):
    if kind is not bool or not isinstance(value, bool):
      raise ConfigError(f"{where} must be {kind.__name__}, got {value!r}")
    return value
  if kind is float and isinstance(value, int):
    return float(value)
  if not isinstance(value, kind):
    raise ConfigError(f"{where} must be {kind.__name__}, got {value!r}")
  return value


def _build(cls: type, values: Any, where: str) -> Any:
  values = _plain(values)
  if not isinstance(values, Mapping):
    raise ConfigError(f"{where} must be a section, got {values!r}")
  hints = typing.get_type_hints(cls)
  names = [f.name for f in dataclasses.fields(cls)]
  prefix = f"{where}." if where else ""
  for name in values:
    if name not in names:
      raise ConfigError(f"no option {prefix}{name}; there are {names}")
  return cls(**{k: _coerce(v, hints[k], prefix + k) for k, v in values.items()})


def from_config_dict(config_dict: Any) -> Config:
  """Builds the checked, frozen configuration.

  Args:
    config_dict: an ml_collections.ConfigDict or a nested mapping.

  Returns:
    A Config.

  Raises:
    ConfigError: an unknown option, a wrong type, or values that contradict;
      the message names the option.
  """
  return check(_build(Config, config_dict, ""))
