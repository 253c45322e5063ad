"""External harnesses in real sandboxes, over a real HTTP server."""

import asyncio
import dataclasses
import os
import pathlib
import socket
import subprocess
import sys
import time
import uuid

import playing
import pytest
from chat_api import ChatApi, in_order

from gyre import config
from gyre.envs import external, sandbox, serve
from gyre.envs import task as task_lib
from gyre.envs.tasksets import shell

HERE = pathlib.Path(__file__).parent
HARNESSES = HERE.parents[1] / "experiments" / "harnesses"
IDS = dict(execution_id="g1/0", group_id="g1", index=0, seed=3, version=7)
AGENT = config.Agent(harness_timeout_s=20.0, overall_timeout_s=60.0)
TASK = shell.make_task("copy", 0, min_turns=1, max_turns=1)


def command(line, **options):
  """A harness that is one line of bash."""
  return config.Harness(name="command", command=line, **options)


def delegating(options="", **more):
  """The small harness of the experiments."""
  line = "{python} {path}/delegating.py " + options + " {instruction}"
  return command(line, path=str(HARNESSES), **more)


def run(task, api, harness, options, agent=AGENT, **kwargs):
  """run_external against `api`; nothing of it is left on this machine."""

  async def main():
    async with serve.served(api.app) as path:
      return await external.run_external(
        task,
        proxy=api,
        socket=path,
        harness=harness,
        sandbox=options,
        agent=agent,
        **{**IDS, **kwargs},
      )

  execution = asyncio.run(main())
  assert not left_behind()
  assert [k for k, *_ in api.opened] == api.closed
  return execution


def left_behind():
  mine, shared = f"{os.getpid()}-", f"{os.getpid()}-shared"
  names = [p.name for p in sandbox.base_directory().iterdir()]
  return [n for n in names if n.startswith(mine) and n != shared]


def test_a_harness_solves_a_task_and_its_calls_are_the_record(local_options):
  api = ChatApi(in_order(*TASK.solution_turns, "done"))
  execution = run(TASK, api, delegating(), local_options, temperature=0.5)
  assert execution.outcome.status == "scored", execution.outcome
  assert execution.outcome.score == 1.0
  assert (execution.execution_id, execution.version) == ("g1/0", 7)
  assert execution.task_id == TASK.task_id and execution.truncated == ""
  said = [bytes(c.completion_ids.astype("u1")) for c in execution.calls]
  assert said == [t.encode() for t in (*TASK.solution_turns, "done")]
  assert execution.turns == len(execution.calls) == 2
  assert [o[1:] for o in api.opened] == [("g1/0", 3, 0.5)]
  first, second = api.asked["g1/0"]
  assert first == [{"role": "user", "content": TASK.instruction}]
  assert second[:1] == first


def test_compaction_and_a_sub_agent_branch_the_history(local_options):
  task = shell.make_task("directory", 6, min_turns=3, max_turns=3)
  sys.path.insert(0, str(HARNESSES))
  try:
    import delegating as harness
  finally:
    sys.path.remove(str(HARNESSES))
  reply = harness.reference(task.instruction, task.solution_turns)
  api = ChatApi(lambda messages, _: reply(messages[-1]["content"]))
  size = len(task.instruction) + len(task.solution_turns[0]) - 1
  execution = run(task, api, delegating(f"--compact {size}"), local_options)
  assert execution.outcome.score == 1.0
  asked = api.asked["g1/0"]
  said = [bytes(c.completion_ids.astype("u1")) for c in execution.calls]
  ends = [messages[-1]["content"] for messages in asked]
  summaries = [i for i, end in enumerate(ends) if end == harness.SUMMARIZE]
  assert summaries == [1, 3, 7]
  # The new history holds the summary, and not what it stands for.
  first, second, third = task.solution_turns
  opening = task.instruction + harness.SO_FAR
  assert asked[2] == [{"role": "user", "content": opening + first}]
  assert asked[4] == [
    {"role": "user", "content": opening + f"{first}; {second}"}
  ]
  step = task.instruction.split(", then ")[-1]
  assert said[4] == f"ask {step}".encode()
  assert asked[5] == [
    {"role": "system", "content": harness.HELPER},
    {"role": "user", "content": step},
  ]
  assert said[5:7] == [third.encode(), b"done"]
  assert asked[8] == [
    {"role": "user", "content": opening + f"{first}; {second}; {third}"}
  ]
  assert len(asked) == 9 and said[8] == b"done"


def test_the_harness_timeout_ends_the_tree_and_is_scored(local_options):
  mark = f"73{uuid.uuid4().int % 10**12}"
  line = (
    f"(setsid sleep {mark} & sleep {mark} & disown); "
    f"{TASK.solution_turns[0]}; trap '' TERM INT; sleep {mark}"
  )
  agent = dataclasses.replace(AGENT, harness_timeout_s=1.0)
  api = ChatApi(in_order("done"))
  execution = run(TASK, api, command(line), local_options, agent)
  assert execution.outcome.status == "scored"
  assert execution.outcome.score == 1.0
  assert execution.outcome.timeout == "harness"
  assert execution.truncated == "time"
  assert playing.gone(mark)


