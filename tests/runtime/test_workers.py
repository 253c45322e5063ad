"""Workers in processes of their own: death, freezing, restarts, nothing left.

The cells are emulated: 100 tokens a second, and no JAX to wait for.
"""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from gyre import types
from gyre.envs import emulated as executions
from gyre.learner import packing
from gyre.rollout import emulated, engine, router
from gyre.rollout.profile import Profile
from gyre.runtime import exchange, frames, remote, workers
from gyre.runtime.cell import CellError
from gyre.runtime.specs import Spec

PROFILE = {
  "nodes": 1,
  "slots": 8,
  "speedup": 100,
  "f": 1,
  "token_s": 1,
  "stream_s": 1,
  "update_s": 100,
  "join_s": 0,
  "serve_s": 0,
  "publish_s": 0,
}
QUICK = workers.Supervision(
  heartbeat_s=0.2, frozen_s=1.0, backoff_s=0.05, restarts=3
)


def spec(name, **options):
  options = {"profile": PROFILE, "executions": 16} | options
  return Spec(name, "emulated", options)


@contextlib.asynccontextmanager
async def started(tmp_path, *specs, **kw):
  specs = specs or (spec("cell 0", core=True), spec("cell 1"))
  group = workers.Workers(specs, tmp_path, supervision=QUICK, **kw)
  async with asyncio.timeout(60), group:
    yield group


async def until(condition, timeout_s=20.0):
  async with asyncio.timeout(timeout_s):
    while not condition():
      await asyncio.sleep(0.01)


def request(count, **kw):
  return engine.Request(
    ids=[1, 2, 3], max_new_tokens=count, seed=5, request_id="a", **kw
  )


def gone(pid):
  """Whether a process has ended, reaped or not."""
  try:
    state = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except FileNotFoundError:
    return True
  return state.rpartition(")")[2].split()[0] in "ZX"


def test_engines_and_cells_speak_their_protocols(tmp_path):
  async def main():
    async with started(tmp_path) as group:
      core, one = group.cells["cell 0"], group.cells["cell 1"]
      assert isinstance(one.engine, engine.Engine)
      with pytest.raises(engine.EngineDown, match="no weights yet"):
        await one.engine.generate(request(1))
      with pytest.raises(CellError, match="role 'idle'"):
        await one.work(0.1)
      await one.serve(None, 3)
      seen = []
      got = await one.engine.generate(
        request(20), lambda *token: seen.append(token)
      )
      ids, logprobs = emulated.tokens(5, 3, 20, 32_000)
      np.testing.assert_array_equal(got.ids, ids)
      np.testing.assert_array_equal(got.logprobs, logprobs)
      np.testing.assert_array_equal([x[0] for x in seen], ids)
      assert {x[2] for x in seen} == {3}
      with pytest.raises(engine.Rejected, match="max_new_tokens is 0"):
        await one.engine.generate(request(0))
      with pytest.raises(engine.StaleVersion, match="9 was asked"):
        await one.engine.generate(request(1, min_version=9))
      with pytest.raises(ValueError, match="no fingerprint"):
        await one.engine.fingerprint()
      await one.engine.load_weights(types.Snapshot(4, ""), 4)
      assert one.engine.stats().version == 4
      cut = asyncio.ensure_future(one.engine.generate(request(1000)))
      await asyncio.sleep(0.1)
      assert await one.engine.abort("a")
      got = await cut
      assert got.finish_reason == "abort" and 0 < len(got.ids) < 1000
      cut = asyncio.ensure_future(one.engine.generate(request(1000)))
      await asyncio.sleep(0.05)
      cut.cancel()
      await asyncio.sleep(0.05)
      await one.engine.pause()
      assert one.engine.stats().paused
      assert one.engine.stats().running == 0

      await core.init({"w": np.zeros(3)}, 0, 4)
      batch = packing.empty_batch(2, 8, 4)
      batch.execution_first[0, :3] = True
      for cell, weights in ((core, None), (one, types.Snapshot(4, ""))):
        await cell.join(weights, 4)
        assert cell.role == "train"
        assert await cell.work(batch) is None
      sums = [await core.sums(), await one.sums(), {}]
      assert sums[1]["counts.share"] == 3 / 16
      assert await one.sums() == {}
      metrics = await core.apply(sums, 5)
      assert metrics == {"emulated/share": 6 / 16, "emulated/micro_steps": 2}
      assert (await core.weights())["version"] == 5
      await core.save(tmp_path / "step", {"x": [1]})
      assert await core.restore(tmp_path / "step") == {"x": [1]}
      snapshot = await core.snapshot(tmp_path / "weights")
      assert (snapshot.version, snapshot.path) == (5, str(tmp_path / "weights"))
      await one.serve(snapshot, 5)
      await core.resize([0])
      shared = list(exchange.TMPFS.glob(f"gyre-exchange-{os.getpid()}-*"))
      assert [list(x.iterdir()) for x in shared] == [[]]
      pids = group.pids()
    assert len(pids) == 2 and all(gone(pid) for pid in pids.values())
    with pytest.raises(remote.WorkerDown):
      await one.engine.generate(request(1))

  asyncio.run(main())
  assert not list(exchange.TMPFS.glob(f"gyre-exchange-{os.getpid()}-*"))


