"""benchmarks/studies/policies.py: masks against the engine's evictions, and rows."""

from __future__ import annotations

import csv

import pytest
import torch
from helpers.generation import make_prompts
from helpers.programs import BENCHMARKS, program

from flexgen_h2o import LLM, H2OConfig


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "studies"))
    return program("benchmarks/studies/policies.py")


@torch.no_grad()
@pytest.mark.parametrize("cut_only", [False, True])
@pytest.mark.parametrize("score", ["sum", "mean", "caote"])
def test_masks_are_what_the_engine_evicts(tiny_model, study, score, cut_only):
    tiny = tiny_model("llama")
    texts = make_prompts(tiny.model.config.vocab_size, [48, 48], 0)
    masked = study.MaskedModel(tiny.model, torch.tensor(texts), 32)
    budgets = ["prompt"] if cut_only else ["prompt", "text"]
    for budget_of in budgets:
        setting = study.Setting(40, budget_of, not cut_only)
        found = masked.log_probs(study.ENGINE[score], setting)
        h2o = H2OConfig(heavy_ratio=0.2, score=score, budget_of=budget_of,
                        evict_generated=not cut_only)
        with LLM(str(tiny.folder), h2o=h2o, dtype="float32", progress=False) as llm:
            expected = torch.tensor(llm.loglikelihood([(row[:32], row[32:]) for row in texts]))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - masked.log_probs(None, None)).abs().max() > 1e-3


@torch.no_grad()
def test_every_candidate_gives_a_row_once(tiny_model, study, tmp_path, capsys):
    tiny, path = tiny_model("llama"), tmp_path / "rows.csv"
    texts = torch.tensor(make_prompts(tiny.model.config.vocab_size, [48, 48], 0))
    rows = study.PolicyRows(str(path), {"model": "tiny", "articles": 2})
    for _ in range(2):
        study.run_masked(study.MaskedModel(tiny.model, texts, 40), rows,
                         [study.Setting(20, "text")])
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["policy"] for row in found] == [one.name for one in study.CANDIDATES]
    assert all(float(row["over_full"]) > 0 for row in found)
    assert len(capsys.readouterr().out.splitlines()) == len(found)
