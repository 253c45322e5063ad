"""Tokenizers beside the weights: tokenizer.json and the chat template."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from gyre.models.config import ModelConfig

_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"


def smollm_tokenizer(
  tokens: Sequence[str],
  merges: Sequence[str],
  special: Sequence[str],
) -> tokenizers.Tokenizer:
  """Builds SmolLM's byte-level BPE: every digit alone, then GPT-2's split.

  Args:
    tokens: the vocabulary; a token's index is its id.
    merges: "left right" pairs by rank, in GPT-2's byte alphabet.
    special: tokens that are matched in the text before anything else.

  Returns:
    The tokenizer.
  """
  vocabulary = {token: i for i, token in enumerate(tokens)}
  if len(vocabulary) != len(tokens):
    raise ValueError(f"{len(tokens) - len(vocabulary)} tokens occur twice")
  pairs = [tuple(merge.split(" ")) for merge in merges]
  bad = next((p for p in pairs if len(p) != 2), None)
  if bad is not None:
    raise ValueError(f"merge {' '.join(bad)!r} is no pair of tokens")
  tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(
    [AddedToken(t, special=True, normalized=False) for t in special]
  )
  return tokenizer


def tokenizer_files(
  tokenizer: tokenizers.Tokenizer, chat_template: str, cfg: ModelConfig
) -> dict[str, str]:
  """Returns the files that transformers and vLLM read a tokenizer from.

  Args:
    tokenizer: any fast tokenizer.
    chat_template: jinja2 text; empty for none.
    cfg: the model, for special ids and the context length.

  Returns:
    File name -> text, for `load.save_hf_dir`.
  """
  config: dict[str, Any] = {
    # The class that takes tokenizer.json as it is, in transformers 4 and 5.
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_max_length": cfg.context_length,
  }
  eos = cfg.eos_ids[0] if cfg.eos_ids else None
  special = {"bos_token": cfg.bos_id, "eos_token": eos, "pad_token": cfg.pad_id}
  for name, token_id in special.items():
    if token_id is not None:
      config[name] = tokenizer.id_to_token(token_id)
  if chat_template:
    config["chat_template"] = chat_template
  return {
    "tokenizer.json": tokenizer.to_str(pretty=True),
    _CONFIG: json.dumps(config, indent=2, ensure_ascii=False) + "\n",
  }


def load_tokenizer(
  directory: str | pathlib.Path,
) -> tuple[tokenizers.Tokenizer, str]:
  """Returns the tokenizer of a Hugging Face directory and its chat template.

  Args:
    directory: with tokenizer.json; the template is chat_template.jinja or in
      tokenizer_config.json, where of several the one named "default" counts.

  Returns:
    The tokenizer, and the template's jinja2 text ("" where there is none).

  Raises:
    ValueError: no tokenizer.json, or a file that cannot be read.
  """
  root = pathlib.Path(directory)
  file = root / "tokenizer.json"
  if not file.is_file():
    raise ValueError(f"{file} is missing")
  try:
    tokenizer = tokenizers.Tokenizer.from_str(file.read_text("utf-8"))
  except Exception as error:  # tokenizers raises nothing more special
    raise ValueError(f"{file} is no tokenizer: {error}") from error
  if (root / _TEMPLATE).is_file():
    return tokenizer, (root / _TEMPLATE).read_text("utf-8")
  template: Any = ""
  if (root / _CONFIG).is_file():
    try:
      config = json.loads((root / _CONFIG).read_text("utf-8"))
    except json.JSONDecodeError as error:
      raise ValueError(f"{root / _CONFIG} is not JSON: {error}") from error
    template = config.get("chat_template") or ""
  if isinstance(template, list):
    template = {t["name"]: t["template"] for t in template}.get("default", "")
  return tokenizer, template