def test_kill_amid_calls_and_work_and_go_on(tmp_path):
  async def main():
    told = []
    async with started(
      tmp_path,
      on_up=lambda name, why: told.append(("up", name)),
      on_down=lambda name, why: told.append((why, name)),
    ) as group:
      core, one = group.cells["cell 0"], group.cells["cell 1"]
      whole, _ = emulated.tokens(5, 3, 60, 32_000)
      for _ in range(2):
        told.clear()
        await one.serve(None, 0)
        partial = []
        call = asyncio.ensure_future(
          one.engine.generate(
            request(60), lambda i, *_, to=partial: to.append(i)
          )
        )
        await core.join(None, 0)
        await until(lambda partial=partial: len(partial) >= 5)
        os.kill(group.pids()["cell 1"], signal.SIGKILL)
        with pytest.raises(
          engine.EngineDown, match="cell 1: killed by SIGKILL"
        ):
          await call
        # What was streamed is the beginning; elsewhere it goes on.
        await core.serve(None, 0)
        rest = await core.engine.generate(
          dataclasses.replace(
            request(60 - len(partial)), ids=[1, 2, 3, *partial]
          )
        )
        np.testing.assert_array_equal([*partial, *rest.ids], whole)
        await until(lambda: one.role == "idle" and len(told) == 2)
        assert told == [
          ("cell 1: killed by SIGKILL", "cell 1"),
          ("up", "cell 1"),
        ]
      # Amid work: the sums are lost, and the cell comes back with none.
      await one.join(None, 0)
      await one.work(0.01)
      work = asyncio.ensure_future(one.work(5.0))
      await asyncio.sleep(0.05)
      os.kill(group.pids()["cell 1"], signal.SIGKILL)
      with pytest.raises(remote.WorkerDown):
        await work
      await until(lambda: one.role == "idle")
      await one.join(None, 0)
      assert await one.sums() == {}

  asyncio.run(main())


def test_executions_move_and_survive_kills_unnoticed(tmp_path):
  profile = Profile(**PROFILE)
  rng = np.random.default_rng(3)

  def execution(policy, i):
    named = {"execution_id": f"g/{i}", "group_id": "g", "index": i, "seed": i}
    return executions.run_execution(policy, 80 + 10 * i, profile, **named)

  async def main():
    undisturbed = emulated.EmulatedEngine(
      dataclasses.replace(profile, speedup=10_000, slots=8)
    )
    want = await asyncio.gather(*(execution(undisturbed, i) for i in range(8)))

    routed = router.Router()

    def up(name, _):
      routed.add(name, group.cells[name].engine, serving=False)
      serving.append(asyncio.ensure_future(serve(name)))

    async def serve(name):
      await group.cells[name].serve(None, 0)
      routed.serve(name)

    serving = []
    group = workers.Workers(
      [spec("cell 0"), spec("cell 1")], tmp_path, supervision=QUICK, on_up=up
    )
    async with asyncio.timeout(60), group:
      for i in range(8):
        routed.place(f"g/{i}", f"cell {i % 2}")
      work = asyncio.gather(*(execution(routed, i) for i in range(8)))
      kills = 0
      while not work.done():
        await asyncio.sleep(0.05)
        await routed.move(f"g/{rng.integers(8)}", f"cell {rng.integers(2)}")
        if kills < 3 and len(group.pids()) == 2 and rng.random() < 0.4:
          kills += 1
          os.kill(group.pids()[f"cell {rng.integers(2)}"], signal.SIGKILL)
      got = await work
      await asyncio.gather(*serving, return_exceptions=True)
      await routed.close()
    assert kills
    for a, b in zip(got, want, strict=True):
      assert len(a.calls) == len(b.calls)
      for x, y in zip(a.calls, b.calls, strict=True):
        np.testing.assert_array_equal(x.prompt_ids, y.prompt_ids)
        np.testing.assert_array_equal(x.completion_ids, y.completion_ids)
        np.testing.assert_array_equal(x.logprobs, y.logprobs)

  asyncio.run(main())


