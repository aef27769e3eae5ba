"""The systems of benchmarks/compare.py, their rooflines, and the processes that they run in."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import planning_cases
from helpers.programs import ROOT, benchmark_modules
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.errors import UserError
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


def test_rows_name_packages_with_their_versions_where_they_are_installed(bench):
    found = bench.baselines.installed("absent-package", "torch")
    assert found == f"absent-package torch {version('torch')}"


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


def test_a_roofline_counts_experts_in_mxfp4_and_layers_without_experts(bench):
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


def test_a_full_cache_has_no_ratio(bench):
    for share in (None, 1):
        settings = SimpleNamespace(options={"cache_share": share})
        assert bench.ours.ratio_of_text(settings) is None


def test_steps_of_blocks_are_added(bench):
    assert bench.ours.by_step([1, 2, 10, 20], 2) == (11, 22)


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


def test_a_token_on_a_gpu_is_there_before_its_time_is_noted(bench, monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    clock, noted = bench.huggingface.StepClock(), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(
        synchronize=lambda: noted.append(len(clock.times))))
    ids = torch.zeros(2, 3, dtype=torch.long)
    for each in (ids, ids.as_subclass(OnGpu), ids.as_subclass(OnGpu)):
        assert not clock(each, None).any()
    assert noted == [2, 3] and len(clock.times) == 4


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


def test_a_worker_measures_the_machine(bench, monkeypatch):
    from flexgen_h2o.storage import links

    monkeypatch.setattr(links, "disk_read_rate", lambda path: float(len(str(path))))
    monkeypatch.setattr(links, "memory_read_rate", lambda device: 2.0)
    # Of small products, by which it is chosen, float32's are the faster.
    monkeypatch.setattr(links, "gemm_rate", lambda rows, dtype, device, width=0, depth=0: (
        float(rows * dtype.itemsize) if width else rows * 4.0 / dtype.itemsize))
    found = bench.worker.rates({"file": "abc", "dtype": "bfloat16"})
    assert (found["disk"], found["memory"], found["gemm"]) == (3, 2, 2048)
    assert found["status"] == "ok" and found["cpu"] and found["device"] == "cpu"
    assert "link" not in found, "there is none"


def test_deepspeed_is_told_what_its_documentation_says(bench):
    make = bench.huggingface.zero_config
    nvme = make(settings_of(bench, dtype="bfloat16", options={"offload": "nvme"}), hidden=64,
                largest=1000, pinned=False)
    assert nvme["bf16"]["enabled"] and not nvme["fp16"]["enabled"]
    offload = nvme["zero_optimization"]["offload_param"]
    assert offload == {"device": "nvme", "pin_memory": False, "nvme_path": "scratch",
                       "buffer_count": 6, "buffer_size": 1000}
    cpu = make(settings_of(bench, options={"offload": "cpu"}), hidden=64, largest=9, pinned=True)
    assert cpu["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}


LOG = """model size: 2.443 GB\tcache size: 0.398 GB\thidden size (p): 0.008 GB
peak gpu mem: 3.1 GB\tprojected: False
prefill latency: 1.500 s\tprefill throughput: 1365.333 token/s
decode latency: 6.000 s\tdecode throughput: 20.000 token/s
total latency: 7.500 s\ttotal throughput: 17.067 token/s
"""


def test_flexgens_log_is_read(bench):
    assert bench.flexgen.latencies(LOG) == (1.5, 6.0)
    with pytest.raises(UserError, match="logged no latencies: 'CUDA error'"):
        bench.flexgen.latencies("CUDA error")


def test_flexgen_runs_by_its_command_line(bench, tmp_path, monkeypatch):
    options = bench.flexgen.FlexGen.check("f", {"num_gpu_batches": 2, "flags": "--percent 1 2"})
    baseline = bench.flexgen.FlexGen(settings_of(bench, scratch=str(tmp_path), options=options))
    assert "random weights" in baseline.prepare(Path("opt-1.3b"))

    commands = []

    def fake(command, **_):
        commands.append(command)
        flags = " ".join(command[command.index("--model"):])
        assert flags.startswith("--model facebook/opt-1.3b --path _DUMMY_")
        assert "--gpu-batch-size 2 --num-gpu-batches 2" in flags and flags.endswith("--percent 1 2")
        Path(command[command.index("--log-file") + 1]).write_text(LOG)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(bench.flexgen.subprocess, "run", fake)
    found = baseline.generate([[5] * 8] * 4, 3)
    assert (found.prefill, found.steps, found.tokens) == (1.5, (3.0, 3.0), None)
    assert commands[0][1:3] == ["-m", "flexgen.flex_opt"] and "--cut-gen-len" not in commands[0]
    long = bench.flexgen.FlexGen(settings_of(bench, scratch=str(tmp_path), options=options,
                                             gen_len=13, device_memory=1 << 30))
    long.prepare(Path("opt-1.3b"))
    assert long.generate([[5] * 8] * 4, 4).steps == (0.5,) * 3, "its 6 seconds are of all 13"
    assert commands[1][1:5] == ["-c", bench.flexgen.LIMITED, str(1 << 30), "flexgen.flex_opt"]
    assert "--gen-len 13 --cut-gen-len 4" in " ".join(commands[1])
    with pytest.raises(UserError, match="from four tokens"):
        long.generate([[5] * 8] * 4, 3)
    with pytest.raises(UserError, match="prompts of one length"):
        baseline.generate([[5], [5, 6]], 3)
    with pytest.raises(UserError, match="does not divide"):
        bench.flexgen.FlexGen(settings_of(bench, batch=3, options=options)).prepare(Path("opt-1b"))


def test_a_module_runs_within_a_share_of_the_gpu(bench, tmp_path, monkeypatch):
    (tmp_path / "told.py").write_text("import sys; print(__name__, *sys.argv[1:])")
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace\n"
        "cuda = SimpleNamespace(mem_get_info=lambda: (0, 400),"
        " set_per_process_memory_fraction=lambda share: print(share))\n")
    done = subprocess.run([sys.executable, "-c", bench.flexgen.LIMITED, "100", "told", "--a", "b"],
                          cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True,
                          text=True)
    assert done.stdout.split() == ["0.25", "__main__", "--a", "b"], done.stderr


def test_the_engine_is_told_of_a_gpus_limit(bench):
    options = bench.ours.Ours.check("o", {"hh_long_seq": True})
    config = bench.ours.Ours.config(Path("m"), settings_of(bench, options=options,
                                                           device_memory=1 << 30))
    assert config.device_memory_limit == 1 << 30 and config.hh_long_seq


def test_who_cannot_run_here_says_why(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.baselines.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = {}
    for module in bench.baselines.CLASSES:
        options = bench.baselines.baseline_class(module).check(module, {})
        said[module] = bench.baselines.baseline_class(module)(
            settings_of(bench, options=options)).refusal()
    assert said["ours"] is None and said["transformers_memory"] is None
    assert "[bench-deepspeed]" in said["deepspeed_zero"]
    assert "[bench-accelerate]" in said["accelerate_offload"]
    assert "[bench-llama-cpp]" in said["llama_cpp"]
    assert "needs CUDA" in said["flexgen"] and "names no checkout" in said["h2o_fork"]
    fork = bench.flexgen.H2OFork
    options = fork.check("fork", {"path": str(tmp_path)})
    assert "no flexgen/flex_opt.py" in fork(settings_of(bench, options=options)).refusal()
    (tmp_path / "flexgen").mkdir()
    (tmp_path / "flexgen" / "flex_opt.py").touch()
    assert "needs CUDA" in fork(settings_of(bench, options=options)).refusal()


def test_the_extras_that_refusals_name_exist():
    source = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in ("bench-accelerate", "bench-deepspeed", "bench-flexgen", "bench-llama-cpp"):
        assert f"\n{name} = [" in source


def job_of(bench, tmp_path, monkeypatch, source: str, timeout: float = 60, **job) -> dict:
    worker = tmp_path / "worker.py"
    worker.write_text(f"import json, os, signal, sys\njob = json.load(sys.stdin)\n{source}\n")
    monkeypatch.setattr(bench.processes, "WORKER", (str(worker),))
    monkeypatch.setattr(bench.processes, "drop_page_cache", lambda: False)
    found = bench.processes.run_job({"kind": "run", **job}, threads=1, timeout=timeout,
                                    memory=None, scratch=tmp_path / "scratch")
    assert not list((tmp_path / "scratch").iterdir()), "nothing stays behind"
    return found


def test_whatever_becomes_of_a_process_is_said(bench, tmp_path, monkeypatch):
    do = partial(job_of, bench, tmp_path, monkeypatch)
    answer = "open(job['answer'], 'w').write(json.dumps({'status': 'ok', 'env': [os.environ[n] " \
             "for n in ('OMP_NUM_THREADS', 'GLIBC_TUNABLES')]}))"
    found = do(answer)
    assert found["status"] == "ok" and found["page_cache"] == "as it was"
    assert found["env"] == ["1", bench.processes.TUNED]
    found = do("sys.exit('no such thing')")
    assert (found["status"], found["reason"]) == ("failed", "exit status 1: no such thing")
    killed, loaded = "os.kill(os.getpid(), signal.SIGKILL)", "open(job['loaded'], 'w').close()"
    assert do(killed)["status"] == "out of memory"
    assert do(killed, loads_alike=True)["status"] == "out of memory in loading"
    assert do(f"{loaded}; {killed}", loads_alike=True)["status"] == "out of memory"
    assert do("signal.pause()", timeout=0.5)["status"] == "timed out"
    late = do("signal.pause()", timeout=0.5, loads_alike=True)
    assert late["status"] == "timed out in loading"


class Group:
    """A memory cgroup that nothing is ever killed in."""

    def __init__(self, folder: Path):
        self.door, self.kills, self.peak = folder / "door", lambda: 0, lambda: 7

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def enter(self):
        self.door.write_text("before")


@pytest.mark.parametrize("beyond, when", [(False, "before"), (True, "after")])
def test_who_loads_beyond_a_limit_enters_later(bench, tmp_path, monkeypatch, beyond, when):
    worker = tmp_path / "worker.py"
    worker.write_text("import json, sys\njob = json.load(sys.stdin)\n"
                      "if 'door' in job: open(job['door'], 'w').write('after')\n"
                      "held = {'held': 3} if 'door' in job else {}\n"
                      "open(job['answer'], 'w').write(json.dumps({'status': 'ok', **held}))")
    monkeypatch.setattr(bench.processes, "WORKER", (str(worker),))
    monkeypatch.setattr(bench.processes, "drop_page_cache", lambda: False)
    monkeypatch.setattr(bench.processes, "MemoryGroup", lambda limit: Group(tmp_path))
    found = bench.processes.run_job({"kind": "run", "loads_beyond": beyond}, threads=1, timeout=60,
                                    memory=1 << 30, scratch=tmp_path / "scratch")
    assert (found["status"], found["peak_memory"]) == ("ok", 7 + 3 * beyond)
    assert (tmp_path / "door").read_text() == when
    loads = {options: bench.huggingface.DeepSpeedZero.loads_beyond({"offload": options})
             for options in bench.huggingface.DEEPSPEED_TIERS}
    assert loads == {"cpu": False, "nvme": True}


def test_the_limit_begins_between_loading_and_running(bench, tmp_path, monkeypatch):
    done, door, limit = [], tmp_path / "door", tmp_path / "memory.max"
    limit.write_text(str(1 << 40))
    baseline = SimpleNamespace(
        warms=False, version=lambda: "v", prepare=lambda model: done.append("loaded") or "so",
        generate=lambda prompts, count: bench.baselines.Timings(1.0, (1.0,), ((5, 6),)))
    monkeypatch.setattr(bench.worker, "no_cuda", lambda: "no GPU")
    monkeypatch.setattr(bench.worker, "drop_page_cache",
                        lambda: done.append("dropped" if not door.exists() else "late"))
    job = {"prompts": [[5]], "model": "m", "generate": 2, "loaded": str(tmp_path / "loaded")}
    assert bench.worker.measure(baseline, job)["settings"] == "so"
    found = bench.worker.measure(baseline, job | {"door": str(door)})
    assert found["settings"].startswith("so, limited once loaded (it held ")
    assert done == ["loaded", "loaded", "dropped"] and int(door.read_text()) == os.getpid()
    assert (tmp_path / "loaded").exists()
    baseline.warms, whole = True, [[5] * 9, [6] * 2]
    baseline.generate = lambda *given: calls.append(given) or bench.baselines.Timings(
        len(calls), (1.0,), None)
    calls: list[tuple] = []
    assert bench.worker.measure(baseline, job | {"prompts": whole, "generate": 7})["prefill"] == 2
    assert calls == [([[5] * 2, [6]], 2), (whole, 7)], "a quarter of the prompts warms up"
    calls.clear()
    monkeypatch.setattr(bench.worker, "no_cuda", lambda: None)
    bench.worker.measure(baseline, job | {"prompts": whole, "generate": 7})
    assert calls == [(whole, 7)] * 2, "kernels are compiled for the lengths that they get"
    assert 0 < found["held"] == (1 << 40) - int(limit.read_text()), "it counts all the same"
    limit.write_text("4096")
    with pytest.raises(MemoryError, match="GB when it has loaded"):
        bench.worker.measure(baseline, job | {"door": str(door)})


@pytest.mark.parametrize("error, status", [
    (MemoryError(), "out of memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
    (UserError("the run does not fit. cpu: needs 9 GB"), "out of memory"),
    (ValueError("no such\nlayer"), "failed"),
])
def test_an_error_of_a_system_is_an_answer(bench, monkeypatch, error, status):
    closed = []

    class Broken(bench.baselines.Baseline):
        documented = ""

        def refusal(self):
            return None

        def version(self):
            return ""

        def prepare(self, model):
            raise error

        def generate(self, prompts, gen_len):
            raise AssertionError("was not prepared")

        def close(self):
            closed.append(True)

    monkeypatch.setattr(bench.worker, "baseline_class", lambda name: Broken)
    found = bench.worker.run({
        "kind": "run", "baseline": "x", "model": "m", "scratch": "s", "prompts": [[5]],
        "generate": 2,
        "settings": {"dtype": "float32", "batch": 1, "prompt_len": 1, "gen_len": 2,
                     "mean_prompt_len": 1, "options": {}}})
    assert found["status"] == status and closed == [True] and "\n" not in found["reason"]


def test_who_is_cut_short_has_less_memory(bench, tiny_model, monkeypatch):
    """What its cache would have come to is held while it runs."""
    held, ones = [], torch.ones

    def counted(*size, **how):
        if how.get("dtype") is torch.uint8:
            held.extend(size)
        return ones(*size, **how)

    monkeypatch.setattr(torch, "ones", counted)
    baseline = bench.baselines.baseline_class("transformers_memory")(settings_of(bench, batch=2,
                                                                                 gen_len=9))
    baseline.prepare(tiny_model("opt").folder)
    assert len(baseline.generate([[5, 6, 7], [8, 9]], 4).steps) == 3
    config = baseline.model.config
    assert held == [2 * (9 - 4) * 2 * config.num_hidden_layers * config.hidden_size * 4]