def test_a_task_s_own_limit_is_the_harness_s(local_options):
  short = dataclasses.replace(TASK, limits=task_lib.Limits(agent_timeout_s=0.5))
  api = ChatApi(in_order("done"))
  execution = run(short, api, command("sleep 30"), local_options)
  assert execution.truncated == "time"
  assert execution.t_end - execution.t_start < 15


def test_the_overall_timeout_discards(local_options):
  mark = f"74{uuid.uuid4().int % 10**12}"
  agent = dataclasses.replace(AGENT, overall_timeout_s=1.5)
  api = ChatApi(in_order("true", f"sleep {mark}"))
  execution = run(TASK, api, delegating(), local_options, agent)
  assert execution.outcome.status == "discarded"
  assert execution.outcome.timeout == "overall"
  assert execution.outcome.score is None
  assert len(execution.calls) == 2
  assert playing.gone(mark)


def test_a_call_in_flight_ends_with_the_harness(local_options):
  agent = dataclasses.replace(AGENT, harness_timeout_s=1.0)
  api = ChatApi(in_order("ls"), delay_s=60.0)
  execution = run(TASK, api, delegating(), local_options, agent)
  assert execution.truncated == "time"
  assert execution.outcome.score == 0.0
  assert not execution.calls


def test_a_harness_that_never_asks_and_fails_is_tried_again(local_options):
  api = ChatApi(in_order("done"))
  line = "echo no such harness; exit 127"
  execution = run(TASK, api, command(line), local_options, retries=1)
  assert execution.outcome.status == "eval_failed"
  assert execution.outcome.score is None
  assert "status 127" in execution.outcome.detail
  assert "no such harness" in execution.outcome.detail
  assert len(api.opened) == 2


def test_a_harness_that_fails_after_a_call_is_scored(local_options):
  api = ChatApi(in_order(TASK.solution_turns[0], "done"))
  line = "{python} {path}/delegating.py {instruction}; exit 3"
  harness = command(line, path=str(HARNESSES))
  execution = run(TASK, api, harness, local_options)
  assert execution.outcome.score == 1.0
  assert execution.messages[-1]["exit_code"] == 3


def test_an_empty_workspace_is_no_artifact(local_options):
  bare = dataclasses.replace(TASK, files={})
  execution = run(bare, ChatApi(in_order("done")), delegating(), local_options)
  assert execution.outcome.status == "no_artifact"
  assert execution.outcome.score == 0.0


def test_a_verifier_that_fails_is_tried_again_alone(local_options):
  broken = dataclasses.replace(
    TASK,
    tests={"test.sh": task_lib.FileSpec(b"#!/bin/sh\nkill -9 $$\n", 0o755)},
  )
  api = ChatApi(in_order("done"))
  execution = run(broken, api, delegating(), local_options, retries=1)
  assert execution.outcome.status == "eval_failed"
  assert len(api.opened) == 1 and len(execution.calls) == 1


def test_a_cancelled_execution_leaves_nothing(local_options):
  mark = f"75{uuid.uuid4().int % 10**12}"
  api = ChatApi(in_order(f"sleep {mark}"))

  async def main():
    async with serve.served(api.app) as path:
      work = asyncio.ensure_future(
        external.run_external(
          TASK,
          proxy=api,
          socket=path,
          harness=delegating(),
          sandbox=local_options,
          agent=AGENT,
          **IDS,
        )
      )
      while not playing.host_processes(mark):
        await asyncio.sleep(0.02)
      work.cancel()
      with pytest.raises(asyncio.CancelledError):
        await work

  asyncio.run(main())
  assert not left_behind() and playing.gone(mark)
  assert [k for k, *_ in api.opened] == api.closed


@pytest.mark.parametrize("more", [(), ("same-user",)], ids=["", "same-user"])
def test_a_killed_run_leaves_no_process(local_options, more):
  """kill -9 of gyre ends the harness, whatever that did to live on."""
  (backend,) = local_options.backends
  mark = f"76{uuid.uuid4().int % 10**12}"
  process = subprocess.Popen(
    [sys.executable, str(HERE / "killed.py"), backend, mark, *more]
  )
  try:
    while len(playing.host_processes(f"sleep\0{mark}")) < 2:
      assert process.poll() is None
      time.sleep(0.02)
  finally:
    process.kill()
    process.wait()
  assert playing.gone(f"sleep\0{mark}")
  # What it left on the disk goes when the next run starts.
  asyncio.run(sandbox.prune())
  left = [p.name for p in sandbox.base_directory().iterdir()]
  assert not [n for n in left if n.startswith(f"{process.pid}-")]


