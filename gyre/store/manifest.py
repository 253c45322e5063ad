"""Content manifests: what a directory holds, hash by hash.

A directory is written under a temporary name, every file is hashed and
flushed to disk, the manifest goes in last, and one rename makes it visible.
`verify` accepts exactly what was committed: a flipped bit, a file that is
shorter, gone or new is refused and named.

Several processes of a machine need not each hash what one has: `checked` takes
its word while no file was written since, as their stamps tell.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

MANIFEST = "manifest.json"
_TMP = ".tmp-"
_CHUNK = 1 << 20


class ManifestError(ValueError):
  """A directory is not what its manifest says; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Manifest:
  """What a committed directory holds.

  Attributes:
    files: relative path -> sha256 (hex) of the content.
    meta: whatever its writer committed together with the files.
  """

  files: Mapping[str, str]
  meta: Mapping[str, Any]


def file_sha256(path: str | os.PathLike) -> str:
  """Returns the sha256 (hex) of a file's content."""
  digest = hashlib.sha256()
  with open(path, "rb") as f:
    while chunk := f.read(_CHUNK):
      digest.update(chunk)
  return digest.hexdigest()


def fsync_path(path: str | os.PathLike) -> None:
  """Flushes a file or a directory's entries to disk."""
  fd = os.open(path, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)


def _encode(body: Any) -> bytes:
  """Canonical JSON whose last field is the sha256 of the rest."""
  inner = json.dumps(body, sort_keys=True, indent=1)
  digest = hashlib.sha256(inner.encode()).hexdigest()
  return (
    json.dumps({"body": body, "sha256": digest}, sort_keys=True, indent=1)
    + "\n"
  ).encode()


def write_document(path: str | os.PathLike, body: Any) -> None:
  """Writes JSON that carries its own hash, durably and atomically.

  Args:
    path: the file.
    body: what to write; keys are strings, numbers finite or not.
  """
  path = pathlib.Path(path)
  tmp = path.with_name(f"{_TMP}{path.name}")
  with open(tmp, "wb") as f:
    f.write(_encode(body))
    f.flush()
    os.fsync(f.fileno())
  os.replace(tmp, path)
  fsync_path(path.parent)


def read_document(path: str | os.PathLike) -> Any:
  """Reads what `write_document` wrote.

  Raises:
    ManifestError: the file is missing or differs in a single bit.
  """
  try:
    raw = pathlib.Path(path).read_bytes()
  except FileNotFoundError:
    raise ManifestError(f"{path} is missing") from None
  try:
    body = json.loads(raw)["body"]
    same = _encode(body) == raw
  except (ValueError, KeyError, TypeError, RecursionError):
    same = False
  if not same:
    raise ManifestError(f"{path} is corrupt: its content is not what it hashes")
  return body


def _walk(directory: pathlib.Path) -> Iterator[str]:
  """Yields relative paths of everything that is not a directory."""
  for root, folders, names in os.walk(directory):
    links = [d for d in folders if os.path.islink(os.path.join(root, d))]
    for name in [*names, *links]:
      path = os.path.relpath(os.path.join(root, name), directory)
      if path != MANIFEST:
        yield path


def write_manifest(
  directory: str | os.PathLike, meta: Mapping[str, Any] | None = None
) -> Manifest:
  """Hashes and flushes every file of a directory, then writes its manifest.

  Args:
    directory: what to commit; it may hold no links.
    meta: JSON content to commit together with the files.

  Returns:
    The manifest.

  Raises:
    ManifestError: the directory holds something that is not a plain file.
  """
  directory = pathlib.Path(directory)
  files = {}
  for name in sorted(_walk(directory)):
    path = directory / name
    if path.is_symlink() or not path.is_file():
      raise ManifestError(f"{path} is not a plain file")
    fsync_path(path)
    files[name] = file_sha256(path)
  for root, _, _ in os.walk(directory):
    fsync_path(root)
  manifest = Manifest(files, dict(meta or {}))
  write_document(directory / MANIFEST, dataclasses.asdict(manifest))
  return manifest


def read_manifest(directory: str | os.PathLike) -> Manifest:
  """Reads a directory's manifest without looking at its files.

  Raises:
    ManifestError: it is missing or corrupt.
  """
  path = pathlib.Path(directory) / MANIFEST
  body = read_document(path)
  if not isinstance(body, dict) or set(body) != {"files", "meta"}:
    raise ManifestError(f"{path} is not a manifest")
  return Manifest(body["files"], body["meta"])


