"""The persistent shell, on every backend of this machine."""

import asyncio
import dataclasses
import os
import signal
import tarfile
import time

import pytest

from gyre import config
from gyre.envs import limits, sandbox, shell, snapshot
from gyre.envs import task as task_lib

TASK = task_lib.Task(
  "shell",
  "x",
  files={
    "a/b.txt": task_lib.FileSpec(b"hello\n"),
    "closed": task_lib.FileSpec(b"z", 0o000),
    "run.sh": task_lib.FileSpec(b"#!/bin/sh\necho ran $1\n", 0o755),
    "link": task_lib.FileSpec(link="a/b.txt"),
    "empty": task_lib.FileSpec(directory=True, mode=0o700),
  },
  env={"FROM_TASK": "yes"},
)


def play(options, commands, *, task=TASK, timeout_s=10, deterministic=False):
  """The results of commands run in one sandbox."""

  async def main():
    box = await sandbox.open_sandbox(options, task, deterministic=deterministic)
    try:
      return [await box.run(c, timeout_s) for c in commands]
    finally:
      await box.close()

  return asyncio.run(main())


def test_state_persists_over_turns(local_options):
  results = play(
    local_options,
    [
      "cd a; X=5; export Y=6; f() { echo f$X$1; }; alias g='echo g'; "
      "sleep 60 & shopt -s nullglob; umask 027",
      "pwd; f 1; echo $Y; cat b.txt",
      "g; jobs -r | wc -l; umask; shopt nullglob | cut -f2",
      "false",
      "echo $?",
    ],
  )
  assert results[1].output == "/app/a\nf51\n6\nhello\n"
  assert results[2].output == "g\n1\n0027\non\n"
  assert results[3].exit_code == 1
  assert results[4].output == "1\n"
  assert not any(r.restarted or r.notice for r in results)


def test_files_arrive_with_modes_links_and_times(local_options):
  (result,) = play(
    local_options,
    ["stat -c '%n %a %s' a/b.txt closed run.sh; stat -c '%n %a' empty; "
     "readlink link; "
     "./run.sh now; cat closed; echo $FROM_TASK"],
  )  # fmt: skip
  assert result.output.splitlines()[:6] == [
    "a/b.txt 644 6",
    "closed 0 1",
    "run.sh 755 22",
    "empty 700",
    "a/b.txt",
    "ran now",
  ]
  assert "Permission denied" in result.output
  assert result.output.endswith("yes\n")


@pytest.mark.parametrize(
  "command,output,code",
  [
    ("printf 'no newline'", "no newline", 0),
    ("printf 'a\\0b'", "a\0b", 0),
    ("echo 'quotes \" '\\''x'\\'' $HOME `x` \\\\'",
     "quotes \" 'x' $HOME `x` \\\\\n", 0),
    ("echo ünï 😀", "ünï 😀\n", 0),
    ("cat <<'E'\nline $1\n\tx\nE", "line $1\n\tx\n", 0),
    ("echo 'open", None, 2),
    ("if then", None, 2),
    ("nonesuch", None, 127),
    ("cat; read x; echo $?", "1\n", 0),
    ("echo out; echo err >&2; echo out", "out\nerr\nout\n", 0),
    ("printf '\\377\\n'", "\ufffd\n", 0),
    ("(exit 300)", "", 44),
    ("", "", 0),
    ("# only a comment", "", 0),
    ("echo a > /dev/stderr; cat <(echo b); echo c | tee /dev/stdout | cat",
     None, 0),
    ("for i in $(seq 3); do\n  echo $i\ndone", "1\n2\n3\n", 0),
    ("echo !! !x", "!! !x\n", 0),
  ],
)  # fmt: skip
def test_one_command(bwrap_options, command, output, code):
  result, after = play(bwrap_options, [command, "echo next"])
  assert result.exit_code == code
  if output is not None:
    assert result.output == output
  assert after.output == "next\n" and not after.restarted


def test_a_long_command_and_output_in_order(local_options):
  text = "".join(f"line {i}\n" for i in range(20000))
  (result, lines) = play(local_options, [f"cat <<'E'\n{text}E", "seq 50000"])
  assert result.output == text
  assert lines.output == "".join(f"{i}\n" for i in range(1, 50001))


def test_output_is_cut_in_the_middle(local_options):
  options = dataclasses.replace(local_options, max_output_bytes=1000)
  (result,) = play(options, ["seq 1 2000"])
  assert result.truncated
  assert result.output.startswith("1\n2\n")
  assert result.output.endswith("1999\n2000\n")
  assert "bytes ..." in result.output
  assert len(result.output) < 1100


def test_endless_output_ends_and_takes_no_memory(local_options):
  options = dataclasses.replace(local_options, max_output_bytes=1 << 16)
  start = time.monotonic()
  result, after = play(options, ["X=1; yes", "echo $X ok"], timeout_s=30)
  assert time.monotonic() - start < 20
  assert result.killed == "output" and result.truncated
  assert len(result.output) < 1 << 17
  assert after.output.endswith("ok\n")


