"""The verifier: statuses, reports, and what a workspace tries against it."""

import asyncio
import dataclasses
import json
import pathlib
import tempfile
import time

import pytest

from gyre.envs import reports, sandbox, verifier
from gyre.envs import task as task_lib

CTRF = """
t() { if eval "$2"; then s=passed; else s=failed; fi
  r="$r${r:+,}{\\"name\\":\\"$1\\",\\"status\\":\\"$s\\"}"; }
t exists '[ -f x ]'
t content '[ "$(cat x)" = hi ]'
echo "{\\"results\\":{\\"tests\\":[$r]}}" > /logs/verifier/ctrf.json
"""
EXPECTED = ("content", "exists")


def make(script, *, expected=EXPECTED, files=None, **fields):
  """A task whose tests/test.sh is `script`."""
  seed = {"seed": task_lib.FileSpec(b"1")} if files is None else files
  tests = {"test.sh": task_lib.FileSpec(script.encode(), 0o755)}
  return task_lib.Task(
    "v", "x", files=seed, tests=tests, expected=expected, **fields
  )


def judge(options, task, *commands, deterministic=False):
  """The outcome of a workspace that the commands leave."""

  async def main():
    box = await sandbox.open_sandbox(options, task)
    try:
      for command in commands:
        await box.run(command, 10)
      path = await box.close_shell()
      return await verifier.verify(
        task, path, options, deterministic=deterministic
      )
    finally:
      await box.close()

  return asyncio.run(main())


def test_assertions_are_counted(local_options):
  task = make(CTRF)
  full = judge(local_options, task, "echo hi > x")
  assert (full.status, full.score, full.passed, full.total) == (
    "scored", 1.0, 2, 2,
  )  # fmt: skip
  half = judge(local_options, task, "echo ho > x")
  assert (half.score, half.passed) == (0.5, 1)
  assert half.assertions == {"content": False, "exists": True}
  zero = judge(local_options, task, "true")
  assert (zero.status, zero.score, zero.passed) == ("scored", 0.0, 0)


def test_no_artifact(bwrap_options):
  task = make(CTRF, files={})
  empty = judge(bwrap_options, task, "true")
  assert (empty.status, empty.score, empty.total) == ("no_artifact", 0.0, 2)
  none = asyncio.run(verifier.verify(task, None, bwrap_options))
  assert none.status == "no_artifact"
  # Emptying what was there is an answer.
  gone = make('[ -z "$(ls -A)" ]', expected=())
  assert judge(bwrap_options, gone, "rm *").score == 1.0


@pytest.mark.parametrize(
  "script,score,status",
  [
    ("echo 1 > /logs/verifier/reward.txt; exit 1", 1.0, "scored"),
    ("echo 0 > /logs/verifier/reward.txt", 0.0, "scored"),
    ("echo 0.5 > /logs/verifier/reward.txt", 0.5, "scored"),
    ("echo '{\"reward\": 1}' > /logs/verifier/reward.json", 1.0, "scored"),
    ("echo nan > /logs/verifier/reward.txt; exit 1", 0.0, "scored"),
    ("echo 2 > /logs/verifier/reward.txt", 1.0, "scored"),
    ("true", 1.0, "scored"),
    ("exit 1", 0.0, "scored"),
    ("pytest-is-not-here", None, "eval_failed"),
    ("exit 126", None, "eval_failed"),
    ("kill -9 $$", None, "eval_failed"),
    ("echo '{' > /logs/verifier/ctrf.json; exit 0", 1.0, "scored"),
    ("echo '{\"results\":{\"tests\":[]}}' > /logs/verifier/ctrf.json", 1.0,
     "scored"),
  ],
)  # fmt: skip
def test_without_a_report_the_verdict_is_binary(
  bwrap_options, script, score, status
):
  found = judge(bwrap_options, make(script), "true")
  assert (found.status, found.score) == (status, score)
  if status == "scored" and score in (0.0, 1.0):
    assert found.total == 2 and found.passed == 2 * score