def verify(directory: str | os.PathLike) -> Manifest:
  """Checks that a directory holds exactly what was committed.

  Args:
    directory: what `write_manifest` described.

  Returns:
    Its manifest.

  Raises:
    ManifestError: names the first file that is corrupt, missing or extra.
  """
  directory = pathlib.Path(directory)
  manifest = read_manifest(directory)
  found = set(_walk(directory))
  for name in sorted(manifest.files):
    path = directory / name
    if name not in found:
      raise ManifestError(f"{path} is missing")
    if path.is_symlink() or not path.is_file():
      raise ManifestError(f"{path} is not a plain file")
    digest = file_sha256(path)
    if digest != manifest.files[name]:
      raise ManifestError(
        f"{path} is corrupt: sha256 {digest[:16]}…, "
        f"committed {manifest.files[name][:16]}…"
      )
  if extra := sorted(found - set(manifest.files)):
    raise ManifestError(
      f"{directory / extra[0]} is not part of what was committed"
    )
  return manifest


def stamp(directory: str | os.PathLike) -> str:
  """Returns what changes when a file of a directory does; none is read.

  Whatever writes to a file, replaces or adds one changes the time of change
  of an inode, which no call can set back. A disk that loses bits does not, nor
  does who had the file mapped, and the page written, before.

  Args:
    directory: of any files, the manifest among them.
  """
  directory = pathlib.Path(directory)
  digest = hashlib.sha256()
  for name in sorted([MANIFEST, *_walk(directory)]):
    try:
      s = os.lstat(directory / name)
    except FileNotFoundError:
      return ""
    times = s.st_mtime_ns, s.st_ctime_ns
    row = [name, s.st_mode, s.st_ino, s.st_size, *times]
    digest.update(json.dumps(row).encode())
  return digest.hexdigest()


def checked(directory: str | os.PathLike, verified: str = "") -> str:
  """Verifies a directory, unless it is as it was when that was done.

  Args:
    directory: what `write_manifest` described.
    verified: the stamp that this returned, in this or another process.

  Returns:
    The stamp of the content that was verified.

  Raises:
    ManifestError: as `verify`; or a file changes meanwhile.
  """
  found = stamp(directory)
  if not found or found != verified:
    verify(directory)
    unchanged(directory, found)
  return found


def unchanged(directory: str | os.PathLike, verified: str) -> None:
  """Refuses what was read since it was verified, where it changed meanwhile.

  Raises:
    ManifestError: it is not as it was.
  """
  if stamp(directory) != verified:
    raise ManifestError(f"{directory} changed while it was read")


def temporary(final: str | os.PathLike) -> pathlib.Path:
  """Returns an empty directory beside `final`, to be filled and committed."""
  final = pathlib.Path(final)
  tmp = final.with_name(_TMP + final.name)
  if tmp.exists():
    shutil.rmtree(tmp)
  tmp.mkdir(parents=True)
  return tmp


def commit(
  tmp: str | os.PathLike,
  final: str | os.PathLike,
  meta: Mapping[str, Any] | None = None,
) -> Manifest:
  """Makes a filled temporary directory visible under its final name.

  Args:
    tmp: from `temporary(final)`, on the same file system.
    final: must not exist.
    meta: JSON content to commit together with the files.

  Returns:
    The manifest.

  Raises:
    ManifestError: `final` exists: what was committed is never replaced.
  """
  final = pathlib.Path(final)
  if final.exists():
    raise ManifestError(f"{final} exists; a commit never replaces another")
  manifest = write_manifest(tmp, meta)
  os.rename(tmp, final)
  fsync_path(final.parent)
  return manifest


def clean_temporaries(parent: str | os.PathLike) -> list[str]:
  """Removes what an interrupted writer left behind in `parent`.

  Returns:
    The names removed.
  """
  parent = pathlib.Path(parent)
  removed = []
  for path in sorted(parent.glob(_TMP + "*")):
    removed.append(path.name)
    if path.is_dir() and not path.is_symlink():
      shutil.rmtree(path)
    else:
      path.unlink()
  return removed


def remove(directory: str | os.PathLike) -> None:
  """Removes a committed directory so that no half of it is ever visible."""
  directory = pathlib.Path(directory)
  tmp = directory.with_name(_TMP + directory.name)
  if tmp.exists():
    shutil.rmtree(tmp)
  os.rename(directory, tmp)
  shutil.rmtree(tmp)
