"""Workspaces as tar files: written from memory, or read back with suspicion.

What an agent leaves is data of an opponent. Reading it follows no symbolic
link, opens nothing but regular files and directories, leaves out sockets,
pipes and devices, drops set-id bits, and stops at a number of bytes. Nothing
on the host ever extracts such a tar: a sandbox does, inside itself.
"""

from __future__ import annotations

import errno
import io
import os
import pathlib
import stat
import tarfile
import time
from collections.abc import Mapping
from typing import BinaryIO

from gyre.envs import errors
from gyre.envs import task as task_lib

EPOCH = 1767225600  # 2026-01-01T00:00:00Z
_MAX_ENTRIES = 200_000
_MAX_DEPTH = 100


def _info(name: str, mode: int, mtime: float) -> tarfile.TarInfo:
  info = tarfile.TarInfo(name)
  info.mode = mode & 0o777
  info.mtime = int(mtime)
  return info


def pack_files(files: Mapping[str, task_lib.FileSpec]) -> bytes:
  """A tar of task files, sorted, with parents, owners and times fixed."""
  out = io.BytesIO()
  made: set[str] = set()

  def add(tar, name, spec):
    info = _info(name, spec.mode, EPOCH)
    if spec.directory:
      info.type = tarfile.DIRTYPE
      made.add(name)
      tar.addfile(info)
    elif spec.link:
      info.type, info.linkname = tarfile.SYMTYPE, spec.link
      tar.addfile(info)
    else:
      content = spec.read()
      info.size = len(content)
      tar.addfile(info, io.BytesIO(content))

  with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
    for name in sorted(files):
      parts = name.split("/")
      for i in range(1, len(parts)):
        parent = "/".join(parts[:i])
        if parent not in made and parent not in files:
          add(tar, parent, task_lib.FileSpec(directory=True, mode=0o755))
      add(tar, name, files[name])
  return out.getvalue()


class _Packer:
  """Writes one directory tree, reached by descriptors only, into a tar."""

  def __init__(self, tar: tarfile.TarFile, max_bytes: int):
    self.tar = tar
    self.room = max_bytes
    self.entries = 0
    self.links: dict[tuple[int, int], str] = {}
    self.skipped: list[str] = []

  def directory(self, fd: int, prefix: str) -> None:
    if prefix.count("/") > _MAX_DEPTH:
      self.skipped.append(f"{prefix[:200]} and below (too deep)")
      return
    names = sorted(os.listdir(fd))
    for name in names:
      self.entries += 1
      if self.entries > _MAX_ENTRIES:
        self.skipped.append(f"{prefix}{name} and what follows (too many)")
        return
      self.entry(fd, name, prefix + name)

  def entry(self, parent: int, name: str, path: str) -> None:
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    info = _info(path, stat.S_IMODE(found.st_mode), found.st_mtime)
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFLNK:
      info.type = tarfile.SYMTYPE
      info.linkname = os.readlink(name, dir_fd=parent)
      self.tar.addfile(info)
    elif kind == stat.S_IFDIR:
      info.type = tarfile.DIRTYPE
      self.tar.addfile(info)
      fd = _open(parent, name, found, os.O_DIRECTORY)
      try:
        self.directory(fd, path + "/")
      finally:
        os.close(fd)
    elif kind == stat.S_IFREG:
      self.file(parent, name, path, found, info)
    else:
      self.skipped.append(f"{path} (neither file, directory nor link)")

  def file(self, parent, name, path, found, info) -> None:
    key = (found.st_dev, found.st_ino)
    if found.st_nlink > 1 and key in self.links:
      info.type, info.linkname = tarfile.LNKTYPE, self.links[key]
      self.tar.addfile(info)
      return
    if found.st_size > self.room:
      self.skipped.append(f"{path} ({found.st_size} bytes)")
      return
    self.room -= found.st_size
    fd = _open(parent, name, found, 0)
    with os.fdopen(fd, "rb") as f:
      if not stat.S_ISREG(os.fstat(fd).st_mode):
        self.skipped.append(f"{path} (changed while it was read)")
        return
      info.size = found.st_size
      self.tar.addfile(info, _Padded(f, found.st_size))
    self.links[key] = path


class _Padded:
  """Reads exactly `size` bytes, with zeros where the file ends early."""

  def __init__(self, file: BinaryIO, size: int):
    self._file, self._left = file, size

  def read(self, n: int) -> bytes:
    n = min(n, self._left)
    data = self._file.read(n)
    self._left -= n
    return data + b"\0" * (n - len(data))


def _open(parent: int, name: str, found: os.stat_result, extra: int) -> int:
  flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | extra
  try:
    return os.open(name, flags, dir_fd=parent)
  except PermissionError:
    # Its owner (us, when the sandbox runs as our own user) took the read
    # permission away; that is no reason to lose it.
    mode = stat.S_IMODE(found.st_mode)
    os.chmod(name, mode | 0o700, dir_fd=parent)
    try:
      return os.open(name, flags, dir_fd=parent)
    finally:
      os.chmod(name, mode, dir_fd=parent)


