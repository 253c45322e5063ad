"""The agent loop with real sandboxes: records, limits, outcomes, leaks."""

import asyncio
import dataclasses
import itertools
import os

import numpy as np
import pytest

from gyre import config
from gyre.envs import agent, sandbox, scripted
from gyre.envs import task as task_lib
from gyre.envs.tasksets import shell
from gyre.harness import render, templates
from gyre.rollout import calls
from gyre.rollout import engine as engine_lib

BOX = config.Sandbox(
  backends=("bubblewrap", "process"), cpu_s=20.0, wall_s=20.0
)
LINE = config.Agent(
  tool_format="line", max_turns=8, max_new_tokens=128, max_context=1024
)
IDS = dict(execution_id="g1/0", group_id="g1", index=0, seed=3, version=7)


@pytest.fixture(scope="module")
def minimal():
  return render.minimal_renderer(shell.training_text(120), 900)


@pytest.fixture(scope="module")
def chatml():
  tokenizer = render.train_tokenizer(
    shell.training_text(60), 600, templates.CHATML_TOKENS
  )
  return render.Renderer(
    tokenizer, templates.CHATML, stop_tokens=(templates.CHATML_END,)
  )


def options(renderer, engine, settings=LINE, **kwargs):
  return dict(
    engine=engine,
    renderer=renderer,
    agent=settings,
    rollout=config.Rollout(),
    **{**IDS, **kwargs},
  )


def run(task, renderer, engine, settings=LINE, **kwargs):
  """run_and_verify, and no sandbox of this process is left behind."""
  kwargs = {"sandbox": BOX, **kwargs}
  execution = asyncio.run(
    agent.run_and_verify(task, **options(renderer, engine, settings, **kwargs))
  )
  assert not left_behind()
  return execution


def left_behind():
  base = sandbox.base_directory()
  mine, shared = f"{os.getpid()}-", f"{os.getpid()}-shared"
  names = [p.name for p in base.iterdir()]
  return [n for n in names if n.startswith(mine) and n != shared]


def check_chain(execution, renderer):
  """Prompts extend what came before by a bridge; nothing is encoded again."""
  calls = execution.calls
  assert [c.call_id for c in calls] == sorted({c.call_id for c in calls})
  for before, after in itertools.pairwise(calls):
    known = np.concatenate([before.prompt_ids, before.completion_ids])
    assert len(after.prompt_ids) > len(known)
    np.testing.assert_array_equal(after.prompt_ids[: len(known)], known)
    assert after.parent_hint == before.call_id
    assert after.boundary in ("strict", "retokenized")
  assert calls[0].parent_hint is None
  seeds = [c.sampling_used["seed"] for c in calls]
  assert len(set(seeds)) == len(seeds)
  said = [m["content"] for m in execution.messages if m["role"] == "assistant"]
  assert said[-len(calls) :] == [
    renderer.completion_text(c.completion_ids) for c in calls
  ]


@pytest.mark.parametrize("kind", shell.KINDS)
def test_the_reference_solution_of_every_kind_scores_one(kind, minimal):
  low = 2 if kind not in shell.available(1) else 1
  for seed, turns in ((1, low), (2, 4)):
    task = shell.make_task(kind, seed, min_turns=turns, max_turns=turns)
    policy = scripted.ScriptedPolicy(task, minimal, "line", version=7)
    execution = run(task, minimal, policy, deterministic=True)
    outcome = execution.outcome
    assert outcome.status == "scored", outcome
    assert outcome.score == 1.0, (task.instruction, outcome)
    assert outcome.passed == outcome.total == len(task.expected)
    assert execution.turns == turns and execution.truncated == ""
    check_chain(execution, minimal)


@pytest.mark.parametrize("tool_format", ["fenced", "hermes"])
def test_other_formats_reach_the_same_shell(tool_format, chatml):
  settings = dataclasses.replace(LINE, tool_format=tool_format, examples=2)
  task = shell.make_task("trail", 5, min_turns=3, max_turns=3)
  policy = scripted.ScriptedPolicy(task, chatml, tool_format)
  execution = run(
    task, chatml, policy, settings, examples=shell.example_tasks(3)
  )
  assert execution.outcome.score == 1.0
  check_chain(execution, chatml)
  first = chatml.decode(execution.calls[0].prompt_ids)
  assert first.count("<|im_start|>user") >= 3
  assert task.instruction in first
  # The ids so far are what the template writes for the conversation.
  last = execution.calls[-1]
  assert chatml.decode(last.prompt_ids) == chatml.text(execution.messages[:-1])


