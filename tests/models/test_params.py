"""One ArraySpec tree: shapes, shardings, init, layouts and orders."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from gyre.models import hf, params, transformer
from gyre.models.attention import packed_attend
from gyre.models.config import ModelConfig

CFG = ModelConfig(
  model_type="qwen3",
  vocab_size=64,
  hidden_size=32,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  mlp_dim=48,
  qk_norm=True,
  qkv_bias=True,
  o_bias=True,
  init_std=0.1,
)
VARIANTS = [(lay, o) for lay in ("stacked", "layers") for o in ("oi", "io")]
T = 16
# Compilation is most of these tests' time.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def _mesh(data, fsdp, tensor):
  devices = np.array(jax.devices()[: data * fsdp * tensor])
  return Mesh(devices.reshape(data, fsdp, tensor), ("data", "fsdp", "tensor"))


def _init(layout="stacked", order="oi", cfg=CFG):
  specs = params.param_specs(cfg, layout=layout, order=order)
  return params.init_params(specs, jax.random.key(0))


def _tokens(batch):
  tokens = jax.random.randint(jax.random.key(1), (batch, T), 0, CFG.vocab_size)
  return tokens, jnp.broadcast_to(jnp.arange(T), tokens.shape)


@functools.partial(
  jax.jit,
  static_argnums=3,
  static_argnames=("remat", "constrain"),
  compiler_options=FAST_COMPILE,
)
def _logits(p, tokens, positions, cfg=CFG, **options):
  attend = packed_attend(None, positions)
  hidden, _ = transformer.forward(p, cfg, tokens, positions, attend, **options)
  return transformer.logits(p, cfg, hidden)


@pytest.mark.parametrize("layout,order", VARIANTS)
def test_arrays_are_as_specified(layout, order):
  specs = params.param_specs(CFG, layout=layout, order=order, dtype="bfloat16")
  p = params.init_params(specs, jax.random.key(0))
  chex.assert_trees_all_equal_shapes_and_dtypes(
    p, params.abstract_params(specs)
  )
  shape = p["layers"][1]["mlp"] if layout == "layers" else p["layers"]["mlp"]
  name = "down" if order == "oi" else "down_io"
  want = (32, 48) if order == "oi" else (48, 32)
  assert shape[name].shape[-2:] == want
  n = sum(x.size for x in jax.tree.leaves(p))
  attention = 2 * 32 * 64 + 2 * 32 * 32 + 64 + 32 + 32 + 32 + 2 * 16
  assert n == 2 * 64 * 32 + 32 + 4 * (attention + 3 * 32 * 48 + 2 * 32)


@pytest.mark.parametrize("layout,order", VARIANTS)
def test_init_and_conversion_agree(layout, order):
  """The same key gives the same model in every layout and order."""
  there = params.convert_layout(_init(), CFG, layout=layout, order=order)
  chex.assert_trees_all_equal(there, _init(layout, order))
  back = params.convert_layout(there, CFG, layout="stacked", order="oi")
  chex.assert_trees_all_equal(back, _init())


def test_init_draws_what_the_spec_says():
  cfg = dataclasses.replace(
    CFG, hidden_size=256, mlp_dim=512, num_layers=2, layer_windows=()
  )
  p = _init(cfg=cfg)
  for name, want in (("gate", 0.1), ("down", 0.1 / 2)):
    assert np.std(p["layers"]["mlp"][name]) == pytest.approx(want, rel=0.02)
  gate, up = p["layers"]["mlp"]["gate"], p["layers"]["mlp"]["up"]
  assert abs(np.corrcoef(gate[0].ravel(), gate[1].ravel())[0, 1]) < 0.02
  assert abs(np.corrcoef(gate[0].ravel(), up[0].ravel())[0, 1]) < 0.02
  assert np.all(p["layers"]["attn_norm"] == 1)
  assert np.all(p["layers"]["attn"]["q_bias"] == 0)


@pytest.mark.parametrize("layout,order", VARIANTS)
def test_hugging_face_names_round_trip(layout, order):
  p = _init(layout, order)
  specs = params.param_specs(CFG, layout=layout, order=order)
  arrays = hf.to_hf(p, CFG)
  assert set(arrays) == set(hf.tensor_names(specs, CFG))
  assert arrays["model.layers.3.self_attn.k_proj.weight"].shape == (32, 32)
  assert arrays["model.layers.3.mlp.gate_proj.weight"].shape == (48, 32)
  chex.assert_trees_all_equal(hf.from_hf(arrays, CFG, specs), p)


def test_wrong_tensors_are_named():
  arrays, specs = hf.to_hf(_init(), CFG), params.param_specs(CFG)
  name = "model.layers.2.mlp.up_proj.weight"
  without = {k: v for k, v in arrays.items() if k != name}
  with pytest.raises(ValueError, match=name):
    hf.from_hf(without, CFG, specs)
  with pytest.raises(ValueError, match="surplus"):
    hf.from_hf({**arrays, "surplus": np.zeros(1)}, CFG, specs)
  with pytest.raises(ValueError, match=rf"{name} .*\(48, 31\).*\(48, 32\)"):
    hf.from_hf({**arrays, name: np.zeros((48, 31))}, CFG, specs)


def test_partition_rules():
  mesh = _mesh(2, 2, 2)
  spec = params.partition_spec
  assert spec((64, 32), ("vocab", "embed"), mesh) == PartitionSpec(
    "tensor", "fsdp"
  )
  # What does not divide is replicated; an axis is used once.
  assert spec((63, 32), ("vocab", "embed"), mesh) == PartitionSpec(None, "fsdp")
  assert spec((64, 64), ("heads", "mlp"), mesh) == PartitionSpec("tensor", None)
  assert spec((8, 4), ("batch", None), mesh) == PartitionSpec(
    ("data", "fsdp"), None
  )
  assert spec((2, 4), ("batch", None), mesh) == PartitionSpec("data", None)
  assert spec((64, 32), ("vocab", "embed"), _mesh(2, 1, 1)) == PartitionSpec(
    None, None
  )


@pytest.mark.parametrize("layout,order", [VARIANTS[0], VARIANTS[3]])
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 8, 1), (1, 1, 8), (4, 1, 2)])
def test_sharded_forward_equals_unsharded(shape, layout, order):
  tokens, positions = _tokens(8)
  p = _init(layout, order)
  mesh = _mesh(*shape)
  specs = params.param_specs(CFG, layout=layout, order=order)
  shardings = params.param_shardings(specs, mesh)
  sharded = jax.tree.map(jax.device_put, p, shardings)
  split = [len(x.sharding.device_set) for x in jax.tree.leaves(sharded)]
  assert set(split) == {8}
  if shape != (4, 1, 2):
    held = sum(
      x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(sharded)
    )
    assert held < 0.45 * sum(x.nbytes for x in jax.tree.leaves(p))
  abstract = params.abstract_params(specs, shardings)
  constrain = params.activation_constraint(mesh)
  run = jax.jit(
    lambda p: _logits.__wrapped__(p, tokens, positions, constrain=constrain),
    compiler_options=FAST_COMPILE,
  )
  run.lower(abstract)  # abstract arrays carry the shardings
  want = _logits(p, tokens, positions)
  assert np.abs(want).max() > 0.3
  np.testing.assert_allclose(run(sharded), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
  "remat", [True, jax.checkpoint_policies.dots_saveable], ids=["all", "policy"]
)
def test_remat_keeps_gradients(remat):
  tokens, positions = _tokens(2)
  p = _init()

  @functools.partial(jax.jit, static_argnums=1, compiler_options=FAST_COMPILE)
  def gradient(p, remat):
    def loss(p):
      out = _logits.__wrapped__(p, tokens, positions, remat=remat)
      return jnp.mean(out**2)

    return jax.grad(loss)(p)

  want, got = gradient(p, False), gradient(p, remat)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert jnp.linalg.norm(a - b) <= 1e-5 * jnp.linalg.norm(b)


def test_float64_is_kept():
  with jax.enable_x64(True):
    specs = params.param_specs(CFG, dtype=jnp.float64)
    p = params.init_params(specs, jax.random.key(0))
    tokens, positions = _tokens(2)
    seen = []

    def attend(q, k, v, state, **options):
      seen.extend([q.dtype, k.dtype, v.dtype])
      return v.repeat(2, 2), state

    hidden, _ = transformer.forward(p, CFG, tokens, positions, attend)
    out = transformer.logits(p, CFG, hidden)
    assert {*seen, hidden.dtype, out.dtype} == {jnp.dtype("float64")}


@pytest.mark.parametrize(
  "kinds,runs",
  [
    ("aaaa", [(0, 1, 4)]),
    ("aabbb", [(0, 1, 2), (2, 1, 3)]),
    ("abababc", [(0, 2, 3), (6, 1, 1)]),
    ("aaabaaab", [(0, 4, 2)]),
    ("ab", [(0, 1, 1), (1, 1, 1)]),
  ],
)
def test_runs_of_layers(kinds, runs):
  assert transformer._runs(tuple(kinds)) == runs


def test_sequences_packed_in_a_row_do_not_meet():
  tokens, positions = _tokens(2)
  p = _init()
  both = tokens.reshape(1, 2 * T)
  ends = jnp.repeat(jnp.array([T, 2 * T], jnp.int32), T)[None]
  packed = positions.reshape(1, 2 * T)
  hidden, _ = transformer.forward(
    p, CFG, both, packed, packed_attend(ends, packed)
  )
  got = transformer.logits(p, CFG, hidden).reshape(2, T, -1)
  np.testing.assert_allclose(got, _logits(p, tokens, positions), atol=2e-5)


def test_shapes_that_do_not_fit_are_refused():
  tokens, positions = _tokens(2)
  with pytest.raises(ValueError, match=r"\(2, 16\).*\(1, 16\)"):
    transformer.forward(
      _init(), CFG, tokens, positions[:1], packed_attend(None, positions)
    )
  deeper = dataclasses.replace(CFG, num_layers=5, layer_windows=())
  with pytest.raises(ValueError, match=r"4 layers.* 5"):
    _logits(_init("layers"), tokens, positions, deeper)
  with pytest.raises(ValueError, match=r"4 layers.* 5"):
    _logits(_init(), tokens, positions, deeper)
