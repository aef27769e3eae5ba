"""A fake LLM for tests of commands."""

from __future__ import annotations

import pytest


class FakeLLM:
    """What the pretend LLMs have in common; `opened` notes them, or their options."""

    opened: list = []
    chat_end_tokens = ()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    @classmethod
    def replace(cls, monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
        """Let commands open this in place of the engine."""
        monkeypatch.setattr("flexgen_h2o.llm.LLM", cls)
        monkeypatch.setattr(cls, "opened", [])
        return cls
