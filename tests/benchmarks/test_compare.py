"""benchmarks/compare.py: order of runs, rows, ratios, resumption."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from helpers.programs import ROOT, benchmark_modules
from helpers.subprocesses import environment

from flexgen_h2o.errors import UserError

MODULES = ("compare", "comparison", "processes", "baselines")
RATES = {"status": "ok", "page_cache": "as it was", "cpu": "a CPU", "device": "cpu",
         "disk": 1e9, "memory": 1e10, "gemm": 1e12}


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules by the last part of their names."""
    with benchmark_modules(*MODULES) as found:
        yield found


def config_of(bench, folder: Path, values: dict, **chosen):
    """The configuration of a file with these values."""
    path = folder / "compare.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return bench.comparison.load(path, models=folder, **chosen)


def scenario(**others) -> dict:
    return {"model": "opt", "prompt_len": 8, "gen_len": 5, "dtype": "float32", **others}


TWO = {"plain": {"baseline": "transformers_memory"},
       "h2o": {"baseline": "ours", "cache_share": 0.5}}


@pytest.mark.parametrize("change, words", [
    ({"systems": {"a": {"baseline": "ours", "cash_share": 1}}}, "unknown option 'cash_share'"),
    ({"scenarios": {"s": scenario(systems=["other"])}}, "systems names 'other', which is none"),
])
def test_invalid_comparison_configs_are_errors(bench, tmp_path, change, words):
    with pytest.raises(UserError, match=words):
        config_of(bench, tmp_path, {"systems": TWO, "scenarios": {"s": scenario()}} | change)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("compare_*.yaml")),
                         ids=lambda path: path.stem)
def test_shipped_configs_use_each_of_their_systems(bench, path):
    found = bench.comparison.load(path, models=Path("."))
    used = {system for scenario in found.scenarios for system in scenario.systems}
    assert used == set(found.systems)


class Fake:
    """Answers jobs as systems would: `rates` tokens a second by system and batch."""

    def __init__(self, answers: dict[str, dict]):
        self.answers, self.jobs, self.ready, self.lengths = answers, [], [], []

    def __call__(self, job: dict, memory: int | None) -> dict:
        if job["kind"] == "ready":
            assert memory is None
            self.ready.append(job["settings"]["options"].get("cache_share"))
        if job["kind"] != "run":
            found = self.answers.get("rates") if job["kind"] == "rates" else None
            return dict(RATES if found is None else next(found))
        batch, options = job["settings"]["batch"], job["settings"]["options"]
        name = "h2o" if options.get("cache_share") else "plain"
        self.jobs.append((name, batch, job["generate"], memory))
        answer = self.answers[name]
        prompts, settings = job["prompts"], job["settings"]
        self.lengths.append((*set(map(len, prompts)), settings["gen_len"]))
        assert {settings["prompt_len"], settings["mean_prompt_len"]} == {len(prompts[0])}
        if (batch > answer.get("largest", 1 << 20)
                or len(prompts[0]) > answer.get("longest", 1 << 20)):
            return {"status": "out of memory", "reason": "killed", "page_cache": "as it was"}
        if "status" in answer:
            return answer | {"page_cache": "as it was"}
        times = sum(job[:2] == (name, batch) for job in self.jobs)
        return {"status": "ok", "page_cache": "as it was", "settings": "so", "versions": "v 1",
                "load": 1.0, "prefill": float(times),
                "steps": [len(prompts[0]) / 16] * (job["generate"] - 1),
                "tokens": [[answer.get("token", 7)] * job["generate"]] * batch,
                "peak_rss": 1 << 20, "read": times * 10**9 if name == "plain" else None}


def cells(bench, tiny_model, tmp_path, answers: dict, spec: dict, **others) -> tuple[list, Fake]:
    """Rows of one scenario, and what was run for them."""
    folder = tiny_model("opt").folder
    if not (tmp_path / "opt").exists():
        (tmp_path / "opt").symlink_to(folder)
    config = config_of(bench, tmp_path, {"systems": TWO, "threads": 1, "scenarios": {
        "s": scenario(**spec)}, **others})
    table, do = bench.comparison.Table(str(tmp_path / "out.csv")), Fake(answers)
    bench.compare.Cells(config, table, do).run()
    table.finish()
    return table.rows(), do


def test_systems_alternate_and_rows_hold_medians(bench, tiny_model, tmp_path, monkeypatch):
    answers, loads, work = {"plain": {}, "h2o": {"token": 8}}, [], bench.compare.work
    monkeypatch.setattr(bench.compare, "work",
                        lambda model, load: loads.append(load) or work(model, load))
    rows, do = cells(bench, tiny_model, tmp_path, answers,
                     {"batch": 2, "best": False, "cut_gen_len": {"h2o": 3}, "memory": "1MB"})
    assert do.jobs == [("plain", 2, 5, 10 ** 6), ("h2o", 2, 3, 10 ** 6)] * 3
    assert do.ready == [0.5], "the engine, once"
    plain, h2o = rows
    assert (plain["status"], plain["repeats"], plain["prefill_s"]) == ("ok", "3", "2")
    assert float(plain["total_s"]) == 2 + 4 * 0.5 == float(h2o["total_s"]), "as if it had finished"
    assert float(plain["tokens_per_s"]) == 2 * 5 / 4
    assert (plain["projected"], h2o["projected"]) == ("False", "True")
    assert (plain["equal_tokens"], h2o["equal_tokens"]) == ("1", "0")
    assert plain["equal_tokens_with"] == h2o["equal_tokens_with"] == "plain"
    assert plain["documented"].startswith("https://") and plain["cpu"] == "a CPU"
    assert (plain["gb_read"], h2o["gb_read"]) == ("2", "")
    assert [load.cached for load in loads] == [8 + 5 / 2, (8 + 5) / 2], "on average; half"
    roofline = float(plain["prefill_roofline_s"]) + 4 * float(plain["decode_step_roofline_s"])
    assert float(plain["total_over_roofline"]) == pytest.approx(4 / roofline, rel=1e-4)
    again, nothing = cells(bench, tiny_model, tmp_path, answers,
                           {"batch": 2, "best": False, "cut_gen_len": {"h2o": 3}, "memory": "1MB"})
    assert nothing.jobs == [] and again == rows
    _, more = cells(bench, tiny_model, tmp_path, answers, {"batch": 4, "best": False})
    assert more.jobs == [("plain", 4, 5, None), ("h2o", 4, 5, None)] * 3, "another scenario"


