"""The embedded engine's compiled steps: a handful of shapes, donated pages.

All programs are compiled ahead of time by `compile`, and only those are ever
called, so nothing compiles in steady state.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gyre.models import params as params_lib
from gyre.models import transformer
from gyre.models.config import ModelConfig
from gyre.rollout import paged, sampling, window
from gyre.rollout.shapes import Shapes

MAX_STOPS = 8


@dataclasses.dataclass
class Rows:
  """Host arrays of one decode dispatch; a row is one token of a request.

  Attributes:
    table: int32 [B, W].
    tokens, positions: int32 [B], what is fed; position -1 marks padding.
    limits: int32 [B], tokens a row may still sample.
    seeds: uint32 [B].
    temperature, top_p: float32 [B]. top_k: int32 [B].
    stops: int32 [B, MAX_STOPS], padded with -1.
  """

  table: np.ndarray
  tokens: np.ndarray
  positions: np.ndarray
  limits: np.ndarray
  seeds: np.ndarray
  temperature: np.ndarray
  top_k: np.ndarray
  top_p: np.ndarray
  stops: np.ndarray

  @classmethod
  def empty(cls, rows: int, width: int) -> Rows:
    """All padding."""
    return cls(
      table=np.zeros((rows, width), np.int32),
      tokens=np.zeros(rows, np.int32),
      positions=np.full(rows, -1, np.int32),
      limits=np.zeros(rows, np.int32),
      seeds=np.zeros(rows, np.uint32),
      temperature=np.ones(rows, np.float32),
      top_k=np.zeros(rows, np.int32),
      top_p=np.ones(rows, np.float32),
      stops=np.full((rows, MAX_STOPS), -1, np.int32),
    )

  def tree(self) -> dict[str, np.ndarray]:
    """The arrays by name."""
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def _decode_loop(
  params, state, rows, steps, until_any, attend_at, *, cfg, max_steps
):
  """Feeds each row's token, samples its next, up to `steps` times.

  attend_at(positions [B, 1]) is a step's attention over `state`.
  Returns the state, the steps done, ids and log-probabilities [max_steps, B].
  """
  B = rows["tokens"].shape[0]

  def cond(carry):
    i, _, _, _, alive, stopped, _, _ = carry
    more = (i < steps) & jnp.any(alive)
    return more & ~(until_any & stopped)

  def body(carry):
    i, state, tokens, positions, alive, _, ids, logps = carry
    at = jnp.where(alive, positions, -1)[:, None]
    hidden, state = transformer.forward(
      params,
      cfg,
      tokens[:, None],
      jnp.maximum(at, 0),
      attend_at(at),
      state,
    )
    logits = transformer.logits(params, cfg, hidden[:, 0])
    token, logp = sampling.sample(
      logits,
      sampling.position_uniform(rows["seeds"], positions + 1),
      rows["temperature"],
      rows["top_k"],
      rows["top_p"],
      alive,
    )
    token = jnp.where(alive, token, tokens)
    ids = ids.at[i].set(jnp.where(alive, token, -1))
    logps = logps.at[i].set(jnp.where(alive, logp, 0.0))
    ends = jnp.any(token[:, None] == rows["stops"], -1)
    ends |= rows["limits"] <= i + 1
    return (
      i + 1,
      state,
      token,
      positions + 1,
      alive & ~ends,
      jnp.any(alive & ends),
      ids,
      logps,
    )

  carry = (
    jnp.int32(0),
    state,
    rows["tokens"],
    rows["positions"],
    rows["positions"] >= 0,
    jnp.bool_(False),
    jnp.full((max_steps, B), -1, jnp.int32),
    jnp.zeros((max_steps, B), jnp.float32),
  )
  done, state, _, _, _, _, ids, logps = jax.lax.while_loop(cond, body, carry)
  return state, done, ids, logps


def _decode(params, kv, rows, steps, until_any, *, cfg, block, max_steps):
  def attend_at(at):
    return paged.paged_attend(rows["table"], at, block=block)

  return _decode_loop(
    params, kv, rows, steps, until_any, attend_at, cfg=cfg, max_steps=max_steps
  )


def _decode_window(
  params,
  kv,
  windows,
  rows,
  base,
  common,
  steps,
  until_any,
  *,
  cfg,
  max_steps,
):
  def attend_at(at):
    return window.attend(rows["table"], base, common, at)

  state, done, ids, logps = _decode_loop(
    params,
    tuple(zip(windows, kv, strict=True)),
    rows,
    steps,
    until_any,
    attend_at,
    cfg=cfg,
    max_steps=max_steps,
  )
  windows, kv = zip(*state, strict=True)
  return kv, windows, done, ids, logps


def _empty(kv, *, rows, tokens, dtype):
  return tuple(window.empty(pages, rows, tokens, dtype) for pages in kv)


def _load(windows, kv, table, row):
  return tuple(
    window.load(copy, pages, table, row)
    for copy, pages in zip(windows, kv, strict=True)
  )


def _prefill(params, kv, table, tokens, start, count, *, cfg, block):
  T = tokens.shape[1]
  offset = jnp.arange(T)[None]
  at = jnp.where(offset < count[:, None], start[:, None] + offset, -1)
  _, kv = transformer.forward(
    params,
    cfg,
    tokens,
    jnp.maximum(at, 0),
    paged.paged_attend(table, at, block=block),
    kv,
  )
  return kv


def _copy(kv, source, target):
  return jax.tree.map(lambda x: x.at[target].set(x[source]), kv)


def new_cache(cfg: ModelConfig, shapes: Shapes, dtype: Any, device: Any):
  """Empty pages, (keys, values) a layer."""
  shape = (shapes.pages, shapes.page_size, cfg.num_kv_heads, cfg.head_dim)
  dtype = paged.storage_dtype(jnp.dtype(dtype))
  return tuple(
    tuple(jnp.zeros(shape, dtype, device=device) for _ in range(2))
    for _ in range(cfg.num_layers)
  )


class Programs:
  """Compiled steps over (params, cache); the cache is donated each time."""

  def __init__(self, cfg: ModelConfig, shapes: Shapes, dtype: Any, device: Any):
    self.cfg = cfg
    self.shapes = shapes
    self.dtype = jnp.dtype(dtype)
    self.device = device
    self.compilations = 0
    self._decode: dict[int, Any] = {}
    self._empty: dict[tuple[int, int], Any] = {}
    self._load: dict[tuple[int, int], Any] = {}
    self._decode_window: dict[tuple[int, int], Any] = {}
    self._prefill: dict[tuple[int, int], Any] = {}
    self._copy: Any = None
    self._compiling = threading.Lock()
    self._place = jax.jit(self._converted)

  @property
  def settings(self) -> tuple[ModelConfig, Shapes, str, Any]:
    """What the programs were compiled for."""
    return self.cfg, self.shapes, str(self.dtype), self.device

  def _converted(self, params):
    params = params_lib.fuse(
      params_lib.convert_layout(params, self.cfg, layout="layers", order="oi")
    )
    # A copy: the giver may donate its own arrays afterwards.
    return jax.tree.map(lambda x: jnp.copy(x.astype(self.dtype)), params)

  def place(self, params: params_lib.Params) -> params_lib.Params:
    """The engine's own copy: arrays a layer, siblings fused, its dtype."""
    return self._place(jax.device_put(params, self.device))

  def compile(self) -> None:
    """Compiles every program, once; nothing compiles afterwards."""
    with self._compiling:
      if self._copy is None:
        self._compile()

  def _compile(self) -> None:
    sharding = jax.sharding.SingleDeviceSharding(self.device)

    def abstract(x):
      return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    s = self.shapes
    specs = params_lib.param_specs(self.cfg)
    params = jax.eval_shape(self._converted, params_lib.abstract_params(specs))
    params = jax.tree.map(abstract, params)
    kv = jax.tree.map(
      abstract,
      jax.eval_shape(lambda: new_cache(self.cfg, s, self.dtype, None)),
    )
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
    flag = jax.ShapeDtypeStruct((), jnp.bool_, sharding=sharding)

    def host_rows(rows):
      return jax.tree.map(abstract, Rows.empty(rows, s.table_width).tree())

    for rows, tokens in s.windows:
      self._compile_window(params, kv, host_rows(rows), tokens, abstract)
    for rows in s.rows:
      host = host_rows(rows)
      self._decode[rows] = self._compiled(
        _decode,
        1,
        (params, kv, host, step, flag),
        cfg=self.cfg,
        block=s.block,
        max_steps=s.steps,
      )
    for rows, tokens in s.chunks:
      host = [
        abstract(np.zeros(shape, np.int32))
        for shape in ((rows, s.table_width), (rows, tokens), (rows,), (rows,))
      ]
      self._prefill[rows, tokens] = self._compiled(
        _prefill, 1, (params, kv, *host), cfg=self.cfg, block=s.block
      )
    pages = abstract(np.zeros(s.rows[-1], np.int32))
    self._copy = self._compiled(_copy, 0, (kv, pages, pages))

  def _compile_window(self, params, kv, host, tokens, abstract) -> None:
    """The programs over a window of so many tokens; all is abstract."""
    s, size = self.shapes, (host["tokens"].shape[0], tokens)
    static = {"rows": size[0], "tokens": tokens, "dtype": self.dtype}
    windows = jax.eval_shape(functools.partial(_empty, **static), kv)
    windows = jax.tree.map(abstract, windows)
    step, flag = abstract(np.int32(0)), abstract(np.bool_(False))
    table = abstract(np.zeros(tokens // s.page_size, np.int32))
    common = abstract(np.zeros(s.table_width, np.int32))
    self._empty[size] = self._compiled(_empty, (), (kv,), **static)
    self._load[size] = self._compiled(_load, 0, (windows, kv, table, step))
    self._decode_window[size] = self._compiled(
      _decode_window,
      (1, 2),
      (params, kv, windows, host, step, common, step, flag),
      cfg=self.cfg,
      max_steps=s.steps,
    )

  def _compiled(self, step, donate, arguments, **static):
    def call(*args):
      return step(*args, **static)

    call.__name__ = step.__name__.strip("_")
    self.compilations += 1
    jitted = jax.jit(call, donate_argnums=donate)
    return jitted.lower(*arguments).compile()

  def decode(
    self, params, kv, rows: Rows, steps: int, until_any: bool
  ) -> tuple[Any, np.ndarray, np.ndarray]:
    """Runs up to `steps` decode steps.

    Args:
      params, kv: weights and cache (donated).
      rows: of a size in shapes.rows.
      steps: at most shapes.steps.
      until_any: end as soon as one row has ended.

    Returns:
      The cache; ids int32 [done, B], -1 after a row's end; log-probabilities
      float32 [done, B].
    """
    program = self._decode[len(rows.tokens)]
    kv, done, ids, logps = program(
      params, kv, rows.tree(), np.int32(steps), np.bool_(until_any)
    )
    done = int(done)
    return kv, np.asarray(ids)[:done], np.asarray(logps)[:done]

  def new_window(self, kv, rows: int, tokens: int):
    """An empty window, (keys, values) a layer, of a size in shapes.windows."""
    return self._empty[rows, tokens](kv)

  def load(self, windows, kv, table: np.ndarray, row: int):
    """Copies a row out of its pages.

    Args:
      windows: (donated).
      kv: the cache.
      table: int32 [tokens // page_size], the row's pages from the window's
        first token on.
      row: which row.

    Returns:
      The window.
    """
    rows, _, _, tokens = windows[0][0].shape
    return self._load[rows, tokens](windows, kv, table, np.int32(row))

  def decode_window(
    self,
    params,
    kv,
    windows,
    rows: Rows,
    base: int,
    common: np.ndarray,
    steps: int,
    until_any: bool,
  ) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """As `decode`, over a window; new keys go to it and to their pages.

    Args:
      params, kv, rows, steps, until_any: as in `decode`.
      windows: from `new_window`, loaded (donated).
      base: tokens that all rows share, in whole pages; the window's first
        token stands there.
      common: int32 [W], the pages of those tokens, padded with 0.

    Returns:
      The cache, the window, ids and log-probabilities as in `decode`.
    """
    tokens = windows[0][0].shape[-1]
    program = self._decode_window[len(rows.tokens), tokens]
    kv, windows, done, ids, logps = program(
      params,
      kv,
      windows,
      rows.tree(),
      np.int32(base),
      common,
      np.int32(steps),
      np.bool_(until_any),
    )
    done = int(done)
    return kv, windows, np.asarray(ids)[:done], np.asarray(logps)[:done]

  def prefill(
    self,
    params,
    kv,
    table: np.ndarray,
    tokens: np.ndarray,
    start: np.ndarray,
    count: np.ndarray,
  ):
    """Computes keys and values of context tokens.

    Args:
      params, kv: weights and cache (donated).
      table: int32 [B, W].
      tokens: int32 [B, T], (B, T) in shapes.chunks.
      start: int32 [B], position of each row's first token.
      count: int32 [B], how many of a row's tokens are real.

    Returns:
      The cache.
    """
    program = self._prefill[tokens.shape]
    return program(params, kv, table, tokens, start, count)

  def copy(self, kv, copies: Sequence[tuple[int, int]]):
    """Copies whole pages, (source, target) each; returns the cache."""
    size = self.shapes.rows[-1]
    for i in range(0, len(copies), size):
      pages = np.zeros((2, size), np.int32)
      some = copies[i : i + size]
      pages[:, : len(some)] = np.asarray(some, np.int32).T
      kv = self._copy(kv, pages[0], pages[1])
    return kv