def test_sums_taken_outlive_their_cell(tmp_path):
  async def main():
    async with started(tmp_path) as group:
      core, one = group.cells["cell 0"], group.cells["cell 1"]
      await core.join(None, 0)
      await one.join(None, 0)
      await one.work(0.125)
      sums = await one.sums()
      os.kill(group.pids()["cell 1"], signal.SIGKILL)
      await until(lambda: one.role == "down")
      assert (await core.apply([sums], 1))["emulated/share"] == 0.125

  asyncio.run(main())


def test_one_that_dies_too_often_is_given_up(tmp_path):
  async def main():
    lost = []
    async with started(
      tmp_path, spec("cell 0"), on_lost=lambda *x: lost.append(x)
    ) as group:
      cell = group.cells["cell 0"]
      while not lost:
        await until(lambda: lost or group.pids())
        for pid in group.pids().values():
          os.kill(pid, signal.SIGKILL)
        await until(lambda: not group.pids())
        await asyncio.sleep(0.02)
      assert lost[0][0] == "cell 0" and "died 4 times" in lost[0][1]
      with pytest.raises(remote.WorkerDown, match="not started again"):
        await cell.serve(None, 0)
      downs = [e for e in group.events if e[2] == "down"]
      assert len(downs) == QUICK.restarts

  asyncio.run(main())


def test_a_frozen_one_is_killed_and_started_again(tmp_path):
  async def main():
    async with started(tmp_path, spec("cell 0")) as group:
      cell, pid = group.cells["cell 0"], group.pids()["cell 0"]
      await cell.serve(None, 0)
      call = asyncio.ensure_future(cell.engine.generate(request(10_000)))
      await asyncio.sleep(0.05)
      os.kill(pid, signal.SIGSTOP)
      with pytest.raises(remote.WorkerDown, match="frozen: silent"):
        await call
      assert gone(pid)
      await until(lambda: cell.role == "idle")
      assert group.pids()["cell 0"] != pid

  asyncio.run(main())


def test_a_controller_that_stood_still_blames_nobody(tmp_path):
  async def main():
    async with started(tmp_path, spec("cell 0")) as group:
      pid = group.pids()
      time.sleep(1.5 * QUICK.frozen_s)  # the loop itself
      await asyncio.sleep(3 * QUICK.heartbeat_s)
      assert group.pids() == pid and len(group.events) == 1

  asyncio.run(main())


_CONTROLLER = """
import asyncio, sys
from gyre.rollout.engine import Request
from gyre.runtime import workers
from gyre.runtime.specs import Spec

async def main():
  specs = [Spec(f"cell {i}", "emulated") for i in range(3)]
  async with workers.Workers(specs, sys.argv[1]) as group:
    print(*group.pids().values(), flush=True)
    await group.cells["cell 0"].serve(None, 0)
    await group.cells["cell 0"].engine.generate(Request([1], 100000))

asyncio.run(main())
"""


