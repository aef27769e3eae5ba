"""benchmarks/studies/cache.py: what a step reads and writes, on a tiny model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from programs import BENCHMARKS, program

from flexgen_h2o import LLM


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "studies"))
    return program("benchmarks/studies/cache.py")


@pytest.mark.parametrize("name", ["full, on disk", "h2o 20 %, on disk"])
@pytest.mark.parametrize(("gen_len", "whole"), [(4, 0), (20, 1)])
def test_a_step_has_no_part_of_what_the_prefill_writes(tiny_model, study, monkeypatch, tmp_path,
                                                       name, gen_len, whole):
    """A step reads the whole cache, which goes to disk with the prompts and after 16 steps."""
    monkeypatch.setattr(study, "LLM", lambda model, *, path, **rest: LLM(model, **rest))
    row = study.measure(SimpleNamespace(
        model=str(tiny_model("llama").folder), batch=2, prompt_len=30, gen_len=gen_len,
        offload_dir=str(tmp_path)), name)
    read, written = row["disk_read_mb_per_step"], row["disk_written_mb_per_step"]
    assert read >= row["kv_cache_mb"] > 0
    assert written * (gen_len - 1) == pytest.approx(whole * read)
