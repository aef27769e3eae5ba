"""benchmarks/compare.py: what is measured, in which order, resumed and compared; equal tokens."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest
import yaml
from helpers.programs import ROOT, benchmark_modules
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.cli.command import exit_status
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


@pytest.mark.parametrize("rates, first, most, best, tried", [
    ({1: 1, 2: 2, 4: 3, 8: 2.5, 16: 2}, 1, 256, 4, [1, 2, 4, 8, 16]),
    ({1: 1, 2: 2, 4: None}, 1, 256, 2, [1, 2, 4]),
    ({1: 1, 2: 0.5, 4: 3, 8: 1, 16: 1}, 1, 256, 4, [1, 2, 4, 8, 16]),
    ({4: None, 2: None, 1: 1}, 4, 256, 1, [4, 2, 1]),
    ({4: None, 2: None, 1: None}, 4, 256, None, [4, 2, 1]),
    ({4: 1, 8: 2}, 4, 8, 8, [4, 8]),
])
def test_batches_double_until_memory_ends_or_nothing_is_gained(bench, rates, first, most, best,
                                                               tried):
    asked = []

    def rate(batch):
        asked.append(batch)
        return rates[batch]

    assert bench.compare.best_batch(rate, first=first, most=most) == best
    assert asked == tried


@given(peak=st.integers(1, 300), limit=st.integers(1, 300), first=st.integers(1, 64))
def test_the_best_batch_is_the_best_of_those_that_were_tried(bench, peak, limit, first):
    found = {}

    def rate(batch):
        found[batch] = None if batch > limit else 1 / (1 + abs(batch - peak))
        return found[batch]

    best = bench.compare.best_batch(rate, first=first, most=256)
    assert max(found) <= max(first, 256) and best <= limit
    assert found[best] == max(value for value in found.values() if value is not None)


def test_the_config_for_a_gpu_is_whole(bench):
    """The H2O paper's tables, each system within the memory of the GPU that they were made on."""
    found = bench.comparison.load(ROOT / "configs" / "compare_gpu.yaml", models=Path("."))
    assert {each.device_memory for each in found.scenarios} == {16_000_000_000, 80_000_000_000}
    table3 = [(each.model, each.prompt_len, each.gen_len) for each in found.scenarios[:6]]
    assert table3 == [(model, 512, new) for model in ("opt-6.7b", "opt-30b")
                      for new in (32, 512, 1024)]
    assert {"ours", "flexgen", "h2o_fork", "accelerate_offload", "deepspeed_zero"} == {
        system.baseline for system in found.systems.values()}
    latency = found.scenarios[-1]
    assert (latency.batch, latency.best, latency.past_positions) == (24, False, True)
    used = {system for each in found.scenarios for system in each.systems}
    assert used == set(found.systems)


def test_the_config_of_the_repository_is_whole(bench):
    found = bench.comparison.load(ROOT / "configs" / "compare_cpu.yaml", models=Path("."))
    assert [each.name for each in found.scenarios] == [
        "opt-1.3b-512-128", "opt-1.3b-128-512", "opt-6.7b-512-32", "opt-1.3b-memory",
        "smollm2-xsum", "smollm2-step", "smollm2-step-float32", "smollm2-batch-1",
        "smollm2-batch-4", "smollm2-batch-16", "llama-1b-batch-1", "llama-1b-batch-16"]
    first, second, third, memory, real, *_ = found.scenarios
    assert (first.memory, third.memory, memory.memory) == (2_500_000_000, 6_000_000_000, None)
    assert (second.prompt_len, second.gen_len, second.memory) == (128, 512, first.memory)
    assert (memory.batch, memory.best) == (16, False) and real.prompt_len is None
    assert {system.baseline for system in found.systems.values()} == set(bench.baselines.CLASSES)
    assert [name for name, system in found.systems.items() if not system.exact] == [
        "h2o-fork", "h2o", "h2o-4bit", "h2o-4bit-a8", "llama-cpp", "full-4bit", "full-w4a8",
        "h2o-w4a8"]
    beside_llama_cpp = [each for each in found.scenarios if "llama-cpp" in each.systems]
    assert [each.batch for each in beside_llama_cpp] == [1, 4, 16, 1, 16]
    assert {found.systems[name].weight_bits for each in beside_llama_cpp
            for name in each.systems} == {4}


