"""Fixtures of the tests of harnesses."""

import proxying
import pytest


@pytest.fixture(scope="session")
def renderer():
  return proxying.renderer()
