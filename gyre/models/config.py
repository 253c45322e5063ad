"""ModelConfig: a dense decoder as a Hugging Face config.json describes it.

Llama, Qwen2 and Qwen3. What a config.json asks for and this forward pass does
not do is refused with a one-line `ValueError` that names it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from gyre.models import rope as rope_lib
from gyre.models.rope import Rope

_ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
}
_WINDOWED = ("qwen2", "qwen3")
_LAYER_TYPES = ("full_attention", "sliding_attention")

# Keys that `from_hf` reads.
_READ = frozenset(
  "model_type architectures vocab_size hidden_size intermediate_size "
  "num_hidden_layers num_attention_heads num_key_value_heads head_dim "
  "hidden_act max_position_embeddings initializer_range rms_norm_eps "
  "tie_word_embeddings attention_bias mlp_bias attention_dropout rope_theta "
  "rope_scaling rope_parameters use_sliding_window sliding_window "
  "max_window_layers layer_types bos_token_id eos_token_id "
  "pad_token_id".split()
)
# Keys that change nothing in a forward pass of these architectures.
_HARMLESS = frozenset(
  "use_cache torch_dtype dtype transformers_version pretraining_tp "
  "transformers.js_config is_llama_config unsloth_version unsloth_fixed "
  "return_dict output_hidden_states output_attentions is_encoder_decoder "
  "is_decoder id2label label2id problem_type task_specific_params "
  "tokenizer_class chunk_size_feed_forward torchscript use_bfloat16 "
  "attn_implementation max_length min_length do_sample temperature top_k "
  "top_p num_beams repetition_penalty".split()
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape and constants of a dense decoder; hashable, so static under jit.

  Attributes:
    model_type: "llama", "qwen2" or "qwen3".
    vocab_size: V, rows of the embedding.
    hidden_size: D, width of the residual stream.
    num_layers: L.
    num_heads: N, query heads.
    num_kv_heads: K, key heads; N is a multiple of K.
    head_dim: H, which need not be D / N.
    mlp_dim: F, width of the gated MLP.
    context_length: positions the model was made for.
    rope: rotary embedding, see `rope.Rope`.
    layer_windows: a layer's sliding window in Hugging Face's sense (a query
      sees the last W positions, itself included), or None.
    tie_embeddings: the head is the embedding.
    qkv_bias, o_bias, mlp_bias: which projections add a bias.
    qk_norm: RMS norm over each head of q and k before rope (Qwen3).
    norm_eps: added to the mean square in every RMS norm.
    init_std: standard deviation of random matrices.
    bos_id, eos_ids, pad_id: special ids; None or empty where not given.
  """

  model_type: str
  vocab_size: int
  hidden_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  context_length: int = 2048
  rope: Rope = Rope()  # noqa: RUF009 (frozen)
  layer_windows: tuple[int | None, ...] = ()
  tie_embeddings: bool = False
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  norm_eps: float = 1e-6
  init_std: float = 0.02
  bos_id: int | None = None
  eos_ids: tuple[int, ...] = ()
  pad_id: int | None = None

  def __post_init__(self):
    if not self.layer_windows:
      object.__setattr__(self, "layer_windows", (None,) * self.num_layers)
    _check_sizes(self)

  @classmethod
  def from_hf(
    cls, source: Mapping[str, Any] | str | os.PathLike[str]
  ) -> ModelConfig:
    """Reads a Hugging Face config: a mapping, a config.json or its directory.

    Args:
      source: the parsed config, or a path to config.json or to the directory
        that holds it. Both spellings of rope are read: `rope_scaling` with
        `rope_theta`, and `rope_parameters` (transformers 5).

    Returns:
      The configuration.

    Raises:
      ValueError: an architecture, an option or a value that is not
        supported; one line that names it.
    """
    hf = source if isinstance(source, Mapping) else _read_json(source)
    model_type = _check_supported(hf)
    num_heads = _required(hf, "num_attention_heads")
    hidden_size = _required(hf, "hidden_size")
    head_dim = hf.get("head_dim")
    if head_dim is None:
      # transformers: Qwen3 has a default of its own, the others divide.
      head_dim = 128 if model_type == "qwen3" else hidden_size // num_heads
    num_kv_heads = hf.get("num_key_value_heads")
    context_length = _required(hf, "max_position_embeddings")
    attention_bias = bool(hf.get("attention_bias", False))
    eos = hf.get("eos_token_id")
    return cls(
      model_type=model_type,
      vocab_size=_required(hf, "vocab_size"),
      hidden_size=hidden_size,
      num_layers=_required(hf, "num_hidden_layers"),
      num_heads=num_heads,
      num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
      head_dim=head_dim,
      mlp_dim=_required(hf, "intermediate_size"),
      context_length=context_length,
      rope=rope_lib.from_hf(hf, context_length),
      layer_windows=_layer_windows(hf, model_type),
      tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
      qkv_bias=model_type == "qwen2" or attention_bias,
      o_bias=model_type != "qwen2" and attention_bias,
      mlp_bias=model_type == "llama" and bool(hf.get("mlp_bias", False)),
      qk_norm=model_type == "qwen3",
      norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
      init_std=float(hf.get("initializer_range", 0.02)),
      bos_id=hf.get("bos_token_id"),
      eos_ids=tuple(eos) if isinstance(eos, list | tuple) else _single(eos),
      pad_id=None if (pad := hf.get("pad_token_id")) == -1 else pad,
    )

  def to_hf(self) -> dict[str, Any]:
    """Returns a config.json that transformers 4 and 5 and vLLM read.

    Rope is written in both spellings.

    Raises:
      ValueError: the configuration has no Hugging Face form.
    """
    _check_expressible(self)
    eos = list(self.eos_ids)
    hf = {
      "architectures": [_ARCHITECTURES[self.model_type]],
      "model_type": self.model_type,
      "vocab_size": self.vocab_size,
      "hidden_size": self.hidden_size,
      "intermediate_size": self.mlp_dim,
      "num_hidden_layers": self.num_layers,
      "num_attention_heads": self.num_heads,
      "num_key_value_heads": self.num_kv_heads,
      "head_dim": self.head_dim,
      "hidden_act": "silu",
      "max_position_embeddings": self.context_length,
      "initializer_range": self.init_std,
      "rms_norm_eps": self.norm_eps,
      "tie_word_embeddings": self.tie_embeddings,
      "attention_dropout": 0.0,
      "bos_token_id": self.bos_id,
      "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
      "pad_token_id": self.pad_id,
      **rope_lib.to_hf(self.rope),
    }
    if self.model_type != "qwen2":
      hf["attention_bias"] = self.qkv_bias
    if self.model_type == "llama":
      hf["mlp_bias"] = self.mlp_bias
    if self.model_type in _WINDOWED:
      windows = [w for w in self.layer_windows if w is not None]
      full = [w is None for w in self.layer_windows]
      hf |= {
        "use_sliding_window": bool(windows),
        "sliding_window": windows[0] if windows else None,
        "max_window_layers": full.index(False) if windows else len(full),
        "layer_types": [_LAYER_TYPES[not f] for f in full],
      }
    return hf


