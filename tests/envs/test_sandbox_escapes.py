"""Ways out of the bubblewrap sandbox that are shut, one test each."""

import os
import pathlib
import socket
import subprocess

import pytest
from playing import (
  ENOSYS,
  EPERM,
  REPO,
  SECRET,
  SYSCALL,
  X86_64,
  output,
  play,
)

# Reading the host.


def test_host_home_repo_and_temporary_files_are_invisible(
  bwrap_options, tmp_path
):
  secret = tmp_path / "secret"
  secret.write_text(SECRET)
  home = pathlib.Path.home()
  text = output(
    bwrap_options,
    f"cat {secret} {home}/.bashrc {REPO}/setup.py; ls -a {home} {REPO} "
    f"{tmp_path} /root /home /var /run /sys /boot /mnt /srv /media",
  )
  assert SECRET not in text and "install_requires" not in text
  assert "setup.py:" not in text.replace("setup.py: No such", "")
  for path in (secret, f"{REPO}/setup.py"):
    assert f"{path}: No such file" in text


def test_only_the_system_is_there(bwrap_options):
  text = output(bwrap_options, "ls -A / | xargs; ls -A /home /tmp /var /run")
  top = set(text.splitlines()[0].split())
  assert top <= set(
    "app bin dev etc home lib lib32 lib64 libx32 opt proc run sbin tmp usr "
    "var".split()
  )


def test_password_hashes_and_keys_are_not_in_etc(bwrap_options):
  text = output(bwrap_options, "cat /etc/shadow /etc/gshadow /etc/sudoers; "
                "ls -d /etc/ssh /etc/ssl/private; "
                "cut -d: -f1 /etc/passwd")  # fmt: skip
  assert text.count("No such file") == 5
  assert text.endswith("root\nagent\nnobody\n")


def test_host_variables_do_not_leak(bwrap_options, monkeypatch):
  monkeypatch.setenv("GYRE_TEST_SECRET", SECRET)
  text = output(
    bwrap_options, "env; export -p; cat /proc/*/environ | tr '\\0' '\\n'"
  )
  assert SECRET not in text
  assert "HOME=/home/agent" in text


def test_host_processes_and_their_arguments_are_invisible(bwrap_options):
  victim = subprocess.Popen(["sleep", "4711"])
  try:
    text = output(bwrap_options, "ps aux; cat /proc/*/cmdline; ls -d "
                  f"/proc/{victim.pid} /proc/{os.getpid()}")  # fmt: skip
    assert "4711" not in text and "pytest" not in text
  finally:
    victim.kill()
    victim.wait()


def test_process_one_and_the_shell_hide_their_memory(bwrap_options):
  text = output(
    bwrap_options,
    "ls /proc/1/fd /proc/$$/fd; cat /proc/1/environ /proc/$$/environ; "
    "head -c 1 /proc/1/mem; head -c 1 /proc/$$/mem; ls /proc/1/root/; "
    "cat /opt/gyre/sh/bash",
  )
  assert text.count("Permission denied") == 8


# Writing outside.


def test_nothing_outside_can_be_written(bwrap_options):
  text = output(
    bwrap_options,
    "for d in / /usr /usr/bin /etc /bin/ /lib/ /dev /opt /opt/gyre/sh /home "
    "/var /run /proc /proc/sys; do echo x > $d/gyre-escape && echo WROTE $d; "
    "mkdir $d/gyre-dir && echo MADE $d; done; rm -f /usr/bin/env && echo RM; "
    "echo x >> /etc/passwd && echo APPENDED; mv /usr/bin/env /tmp && echo MV",
  )
  for word in ("WROTE", "MADE", "RM", "APPENDED", "MV"):
    assert word not in text
  assert not pathlib.Path("/usr/gyre-escape").exists()