def test_many_at_once_keep_their_own_keys(bwrap_options):
  api = ChatApi(lambda messages, name: f"echo {name}" if len(messages) < 2
                else "done")  # fmt: skip

  async def main():
    async with serve.served(api.app) as path:
      return await asyncio.gather(
        *(
          external.run_external(
            TASK,
            proxy=api,
            socket=path,
            harness=delegating(),
            sandbox=bwrap_options,
            agent=AGENT,
            **IDS | dict(execution_id=f"g/{i}", index=i),
          )
          for i in range(6)
        )
      )

  executions = asyncio.run(main())
  for i, execution in enumerate(executions):
    assert {c.execution_id for c in execution.calls} == {f"g/{i}"}
    assert api.asked[f"g/{i}"][1][-1]["content"] == f"g/{i}"


def test_only_the_api_is_reachable(bwrap_options):
  """A listener of the host, the host's name, and every interface: closed."""
  listener = socket.create_server(("0.0.0.0", 0))
  port = listener.getsockname()[1]
  probe = (
    "{python} - <<'EOF'\n"
    "import os, socket, urllib.request\n"
    f"for host in ('127.0.0.1', '10.0.0.1', '192.0.2.1'):\n"
    "  try:\n"
    f"    socket.create_connection((host, {port}), 1)\n"
    "    print('reached', host)\n"
    "  except OSError as e:\n"
    "    print('closed', host, e.errno)\n"
    "print(sorted(os.listdir('/sys/class/net')) if\n"
    "  os.path.exists('/sys/class/net') else\n"
    "  [n for _, n in socket.if_nameindex()])\n"
    "print(sorted(os.listdir('/run/gyre')))\n"
    "EOF\n"
    "{python} {path}/delegating.py {instruction}"
  )
  try:
    api = ChatApi(in_order("done"))
    execution = run(
      TASK, api, command(probe, path=str(HARNESSES)), bwrap_options
    )
  finally:
    listener.close()
  printed = execution.messages[-1]["content"]
  assert "reached" not in printed and printed.count("closed") == 3, printed
  assert "['lo']" in printed and "['api.sock']" in printed
  assert len(execution.calls) == 1


def test_what_is_mounted_cannot_be_written(bwrap_options, tmp_path):
  tmp_path.chmod(0o755)
  (tmp_path / "tool").write_text("#!/bin/sh\necho tool ran\n")
  (tmp_path / "tool").chmod(0o755)
  line = (
    "{path}/tool; echo x > {path}/tool; rm -f {path}/tool; ls {path}; "
    "touch /opt/gyre/harness/relay.py; cat {instruction_file}"
  )
  api = ChatApi(in_order("done"))
  execution = run(TASK, api, command(line, path=str(tmp_path)), bwrap_options)
  printed = execution.messages[-1]["content"]
  assert printed.startswith("tool ran\n")
  assert printed.count("Read-only file system") == 3
  assert printed.endswith(TASK.instruction)
  assert (tmp_path / "tool").read_text().endswith("tool ran\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who leaves it")
def test_a_harness_closed_to_other_users_is_copied(bwrap_options, tmp_path):
  closed = tmp_path / "closed" / "harness"
  closed.mkdir(parents=True)
  (closed / "tool").write_text("#!/bin/sh\necho tool ran\n")
  (closed / "tool").chmod(0o700)
  (tmp_path / "closed").chmod(0o700)
  api = ChatApi(in_order("done"))
  harness = command("{path}/tool", path=str(closed))
  execution = run(TASK, api, harness, bwrap_options)
  assert execution.messages[-1]["content"] == "tool ran"
  only = config.Sandbox(backends=("process",))
  execution = run(TASK, api, harness, only, retries=0)
  assert execution.outcome.status == "eval_failed"
  assert "closed to other users" in execution.outcome.detail


def test_other_backends_are_refused():
  request = sandbox.Request(
    TASK,
    config.Sandbox(backends=("docker",)),
    sockets={"/run/gyre/api.sock": pathlib.Path("/nowhere")},
  )
  with pytest.raises(sandbox.SandboxUnavailable, match="shows no paths"):
    asyncio.run(sandbox.start_backend(request))


def test_a_missing_socket_is_eval_failed(local_options):
  api = ChatApi(in_order("done"))

  async def main():
    return await external.run_external(
      TASK,
      proxy=api,
      socket=pathlib.Path("/nowhere/api.sock"),
      harness=delegating(),
      sandbox=local_options,
      agent=AGENT,
      retries=0,
      **IDS,
    )

  execution = asyncio.run(main())
  assert execution.outcome.status == "eval_failed"
  assert "/nowhere/api.sock" in execution.outcome.detail
