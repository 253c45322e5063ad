"""Goals about files and directories: one short command each."""

from __future__ import annotations

from gyre.envs import task as task_lib
from gyre.envs.tasksets import goals
from gyre.envs.tasksets.goals import Draw, Goal, is_file, is_text


def directory(d: Draw) -> Goal:
  """Two new directories, side by side or one in the other."""
  a, b = d.name(), d.name()
  if d.below(2):
    text = d.pick(
      (
        f"create the directories {a} and {b}",
        f"make the directories {a} and {b}",
        f"make two directories, {a} and {b}",
      )
    )
    paths, command = (a, b), f"mkdir {a} {b}"
  else:
    text = d.pick(
      (
        f"create the directory {a} with the directory {b} inside",
        f"make the directory {b} inside a new directory {a}",
      )
    )
    paths, command = (a, f"{a}/{b}"), f"mkdir -p {a}/{b}"
  checks = tuple((f"dir_{p}", f"folder {p}") for p in paths)
  return Goal(text, (command,), checks, (f"mkdir {a}", f"touch {a} {b}"))


def write(d: Draw) -> Goal:
  """A new file with a word or two."""
  path = d.file()
  words = " ".join(d.sample(goals.WORDS, d.number(1, 2)))
  text = d.pick(
    (
      f"write {words} to the file {path}",
      f"create the file {path} with the text {words}",
      f"make a file {path} that says {words}",
    )
  )
  checks = (
    (f"{path}_is", is_file(path)),
    (f"{path}_says", is_text(path, words)),
  )
  wrong = (f"touch {path}", f"echo {words} {words} > {path}")
  return Goal(text, (f"echo {words} > {path}",), checks, wrong)


def append(d: Draw) -> Goal:
  """One more line at the end of a file."""
  *old, word = d.sample(goals.WORDS, d.number(2, 3))
  path = d.put(d.file(), "\n".join(old))
  text = d.pick(
    (
      f"append the line {word} to the file {path}",
      f"add the line {word} at the end of {path}",
      f"add {word} as the last line of {path}",
    )
  )
  checks = (
    (f"{path}_ends", f"ends {path} {word}"),
    (f"{path}_whole", is_text(path, "\n".join([*old, word]))),
  )
  wrong = (f"echo {word} > {path}", f"echo {old[0]} >> {path}")
  return Goal(text, (f"echo {word} >> {path}",), checks, wrong)


def copy(d: Draw) -> Goal:
  """A copy under another name or in a directory."""
  word = d.word()
  source = d.put(d.file(), word)
  if d.below(2):
    target = place = d.file()
    where = d.pick((f"to {target}", f"to the new file {target}"))
  else:
    place = d.folder(d.name())
    target = f"{place}/{source}"
    where = f"into the directory {place}"
  text = d.pick((f"copy {source} {where}", f"copy the file {source} {where}"))
  checks = (
    (f"{target}_is", is_file(target)),
    (f"{target}_same", f"{is_text(target, word)} && {is_text(source, word)}"),
  )
  wrong = (f"mv {source} {place}", f"touch {target}")
  return Goal(text, (f"cp {source} {place}",), checks, wrong)


def move(d: Draw) -> Goal:
  """A new name, or another directory, for a file."""
  word = d.word()
  source = d.put(d.file(), word)
  if d.below(2):
    target = place = d.file()
    text = d.pick(
      (
        f"rename {source} to {target}",
        f"rename the file {source} to {target}",
        f"change the name of {source} to {target}",
      )
    )
  else:
    place = d.folder(d.name())
    target = f"{place}/{source}"
    text = d.pick(
      (
        f"move {source} into the directory {place}",
        f"move the file {source} to the directory {place}",
      )
    )
  checks = (
    (f"{target}_says", is_text(target, word)),
    (f"{source}_gone", f"[ ! -e {source} ] && {is_file(target)}"),
  )
  wrong = (f"cp {source} {place}", f"rm {source}")
  return Goal(text, (f"mv {source} {place}",), checks, wrong)


def remove(d: Draw) -> Goal:
  """Two files less, or a directory with what it holds; others stay."""
  word = d.word()
  keep = d.put(d.file(), word)
  if d.below(2):
    a, b = (d.put(d.file(), d.word()) for _ in range(2))
    text = d.pick(
      (
        f"delete the files {a} and {b}",
        f"remove the files {a} and {b}",
        f"delete {a} and {b}",
      )
    )
    gone, command = (a, b), f"rm {a} {b}"
  else:
    a = d.name()
    b = d.put(d.inner(a)[0], d.word())
    text = d.pick(
      (
        f"delete the directory {a} and all it holds",
        f"remove the directory {a} with all its files",
      )
    )
    gone, command = (b, a), f"rm -r {a}"
  checks = tuple(
    (f"{p}_gone", f"[ ! -e {p} ] && {is_text(keep, word)}") for p in gone
  )
  wrong = (f"rm -r {a} {b} {keep}", f"touch {gone[-1]}")
  return Goal(text, (command,), checks, wrong)


