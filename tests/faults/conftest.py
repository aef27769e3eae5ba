"""Fixtures of the fault tests."""

from pathlib import Path

import pytest
from helpers.faults import build_shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory) -> Path:
    """The compiled library of helpers/fault_shim.c."""
    return build_shim(tmp_path_factory.mktemp("shim")) or pytest.skip("needs Linux and cc")
