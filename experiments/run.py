"""Trains or evaluates an agent: the main command.

  python experiments/run.py --config experiments/configs/quickstart.py
  python experiments/run.py --config FILE --config.run.steps=80 --workdir DIR
  python experiments/run.py --config FILE --mode eval --checkpoint best
  python experiments/run.py --config FILE --mode compile

The same command on the same directory resumes. What a run writes there:
config.json, tokenizer.json, warm_start.jsonl, metrics.jsonl, rollouts.sqlite,
checkpoints/, timeline.json, tensorboard/, log.txt. The options of --config and
their defaults: gyre/config/sections.py.

Exit status: 0 when done; 2 after one line on what is to be mended; 130 when
stopped by Ctrl-C or, but for --mode compile, SIGTERM: every process that it
started is ended, and what was recorded is kept.
"""

from __future__ import annotations

import pathlib
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from gyre.config import ConfigError, from_config_dict

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Configuration: a Python file that defines get_config()."
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Directory of the run. Default: runs/<name of the config>."
)
_MODE = flags.DEFINE_enum(
  "mode",
  "train",
  ["train", "eval", "compile"],
  "train: the run, resumed where it stopped. eval: held-out tasks on a "
  "checkpoint. compile: the train step for the mesh, without weights.",
)
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", "latest", "For --mode eval: latest, best or a step."
)


def _fail(message: object) -> None:
  """Ends with one line and exit status 2."""
  print("error: " + " ".join(str(message).split()), file=sys.stderr)
  sys.exit(2)


def _own(error: BaseException) -> BaseException:
  """The ConfigError that get_config raised, which flags wrap, if it did."""
  own, at = error, error.__context__
  while at is not None:
    own, at = at if isinstance(at, ConfigError) else own, at.__context__
  return own


def _unknown_option(error: BaseException, argv: list[str]) -> str:
  """The option of the configuration that does not exist; "" if all do.

  config_flags tells its last part only, in a KeyError or one within another;
  a line of its own may name a near one.
  """
  said = error
  while isinstance(said, BaseException):
    said = said.args[0] if said.args else ""
  said, _, near = str(said).partition("\n")
  for argument in argv:
    head, *path = argument.partition("=")[0].lstrip("-").split(".")
    if head == "config" and said.strip("'\"") in path:
      return "; ".join(filter(None, (".".join(path), near)))
  return ""


def _parse(argv: list[str]) -> list[str]:
  try:
    rest = flags.FLAGS(argv)
  except (OSError, SyntaxError, ImportError, ConfigError) as error:
    _fail(f"--config: {error}")
  except (KeyError, AttributeError) as error:
    name = _unknown_option(error, argv)
    _fail(f"the configuration has no option {name}" if name else _own(error))
  except (flags.Error, TypeError, ValueError) as error:
    said = str(_own(error))
    if "Traceback (" in said:  # of the file; what was raised is the last line
      said = f"--config: {said.strip().splitlines()[-1]}"
    _fail(said)
  return rest


def _config_file() -> tuple[pathlib.Path, str]:
  """The file, and what follows a colon: the argument of get_config."""
  name = config_flags.get_config_filename(flags.FLAGS["config"])
  path, _, argument = name.partition(":")
  return pathlib.Path(path), argument


def _workdir() -> pathlib.Path:
  if _WORKDIR.value:
    return pathlib.Path(_WORKDIR.value)
  path, argument = _config_file()
  return pathlib.Path("runs", "_".join(filter(None, (path.stem, argument))))


def main(argv: list[str]) -> None:
  """Runs the mode asked for."""
  if len(argv) > 1:
    _fail(f"unknown argument {argv[1]!r}; see --help")
  if flags.FLAGS["checkpoint"].present and _MODE.value != "eval":
    _fail(f"--checkpoint has no effect with --mode {_MODE.value}, only eval")
  if not flags.FLAGS["config"].present:
    _fail("--config is needed: experiments/configs/quickstart.py, for one")
  path, _ = _config_file()
  if not path.is_file():
    _fail(f"there is no configuration file {path}")
  try:
    config = from_config_dict(_CONFIG.value)
  except ConfigError as error:
    _fail(error)
  if not flags.FLAGS["verbosity"].present:
    logging.set_verbosity(logging.WARNING)  # Orbax tells much at INFO
  from gyre.runtime import main as runtime

  trains = _MODE.value == "train"
  try:
    if _MODE.value == "compile":
      runtime.compile_only(config)
    elif _MODE.value == "eval":
      runtime.evaluate_only(config, _workdir(), _CHECKPOINT.value)
    else:
      runtime.train(config, _workdir())
  except runtime.EXPECTED as error:
    _fail(error)
  except OSError as error:  # a full disk, a directory that cannot be written
    if error.errno is None:
      raise
    _fail(error)
  except KeyboardInterrupt:
    what = "goes on from where it was" if trains else "begins anew"
    print(f"\nstopped; the same command {what}", file=sys.stderr)
    sys.exit(130)


if __name__ == "__main__":
  app.run(main, flags_parser=_parse)
