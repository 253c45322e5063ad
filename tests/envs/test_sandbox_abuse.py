"""Abuses that the bubblewrap sandbox stops: bombs, daemons, broken shells."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import uuid

import pytest
from playing import (
  ENOSYS,
  EPERM,
  REPO,
  SECRET,
  SYSCALL,
  TASK,
  X86_64,
  gone,
  host_processes,
  output,
  play,
)

from gyre.envs import limits, sandbox

# Using it all up.


def test_fork_bomb(bwrap_options):
  options = dataclasses.replace(bwrap_options, max_processes=32)
  seen = []

  async def count(box):
    seen.append(len(box._processes()))

  results = play(
    options, "b() { b | b & }; b; sleep 0.3", "kill -9 -1; echo back",
    timeout_s=3, during=count,
  )  # fmt: skip
  assert results[-1].output.endswith("back\n")
  assert seen[0] <= 34


def test_one_process_cannot_take_more_memory(bwrap_options):
  options = dataclasses.replace(bwrap_options, memory_mib=128)
  text = output(
    options, "python3 -c \"x = bytearray(300 << 20); print('GOT')\"; echo $?"
  )
  assert "MemoryError" in text and "GOT" not in text


MANY = (
  "for i in 1 2 3 4; do python3 -c \"x = bytearray(b'x') * (60 << 20); "
  'import time; time.sleep(9)" & done; wait'
)
SHARED = (
  'python3 -c "import mmap, time; m = mmap.mmap(-1, 400 << 20)\n'
  'for i in range(0, len(m), 4096): m[i] = 1\ntime.sleep(9)"'
)


@pytest.mark.parametrize("bomb", [MANY, SHARED], ids=["many", "shared"])
def test_memory_bombs_end(bwrap_options, bomb):
  options = dataclasses.replace(bwrap_options, memory_mib=128)
  result, after = play(options, bomb, "echo alive")
  assert result.killed == "memory" and result.restarted
  assert after.output == "alive\n"


def test_a_watchdog_that_is_slow_to_act_does_not_end_the_next_shell(
  bwrap_options,
):
  options = dataclasses.replace(bwrap_options, memory_mib=128)

  async def main():
    box = await sandbox.open_sandbox(options, TASK)
    kill = box._kill_all

    def slowly():
      kill()
      if threading.current_thread() is not threading.main_thread():
        time.sleep(1.0)

    box._kill_all = slowly
    try:
      return [await box.run(c, 10) for c in (MANY, "sleep 2; echo alive")]
    finally:
      await box.close()

  result, after = asyncio.run(main())
  assert result.killed == "memory" and result.restarted
  assert after.output == "alive\n"


def test_a_memory_bomb_ends_while_the_event_loop_is_busy(bwrap_options):
  options = dataclasses.replace(bwrap_options, memory_mib=128)

  async def main():
    box = await sandbox.open_sandbox(options, TASK)
    try:
      run = asyncio.create_task(box.run(MANY, 20))
      await asyncio.sleep(0.1)
      time.sleep(1.5)
      alive = [p for p in box._processes().values() if p.rss > 20 << 20]
      return alive, await run
    finally:
      await box.close()

  alive, result = asyncio.run(main())
  assert not alive and result.killed == "memory"


def test_memory_outside_any_process_is_refused(bwrap_options):
  if not X86_64:
    pytest.skip("system call numbers of x86_64")
  text = output(
    bwrap_options, f"{SYSCALL} 319 0 0; {SYSCALL} 29 0 1000000 0x3b6; "
    f"{SYSCALL} 68 0 0x3b6"
  )  # fmt: skip
  assert text == (
    f"syscall -1 {ENOSYS}\nsyscall -1 {EPERM}\nsyscall -1 {EPERM}\n"
  )


@pytest.mark.parametrize("where", ["/app", "/tmp", "/dev/shm", "/home/agent"])
def test_disk_bomb(bwrap_options, where):
  options = dataclasses.replace(bwrap_options, disk_mib=20)
  text = output(
    options,
    f"for i in 1 2 3; do head -c 15M /dev/zero > {where}/b$i || echo FULL; "
    f"done; du -sm {where} | cut -f1",
  )
  assert "FULL" in text and int(text.split()[-1]) <= 20


def test_one_file_cannot_exceed_the_disk_even_sparse(bwrap_options):
  options = dataclasses.replace(bwrap_options, disk_mib=20)
  text = output(options, "truncate -s 1T big; echo $?; stat -c %s big")
  assert text.split()[-1] == "0" and "0\n" in text


def test_inode_bomb(bwrap_options, monkeypatch):
  monkeypatch.setattr(limits, "MAX_INODES", 2000)
  result, after = play(
    bwrap_options,
    "mkdir d; cd d; while :; do touch $RANDOM$RANDOM{0..99}; done",
    "sleep 0.2; rm -r d; echo alive",
  )
  assert result.killed == "inodes" and after.output == "alive\n"


def test_open_file_bomb(bwrap_options):
  text = output(
    bwrap_options,
    "python3 -c \"x = [open('/dev/null') for i in range(2000)]\"",
  )
  assert "Too many open files" in text


def test_cpu_hog_in_the_background_is_counted(bwrap_options):
  options = dataclasses.replace(bwrap_options, cpu_s=0.6)
  (_, result) = play(
    options, "(while :; do :; done) & (while :; do :; done) &", "sleep 8"
  )
  assert result.killed == "cpu" and result.exhausted


# The protocol of turns.


def test_forged_ends_are_output_like_any_other(bwrap_options):
  result, after = play(
    bwrap_options,
    "python3 - <<'E'\nimport os\nline = b'0' * 32 + b' 0\\n'\n"
    "for fd in range(1, 300):\n  try: os.write(fd, line)\n"
    "  except OSError: pass\nE\n"
    "printf '%032d 0\\nexit 0\\nshell 5\\nready\\n' 0; sleep 0.2; "
    "echo tail; (exit 7)",
    "echo next",
  )
  assert result.output.endswith("ready\ntail\n") and result.exit_code == 7
  assert after.output == "next\n"


def test_programs_cannot_reach_the_end_channel(bwrap_options):
  result, after = play(
    bwrap_options,
    "for f in /proc/[0-9]*/fd/*; do [ -p $f ] && timeout 0.2 head -c 99 $f; "
    "done 2>/dev/null; for f in /proc/1/fd/{0..300} /proc/$$/fd/{0..300}; do "
    "echo 'exit 0'; done 2>&1 | tail -1; ls /proc/$$/fd 2>&1 | tail -1; "
    "(exit 5)",
    "echo next",
  )
  assert result.exit_code == 5 and not result.restarted
  assert result.output.endswith("Permission denied\n")
  assert after.output == "next\n"


def test_replaced_functions_aliases_prompts_and_traps(bwrap_options):
  play_on = [
    "eval() { echo hijacked; }; builtin() { echo hijacked; }; "
    "printf() { echo hijacked; }; unset() { echo hijacked; }; "
    "exit() { echo hijacked; }; alias eval=true builtin=true printf=true "
    "unset=true; PROMPT_COMMAND='echo prompt'; PS1='$ '; "
    "trap 'echo debug' DEBUG; trap 'echo err' ERR; trap 'echo usr' USR1 EXIT",
    "trap - DEBUG ERR EXIT; PROMPT_COMMAND=; PS1=",
    "echo clean",
  ]
  *_, last = play(bwrap_options, *play_on, timeout_s=2)
  assert last.output == "clean\n" and last.exit_code == 0


def test_read_only_functions_cost_the_shell_at_most(bwrap_options):
  *_, last = play(
    bwrap_options,
    "builtin() { :; }; printf() { :; }; readonly -f builtin printf",
    "echo again",
    "echo again",
    timeout_s=0.5,
  )
  assert last.output == "again\n" or last.restarted


@pytest.mark.parametrize(
  "command",
  [
    "exec 0<&- 1>&- 2>&-",
    'for i in {3..254}; do eval "exec $i>&-"; done',
    "exec > /dev/null 2>&1",
    "exec < /dev/zero",
    "kill -9 $$",
    "kill -9 -1",
    "kill -9 $PPID; kill -9 1; kill -STOP 1",
    "exec true",
    "ulimit -n 3",
    "set -n",
    "stty -a; reset",
    "POSIXLY_CORRECT=1; readonly POSIXLY_CORRECT __gyre_status",
    "PATH=; unset PATH HOME",
    "cd /; rm -rf --no-preserve-root /app/* /tmp/*",
    "rm -rf /app; mkdir -p /app/../app/x; cd /app/x && rmdir /app/x",
    "chmod 0 /app /tmp",
  ],
)
def test_a_broken_shell_is_replaced(bwrap_options, command):
  *_, last = play(
    bwrap_options, command, "echo one", "kill -9 $$", "echo two", timeout_s=0.7
  )
  assert last.output == "two\n"


# Outliving the turn and the sandbox.


@pytest.mark.parametrize(
  "daemon",
  [
    "sleep {} & disown",
    "nohup setsid sleep {} > /dev/null 2>&1 &",
    '(setsid sh -c \'(setsid sh -c "trap \\"\\" TERM HUP; sleep {}" &)\' &)',
    'python3 -c "import os\nif os.fork() == 0:\n  os.setsid()\n'
    "  if os.fork() == 0: os.execvp('sleep', ['sleep', '{}'])\"",
  ],
)
def test_daemons_die_with_the_sandbox(bwrap_options, daemon):
  mark = f"99{uuid.uuid4().int % 10**12}"

  async def alive(box):
    await asyncio.sleep(0.2)
    assert host_processes(mark)

  play(bwrap_options, daemon.format(mark), during=alive)
  assert gone(mark)


def test_daemons_of_a_command_that_timed_out_die_with_it(bwrap_options):
  mark = f"98{uuid.uuid4().int % 10**12}"

  async def check(box):
    assert gone(mark)

  play(
    bwrap_options, f"setsid nohup sleep {mark} & sleep 9", timeout_s=0.4,
    during=check,
  )  # fmt: skip


def test_ignoring_every_signal_does_not_help(bwrap_options):
  start = time.monotonic()
  result, after = play(
    bwrap_options,
    'python3 -c "import signal, time\nfor s in range(1, 65):\n'
    "  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError):"
    ' pass\ntime.sleep(99)"',
    "echo alive",
    timeout_s=0.5,
  )
  assert result.timed_out and after.output == "alive\n"
  assert time.monotonic() - start < 10


def test_the_sandbox_dies_with_its_host_process(bwrap_options, tmp_path):
  mark = f"97{uuid.uuid4().int % 10**12}"
  script = tmp_path / "host.py"
  script.write_text(
    "import asyncio\nfrom gyre import config\n"
    "from gyre.envs import sandbox, task\n"
    "async def main():\n"
    "  box = await sandbox.open_sandbox(\n"
    "    config.Sandbox(), task.Task('t', 'x'))\n"
    f"  await box.run('setsid sleep {mark} & setsid nohup sleep {mark} &')\n"
    "  print('up', flush=True)\n  await asyncio.sleep(60)\n"
    "asyncio.run(main())\n"
  )
  host = subprocess.Popen(
    [sys.executable, str(script)], stdout=subprocess.PIPE, cwd=REPO
  )
  try:
    assert host.stdout.readline() == b"up\n"
    time.sleep(0.1)
    assert host_processes(mark)
  finally:
    host.kill()
    host.wait()
    host.stdout.close()
  assert gone(mark)
  assert asyncio.run(sandbox.prune()) >= 1


# What lies in the workspace when the host reads it.


def leave(options, command):
  """(members of the kept tar, what was left out)."""
  import tarfile

  async def main():
    box = await sandbox.open_sandbox(options, TASK)
    try:
      await box.run(command, 20)
      path = await box.close_shell()
      with tarfile.open(path) as tar:
        return {m.name: m for m in tar}, box.kept_without, path.stat().st_size
    finally:
      await box.close()

  return asyncio.run(main())


def test_links_in_the_workspace_are_kept_not_followed(bwrap_options, tmp_path):
  secret = tmp_path / "secret"
  secret.write_text(SECRET)
  found, left_out, size = leave(
    bwrap_options,
    f"ln -s {secret} s; ln -s / root; ln -s .. up; ln -s loop loop; "
    "ln -s /proc/self/root r; ln -s /etc/passwd p; rm f; ln -s /etc f",
  )
  assert all(m.issym() for m in found.values()) and not left_out
  assert found["s"].linkname == str(secret) and size < 20000


def test_pipes_sockets_and_setuid_bits_are_left_out(bwrap_options):
  found, left_out, _ = leave(
    bwrap_options,
    'mkfifo pipe; python3 -c "import socket; '
    "socket.socket(socket.AF_UNIX).bind('sock')\"; "
    "cp /bin/true su; chmod 6755 su; mkdir t; chmod 3777 t",
  )
  assert set(found) == {"f", "su", "t"}
  assert found["su"].mode == 0o755 and found["t"].mode == 0o777
  assert sorted(x.split()[0] for x in left_out) == ["pipe", "sock"]


def test_sparse_files_and_many_copies_are_bounded(bwrap_options):
  options = dataclasses.replace(bwrap_options, disk_mib=10)
  found, left_out, size = leave(
    options, "for i in {0..9}; do truncate -s 9M s$i; done"
  )
  assert size < 21 << 20 and len(left_out) >= 7 and "f" in found


def test_deep_and_odd_names_are_survived(bwrap_options):
  found, left_out, _ = leave(
    bwrap_options,
    "python3 - <<'E'\nimport os\nfor i in range(1500):\n"
    "  os.mkdir('d' * 10); os.chdir('d' * 10)\nE\n"
    "touch -- '-rf' $'new\\nline' $'\\377bad' '*' ' ' ' \"q'; "
    "touch ../../../../../tmp/x; chmod 000 f",
  )
  assert any("too deep" in x for x in left_out)
  assert {"-rf", "new\nline", "*", " ", ' "q', "f"} <= set(found)
  assert not any(n.startswith(("/", "..")) for n in found)


def test_it_works_for_a_normal_user(bwrap_options, tmp_path):
  """All of the above was as whoever runs the tests; this is as nobody."""
  if os.geteuid() != 0:
    pytest.skip("the tests run as a normal user already")
  script = (
    "import asyncio, os, tarfile, httpx\n"
    "from gyre import config\n"
    "from gyre.envs import bubblewrap, container, image, process, remote\n"
    "from gyre.envs import sandbox, snapshot, verifier, task as T\n"
    "import encodings.idna, concurrent.futures.thread\n"
    "os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
    "async def main():\n"
    "  test = T.FileSpec(b'[ \"$(cat x)\" = hi ]')\n"
    "  t = T.Task('t', 'x', files={'f': T.FileSpec(b'1', 0)},\n"
    "             tests={'test.sh': test})\n"
    "  o = config.Sandbox()\n"
    "  box = await sandbox.open_sandbox(o, t)\n"
    "  r = await box.run('echo hi > x; id -u; ulimit -u; sleep 9', 0.3)\n"
    "  s = await box.run('cat x')\n"
    "  out = await verifier.verify(t, await box.close_shell(), o)\n"
    "  print(repr(r.output), r.timed_out, repr(s.output), out.score)\n"
    "  await box.close()\n"
    "asyncio.run(main())\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", script], capture_output=True, text=True, cwd="/",
    env={"PATH": os.environ["PATH"]},
  )  # fmt: skip
  if "Permission denied" in done.stderr and "bwrap" in done.stderr:
    pytest.skip("the interpreter's packages are not readable by other users")
  assert done.stdout == "'1000\\n64\\n' True 'hi\\n' 1.0\n", done.stderr


def test_signal_numbers_are_what_the_watchdog_sends():
  """send_signal leaves a process alone that took over a dead one's number."""
  child = subprocess.Popen(["sleep", "4713"])
  try:
    found = limits.read_process(child.pid)
    stale = dataclasses.replace(found, start=found.start - 1)
    limits.send_signal(stale, signal.SIGKILL)
    assert child.poll() is None
    limits.send_signal(found, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
  finally:
    child.kill()


def test_limits_hold_between_turns(bwrap_options):
  """Background jobs are watched while the model thinks."""
  options = dataclasses.replace(bwrap_options, memory_mib=128)

  async def main():
    box = await sandbox.open_sandbox(options, TASK)
    try:
      await box.run(f"X=1; ({MANY}) > /dev/null 2>&1 &")
      await asyncio.sleep(1.2)
      return await box.run("echo [$X]"), await box.run("echo on")
    finally:
      await box.close()

  first, second = asyncio.run(main())
  assert first.output == "[]\n" and first.restarted
  assert "background jobs were ended: it used more memory" in first.notice
  assert second.output == "on\n" and not second.restarted
