"""The process backend: what holds although it isolates nothing."""

import asyncio
import dataclasses
import logging
import os
import pathlib
import subprocess
import uuid

import playing
import pytest
from playing import gone, host_processes

from gyre import config
from gyre.envs import process, sandbox
from gyre.envs import task as task_lib

OPTIONS = config.Sandbox(backends=("process",))
TASK = task_lib.Task("p", "x", files={"f": task_lib.FileSpec(b"x")})
ROOT = os.geteuid() == 0


def play(*commands, options=OPTIONS, **kwargs):
  """The results of commands in one sandbox of a process."""
  return playing.play(options, *commands, task=TASK, **kwargs)


def test_it_is_chosen_only_by_name_and_warns(caplog):
  assert "process" not in config.Sandbox().backends
  process._warn.cache_clear()
  with caplog.at_level(logging.WARNING):
    play("true")
    play("true")
  assert caplog.text.count("isolates nothing") == 1


def test_host_variables_do_not_leak(monkeypatch):
  monkeypatch.setenv("GYRE_TEST_SECRET", "leaked")
  (result,) = play("env; export -p")
  assert "leaked" not in result.output


@pytest.mark.skipif(not ROOT, reason="needs root for a user of its own")
def test_as_root_the_agent_is_a_user_of_its_own(tmp_path):
  secret = tmp_path / "secret"
  secret.write_text("leaked")
  secret.chmod(0o600)
  victim = subprocess.Popen(["sleep", "4714"])
  try:
    (result,) = play(
      f"id -u; cat {secret} {pathlib.Path.home()}/.bashrc; "
      f"kill -9 {victim.pid}; kill -9 {os.getpid()}; echo x > /etc/gyre-x; "
      f"grep -E 'CapEff|NoNewPrivs' /proc/self/status; ls -d {os.getcwd()}; "
      f"echo x > {sandbox.base_directory()}/x"
    )
    assert victim.poll() is None
  finally:
    victim.kill()
    victim.wait()
  assert int(result.output.split()[0]) > 10000
  assert "leaked" not in result.output
  assert "CapEff:\t0000000000000000" in result.output
  assert "NoNewPrivs:\t1" in result.output
  assert not pathlib.Path("/etc/gyre-x").exists()


@pytest.mark.skipif(not ROOT, reason="needs root for users of their own")
def test_as_root_sandboxes_do_not_see_each_other():
  async def main():
    one = await sandbox.open_sandbox(OPTIONS, TASK)
    two = await sandbox.open_sandbox(OPTIONS, TASK)
    try:
      await one.run("echo mine > secret; chmod 644 secret; sleep 77 &")
      path = one._start_dir
      other = await two.run(f"cat {path}/secret; ls {path}; pkill sleep")
      still = await one.run("jobs -r | wc -l")
      return other, still
    finally:
      await one.close()
      await two.close()

  other, still = asyncio.run(main())
  assert "mine" not in other.output and still.output == "1\n"


@pytest.mark.parametrize(
  "daemon",
  [
    "sleep {} & disown",
    "nohup setsid sleep {} > /dev/null 2>&1 &",
    '(setsid sh -c \'(setsid sh -c "trap \\"\\" TERM HUP; sleep {}" &)\' &)',
  ],
)
def test_daemons_die_with_the_sandbox(daemon):
  mark = f"96{uuid.uuid4().int % 10**12}"

  async def check(box):
    await asyncio.sleep(0.1)
    assert host_processes(mark)

  play(daemon.format(mark), during=check)
  assert gone(mark)


def test_bombs_end():
  small = dataclasses.replace(
    OPTIONS, memory_mib=128, disk_mib=20, max_processes=32
  )
  many = (
    "for i in 1 2 3 4; do python3 -c \"x = bytearray(b'x') * (60 << 20); "
    'import time; time.sleep(9)" & done; wait'
  )
  disk = "for i in {0..9}; do head -c 15M /dev/zero > b$i; done; sleep 9"
  memory, after, full, clean = play(
    many, "echo on", disk, "rm b*; echo on", options=small
  )
  assert memory.killed == "memory" and after.output == "on\n"
  assert full.killed == "disk" and clean.output.endswith("on\n")
  _, after = play(
    "b() { b | b & }; b; sleep 5", "kill -9 -1 2>&1; echo on",
    options=small, timeout_s=1,
  )  # fmt: skip
  assert after.output.endswith("on\n")


def test_paths_are_rewritten_both_ways():
  results = play("cd /app; pwd; ls /app/f /tmp > /dev/null; cat /app/nothere")
  assert results[0].output.startswith("/app\n")
  assert "/app/nothere" in results[0].output
  assert str(sandbox.base_directory()) not in results[0].output
