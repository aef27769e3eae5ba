"""Rooflines and baselines of benchmarks/compare.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from helpers import planning_cases
from helpers.programs import benchmark_modules
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.models.model_config import ModelConfig
from flexgen_h2o.models.registry import published

MODULES = ("worker", "rooflines", "processes", "baselines", "baselines.huggingface",
           "baselines.flexgen", "baselines.ours")


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


def test_roofline_of_mxfp4_experts_and_dense_layers(bench):
    load = partial(bench.rooflines.Load, batch=1, prompt_len=10, gen_len=4, cached=12)
    gpt_oss = published("gpt-oss-20b")
    fewer = sum(bench.rooflines.work(shape, load(weight_bits=4)).all_bytes * sign
                for shape, sign in ((replace(gpt_oss, name="another"), 1), (gpt_oss, -1)))
    matrices = 24 * 32 * 3 * 2880 * 2880
    assert fewer > matrices * 0.25 / 8, "4.25 bits, and not 4.5 or more"
    qwen = published("Qwen3-30B-A3B")
    mixed = replace(qwen, dense_layers=(True,) * 12 + (False,) * 36)
    assert bench.rooflines.work(mixed, load()).all_bytes == 2 * mixed.num_parameters()
    assert mixed.num_parameters() == qwen.num_parameters() - 12 * (
        qwen.layer_parameters() - mixed.layer_parameters(0))


def test_only_what_exceeds_memory_is_read_from_disk(bench):
    amount = bench.rooflines.WorkAmount(all_bytes=120, weight_bytes=100, cache_bytes=10,
                                        step_flops=0,
                               prefill_flops=0)
    rates = {"disk": 1.0, "memory": 100.0, "gemm": 1.0}
    assert bench.rooflines.rooflines(amount, rates, None) == (0, 1.1)
    assert bench.rooflines.rooflines(amount, rates, 100) == (0,
                                                             1.1), "in turn, the cache may fit too"
    assert bench.rooflines.rooflines(amount, rates, 60) == (40, 50)


def test_what_exceeds_a_gpus_memory_goes_over_its_link(bench):
    amount = bench.rooflines.WorkAmount(all_bytes=120, weight_bytes=100, cache_bytes=10,
                                        step_flops=0,
                               prefill_flops=0)
    rates = {"disk": 1.0, "memory": 100.0, "gemm": 1.0, "link": 4.0}
    assert bench.rooflines.rooflines(amount, rates, None, 100) == (0, 1.1)
    assert bench.rooflines.rooflines(amount, rates, None, 60) == (10, 10), "without the cache"
    assert bench.rooflines.rooflines(amount, rates, 20, 60) == (20, 30), "20 fit neither"


@given(prompt=st.integers(20, 4000), new=st.integers(2, 2000), share=st.floats(0.05, 0.9))
def test_a_share_is_of_the_whole_text(bench, prompt, new, share):
    settings = SimpleNamespace(options={"cache_share": share}, mean_prompt_len=prompt, gen_len=new)
    ratio = bench.ours.ratio_of_text(settings)
    kept = 2 * int(ratio * prompt + 1e-9)
    assert abs(kept - min(share * (prompt + new), 2 * prompt)) <= 2


def settings_of(bench, **others):
    return bench.baselines.BaselineSettings(**{
        "dtype": "float32", "batch": 4, "prompt_len": 8, "gen_len": 3, "scratch": "scratch",
        "mean_prompt_len": 8.0, **others})


def test_decoder_layers_go_far_and_nothing_is_forgotten(bench, tiny_model):
    for key, layers in (("opt", "model.decoder.layers"), ("llama", "model.layers")):
        model = tiny_model(key).model
        place = partial(bench.huggingface.device_map, model, 3, near="cpu", far="disk")
        places = place()
        assert {name for name in places if place(near_layers=2)[name] != places[name]} == {
            f"{layers}.0", f"{layers}.1"}
        far = {name for name, place in places.items() if place == "disk"}
        assert far == {f"{layers}.{number}" for number in range(3)}
        for name, _ in model.named_parameters():
            assert any(name.startswith(f"{module}.") for module in places), name


def test_prompts_of_any_lengths_are_continued_as_each_alone(tiny_model, bench):
    model = tiny_model("opt").model
    prompts = [[7, 8, 9], [10, 11, 12, 13, 14], [15]]
    found = bench.huggingface.timed_generate(model, prompts, 4)
    assert len(found.steps) == 3 and min(found.prefill, *found.steps) > 0
    alone = [bench.huggingface.timed_generate(model, [prompt], 4).tokens[0] for prompt in prompts]
    assert list(found.tokens) == alone


def test_the_engine_plans_its_own_policy(tiny_model, bench, tmp_path, monkeypatch):
    from flexgen_h2o.planning import calibrate

    measured, folder = [], tiny_model("opt").folder
    monkeypatch.setattr(calibrate, "load_or_calibrate",
                        lambda device, *_, **__: measured.append(device) or planning_cases.CPU)
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    options = bench.ours.Ours.check("o", {"cache_share": 0.5, "cache_bits": 4, "weight_bits": 4})
    baseline = bench.ours.Ours(settings_of(bench, batch=3, options=options, scratch=str(tmp_path)))
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
