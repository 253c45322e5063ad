"""The docker and podman backends, through their command lines.

The container has the task's image (built from its Dockerfile where it has
one), no network, few capabilities, and limits on memory, processes and open
files. A command that runs too long takes the container's other processes with
it; the shell is then a new one. The workspace and the reports are copied out
of the stopped container by the engine, never by a program of the image.

Not covered here: the fixed clock of deterministic mode, and a limit on the
disk that the container's own layer takes (the engine's storage driver has it).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import pathlib
import posixpath
import shutil
import tarfile
import uuid
from collections.abc import Mapping, Sequence

from gyre.envs import limits, local, sandbox, shell, snapshot, spawn
from gyre.envs import task as task_lib

DEFAULT_IMAGE = "debian:bookworm-slim"
_CAPS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID")
_CALL_TIMEOUT_S = 60.0
_EXEC = (
  f"umask 022; exec {shell.CONTROL_FD}>&2 {shell.MARK_FD}>&1 2>&1; "
  + shell.EXEC.format("bash")
)
_INIT = "PS1=; PS2=; set +o histexpand +o history; unset HISTFILE"


def image_tag(task: task_lib.Task) -> str:
  """The tag of a task's own image: a hash of its build context."""
  digest = hashlib.sha256(snapshot.pack_files(task.files)).hexdigest()
  return f"gyre-task:{digest[:24]}"


def build_command(client: str, tag: str, context: str) -> list[str]:
  """Builds the image `tag` from the directory `context`."""
  return [client, "build", "--quiet", "--tag", tag, context]


def create_command(
  client: str,
  *,
  name: str,
  image: str,
  workdir: str,
  limit: limits.Caps,
  cpus: int,
  env: Mapping[str, str],
  mounts: Mapping[str, str],
) -> list[str]:
  """Creates the container, without starting it."""
  out = [
    client, "create", "--name", name, "--init",
    "--network", "none", "--hostname", "gyre",
    "--cap-drop", "ALL",
    *(word for cap in _CAPS for word in ("--cap-add", cap)),
    "--security-opt", "no-new-privileges",
    "--memory", f"{limit.memory_mib}m",
    "--memory-swap", f"{limit.memory_mib}m",
    "--pids-limit", str(limit.max_processes),
    "--ulimit", f"nofile={limit.max_files}:{limit.max_files}",
    "--ulimit", f"fsize={limit.disk_mib * limits.MIB}",
    "--ulimit", "core=0",
    "--ulimit", f"cpu={int(limit.cpu_s) + 2}",
    "--shm-size", "16m",
    "--workdir", workdir,
  ]  # fmt: skip
  if cpus:
    out += ["--cpus", str(cpus)]
  for key, value in sorted(env.items()):
    out += ["--env", f"{key}={value}"]
  for target, source in sorted(mounts.items()):
    out += ["--volume", f"{source}:{target}:ro"]
  return [*out, "--entrypoint", "sleep", image, "infinity"]


def shell_command(client: str, name: str, workdir: str) -> list[str]:
  """A persistent shell: output on stdout, the control channel on stderr."""
  return [
    client, "exec", "--interactive", "--workdir", workdir, name,
    "bash", "-c", _EXEC,
  ]  # fmt: skip


