"""The docker and podman backends: their command lines, and the flow.

The flow runs against a small stand-in for the client that keeps containers as
directories of this machine; where a real engine answers, against that too.
"""

import asyncio
import dataclasses
import os
import shutil
import subprocess
import sys
import tarfile

import pytest

from gyre import config
from gyre.envs import container, limits, sandbox, snapshot, verifier
from gyre.envs import task as task_lib

LIMIT = limits.caps(config.Sandbox(memory_mib=512, disk_mib=64, cpu_s=9))
TEST = b'[ "$(cat x)" = hi ] && echo 1 > ${GYRE_VERIFIER_DIR}/reward.txt'


def test_create_command():
  assert container.create_command(
    "docker",
    name="n",
    image="img:1",
    workdir="/app",
    limit=LIMIT,
    cpus=2,
    env={"B": "x y", "A": "1"},
    mounts={"/tests": "/host/tests"},
  ) == (
    "docker create --name n --init --network none --hostname gyre "
    "--cap-drop ALL --cap-add CHOWN --cap-add DAC_OVERRIDE --cap-add FOWNER "
    "--cap-add SETGID --cap-add SETUID --security-opt no-new-privileges "
    "--memory 512m --memory-swap 512m --pids-limit 64 "
    "--ulimit nofile=256:256 --ulimit fsize=67108864 --ulimit core=0 "
    "--ulimit cpu=11 --shm-size 16m --workdir /app --cpus 2 --env A=1 "
    "--env B=x|y --volume /host/tests:/tests:ro --entrypoint sleep img:1 "
    "infinity"
  ).replace("B=x|y", "B=x\0y").replace(" ", "\1").replace("\0", " ").split("\1")


def test_other_commands():
  assert container.build_command("podman", "gyre-task:1", "/c") == (
    "podman build --quiet --tag gyre-task:1 /c".split()
  )
  words = container.shell_command("docker", "n", "/w")
  assert words[:7] == "docker exec --interactive --workdir /w n bash".split()
  assert words[7] == "-c" and "99>&2 98>&1 2>&1" in words[8]


def test_an_images_tag_is_its_contexts_hash():
  one = task_lib.Task("a", "x", files={"Dockerfile": task_lib.FileSpec(b"F")})
  same = dataclasses.replace(one, task_id="b")
  other = dataclasses.replace(
    one, files={"Dockerfile": task_lib.FileSpec(b"G")}
  )
  assert container.image_tag(one) == container.image_tag(same)
  assert container.image_tag(one) != container.image_tag(other)