def test_junit_comes_second(bwrap_options):
  xml = (
    "<testsuites><testsuite><testcase classname='c' name='exists'/>"
    "<testcase classname='c' name='content'><failure/></testcase>"
    "</testsuite></testsuites>"
  )
  script = f'echo "{xml}" > /logs/verifier/junit.xml; exit 1'
  task = make(script, expected=("c::exists", "c::content"))
  assert judge(bwrap_options, task, "true").score == 0.5
  both = make(CTRF + script)
  assert judge(bwrap_options, both, "echo hi > x").score == 1.0


def test_only_expected_ids_count(bwrap_options):
  tests = [
    {"name": "exists", "status": "passed"},
    {"name": "exists", "status": "passed"},
    {"name": "content", "status": "skipped"},
    {"name": "invented", "status": "passed"},
  ]
  report = json.dumps({"results": {"tests": tests}})
  task = make(f"echo '{report}' > /logs/verifier/ctrf.json")
  found = judge(bwrap_options, task, "true")
  assert (found.passed, found.total, found.score) == (1, 2, 0.5)
  assert set(found.assertions) == set(EXPECTED)


def test_a_hanging_test_is_the_workspaces_fault_where_the_solution_passes(
  bwrap_options,
):
  limit = task_lib.Limits(verifier_timeout_s=0.5)
  known = make("cat pipe; " + CTRF, limits=limit)
  found = judge(bwrap_options, known, "true")
  assert found.score == 0.0
  hang = make(CTRF + "sleep 60", limits=limit)
  found = judge(bwrap_options, hang, "echo hi > x")
  assert found.score == 1.0 and "more than 0.5 s" in found.detail
  unknown = make("sleep 60", expected=(), limits=limit)
  assert judge(bwrap_options, unknown, "true").status == "eval_failed"
  known = make("sleep 60", limits=limit)
  found = judge(bwrap_options, known, "true")
  assert (found.status, found.score) == ("scored", 0.0)


def test_a_failing_sandbox_is_eval_failed(bwrap_options):
  task = make(CTRF)

  async def main():
    box = await sandbox.open_sandbox(bwrap_options, task)
    try:
      path = await box.close_shell()
      refused = dataclasses.replace(bwrap_options, backends=("remote",))
      first = await verifier.verify(task, path, refused)
      path.write_bytes(b"not a tar" * 99)
      return first, await verifier.verify(task, path, bwrap_options)
    finally:
      await box.close()

  first, second = asyncio.run(main())
  assert first.status == second.status == "eval_failed"
  assert first.score is None and "remote" in first.detail
  assert "\n" not in second.detail


def test_expected_ids_are_frozen_from_the_solution(local_options):
  task = make(CTRF, expected=(), solution_turns=("echo hi >", "echo hi > x"))
  frozen = asyncio.run(verifier.freeze_expected(task, local_options))
  assert frozen.expected == EXPECTED
  script = task_lib.FileSpec(b"printf hi > /app/x", 0o644)
  task = make(CTRF, expected=(), solution={"solve.sh": script})
  frozen = asyncio.run(verifier.freeze_expected(task, local_options))
  assert frozen.expected == EXPECTED
  wrong = dataclasses.replace(task, solution={}, solution_turns=("touch x",))
  with pytest.raises(task_lib.TaskError, match=r"its solution fails.*content"):
    asyncio.run(verifier.freeze_expected(wrong, local_options))
  with pytest.raises(task_lib.TaskError, match="no reference solution"):
    asyncio.run(verifier.freeze_expected(make(CTRF), local_options))


# What an agent leaves for the verifier to step on. Each must score 0.


