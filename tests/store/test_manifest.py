"""One flipped bit, a missing, shorter or extra file is refused by name."""

import os
import pathlib
import random

import pytest

from gyre.store import manifest


def _tree(root: pathlib.Path) -> pathlib.Path:
  tmp = manifest.temporary(root / "step")
  (tmp / "a" / "b").mkdir(parents=True)
  (tmp / "one.bin").write_bytes(bytes(range(256)) * 9)
  (tmp / "a" / "two.json").write_text('{"x": 1}\n')
  (tmp / "a" / "b" / "empty").write_bytes(b"")
  manifest.commit(tmp, root / "step", {"step": 3, "groups": ["g0", "g1"]})
  return root / "step"


def _files(root):
  return sorted(p for p in root.rglob("*") if p.is_file())


def test_commit_and_verify(tmp_path):
  d = _tree(tmp_path)
  m = manifest.verify(d)
  assert m.meta == {"step": 3, "groups": ["g0", "g1"]}
  assert set(m.files) == {"one.bin", "a/two.json", "a/b/empty"}
  assert [p.name for p in tmp_path.iterdir()] == ["step"]
  with pytest.raises(manifest.ManifestError, match="never replaces"):
    manifest.commit(manifest.temporary(d), d)


def test_every_bit_of_every_file(tmp_path):
  d = _tree(tmp_path)
  rng = random.Random(0)
  for path in _files(d):
    good = path.read_bytes()
    bits = range(8 * len(good))
    for bit in rng.sample(bits, min(len(bits), 400)):
      bad = bytearray(good)
      bad[bit // 8] ^= 1 << bit % 8
      path.write_bytes(bad)
      with pytest.raises(manifest.ManifestError, match=path.name):
        manifest.verify(d)
    path.write_bytes(good)
  manifest.verify(d)


def test_truncated_missing_extra(tmp_path):
  d = _tree(tmp_path)
  for path in _files(d):
    good = path.read_bytes()
    if good:
      path.write_bytes(good[:-1])
      with pytest.raises(manifest.ManifestError, match=path.name):
        manifest.verify(d)
    path.unlink()
    with pytest.raises(manifest.ManifestError, match=path.name):
      manifest.verify(d)
    path.write_bytes(good + b"\0")
    with pytest.raises(manifest.ManifestError, match=path.name):
      manifest.verify(d)
    path.write_bytes(good)
  (d / "a" / "new").write_text("")
  with pytest.raises(manifest.ManifestError, match="a/new"):
    manifest.verify(d)
  (d / "a" / "new").unlink()
  (d / "one.bin").rename(tmp_path / "kept")
  (d / "one.bin").symlink_to(tmp_path / "kept")
  with pytest.raises(manifest.ManifestError, match=r"one\.bin"):
    manifest.verify(d)


def test_temporaries_are_cleaned(tmp_path):
  tmp = manifest.temporary(tmp_path / "step")
  (tmp / "half").write_text("x")
  (tmp_path / ".tmp-best.json").write_text("{")
  d = _tree(tmp_path / "other")
  assert manifest.clean_temporaries(tmp_path) == [
    ".tmp-best.json",
    ".tmp-step",
  ]
  manifest.remove(d)
  assert os.listdir(tmp_path / "other") == []


def test_documents(tmp_path):
  path = tmp_path / "best.json"
  manifest.write_document(path, {"step": 12, "x": [1.5, None, "é"]})
  assert manifest.read_document(path) == {"step": 12, "x": [1.5, None, "é"]}
  path.write_bytes(path.read_bytes().replace(b"12", b"13"))
  with pytest.raises(manifest.ManifestError, match=r"best\.json"):
    manifest.read_document(path)
  with pytest.raises(manifest.ManifestError, match="missing"):
    manifest.read_document(tmp_path / "none")