@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
def test_each_local_backend_scores_the_same(backend, minimal):
  options_ = dataclasses.replace(BOX, backends=(backend,))
  for kind in ("archive", "link", "environment", "permissions", "orders"):
    task = shell.make_task(kind, 6, min_turns=3, max_turns=3)
    for turns, score in ((task.solution_turns, 1.0), (["ls"], 0.0)):
      policy = scripted.ScriptedPolicy(turns, minimal, "line")
      execution = run(task, minimal, policy, sandbox=options_)
      outcome = execution.outcome
      assert outcome.score == score, (kind, outcome)
      assert outcome.total == len(task.expected)


def test_a_task_not_done_scores_zero_and_half(minimal):
  lazy = scripted.ScriptedPolicy(["pwd"], minimal, "line")
  execution = run(TASK, minimal, lazy)
  assert execution.outcome.status == "scored"
  assert execution.outcome.score == 0.0
  task = shell.make_task("directory", 1, min_turns=1, max_turns=1)
  first = task.solution_turns[0].split()[-1].split("/")[0]
  execution = run(
    task, minimal, scripted.ScriptedPolicy([f"mkdir {first}"], minimal, "line")
  )
  assert execution.outcome.score == 0.5


def test_records_hold_what_was_asked_and_when(minimal):
  task = shell.make_task("write", 1, min_turns=2, max_turns=2)
  policy = scripted.ScriptedPolicy(task, minimal, "line", version=9)
  told = []
  ticks = iter(range(100))
  execution = run(
    task,
    minimal,
    policy,
    on_turn=told.append,
    clock=lambda: float(next(ticks)),
    temperature=0.5,
    engine_name="e0",
  )
  assert (execution.version, execution.seed, execution.index) == (7, 3, 0)
  assert execution.task_id == task.task_id
  times = [t for c in execution.calls for t in (c.t_start, c.t_end)]
  assert times == sorted(times)
  assert execution.t_start < times[0] and times[-1] < execution.t_end
  for i, (call, request) in enumerate(
    zip(execution.calls, policy.requests, strict=True)
  ):
    np.testing.assert_array_equal(call.prompt_ids, request.ids)
    assert (call.versions == 9).all()
    assert call.engine == "e0" and call.finish_reason == "stop"
    assert request.temperature == 0.5 == call.sampling_used["temperature"]
    assert (request.top_p, request.top_k) == (1.0, 0)
    assert request.stop_ids == minimal.stop_ids
    assert request.seed == calls.call_seed(3, "g1", "g1/0", i)
    assert call.completion_ids[-1] in minimal.stop_ids
  assert [t.command for t in told] == [*task.solution_turns, None]
  assert [t.index for t in told] == [0, 1, 2]


def test_call_seeds_depend_on_every_part():
  base = (3, "g1", "g1/0", 0)
  other = [(4, "g1", "g1/0", 0), (3, "g2", "g1/0", 0)]
  other += [(3, "g1", "g1/1", 0), (3, "g1", "g1/0", 1)]
  seeds = {calls.call_seed(*k) for k in (base, *other)}
  assert len(seeds) == 5
  assert all(0 <= s < 1 << 32 for s in seeds)
  assert calls.call_seed(*base) == calls.call_seed(*base)


TASK = shell.make_task("copy", 0, min_turns=1, max_turns=1)


def test_turn_limit(minimal):
  settings = dataclasses.replace(LINE, max_turns=2)
  policy = scripted.ScriptedPolicy(["pwd"] * 5, minimal, "line")
  execution = run(TASK, minimal, policy, settings)
  assert execution.truncated == "turns"
  assert execution.turns == len(execution.calls) == 2
  assert execution.outcome.status == "scored"