def test_the_config_of_a_mixture_is_whole(bench):
    """The same layers for all, within memory that does not hold them and within all there is."""
    found = bench.comparison.load(ROOT / "configs" / "compare_experts.yaml", models=Path("."))
    assert [(each.batch, each.memory, each.best) for each in found.scenarios] == [
        (1, 3_600_000_000, False), (32, 3_600_000_000, False), (1, None, False),
        (32, None, False)]
    assert {(each.model, each.prompt_len, each.gen_len) for each in found.scenarios} == {
        ("qwen3-30b-a3b-12", 64, 64)}
    for each in found.scenarios:
        repacked = [found.systems[name].options["repack"] for name in each.systems
                    if found.systems[name].baseline == "llama_cpp"]
        assert repacked == [each.memory is None]
    assert {name for each in found.scenarios for name in each.systems} == set(found.systems)


def test_the_config_of_whole_runs_projects_nothing(bench):
    """Each scenario that is projected otherwise, at known batches, beside another system."""
    load = partial(bench.comparison.load, models=Path("."))
    whole = load(ROOT / "configs" / "compare_cpu_full.yaml")
    short = {each.name: each for each in load(ROOT / "configs" / "compare_cpu.yaml").scenarios}
    assert [each.name for each in whole.scenarios] == [
        name for name, each in short.items() if each.cut_gen_len]
    others = {name for name, system in whole.systems.items() if system.baseline != "ours"}
    for each in whole.scenarios:
        also = short[each.name]
        assert (each.model, each.prompt_len, each.gen_len, each.memory) == (
            also.model, also.prompt_len, also.gen_len, also.memory)
        assert not each.cut_gen_len and others.intersection(each.systems)
        assert not each.best or set(each.best_batch) == set(each.systems), "nothing is searched"


def test_the_config_of_recall_has_each_cache_in_as_many_bits(bench):
    found = bench.comparison.load(ROOT / "configs" / "compare_recall.yaml", models=Path("."))
    bits = {name: (system.options["weight_bits"], system.options["cache_bits"])
            for name, system in found.systems.items()}
    assert bits["recall"] == bits["recall-fetched"] == bits["full"] != bits["full-4bit"]
    assert bits["recall-8bit"] == bits["full-8bit"] != bits["full-4bit"] == bits["recall-4bit"]
    assert {name for name, system in found.systems.items() if system.options["recall"]} == {
        "recall", "recall-fetched", "recall-8bit", "recall-4bit"}
    (scenario,) = found.scenarios
    assert set(scenario.systems) == set(found.systems) and not scenario.best


