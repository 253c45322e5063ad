"""What a task's environment needs, and whether a host without images has it.

A backend without images (bubblewrap, process) offers the host's own programs.
It serves a task whose environment/ is plain files, or whose Dockerfile starts
from a generic base and only places files: FROM, WORKDIR, COPY, ADD of files,
ENV, and what changes nothing (LABEL, EXPOSE, CMD, ENTRYPOINT, USER, SHELL,
MAINTAINER, STOPSIGNAL, ARG, RUN mkdir). Anything else is refused, with what
was asked for.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import posixpath
import re
import shlex
from collections.abc import Mapping

from gyre.envs import task as task_lib

GENERIC_BASES = ("ubuntu", "debian", "bash", "busybox", "buildpack-deps")
_SYSTEM = frozenset(
  "bin boot dev etc lib lib32 lib64 libx32 proc run sbin sys usr var tests "
  "logs tmp".split()
)
_NO_EFFECT = frozenset(
  "LABEL EXPOSE CMD ENTRYPOINT USER SHELL MAINTAINER STOPSIGNAL ARG "
  "HEALTHCHECK".split()
)


class ImageRefused(task_lib.TaskError):
  """The host cannot offer the task's image; the message says why."""


@dataclasses.dataclass(frozen=True)
class Layout:
  """What a host without images lays out for a task.

  Attributes:
    workdir: absolute; where the agent starts.
    files: path relative to workdir -> file.
    env: variables of the image.
  """

  workdir: str
  files: Mapping[str, task_lib.FileSpec]
  env: Mapping[str, str]


def _instructions(text: str) -> list[tuple[str, str]]:
  """(INSTRUCTION, rest) of a Dockerfile, continuation lines joined."""
  out = []
  pending = ""
  for line in text.splitlines():
    stripped = line.strip()
    if not stripped or stripped.startswith("#"):
      continue
    if stripped.endswith("\\"):
      pending += stripped[:-1] + " "
      continue
    word, _, rest = (pending + stripped).partition(" ")
    out.append((word.upper(), rest.strip()))
    pending = ""
  return out


def _check_workdir(path: str, task_id: str) -> str:
  path = posixpath.normpath(path)
  first = path.split("/")[1]
  if not path.startswith("/") or not first or first in _SYSTEM:
    raise ImageRefused(
      f"task {task_id}: its workdir {path} is a system directory of the host"
    )
  return path


def _words(rest: str) -> list[str]:
  if rest.startswith("["):
    return list(json.loads(rest))
  return shlex.split(rest)


def _copy(
  context: Mapping[str, task_lib.FileSpec], rest: str, cwd: str, refuse
) -> dict[str, task_lib.FileSpec]:
  """absolute path -> file, of one COPY."""
  words = _words(rest)
  mode = None
  while words and words[0].startswith("--"):
    flag, _, value = words.pop(0).partition("=")
    if flag == "--chmod" and re.fullmatch(r"[0-7]{3,4}", value):
      mode = int(value, 8)
    elif flag not in ("--chown", "--link"):
      refuse(f"COPY {flag}")
  if len(words) < 2:
    refuse(f"COPY {rest}")
  *sources, target = words
  into = target.endswith("/") or target in (".", "./") or len(sources) > 1
  base = posixpath.normpath(posixpath.join(cwd, target))
  out: dict[str, task_lib.FileSpec] = {}
  for source in sources:
    if "://" in source:
      refuse(f"ADD {source}")
    name = posixpath.normpath(source.lstrip("/") or ".")
    if name == "." or any(k.startswith(name + "/") for k in context):
      prefix = "" if name == "." else name + "/"
      found = {
        k[len(prefix) :]: v for k, v in context.items() if k.startswith(prefix)
      }
      out |= {f"{base}/{k}": v for k, v in found.items()}
      continue
    names = [
      k
      for k in context
      if fnmatch.fnmatchcase(k, name) and k.count("/") == name.count("/")
    ]
    if not names:
      refuse(f"COPY {source} (not in environment/)")
    for k in names:
      path = (
        f"{base}/{posixpath.basename(k)}" if into or len(names) > 1 else base
      )
      out[path] = context[k]
  if mode is not None:
    out = {
      k: v if v.directory or v.link else dataclasses.replace(v, mode=mode)
      for k, v in out.items()
    }
  return out


def _is_generic(base: str) -> bool:
  name = base.removeprefix("docker.io/").removeprefix("library/")
  return name.partition("@")[0].partition(":")[0] in GENERIC_BASES


def host_layout(task: task_lib.Task) -> Layout:
  """What to lay out for `task` on a host without images.

  Raises:
    ImageRefused: the task names an image, GPUs, or a Dockerfile step that
      needs one; the message names it.
  """

  def refuse(what: str):
    raise ImageRefused(
      f"task {task.task_id} needs {what}: this backend offers the host's own "
      "programs, not images"
    )

  if task.image:
    refuse(f"the image {task.image}")
  if task.limits.gpus:
    refuse(f"{task.limits.gpus} GPUs")
  for name in ("docker-compose.yaml", "docker-compose.yml"):
    if name in task.files:
      refuse(f"services ({name})")
  if "Dockerfile" not in task.files:
    return Layout(_check_workdir(task.workdir, task.task_id), task.files, {})
  cwd, env = "/", {}
  placed: dict[str, task_lib.FileSpec] = {}
  stages = 0
  for word, rest in _instructions(task.dockerfile):
    if word == "FROM":
      stages += 1
      if stages > 1 or not _is_generic(rest.split()[0]):
        refuse(f"the image FROM {rest}")
    elif word == "WORKDIR":
      cwd = posixpath.normpath(posixpath.join(cwd, rest))
    elif word in ("COPY", "ADD"):
      placed |= _copy(task.files, rest, cwd, refuse)
    elif word == "ENV":
      words = _words(rest)
      if "=" in words[0]:
        env |= dict(w.partition("=")[::2] for w in words)
      else:
        env[words[0]] = " ".join(words[1:])
    elif word == "RUN":
      words = _words(rest)
      if words[:2] != ["mkdir", "-p"] or any(w in "&&;|" for w in words):
        refuse(f"the build step RUN {rest[:60]}")
      for path in words[2:]:
        full = posixpath.normpath(posixpath.join(cwd, path))
        placed.setdefault(full, task_lib.FileSpec(directory=True, mode=0o755))
    elif word not in _NO_EFFECT:
      refuse(f"the build step {word} {rest[:60]}")
  if not stages:
    refuse("a FROM in its Dockerfile")
  workdir = task.workdir if task.workdir != task_lib.WORKDIR else cwd
  workdir = _check_workdir(
    task_lib.WORKDIR if workdir == "/" else workdir, task.task_id
  )
  files = {}
  for path, spec in placed.items():
    if path == workdir:
      continue
    if not path.startswith(workdir + "/"):
      refuse(f"a file outside its workdir ({path})")
    files[path[len(workdir) + 1 :]] = spec
  return Layout(workdir, files, env)