def test_a_timeout_keeps_the_shell_and_earlier_jobs(local_options):
  results = play(
    local_options,
    [
      "cd a; X=7; sleep 300 & echo started",
      "sleep 301 & sleep 302; echo not reached",
      "echo $X; pwd; jobs -r | grep -c 'sleep 300'",
      "while :; do :; done",
      "echo $X; pgrep -fc 'sleep 30[12]'",
    ],
    timeout_s=0.7,
  )
  assert results[1].timed_out and results[1].exit_code is None
  assert "not reached" not in results[1].output
  assert "ended after 0.7 s" in results[1].notice
  assert results[2].output == "7\n/app/a\n1\n"
  assert results[3].timed_out and not results[3].restarted
  assert results[4].output == "7\n0\n"


@pytest.mark.parametrize(
  "stubborn",
  [
    "trap '' INT TERM; while :; do :; done",
    "exec sleep 300",
    "kill -STOP $$",
  ],
)
def test_a_stubborn_command_costs_the_shell(local_options, stubborn):
  result, after = play(
    local_options, [f"cd a; X=1; {stubborn}", "echo \"[$X]\"; ls"],
    timeout_s=0.4,
  )  # fmt: skip
  assert result.timed_out and result.restarted
  assert "new shell" in result.notice
  assert after.output.startswith("[]\n") and not after.restarted


def test_a_background_job_of_a_script_interrupts_commands_too(local_options):
  """Such a job starts with SIGINT ignored, which children inherit."""
  before = signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    result, after = play(
      local_options, ["X=1; sleep 300", 'echo "$X"'], timeout_s=0.4
    )
  finally:
    signal.signal(signal.SIGINT, before)
  assert result.timed_out and not result.restarted
  assert after.output == "1\n"


@pytest.mark.parametrize(
  "command,code", [("exit 3", 3), ("kill -9 $$", 137), ("set -e; false", 1)]
)
def test_the_shell_ends_and_a_new_one_says_so(local_options, command, code):
  result, after = play(local_options, [f"X=1; {command}", 'echo "[$X]"; pwd'])
  assert result.exit_code == code and result.restarted
  assert f"status {code}" in result.notice
  assert after.output == "[]\n/app\n"


def test_limits_of_the_whole_life(local_options):
  options = dataclasses.replace(local_options, cpu_s=0.5)
  first, second = play(options, ["while :; do :; done", "echo no"])
  assert first.killed == "cpu" and first.exhausted
  assert second.exhausted and second.output == ""
  options = dataclasses.replace(local_options, wall_s=0.4)
  first, second = play(options, ["sleep 5", "echo no"])
  assert first.killed == "wall" and second.exhausted


def test_the_workspace_outlives_the_shell(local_options):
  async def main():
    box = await sandbox.open_sandbox(local_options, TASK)
    try:
      await box.run(
        "echo new > n; ln a/b.txt hard; rm run.sh; mkdir -p d/e; chmod 0 d/e; "
        "sleep 99 &"
      )
      path = await box.close_shell()
      with tarfile.open(path) as tar:
        found = {m.name: m for m in tar}
      with pytest.raises(sandbox.SandboxError):
        await box.run("echo late")
      again = await sandbox.start_backend(
        sandbox.Request(TASK, local_options, workspace=path)
      )
      try:
        listing = await again.run(
          "cat n; ls; stat -c %h hard; stat -c %a d/e closed; [ a/b.txt -ef "
          "hard ] && echo same"
        )
      finally:
        await again.close()
      return path, found, listing
    finally:
      await box.close()

  path, found, listing = asyncio.run(main())
  assert not path.exists()
  assert {"n", "hard", "d/e", "link", "closed"} <= set(found)
  assert found["link"].issym() and "run.sh" not in found
  assert listing.output == (
    "new\na\nclosed\nd\nempty\nhard\nlink\nn\n2\n0\n0\nsame\n"
  )


def test_many_at_once(local_options):
  async def one(i):
    box = await sandbox.open_sandbox(local_options, TASK)
    try:
      await box.run(f"echo {i} > me")
      await asyncio.sleep(0.01)
      return (await box.run("cat me; ls /app | wc -l")).output
    finally:
      await box.close()

  async def main():
    return await asyncio.gather(*(one(i) for i in range(16)))

  assert asyncio.run(main()) == [f"{i}\n6\n" for i in range(16)]


def test_a_closed_sandbox_leaves_nothing(local_options):
  async def main():
    before = set(os.listdir("/proc/self/fd"))
    box = await sandbox.open_sandbox(local_options, TASK)
    await box.run("sleep 4242 & setsid sleep 4243 & disown -a")
    await box.close()
    await box.close()
    await asyncio.sleep(0.05)
    return before, set(os.listdir("/proc/self/fd"))

  before, after = asyncio.run(main())
  assert len(after) <= len(before)
  names = [p.name for p in sandbox.base_directory().iterdir()]
  mine = [n for n in names if n.startswith(f"{os.getpid()}-")]
  assert set(mine) <= {f"{os.getpid()}-shared"}