def test_kernel_settings_cannot_be_written(bwrap_options):
  text = output(
    bwrap_options,
    "for f in /proc/sys/kernel/hostname /proc/sys/kernel/core_pattern "
    "/proc/sys/vm/drop_caches /proc/sysrq-trigger /proc/sys/kernel/domainname "
    "/proc/1/oom_score_adj; do echo 1 > $f && echo WROTE $f; done",
  )
  assert "WROTE" not in text


def test_sysfs_and_cgroups_are_absent(bwrap_options):
  text = output(bwrap_options, "ls /sys /sys/fs/cgroup /sys/class/net")
  assert text.count("No such file") == 3


def test_device_nodes_cannot_be_made_or_found(bwrap_options):
  text = output(
    bwrap_options,
    "mknod /tmp/m c 1 1; mknod /app/s b 8 0; mknod /dev/m c 1 1; "
    "ls /dev/mem /dev/kmem /dev/kmsg /dev/sda /dev/vda /dev/fuse /dev/kvm "
    "/dev/net/tun /dev/loop0; ls /dev | xargs",
  )
  assert text.count("mknod:") == 3 and text.count("No such file") == 9
  assert text.splitlines()[-1] == (
    "core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
  )


# The network.


def test_tcp_to_the_host_reaches_nobody(bwrap_options):
  with socket.create_server(("127.0.0.1", 0)) as server:
    server.settimeout(0.2)
    port = server.getsockname()[1]
    text = output(
      bwrap_options,
      f"echo x > /dev/tcp/127.0.0.1/{port} && echo CONNECTED; "
      "echo x > /dev/tcp/10.0.0.1/80 && echo CONNECTED; "
      "tail -n +3 /proc/net/dev | cut -d: -f1",
    )
    with pytest.raises(TimeoutError):
      server.accept()
  assert "CONNECTED" not in text and text.split()[-1] == "lo"


def test_udp_to_the_host_reaches_nobody(bwrap_options):
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
    server.bind(("127.0.0.1", 0))
    server.settimeout(0.2)
    output(
      bwrap_options, f"echo x > /dev/udp/127.0.0.1/{server.getsockname()[1]}"
    )
    with pytest.raises(TimeoutError):
      server.recv(1)


def test_abstract_and_file_unix_sockets_reach_nobody(bwrap_options, tmp_path):
  abstract = "\0" + SECRET
  path = str(tmp_path / "s")
  for address in (abstract, path):
    with socket.socket(socket.AF_UNIX) as server:
      server.bind(address)
      server.listen()
      text = output(
        bwrap_options,
        "python3 -c \"import socket; s = socket.socket(socket.AF_UNIX); "
        f"s.connect({address!r}); print('CONNECTED')\"",
      )  # fmt: skip
    assert "Error" in text and "CONNECTED" not in text


@pytest.mark.parametrize(
  "family,kind", [(40, 1), (17, 3), (38, 5), (2, 3), (31, 3)]
)
def test_other_socket_families_are_refused(bwrap_options, family, kind):
  """vsock (a virtual machine's own host), packet, alg, raw, bluetooth."""
  text = output(
    bwrap_options,
    'python3 -c "import socket; '
    f"socket.socket({family}, {kind}); print('OPENED')\"",
  )
  assert "OPENED" not in text and "Error" in text


# Signals, tracing, privileges.


def test_signals_do_not_reach_the_host(bwrap_options):
  victim = subprocess.Popen(["sleep", "4712"])
  try:
    result, _, after = play(
      bwrap_options,
      f"kill -9 {victim.pid}; kill -9 {os.getpid()} {os.getppid()}",
      "kill -9 -1; kill -TERM 1; kill -9 1; kill -INT 0",
      "echo alive",
    )
    assert victim.poll() is None
    assert result.output.count("No such process") >= 2
    assert after.output == "alive\n"
  finally:
    victim.kill()
    victim.wait()


