"""Pages of the KV cache: counts, prefix cache, least-recently-used eviction.

Pure Python. A page holds `page_size` consecutive tokens of one request, or,
when it is full and cached, of every request whose context begins alike.
Page 0 is never given out: padding rows write there.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np


def root_key(version: int, salt: str) -> bytes:
  """The key before the first page: weights version and salt.

  Everything chained to it inherits both, so that new weights never meet old
  keys and values, nor one tenant another's.
  """
  text = f"{version}\0{salt}".encode()
  return hashlib.blake2b(text, digest_size=16).digest()


def page_keys(ids: np.ndarray, page_size: int, root: bytes) -> list[bytes]:
  """Keys of the full pages of `ids`: each chains the one before it.

  Args:
    ids: int32 [L].
    page_size: tokens a page.
    root: from root_key.

  Returns:
    L // page_size keys; equal keys mean equal tokens from the beginning.
  """
  ids = np.ascontiguousarray(ids, np.int32)
  keys = []
  for start in range(0, len(ids) - page_size + 1, page_size):
    page = ids[start : start + page_size].tobytes()
    root = hashlib.blake2b(root + page, digest_size=16).digest()
    keys.append(root)
  return keys


@dataclasses.dataclass(frozen=True)
class Partial:
  """A page that is not full yet but whose beginning others may copy."""

  page: int
  ids: tuple[int, ...]


class PagePool:
  """Reference-counted pages with a prefix cache.

  A page is free (no content), held (count > 0), or idle: cached, count 0, and
  evicted in order of least recent use when free pages run out.
  """

  def __init__(self, num_pages: int, page_size: int):
    """num_pages includes the padding page."""
    if num_pages < 2:
      raise ValueError(f"num_pages is {num_pages}, must be at least 2")
    self.page_size = page_size
    self.num_pages = num_pages
    self._free = list(range(num_pages - 1, 0, -1))
    self._count = [0] * num_pages
    self._page_of: dict[bytes, int] = {}
    self._key_of: dict[int, bytes] = {}
    self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
    self._partials: dict[bytes, list[Partial]] = {}
    self._partial_of: dict[int, bytes] = {}

  @property
  def available(self) -> int:
    """Pages that `take` could hand out now."""
    return len(self._free) + len(self._idle)

  @property
  def cached_pages(self) -> int:
    """Full pages in the prefix cache, held or idle."""
    return len(self._page_of)

  def count(self, page: int) -> int:
    """How many requests hold the page."""
    return self._count[page]

  def take(self, n: int) -> list[int] | None:
    """Takes n empty pages with count 1; None, and no change, if too few."""
    if n > self.available:
      return None
    pages = []
    for _ in range(n):
      if not self._free:
        page, _ = self._idle.popitem(last=False)
        self._forget(page)
        self._free.append(page)
      page = self._free.pop()
      self._count[page] = 1
      pages.append(page)
    return pages

  def match(self, keys: Sequence[bytes]) -> list[int]:
    """Holds the cached pages of the longest known prefix of `keys`."""
    pages = []
    for key in keys:
      page = self._page_of.get(key)
      if page is None:
        break
      self._count[page] += 1
      self._idle.pop(page, None)
      pages.append(page)
    return pages

  def match_partial(
    self, key: bytes, ids: Sequence[int]
  ) -> tuple[int, int] | None:
    """The page whose valid beginning shares most with `ids`.

    Args:
      key: key of the page before (or the root key).
      ids: the tokens that are to follow it.

    Returns:
      (page, tokens shared), at least one token; the page is not held: copy
      from it before the next `take`. None when nothing matches.
    """
    best = None
    for partial in self._partials.get(key, ()):
      n = 0
      for a, b in zip(partial.ids, ids, strict=False):
        if a != b:
          break
        n += 1
      if n and (best is None or n > best[1]):
        best = (partial.page, n)
    return best

  def publish(self, page: int, key: bytes) -> None:
    """Enters a held, full page into the prefix cache, unless known."""
    self._drop_partial(page)
    if key not in self._page_of and page not in self._key_of:
      self._page_of[key] = page
      self._key_of[page] = key

  def publish_partial(self, page: int, key: bytes, ids: Iterable[int]) -> None:
    """Lets others copy the beginning of a held page that is not full.

    Args:
      page: the page.
      key: key of the page before it, or the root key.
      ids: the tokens that it holds from its beginning.
    """
    self._drop_partial(page)
    partial = Partial(page, tuple(int(i) for i in ids))
    if partial.ids:
      self._partials.setdefault(key, []).append(partial)
      self._partial_of[page] = key

  def release(self, pages: Iterable[int]) -> None:
    """Gives up one hold of each; the last pages of a chain are evicted first.

    Raises:
      ValueError: a page is not held.
    """
    for page in reversed(list(pages)):
      if self._count[page] <= 0:
        raise ValueError(f"page {page} has count {self._count[page]}")
      self._count[page] -= 1
      if self._count[page] == 0:
        self._drop_partial(page)
        if page in self._key_of:
          self._idle[page] = None
        else:
          self._free.append(page)

  def flush(self) -> None:
    """Forgets the whole cache; held pages stay held."""
    for page in list(self._key_of):
      self._forget(page)
    self._free.extend(self._idle)
    self._idle.clear()
    self._partials.clear()
    self._partial_of.clear()

  def _forget(self, page: int) -> None:
    del self._page_of[self._key_of.pop(page)]

  def _drop_partial(self, page: int) -> None:
    key = self._partial_of.pop(page, None)
    if key is not None:
      rest = [p for p in self._partials[key] if p.page != page]
      if rest:
        self._partials[key] = rest
      else:
        del self._partials[key]
