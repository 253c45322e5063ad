"""Goals about environment, scripts, JSON, processes, and written orders."""

from __future__ import annotations

import itertools
import json as json_lib

from gyre.envs.tasksets import files, goals
from gyre.envs.tasksets.goals import (
  Draw,
  Goal,
  is_file,
  is_filled,
  is_text,
  quoted,
  result,
)


def environment(d: Draw) -> Goal:
  """A variable exported, or taken from a file of settings."""
  name, other = d.sample(goals.VARIABLES, 2)
  word, spare = d.sample(goals.WORDS, 2)
  out = d.file("txt")
  if d.below(2):
    text = d.pick(
      (
        f"export the variable {name} with the value {word} and save the "
        f"output of env in {out}",
        f"set the environment variable {name} to {word}, export it and save "
        f"the output of env in {out}",
      )
    )
    command = f"export {name}={word}; env > {out}"
    checks = (
      (f"{out}_env", f"{is_file(out)} && grep -q '^PWD=' {out}"),
      (f"{out}_{name}", f"{is_file(out)} && grep -qx {name}={word} {out}"),
    )
    wrong = (f"env > {out}", f"echo {name}={word} > {out}")
    return Goal(text, (command,), (checks[0], checks[1]), wrong)
  settings = d.put(d.file("sh"), f"{other}={spare}\n{name}={word}")
  text = d.pick(
    (
      f"load the settings in {settings} and write the value of {name} to {out}",
      f"source {settings} and save the value of {name} in {out}",
    )
  )
  command = f". ./{settings}; echo ${name} > {out}"
  return Goal(text, (command,), **result(out, word, f"cp {settings} {out}"))


def program(d: Draw) -> Goal:
  """A small script: written, made executable, or run."""
  path, word = d.file("sh"), d.word()
  what = d.below(3)
  line = f"grep -Eqx 'echo [\"'\\'']?{word}[\"'\\'']?' {path}"
  says = (f"{path}_says", f"{is_file(path)} && {line}")
  if what == 0:
    text = d.pick(
      (
        f"write a script {path} that runs echo {word} and make it executable",
        f"create the executable script {path} with the command echo {word}",
      )
    )
    command = f"echo echo {word} > {path}; chmod +x {path}"
    checks = (says, (f"{path}_runs", f"{is_file(path)} && [ -x {path} ]"))
    wrong = (f"echo echo {word} > {path}", f"touch {path}; chmod +x {path}")
    return Goal(text, (command,), checks, wrong)
  out = d.file("txt")
  if what == 1:
    text = (
      f"write a script {path} that runs echo {word}, run it and save its "
      f"output in {out}"
    )
    command = f"echo echo {word} > {path}; sh {path} > {out}"
    checks = (says, (f"{out}_right", is_text(out, word)))
    wrong = (f"echo echo {word} > {path}", f"echo {word} > {out}")
    return Goal(text, (command,), checks, wrong)
  d.put(path, 'echo "hello $1"', 0o755)
  text = d.pick(
    (
      f"run the script {path} with the argument {word} and save its output "
      f"in {out}",
      f"save the output of {path} run with the argument {word} in {out}",
    )
  )
  return Goal(
    text,
    (f"sh {path} {word} > {out}",),
    **result(out, f"hello {word}", f"sh {path} > {out}"),
  )


def json(d: Draw) -> Goal:
  """A JSON object: written, changed, or read."""
  first, second = (v.lower() for v in d.sample(goals.VARIABLES, 2))
  word, spare = d.sample(goals.WORDS, 2)
  size, new = d.number(10, 49), d.number(50, 99)
  path, what = d.file("json"), d.below(3)

  def dump(value):
    return json_lib.dumps(value, separators=(",", ":"))

  if what == 0:
    text = d.pick(
      (
        f"write a JSON object with {first} set to the number {size} to {path}",
        f"create {path} with a JSON object where {first} is {size}",
      )
    )
    good = dump({first: size})
    checks = (
      (f"{path}_key", f"{is_file(path)} && grep -q '\"{first}\"' {path}"),
      (f"{path}_right", f"flat {path} {quoted(good)}"),
    )
    wrong = (f"echo {first}={size} > {path}", f"echo '\"{first}\"' > {path}")
    return Goal(text, (f"echo '{good}' > {path}",), checks, wrong)
  d.put(path, dump({first: word, second: size}))
  if what == 1:
    good = dump({first: word, second: new})
    text = d.pick(
      (
        f"change {second} from {size} to {new} in {path}",
        f"set the value of {second} in {path} to {new}",
      )
    )
    pair = f"'\"{second}\" *: *{new}[^0-9]'"
    checks = (
      (f"{path}_{second}", f"{is_file(path)} && grep -q {pair} {path}"),
      (f"{path}_right", f"flat {path} {quoted(good)}"),
    )
    wrong = (
      f"echo '{dump({second: new})}' > {path}",
      f"sed -i s/{size}/{new + 1}/ {path}",
    )
    command = f'sed -i \'s/"{second}":[0-9]*/"{second}":{new}/\' {path}'
    return Goal(text, (command,), checks, wrong)
  out = d.file("txt")
  text = d.pick(
    (
      f"write the value of {first} in {path} to {out}",
      f"read {path} and save the value of {first} in {out}",
    )
  )
  command = f"cut -d '\"' -f 4 {path} > {out}"
  return Goal(text, (command,), **result(out, word, f"echo {spare} > {out}"))


