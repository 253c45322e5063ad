"""Goals about the text in files: edit, search, count, sort, join, cut."""

from __future__ import annotations

from gyre.envs.tasksets import goals
from gyre.envs.tasksets.goals import Draw, Goal, is_file, is_text, result

_TO = ("write", "to"), ("save", "in")


def _mixed(d: Draw, word: str, times: int, others: int) -> list[str]:
  """Lines of one word each: `word` `times` times among `others` others."""
  rest = d.sample([w for w in goals.WORDS if w != word], others)
  lines = [word] * times + rest
  return d.sample(lines, len(lines))


def edit(d: Draw) -> Goal:
  """A word replaced, or lines removed, in place."""
  old, new, other = d.sample(goals.WORDS, 3)
  lines = [x for x in _mixed(d, old, 2, 3) if x != new]
  path = d.put(d.file(), "\n".join(lines))
  if d.below(3):
    text = d.pick(
      (
        f"replace the word {old} with {new} in {path}",
        f"change every {old} to {new} in the file {path}",
        f"in the file {path} replace {old} by {new}",
      )
    )
    after = [new if x == old else x for x in lines]
    first = (
      f"{is_file(path)} && ! grep -qw {old} {path} && grep -qw {new} {path}"
    )
    command = f"sed -i s/{old}/{new}/ {path}"
    wrong = (f"sed -i s/{old}/{other}/ {path}", f"echo {new} > {path}")
  else:
    text = d.pick(
      (
        f"delete the lines with the word {old} from {path}",
        f"remove every line that says {old} from {path}",
      )
    )
    after = [x for x in lines if x != old]
    first = f"{goals.is_filled(path)} && ! grep -qw {old} {path}"
    command = f"sed -i /{old}/d {path}"
    wrong = (f"sed -i s/{old}// {path}", f"echo {new} > {path}")
  checks = (
    (f"{path}_changed", first),
    (f"{path}_whole", is_text(path, "\n".join(after))),
  )
  return Goal(text, (command,), checks, wrong)


def count(d: Draw) -> Goal:
  """How many lines, matching lines or files; the number goes to a file."""
  what, word = d.below(3), d.word()
  verb, to = d.pick(_TO)
  if what == 2:
    folder, n = d.name(), d.number(2, 4)
    for path in d.inner(folder, n=n):
      d.put(path, d.word())
    thing, source = f"files in the directory {folder}", f"ls {folder} | wc -l"
  else:
    times = d.number(2, 4)
    lines = _mixed(d, word, times, d.number(1, 4))
    path = d.put(d.file(), "\n".join(lines))
    if what:
      n, thing = times, f"lines with the word {word} in {path}"
      source = f"grep -c {word} {path}"
    else:
      n, thing, source = len(lines), f"lines of {path}", f"wc -l < {path}"
  out = d.file("txt")
  text = d.pick(
    (
      f"count the {thing} and {verb} the number {to} {out}",
      f"{verb} the number of {thing} {to} {out}",
    )
  )
  checks = (
    (f"{out}_number", f"{is_file(out)} && grep -q '[0-9]' {out}"),
    (f"{out}_right", f"flat {out} {n}"),
  )
  wrong = (f"echo {n + 1} > {out}", f"touch {out}")
  return Goal(text, (f"{source} > {out}",), checks, wrong)


def search(d: Draw) -> Goal:
  """Which files hold a word, or have an extension."""
  folder, word = d.name(), d.word()
  verb, to = d.pick(_TO)
  by_name = d.below(2)
  names = d.sample(goals.NAMES, 4)
  others = d.sample([w for w in goals.WORDS if w != word], 4)
  ext = "log" if by_name else "txt"
  found = [f"{name}.{ext}" for name in names[:2]]
  paths = [*found, *(f"{name}.txt" for name in names[2:])]
  for i, path in enumerate(paths):
    hit = i < 2 and not by_name
    d.put(f"{folder}/{path}", word if hit else others[i])
  out = d.file("txt")
  if by_name:
    text = f"{verb} the names of the log files in {folder} {to} {out}"
    command = f"ls {folder}/*.log > {out}"
  else:
    text = d.pick(
      (
        f"{verb} the names of the files in {folder} that contain {word} "
        f"{to} {out}",
        f"find the files in {folder} with the word {word} and {verb} their "
        f"names {to} {out}",
      )
    )
    command = f"grep -l {word} {folder}/* > {out}"
  right = goals.quoted("\n".join(sorted(found)))
  checks = (
    (f"{out}_one", f"{is_file(out)} && grep -q {found[0]} {out}"),
    (f"{out}_right", f"names {out} {right}"),
  )
  wrong = (f"ls {folder} > {out}", f"echo {found[0]} > {out}")
  return Goal(text, (command,), checks, wrong)