@pytest.mark.parametrize(
  "attack",
  [
    # The agent's shell, home, temporary files and environment do not reach it.
    "export LD_PRELOAD=/app/evil.so BASH_ENV=/app/evil.sh ENV=/app/evil.sh "
    "PATH=/app:$PATH; echo 'echo hi > /app/x' "
    "> /app/evil.sh; cp /app/evil.sh /app/.bashrc; cp /app/evil.sh ~/.bashrc; "
    "cp /app/evil.sh ~/.profile; cp /app/evil.sh /tmp/.bashrc",
    # Programs in the workspace do not come before the system's.
    "for p in bash sh cat test '[' eval; do printf '#!/bin/sh\\necho hi > "
    "/app/x; echo hi\\n' > ./$p; chmod +x ./$p; done",
    # A process that waits for the verifier.
    "(setsid sh -c 'while :; do [ -e /logs ] && echo hi > /app/x; "
    "sleep 0.01; done' > /dev/null 2>&1 &)",
    # Links to where the tests and reports will be.
    "ln -s /tests tests; ln -s /logs/verifier/ctrf.json x",
    "ln -s /dev/stdin x",
    "mkdir -p logs/verifier; echo 1 > logs/verifier/reward.txt; mkfifo x",
    "mkdir x",
    "mkdir -p /logs/verifier || mkdir -p /tests; "
    "echo 1 > /logs/verifier/reward.txt; echo exit 0 > /tests/test.sh",
  ],
)
def test_attacks_from_the_workspace_score_nothing(bwrap_options, attack):
  start = time.monotonic()
  script = CTRF.replace("[ -f x ]", "[ -f x ] && [ ! -L x ]")
  limit = task_lib.Limits(verifier_timeout_s=2.0)
  found = judge(bwrap_options, make(script, limits=limit), attack)
  assert (found.status, found.score) == ("scored", 0.0), found
  assert time.monotonic() - start < 20


def test_python_does_not_import_from_the_workspace(bwrap_options):
  script = (
    "python3 -c 'import json, sys; print(json.__file__)' | grep -q ^/usr && "
    "python3 -m json.tool < seed > /dev/null"
  )
  found = judge(
    bwrap_options,
    make(script, expected=()),
    "echo 'raise SystemExit(1)' | tee json.py sitecustomize.py "
    "usercustomize.py > /dev/null; mkdir json; touch json/__init__.py",
  )
  assert found.score == 1.0, found


@pytest.mark.parametrize(
  "attack",
  [
    "echo 'exit 0' > /tests/test.sh; rm -rf /tests",
    "cd /logs/verifier; rm -f ctrf.json; ln -s /etc/passwd ctrf.json",
    "mkfifo /logs/verifier/ctrf.json",
    "mkdir /logs/verifier/ctrf.json",
    "truncate -s 10M /logs/verifier/ctrf.json",
    "rm -rf /logs/verifier; ln -s /app /logs/verifier; mkdir out; "
    'echo \'{"results":{"tests":[{"name":"exists","status":'
    '"passed"}]}}\' > /app/ctrf.json',
    "mount --bind /app /tests; umount /tests; chmod -R 777 /tests",
  ],
)
def test_a_program_of_the_agents_that_a_test_runs(bwrap_options, attack):
  """It runs as the test does; the host and /tests are still out of reach."""
  script = "[ -x run ] && timeout 1 ./run > /dev/null 2>&1\n" + CTRF
  limit = task_lib.Limits(verifier_timeout_s=3.0)
  start = time.monotonic()
  found = judge(
    bwrap_options,
    make(script + "[ -f x ]", limits=limit),
    f"cat > run <<'E'\n#!/bin/bash\n{attack}\nE\nchmod +x run",
  )
  assert found.status in ("scored", "eval_failed")
  assert not found.score and time.monotonic() - start < 20, found


def test_late_writers_of_reports_are_dead_when_it_is_read(bwrap_options):
  script = (
    "(setsid sh -c 'sleep 0.3; echo 1 > /logs/verifier/reward.txt' &) ; "
    "echo 0 > /logs/verifier/reward.txt"
  )
  assert judge(bwrap_options, make(script), "true").score == 0.0


