"""benchmarks/compare.py: order of runs, rows, resumption, and its baselines."""

from pathlib import Path

import pytest
import torch
import yaml
from helpers.programs import ROOT, benchmark_modules
from safetensors.torch import load_file

from flexgen_h2o.models.gguf.checkpoint import read_gguf
from flexgen_h2o.models.gguf.config import config_of as gguf_config
from flexgen_h2o.models.registry import from_transformers, published, read_config

MODULES = ("compare", "comparison", "processes", "rooflines", "baselines", "baselines.huggingface",
           "baselines.llama_cpp", "baselines.ours", "baselines.serving_engines", "make_checkpoint")
RATES = {"status": "ok", "page_cache": "as it was", "cpu": "a CPU", "device": "cpu",
         "disk": 1e9, "memory": 1e10, "gemm": 1e12}
SYSTEMS = {"plain": {"baseline": "transformers_memory"},
           "h2o": {"baseline": "ours", "cache_share": 0.5}}


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules by the last part of their names."""
    with benchmark_modules(*MODULES) as modules:
        yield modules


def config_of(bench, folder: Path, values: dict):
    """The configuration of a file with these values."""
    path = folder / "compare.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return bench.comparison.load(path, models=folder)


def scenario(**others) -> dict:
    return {"model": "opt", "prompt_len": 8, "gen_len": 5, "dtype": "float32", **others}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("compare_*.yaml")),
                         ids=lambda path: path.stem)
def test_shipped_configs_use_each_of_their_systems(bench, path):
    config = bench.comparison.load(path, models=Path("."))
    assert {name for scenario in config.scenarios for name in scenario.systems} == set(
        config.systems)


class FakeRunner:
    """Answers jobs as systems would."""

    def __init__(self):
        self.jobs = []

    def __call__(self, job: dict, memory: int | None) -> dict:
        if job["kind"] != "run":
            return dict(RATES)
        batch, options = job["settings"]["batch"], job["settings"]["options"]
        name = "h2o" if options.get("cache_share") else "plain"
        self.jobs.append((name, batch, job["generate"], memory))
        times = sum(job[:2] == (name, batch) for job in self.jobs)
        return {"status": "ok", "page_cache": "as it was", "settings": "so", "versions": "v 1",
                "load": 1.0, "prefill": float(times), "steps": [0.5] * (job["generate"] - 1),
                "tokens": [[len(name)] * job["generate"]] * batch, "peak_rss": 1 << 20,
                "read": None}


def run_cells(bench, tiny_model, tmp_path, spec: dict) -> tuple[list, FakeRunner]:
    """Rows of a scenario, and the runner with the jobs for them."""
    if not (tmp_path / "opt").exists():
        (tmp_path / "opt").symlink_to(tiny_model("opt").folder)
    config = config_of(bench, tmp_path, {"systems": SYSTEMS, "threads": 1, "repeats": 3,
                                         "scenarios": {"s": scenario(**spec)}})
    table, runner = bench.comparison.Table(str(tmp_path / "out.csv")), FakeRunner()
    bench.compare.Cells(config, table, runner).run()
    table.finish()
    return table.rows(), runner


def test_systems_alternate_and_rows_hold_medians(bench, tiny_model, tmp_path):
    spec = {"batch": 2, "best": False, "cut_gen_len": {"h2o": 3}, "memory": "1MB"}
    rows, runner = run_cells(bench, tiny_model, tmp_path, spec)
    assert runner.jobs == [("plain", 2, 5, 10**6), ("h2o", 2, 3, 10**6)] * 3
    plain, h2o = rows
    assert (plain["status"], plain["repeats"], plain["prefill_s"]) == ("ok", "3", "2")
    assert float(plain["total_s"]) == 2 + 4 * 0.5 == float(h2o["total_s"]), "as if it had finished"
    assert float(plain["tokens_per_s"]) == 2 * 5 / 4
    assert (plain["projected"], h2o["projected"]) == ("False", "True")
    assert (plain["equal_tokens"], h2o["equal_tokens"]) == ("1", "0")
    again, idle = run_cells(bench, tiny_model, tmp_path, spec)
    assert idle.jobs == [] and again == rows


@pytest.mark.full
def test_systems_generate_the_same_tokens_in_float32(bench, tiny_model, tmp_path, monkeypatch):
    """Each in its process: only the machine's rates are fake."""
    monkeypatch.setattr(bench.processes, "drop_page_cache", lambda: False)
    config = config_of(bench, tmp_path, {
        "threads": 1, "repeats": 1,
        "systems": {"transformers": {"baseline": "transformers_memory"},
                    "accelerate": {"baseline": "accelerate_offload", "offload": "disk"},
                    "ours": {"baseline": "ours", "percent": [100, 0, 100, 0]}},
        "scenarios": {"s": scenario(model=str(tiny_model("opt").folder), batch=3, best=False)}})
    table = bench.comparison.Table(str(tmp_path / "out.csv"))
    bench.compare.Cells(config, table, lambda job, memory: (
        dict(RATES) if job["kind"] == "rates" else bench.processes.run_job(
            job, threads=1, timeout=300, memory=memory, scratch=tmp_path / "scratch"))).run()
    assert [(row["system"], row["status"], row["reason"], row["equal_tokens"])
            for row in table.rows()] == [
        (name, "ok", "", "1") for name in ("transformers", "accelerate", "ours")]