def permissions(d: Draw) -> Goal:
  """Another mode of a file; both parts of it change."""
  path = d.put(d.file(d.pick(("sh", "txt"))), d.word())
  mode = d.pick(("700", "750", "755", "500", "555", "711", "400", "777"))
  text = d.pick(
    (
      f"set the permissions of {path} to {mode}",
      f"change the mode of {path} to {mode}",
      f"give the file {path} the mode {mode}",
    )
  )
  checks = (
    (
      f"{path}_owner",
      f'case "$(mode {path})" in {mode[0]}??) ;; *) false ;; esac',
    ),
    (f"{path}_mode", f'[ "$(mode {path})" = {mode} ]'),
  )
  wrong = (f"chmod {mode[0]}22 {path}", f"chmod 6{mode[1:]} {path}")
  return Goal(text, (f"chmod {mode} {path}",), checks, wrong)


def link(d: Draw) -> Goal:
  """A symbolic or a hard link to a file."""
  target = d.put(d.file(), d.word())
  name = d.file()
  if d.below(4):
    text = d.pick(
      (
        f"make a symbolic link {name} to {target}",
        f"create a symbolic link named {name} that points to {target}",
        f"make {name} a symbolic link to {target}",
      )
    )
    command = f"ln -s {target} {name}"
    checks = (
      (f"{name}_link", f"[ -L {name} ]"),
      (
        f"{name}_target",
        f'case "$(readlink {name})" in {target}|./{target}|"$PWD/{target}"'
        f"|/app/{target}) {is_file(target)} ;; *) false ;; esac",
      ),
    )
    wrong = (f"ln -s {name} {target}", f"ln -s nothing {name}")
  else:
    text = d.pick(
      (
        f"make a hard link {name} to {target}",
        f"create a hard link named {name} to the file {target}",
      )
    )
    command = f"ln {target} {name}"
    checks = (
      (f"{name}_is", is_file(name)),
      (f"{name}_same", f"{is_file(name)} && [ {name} -ef {target} ]"),
    )
    wrong = (f"cp {target} {name}", f"ln -s {target} {name}")
  return Goal(text, (command,), checks, wrong)


def archive(d: Draw) -> Goal:
  """A tar archive made or unpacked, or a file compressed."""
  what = d.below(3)
  folder, name = d.name(), d.name()
  a, b = d.inner(folder, n=2)
  words = d.sample(goals.WORDS, 2)
  if what == 0:
    d.put(a, words[0])
    d.put(b, words[1])
    tar = f"{name}.tar"
    text = d.pick(
      (
        f"pack the directory {folder} into the archive {tar}",
        f"create the tar archive {tar} of the directory {folder}",
      )
    )
    checks = tuple(
      (f"{tar}_{p}", f"{is_file(tar)} && tar tf {tar} | grep -q '{p}$'")
      for p in (a, b)
    )
    wrong = (f"tar cf {tar} {a}", f"touch {tar}")
    return Goal(text, (f"tar cf {tar} {folder}",), checks, wrong)
  if what == 1:
    tar = f"{name}.tar"
    content = goals.tar_bytes({a: words[0], b: words[1]})
    d.files[tar] = task_lib.FileSpec(content)
    text = d.pick((f"unpack the archive {tar}", f"extract the archive {tar}"))
    checks = tuple(
      (f"{p}_says", is_text(p, w)) for p, w in zip((a, b), words, strict=True)
    )
    wrong = (f"tar xf {tar} {a}", f"tar tf {tar}")
    return Goal(text, (f"tar xf {tar}",), checks, wrong)
  path = d.put(f"{name}.txt", words[0])
  text = d.pick((f"compress {path} with gzip", f"gzip the file {path}"))
  zipped = f"{path}.gz"
  checks = (
    (f"{zipped}_is", f"{is_file(zipped)} && gzip -t {zipped}"),
    (
      f"{zipped}_says",
      f"[ ! -e {path} ] && {is_file(zipped)} && "
      f'[ "$(gzip -dc {zipped} | head -c 4096)" = {words[0]} ]',
    ),
  )
  wrong = (f"gzip -k {path}", f"mv {path} {zipped}")
  return Goal(text, (f"gzip {path}",), checks, wrong)
