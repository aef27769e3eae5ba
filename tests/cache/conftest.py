"""Caches on disk that short texts fill."""

import pytest

from flexgen_h2o.cache import tiers


@pytest.fixture(autouse=True)
def short_write_back_log(monkeypatch) -> None:
    """Write a cache on disk back every four tokens, and not every 16."""
    monkeypatch.setattr(tiers, "WRITE_BACK_TOKENS", 4)
