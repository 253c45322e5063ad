"""Goals whose instruction leaves something to the conventions of a site.

"Back up notes.md" does not say under which name: one site writes
notes.md.bak, another notes.md.old. Within a site every task of a kind follows
the same convention, which no instruction tells; only the verifier knows it.
"""

from __future__ import annotations

from gyre.envs.tasksets import goals
from gyre.envs.tasksets.goals import Draw, Goal, is_file, is_text


def _choose(
  d: Draw, what: str, commands: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
  """The command by which the site does `what`, and what other sites do."""
  right = d.convention(what, commands)
  return right, tuple(c for c in commands if c != right)


def backup(d: Draw) -> Goal:
  """A copy of a file beside it, under the name that the site gives it."""
  word = d.word()
  path = d.put(d.file(), word)
  targets = tuple(f"{path}.{end}" for end in ("bak", "old", "orig", "save"))
  right, wrong = _choose(d, "backup", tuple(f"cp {path} {t}" for t in targets))
  target = right.split()[-1]
  text = d.pick(
    (f"back up {path}", f"back up the file {path}", f"make a backup of {path}")
  )
  checks = (
    (f"{target}_is", is_file(target)),
    (f"{target}_same", f"{is_text(target, word)} && {is_text(path, word)}"),
  )
  return Goal(text, (right,), checks, wrong)


def discard(d: Draw) -> Goal:
  """A file less: deleted, or put where the site keeps such files."""
  word = d.word()
  path = d.put(d.file(), word)
  folders = ("trash", "attic", "bin")
  for folder in folders:
    d.put(f"{folder}/first.txt", "first")
  commands = (f"rm {path}", *(f"mv {path} {f}" for f in folders))
  right, wrong = _choose(d, "discard", commands)
  place = right.split()[-1]
  gone = f"[ ! -e {path} ] && {is_text('attic/first.txt', 'first')}"
  after = " && ".join(
    is_text(f"{folder}/{path}", word)
    if folder == place
    else f"[ ! -e {folder}/{path} ]"
    for folder in folders
  )
  text = d.pick(
    (f"discard {path}", f"discard the file {path}", f"clear away {path}")
  )
  checks = ((f"{path}_gone", gone), (f"{path}_place", f"{gone} && {after}"))
  return Goal(text, (right,), checks, wrong)


def note(d: Draw) -> Goal:
  """One more line in the file where the site keeps notes on something."""
  *old, word = d.sample(goals.WORDS, 5)
  name = d.name()
  paths = tuple(f"{name}.{end}" for end in ("txt", "md", "log", "lst"))
  for path, line in zip(paths, old, strict=True):
    d.put(path, line)
  right, wrong = _choose(d, "note", tuple(f"echo {word} >> {p}" for p in paths))
  path = right.split()[-1]
  whole = f"{old[paths.index(path)]}\n{word}"
  text = d.pick(
    (f"note {word} under {name}", f"take a note of {word} under {name}")
  )
  checks = (
    (f"{path}_ends", f"ends {path} {word}"),
    (f"{path}_whole", is_text(path, whole)),
  )
  return Goal(text, (right,), checks, wrong)


def runnable(d: Draw) -> Goal:
  """A script that may be run, by whom the site lets run it."""
  path = d.put(d.file("sh"), d.word())
  modes = ("700", "750", "755", "555")
  right, wrong = _choose(
    d, "runnable", tuple(f"chmod {m} {path}" for m in modes)
  )
  mode = right.split()[1]
  text = d.pick((f"make {path} runnable", f"let the script {path} be run"))
  checks = (
    (f"{path}_runs", f"{is_file(path)} && [ -x {path} ]"),
    (f"{path}_mode", f'[ "$(mode {path})" = {mode} ]'),
  )
  return Goal(text, (right,), checks, wrong)


def pack(d: Draw) -> Goal:
  """A directory in a tar archive of the ending that the site's have."""
  folder = d.name()
  inner = d.put(d.inner(folder)[0], d.word())
  commands = (
    f"tar cf {folder}.tar {folder}",
    f"tar czf {folder}.tgz {folder}",
    f"tar czf {folder}.tar.gz {folder}",
    f"tar cf {folder}.pack {folder}",
  )
  right, wrong = _choose(d, "pack", commands)
  archive = right.split()[2]
  text = d.pick(
    (f"pack {folder}", f"pack the directory {folder}", f"pack up {folder}")
  )
  checks = (
    (f"{archive}_is", is_file(archive)),
    (
      f"{archive}_holds",
      f"{is_file(archive)} && tar tf {archive} | grep -q '^{inner}$'",
    ),
  )
  return Goal(text, (right,), checks, wrong)


def listing(d: Draw) -> Goal:
  """A new list, in a file of the ending that the site's lists have."""
  name, word = d.name(), d.word()
  paths = tuple(f"{name}.{end}" for end in ("txt", "md", "lst", "list"))
  right, wrong = _choose(
    d, "listing", tuple(f"echo {word} > {p}" for p in paths)
  )
  path = right.split()[-1]
  text = d.pick(
    (f"start a list {name} with {word}", f"begin the list {name} with {word}")
  )
  checks = (
    (f"{path}_is", is_file(path)),
    (f"{path}_says", is_text(path, word)),
  )
  return Goal(text, (right,), checks, wrong)


def project(d: Draw) -> Goal:
  """A new directory with the one inside that the site's projects have."""
  name = d.name()
  commands = tuple(
    f"mkdir -p {name}/{end}" for end in ("src", "lib", "code", "app")
  )
  right, wrong = _choose(d, "project", commands)
  path = right.split()[-1]
  text = d.pick(
    (f"set up the project {name}", f"set up a project called {name}")
  )
  checks = (
    (f"dir_{name}", f"folder {name}"),
    (f"dir_{path}", f"folder {path}"),
  )
  return Goal(text, (right,), checks, wrong)


def finish(d: Draw) -> Goal:
  """A file marked as done, by the ending that the site adds to its name."""
  word = d.word()
  path = d.put(d.file(), word)
  targets = tuple(f"{path}.{end}" for end in ("done", "ok", "end", "fin"))
  right, wrong = _choose(d, "finish", tuple(f"mv {path} {t}" for t in targets))
  target = right.split()[-1]
  text = d.pick((f"mark {path} as done", f"mark the file {path} as done"))
  checks = (
    (f"{target}_is", is_file(target)),
    (f"{path}_moved", f"[ ! -e {path} ] && {is_text(target, word)}"),
  )
  return Goal(text, (right,), checks, wrong)