def test_the_verifier_sees_modes_times_and_links(bwrap_options):
  script = (
    "[ $(stat -c %a a) = 640 ] && [ a -ef b ] && [ $(readlink c) = /nowhere ] "
    "&& [ $(stat -c %Y a) = 1500000000 ] && [ $(stat -c %a d) = 0 ]"
  )
  found = judge(
    bwrap_options,
    make(script, expected=()),
    "echo 1 > a; chmod 640 a; ln a b; ln -s /nowhere c; mkdir -m 0 d; "
    "touch -d @1500000000 a",
  )
  assert found.score == 1.0


# Reports, as functions.


def test_ctrf_statuses():
  tests = [
    {"name": "a", "status": "passed"},
    {"name": "b", "status": "failed"},
    {"name": "c", "status": "skipped"},
    {"name": "d", "status": "pending"},
    {"name": "e", "status": "other"},
    {"name": "f", "status": "passed", "rawStatus": "xpassed"},
    {"name": "g", "status": "other", "rawStatus": "xfailed"},
    {"name": "h", "status": "passed"},
    {"name": "h", "status": "failed"},
    {"name": "i", "status": "passed", "suite": "s"},
    {"name": "i", "status": "failed", "suite": ["s", "t"]},
  ]
  found = reports.parse_ctrf(json.dumps({"results": {"tests": tests}}).encode())
  assert {k for k, v in found.items() if v} == {"a", "s::i"}
  assert set(found) == set("abcdefgh") | {"s::i", "s > t::i"}


def test_junit_elements():
  xml = b"""<testsuites><testsuite name="s">
  <testcase classname="m" name="ok"/>
  <testcase classname="m" name="bad"><failure>x</failure></testcase>
  <testcase classname="m" name="err"><error/></testcase>
  <testcase classname="m" name="xf"><skipped type="pytest.xfail"/></testcase>
  <testcase name="plain"><system-out>t</system-out></testcase>
  </testsuite></testsuites>"""
  found = reports.parse_junit(xml)
  assert {k for k, v in found.items() if v} == {"m::ok", "plain"}
  assert len(found) == 5


@pytest.mark.parametrize(
  "parse,data",
  [
    (reports.parse_ctrf, b""),
    (reports.parse_ctrf, b"[]"),
    (reports.parse_ctrf, b"[" * 100000),
    (reports.parse_ctrf, b'{"results": {"tests": [1]}}'),
    (reports.parse_ctrf, b'{"results": {"tests": [{"status": "passed"}]}}'),
    (reports.parse_ctrf, b"\xff\xfe"),
    (reports.parse_junit, b"<a/>"),
    (reports.parse_junit, b"<testsuite>"),
    (reports.parse_junit, b'<!DOCTYPE x [<!ENTITY a "b">]><testsuite/>'),
    (reports.parse_reward, b"inf"),
    (reports.parse_reward, b"-1"),
    (reports.parse_reward, b""),
    (reports.parse_reward, b'{"a": 1, "b": 2}'),
    (reports.parse_reward, b"[1]"),
  ],
)
def test_malformed_reports_are_one_line_errors(parse, data):
  with pytest.raises(reports.ReportError) as e:
    parse(data)
  assert "\n" not in str(e.value)