@pytest.mark.parametrize("change, words", [
    ({"system": {"a": {"baseline": "ours"}}}, "`system`"),
    ({"systems": {"a": {}}}, "system a: give its baseline"),
    ({"systems": {"a": {"baseline": "vllm"}}}, "no baseline 'vllm'"),
    ({"systems": {"a": {"baseline": "ours", "cash_share": 1}}}, "unknown option 'cash_share'"),
    ({"systems": {"a": {"baseline": "ours", "cache_share": 2}}}, "cache_share must be at most 1"),
    ({"systems": {"a": {"baseline": "ours", "weight_bits": 3}}}, "system a: --weight-bits must be"),
    ({"systems": {"a": {"baseline": "ours", "cache_share": 0.2, "index_bits": 2}}},
     "system a: --index-bits has no effect: add --recall"),
    ({"systems": {"a": {"baseline": "accelerate_offload", "offload": "moon"}}},
     "offload must be one"),
    ({"systems": {"a": {"baseline": "deepspeed_zero", "offload": "disk"}}}, "offload must be one"),
    ({"systems": {"a": {"baseline": "flexgen", "num_gpu_batches": 0}}}, "num_gpu_batches must be"),
    ({"repeats": 0}, ">= 1"),
    ({"scenarios": {"s": {"model": "opt", "prompt_len": 8}}}, "gen_len"),
    ({"scenarios": {"s": scenario(prompts="x.jsonl")}}, "prompt_len or prompts, one of them"),
    ({"scenarios": {"s": scenario(prompts=3)}}, "prompts"),
    ({"scenarios": {"s": scenario(gen_len=1)}}, ">= 2"),
    ({"scenarios": {"s": scenario(best=False)}}, "nothing to measure"),
    ({"scenarios": {"s": scenario(search_gen_len=9)}}, "search_gen_len must be at most 5"),
    ({"scenarios": {"s": scenario(promt_len=8)}}, "did you mean prompt_len"),
    ({"scenarios": {"s": scenario(memory="lots")}}, "memory takes bytes"),
    ({"scenarios": {"s": scenario(systems=["other"])}}, "systems names 'other', which is none"),
    ({"scenarios": {"s": scenario(cut_gen_len={"other": 2})}}, "cut_gen_len names 'other'"),
    ({"scenarios": {"s": scenario(cut_gen_len={"h2o": 9})}}, "cut_gen_len of h2o must be at most"),
    ({"scenarios": {"s": scenario(best_batch={"other": 2})}}, "best_batch names 'other'"),
    ({"scenarios": {"s": scenario(best_batch={"h2o": 0})}}, "best_batch"),
    ({"scenarios": {"s": scenario(device_memory="lots")}}, "device_memory takes bytes"),
    ({"scenarios": {"s": scenario(past_positions=1)}}, "past_positions"),
    ({"scenarios": {}}, "length >= 1"),
    ({"scenarios": {"s": scenario(name="t")}}, "scenario s: unknown key 'name'"),
])
def test_what_is_wrong_in_a_config_is_said(bench, tmp_path, change, words):
    with pytest.raises(UserError, match=words):
        config_of(bench, tmp_path, {"systems": TWO, "scenarios": {"s": scenario()}} | change)


def test_a_part_of_a_config_can_be_chosen(bench, tmp_path):
    values = {"systems": TWO, "scenarios": {
        "a": scenario(cut_gen_len={"h2o": 2}), "b": scenario(systems=["h2o"])}}
    found = config_of(bench, tmp_path, values, systems=["plain"])
    assert list(found.systems) == ["plain"]
    assert [each.name for each in found.scenarios] == ["a"], "b has none of the systems"
    assert found.scenarios[0].cut_gen_len == {}
    with pytest.raises(UserError, match="--scenarios c is not in the config"):
        config_of(bench, tmp_path, values, scenarios=["c"])


def test_the_command_line_answers_in_one_line(bench, tmp_path, capsys):
    missing = partial(bench.compare.main, ["--config", str(tmp_path / "no.yaml")])
    assert exit_status(missing) == 2
    assert capsys.readouterr().err.startswith("error: cannot read --config")
    config_of(bench, tmp_path, {"systems": TWO, "scenarios": {"s": scenario(model="opt-125m")}})
    no_model = partial(bench.compare.main, [
        "--config", str(tmp_path / "compare.yaml"), "--models", str(tmp_path),
        "--out", str(tmp_path / "out.csv")])
    assert exit_status(no_model) == 2
    assert "make_checkpoint.py --model facebook/opt-125m" in capsys.readouterr().err
    assert not list(tmp_path.glob("out.csv*"))


def row_of(bench, **others) -> dict[str, object]:
    return dict.fromkeys(bench.comparison.COLUMNS) | {"system": "a", "at": "equal", "batch": 4,
                                                "memory_gb": 2.5} | others


def test_a_stopped_run_is_gone_on_with(bench, tmp_path):
    path = tmp_path / "out.csv"
    table = bench.comparison.Table(str(path))
    table.add(row_of(bench, tokens_per_s=1.5))
    with open(f"{path}.partial", "a", encoding="utf-8") as file:
        file.write("torn,")  # as a killed run leaves it
    table = bench.comparison.Table(str(path))
    assert table.find(row_of(bench))["tokens_per_s"] == "1.5"
    assert table.find(row_of(bench, batch=8)) is None
    table.add(row_of(bench, batch=8))
    table.finish()
    assert not Path(f"{path}.partial").exists()
    with open(path, newline="", encoding="utf-8") as file:
        assert [row["batch"] for row in csv.DictReader(file)] == ["4", "8"]


