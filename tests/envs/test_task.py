"""Harbor task directories: loaded, checked, written back; images refused."""

import pathlib

import pytest

from gyre.envs import image
from gyre.envs import task as task_lib

FULL = """
schema_version = "1.1"
[task]
name = "org/hello"
[metadata]
difficulty = "easy"
tags = ["a", "b"]
[metadata.gyre]
kind = "files"
turns = 2
solution_turns = ["cd d", "echo 'x' > y"]
expected = ["one", "two"]
[agent]
timeout_sec = 120.5
[verifier]
timeout_sec = 60
env = { KEY = "v" }
[environment]
build_timeout_sec = 30
cpus = 2
memory = "2G"
storage_mb = 512
env = { E = "1" }
unknown_key = "ignored"
"""


def write(root, toml=FULL, **files):
  """A task directory; keyword names use __ for / and _ for . once."""
  tree = {
    "instruction.md": "Do it.\n",
    "tests/test.sh": "exit 0\n",
    "task.toml": toml,
    **files,
  }
  for name, text in tree.items():
    if text is not None:
      path = root / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)
  return root


def test_a_full_directory(tmp_path):
  root = write(
    tmp_path,
    **{
      "environment/data/in.txt": "1",
      "solution/solve.sh": "true",
      "instruction.md": "<!-- benchmark canary GUID 1 -->\n\nDo it.\n",
    },
  )
  (root / "environment/data/in.txt").chmod(0o640)
  (root / "environment/link").symlink_to("data/in.txt")
  task = task_lib.load_task(root)
  assert task.task_id == "org/hello" and task.instruction == "Do it."
  assert task.limits == task_lib.Limits(120.5, 60.0, 30.0, 2, 2048, 512, 0)
  assert task.metadata == {
    "difficulty": "easy", "tags": ["a", "b"], "kind": "files", "turns": 2,
  }  # fmt: skip
  assert task.kind == "files" and task.expected == ("one", "two")
  assert task.solution_turns == ("cd d", "echo 'x' > y")
  assert task.files["data/in.txt"].read() == b"1"
  assert task.files["data/in.txt"].mode == 0o640
  assert task.files["link"].link == "data/in.txt"
  assert task.env == {"E": "1"} and task.verifier_env == {"KEY": "v"}
  assert set(task.solution) == {"solve.sh"}


def test_the_least_directory_has_harbors_defaults(tmp_path):
  task = task_lib.load_task(write(tmp_path / "least", ""))
  assert task.task_id == "least" and task.workdir == "/app"
  assert task.limits.verifier_timeout_s == 600 and not task.files


@pytest.mark.parametrize(
  "files,message",
  [
    ({"task.toml": None}, "no task.toml"),
    ({"task.toml": "x ="}, "task.toml: "),
    ({"instruction.md": None}, "no instruction.md"),
    ({"instruction.md": " \n"}, "instruction.md is empty"),
    ({"tests/test.sh": None}, "no tests/test.sh"),
    ({"solution/other.sh": ""}, "no solve.sh"),
    ({"task.toml": "[agent]\ntimeout_sec = 'x'"}, "agent.timeout_sec must be"),
    ({"task.toml": "[agent]\ntimeout_sec = 0"}, "must be positive, got 0"),
    ({"task.toml": "[verifier]\ntimeout_sec = -1"}, "not be negative, got -1"),
    ({"task.toml": "[environment]\nmemory = 'lots'"}, "'lots'"),
    ({"task.toml": "[environment]\ncpus = true"}, "cpus must be a number"),
    ({"task.toml": "agent = 1"}, "agent must be a table"),
    ({"task.toml": "[environment]\ndocker_image = 5"}, "docker_image"),
    ({"task.toml": "[environment]\nos = 'windows'"}, "'windows'"),
    ({"task.toml": "[environment]\nworkdir = 'rel'"}, "'rel' must be absolute"),
    ({"task.toml": "[environment.env]\nA = 1"}, "environment.env.A must be"),
    ({"task.toml": "[[steps]]\nname = 'a'"}, "multi-step"),
    ({"task.toml": "[metadata.gyre]\nexpected = [1]"}, "must be strings"),
  ],
)
def test_broken_directories_are_one_line_errors(tmp_path, files, message):
  with pytest.raises(task_lib.TaskError) as e:
    task_lib.load_task(write(tmp_path, **{"task.toml": FULL, **files}))
  assert message in str(e.value) and "\n" not in str(e.value)
  assert str(tmp_path) in str(e.value) or "least" in message or "rel" in message


def test_a_directory_that_is_not_there(tmp_path):
  with pytest.raises(task_lib.TaskError, match="no such"):
    task_lib.load_task(tmp_path / "nowhere")