def _read_json(path: str | os.PathLike[str]) -> Mapping[str, Any]:
  file = pathlib.Path(path)
  if file.is_dir():
    file = file / "config.json"
  if not file.is_file():
    raise ValueError(f"no config.json at {file}")
  try:
    hf = json.loads(file.read_text())
  except json.JSONDecodeError as error:
    raise ValueError(f"{file} is not JSON: {error}") from error
  if not isinstance(hf, dict):
    raise ValueError(f"{file} holds a {type(hf).__name__}, not an object")
  return hf


def _single(eos: int | None) -> tuple[int, ...]:
  return () if eos is None else (int(eos),)


def _required(hf: Mapping[str, Any], key: str) -> int:
  value = hf.get(key)
  if not isinstance(value, int) or isinstance(value, bool) or value < 1:
    raise ValueError(f"config.json: {key} must be a positive int, got {value}")
  return value


def _check_supported(hf: Mapping[str, Any]) -> str:
  """Returns the model type; refuses what the forward pass does not do."""
  model_type = hf.get("model_type")
  if model_type not in _ARCHITECTURES:
    known = ", ".join(_ARCHITECTURES)
    raise ValueError(f"model_type {model_type!r} is not supported ({known})")
  for architecture in hf.get("architectures") or ():
    if architecture != _ARCHITECTURES[model_type]:
      raise ValueError(
        f"architecture {architecture} is not supported; "
        f"{model_type} means {_ARCHITECTURES[model_type]}"
      )
  for key, value in hf.items():
    known = key in _READ or key in _HARMLESS or key.startswith("_")
    if not known and value not in (None, False, 0, "", [], {}):
      raise ValueError(f"config.json: option {key}={value!r} is not supported")
  activation = hf.get("hidden_act", "silu")
  if activation != "silu":
    raise ValueError(f"hidden_act {activation!r} is not supported (silu)")
  dropout = hf.get("attention_dropout") or 0
  if dropout:
    raise ValueError(f"attention_dropout {dropout} is not supported (0)")
  if model_type == "qwen2" and hf.get("attention_bias") is False:
    raise ValueError("qwen2 with attention_bias=False is not supported")
  if model_type != "llama" and hf.get("mlp_bias"):
    raise ValueError(f"mlp_bias is not supported for {model_type}")
  return model_type


