"""What the tests of faults share."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.faults import build_shim
from helpers.tiny_tokenizers import with_words


@pytest.fixture(scope="session")
def shim(tmp_path_factory) -> Path:
    """The compiled library of helpers/fault_shim.c."""
    return build_shim(tmp_path_factory.mktemp("shim")) or pytest.skip("needs Linux and cc")


@pytest.fixture(scope="session")
def words(tiny_model, tmp_path_factory) -> str:
    """A tiny model with a tokenizer of words."""
    return with_words(tiny_model("llama").folder, tmp_path_factory.mktemp("words"))