# A stand-in: create makes a directory, exec runs there with paths rewritten.
CLIENT = r"""#!@PYTHON@
import json, os, pathlib, re, signal, subprocess, sys, tarfile
home = pathlib.Path(os.environ["STAND_IN"])
verb, *words = sys.argv[1:]
with (home / "log").open("a") as f:
  f.write(json.dumps(sys.argv[1:]) + "\n")
def value(flag):
  return words[words.index(flag) + 1]
def real(root, text):
  return re.sub(r"(?<![\w./])/(app|tests|logs)\b", rf"{root}/\1", text)
if verb == "create":
  root = home / value("--name")
  (root / value("--workdir").strip("/")).mkdir(parents=True)
  env = {"PATH": os.environ["PATH"]}
  for i, word in enumerate(words):
    if word == "--env":
      key, _, text = words[i + 1].partition("=")
      env[key] = real(root, text)
    if word == "--volume":
      source, target, _ = words[i + 1].split(":")
      (root / target.strip("/")).symlink_to(source)
  # Where the engine would mount /tests, bash is told where it lies.
  env["BASH_FUNC_bash%%"] = (
    '() { command bash "${@/#\\/tests/' + str(root).replace("/", "\\/")
    + '\\/tests}"; }')
  (root / "env").write_text(json.dumps(env))
elif verb == "exec":
  interactive = workdir = None
  while words[0].startswith("--"):
    flag = words.pop(0)
    workdir = words.pop(0) if flag == "--workdir" else workdir
  root = home / words.pop(0)
  if (root / "killed").exists(): sys.exit(1)
  words = [real(root, w) for w in words]
  if words[-1] == "kill -KILL -1":
    for name in (root / "pids").read_text().split():
      try: os.killpg(int(name), signal.SIGKILL)
      except ProcessLookupError: pass
    sys.exit()
  if os.getpgrp() != os.getpid(): os.setpgid(0, 0)
  with (root / "pids").open("a") as f: f.write(f"{os.getpid()}\n")
  if workdir: os.chdir(real(root, workdir))
  os.execvpe(words[0], words, json.loads((root / "env").read_text()))
elif verb == "kill":
  (home / words[0] / "killed").touch()
elif verb == "cp":
  name, _, path = words[0].partition(":")
  path = home / name / path.strip("/")
  if not os.path.lexists(path): sys.exit(1)
  with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
    tar.add(path, path.name)
elif verb == "image":
  print("/app")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
  """Puts the stand-in client on PATH as `docker`; returns its directory."""
  folder = tmp_path / "bin"
  folder.mkdir()
  client = folder / "docker"
  client.write_text(CLIENT.replace("@PYTHON@", sys.executable))
  client.chmod(0o755)
  monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
  monkeypatch.setenv("STAND_IN", str(tmp_path))
  return tmp_path


def execution(options):
  """One whole execution with a timeout and an exit in it."""
  task = task_lib.Task(
    "c",
    "x",
    files={"seed": task_lib.FileSpec(b"s")},
    tests={"test.sh": task_lib.FileSpec(TEST)},
  )

  async def main():
    box = await sandbox.open_sandbox(options, task)
    try:
      results = [
        await box.run(c, t)
        for c, t in [
          ("X=4; f() { echo f$X; }; cat seed; false", 20),
          ("echo $?; f; echo err >&2; seq 3", 20),
          ("sleep 60", 1.0),
          ('echo "[$X]"; echo hi > x; mkfifo p; ln -s /etc/passwd l', 20),
          ("exit 9", 20),
          ("yes", 20),
          ("seq 20000 | tail -1", 20),
        ]
      ]
      path = await box.close_shell()
      with tarfile.open(path) as tar:
        names = tar.getnames()
      outcome = await verifier.verify(task, path, options)
      return results, names, box.kept_without, outcome
    finally:
      await box.close()

  return asyncio.run(main())


def check(found):
  results, names, left_out, outcome = found
  assert results[0].output == "s" and results[0].exit_code == 1
  assert results[1].output == "1\nf4\nerr\n1\n2\n3\n"
  assert results[2].timed_out and results[2].restarted
  assert results[3].output == "[]\n"
  assert results[4].exit_code == 9 and results[4].restarted
  assert results[5].killed == "output" and results[5].truncated
  assert results[6].output == "20000\n"
  assert sorted(names) == ["l", "seed", "x"]
  assert len(left_out) == 1 and left_out[0].startswith("p ")
  assert (outcome.status, outcome.score) == ("scored", 1.0), outcome


def test_the_flow_with_a_stand_in_client(stand_in):
  options = config.Sandbox(backends=("docker",), max_output_bytes=1 << 14)
  check(execution(options))
  verbs = [line.split('"')[1] for line in (stand_in / "log").open()]
  assert verbs.count("create") == verbs.count("rm") == verbs.count("kill") == 2


def test_a_dockerfile_is_built(stand_in):
  task = task_lib.Task(
    "b", "x", files={"Dockerfile": task_lib.FileSpec(b"FROM python:3.12")}
  )

  async def main():
    box = await sandbox.open_sandbox(config.Sandbox(backends=("docker",)), task)
    await box.close()

  asyncio.run(main())
  log = (stand_in / "log").read_text()
  assert f'["build", "--quiet", "--tag", "{container.image_tag(task)}"' in log
  assert f'"{container.image_tag(task)}", "infinity"' in log


def test_the_flow_with_a_real_engine():
  for client in ("docker", "podman"):
    if shutil.which(client):
      done = subprocess.run(
        [client, "image", "inspect", container.DEFAULT_IMAGE],
        capture_output=True,
      )
      if done.returncode == 0:
        check(execution(config.Sandbox(backends=(client,))))
        return
  pytest.skip(f"no engine here that has {container.DEFAULT_IMAGE}")


def test_an_engine_that_does_not_answer_is_named(tmp_path, monkeypatch):
  task = task_lib.Task("t", "x")
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(sandbox.SandboxUnavailable, match="no podman on this"):
    asyncio.run(
      sandbox.open_sandbox(config.Sandbox(backends=("podman",)), task)
    )
  client = tmp_path / "docker"
  client.write_text("#!/bin/sh\necho 'cannot connect' >&2; exit 1\n")
  client.chmod(0o755)
  with pytest.raises(sandbox.SandboxUnavailable, match="cannot connect"):
    asyncio.run(
      sandbox.open_sandbox(config.Sandbox(backends=("docker",)), task)
    )


def test_tars_from_outside_are_rewritten(tmp_path):
  raw = tmp_path / "raw.tar"
  with tarfile.open(raw, "w") as tar:
    for name, kind, link, mode in [
      ("app", tarfile.DIRTYPE, "", 0o755),
      ("app/ok", tarfile.REGTYPE, "", 0o6755),
      ("app/../../etc/evil", tarfile.REGTYPE, "", 0o644),
      ("/abs", tarfile.REGTYPE, "", 0o644),
      ("app/dev", tarfile.CHRTYPE, "", 0o666),
      ("app/hard", tarfile.LNKTYPE, "app/ok", 0o644),
      ("app/out", tarfile.LNKTYPE, "../../etc/passwd", 0o644),
      ("app/sym", tarfile.SYMTYPE, "/etc/passwd", 0o777),
      ("app/ok", tarfile.SYMTYPE, "/etc/shadow", 0o777),
    ]:
      info = tarfile.TarInfo(name)
      info.type, info.linkname, info.mode = kind, link, mode
      tar.addfile(info)
  clean = tmp_path / "clean.tar"
  left_out = snapshot.sanitize(raw, clean, 1000, "app")
  with tarfile.open(clean) as tar:
    found = {m.name: m for m in tar}
  assert set(found) == {"ok", "abs", "hard", "sym"}
  assert found["ok"].isreg() and found["ok"].mode == 0o755
  assert found["hard"].linkname == "ok"
  assert sorted(x.split()[0] for x in left_out) == ["dev", "out"]
  with pytest.raises(sandbox.SandboxError, match="cannot read"):
    raw.write_bytes(b"junk" * 1000)
    snapshot.sanitize(raw, clean, 1000)