def test_a_controllers_death_ends_its_workers(tmp_path):
  controller = subprocess.Popen(
    [sys.executable, "-c", _CONTROLLER, str(tmp_path)],
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    pids = [int(x) for x in controller.stdout.readline().split()]
    assert len(pids) == 3
    os.kill(pids[2], signal.SIGSTOP)  # frozen ones too
    controller.kill()
    controller.wait()
    end = time.monotonic() + 20
    while not all(gone(pid) for pid in pids) and time.monotonic() < end:
      time.sleep(0.02)
    assert [pid for pid in pids if not gone(pid)] == []
  finally:
    controller.kill()
    controller.stdout.close()

  async def main():
    async with started(tmp_path, spec("cell 0")):
      pass

  # The empty directory that it could not remove, the next run does.
  asyncio.run(main())
  left = exchange.TMPFS.glob(f"gyre-exchange-{controller.pid}-*")
  assert not list(left)


def test_huge_arrays_cross_both_ways(tmp_path):
  async def main():
    async with started(tmp_path) as group:
      core, one = group.cells["cell 0"], group.cells["cell 1"]
      x = np.arange(8 << 20, dtype=np.float32).reshape(4, -1)  # 32 MiB
      sums = [{"w": x, "version": np.int32(0)} for _ in range(3)]
      (total,) = await remote.combine_pairwise(sums, [core, one])
      assert total.file.size > x.nbytes
      np.testing.assert_array_equal(total["w"], 3 * x)
      total.close()

  asyncio.run(main())


def test_cells_add_sums_pairwise_for_the_core(tmp_path):
  async def main():
    names = [f"cell {i}" for i in range(4)]
    specs = [spec(n, core=not i) for i, n in enumerate(names)]
    async with started(tmp_path, *specs) as group:
      cells = list(group.cells.values())
      shares = [0.5, 0.125, 0.0625, 0.25]
      for cell, share in zip(cells, shares, strict=True):
        await cell.join(None, 0)
        await cell.work(share)
      sums = [await c.sums() for c in cells]
      got = await cells[0].apply(sums, 1)
      assert got == {"emulated/share": sum(shares), "emulated/micro_steps": 4}
      with pytest.raises(exchange.ExchangeError, match="closed"):
        sums[0].load()

  asyncio.run(main())


def test_what_is_no_message_is_refused_by_both_sides(tmp_path):
  async def main():
    async with started(tmp_path, spec("cell 0")) as group:
      cell = group.cells["cell 0"]
      for call, what in (
        (("engine.__class__",), "no method"),
        (("__init__", "x"), "no method"),
        (("combine", {}, exchange.ArrayFile("/etc/passwd", 1, "")), "passwd"),
      ):
        with pytest.raises((frames.FrameError, CellError), match=what):
          await cell.link.call(*call)
      with pytest.raises(frames.FrameError, match="cannot be sent"):
        await cell.link.call("serve", object(), 0)
      work = asyncio.ensure_future(cell.link.call("engine.ready"))
      cell.link._writer.write(b"noise, and more of it\n" * 3)
      with pytest.raises(engine.EngineDown):
        await work
        await cell.link.call("engine.ready")
      await until(lambda: len(group.events) == 3)
      # The other way: what a worker must not send ends its life.
      with pytest.raises(frames.FrameError, match="Hello"):
        cell.link.receive(frames.Hello("x", 1, 1))

  asyncio.run(main())
  log = (tmp_path / "workers" / "cell_0.log").read_text()
  assert "a frame begins with" in log


@pytest.mark.parametrize(
  "wrong,what",
  [
    (Spec("cell 0", "unknown"), "no kind of cell 'unknown'"),
    (spec("cell 0", profile={"nodes": -1}), "profile.nodes must be positive"),
  ],
)
def test_a_cell_that_cannot_be_built_is_told(tmp_path, wrong, what):
  async def main():
    with pytest.raises(workers.WorkerError, match=what):
      async with started(tmp_path, wrong, spec("cell 1")):
        pass

  asyncio.run(main())
  with pytest.raises(ValueError, match="must differ"):
    workers.Workers([wrong, wrong], tmp_path)


def test_one_that_is_killed_while_it_starts_is_started_again(tmp_path):
  async def main():
    group = workers.Workers([spec("cell 0")], tmp_path, supervision=QUICK)
    starting = asyncio.ensure_future(group.start())
    try:
      await asyncio.sleep(0)
      process = group._processes["cell 0"]
      while not process.pid:
        await asyncio.sleep(0.005)
      os.kill(process.pid, signal.SIGKILL)
      await starting
      assert [kind for _, _, kind, _ in group.events] == ["down", "up"]
      assert group.cells["cell 0"].role == "idle"
    finally:
      await group.close()

  asyncio.run(main())


def test_a_process_that_speaks_something_else_is_ended(tmp_path, monkeypatch):
  program = tmp_path / "odd"
  program.write_text(
    f"#!{sys.executable}\n"
    "import os, sys, time\n"
    "fd = int(sys.argv[sys.argv.index('--fd') + 1])\n"
    "os.write(fd, b'HTTP/1.1 200 OK')\n"
    f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    "time.sleep(600)\n"
  )
  program.chmod(0o755)
  monkeypatch.setattr(sys, "executable", str(program))

  async def main():
    with pytest.raises(workers.WorkerError, match="a frame begins with 0x4854"):
      async with started(tmp_path, spec("cell 0")):
        pass

  asyncio.run(main())
  pid = tmp_path / "pid"
  assert not pid.exists() or gone(int(pid.read_text()))