def test_a_finished_file_grows(bench, tmp_path):
    path = tmp_path / "out.csv"
    for batch in (1, 2, 4):
        table = bench.comparison.Table(str(path))
        assert path.exists() == (batch > 1), "nothing moves before there is a row"
        table.add(row_of(bench, batch=batch))
        table.finish()
    assert [row["batch"] for row in bench.comparison.Table(str(path)).rows()] == ["1", "2", "4"]
    bench.comparison.Table(str(path)).finish()
    assert path.exists()


def test_files_that_are_not_its_own_stay_as_they_are(bench, tmp_path):
    path = tmp_path / "out.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has other columns"):
        bench.comparison.Table(str(path))
    assert path.read_text() == "a,b\n1,2\n"
    Path(f"{path}.partial").write_text("")
    with pytest.raises(UserError, match="are there: remove the older one"):
        bench.comparison.Table(str(path))


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
        if batch > answer.get("most", 1 << 20) or len(prompts[0]) > answer.get("longest", 1 << 20):
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


def test_systems_take_turns_and_medians_count(bench, tiny_model, tmp_path, monkeypatch):
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


def test_figures_stay_where_rates_cannot_be_measured_again(bench, tiny_model, tmp_path):
    rates = iter([RATES, {"status": "timed out", "reason": "killed after 9 s"}])
    rows, _ = cells(bench, tiny_model, tmp_path, {"plain": {}, "h2o": {}, "rates": rates},
                    {"batch": 2, "best": False}, repeats=1)
    assert [row["status"] for row in rows] == ["ok", "ok"] and rows[0]["total_over_roofline"]


def test_each_has_its_own_best_batch_and_memory_ends_in_a_row(bench, tiny_model, tmp_path):
    rows, do = cells(bench, tiny_model, tmp_path, {"plain": {"most": 2}, "h2o": {}}, {"most": 8},
                     repeats=1)
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


def test_a_best_batch_that_is_known_is_not_searched(bench, tiny_model, tmp_path):
    rows, do = cells(bench, tiny_model, tmp_path, {"plain": {}, "h2o": {}},
                     {"most": 1, "best_batch": {"h2o": 3}}, repeats=1)
    assert [(row["at"], row["system"], row["batch"]) for row in rows] == [
        ("search", "plain", "1"), ("best", "plain", "1"), ("best", "h2o", "3")]