class Container:
  """See the module. Built by `start_docker` and `start_podman`."""

  def __init__(
    self, client: str, request: sandbox.Request, directory: pathlib.Path
  ):
    self.name = client
    self.kept_without: list[str] = []
    self.workspace = directory / "workspace.tar"
    self.workdir = request.task.workdir
    self._client = client
    self._request = request
    self._dir = directory
    task = request.task.limits
    self._caps = limits.caps(request.options, task.memory_mib, task.storage_mib)
    self._container = f"gyre-{uuid.uuid4().hex[:16]}"
    self._shell = shell.Shell(self._caps.max_output_bytes, marks_output=True)
    self._process: asyncio.subprocess.Process | None = None
    self._stop = asyncio.Event()
    self._created = self._ended = False
    self._wall_s = 0.0
    self._status = 0

  @property
  def cpu_s(self) -> float:
    """0: the command lines do not tell."""
    return 0.0

  async def _call(
    self,
    words: Sequence[str],
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    timeout_s: float = _CALL_TIMEOUT_S,
    check: bool = True,
  ) -> bytes:
    """One call of the client; its standard output."""
    try:
      process = await spawn.spawn(
        *words,
        stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
        stdout=asyncio.subprocess.PIPE if stdout is None else stdout,
        stderr=asyncio.subprocess.PIPE,
      )
    except OSError as e:
      raise sandbox.SandboxError(f"cannot run {words[0]}: {e}") from e
    try:
      out, error = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
      process.kill()
      await process.wait()
      raise sandbox.SandboxError(
        f"{' '.join(words[:2])} took more than {timeout_s:g} s"
      ) from None
    if check and process.returncode:
      lines = error.decode("utf-8", "replace").strip().splitlines() or ["?"]
      raise sandbox.SandboxError(f"{' '.join(words[:2])}: {lines[-1][:200]}")
    return out or b""

  async def start(self) -> None:
    """Finds the engine, builds the image, starts the container and shell."""
    if shutil.which(self._client) is None:
      raise sandbox.SandboxError(f"no {self._client} on this host")
    await self._call([self._client, "info"], timeout_s=20)
    request, task = self._request, self._request.task
    image = await self._image()
    env = local.environment(request, "/root", self.workdir)
    env.pop("PWD")
    env.pop("PATH")  # the image's own
    mounts = {}
    for target, files in request.mounts.items():
      source = self._dir / target.strip("/").replace("/", "_")
      task_lib.write_files(files, source)
      mounts[target] = str(source)
    await self._call(
      create_command(
        self._client,
        name=self._container,
        image=image,
        workdir=self.workdir,
        limit=self._caps,
        cpus=task.limits.cpus,
        env=env,
        mounts=mounts,
      ),
      timeout_s=task.limits.build_timeout_s,
    )
    self._created = True
    await self._call([self._client, "start", self._container])
    await self._fill()
    await self._start_shell()

  async def _image(self) -> str:
    task = self._request.task
    if task.image:
      return task.image
    if not task.dockerfile:
      return DEFAULT_IMAGE
    tag = image_tag(task)
    context = self._dir / "context"
    task_lib.write_files(task.files, context)
    await self._call(
      build_command(self._client, tag, str(context)),
      timeout_s=task.limits.build_timeout_s,
    )
    workdirs = await self._call(
      [self._client, "image", "inspect", "--format",
       "{{.Config.WorkingDir}}", tag]
    )  # fmt: skip
    found = workdirs.decode().strip()
    if task.workdir == task_lib.WORKDIR and found not in ("", "/"):
      self.workdir = found
    return tag

  def _exec(self, *words: str, interactive: bool = False) -> list[str]:
    flags = ["--interactive"] if interactive else []
    return [self._client, "exec", *flags, self._container, *words]

  async def _fill(self) -> None:
    """Lays out the workspace, and an empty /logs."""
    request = self._request
    if request.logs:
      await self._call(self._exec("mkdir", "-p", "/logs/verifier"))
    if request.workspace is not None:
      await self._call(
        self._exec("find", self.workdir, "-mindepth", "1", "-delete")
      )
      data = request.workspace.read_bytes()
    elif request.task.files and not request.task.dockerfile:
      data = snapshot.pack_files(request.task.files)
    else:
      return
    path = self._dir / "fill.tar"
    path.write_bytes(data)
    with path.open("rb") as f:
      await self._call(
        self._exec("tar", "-xpf", "-", "-C", self.workdir, interactive=True),
        stdin=f.fileno(),
      )

  async def _start_shell(self) -> None:
    self._shell.reset()
    self._stop = asyncio.Event()
    i, o, c = self._shell.fds
    self._process = await spawn.spawn(
      *shell_command(self._client, self._container, self.workdir),
      stdin=i,
      stdout=o,
      stderr=c,
      start_new_session=True,
    )
    self._watch = asyncio.create_task(self._wait(self._process, self._stop))
    start = self._shell.run(_INIT, self._stop)
    try:
      code, output, _ = await asyncio.wait_for(start, _CALL_TIMEOUT_S)
    except TimeoutError:
      raise sandbox.SandboxError(f"{self.name}: no answer from bash") from None
    if code is None:
      raise sandbox.SandboxError(
        f"{self.name}: no bash in the container: {output.text()[-200:]}"
      )
    self._shell.drain()

  async def _wait(self, process, stop: asyncio.Event) -> None:
    await process.wait()
    stop.set()

  async def _drop_shell(self) -> None:
    with contextlib.suppress(ProcessLookupError):
      self._process.kill()
    await self._watch
    await self._call(self._exec("sh", "-c", "kill -KILL -1"), check=False)

  async def run(
    self, command: str, timeout_s: float | None = None
  ) -> shell.CommandResult:
    """See sandbox.Sandbox.run."""
    if self._ended:
      raise sandbox.SandboxError(f"{self.name}: the sandbox is closed")
    left = self._caps.wall_s - self._wall_s
    if left <= 0:
      return shell.CommandResult(
        "", None, killed="wall", exhausted=True,
        notice="[not run: the sandbox's time is used up]",
      )  # fmt: skip
    limit = min(timeout_s or left, left)
    loop = asyncio.get_running_loop()
    begin = loop.time()
    timer = loop.call_later(limit, self._stop.set)
    try:
      code, output, why = await self._shell.run(
        command, self._stop, self._status
      )
    finally:
      timer.cancel()
    elapsed = loop.time() - begin
    self._wall_s += elapsed
    killed, notice = ("output" if why == "output" else ""), ""
    timed_out = False
    if why:
      if self._process.returncode is not None and not killed:
        code = self._process.returncode
        notice = f"the shell exited with status {code}"
      elif killed:
        notice = "ended: it printed too much"
      else:
        timed_out = elapsed >= limit
        notice = f"ended after {limit:g} s"
        killed = "wall" if self._wall_s >= self._caps.wall_s else ""
      await self._drop_shell()
      notice += (
        "; a new shell was started: variables, functions and jobs are gone"
      )
      if killed != "wall":
        await self._start_shell()
    self._status = code or 0
    return shell.CommandResult(
      output=output.text(),
      exit_code=code,
      timed_out=timed_out and killed != "wall",
      truncated=output.truncated,
      killed=killed,
      restarted=bool(why),
      notice=f"[{notice}]" if notice else "",
      exhausted=killed == "wall",
    )

  async def close_shell(self) -> pathlib.Path:
    """See sandbox.Sandbox.close_shell."""
    if not self._ended:
      self._ended = True
      await self._call([self._client, "kill", self._container], check=False)
      if self._process is not None:
        with contextlib.suppress(ProcessLookupError):
          self._process.kill()
        await self._watch
      raw = await self._copy_out(self.workdir, "raw.tar")
      self.kept_without = await asyncio.to_thread(
        snapshot.sanitize,
        raw,
        self.workspace,
        2 * self._caps.disk_mib * limits.MIB,
        posixpath.basename(self.workdir),
      )
    return self.workspace

  async def _copy_out(self, path: str, name: str) -> pathlib.Path:
    """A tar of `path`, made by the engine from the stopped container."""
    target = self._dir / name
    with target.open("wb") as f:
      await self._call(
        [self._client, "cp", f"{self._container}:{path}", "-"],
        stdout=f.fileno(),
      )
    return target

  async def read(self, path: str, max_bytes: int) -> tuple[bytes | None, str]:
    """See sandbox.Sandbox.read."""
    if not path.startswith("/logs/"):
      return None, f"{path} is not below /logs"
    try:
      raw = await self._copy_out(path, "report.tar")
    except sandbox.SandboxError:
      return None, ""
    try:
      with tarfile.open(fileobj=io.BytesIO(raw.read_bytes())) as tar:
        member = tar.next()
        if member is None or not member.isreg():
          return None, f"{path} is not a regular file"
        if member.size > max_bytes:
          return None, f"{path} has {member.size} bytes, above {max_bytes}"
        return tar.extractfile(member).read(), ""
    except tarfile.TarError as e:
      return None, f"{path}: {e}"

  async def close(self) -> None:
    """See sandbox.Sandbox.close."""
    self._ended = True
    if self._created:
      self._created = False
      await self._call(
        [self._client, "rm", "--force", "--volumes", self._container],
        check=False,
      )
    if self._process is not None and self._process.returncode is None:
      with contextlib.suppress(ProcessLookupError):
        self._process.kill()
      await self._watch
    self._shell.close()
    await asyncio.to_thread(shutil.rmtree, self._dir, True)


async def _start(client: str, request: sandbox.Request) -> Container:
  box = Container(client, request, sandbox.new_directory())
  try:
    await box.start()
  except BaseException:
    await box.close()
    raise
  return box


async def start_docker(request: sandbox.Request) -> Container:
  """Opens a sandbox in docker.

  Raises:
    sandbox.SandboxError: there is no docker, or it refuses.
  """
  return await _start("docker", request)


async def start_podman(request: sandbox.Request) -> Container:
  """Opens a sandbox in podman.

  Raises:
    sandbox.SandboxError: there is no podman, or it refuses.
  """
  return await _start("podman", request)