def test_batch_search_stops_when_out_of_memory(bench, tiny_model, tmp_path):
    rows, do = cells(bench, tiny_model, tmp_path, {"plain": {"largest": 2}, "h2o": {}},
                     {"max_batch": 8}, repeats=1)
    found = [(row["at"], row["system"], row["batch"], row["status"]) for row in rows]
    assert found == [
        ("search", "plain", "1", "ok"), ("search", "plain", "2", "ok"),
        ("search", "plain", "4", "out of memory"),
        *(("search", "h2o", str(batch), "ok") for batch in (1, 2, 4, 8)),
        ("best", "plain", "2", "ok"), ("best", "h2o", "8", "ok")]
    (failed,) = [row for row in rows if row["status"] != "ok"]
    assert failed["reason"] == "killed" and failed["tokens_per_s"] == failed["total_s"] == ""
    assert rows[0]["total_over_roofline"] == "" and rows[-1]["total_over_roofline"] != ""
    assert rows[-1]["equal_tokens"] == "1", "of the prompts that both had"


def test_an_environment_that_is_missing_is_a_row_with_the_reason(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.processes, "drop_page_cache", lambda: False)
    job = {"kind": "run", "baseline": "openvino_genai", "environment": ".venv-none", "settings": {
        "dtype": "float32", "batch": 1, "prompt_len": 1, "gen_len": 2, "mean_prompt_len": 1}}
    run = partial(bench.processes.run_job, threads=1, timeout=60, memory=None, scratch=tmp_path)
    answer = run(job)
    assert answer["status"] == "refused"
    assert answer["reason"] == "openvino_genai is not installed: make .venv-openvino/.have"
    python = tmp_path / "own" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho it needs another CPU >&2\nkill -ILL $$\n")
    python.chmod(0o755)
    answer = run(job | {"environment": str(python.parents[1])})
    assert answer["status"] == "failed"
    assert answer["reason"] == "killed by SIGILL: it needs another CPU"


@pytest.mark.full
def test_a_memory_group_limits_a_child(bench):
    """Skipped where cgroups may not be made."""
    try:
        with bench.processes.MemoryGroup(256 << 20) as group:
            done = subprocess.run(
                [sys.executable, "-c", "from flexgen_h2o.storage.free_memory import cgroup_free;"
                 "print(cgroup_free())"], preexec_fn=group.enter, capture_output=True, text=True,
                cwd=ROOT, check=True, env=environment())
            peak, folder, kills = group.peak(), group._folder, group.kills()
    except UserError as error:
        pytest.skip(str(error))
    assert 0 < int(done.stdout) < 256 << 20 and 0 < peak <= 256 << 20
    assert not folder.exists() and kills == 0


@pytest.mark.full
def test_systems_generate_the_same_tokens_in_float32(bench, tiny_model, tmp_path, monkeypatch):
    """The real ones, each in its process: only the machine's rates are made up."""
    monkeypatch.setattr(bench.processes, "drop_page_cache", lambda: False)
    folder = tiny_model("opt").folder
    config = config_of(bench, tmp_path, {
        "threads": 1, "repeats": 1,
        "systems": {"transformers": {"baseline": "transformers_memory"},
                    "accelerate": {"baseline": "accelerate_offload", "offload": "disk"},
                    "ours": {"baseline": "ours", "percent": [100, 0, 100, 0]}},
        "scenarios": {"s": scenario(model=str(folder), batch=3, best=False, prompt_len=12)}})
    table = bench.comparison.Table(str(tmp_path / "out.csv"))

    def do(job, memory):
        if job["kind"] == "rates":
            return dict(RATES)
        return bench.processes.run_job(job, threads=1, timeout=300, memory=memory,
                                       scratch=tmp_path / "scratch")

    bench.compare.Cells(config, table, do).run()
    rows = table.rows()
    assert [(row["system"], row["status"], row["reason"]) for row in rows] == [
        (name, "ok", "") for name in ("transformers", "accelerate", "ours")]
    assert [row["equal_tokens"] for row in rows] == ["1", "1", "1"]
    assert all(float(row["tokens_per_s"]) > 0 and float(row["peak_rss_gb"]) > 0 for row in rows)
    assert "disk" in rows[1]["settings"] and rows[2]["settings"].startswith("--percent 100 0")