def test_a_limit_of_a_gpu_needs_one(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = config_of(bench, tmp_path, {"systems": TWO, "scenarios": {
        "s": scenario(device_memory="1GB")}})
    with pytest.raises(UserError, match="no GPU here"):
        bench.compare.check_limits(config)


def test_texts_may_go_past_the_positions_where_a_scenario_says_so(bench, tiny_model, tmp_path):
    (tmp_path / "opt").symlink_to(tiny_model("opt").folder)
    for allowed in (True, False):
        config = config_of(bench, tmp_path, {"systems": TWO, "scenarios": {
            "s": scenario(gen_len=500, past_positions=allowed)}})
        if allowed:
            assert len(bench.comparison.subject_of(config.scenarios[0], tmp_path).prompts) == 256
        else:
            with pytest.raises(UserError, match="positions"):
                bench.comparison.subject_of(config.scenarios[0], tmp_path)


def test_a_search_may_generate_less(bench, tiny_model, tmp_path):
    spec = {"most": 1, "search_gen_len": 3, "cut_gen_len": {"h2o": 2}}
    rows, do = cells(bench, tiny_model, tmp_path, {"plain": {}, "h2o": {}}, spec, repeats=1)
    assert [job[:3] for job in do.jobs] == [("plain", 1, 3), ("h2o", 1, 2), ("plain", 1, 5),
                                            ("h2o", 1, 2)]
    assert [(row["at"], row["cut_gen_len"], row["projected"]) for row in rows] == [
        ("search", "3", "True"), ("search", "2", "True"), ("best", "", "False"),
        ("best", "2", "True")]


def test_steps_of_a_growing_cache_are_those_from_the_middle(bench, tiny_model, tmp_path):
    spec = {"gen_len": 21, "batch": 2, "best": False, "repeats": 1,
            "cut_gen_len": {"plain": 5, "h2o": 5}}
    (plain, h2o), do = cells(bench, tiny_model, tmp_path, {"plain": {}, "h2o": {}}, spec)
    assert do.jobs == [("plain", 2, 5, None), ("plain", 2, 5, None), ("h2o", 2, 5, None)]
    assert do.lengths == [(8, 21), (16, 13), (8, 21)], "half of the 16 left out come before"
    assert (plain["steps_from"], h2o["steps_from"]) == ("16", "8")
    assert (plain["decode_step_s"], h2o["decode_step_s"]) == ("1", "0.5")
    assert plain["prefill_s"] == h2o["prefill_s"] == "1", "that of the prompt as it is"
    assert float(plain["total_s"]) == 1 + 20 * 1


def test_the_first_steps_stand_where_memory_holds_no_longer_prompts(bench, tiny_model, tmp_path):
    spec = {"gen_len": 21, "batch": 2, "best": False, "repeats": 2, "cut_gen_len": {"plain": 5}}
    answers = {"plain": {"longest": 8}, "h2o": {}}
    (plain, _), do = cells(bench, tiny_model, tmp_path, answers, spec)
    assert [job[0] for job in do.jobs] == ["plain", "plain", "h2o"] * 2
    assert (plain["status"], plain["steps_from"], plain["decode_step_s"]) == ("ok", "8", "0.5")


@pytest.mark.parametrize("answer", [
    {"status": "refused", "reason": "no CUDA"},
    {"status": "out of memory in loading", "reason": "killed"},
])
def test_who_can_never_run_has_a_row_and_no_figures(bench, tiny_model, tmp_path, answer):
    rows, do = cells(bench, tiny_model, tmp_path, {"plain": answer, "h2o": {}},
                     {"batch": 2, "most": 2, "first_batch": 2})
    mine = [row for row in rows if row["system"] == "plain"]
    assert [(row["at"], row["batch"]) for row in mine] == [("equal", "2"), ("search", "2"),
                                                           ("best", "1")]
    assert all((row["status"], row["reason"], row["tokens_per_s"]) == (*answer.values(), "")
               for row in mine)
    assert sum(job[0] == "plain" for job in do.jobs) == 1, "once for all of them"
    assert [row["equal_tokens"] for row in rows if row["system"] == "h2o"] == [""] * 3


def test_equal_tokens_are_counted_where_both_have_some(bench):
    share = bench.compare.equal_share
    assert share([[1, 2, 3], [4, 5, 6]], [[1, 9]]) == 0.5
    assert share(None, [[1]]) is None


def test_prompts_are_the_same_at_every_batch(bench, tmp_path):
    few, more = (bench.comparison.random_prompts(count, 4, 50) for count in (2, 5))
    assert more[:2] == few and all(5 <= token < 50 for prompt in more for token in prompt)
    path = tmp_path / "p.jsonl"
    path.write_text('{"article": "one"}\n')
    with pytest.raises(UserError, match="has 1 lines and 2 are needed"):
        bench.comparison.text_prompts(str(path), "article", tmp_path, 2)


def test_the_command_line_measures_and_goes_on(bench, tiny_model, tmp_path, monkeypatch, capsys):
    config_of(bench, tmp_path, {"systems": TWO, "threads": 1, "repeats": 1, "scenarios": {
        "s": scenario(model=str(tiny_model("opt").folder), batch=2, best=False, timeout=9)}})
    told = []
    answers = {"plain": {}, "h2o": {"status": "refused", "reason": "not today"}}

    def run_job(job, *, memory, **others):
        told.append(others)
        return do(job, memory)

    monkeypatch.setattr(bench.compare, "run_job", run_job)
    argv = ["--config", str(tmp_path / "compare.yaml"), "--out", str(tmp_path / "out.csv"),
            "--scratch", str(tmp_path)]
    for count in (2, 0):
        do = Fake(answers)
        bench.compare.main(argv)
        assert len(do.jobs) == count
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:4] for line in lines[1:]] == [["s", "equal", "2", "plain"],
                                                            ["s", "equal", "2", "h2o"]]
        assert lines[2].split()[4] == "refused"
    assert told[0] == {"threads": 1, "timeout": 3600, "scratch": tmp_path}, "of rates"
    assert {"threads": 1, "timeout": 9, "scratch": tmp_path} in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.yaml", "out.csv"]


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