def test_no_capability_and_no_new_privileges(bwrap_options):
  text = output(
    bwrap_options,
    "grep -E 'Cap(Prm|Eff|Bnd|Amb)|NoNewPrivs|Seccomp:' /proc/self/status; "
    "id -u; chroot / true && echo GOT; hostname x && echo GOT; "
    "chown root f && echo GOT; renice -n -5 $$ && echo GOT",
  )
  assert text.count("\t0000000000000000\n") == 4
  assert "NoNewPrivs:\t1" in text and "Seccomp:\t2" in text
  assert "\n1000\n" in text
  assert "GOT" not in text


def test_setuid_files_give_nothing(bwrap_options):
  text = output(
    bwrap_options,
    "cp /bin/bash b; chmod 6755 b; ./b -p -c 'id -u; id -ru'; "
    "find /usr/bin -perm -4000 | head -1 | xargs ls -ln; su -c id; "
    "mount -t tmpfs x /tmp",
  )
  assert text.startswith("1000\n1000\n") and "uid=0" not in text


@pytest.mark.parametrize(
  "name,arguments",
  [
    ("ptrace", "101 16 1 0 0"),
    ("process_vm_readv", "310 1 0 0 0 0 0"),
    ("mount", "165 0 0 0 0 0"),
    ("umount", "166 0 0"),
    ("unshare user", "272 0x10000000"),
    ("unshare mount", "272 0x20000"),
    ("setns", "308 0 0"),
    ("pivot_root", "155 0 0"),
    ("open_by_handle_at", "304 0 0 0"),
    ("bpf", "321 0 0 0"),
    ("perf_event_open", "298 0 0 0 0 0"),
    ("io_uring_setup", "425 1 0"),
    ("userfaultfd", "323 0"),
    ("keyctl", "250 0 -3 0"),
    ("add_key", "248 0 0 0 0 -3"),
    ("request_key", "249 0 0 0 -3"),
    ("init_module", "175 0 0 0"),
    ("kexec_load", "246 0 0 0 0"),
    ("reboot", "169 0xfee1dead 672274793 0 0"),
    ("settimeofday", "164 0 0"),
    ("syslog", "103 3 0 0"),
    ("swapon", "167 0 0"),
    ("ioctl TIOCSTI", "16 0 0x5412 0"),
  ],
)
def test_system_calls_that_are_refused(bwrap_options, name, arguments):
  if not X86_64:
    pytest.skip("system call numbers of x86_64")
  text = output(bwrap_options, SYSCALL + arguments)
  assert text == f"syscall -1 {EPERM}\n", name


def test_user_namespaces_by_clone_are_refused(bwrap_options):
  text = output(
    bwrap_options,
    "unshare -U true && echo MADE; unshare -r true && echo MADE; "
    'python3 -c "import ctypes; c = ctypes.CDLL(None, use_errno=True); '
    "r = c.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)\n"
    "import os\nif r == 0: os._exit(0)\nprint('clone', r)\"",
  )
  assert "MADE" not in text
  assert not X86_64 or "clone -1" in text


def test_calls_of_another_architecture_are_refused(bwrap_options):
  if not X86_64:
    pytest.skip("the x32 and i386 tables exist on x86_64")
  # mount by its x32 number, and by int 0x80 (21).
  code = (
    "import ctypes, mmap; m = mmap.mmap(-1, 4096, prot=7); "
    "m.write(bytes.fromhex('b815000000cd80c3')); "
    "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof("
    "ctypes.c_char.from_buffer(m))); print('int80', f())"
  )
  text = output(
    bwrap_options, f'{SYSCALL} 0x400000a5 0 0 0 0 0; python3 -c "{code}"'
  )
  assert text.startswith(f"syscall -1 {ENOSYS}\n")
  assert f"int80 -{ENOSYS}" in text or "Segmentation" in text


def test_there_is_no_terminal_to_inject_into(bwrap_options):
  text = output(bwrap_options, "tty; echo x > /dev/tty; ps -o tty= -p $$")
  assert "not a tty" in text and "?" in text and "No such device" in text
