"""Expert counts: written by a run, read by a plan, validated."""

import json
from pathlib import Path

import pytest
from helpers.error_cases import command_refused, refused
from helpers.planning_cases import CPU

from flexgen_h2o.commands import bench, generate
from flexgen_h2o.config.layers import ExpertChoices
from flexgen_h2o.engine.expert_counts import read_expert_counts
from flexgen_h2o.planning.hardware import save_hardware

SHORT = ("--prompt-len", "6", "--gen-len", "4", "--gpu-batch-size", "2", "--dtype", "float32",
         "--device", "cpu")
ON_DISK = ("--percent", "100", "0", "100", "0", "--expert-percent", "30", "0", "70",
           "--offload-dir", "offload")


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))


def test_expert_counts_are_written_and_read_back(tiny_model, capfd):
    model = ("--model", str(tiny_model("qwen3_moe").folder))
    argv = [*model, *SHORT, "--no-log", "--verbose", "0"]
    assert generate.main([*argv, "--count-experts", "c.json", "--warm-up"]) == 0
    record = json.loads(Path("c.json").read_text())
    assert (record["model"], record["per_token"]) == (model[1], 3)
    assert (record["texts"], record["text_tokens"]) == (2 * 3, 2 * 6 * 3)
    assert [sum(layer) for layer in record["counts"]] == [3 * 2 * (6 + 3)] * 3, "without warm-up"
    assert read_expert_counts("c.json") == ExpertChoices(
        tuple(map(tuple, record["counts"])), 3, 6, 36, record["text_experts"], "c.json")
    for flags in (("--output", "0.jsonl"),
                  (*ON_DISK, "--expert-counts", "c.json", "--output", "1.jsonl")):
        assert generate.main([*argv, *flags]) == 0
    assert Path("0.jsonl").read_text() == Path("1.jsonl").read_text()
    capfd.readouterr()
    save_hardware(CPU, "cpu.yaml")
    assert generate.main([*model, "--prompt-len", "9", "--percent", "auto", "--plan-only",
                          "--hardware", "cpu.yaml", "--expert-counts", "c.json"]) == 0
    assert "--expert-counts c.json" in capfd.readouterr().out


def test_bench_counts_measured_calls(tiny_model, capfd):
    model = ("--model", str(tiny_model("qwen3_moe").folder))
    assert bench.main([*model, *SHORT, "--repeats", "2", "--count-experts", "c.json"]) == 0
    counts = json.loads(Path("c.json").read_text())["counts"]
    assert [sum(layer) for layer in counts] == [3 * 2 * (6 + 3)] * 3, "one repeat"


@pytest.mark.parametrize("command", [generate, bench])
def test_dense_models_have_no_experts_to_count(command, tiny_model, capfd):
    command_refused(command.main, capfd, [
        "--model", str(tiny_model("llama").folder), *SHORT, "--count-experts", "c.json",
        *(["--no-log"] if command is generate else [])], "leave --count-experts out")
    assert not Path("c.json").exists()


@pytest.mark.parametrize(("argv", "words"), [
    (("--count-experts", "c.json", "--plan-only"), "--plan-only"),
    (("--count-experts", "c.json", "--pipeline-parallel", "2"), "leave --pipeline-parallel out"),
    (("--count-experts", "c.json", "--expert-counts", "c.json"), "name the same file"),
    (("--count-experts", "none/c.json", "--no-log"), "cannot write --count-experts"),
    (("--expert-counts", "none.json"), "cannot read --expert-counts none.json"),
    (("--expert-counts", "c.json"), "on experts that are all on one tier")])
def test_invalid_count_flags(argv, words, capfd):
    Path("c.json").write_text(counts_file())
    command_refused(generate.main, capfd, ["--model", "m", *argv], words)


def counts_file(**values) -> str:
    """The text of a file of counts, some values of which are others."""
    return json.dumps({"model": "m", "per_token": 1, "texts": 2, "text_tokens": 6,
                       "text_experts": 3, "counts": [[], [1, 2]]} | values)


@pytest.mark.parametrize(("text", "words"), [
    ("", "is empty"), ("{", "not JSON"), ('{"model": "m", "per_token": 1}', "texts"),
    (counts_file(per_token=3), "a token selects"),
    (counts_file(counts=[[0, 0], [1, 2]]), "layers differ"),
    (counts_file(counts=[[0, 0]]), "no token"), (counts_file(texts=7), "contradict"),
    (counts_file(text_experts=5), "contradict")])
def test_invalid_count_files(text, words):
    Path("c.json").write_text(text)
    refused(lambda: read_expert_counts("c.json"), "--expert-counts c.json", words)
