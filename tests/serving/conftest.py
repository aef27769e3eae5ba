"""A server that tests share."""

import pytest
from helpers.servers import flags, serving


@pytest.fixture(scope="session")
def served(words_model, tmp_path_factory):
    """A server on the tiny model."""
    argv = flags(words_model, tmp_path_factory.mktemp("data"), "--max-queue", "8")
    with serving(argv) as running:
        yield running
