"""Random histories of calls: extending, branching and retrying."""

from hypothesis import strategies as st

from gyre.types import Call, Execution


def call(number, prompt, completion, role="main", version=1):
  """A call whose logprobs name it: -(number + 1) and 1/100 a position."""
  n = len(completion)
  return Call(
    execution_id="g/0",
    group_id="g",
    call_id=str(number),
    prompt_ids=prompt,
    completion_ids=completion,
    logprobs=[-1.0 - number - 0.01 * i for i in range(n)],
    versions=[version] * n,
    finish_reason="stop",
    role=role,
  )


def execution(*calls, truncated=""):
  """An execution of them."""
  return Execution("g/0", "g", 0, "task", calls=calls, truncated=truncated)


ROLES = ("main", "main_summary", "sub_agent", "sub_agent_summary")


@st.composite
def histories(draw, max_calls=8, roles=ROLES, alphabet=2):
  """Calls over a tiny alphabet, so that much is shared."""
  ids = st.lists(st.integers(0, alphabet - 1), min_size=0, max_size=3)
  calls, seen = [], [[0]]
  for number in range(draw(st.integers(1, max_calls))):
    prompt = draw(st.sampled_from(seen)) + draw(ids)
    completion = draw(ids)
    role = draw(st.sampled_from(roles))
    calls.append(call(number, prompt, completion, role, version=number % 3))
    seen += [prompt, prompt + completion]
  return calls
