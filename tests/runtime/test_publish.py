"""Publication: an engine that does not use what it was given is found out."""

import asyncio
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gyre import config
from gyre.models import attention, transformer
from gyre.models import params as params_lib
from gyre.models.config import ModelConfig
from gyre.rollout import engine
from gyre.rollout.jax_engine import JaxEngine
from gyre.rollout.router import Router
from gyre.runtime import publish

pytestmark = pytest.mark.usefixtures("quick_compilation")

CFG = ModelConfig(
  "qwen3",
  vocab_size=64,
  hidden_size=16,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_dim=32,
  context_length=64,
  tie_embeddings=True,
  init_std=0.3,
)
REQUEST = engine.Request(
  ids=[1, 2, 3], max_new_tokens=20, request_id="e#0", execution_id="e"
)


@functools.cache
def _params(seed):
  return params_lib.init_params(
    params_lib.param_specs(CFG), jax.random.key(seed)
  )


class Stale(JaxEngine):
  """Once told to, loads all new weights but one tensor's."""

  keeps = None

  async def load_weights(self, weights, version):
    if self.keeps is not None:
      old = _params(0)["layers"]["mlp"][self.keeps]
      mlp = weights["layers"]["mlp"] | {self.keeps: old}
      layers = weights["layers"] | {"mlp": mlp}
      weights = weights | {"layers": layers}
    await super().load_weights(weights, version)


_PROGRAMS = {}


def _engine(name="a", dtype="float32"):
  e = Stale(
    _params(0),
    CFG,
    rollout=config.Rollout(
      max_slots=8, prefill_chunk=16, num_pages=64, page_size=8, dtype=dtype
    ),
    deterministic=True,
    name=name,
    programs=_PROGRAMS.get(dtype),
  )
  _PROGRAMS[dtype] = e.programs
  return e


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_used_are_found(dtype):
  async def main():
    e = _engine(dtype=dtype)
    await publish.publish(e, _params(1), 3)
    assert e.version == 3 and not e.stats().paused
    # As a core of another process would: its own sums, in its own layout.
    layers = params_lib.convert_layout(_params(2), CFG, layout="layers")
    expected = e.fingerprint_of(layers)
    await publish.publish(e, _params(2), 4, expected)
    with pytest.raises(engine.StaleVersion):
      await publish.publish(e, _params(2), 3, expected)
    assert not e.stats().paused
    e.keeps = "up"
    with pytest.raises(
      publish.PublishError,
      match=r"version 5: layers/mlp/up of layer 0 sums to [0-9a-f]{8}, not ",
    ):
      await publish.publish(e, _params(3), 5)
    assert e.stats().paused
    await e.close()

  asyncio.run(main())


def test_a_cell_that_fails_the_check_is_kept_out():
  downs = []

  async def main():
    engines = {name: _engine(name) for name in "abc"}
    router = Router(on_down=lambda cell, error: downs.append(cell))
    for name, e in engines.items():
      await e.ready()
      router.add(name, e)
    router.place("e", "a", version=1)
    waiting = asyncio.ensure_future(router.generate(REQUEST))
    await asyncio.sleep(0.05)
    engines["a"].keeps = "gate"
    await engines["b"].close()
    failed = await publish.publish_to_all(router, _params(1), 1)
    assert sorted(failed) == sorted(downs) == ["a", "b"]
    assert router.serving == ("c",)
    assert "layers/mlp/gate of layer 0" in str(failed["a"])
    assert isinstance(failed["b"], engine.EngineDown)
    assert not waiting.done()
    router.place("e", "c")
    completion = await waiting
    alone = await engines["c"].generate(REQUEST)
    np.testing.assert_array_equal(completion.ids, alone.ids)
    np.testing.assert_array_equal(completion.logprobs, alone.logprobs)
    assert set(completion.versions) == {1}
    await asyncio.gather(*(e.close() for e in engines.values()))

  asyncio.run(main())


def test_each_kind_of_parameter_moves_the_sampled_logprobs_as_it_should():
  """A known change of one tensor: the engine's tokens score as the model's."""

  @jax.jit
  def score(params, ids):
    at = jnp.arange(ids.shape[1])[None]
    hidden, _ = transformer.forward(
      params, CFG, ids, at, attention.packed_attend(None, at)
    )
    return jax.nn.log_softmax(transformer.logits(params, CFG, hidden)[0])

  async def main():
    e = _engine()
    for leaf in range(len(jax.tree.leaves(_params(0)))):
      leaves, tree = jax.tree.flatten(_params(0))
      leaves[leaf] = leaves[leaf] * 1.5 + 0.01
      changed = jax.tree.unflatten(tree, leaves)
      await publish.publish(e, changed, leaf)
      completion = await e.generate(REQUEST)
      ids = jnp.asarray([[*REQUEST.ids, *completion.ids]])
      scores = [
        np.asarray(score(params, ids))[np.arange(2, 22), completion.ids]
        for params in (changed, _params(0))
      ]
      np.testing.assert_allclose(completion.logprobs, scores[0], atol=1e-4)
      assert np.abs(completion.logprobs - scores[1]).max() > 1e-3
    await e.close()

  asyncio.run(main())