def order(d: Draw) -> Goal:
  """Lines sorted: by letter, backwards, by number, without repeats."""
  what, out = d.below(4), d.file("txt")
  if what == 2:
    numbers = [d.number(2, 9), d.number(10, 19), d.number(100, 199)]
    good = [str(n) for n in numbers]
    lines = [good[i] for i in d.pick(((1, 0, 2), (2, 0, 1), (1, 2, 0)))]
    flag, how = "-n ", "by number"
  else:
    good = sorted(d.sample(goals.WORDS, 4))
    lines = [good[i] for i in d.pick(((1, 3, 0, 2), (2, 0, 3, 1)))]
    if what == 1:
      good.reverse()
      flag, how = "-r ", "in reverse order"
    elif what == 3:
      lines.append(lines[0])
      flag, how = "-u ", "without repeated lines"
    else:
      flag, how = "", "by letter"
  path = d.put(d.file(), "\n".join(lines))
  verb, to = d.pick(_TO)
  text = d.pick(
    (
      f"sort {path} {how} and {verb} the result {to} {out}",
      f"sort the lines of {path} {how} into the new file {out}",
    )
  )
  return Goal(
    text,
    (f"sort {flag}{path} > {out}",),
    **result(out, "\n".join(good), f"cp {path} {out}"),
  )


def join(d: Draw) -> Goal:
  """Two files put together: one after the other, side by side, by key."""
  what, out = d.below(3), d.file("txt")
  left, right = d.sample(goals.WORDS, 3), d.sample(goals.WORDS, 3)
  if what == 2:
    left.sort()
  columns = [f"{x} {d.number(10, 99)}" for x in left]
  a = d.put(d.file(), "\n".join(columns if what == 2 else left))
  if what == 2:
    keyed = [f"{x} {y}" for x, y in zip(left, right, strict=True)]
    b = d.put(d.file(), "\n".join(keyed))
    good = [f"{x} {y}" for x, y in zip(columns, right, strict=True)]
    command = f"join {a} {b} > {out}"
    text = f"join {a} and {b} by their first column into {out}"
    wrong = f"paste {a} {b} > {out}"
  else:
    b = d.put(d.file(), "\n".join(right))
    if what:
      good = [f"{x},{y}" for x, y in zip(left, right, strict=True)]
      command = f"paste -d , {a} {b} > {out}"
      text = f"paste the lines of {a} and {b} with a comma between into {out}"
      wrong = f"paste {a} {b} > {out}"
    else:
      good = left + right
      command = f"cat {a} {b} > {out}"
      text = d.pick(
        (
          f"put {a} and then {b} together into {out}",
          f"write the lines of {a} followed by those of {b} to {out}",
        )
      )
      wrong = f"cat {a} > {out}"
  return Goal(text, (command,), **result(out, "\n".join(good), wrong))


def lines(d: Draw) -> Goal:
  """The first, the last, or one line of a file."""
  words = d.sample(goals.WORDS, 5)
  path, out = d.put(d.file(), "\n".join(words)), d.file("txt")
  verb, to = d.pick(_TO)
  what, n = d.below(3), d.number(2, 3)
  if what == 0:
    which, good, source = f"first {n} lines", words[:n], f"head -n {n} {path}"
  elif what == 1:
    which, good, source = f"last {n} lines", words[-n:], f"tail -n {n} {path}"
  else:
    which, good, source = f"line {n}", words[n - 1 : n], f"sed -n {n}p {path}"
  text = d.pick(
    (
      f"{verb} the {which} of {path} {to} {out}".replace("the line", "line"),
      f"copy the {which} of {path} to {out}".replace("the line", "line"),
    )
  )
  return Goal(
    text,
    (f"{source} > {out}",),
    **result(out, "\n".join(good), f"cp {path} {out}"),
  )


def columns(d: Draw) -> Goal:
  """One column of a table of three, separated by commas."""
  rows = [d.sample(goals.WORDS, 3) for _ in range(3)]
  path = d.put(d.file("csv"), "\n".join(",".join(r) for r in rows))
  out, n = d.file("txt"), d.below(3)
  verb, to = d.pick(_TO)
  ordinal = ("first", "second", "third")[n]
  text = d.pick(
    (
      f"{verb} the {ordinal} column of {path} {to} {out}",
      f"{verb} column {n + 1} of the table {path} {to} {out}",
    )
  )
  good = "\n".join(r[n] for r in rows)
  wrong = f"cut -d, -f{(n + 1) % 3 + 1} {path} > {out}"
  return Goal(
    text, (f"cut -d, -f{n + 1} {path} > {out}",), **result(out, good, wrong)
  )


def case(d: Draw) -> Goal:
  """A file in capital letters."""
  words = d.sample(goals.WORDS, 2)
  path, out = d.put(d.file(), "\n".join(words)), d.file("txt")
  verb, to = d.pick(_TO)
  text = d.pick(
    (
      f"{verb} the text of {path} in capital letters {to} {out}",
      f"change {path} to capital letters and {verb} the result {to} {out}",
    )
  )
  good = "\n".join(words).upper()
  return Goal(
    text,
    (f"tr a-z A-Z < {path} > {out}",),
    **result(out, good, f"cp {path} {out}"),
  )
