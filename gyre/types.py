"""Frozen records that cross rooms; standard library and numpy only.

Token arrays are one-dimensional numpy arrays: ids and versions int32,
log-probabilities float32. Times are seconds since the epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
Status = Literal["scored", "eval_failed", "no_artifact", "discarded"]
Timeout = Literal["none", "harness", "overall"]
Boundary = Literal["", "strict", "normalized", "retokenized", "split"]


def _ids(x: Any) -> np.ndarray:
  return np.asarray(x, np.int32).reshape(-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
  """One model call: the ids that went in and the ids that were sampled.

  Attributes:
    execution_id: the execution that made the call.
    group_id: the group of that execution.
    call_id: unique within the execution, ordered by start.
    parent_hint: call_id of the call whose tokens this prompt extends.
    role: "main", "sub_agent", ... as the harness declares it.
    prompt_ids: int32 [P], exactly what the engine received.
    completion_ids: int32 [C], exactly what the engine sampled.
    logprobs: float32 [C], of the distribution sampled from.
    versions: int32 [C], the weights version that sampled each token.
    routing: path to an npy file [P + C - 1, layers, k], or None.
    finish_reason: "stop", "length" or "abort".
    t_start, t_end: seconds since the epoch.
    engine: name of the engine that finished the call.
    sampling_asked, sampling_used: sampling parameters, as asked for by the
      harness and as used by the engine.
    boundary: the step of the ladder (trajectory/ladder.py) by which the prompt
      goes on from an earlier call; "" for a first call or where unknown.
  """

  execution_id: str
  group_id: str
  call_id: str
  prompt_ids: np.ndarray
  completion_ids: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  finish_reason: FinishReason
  parent_hint: str | None = None
  role: str = "main"
  routing: str | None = None
  t_start: float = 0.0
  t_end: float = 0.0
  engine: str = ""
  sampling_asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  sampling_used: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  boundary: Boundary = ""

  def __post_init__(self):
    object.__setattr__(self, "prompt_ids", _ids(self.prompt_ids))
    object.__setattr__(self, "completion_ids", _ids(self.completion_ids))
    object.__setattr__(self, "versions", _ids(self.versions))
    logprobs = np.asarray(self.logprobs, np.float32).reshape(-1)
    object.__setattr__(self, "logprobs", logprobs)
    n = len(self.completion_ids)
    if len(self.logprobs) != n or len(self.versions) != n:
      raise ValueError(
        f"call {self.call_id} has {n} completion ids but "
        f"{len(self.logprobs)} logprobs and {len(self.versions)} versions"
      )


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What the verifier found in the workspace that an execution left.

  Attributes:
    status: "scored" (a legitimate 0 included); "no_artifact" (nothing to
      evaluate: score 0); "eval_failed" (sandbox or verifier failure: never
      scored, enters no statistic); "discarded" (overall timeout).
    score: the reward, or None when the execution must not be trained.
    passed, total: assertions that hold and assertions expected.
    timeout: "harness" ends an execution that is still scored; "overall"
      discards it.
    detail: one line for people.
    assertions: name -> passed, of every expected assertion.
  """

  status: Status
  score: float | None = None
  passed: int = 0
  total: int = 0
  timeout: Timeout = "none"
  detail: str = ""
  assertions: Mapping[str, bool] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Execution:
  """One agent run of one task.

  Attributes:
    execution_id: "<group_id>/<index>".
    group_id: the group it belongs to.
    index: position in its group, 0-based.
    task_id: the task.
    version: published weights version at admission.
    seed: seed of the execution; calls fold in their own index.
    calls: in order of start.
    outcome: None until verified.
    truncated: the limit that cut it ("turns", "tokens", "context",
      "cpu", "time", or another one of the sandbox that ended a harness), or
      "" when it ended by itself.
    turns: tool calls executed.
    messages: the conversation, as the agent loop kept it.
    t_start, t_end: seconds since the epoch.
  """

  execution_id: str
  group_id: str
  index: int
  task_id: str
  version: int = 0
  seed: int = 0
  calls: tuple[Call, ...] = ()
  outcome: Outcome | None = None
  truncated: str = ""
  turns: int = 0
  messages: tuple[Mapping[str, Any], ...] = ()
  t_start: float = 0.0
  t_end: float = 0.0

  @property
  def num_sampled(self) -> int:
    """Tokens that the policy sampled, over all calls."""
    return sum(len(c.completion_ids) for c in self.calls)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
  """N executions of one task: the unit of dispatch and of the advantage.

  Attributes:
    group_id: unique within a run.
    index: dispatch order, 0-based.
    task_id: the task.
    version: published weights version at admission.
    executions: as many as have finished, in order of index.
  """

  group_id: str
  index: int
  task_id: str
  version: int = 0
  executions: tuple[Execution, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
  """A root-to-leaf path chosen for training, with what is trained on it.

  The path is held in runs, which samples of one tree share as views, and the
  loss by its n entries alone, so that samples cost what they train and not the
  length of their paths.

  Attributes:
    execution_id: the execution whose advantage it inherits.
    group_id: the group.
    runs: int32 [_] each; end to end they are the ids of the path [L].
    trained: int64 [n], growing: where on the path are the tokens that the
      policy sampled and that are to be trained; never 0.
    logprobs: float32 [n], behaviour log-probability of each.
    versions: int32 [n], weights version that sampled each.
    role: role of the leaf.
    weights: float64 [n], of each in the loss; None: 1.
    execution_weight: |T_e| of the execution, where it is not the sum of the
      weights of its samples; the same in all of them.
  """

  execution_id: str
  group_id: str
  runs: tuple[np.ndarray, ...]
  trained: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  role: str = "main"
  weights: np.ndarray | None = None
  execution_weight: float | None = None

  def __post_init__(self):
    put = object.__setattr__
    put(self, "runs", tuple(_ids(run) for run in self.runs))
    put(self, "trained", np.asarray(self.trained, np.int64))
    put(self, "logprobs", np.asarray(self.logprobs, np.float32))
    put(self, "versions", _ids(self.versions))
    if self.weights is not None:
      put(self, "weights", np.asarray(self.weights, np.float64))
    names = ("trained", "logprobs", "versions", "weights")
    arrays = {f: getattr(self, f) for f in names}
    shapes = {f: x.shape for f, x in arrays.items() if x is not None}
    if set(shapes.values()) != {(len(self.versions),)}:
      raise ValueError(f"sample arrays differ in length: {shapes}")
    if not len(self.trained):
      return
    if self.trained[0] < 1:
      raise ValueError(
        f"position {self.trained[0]} of a sample has no predictor: the first "
        "that can be trained is 1"
      )
    if self.trained[-1] >= self.length:
      raise ValueError(
        f"position {self.trained[-1]} is not in a sample of {self.length} ids"
      )
    if (np.diff(self.trained) <= 0).any():
      raise ValueError("the trained positions of a sample must grow")

  @property
  def length(self) -> int:
    """Ids of the path, L."""
    return sum(len(run) for run in self.runs)

  @property
  def ids(self) -> np.ndarray:
    """The ids of the path, int32 [L]: a copy where there are several runs."""
    if len(self.runs) == 1:
      return self.runs[0]
    return np.concatenate([np.zeros(0, np.int32), *self.runs])

  @property
  def mask(self) -> np.ndarray:
    """Which tokens of the path are trained, bool [L]; made anew."""
    out = np.zeros(self.length, bool)
    out[self.trained] = True
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
  """Packed arrays for the learner; R rows of S tokens and M loss entries.

  Tokens lie in depth-first order. Key k is visible to query q iff
  k <= q < subtree_end[k]: this one array expresses packing, shared prompts
  and trees. Padding follows the last token and the last entry of a row;
  masks come from the counts, never from values.

  Attributes:
    tokens: int32 [R, S].
    positions: int32 [R, S], depth in the path (not the index).
    subtree_end: int32 [R, S], exclusive index.
    num_tokens: int32 [R].
    entry_parent: int32 [R, M], index of the token whose hidden state predicts.
    entry_target: int32 [R, M], the id predicted.
    logp_behaviour: float32 [R, M].
    version: int32 [R, M].
    advantage: float32 [R, M].
    weight: float32 [R, M].
    sample: int32 [R, M], sample number, unique in the whole batch.
    execution: int32 [R, M], execution number, unique in the whole batch.
    sample_weight: float32 [R, M], sum of weights of the entry's sample.
    execution_weight: float32 [R, M], |T_e|: sum of weights of the entry's
      execution after selection, over the whole batch.
    num_entries: int32 [R].
    sample_first, execution_first: bool [R, M], True on one entry in the whole
      batch of each sample and execution that has weight: where it is counted.
  """

  tokens: Any
  positions: Any
  subtree_end: Any
  num_tokens: Any
  entry_parent: Any
  entry_target: Any
  logp_behaviour: Any
  version: Any
  advantage: Any
  weight: Any
  sample: Any
  execution: Any
  sample_weight: Any
  execution_weight: Any
  num_entries: Any
  sample_first: Any
  execution_first: Any


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """Weights on disk or tmpfs: a directory and its content manifest.

  Attributes:
    version: of the weights.
    path: the directory.
    manifest: file -> sha256, as committed.
    verified: the stamp of the directory when its content was last verified
      (store/manifest.py); "": whoever reads it verifies it.
  """

  version: int
  path: str
  manifest: Mapping[str, str] = dataclasses.field(default_factory=dict)
  verified: str = ""