def test_a_turn_cut_by_its_token_limit_is_not_run(minimal):
  settings = dataclasses.replace(LINE, max_new_tokens=6)
  long = "touch red; touch blue; touch green; touch gold; touch pink"
  policy = scripted.ScriptedPolicy([long, "ls"], minimal, "line")
  execution = run(TASK, minimal, policy, settings)
  assert execution.truncated == "tokens"
  assert execution.calls[0].finish_reason == "length"
  assert len(execution.calls[0].completion_ids) == 6
  assert execution.turns == 2
  outputs = [m["content"] for m in execution.messages if m["role"] == "tool"]
  assert "too long" in outputs[0]
  assert "red" not in outputs[1]
  check_chain(execution, minimal)
  # The end that was not sampled stands in the next prompt, not in the call.
  call, after = execution.calls[:2]
  assert call.completion_ids[-1] not in minimal.stop_ids
  end = len(call.prompt_ids) + len(call.completion_ids)
  assert after.prompt_ids[end] == minimal.end_id


def test_context_limit(minimal):
  policy = scripted.ScriptedPolicy(["seq 1000"] * 9, minimal, "line")
  settings = dataclasses.replace(LINE, max_context=150, max_output_chars=150)
  execution = run(TASK, minimal, policy, settings)
  assert execution.truncated == "context"
  assert 1 <= len(execution.calls) < 8
  for call in execution.calls:
    assert len(call.prompt_ids) + len(call.completion_ids) <= 150
  tiny = dataclasses.replace(LINE, max_context=4, max_new_tokens=2)
  execution = run(TASK, minimal, policy, tiny)
  assert execution.truncated == "context" and not execution.calls
  assert execution.outcome.score == 0.0


def test_output_is_cut_and_failures_are_told(minimal):
  commands = ["seq 5000", "cat nothing", "false", "exit 3", "sleep 30"]
  settings = dataclasses.replace(
    LINE, max_output_chars=120, command_timeout_s=0.5, max_context=4096
  )
  policy = scripted.ScriptedPolicy(commands, minimal, "line")
  execution = run(TASK, minimal, policy, settings)
  seq, missing, false, left, slept = [
    m["content"] for m in execution.messages if m["role"] == "tool"
  ]
  assert len(seq) <= 120 and seq.startswith("1\n2") and seq.endswith("5000")
  assert "nothing" in missing and missing.endswith("[exit 1]")
  assert false == "[exit 1]"
  assert "status 3" in left
  assert "0.5 s" in slept
  assert execution.turns == 5 and execution.truncated == ""


def test_a_malformed_call_is_told_and_counts_a_turn(chatml):
  settings = dataclasses.replace(LINE, tool_format="hermes", max_turns=3)

  class Broken(scripted.ScriptedPolicy):
    def __init__(self):
      super().__init__([], chatml, "hermes")
      said = "<tool_call>ls</tool_call>"
      self._completions = [[*chatml.encode(said), chatml.end_id]] * 9

  execution = run(TASK, chatml, Broken(), settings)
  assert execution.truncated == "turns" and execution.turns == 3
  told = [m["content"] for m in execution.messages if m["role"] == "tool"]
  assert len(told) == 3 and all("not JSON" in t for t in told)


class SlowPolicy(scripted.ScriptedPolicy):
  """Samples a token a tick and can be aborted, as an engine can."""

  def __init__(self, *args, tick_s=0.0, **kwargs):
    super().__init__(*args, **kwargs)
    self.tick_s, self.aborted, self.live = tick_s, [], set()

  async def generate(self, request, on_token=None):
    self.live.add(request.request_id)
    whole = await super().generate(request)
    for n in range(len(whole.ids)):
      if request.request_id not in self.live:
        return cut(whole, n)
      if on_token is not None:
        on_token(int(whole.ids[n]), 0.0, int(whole.versions[n]))
      await asyncio.sleep(self.tick_s)
    self.live.discard(request.request_id)
    return whole

  async def abort(self, request_id):
    self.aborted.append(request_id)
    found = request_id in self.live
    self.live.discard(request_id)
    return found


def cut(whole, n):
  return engine_lib.Completion(
    ids=whole.ids[:n],
    logprobs=whole.logprobs[:n],
    versions=whole.versions[:n],
    finish_reason="abort",
  )


