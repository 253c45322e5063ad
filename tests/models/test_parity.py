"""Logits equal transformers' on tiny random models, prefill and decode."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gyre.models import hf, load, params, transformer
from gyre.models.attention import packed_attend
from gyre.models.config import ModelConfig

torch = pytest.importorskip("torch", reason="compares with transformers")
transformers = pytest.importorskip(
  "transformers", reason="the oracle of these tests"
)

B, T, VOCAB = 2, 24, 97
TOLERANCE = 1e-4
# Compilation is most of these tests' time.
FAST_COMPILE = {"xla_backend_optimization_level": 0}

SCALINGS = {
  "default": {},
  "linear": {"rope_type": "linear", "factor": 3.0},
  "llama3": {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
  },
  "yarn": {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
  },
  "yarn_options": {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "truncate": False,
  },
  "yarn_factor": {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "attention_factor": 1.3,
  },
}
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
  """Tiny products are slower over several threads."""
  threads = torch.get_num_threads()
  torch.set_num_threads(1)
  yield
  torch.set_num_threads(threads)


def _model(kind, ratio=2, rope="default", **options):
  """A random transformers model whose every parameter matters."""
  kv_heads = 2 if ratio < 7 else 1
  heads = kv_heads * ratio
  options = {
    "vocab_size": VOCAB,
    "hidden_size": heads * 16,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_theta": 5000.0, **SCALINGS[rope]},
    "attn_implementation": "eager",
    **options,
  }
  if kind == "qwen3":
    options.setdefault("head_dim", 16)
  config = getattr(transformers, f"{CLASSES[kind]}Config")(**options)
  model = getattr(transformers, f"{CLASSES[kind]}ForCausalLM")(config).eval()
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for name, p in model.named_parameters():
      noise = torch.randn(p.shape, generator=generator)
      norm = "norm" in name
      p.copy_(1 + 0.2 * noise if norm else noise * 0.15)
  return model


def _tokens():
  return np.random.default_rng(0).integers(0, VOCAB, (B, T))


def _oracle(model, tokens):
  with torch.no_grad():
    return model(torch.from_numpy(tokens)).logits.float().numpy()


def _arrays(model):
  return {k: v.numpy() for k, v in model.state_dict().items()}


def _load(model, layout, order):
  cfg = ModelConfig.from_hf(model.config.to_dict())
  specs = params.param_specs(cfg, layout=layout, order=order)
  return cfg, hf.from_hf(_arrays(model), cfg, specs)


@functools.partial(jax.jit, static_argnums=1, compiler_options=FAST_COMPILE)
def _prefill(p, cfg, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  attend = packed_attend(None, positions)
  hidden, state = transformer.forward(p, cfg, tokens, positions, attend)
  assert state is None
  return transformer.logits(p, cfg, hidden)


@functools.partial(
  jax.jit, static_argnums=(1, 3), compiler_options=FAST_COMPILE
)
def _decode(p, cfg, tokens, cache):
  """Token by token from an empty cache."""
  layout = params.layout_of(p)
  state = cache.init_state(cfg, tokens.shape[0], tokens.shape[1], layout)

  def step(state, i):
    token = jax.lax.dynamic_slice_in_dim(tokens, i, 1, 1)
    position = jnp.full_like(token, i)
    hidden, state = transformer.forward(
      p, cfg, token, position, cache.attend_at(i), state
    )
    return state, transformer.logits(p, cfg, hidden)[:, 0]

  _, out = jax.lax.scan(step, state, jnp.arange(tokens.shape[1]))
  return out.swapaxes(0, 1)


def _check(model, cache, layout="stacked", order="oi"):
  tokens = _tokens()
  want = _oracle(model, tokens)
  assert np.abs(want).max() > 0.5  # the comparison has something to see
  cfg, p = _load(model, layout, order)
  got = _prefill(p, cfg, jnp.asarray(tokens))
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
  got = _decode(p, cfg, jnp.asarray(tokens), cache)
  np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("order", ["oi", "io"])
@pytest.mark.parametrize("layout", ["stacked", "layers"])
@pytest.mark.parametrize("kind", CLASSES)
def test_layouts_and_orders(dense_cache, kind, layout, order):
  _check(_model(kind), dense_cache, layout, order)


# Each scaling meets another (ratio, tied) in the default suite.
CASES = list(
  zip(SCALINGS, itertools.product((1, 2, 7), (False, True)), strict=True)
)


@pytest.mark.parametrize("rope,shape", CASES, ids=str)
@pytest.mark.parametrize("kind", CLASSES)
def test_gqa_ratios_tied_embeddings_rope_scalings(
  dense_cache, kind, rope, shape
):
  ratio, tied = shape
  model = _model(kind, ratio, rope, tie_word_embeddings=tied)
  _check(model, dense_cache)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 7])
@pytest.mark.parametrize("rope", SCALINGS)
@pytest.mark.parametrize("kind", CLASSES)
def test_every_combination(dense_cache, kind, rope, ratio, tied):
  model = _model(kind, ratio, rope, tie_word_embeddings=tied)
  _check(model, dense_cache)


@pytest.mark.parametrize("rope", [r for r in SCALINGS if r != "default"])
def test_rope_changes_the_logits(rope):
  model, plain = _model("llama", rope=rope), _model("llama")
  difference = _oracle(model, _tokens()) - _oracle(plain, _tokens())
  assert np.abs(difference).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
  "options",
  [
    {"attention_bias": True},
    {"mlp_bias": True},
    {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
  ],
  ids=str,
)
def test_llama_biases_and_head_dim(dense_cache, options):
  _check(_model("llama", **options), dense_cache)


@pytest.mark.parametrize(
  "options", [{"attention_bias": True}, {"head_dim": 32}]
)
def test_qwen3_biases_and_head_dim(dense_cache, options):
  _check(_model("qwen3", **options), dense_cache)


@pytest.mark.parametrize("layout", ["stacked", "layers"])
@pytest.mark.parametrize(
  "windows",
  [
    {"max_window_layers": 0},
    {"max_window_layers": 2},
    {
      "num_hidden_layers": 5,
      "layer_types": ["sliding_attention", "full_attention"] * 2
      + ["full_attention"],
    },
  ],
  ids=["all", "after two layers", "alternating"],
)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_sliding_window(dense_cache, kind, windows, layout):
  model = _model(kind, use_sliding_window=True, sliding_window=5, **windows)
  cfg = ModelConfig.from_hf(model.config.to_dict())
  assert 5 in cfg.layer_windows
  _check(model, dense_cache, layout)
  full = _model(kind, num_hidden_layers=cfg.num_layers)
  difference = _oracle(full, _tokens()) - _oracle(model, _tokens())
  assert np.abs(difference).max() > 100 * TOLERANCE  # the window matters


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
@pytest.mark.parametrize(
  "kind,options",
  [
    ("llama", {"rope": "llama3", "attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "rope": "linear"}),
    ("qwen2", {"rope": "yarn_options", "ratio": 7}),
    (
      "qwen2",
      {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    ("qwen3", {"rope": "yarn_factor", "tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 24, "eos_token_id": [2, 3]}),
  ],
  ids=lambda x: "-".join(x) if isinstance(x, dict) else x,
)
def test_what_is_saved_transformers_loads(tmp_path, kind, options, shard_bytes):
  model = _model(kind, **options)
  tokens = _tokens()
  want = _oracle(model, tokens)
  cfg, p = _load(model, "layers" if shard_bytes < 1 << 30 else "stacked", "io")
  load.save_hf_dir(tmp_path, cfg, p, max_shard_bytes=shard_bytes)
  shards = len(list(tmp_path.glob("*.safetensors")))
  assert (shards > 3) == (shard_bytes < 1 << 30)
  loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, attn_implementation="eager", output_loading_info=True
  )
  assert not info["missing_keys"] and not info["unexpected_keys"]
  np.testing.assert_array_equal(_oracle(loaded.eval(), tokens), want)
  assert loaded.config.to_dict().keys() >= model.config.to_dict().keys()
  again, q = load.load_hf_dir(tmp_path, layout="layers")
  assert again == cfg
  got = _prefill(q, again, jnp.asarray(tokens))
  np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", CLASSES)
def test_what_transformers_saves_is_loaded(tmp_path, kind):
  model = _model(kind, rope="yarn", tie_word_embeddings=kind == "qwen2")
  model.save_pretrained(tmp_path, max_shard_size="20KB")
  assert (tmp_path / "model.safetensors.index.json").is_file()
  cfg, p = load.load_hf_dir(tmp_path)
  tokens = _tokens()
  got = _prefill(p, cfg, jnp.asarray(tokens))
  want = _oracle(model, tokens)
  np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def test_bfloat16_activations_stay_near():
  """bf16 products of f32 parameters: as far off as transformers' bf16."""
  model = _model("qwen3")
  tokens = _tokens()
  want = _oracle(model, tokens)
  cfg, p = _load(model, "stacked", "oi")
  positions = jnp.broadcast_to(jnp.arange(T), (B, T))
  hidden, _ = transformer.forward(
    p,
    cfg,
    jnp.asarray(tokens),
    positions,
    packed_attend(None, positions),
    dtype=jnp.bfloat16,
  )
  assert hidden.dtype == jnp.bfloat16
  got = transformer.logits(p, cfg, hidden)
  assert got.dtype == jnp.float32
  rounded = _oracle(model.to(torch.bfloat16), tokens)
  theirs = np.sqrt(np.mean((rounded.astype(np.float32) - want) ** 2))
  ours = np.sqrt(np.mean((np.asarray(got) - want) ** 2))
  assert 0 < ours <= 2 * theirs