def process(d: Draw) -> Goal:
  """An exit status, a job in the background, a listing of processes."""
  what, word = d.below(3), d.word()
  if what == 2:
    names = d.sample(goals.WORDS, 3)
    ids = d.sample(range(100, 1000), 3)
    rows = [f"{i} {n}" for i, n in zip(ids, names, strict=True)]
    listing, out = d.put(d.file(), "\n".join(rows)), d.file("txt")
    k = d.below(3)
    text = d.pick(
      (
        f"the file {listing} lists processes: write the number of the process "
        f"{names[k]} to {out}",
        f"write the process number of {names[k]} in the listing {listing} to "
        f"{out}",
      )
    )
    command = f"grep {names[k]} {listing} | cut -d ' ' -f 1 > {out}"
    good = str(ids[k])
    wrong = f"grep {names[k]} {listing} > {out}"
    return Goal(text, (command,), **result(out, good, wrong))
  script = d.file("sh")
  if what == 0:
    out = d.file("txt")
    status = d.number(2, 40)
    d.put(script, f"echo {word}\nexit {status}", 0o755)
    text = d.pick(
      (
        f"run the script {script} and write its exit status to {out}",
        f"write the exit status of the script {script} to {out}",
      )
    )
    command = f"sh {script}; echo $? > {out}"
    return Goal(
      text,
      (command,),
      **result(out, str(status), f"sh {script} > {out}"),
    )
  made, out = d.file("txt"), d.file("txt")
  d.put(script, f"echo {word} > {made}", 0o755)
  text = d.pick(
    (
      f"run {script} in the background, wait for it to end and write done to "
      f"{out}",
      f"start {script} in the background, wait for it and then write done to "
      f"{out}",
    )
  )
  # In a subshell: an interactive shell would tell of the job and its number.
  command = f"(sh {script} & wait); echo done > {out}"
  checks = ((f"{made}_made", is_text(made, word)),)
  checks += ((f"{out}_done", is_text(out, "done")),)
  wrong = (f"echo done > {out}", f"sh {script}")
  return Goal(text, (command,), checks, wrong)


_ORDERS = (
  files.directory,
  files.write,
  files.copy,
  files.move,
  files.append,
  files.permissions,
)


def orders(d: Draw, turns: int) -> list[Goal]:
  """Files that say what to do: each is read, then obeyed.

  Args:
    d: draws.
    turns: at least 2; a file is read in one turn and names one or two orders.
  """
  out = []
  while turns:
    n = turns - 1 if turns in (2, 3) else 1
    turns -= n + 1
    note = d.file("txt")
    made = [d.pick(_ORDERS)(d) for _ in range(n)]
    d.put(note, "\n".join(g.text for g in made))
    text = d.pick(
      (
        f"do what the file {note} says",
        f"read {note} and do what it says",
        f"follow the orders in {note}",
      )
    )
    out.append(
      Goal(
        text,
        (f"cat {note}", *(t for g in made for t in g.turns)),
        tuple(c for g in made for c in g.checks),
        (f"cat {note}", made[-1].wrong[0]),
      )
    )
  return out


def trail(d: Draw, turns: int) -> list[Goal]:
  """Files that each name the next; the last one holds the word wanted.

  Args:
    d: draws.
    turns: at least 2; all but the last read a file.
  """
  word, spare = d.sample(goals.WORDS, 2)
  stops = [d.file("txt") for _ in range(turns - 1)]
  for here, there in itertools.pairwise(stops):
    d.put(here, f"look in {there}")
  d.put(stops[-1], f"the word is {word}")
  out = d.file("txt")
  text = d.pick(
    (
      f"start at {stops[0]}, find the word and write it to {out}",
      f"the file {stops[0]} leads to a word, write that word to {out}",
    )
  )
  return [
    Goal(
      text,
      (*(f"cat {s}" for s in stops), f"echo {word} > {out}"),
      ((f"{out}_filled", is_filled(out)), (f"{out}_right", is_text(out, word))),
      (f"echo {spare} > {out}", f"cp {stops[-1]} {out}"),
    )
  ]
