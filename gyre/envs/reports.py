"""Per-assertion results, from the reports that test runners write.

CTRF (ctrf.io) JSON, else JUnit XML. A report comes out of a sandbox in which
an agent's own programs may have run: it is bounded, parsed strictly, and
believed only about ids that are expected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any
from xml.etree import ElementTree

MAX_BYTES = 4 << 20
_MAX_TESTS = 20_000
_NEVER_PASS = frozenset(("xfailed", "xpassed", "xfail", "xpass", "skipped"))


class ReportError(ValueError):
  """A report that does not follow its format; the message is one line."""


def _merge(results: Iterable[tuple[str, bool]]) -> dict[str, bool]:
  """One verdict an id: an id that comes twice passes if both do."""
  out: dict[str, bool] = {}
  for name, passed in results:
    out[name] = out.get(name, True) and passed
    if len(out) > _MAX_TESTS:
      raise ReportError(f"more than {_MAX_TESTS} tests")
  return out


def parse_ctrf(data: bytes) -> dict[str, bool]:
  """id -> passed, of a CTRF JSON report.

  The id is the test's name, after its suite and "::" when it has one. Only
  the status "passed" passes: skipped, pending, other do not, nor does what
  its runner calls xfailed or xpassed.

  Raises:
    ReportError: not CTRF.
  """
  try:
    report = json.loads(data)
  except (ValueError, RecursionError) as e:
    raise ReportError(f"CTRF report is not JSON: {str(e)[:80]}") from None
  results = report.get("results") if isinstance(report, dict) else None
  tests = results.get("tests") if isinstance(results, dict) else None
  if not isinstance(tests, list):
    raise ReportError("CTRF report has no results.tests")
  return _merge(_ctrf_test(test) for test in tests)


def _ctrf_test(test: Any) -> tuple[str, bool]:
  if not isinstance(test, dict) or not isinstance(test.get("name"), str):
    raise ReportError("CTRF report has a test without a name")
  suite = test.get("suite")
  if isinstance(suite, list):
    suite = " > ".join(str(s) for s in suite)
  name = f"{suite}::{test['name']}" if suite else test["name"]
  raw = str(test.get("rawStatus", "")).lower()
  return name, test.get("status") == "passed" and raw not in _NEVER_PASS


def parse_junit(data: bytes) -> dict[str, bool]:
  """id -> passed, of a JUnit XML report.

  The id is "classname::name", or the name alone. A test passes when it has
  neither a failure, an error nor a skipped element (pytest writes xfail as
  skipped).

  Raises:
    ReportError: not JUnit XML, or it declares a document type.
  """
  if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
    raise ReportError("JUnit report declares a document type")
  try:
    root = ElementTree.fromstring(data)
  except (ElementTree.ParseError, ValueError) as e:
    raise ReportError(f"JUnit report is not XML: {str(e)[:80]}") from None
  if root.tag not in ("testsuites", "testsuite"):
    raise ReportError(f"JUnit report starts with <{root.tag[:40]}>")
  return _merge(_junit_case(case) for case in root.iter("testcase"))


def _junit_case(case: ElementTree.Element) -> tuple[str, bool]:
  name, group = case.get("name", ""), case.get("classname", "")
  bad = any(child.tag in ("failure", "error", "skipped") for child in case)
  return (f"{group}::{name}" if group else name), not bad


def parse_reward(data: bytes) -> float:
  """The number of a reward.txt, or of reward.json's "reward" (or only) key.

  Raises:
    ReportError: no finite number in [0, 1].
  """
  try:
    value = json.loads(data)
    if isinstance(value, Mapping):
      value = value.get("reward", *value.values() if len(value) == 1 else ())
    reward = float(value)
  except (TypeError, ValueError, RecursionError):
    raise ReportError(f"reward is {data[:40]!r}, not a number") from None
  if not math.isfinite(reward) or not 0 <= reward <= 1:
    raise ReportError(f"reward is {reward}, not within 0 and 1")
  return reward
