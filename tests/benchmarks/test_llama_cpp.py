"""The llama.cpp baseline: GGUF files and tokens."""

from __future__ import annotations

import pytest
import torch
from helpers.programs import benchmark_modules
from safetensors.torch import load_file

from flexgen_h2o.errors import UserError
from flexgen_h2o.models.gguf.checkpoint import read_gguf
from flexgen_h2o.models.gguf.config import config_of
from flexgen_h2o.models.registry import from_transformers, read_config

PROMPTS = [[7, 8, 9], [10, 11, 12, 13, 14], [15]]


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules by the last part of their names."""
    with benchmark_modules("baselines", "baselines.llama_cpp", "baselines.huggingface",
                           "make_checkpoint") as found:
        yield found


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))


def baseline_of(bench, options: dict | None = None, **settings):
    return bench.llama_cpp.LlamaCpp(bench.baselines.BaselineSettings(**{
        "dtype": "float32", "batch": len(PROMPTS), "prompt_len": 5, "gen_len": 4,
        "scratch": "scratch", "mean_prompt_len": 3.0,
        "options": bench.llama_cpp.LlamaCpp.check("l", options or {}), **settings}))


@pytest.mark.parametrize("key", ["llama", "qwen3_moe"])
def test_a_gguf_file_has_the_checkpoints_values(bench, tiny_model, key):
    folder = tiny_model(key).folder
    path = bench.llama_cpp.gguf_file(folder, "F32")
    header, tensors = read_gguf(path)
    weights = load_file(folder / "model.safetensors")
    assert set(tensors) == set(weights)
    for name, values in weights.items():
        read = torch.cat([part.reshape(-1) for part in tensors[name].chunks(torch.float32)])
        assert torch.equal(read.view(values.shape), values), name
    again, original = (from_transformers(values, "m") for values in (
        config_of(header, "float32"), read_config(folder)))
    assert again.rope == original.rope and again.num_parameters() == original.num_parameters()
    assert again.norm_eps == pytest.approx(original.norm_eps)
    assert again.experts == original.experts
    kept = path.stat().st_mtime_ns
    assert bench.llama_cpp.gguf_file(folder, "F32").stat().st_mtime_ns == kept, "made once"


@pytest.mark.parametrize("key, weights, words", [
    ("opt", "Q4_0", "Qwen3-MoE only"),
    ("llama_untied_bias", "F32", "without biases"),
    ("llama", "Q4_0", "not whole blocks of 32"),
])
def test_unsupported_models_for_gguf_are_errors(bench, tiny_model, tmp_path, key, weights, words):
    with pytest.raises(UserError, match=words):
        baseline_of(bench, {"weights": weights}).ready(tiny_model(key).folder)
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize("key", ["llama", "llama3_rope", "qwen3_moe"])
def test_llama_cpp_tokens_equal_transformers(bench, tiny_model, key):
    """Where it is installed: `make .venv/.have-llama-cpp`."""
    pytest.importorskip("llama_cpp")
    baseline = baseline_of(bench, {"weights": "F32", "threads": 1, "flash_attention": False})
    try:
        baseline.prepare(tiny_model(key).folder)
        found = baseline.generate(PROMPTS, 4)
    finally:
        baseline.close()
    assert found.tokens == bench.huggingface.timed_generate(tiny_model(key).model, PROMPTS,
                                                            4).tokens
