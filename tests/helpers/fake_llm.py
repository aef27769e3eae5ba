"""A fake LLM for tests of commands, and the figures of a run."""

from __future__ import annotations

import pytest

from flexgen_h2o.metrics.run_stats import RunStats


def run_stats(**figures: object) -> RunStats:
    """Return figures of a small run, with some of them changed."""
    return RunStats(**{"model": "m", "num_parameters": 1, "dtype": "float32", "device": "cpu",
                       "num_prompts": 1, "prompt_tokens": 1, "generated_tokens": 1,
                       "gpu_batch_size": 1, "num_gpu_batches": 1, **figures})


class FakeLLM:
    """Base class of fake LLMs; `opened` records them, or their options."""

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