def test_equal_workspaces_are_verified_once(bwrap_options):
  # The last line printed tells one run of the tests from another.
  task = make("cat x > /logs/verifier/reward.txt\n"
              "cat /proc/sys/kernel/random/uuid", expected=())  # fmt: skip
  known = verifier.KnownOutcomes(limit=2)

  async def workspace(command):
    box = await sandbox.open_sandbox(bwrap_options, task, deterministic=True)
    try:
      await box.run(command, 10)
      return (await box.close_shell()).read_bytes()
    finally:
      await box.close()

  async def main(directory):
    paths = []
    for i, command in enumerate(("echo 1 > x", "echo 1 > x", "echo 0 > x")):
      paths.append(directory / f"{i}.tar")
      paths[-1].write_bytes(await workspace(command))
    refused = dataclasses.replace(bwrap_options, backends=("remote",))
    failed = await known.verify(task, paths[0], refused, deterministic=True)

    async def verify(i, **options):
      return await known.verify(task, paths[i], bwrap_options, **options)

    outcomes = await asyncio.gather(
      *(verify(i, deterministic=True) for i in (0, 1, 2, 0))
    )
    return failed, outcomes, await verify(0), await verify(0)

  with tempfile.TemporaryDirectory() as directory:
    failed, outcomes, *anew = asyncio.run(main(pathlib.Path(directory)))
  assert failed.status == "eval_failed"
  assert [o.score for o in outcomes] == [1.0, 1.0, 0.0, 1.0]
  assert outcomes[0] == outcomes[1] == outcomes[3]
  # Where the mode is not deterministic each is a run of its own.
  assert len({o.detail for o in (*outcomes, *anew)}) == 4


def _verify_all(known, calls, options, tmp_path):
  """Outcomes of (task, bytes of the workspace) each, asked for at once."""

  async def main():
    requests = []
    for i, (task, content) in enumerate(calls):
      path = tmp_path / f"{i}.tar"
      path.write_bytes(content)
      requests.append(known.verify(task, path, options, deterministic=True))
    return await asyncio.gather(*requests)

  return asyncio.run(main())


def _empty_workspace(options):
  async def main():
    box = await sandbox.open_sandbox(options, make(""), deterministic=True)
    try:
      return (await box.close_shell()).read_bytes()
    finally:
      await box.close()

  return asyncio.run(main())


def test_tasks_of_one_id_in_two_directories_are_two(local_options, tmp_path):
  scripts = [f"echo {n} > /logs/verifier/reward.txt" for n in (0, 1)]
  tasks = [
    make(script, expected=(), path=f"tasks/{i}")
    for i, script in enumerate(scripts)
  ]
  workspace = _empty_workspace(local_options)
  outcomes = _verify_all(
    verifier.KnownOutcomes(),
    [(task, workspace) for task in tasks],
    local_options,
    tmp_path,
  )
  assert [o.score for o in outcomes] == [0.0, 1.0]


def test_equal_workspaces_wait_for_each_other_after_a_failure(
  local_options, tmp_path, monkeypatch
):
  running, most, count = 0, 0, 0
  run = verifier.run_tests

  async def counted(*args, **kwargs):
    nonlocal running, most, count
    running, count = running + 1, count + 1
    most = max(most, running)
    try:
      return await run(*args, **kwargs)
    finally:
      running -= 1

  monkeypatch.setattr(verifier, "run_tests", counted)
  known = verifier.KnownOutcomes()
  task = make("exit 127", expected=())
  workspace = _empty_workspace(local_options)

  async def again(path, left):
    outcome = await known.verify(task, path, local_options, deterministic=True)
    if left:
      await again(path, left - 1)
    assert outcome.status == "eval_failed"

  async def main():
    path = tmp_path / "same.tar"
    path.write_bytes(workspace)
    await asyncio.gather(*(again(path, 1) for _ in range(3)))

  asyncio.run(main())
  assert (count, most) == (6, 1)


def test_the_outcomes_asked_for_last_are_kept(
  local_options, tmp_path, monkeypatch
):
  seen = []
  run = verifier.run_tests

  async def counted(task, *args, **kwargs):
    seen.append(task.task_id)
    return await run(task, *args, **kwargs)

  monkeypatch.setattr(verifier, "run_tests", counted)
  known = verifier.KnownOutcomes(limit=2)
  workspace = _empty_workspace(local_options)
  task = make("true", expected=())
  for name in "abacb":
    one = dataclasses.replace(task, task_id=name)
    _verify_all(known, [(one, workspace)], local_options, tmp_path)
  assert "".join(seen) == "abcb"
  with pytest.raises(ValueError, match="limit 0"):
    verifier.KnownOutcomes(limit=0)