def test_a_task_in_memory_survives_the_directory(tmp_path):
  task = task_lib.Task(
    'id "quoted" \\ é 😀 \x7f',
    "Do\nthis.",
    files={
      "a/b": task_lib.FileSpec(b"\0\xff", 0o600),
      "e": task_lib.FileSpec(directory=True, mode=0o700),
      "l": task_lib.FileSpec(link="../x"),
    },
    tests={"test.sh": task_lib.FileSpec(b"exit 1", 0o755)},
    solution_turns=("printf '%s\\n' \"$X\"", "true"),
    limits=task_lib.Limits(5.0, 6.0, 7.0, 1, 64, 32, 0),
    metadata={"kind": "k", "turns": 2, "a b": [1, 2.5, True, {"n": "m"}]},
    expected=("x",),
    workdir="/work",
    env={"A": "b"},
    verifier_env={"C": "d"},
  )
  task_lib.write_task(task, tmp_path / "t")
  back = task_lib.load_task(tmp_path / "t")
  for name in ("task_id instruction solution_turns limits metadata expected "
               "workdir env verifier_env").split():  # fmt: skip
    assert getattr(back, name) == getattr(task, name), name
  assert back.files["a/b"].read() == b"\0\xff"
  assert back.files["a/b"].mode == 0o600 and back.files["e"].mode == 0o700
  assert back.files["l"].link == "../x"
  assert b"printf" in back.solution["solve.sh"].read()
  with pytest.raises(task_lib.TaskError, match="not empty"):
    task_lib.write_task(task, tmp_path / "t")


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_paths_that_leave_the_task_are_refused(path):
  with pytest.raises(task_lib.TaskError, match="relative"):
    task_lib.Task("t", "x", files={path: task_lib.FileSpec(b"")})


# Images.


def docker(text, **files):
  """A task with this Dockerfile and these further environment files."""
  specs = {k: task_lib.FileSpec(v.encode()) for k, v in files.items()}
  return task_lib.Task(
    "d", "x", files={"Dockerfile": task_lib.FileSpec(text.encode()), **specs}
  )


def test_a_dockerfile_that_only_places_files():
  task = docker(
    "# c\nFROM docker.io/library/ubuntu:24.04\nWORKDIR /srv\nENV A=1 B='x y'\n"
    "COPY one.txt ./\nCOPY --chmod=755 two.sh bin/run.sh\nCOPY d /srv/d2/\n"
    'RUN mkdir -p \\\n  out\nLABEL x=y\nCMD ["bash"]\n',
    **{"one.txt": "1", "two.sh": "2", "d/three": "3", "other": "4"},
  )
  layout = image.host_layout(task)
  assert layout.workdir == "/srv" and layout.env == {"A": "1", "B": "x y"}
  assert set(layout.files) == {"one.txt", "bin/run.sh", "d2/three", "out"}
  assert layout.files["bin/run.sh"].mode == 0o755
  assert layout.files["out"].directory


def test_copy_everything_and_patterns():
  task = docker("FROM debian\nCOPY . .\nWORKDIR /app\nCOPY *.txt txt/\n",
                **{"a.txt": "1", "b.md": "2"})  # fmt: skip
  with pytest.raises(image.ImageRefused, match="outside its workdir"):
    image.host_layout(task)
  task = docker("FROM debian\nWORKDIR /app\nCOPY . .\nCOPY *.txt txt/\n",
                **{"a.txt": "1", "b.md": "2"})  # fmt: skip
  assert set(image.host_layout(task).files) == {
    "Dockerfile", "a.txt", "b.md", "txt/a.txt",
  }  # fmt: skip


@pytest.mark.parametrize(
  "text,what",
  [
    ("FROM python:3.12\n", "FROM python:3.12"),
    ("FROM ghcr.io/org/ubuntu\n", "FROM ghcr.io/org/ubuntu"),
    ("FROM ubuntu\nRUN apt-get install -y gcc\n", "RUN apt-get install"),
    ("FROM ubuntu\nRUN mkdir -p x && curl evil\n", "RUN mkdir"),
    ("FROM ubuntu AS a\nFROM debian\n", "FROM debian"),
    ("FROM ubuntu\nADD https://x/y .\n", "ADD https://x/y"),
    ("FROM ubuntu\nCOPY --from=x a b\n", "COPY --from"),
    ("FROM ubuntu\nWORKDIR /app\nCOPY nothere .\n", "COPY nothere"),
    ("FROM ubuntu\nWORKDIR /app\nCOPY a /etc/a\n", "/etc/a"),
    ("FROM ubuntu\nWORKDIR /usr/src\n", "/usr/src"),
    ("FROM ubuntu\nVOLUME /data\n", "VOLUME /data"),
    ("WORKDIR /app\n", "a FROM"),
  ],
)
def test_what_a_host_cannot_offer_is_named(text, what):
  with pytest.raises(image.ImageRefused) as e:
    image.host_layout(docker(text, a="1"))
  assert what in str(e.value) and "task d" in str(e.value)
  assert "\n" not in str(e.value)


def test_images_gpus_and_services_are_refused():
  for fields in (
    {"image": "x/y:1"},
    {"limits": task_lib.Limits(gpus=1)},
    {"files": {"docker-compose.yaml": task_lib.FileSpec(b"")}},
    {"workdir": "/etc"},
    {"workdir": "/"},
  ):
    with pytest.raises(image.ImageRefused):
      image.host_layout(task_lib.Task("t", "x", **fields))
  plain = task_lib.Task("t", "x", files={"a": task_lib.FileSpec(b"1")})
  assert set(image.host_layout(plain).files) == {"a"}


def test_a_special_file_in_a_directory_is_refused(tmp_path):
  import os

  root = write(tmp_path)
  (root / "environment").mkdir()
  os.mkfifo(pathlib.Path(root, "environment", "pipe"))
  with pytest.raises(task_lib.TaskError, match="pipe: neither"):
    task_lib.load_task(root)