def test_prune_removes_what_dead_processes_left():
  base = sandbox.base_directory()
  dead = base / "999999999-abc"
  dead.mkdir()
  alive = sandbox.new_directory()
  try:
    assert asyncio.run(sandbox.prune()) >= 1
    assert not dead.exists() and alive.exists()
  finally:
    alive.rmdir()


def test_deterministic_mode_is_the_same_twice(local_options):
  commands = [
    "date; date +%s; hostname; echo $RANDOM $RANDOM $TZ $LANG",
    "echo x > f1; mkdir d; touch d/f2; touch -d '2020-01-02' old",
    "stat -c '%n %Y' f1 d d/f2 old; ls -ltr; ls -U",
    "date -d '2020-01-02' +%F; locale | head -1; umask",
    "sleep 60",
    "python3 -c \"print({'a','b','c','d'})\" 2>&1 | tail -1; env | sort "
    "| grep -v -e ^HOME -e ^PWD -e ^OLDPWD -e ^TMPDIR -e ^GYRE -e ^PATH",
  ]
  if local_options.backends[0] == "process":
    commands[0] = "date; date +%s; echo $RANDOM $RANDOM $TZ $LANG"
    commands[2] = "stat -c '%n %Y' f1 d d/f2 old"
  first = play(local_options, commands, deterministic=True, timeout_s=0.5)
  time.sleep(1.1)
  second = play(local_options, commands, deterministic=True, timeout_s=0.5)
  assert [r.output for r in first] == [r.output for r in second]
  assert first[0].output.startswith(
    "Thu Jan  1 00:00:00 UTC 2026\n1767225600\n"
  )
  assert f"f1 {snapshot.EPOCH + 2}" in first[2].output
  assert "old 1577923200" in first[2].output
  assert first[4].timed_out and second[4].timed_out


def test_backends_are_tried_in_order_with_reasons():
  options = config.Sandbox(backends=("remote", "docker"))
  with pytest.raises(sandbox.SandboxUnavailable) as e:
    play(options, ["true"], task=task_lib.Task("t1", "x", image="no/such:1"))
  text = str(e.value)
  assert "t1" in text and "remote: sandbox.remote_url is empty" in text
  assert "docker: " in text and "\n" not in text
  with pytest.raises(config.ConfigError, match="'jail'"):
    play(config.Sandbox(backends=("jail",)), ["true"])
  results = play(config.Sandbox(backends=("remote", "process")), ["echo hi"])
  assert results[0].output == "hi\n"


def test_an_image_is_refused_by_name():
  options = config.Sandbox(backends=("bubblewrap", "process"))
  with pytest.raises(sandbox.SandboxUnavailable) as e:
    play(options, [], task=task_lib.Task("t2", "x", image="swebench/x:9"))
  assert str(e.value).count("the image swebench/x:9") == 2


def test_the_command_clock():
  clock = limits.CommandClock(10.0, 5.0, deterministic=True)
  clock._last -= 100
  assert not clock.expired(5.0, True), "waiting for a CPU does not count"
  assert clock.expired(15.0, True), "CPU seconds do"
  clock = limits.CommandClock(10.0, 5.0, deterministic=True)
  clock._last -= 100
  assert clock.expired(5.0, False), "so does idling"
  clock = limits.CommandClock(10.0, 5.0, deterministic=False)
  assert not clock.expired(100.0, True)
  clock._start -= 11
  assert clock.expired(5.0, True)


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 500])
def test_output_buffer_keeps_both_ends(size):
  data = bytes(i % 251 for i in range(size))
  for step in (1, 7, 1000):
    buffer = shell.OutputBuffer(10)
    for i in range(0, size, step):
      buffer.add(data[i : i + step])
    assert buffer.total == size
    assert buffer.truncated == (size > 10)
    kept = bytes(buffer._head) + bytes(buffer._tail[-5:])
    assert kept == (data if size <= 10 else data[:5] + data[-5:])


@pytest.mark.parametrize("before", range(0, 25))
def test_output_mark_is_cut_wherever_it_lies(before):
  for step in (1, 3, 100):
    data = b"x" * before + b"MARK"
    buffer = shell.OutputBuffer(16)
    for i in range(0, len(data), step):
      buffer.add(data[i : i + step])
    assert buffer.cut_mark(b"MARK")
    assert buffer.total == before
    if before <= 12:
      assert buffer.text() == "x" * before


def test_an_opening_that_is_cancelled_ends(local_options):
  async def main():
    for milliseconds in range(0, 60, 4):
      opening = sandbox.open_sandbox(local_options, TASK)
      try:
        box = await asyncio.wait_for(opening, milliseconds / 1e3)
      except TimeoutError:
        continue
      await box.close()

  asyncio.run(asyncio.wait_for(main(), 60))
