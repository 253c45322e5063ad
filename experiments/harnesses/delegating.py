"""A small agent that compacts its history and calls sub-agents.

  python3 delegating.py [--turns 8] [--compact 400] [--tokens 32] INSTRUCTION

A harness like any other: the standard library and an OpenAI Chat Completions
API (OPENAI_BASE_URL, OPENAI_API_KEY), nothing of gyre. What the model says is
one line:

  done         it is
  ask TEXT     a sub-agent with a history of its own does TEXT; it may not ask
  anything     else runs in bash; what it prints is the next message

When the history holds more than --compact characters the model is asked for a
summary, which takes the place of all that followed the instruction.

`reference` says what a policy that knows the solution would answer; gyre calls
it for a supervised phase. It is no part of the harness.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

DONE, ASK = "done", "ask "
HELPER = "helper"  # a sub-agent's system prompt
SUMMARIZE = "summary?"
SO_FAR = "\nso far: "
_TRIES = 4


class ContextFull(Exception):
  """The history is longer than the model's context."""


class Model:
  """The Chat Completions API."""

  def __init__(self, name, max_tokens):
    self._url = os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions"
    self._key = os.environ["OPENAI_API_KEY"]
    self._name, self._max_tokens = name, max_tokens

  def say(self, messages):
    """The model's answer."""
    body = {
      "model": self._name,
      "messages": messages,
      "max_tokens": self._max_tokens,
    }
    request = urllib.request.Request(
      self._url,
      json.dumps(body).encode(),
      {
        "Authorization": f"Bearer {self._key}",
        "Content-Type": "application/json",
      },
    )
    for attempt in range(_TRIES):
      try:
        with urllib.request.urlopen(request) as answer:
          said = json.load(answer)["choices"][0]["message"]["content"]
          return (said or "").strip()
      except urllib.error.HTTPError as e:
        text = e.read().decode("utf-8", "replace")
        if e.code == 400 and "context" in text:
          raise ContextFull(text) from e
        if e.code < 500 or attempt + 1 == _TRIES:
          raise
      except urllib.error.URLError:
        if attempt + 1 == _TRIES:
          raise
      time.sleep(0.2 * 2**attempt)
    raise AssertionError("unreachable")


def run(command, limit_s, max_chars):
  """What a command prints, and its status where it is not 0."""
  try:
    done = subprocess.run(
      ["bash", "-c", command],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      timeout=limit_s,
      check=False,
    )
  except (subprocess.TimeoutExpired, ValueError) as e:
    return f"[{e}]"[:max_chars]
  text = done.stdout.decode("utf-8", "replace").strip()[:max_chars]
  if done.returncode:
    text = f"{text}\n[exit {done.returncode}]".strip()
  return text


class Agent:
  """One conversation."""

  def __init__(self, model, options, system=""):
    self._model, self._options = model, options
    self._opening = [{"role": "system", "content": system}] if system else []
    self._may_ask = not system

  def _open(self, text):
    return [*self._opening, {"role": "user", "content": text}]

  def _compact(self, instruction, history):
    summary = self._model.say(
      [*history, {"role": "user", "content": SUMMARIZE}]
    )
    return self._open(instruction + SO_FAR + summary)

  def work(self, instruction):
    """Does what the instruction says; returns the last output."""
    opening = history = self._open(instruction)
    output = ""
    for _ in range(self._options.turns):
      size = sum(len(m["content"]) for m in history)
      if size > self._options.compact and len(history) > len(opening):
        history = self._compact(instruction, history)
      said = self._model.say(history)
      if said in ("", DONE):
        break
      if said.startswith(ASK) and self._may_ask:
        helper = Agent(self._model, self._options, HELPER)
        output = helper.work(said.removeprefix(ASK))
      else:
        output = run(said, self._options.seconds, self._options.output)
      history = [
        *history,
        {"role": "assistant", "content": said},
        {"role": "user", "content": output},
      ]
    return output


def main():
  """Works on the instruction of the command line."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--model", default="gyre")
  parser.add_argument("--turns", type=int, default=8, help="a conversation's")
  parser.add_argument("--compact", type=int, default=400, help="characters")
  parser.add_argument("--tokens", type=int, default=32, help="an answer's")
  parser.add_argument("--output", type=int, default=200, help="characters")
  parser.add_argument("--seconds", type=float, default=10.0, help="a command's")
  parser.add_argument("instruction")
  options = parser.parse_args()
  model = Model(options.model, options.tokens)
  try:
    Agent(model, options).work(options.instruction)
  except ContextFull as e:
    print(f"stopped: {e}")
  except (OSError, ValueError) as e:
    sys.exit(f"the API failed: {e}")


def reference(instruction, turns):
  """A policy that knows the solution.

  It runs the commands in turn and leaves the last step of several to a
  sub-agent, where the instruction tells which that is.

  Args:
    instruction: of the task.
    turns: the commands that solve it.

  Returns:
    A function from the text of a prompt to the answer; for one execution.
  """
  steps = instruction.split(", then ")
  delegates = len(steps) == len(turns) > 1
  left, ran = list(turns), []
  delegated = False

  def reply(prompt):
    nonlocal delegated
    if SUMMARIZE in prompt:
      return "; ".join(ran)
    if not left:
      return DONE  # a sub-agent first, then the main conversation
    if delegates and len(left) == 1 and not delegated:
      delegated = True
      return ASK + steps[-1]
    ran.append(left.pop(0))
    return ran[-1]

  return reply


if __name__ == "__main__":
  main()
