"""Rooflines and baselines of benchmarks/compare.py."""

from __future__ import annotations

from functools import partial

import pytest
from helpers import planning_cases
from helpers.programs import benchmark_modules

from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.registry import from_transformers, published

MODULES = ("worker", "rooflines", "processes", "baselines", "baselines.huggingface",
           "baselines.flexgen", "baselines.ours", "baselines.serving_engines", "make_checkpoint")


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules by the last part of their names."""
    with benchmark_modules(*MODULES) as found:
        yield found


MODEL = ModelConfig(name="m", family="opt", vocab_size=1000, hidden_size=64, num_layers=4,
                    num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=256, max_positions=512,
                    activation="relu", tie_word_embeddings=True)


def test_a_roofline_counts_bytes_and_products(bench):
    load = partial(bench.rooflines.Load, batch=2, prompt_len=10, gen_len=4, cached=12)
    full = bench.rooflines.work(MODEL, load())
    assert full.cache_bytes == 2 * 12 * MODEL.kv_bytes_per_token(2)
    assert full.all_bytes == 2 * MODEL.num_parameters()
    dense = 2 * (MODEL.num_layers * MODEL.layer_parameters() + 64_000)
    assert full.step_flops == 2 * (dense + 4 * 4 * 64 * 12)
    assert full.prefill_flops == 2 * (10 * (dense - 2 * 64_000 + 4 * 4 * 64 * 5) + 2 * 64_000), (
        "attention to half of a prompt, and the head for its last token alone")
    small = bench.rooflines.work(MODEL, load(weight_bits=4, cache_bits=4))
    assert small.weight_bytes < full.weight_bytes / 3 and small.cache_bytes < full.cache_bytes / 2
    assert small.step_flops == full.step_flops


def test_batched_prompts_equal_single_prompts(tiny_model, bench):
    model = tiny_model("opt").model
    prompts = [[7, 8, 9], [10, 11, 12, 13, 14], [15]]
    found = bench.huggingface.timed_generate(model, prompts, 4)
    assert len(found.steps) == 3 and min(found.prefill, *found.steps) > 0
    alone = [bench.huggingface.timed_generate(model, [prompt], 4).tokens[0] for prompt in prompts]
    assert list(found.tokens) == alone


def test_engine_baseline_plans_its_policy(tiny_model, bench, tmp_path, monkeypatch):
    from flexgen_h2o.planning import calibrate

    measured, folder = [], tiny_model("opt").folder
    monkeypatch.setattr(calibrate, "load_or_calibrate",
                        lambda device, *_, **__: measured.append(device) or planning_cases.CPU)
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    options = bench.ours.Ours.check("o", {"cache_share": 0.5, "cache_bits": 4, "weight_bits": 4})
    baseline = bench.ours.Ours(bench.baselines.BaselineSettings(
        dtype="float32", batch=3, prompt_len=8, gen_len=3, scratch=str(tmp_path),
        mean_prompt_len=8.0, options=options))
    baseline.ready(folder)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert len(measured) == 1 and kept, "the machine, and weights in four bits"
    try:
        assert baseline.prepare(folder).startswith("--percent ")
        found = baseline.generate([[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]], 2)
        assert baseline._llm.h2o.heavy_ratio == 0.5 * (8 + 3) / 2 / 8, "of the whole text"
    finally:
        baseline.close()
    assert kept == {path: path.stat().st_mtime_ns for path in kept}, "used as they are"
    assert [len(tokens) for tokens in found.tokens] == [2] * 3, "cut: the settings have 3"
    assert len(found.steps) == 1 and found.prefill > 0


def settings_of(bench, **others):
    return bench.baselines.BaselineSettings(**{
        "dtype": "float32", "batch": 2, "prompt_len": 2, "gen_len": 3, "scratch": "scratch",
        "mean_prompt_len": 1.5, **others})


def test_a_stepped_engine_is_timed_until_each_sequence_has_its_tokens(bench, monkeypatch):
    """The second prompt is computed while the first sequence is decoded."""
    clock = iter((0.0, 1.0, 3.0, 4.0, 6.0))
    monkeypatch.setattr(bench.serving_engines.time, "perf_counter", lambda: next(clock))
    steps = iter(([(0, [7])], [(0, [8]), (1, [7])], [(0, [9]), (1, [8])], [(1, [9])]))

    class Fake(bench.serving_engines.ServingEngine):
        refusal = version = prepare = lambda self, *_: None

        def add(self, row, prompt, gen_len):
            assert (list(prompt), gen_len) == ([5] * (row + 1), 3)

        def step(self):
            return next(steps)

    found = Fake(settings_of(bench)).generate([[5], [5, 5]], 3)
    assert (found.prefill, found.steps, found.tokens) == (3, (1.5, 1.5), ((7, 8, 9), (7, 8, 9)))


@pytest.mark.parametrize("share, text, kept", [(None, 256, None), (1, 256, None), (0.2, 256, 96),
                                               (0.2, 1024, 192)])
def test_openvinos_eviction_keeps_whole_blocks(bench, share, text, kept):
    options = bench.serving_engines.OpenVinoGenAI.check("o", {"cache_share": share})
    settings = settings_of(bench, mean_prompt_len=text / 2, gen_len=text // 2, options=options)
    assert bench.serving_engines.OpenVinoGenAI(settings).kept_tokens() == kept


@pytest.mark.parametrize("name", ["facebook/opt-1.3b", "meta-llama/Llama-3.2-1B",
                                  "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-30B-A3B"])
def test_checkpoints_have_the_published_shape(bench, name):
    shape = published(name)
    assert from_transformers(bench.make_checkpoint.hf_config(shape, shape.dtype), name) == shape
