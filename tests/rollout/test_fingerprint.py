"""Fingerprints: equal for equal weights in any form, else not."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from gyre.models import params as params_lib
from gyre.models.config import ModelConfig
from gyre.rollout import fingerprint
from gyre.rollout.programs import Programs

CFG = ModelConfig(
  "qwen2",
  vocab_size=96,
  hidden_size=32,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_dim=64,
  context_length=64,
  tie_embeddings=False,
  qkv_bias=True,
)
CFGS = [CFG, dataclasses.replace(CFG, tie_embeddings=True, qkv_bias=False)]


def weights(cfg, key=0, **form):
  """Random, biases and norms too."""
  specs = params_lib.param_specs(cfg, **form)
  params = params_lib.init_params(specs, jax.random.key(key))
  ends = params_lib.map_specs(lambda s: s.init != "normal", specs)
  return jax.tree.map(
    lambda x, end: x + jnp.arange(x.size).reshape(x.shape) / 7 if end else x,
    params,
    ends,
  )


def by_hand(x, dtype):
  """The sum as the module defines it, with Python's integers."""
  x = np.asarray(jnp.asarray(x).astype(dtype))
  total = 0
  for i, bits in enumerate(x.view(f"uint{8 * x.itemsize}").ravel().tolist()):
    h = i * 0x9E3779B1 % 2**32
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    total += bits * ((h ^ h >> 16) | 1)
  return total % 2**32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_are_what_they_say(dtype):
  params = weights(CFG)
  found = fingerprint.of(params, CFG, dtype)
  assert found["embed"] == (by_hand(params["embed"], dtype),)
  for name in ("q", "k_bias", "o"):
    each = params["layers"]["attn"][name]
    assert found[f"layers/attn/{name}"] == tuple(
      by_hand(x, dtype) for x in each
    )


@pytest.mark.parametrize(
  ("cfg", "dtype"), [(CFGS[0], "float32"), (CFGS[1], "bfloat16")]
)
def test_equal_weights_in_any_form_are_equal(cfg, dtype):
  params = weights(cfg)
  expected = fingerprint.of(params, cfg, dtype)
  specs = params_lib.param_specs(cfg)
  assert len(expected) == len(jax.tree.leaves(params))
  forms = [
    params_lib.convert_layout(params, cfg, layout=layout, order=order)
    for layout, order in itertools.product(("stacked", "layers"), ("oi", "io"))
  ]
  forms.append(jax.tree.map(np.asarray, params))
  mesh = Mesh(
    np.array(jax.devices()).reshape(1, 4, 2), ("data", "fsdp", "tensor")
  )
  shardings = params_lib.param_shardings(specs, mesh)
  forms.append(jax.device_put(params, shardings))
  # What an engine holds: by layer, fused, cast, on another device.
  forms.append(Programs(cfg, None, dtype, jax.devices()[5]).place(params))
  for form in forms:
    found = fingerprint.of(form, cfg, dtype)
    assert found == expected
    assert fingerprint.difference(expected, found) == ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_changed_element_of_any_tensor_is_named(dtype):
  params = weights(CFG)
  expected = fingerprint.of(params, CFG, dtype)
  leaves, tree = jax.tree.flatten(params)

  names = dict(fingerprint._leaves(params, ""))
  rng = np.random.default_rng(0)
  for number, leaf in enumerate(leaves):
    name = next(n for n, x in names.items() if x is leaf)
    at = tuple(int(rng.integers(n)) for n in leaf.shape)
    step = {"float32": 2.0**-22, "bfloat16": 2.0**-6}[dtype]
    changed = leaf.at[at].multiply(1 + step)
    assert changed[at] != leaf[at]
    other = [*leaves[:number], changed, *leaves[number + 1 :]]
    found = fingerprint.of(jax.tree.unflatten(tree, other), CFG, dtype)
    layer = f" of layer {at[0]}" if name.startswith("layers/") else ""
    told = fingerprint.difference(expected, found)
    assert told.startswith(f"{name}{layer} sums to ")
    assert sum(expected[n] != found[n] for n in expected) == 1


def test_swapped_elements_rows_and_layers_are_seen():
  params = weights(CFG)
  expected = fingerprint.of(params, CFG, "float32")
  q = params["layers"]["attn"]["q"]
  for other in (
    q[::-1],
    q.at[0].set(q[0][::-1]),
    q.at[0, 0, 0].set(q[0, 0, 1]).at[0, 0, 1].set(q[0, 0, 0]),
    jnp.roll(q, 1, axis=2),
  ):
    layers = params["layers"]
    changed = params | {
      "layers": layers | {"attn": layers["attn"] | {"q": other}}
    }
    told = fingerprint.difference(
      expected, fingerprint.of(changed, CFG, "float32")
    )
    assert told.startswith("layers/attn/q of layer 0 sums to ")


def test_trees_that_differ_in_names_differ():
  a = fingerprint.of(weights(CFG), CFG, "float32")
  b = {k: v for k, v in a.items() if k != "head"}
  assert fingerprint.difference(a, b) == "head has 0 sums, not 1"
  assert fingerprint.difference(b, a) == "head has 1 sums, not 0"