def _layer_windows(
  hf: Mapping[str, Any], model_type: str
) -> tuple[int | None, ...]:
  """The window of each layer, as transformers' Qwen2Config derives it."""
  num_layers = _required(hf, "num_hidden_layers")
  types = hf.get("layer_types")
  window = hf.get("sliding_window")
  if model_type not in _WINDOWED:
    if window or hf.get("use_sliding_window"):
      raise ValueError(f"sliding_window {window} is not supported for llama")
  elif not hf.get("use_sliding_window", False):
    window = None
  elif window is None:
    window = 4096  # transformers' default
  if types is None:
    first = hf.get("max_window_layers", 28)
    first = num_layers if window is None else first
    types = [_LAYER_TYPES[i >= first] for i in range(num_layers)]
  if len(types) != num_layers:
    raise ValueError(
      f"layer_types has {len(types)} entries, num_hidden_layers {num_layers}"
    )
  for kind in types:
    if kind not in _LAYER_TYPES:
      raise ValueError(f"layer type {kind!r} is not supported")
    if kind == "sliding_attention" and not window:
      raise ValueError(
        f"layer_types has sliding_attention, but sliding_window is {window} "
        f"and use_sliding_window {hf.get('use_sliding_window')}"
      )
  return tuple(window if t == "sliding_attention" else None for t in types)


def _check_sizes(cfg: ModelConfig) -> None:
  if cfg.num_heads % cfg.num_kv_heads:
    raise ValueError(
      f"num_heads {cfg.num_heads} must be a multiple of num_kv_heads "
      f"{cfg.num_kv_heads}"
    )
  if cfg.head_dim % 2:
    raise ValueError(f"head_dim {cfg.head_dim} must be even for rope")
  if len(cfg.layer_windows) != cfg.num_layers:
    raise ValueError(
      f"layer_windows has {len(cfg.layer_windows)} entries, num_layers is "
      f"{cfg.num_layers}"
    )
  for window in cfg.layer_windows:
    if window is not None and window < 1:
      raise ValueError(f"a layer's window must be at least 1, got {window}")
  for token in (cfg.bos_id, cfg.pad_id, *cfg.eos_ids):
    if token is not None and not 0 <= token < cfg.vocab_size:
      raise ValueError(
        f"special token id {token} is outside the vocabulary of "
        f"{cfg.vocab_size}"
      )


def _check_expressible(cfg: ModelConfig) -> None:
  """Refuses a configuration that its Hugging Face class cannot hold."""
  kind = cfg.model_type
  if kind not in _ARCHITECTURES:
    raise ValueError(f"model_type {kind!r} has no Hugging Face form")
  allowed = {
    "qkv_bias": (True,) if kind == "qwen2" else (cfg.o_bias,),
    "o_bias": (False,) if kind == "qwen2" else (cfg.qkv_bias,),
    "mlp_bias": (False, True) if kind == "llama" else (False,),
    "qk_norm": (kind == "qwen3",),
  }
  for name, values in allowed.items():
    value = getattr(cfg, name)
    if value not in values:
      raise ValueError(f"{kind} with {name}={value} has no Hugging Face form")
  windows = {w for w in cfg.layer_windows if w is not None}
  if windows and kind not in _WINDOWED:
    raise ValueError(f"{kind} with sliding windows has no Hugging Face form")
  if len(windows) > 1:
    raise ValueError(f"windows {sorted(windows)} differ: no Hugging Face form")