def test_harness_timeout_keeps_the_partial_and_scores(minimal):
  task = shell.make_task("write", 1, min_turns=1, max_turns=1)
  turns = [task.solution_turns[0], "echo red blue green gold pink"]
  policy = SlowPolicy(turns, minimal, "line", tick_s=0.0)

  def slow_after_the_first(turn):
    policy.tick_s = 0.4

  settings = dataclasses.replace(LINE, harness_timeout_s=1.5)
  execution = run(task, minimal, policy, settings, on_turn=slow_after_the_first)
  assert execution.truncated == "time"
  assert execution.outcome.status == "scored"
  assert execution.outcome.timeout == "harness"
  assert execution.outcome.score == 1.0
  last = execution.calls[-1]
  assert last.finish_reason == "abort"
  whole = policy._completions[1]
  n = len(last.completion_ids)
  assert 0 < n < len(whole)
  assert last.completion_ids.tolist() == whole[:n]


def test_overall_timeout_discards_what_is_recorded(minimal):
  policy = SlowPolicy(["pwd"] * 50, minimal, "line", tick_s=0.0)

  def stall(turn):
    policy.tick_s = 5.0

  settings = dataclasses.replace(LINE, overall_timeout_s=1.5)
  execution = run(TASK, minimal, policy, settings, on_turn=stall)
  assert execution.outcome.status == "discarded"
  assert execution.outcome.timeout == "overall"
  assert execution.outcome.score is None
  assert len(execution.calls) == 1
  assert policy.aborted == ["g1/0#1"]


def test_deterministic_mode_has_no_wall_clock(minimal):
  settings = dataclasses.replace(
    LINE, harness_timeout_s=0.01, overall_timeout_s=0.01
  )
  policy = scripted.ScriptedPolicy(TASK, minimal, "line")
  execution = run(TASK, minimal, policy, settings, deterministic=True)
  assert execution.outcome.score == 1.0 and execution.truncated == ""


def test_a_call_that_the_engine_gave_up_is_one_call(minimal):
  """Aborted by the engine after 3 tokens, sent again with what it had."""
  whole = scripted.ScriptedPolicy(TASK, minimal, "line")._completions[0]
  requests = []

  class Interrupted(scripted.ScriptedPolicy):
    async def generate(self, request, on_token=None):
      requests.append(request)
      if len(requests) > 2:
        return await super().generate(request, on_token)
      ids = whole[:3] if len(requests) == 1 else whole[3:]
      return engine_lib.Completion(
        ids=np.asarray(ids, np.int32),
        logprobs=np.full(len(ids), -0.5, np.float32),
        versions=np.full(len(ids), len(requests), np.int32),
        finish_reason="abort" if len(requests) == 1 else "stop",
      )

  policy = Interrupted([], minimal, "line")
  execution = run(TASK, minimal, policy)
  first, again = requests[:2]
  assert again.ids.tolist() == [*first.ids.tolist(), *whole[:3]]
  assert again.seed == first.seed
  assert again.max_new_tokens == first.max_new_tokens - 3
  call = execution.calls[0]
  assert call.completion_ids.tolist() == whole
  assert call.versions.tolist() == [1] * 3 + [2] * (len(whole) - 3)
  assert call.finish_reason == "stop"
  assert len(execution.calls) == 2
  assert execution.outcome.score == 1.0


def test_cancellation_leaks_no_sandbox_and_no_request(minimal):
  policy = SlowPolicy(["sleep 30"], minimal, "line", tick_s=0.0)

  async def main(delay):
    work = asyncio.ensure_future(
      agent.run_and_verify(TASK, sandbox=BOX, **options(minimal, policy))
    )
    await asyncio.sleep(delay)
    work.cancel()
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
      await work

  # While it opens, while it samples, while a command runs.
  opening = [(0.004 * i, 0.0) for i in range(16)]
  for delay, tick in (*opening, (0.5, 5.0), (0.6, 0.0)):
    policy.requests.clear()
    policy.tick_s = tick
    asyncio.run(main(delay))
    assert not left_behind(), delay
    assert not policy.live


def test_an_engine_that_is_down_is_not_an_outcome(minimal):
  class Down(scripted.ScriptedPolicy):
    async def generate(self, request, on_token=None):
      raise engine_lib.EngineDown("closed")

  with pytest.raises(engine_lib.EngineDown, match="closed"):
    run(TASK, minimal, Down([], minimal, "line"))
  assert not left_behind()