def pack_directory(fd: int, path: pathlib.Path, max_bytes: int) -> list[str]:
  """Writes the tree below the directory descriptor `fd` as a tar at `path`.

  Every process that could change the tree should be dead.

  Args:
    fd: an open directory; links and mounts below it are not followed.
    path: the tar to create, readable by this user only.
    max_bytes: of file contents, apparent size; larger files are left out.

  Returns:
    What was left out, one line each.

  Raises:
    errors.SnapshotError: the tree cannot be read, or the host's disk is full.
  """
  partial = path.with_name(path.name + ".part")
  flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
  try:
    with (
      os.fdopen(os.open(partial, flags, 0o600), "wb") as out,
      tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
      packer = _Packer(tar, max_bytes)
      packer.directory(fd, "")
    partial.rename(path)
  except OSError as e:
    raise errors.SnapshotError(
      f"cannot keep the workspace at {path}: {errno.errorcode.get(e.errno)}"
    ) from e
  return packer.skipped


def _safe_name(name: str) -> str | None:
  """A member's name, relative and without '..', or None."""
  parts = [p for p in name.split("/") if p not in ("", ".")]
  return None if not parts or ".." in parts else "/".join(parts)


def sanitize(
  source: pathlib.Path, path: pathlib.Path, max_bytes: int, strip: str = ""
) -> list[str]:
  """Rewrites a tar from outside as pack_directory would have written it.

  Args:
    source: a tar that nobody vouches for.
    path: the tar to create.
    max_bytes: of file contents.
    strip: a first path component to take off.

  Returns:
    What was left out, one line each.

  Raises:
    errors.SnapshotError: `source` is no tar.
  """
  skipped: list[str] = []
  kept: set[str] = set()
  room = max_bytes
  try:
    with (
      tarfile.open(source, "r:") as old,
      tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as new,
    ):
      for count, member in enumerate(old):
        name = _safe_name(member.name)
        if name is not None and strip:
          first, _, rest = name.partition("/")
          name = (rest or None) if first == strip else name
        if name is None or name in kept:
          continue
        info = _info(name, member.mode, member.mtime)
        target = None
        if member.isdir():
          info.type = tarfile.DIRTYPE
        elif member.issym():
          info.type, info.linkname = tarfile.SYMTYPE, member.linkname
        elif member.islnk():
          other = _safe_name(member.linkname)
          if other is not None and strip:
            other = other.removeprefix(strip + "/")
          if other not in kept:
            skipped.append(f"{name} (link to {member.linkname})")
            continue
          info.type, info.linkname = tarfile.LNKTYPE, other
        elif member.isreg() and member.size <= room and count < _MAX_ENTRIES:
          room -= member.size
          info.size = member.size
          target = old.extractfile(member)
        else:
          skipped.append(f"{name} ({member.size} bytes, type {member.type!r})")
          continue
        kept.add(name)
        new.addfile(info, target)
  except (tarfile.TarError, OSError, UnicodeError) as e:
    raise errors.SnapshotError(f"cannot read the workspace's tar: {e}") from e
  return skipped


def is_empty(path: pathlib.Path) -> bool:
  """True when the tar at `path` holds no entry."""
  with tarfile.open(path, "r:") as tar:
    return tar.next() is None


def read_file(root: int, path: str, max_bytes: int) -> tuple[bytes | None, str]:
  """A regular file below the directory descriptor `root`, by plain names.

  Returns:
    (bytes, "") or (None, why not); no link is followed at any step.
  """
  *folders, name = path.strip("/").split("/")
  fd = os.dup(root)
  try:
    for folder in folders:
      flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
      below = os.open(folder, flags, dir_fd=fd)
      os.close(fd)
      fd = below
    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
      return None, f"{path} is not a regular file"
    if found.st_size > max_bytes:
      return None, f"{path} has {found.st_size} bytes, above {max_bytes}"
    with os.fdopen(_open(fd, name, found, 0), "rb") as f:
      return f.read(max_bytes + 1)[:max_bytes], ""
  except FileNotFoundError:
    return None, ""
  except OSError as e:
    return None, f"{path}: {errno.errorcode.get(e.errno, e.errno)}"
  finally:
    os.close(fd)


def set_times(fd: int, mtime: int, limit: int = 20000) -> None:
  """Gives every entry that was written within a day of now the time `mtime`.

  A time that a command set on purpose (touch -d) is left alone. Links are not
  followed; entries that vanish meanwhile are passed over.
  """
  now = time.time()
  todo = [os.dup(fd)]
  count = 0
  while todo:
    here = todo.pop()
    try:
      with os.scandir(here) as entries:
        for entry in entries:
          count += 1
          if count > limit:
            continue
          try:
            found = entry.stat(follow_symlinks=False)
            if abs(found.st_mtime - now) < 86400:
              os.utime(
                entry.name, (mtime, mtime), dir_fd=here, follow_symlinks=False
              )
            if entry.is_dir(follow_symlinks=False):
              flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
              todo.append(os.open(entry.name, flags, dir_fd=here))
          except OSError:
            continue
    finally:
      os.close(here)
