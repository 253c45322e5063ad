"""What of this machine a sandbox shows: paths that its user can read.

A sandbox that root opens is a user of its own, to whom what lies below /root
is closed. A harness or an interpreter there is copied once a process, into
the directory that this process's sandboxes share.
"""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import threading

from gyre.envs import errors

_copying = threading.Lock()
# Of an interpreter's own installation, which a virtual environment only needs
# for its standard library.
_UNUSED = ("site-packages", "test", "idlelib", "include", "share", "*.a")


def reachable(path: pathlib.Path) -> bool:
  """True when other users may run the file, or enter the folder, at `path`."""
  return all(p.stat().st_mode & 0o001 for p in (path, *path.parents))


def _is_interpreter(path: pathlib.Path) -> bool:
  return (path / "bin" / "python3").exists() and not (
    path / "pyvenv.cfg"
  ).exists()


def _copy(path: pathlib.Path, target: pathlib.Path) -> None:
  if path.is_file():
    shutil.copy2(path, target)
  else:
    skipped = ("__pycache__", *(_UNUSED if _is_interpreter(path) else ()))
    ignore = shutil.ignore_patterns(*skipped)
    shutil.copytree(path, target, symlinks=True, ignore=ignore)
  for folder, dirs, names in os.walk(target):
    for name in (".", *dirs, *names):
      entry = os.path.join(folder, name)
      if not os.path.islink(entry):
        mode = os.stat(entry).st_mode
        open_to = 0o055 if mode & 0o100 else 0o044
        os.chmod(entry, mode | open_to)


def readable(
  path: pathlib.Path, shared: pathlib.Path, leaves_root: bool
) -> pathlib.Path:
  """`path`, or a copy of it where the sandbox's user cannot reach it.

  Args:
    path: a file or directory.
    shared: where copies go; it is removed after this process's end.
    leaves_root: the sandbox's user is not this one.

  Raises:
    errors.SandboxError: it does not exist, or cannot be copied.
  """
  path = path.resolve()
  if not path.exists():
    raise errors.SandboxError(f"cannot show {path}: it does not exist")
  if not leaves_root or reachable(path):
    return path
  copy = shared / "copies" / str(path).strip("/").replace("/", "_")
  with _copying:
    if not copy.exists():
      partial = copy.with_name(copy.name + ".part")
      copy.parent.mkdir(mode=0o755, exist_ok=True)
      try:
        _copy(path, partial)
      except (OSError, shutil.Error) as e:
        shutil.rmtree(partial, ignore_errors=True)
        raise errors.SandboxError(
          f"{path} is closed to other users and cannot be copied: {e}"
        ) from e
      partial.rename(copy)
      atexit.register(shutil.rmtree, copy, ignore_errors=True)
  return copy