def test_a_verifier_that_fails_is_tried_again_within_the_budget(minimal):
  broken = dataclasses.replace(
    TASK,
    tests={"test.sh": task_lib.FileSpec(b"#!/bin/sh\nkill -9 $$\n", 0o755)},
  )
  policy = scripted.ScriptedPolicy(["mkfifo $'a\\nb' c"], minimal, "line")
  execution = run(broken, minimal, policy, retries=1)
  assert execution.outcome.status == "eval_failed"
  assert execution.outcome.score is None
  # The workspace was kept, but for two pipes: only the verifier ran again.
  assert len(policy.requests) == 2
  left_out = "not kept: a b (neither file, directory nor link) and 1 more"
  assert execution.outcome.detail.endswith(left_out)


def test_a_sandbox_that_cannot_be_had_is_eval_failed(minimal):
  elsewhere = dataclasses.replace(TASK, image="example.com/nothing:1")
  only = dataclasses.replace(BOX, backends=("bubblewrap",))
  policy = scripted.ScriptedPolicy(TASK, minimal, "line")
  execution = run(elsewhere, minimal, policy, sandbox=only, retries=1)
  assert execution.outcome.status == "eval_failed"
  assert "example.com/nothing:1" in execution.outcome.detail
  assert not execution.calls


def test_a_template_that_strips_thinking_opens_branches(chatml):
  strips = templates.CHATML.replace(
    "m['content']",
    "(m['content'] if loop.last else m['content'].split('</think>')[-1])",
  )
  renderer = render.Renderer(
    chatml.tokenizer, strips, stop_tokens=(templates.CHATML_END,)
  )
  settings = dataclasses.replace(LINE, tool_format="fenced")

  class Thinks(scripted.ScriptedPolicy):
    def __init__(self):
      super().__init__(TASK, renderer, "fenced")
      think = renderer.encode("<think>\nso\n</think>\n\n")
      self._completions = [[*think, *c] for c in self._completions]

  execution = run(TASK, renderer, Thinks(), settings)
  assert execution.outcome.score == 1.0
  # The fenced format answers as the user, before whom thinking is stripped.
  assert [c.parent_hint for c in execution.calls] == [None, None]
  assert [c.boundary for c in execution.calls] == ["", "split"]
  assert "so" not in renderer.decode(execution.calls[1].prompt_ids).split()


def test_an_end_that_the_template_writes_otherwise_is_repaired(chatml):
  """The engine receives the template's own end; what was sampled is kept."""
  other = templates.CHATML_TOKENS[0]
  renderer = render.Renderer(
    chatml.tokenizer,
    templates.CHATML,
    stop_tokens=(templates.CHATML_END, other),
  )
  settings = dataclasses.replace(LINE, tool_format="fenced")
  stop = chatml.tokenizer.token_to_id(other)

  class StopsOtherwise(scripted.ScriptedPolicy):
    def __init__(self):
      super().__init__(TASK, renderer, "fenced")
      self._completions = [[*c[:-1], stop] for c in self._completions]

  execution = run(TASK, renderer, StopsOtherwise(), settings)
  assert execution.outcome.score == 1.0
  first, second = execution.calls
  assert second.boundary == "normalized" and second.parent_hint is None
  kept = [*first.prompt_ids.tolist(), *first.completion_ids[:-1].tolist()]
  assert first.completion_ids[-1] == stop
  assert second.prompt_ids[: len(kept)].tolist() == kept
  assert second.prompt_ids[len(kept)] == chatml.end_id
  written = renderer.text(execution.messages[:-1])
  assert renderer.decode(second.prompt_ids) == written


def test_too_few_or_unfit_examples_are_refused():
  settings = dataclasses.replace(LINE, examples=3)
  with pytest.raises(ValueError, match="only 2"):
    agent.prompt_messages(TASK, settings, examples=shell.example_tasks(2))
  two = shell.make_task("trail", 0, min_turns=2, max_turns=2)
  with pytest.raises(ValueError, match="2 solution turns"):
    agent.example_messages([two], settings)
  one = dataclasses.replace(settings, max_turns=1)
  shown = agent.prompt_messages(TASK, one, examples=shell.example_tasks(3))
  assert [m["role"] for m in shown] == ["user", "assistant"] * 3 + ["user"]
  with pytest.raises(ValueError, match="no solution_turns"):
    scripted.ScriptedPolicy(
      dataclasses.replace(TASK, solution_turns=()), None, "line"
    )
