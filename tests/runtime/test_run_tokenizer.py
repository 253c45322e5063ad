"""A run's directory tells what its token ids mean."""

from gyre.analysis import reading
from gyre.analysis.pieces import Pieces
from gyre.harness.render import minimal_renderer
from gyre.runtime import workdir


def test_a_run_s_tokenizer_reads_its_ids(tmp_path):
  renderer = minimal_renderer(["list the files", "copy notes.md"] * 4, 300)
  assert reading.tokenizer_of(tmp_path) is None
  workdir.write_tokenizer(tmp_path, renderer.tokenizer)
  path = reading.tokenizer_of(tmp_path)
  assert path == tmp_path / workdir.TOKENIZER
  ids = renderer.encode("copy the files<|end|>")
  read = Pieces.load(path)
  assert read.text(ids) == "copy the files<|end|>"
  assert read.special >= set(renderer.stop_ids)
