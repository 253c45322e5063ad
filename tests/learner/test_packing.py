"""Packed rows: round trip, sharing, shapes, refusals."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unpacking import unpack

from gyre.learner import packing
from gyre.types import Batch, Sample


def _sample(ids, mask, group="g", execution="g/0"):
  ids, trained = np.array(ids), np.flatnonzero(mask)
  return Sample(
    execution_id=execution,
    group_id=group,
    runs=(ids[:2], ids[2:2], ids[2:]),
    trained=trained,
    logprobs=-0.25 - ids[trained],
    versions=ids[trained] + 1,
  )


def _trim(s):
  return int(s.trained[-1]) + 1


def _check_round_trip(samples, packed, advantages):
  got = {}
  for batch in packed.batches:
    part = unpack(batch)
    assert not got.keys() & part.keys()
    got |= part
  trained = [s for s in samples if len(s.trained)]
  assert sorted(got) == list(range(len(trained)))
  for i, s in enumerate(trained):
    np.testing.assert_array_equal(got[i]["ids"], s.ids[: _trim(s)])
    for name in ("trained", "logprobs", "versions"):
      np.testing.assert_array_equal(got[i][name], getattr(s, name), name)
    assert packed.execution_ids[got[i]["execution"]] == s.execution_id
    assert got[i]["advantage"] == np.float32(advantages[s.execution_id])


@st.composite
def _sample_sets(draw):
  """Groups of samples over a tiny alphabet, so that much is shared."""
  out = []
  for g in range(draw(st.integers(1, 4))):
    for i in range(draw(st.integers(1, 6))):
      n = draw(st.integers(2, 12))
      ids = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
      mask = [
        False,
        *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1)),
      ]
      out.append(_sample(ids, mask, f"g{g}", f"g{g}/{i // 2}"))
  return out


@settings(max_examples=200, deadline=None)
@given(
  _sample_sets(),
  st.sampled_from([11, 16, 40]),
  st.integers(1, 3),
  st.sampled_from([None, 12]),
)
def test_round_trip_is_exact(samples, row_tokens, micro_rows, row_entries):
  advantages = {s.execution_id: i - 1.5 for i, s in enumerate(samples)}
  packed = packing.pack(
    samples,
    advantages,
    row_tokens=row_tokens,
    micro_rows=micro_rows,
    row_entries=row_entries,
  )
  _check_round_trip(samples, packed, advantages)
  for b in packed.batches:
    assert b.num_tokens.max() <= b.tokens.shape[1] <= row_tokens
    assert b.num_entries.max() <= b.weight.shape[1]
    if row_entries:
      assert b.num_entries.max() <= row_entries
  assert packed.tokens_trained <= packed.tokens_flat
  firsts = sum(b.sample_first.sum() for b in packed.batches)
  assert firsts == sum(len(s.trained) > 0 for s in samples)
  firsts = sum(b.execution_first.sum() for b in packed.batches)
  assert firsts == len(packed.execution_ids)


@settings(max_examples=100, deadline=None)
@given(_sample_sets())
def test_visibility_is_the_path_of_each_token(samples):
  """subtree_end says ancestor, by an independent walk over prefixes."""
  packed = packing.pack(samples, None, row_tokens=40)
  for b in packed.batches:
    for r in range(len(b.tokens)):
      n = b.num_tokens[r]
      k = np.arange(n)
      sees = (k[None] <= k[:, None]) & (k[:, None] < b.subtree_end[r, :n])
      np.testing.assert_array_equal(sees.sum(1) - 1, b.positions[r, :n])
      for q in range(n):
        depth = b.positions[r, :n][sees[q]]
        np.testing.assert_array_equal(depth, np.arange(len(depth)))


def test_a_shared_prompt_lies_once():
  prompt = list(range(10, 20))
  samples = [
    _sample([*prompt, i, i, i], [0] * 10 + [1] * 3, execution=f"g/{i}")
    for i in range(4)
  ]
  packed = packing.pack(samples, None, row_tokens=64)
  assert packed.tokens_flat == 4 * 12
  assert packed.tokens_trained == 10 + 4 * 2
  assert packed.num_entries == 12
  (b,) = packed.batches
  # The prompt's last token predicts four first tokens.
  assert (b.entry_parent[0, :12] == 9).sum() == 4


def test_groups_never_share_and_neither_do_samples_without_sharing():
  samples = [
    _sample([1, 2, 3], [0, 0, 1], f"g{i}", f"g{i}/0") for i in range(2)
  ]
  assert packing.pack(samples, None, row_tokens=8).tokens_trained == 4
  same = [_sample([1, 2, 3], [0, 0, 1], execution=f"g/{i}") for i in range(2)]
  assert packing.pack(same, None, row_tokens=8).tokens_trained == 2
  flat = packing.pack(same, None, row_tokens=8, share=False)
  assert flat.tokens_trained == 4


def test_a_large_group_repeats_its_prompt_over_rows():
  prompt = [9] * 10
  samples = [
    _sample([*prompt, *[i] * 6], [0] * 10 + [1] * 6, execution=f"g/{i}")
    for i in range(5)
  ]
  packed = packing.pack(samples, None, row_tokens=20, micro_rows=8)
  (b,) = packed.batches
  assert sorted(b.num_tokens) == [0, 15, 20, 20]
  _check_round_trip(samples, packed, {s.execution_id: 1 for s in samples})


@pytest.mark.parametrize("seed", range(4))
def test_an_oversized_tree_is_cut_at_its_nodes(seed):
  """Three branches of three leaves: a row holds one branch and the prompt."""
  samples = []
  for branch in range(3):
    for leaf in range(3):
      ids = [9] * 10 + [branch] * 6 + [10 + leaf] * 5
      name = f"g/{3 * branch + leaf}"
      samples.append(_sample(ids, [0] * 10 + [1] * 11, execution=name))
  order = np.random.default_rng(seed).permutation(9)
  samples = [samples[i] for i in order]
  packed = packing.pack(samples, None, row_tokens=30, micro_rows=4)
  (b,) = packed.batches
  assert sorted(b.num_tokens) == [0, 28, 28, 28]
  assert packed.tokens_trained == 3 * (10 + 6 + 3 * 4)
  _check_round_trip(samples, packed, {s.execution_id: 1 for s in samples})


@settings(max_examples=100, deadline=None)
@given(_sample_sets(), st.sampled_from([11, 14]))
def test_parts_of_a_tree_repeat_the_path_to_the_cut_alone(samples, row_tokens):
  packed = packing.pack(samples, None, row_tokens=row_tokens)
  fed = {}
  for i, s in enumerate(s for s in samples if len(s.trained)):
    fed.setdefault(s.group_id, []).append((s.ids[: _trim(s) - 1].tolist(), i))
  row_of = {
    int(i): (n, r)
    for n, b in enumerate(packed.batches)
    for r in range(len(b.tokens))
    for i in b.sample[r, : b.num_entries[r]]
  }
  want = 0
  for paths in fed.values():
    want += len({tuple(p[:n]) for p, _ in paths for n in range(1, len(p) + 1)})
    in_order = sorted(paths)
    for (a, i), (b, j) in itertools.pairwise(in_order):
      if row_of[i] != row_of[j]:
        agree = [x == y for x, y in zip(a, b, strict=False)]
        want += ([*agree, False]).index(False)
  assert packed.tokens_trained == want


def test_a_sample_longer_than_a_row_is_refused_naming_both():
  sample = _sample(range(30), [0] * 10 + [1] * 20)
  with pytest.raises(ValueError, match=r"g/0 needs 29 tokens .* 28"):
    packing.pack([sample], None, row_tokens=28)
  with pytest.raises(ValueError, match=r"20 entries .* 19"):
    packing.pack([sample], None, row_tokens=29, row_entries=19)
  with pytest.raises(ValueError, match=r"g/0 .* no advantage"):
    packing.pack([sample], {}, row_tokens=29)
  assert packing.pack([sample], None, row_tokens=29).batches


@pytest.mark.parametrize(
  "name", ["row_tokens", "row_entries", "micro_rows", "row_multiple"]
)
def test_sizes_that_are_not_positive_are_refused(name):
  sample = _sample(range(30), [0] * 10 + [1] * 20)
  with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
    packing.pack([sample], None, **{"row_tokens": 64, name: 0})
  with pytest.raises(ValueError, match="quantum must be at least 1, got 0"):
    packing.bucket(5, 0)


def test_nothing_to_train_gives_no_batch():
  sample = _sample([1, 2], [0, 0])
  assert packing.pack([sample], None, row_tokens=8).batches == ()
  assert packing.pack([], None, row_tokens=8).batches == ()


@pytest.mark.parametrize("quantum", [8, 64])
def test_buckets_are_few_and_waste_at_most_half(quantum):
  sizes = [packing.bucket(n, quantum) for n in range(1, 4097)]
  assert sizes == sorted(sizes)
  for n, size in zip(range(1, 4097), sizes, strict=True):
    assert n <= size <= max(quantum, 2 * n - 1)
    if n > 2 * quantum:
      assert size < 1.5 * n + 1
  assert len(set(sizes)) <= 2 * (4096 // quantum).bit_length()


def test_shapes(toy_samples):
  samples = toy_samples()
  packed = packing.pack(samples, None, row_tokens=24, micro_rows=4)
  assert len({b.tokens.shape + b.weight.shape for b in packed.batches}) == 1
  fixed = packing.pack(
    samples, None, row_tokens=200, row_entries=96, micro_rows=3, fixed=True
  )
  for b in fixed.batches:
    assert b.tokens.shape == (3, 200) and b.weight.shape == (3, 96)
  for multiple in (2, 8):
    wide = packing.pack(
      samples, None, row_tokens=24, micro_rows=3, row_multiple=multiple
    )
    assert all(len(b.tokens) % multiple == 0 for b in wide.batches)


def test_pitfall_3_masks_come_from_counts_not_values(toy_samples):
  """Padding has weight 0 and sees itself alone, whatever id it has."""
  packed = packing.pack(toy_samples(), None, row_tokens=64, micro_rows=4)
  for b in packed.batches:
    k = np.arange(b.tokens.shape[1])
    pad = k[None] >= b.num_tokens[:, None]
    np.testing.assert_array_equal(
      b.subtree_end[pad], np.broadcast_to(k + 1, pad.shape)[pad]
    )
    assert (b.subtree_end <= np.where(pad, k + 1, b.num_tokens[:, None])).all()
    m = np.arange(b.weight.shape[1])[None] >= b.num_entries[:, None]
    assert not b.weight[m].any()
    assert not (b.sample_first | b.execution_first)[m].any()
    assert b.weight[~m].all()


def test_pitfall_3_an_id_that_equals_the_pad_is_trained():
  """Padding is id 0; a sampled 0 (pad == eos) is an entry as any other."""
  sample = _sample([5, 0, 0, 0], [0, 1, 1, 1])
  (b,) = packing.pack([sample], None, row_tokens=8).batches
  assert b.num_entries[0] == 3
  np.testing.assert_array_equal(b.entry_target[0, :3], [0, 0, 0])


@pytest.mark.parametrize("micro_rows", [1, 2, 3, 5])
def test_pitfall_5_uneven_batches_drop_and_repeat_nothing(
  toy_samples, micro_rows
):
  samples = toy_samples(groups=7, size=3)
  packed = packing.pack(
    samples, None, row_tokens=40, micro_rows=micro_rows, row_multiple=2
  )
  seen = np.concatenate([b.sample[b.weight > 0] for b in packed.batches])
  count = np.bincount(seen)
  np.testing.assert_array_equal(count, [len(s.trained) for s in samples])


def test_weights_of_samples_and_executions(toy_samples):
  samples = toy_samples()
  packed = packing.pack(samples, None, row_tokens=64)
  of = {}
  for s in samples:
    of[s.execution_id] = of.get(s.execution_id, 0) + len(s.trained)
  for b in packed.batches:
    live = b.weight > 0
    for i, e, sw, ew in zip(
      b.sample[live],
      b.execution[live],
      b.sample_weight[live],
      b.execution_weight[live],
      strict=True,
    ):
      assert sw == len(samples[i].trained)
      assert ew == of[packed.execution_ids[e]]


def test_weights_of_entries_and_a_given_weight_of_the_execution():
  rng = np.random.default_rng(0)
  samples = []
  for i in range(4):
    s = _sample([1, 2, 3 + i, 4, 5], [0, 0, 1, 0, 1], execution=f"g/{i // 2}")
    w = rng.uniform(1, 9, 2)
    told = 40.0 if i < 2 else None
    samples.append(dataclasses.replace(s, weights=w, execution_weight=told))
  packed = packing.pack(samples, None, row_tokens=64)
  assert packed.num_entries == 8
  (b,) = packed.batches
  got = unpack(b)
  totals = [40.0, samples[2].weights.sum() + samples[3].weights.sum()]
  for i, s in enumerate(samples):
    np.testing.assert_allclose(got[i]["weights"], s.weights, rtol=1e-6)
    mine = b.sample == i
    np.testing.assert_allclose(
      b.sample_weight[mine], s.weights.sum(), rtol=1e-6
    )
    np.testing.assert_allclose(
      b.execution_weight[mine], totals[i // 2], rtol=1e-6
    )
  one = dataclasses.replace(samples[1], execution_weight=41.0)
  with pytest.raises(ValueError, match=r"g/0 disagree .* 40.0 and 41.0"):
    packing.pack([samples[0], one], None, row_tokens=64)


def test_batch_is_a_pytree():
  batch = packing.empty_batch(2, 8, 4)
  names = [f.name for f in dataclasses.fields(Batch)]
  assert len(jax.tree.leaves(batch)) == len(names)
  doubled = jax.tree.map(lambda x: np.concatenate([x, x]), batch)
  assert isinstance(doubled, Batch) and doubled.tokens.shape == (4, 8)
