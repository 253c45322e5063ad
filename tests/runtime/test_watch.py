"""What the time line shows of the cells of a run."""

import json

from gyre.runtime.record import Record
from gyre.runtime.watch import Watch
from gyre.store.rollouts import RolloutStore


def test_roles_that_never_change_are_shown(tmp_path):
  """Those of a fixed partition, say: they end with the run."""
  tracks = ("cell 0", "engine 0", "cell 1", "engine 1")
  record = Record(tmp_path, 1, {}, tracks=tracks)
  with RolloutStore(tmp_path / "rollouts.sqlite") as store:
    watch = Watch(record, store)
    watch.role("cell 0", "train")
    watch.role("cell 1", "to rollout")
    watch.role("cell 1", "rollout")
    watch.close()
    watch.close()
  record.close()
  trace = json.loads((tmp_path / "timeline.json").read_text())
  names = {e["tid"]: e["args"]["name"] for e in trace if e["ph"] == "M"}
  shown = [(names[e["tid"]], e["name"]) for e in trace if e["ph"] == "X"]
  assert shown == [("cell 0", "train"), ("engine 1", "rollout")]
