"""GGUF import of SmolLM2: weights, tokenizer, chat template.

GGUF stores Llama's q and k with each head's rows interleaved, for the rope of
llama.cpp; here they are put back. Quantised tensors are dequantised by the
`gguf` library, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from gyre.models import hf, load
from gyre.models import params as params_lib
from gyre.models import tokenizer as tokenizer_lib
from gyre.models.config import ModelConfig
from gyre.models.rope import Rope

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType
_TOP = {
  "model.embed_tokens.weight": "token_embd.weight",
  "model.norm.weight": "output_norm.weight",
  "lm_head.weight": "output.weight",
}
_LAYER = {
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


def load_gguf(
  path: load.Path,
  *,
  layout: params_lib.Layout = "stacked",
  dtype: Any = jnp.float32,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[ModelConfig, params_lib.Params, tokenizers.Tokenizer, str]:
  """Loads a GGUF file of the Llama architecture with SmolLM's tokenizer.

  Args:
    path: the file, or "package:NAME" for the one in an installed package.
    layout: of the parameter tree.
    dtype: of its arrays.
    mesh: where given, parameters are sharded over it.

  Returns:
    The configuration, the parameters, the tokenizer, the chat template.

  Raises:
    ValueError: no such file, or a GGUF that is not supported; one line.
  """
  reader = _open(path)
  meta = {name: field.contents() for name, field in reader.fields.items()}
  tensors = {t.name: t for t in reader.tensors}
  cfg = _config(meta, tensors)
  tokenizer = _tokenizer(meta)
  specs = params_lib.param_specs(cfg, layout=layout, dtype=dtype)
  arrays = _Tensors(tensors, cfg, hf.tensor_names(specs, cfg))
  params = hf.from_hf(arrays, cfg, specs)
  shardings = None if mesh is None else params_lib.param_shardings(specs, mesh)
  template = meta.get("tokenizer.chat_template", "")
  return cfg, load.to_device(params, shardings), tokenizer, template


def _open(path: load.Path) -> Any:
  file = load.resolve_path(path)
  if not file.is_file():
    raise ValueError(f"no GGUF file at {file}")
  try:
    from gguf import GGUFReader
  except ImportError as error:
    raise ValueError(
      "reading a GGUF file needs its library: pip install gguf"
    ) from error
  try:
    return GGUFReader(file)
  except (ValueError, IndexError) as error:
    raise ValueError(f"{file} is not a whole GGUF file: {error}") from error


def _config(meta: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
  architecture = meta.get("general.architecture")
  if architecture != "llama":
    raise ValueError(f"GGUF architecture {architecture!r} is not supported")
  for key, value in meta.items():
    unsupported = key.startswith(("llama.rope.scaling", "llama.expert"))
    if unsupported and value not in (0, "none"):
      raise ValueError(f"GGUF option {key}={value!r} is not supported")

  def get(key: str, default: Any = None) -> Any:
    value = meta.get(f"llama.{key}", default)
    if value is None:
      raise ValueError(f"GGUF has no llama.{key}")
    return value

  num_heads, width = get("attention.head_count"), get("embedding_length")
  head_dim = get("attention.key_length", width // num_heads)
  rotated = get("rope.dimension_count", head_dim)
  if rotated != head_dim:
    raise ValueError(f"GGUF rotates {rotated} of {head_dim} dimensions")
  eos = meta.get("tokenizer.ggml.eos_token_id")
  return ModelConfig(
    model_type="llama",
    vocab_size=len(meta.get("tokenizer.ggml.tokens", ())),
    hidden_size=width,
    num_layers=get("block_count"),
    num_heads=num_heads,
    num_kv_heads=get("attention.head_count_kv", num_heads),
    head_dim=head_dim,
    mlp_dim=get("feed_forward_length"),
    context_length=get("context_length"),
    rope=Rope(theta=_decimal(get("rope.freq_base", 10000.0))),
    tie_embeddings=_TOP["lm_head.weight"] not in tensors,
    norm_eps=_decimal(get("attention.layer_norm_rms_epsilon")),
    bos_id=meta.get("tokenizer.ggml.bos_token_id"),
    eos_ids=() if eos is None else (eos,),
    pad_id=meta.get("tokenizer.ggml.padding_token_id"),
  )


def _decimal(value: float) -> float:
  """The shortest decimal that is the same f32: 9.99999975e-06 is 1e-05."""
  return float(str(np.float32(value)))


def _tokenizer(meta: Mapping[str, Any]) -> tokenizers.Tokenizer:
  kind = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
  if kind != ("gpt2", "smollm"):
    raise ValueError(f"GGUF tokenizer {kind} is not supported (gpt2, smollm)")
  tokens = meta["tokenizer.ggml.tokens"]
  types = meta["tokenizer.ggml.token_type"]
  special = [
    token
    for token, t in zip(tokens, types, strict=True)
    if t in (_CONTROL, _USER_DEFINED)
  ]
  return tokenizer_lib.smollm_tokenizer(
    tokens, meta["tokenizer.ggml.merges"], special
  )


class _Tensors(Mapping[str, np.ndarray]):
  """A GGUF's tensors under Hugging Face names, f32, dequantised when read."""

  def __init__(
    self, tensors: Mapping[str, Any], cfg: ModelConfig, names: list[str]
  ):
    self._cfg = cfg
    self._tensors = tensors
    self._where = {}
    for name in names:
      where = _gguf_name(name)
      if where in tensors:
        self._where[name] = where
    unused = sorted(set(tensors) - set(self._where.values()))
    if unused:
      raise ValueError(f"GGUF tensor {unused[0]} has no place in the model")

  def __getitem__(self, name: str) -> np.ndarray:
    from gguf import quants

    tensor = self._tensors[self._where[name]]
    array = quants.dequantize(tensor.data, tensor.tensor_type)
    if name.endswith("q_proj.weight"):
      return unpermute(array, self._cfg.num_heads)
    if name.endswith("k_proj.weight"):
      return unpermute(array, self._cfg.num_kv_heads)
    return array

  def __iter__(self) -> Iterator[str]:
    return iter(self._where)

  def __len__(self) -> int:
    return len(self._where)


def _gguf_name(name: str) -> str:
  if name in _TOP:
    return _TOP[name]
  _, _, layer, rest = name.split(".", 3)
  return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
  """Undoes llama.cpp's order of a head's rows: 0, H/2, 1, H/2+1, …

  Args:
    weight: [heads · H, in], each head's rows in pairs (i, i + H/2).
    num_heads: how many heads the rows hold.

  Returns:
    The rows with each head's first halves of the pairs first.
  """
  pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
  return pairs.swapaxes(1, 2).reshape(weight.shape)
