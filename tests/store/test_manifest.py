"""One flipped bit, a missing, shorter or extra file is refused by name."""

import os
import pathlib
import random
import time

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


def _bytes_read():
  """By this process, ever."""
  rows = pathlib.Path("/proc/self/io").read_text().split("\n")
  return int(dict(r.split(": ") for r in rows if r)["rchar"])


def test_what_was_verified_is_not_read_again_until_it_changes(tmp_path):
  tmp = manifest.temporary(tmp_path / "step")
  (tmp / "large.bin").write_bytes(bytes(8 << 20))
  (tmp / "small.bin").write_bytes(b"small")
  manifest.commit(tmp, tmp_path / "step")
  d, elsewhere = tmp_path / "step", tmp_path / "moved"
  before = _bytes_read()
  stamp = manifest.checked(d)
  once = _bytes_read() - before
  assert once >= 8 << 20
  for known in (stamp, manifest.checked(d, stamp)):
    assert manifest.checked(d, known) == stamp
  assert _bytes_read() - before - once < 1 << 20
  # Another's word is not taken.
  assert manifest.checked(d, "another") == stamp
  assert _bytes_read() - before - once >= 8 << 20
  manifest.unchanged(d, stamp)

  def damage(path, change):
    """Written to and, as far as that goes, made to look as it was."""
    good, at = path.read_bytes(), path.stat()
    time.sleep(0.02)  # the clock of a file system has ticks
    change(path, good)
    if path.exists():
      os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    with pytest.raises(manifest.ManifestError, match=path.name):
      manifest.checked(d, stamp)
    with pytest.raises(manifest.ManifestError, match="changed while"):
      manifest.unchanged(d, stamp)
    path.write_bytes(good)

  def flip(path, good):
    with open(path, "r+b") as f:
      f.write(bytes([good[0] ^ 1]))

  def replace(path, good):
    elsewhere.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    os.replace(elsewhere, path)

  for path in (d / "large.bin", d / "small.bin", d / manifest.MANIFEST):
    for change in (flip, replace, lambda p, good: p.unlink()):
      damage(path, change)
  stamp = manifest.checked(d, stamp)
  (d / "extra").write_bytes(b"")
  with pytest.raises(manifest.ManifestError, match="extra"):
    manifest.checked(d, stamp)
