"""A server for the tests of a module."""

from __future__ import annotations

import pytest
from helpers.servers import flags, serving
from helpers.tiny_tokenizers import with_words

TEMPLATE = "{% for m in messages %}w1 {{ m.content }} {% endfor %}w2"


@pytest.fixture(scope="session")
def words(tiny_model, tmp_path_factory) -> str:
    """A tiny model with a tokenizer of words and a chat template."""
    return with_words(tiny_model("llama").folder, tmp_path_factory.mktemp("words"),
                      chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def served(words, tmp_path_factory):
    """A server on the tiny model."""
    with serving(flags(words, tmp_path_factory.mktemp("data"), "--max-queue", "8")) as running:
        yield running