# Baselines


def settings_of(bench, **others):
    return bench.baselines.BaselineSettings(**{
        "dtype": "float32", "batch": 2, "prompt_len": 2, "gen_len": 3, "scratch": "scratch",
        "mean_prompt_len": 1.5, **others})


@pytest.mark.parametrize("name", ["facebook/opt-1.3b", "meta-llama/Llama-3.2-1B",
                                  "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-30B-A3B"])
def test_checkpoints_have_the_published_shape(bench, name):
    shape = published(name)
    assert from_transformers(bench.make_checkpoint.hf_config(shape, shape.dtype), name) == shape


# llama.cpp


def llama_cpp(bench, **options):
    return bench.llama_cpp.LlamaCpp(settings_of(
        bench, batch=3, prompt_len=5, gen_len=4, mean_prompt_len=3.0,
        options=bench.llama_cpp.LlamaCpp.check("l", options)))


@pytest.mark.parametrize("key", ["llama", "qwen3_moe"])
def test_a_gguf_file_has_the_checkpoints_values(bench, tiny_model, tmp_path, monkeypatch, key):
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    folder = tiny_model(key).folder
    path = bench.llama_cpp.gguf_file(folder, "F32")
    header, tensors = read_gguf(path)
    weights = load_file(folder / "model.safetensors")
    assert set(tensors) == set(weights)
    for name, values in weights.items():
        read = torch.cat([part.reshape(-1) for part in tensors[name].chunks(torch.float32)])
        assert torch.equal(read.view(values.shape), values), name
    written, original = (from_transformers(values, "m") for values in (
        gguf_config(header, "float32"), read_config(folder)))
    assert (written.rope, written.num_parameters(), written.experts) == (
        original.rope, original.num_parameters(), original.experts)
    assert written.norm_eps == pytest.approx(original.norm_eps)


@pytest.mark.parametrize("key", ["llama", "llama3_rope", "qwen3_moe"])
def test_llama_cpp_tokens_equal_transformers(bench, tiny_model, tmp_path, monkeypatch, key):
    """Where it is installed: `make .venv/.have-llama-cpp`."""
    pytest.importorskip("llama_cpp")
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    baseline = llama_cpp(bench, weights="F32", threads=1, flash_attention=False)
    prompts = [[7, 8, 9], [10, 11, 12, 13, 14], [15]]
    try:
        baseline.prepare(tiny_model(key).folder)
        run = baseline.generate(prompts, 4)
    finally:
        baseline.close()
    assert run.tokens == bench.huggingface.timed_generate(tiny_model(key).model, prompts, 4).tokens
