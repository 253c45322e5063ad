"""A process of its own that runs a harness for ever, to be killed.

python killed.py BACKEND MARK [same-user]
"""

import asyncio
import sys

from chat_api import ChatApi, in_order

from gyre import config
from gyre.envs import bubblewrap, external, serve
from gyre.envs.tasksets import shell

# What a program can do to live on: a session of its own, signals ignored.
LINE = (
  "(setsid bash -c 'trap \"\" TERM HUP INT; sleep {mark}' &) ; sleep {mark}"
)


async def main(backend, mark):
  """Runs one execution that never ends by itself."""
  api = ChatApi(in_order("done"))
  line = LINE.replace("{mark}", mark)
  async with serve.served(api.app) as path:
    await external.run_external(
      shell.make_task("copy", 0, min_turns=1, max_turns=1),
      proxy=api,
      socket=path,
      harness=config.Harness(name="command", command=line),
      sandbox=config.Sandbox(backends=(backend,)),
      agent=config.Agent(),
      execution_id="g/0",
      group_id="g",
      index=0,
      seed=0,
      version=0,
    )


if __name__ == "__main__":
  if sys.argv[3:] == ["same-user"]:
    bubblewrap.sandbox_uid = lambda: None  # as where gyre is not root
  asyncio.run(main(*sys.argv[1:3]))
