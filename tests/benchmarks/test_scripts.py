"""Scripts of benchmarks/ run on tiny models and write their rows, and check flags first."""

import json
import subprocess
import sys

import pytest
from helpers.batch_jobs import write_lines
from helpers.programs import BENCHMARKS, ROOT, benchmark_modules, program
from helpers.read_back import read_csv
from helpers.subprocesses import environment

from flexgen_h2o.cli.entry_point import exit_status

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def load(monkeypatch):
    """Return a function from a script's name to its module."""
    for folder in (BENCHMARKS, BENCHMARKS / "studies"):
        monkeypatch.syspath_prepend(str(folder))
    return lambda name: program(f"benchmarks/{name}.py")


@pytest.fixture
def articles(tmp_path) -> str:
    """Three articles of 8, 30 and 41 words."""
    return write_lines(tmp_path / "in.jsonl", [
        {"article": " ".join(f"w{place * length % 100 + 3}" for place in range(length))}
        for length in (8, 30, 41)])


def test_quality(load, articles, words_model, tmp_path):
    assert load("studies/quality").main([
        "--input-path", articles, "--articles", "2", "--min-tokens", "10", "--max-tokens", "30",
        "--gen-len", "3", "--budgets", "50", "--csv", str(tmp_path / "out.csv"), "--model",
        words_model, "--device", "cpu", "--only", "h2o", "window"]) == 0
    full, *rows = read_csv(tmp_path / "out.csv")
    assert (full["policy"], float(full["delta_nats"]), full["greedy_equal_share"]) == ("full", 0,
                                                                                       "1")
    assert {"h2o", "window"} == {row["policy"] for row in rows}


def test_stream_quality(load, words_model, tmp_path, capsys):
    text = " ".join(f"w{number * 7 % 100 + 3}" for number in range(100))
    articles, out = write_lines(tmp_path / "in.jsonl", [{"article": text}] * 3), tmp_path / "o.csv"
    main = load("studies/stream_quality").main
    assert main(["--input-path", articles, "--tokens", "280", "--piece", "40",
                 "--num-window-length", "16", "--policies", "h2o", "window", "full", "--csv",
                 str(out), "--model", words_model, "--device", "cpu"]) == 0
    assert len(read_csv(out)) == 3 * 7
    printed = capsys.readouterr()
    assert main(["--from-csv", str(out)]) == 0 and capsys.readouterr() == printed


class WordTokenizer:
    """A token for each word or digit, numbered as they come."""

    def __init__(self):
        self.words: dict[str, int] = {}

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        pieces = [piece for word in text.split()
                  for piece in (word.rstrip(".") if word[0].isdigit() else [word])]
        return {"input_ids": [self.words.setdefault(piece, 1 + len(self.words) % 100)
                              for piece in pieces]}


def test_needles(load, tiny_model, tmp_path, monkeypatch):
    study, path = load("studies/needles"), tmp_path / "rows.csv"
    articles = write_lines(tmp_path / "in.jsonl", [{"article": "word " * 300}])
    monkeypatch.setattr(study.AutoTokenizer, "from_pretrained", lambda folder: WordTokenizer())
    options = study.parse_args(["--model", str(tiny_model("llama").folder), "--input-path",
                                articles, "--tokens", "100", "--texts", "1", "--asked", "later",
                                "--csv", str(path)])
    study.run(options)
    rows = read_csv(path)
    assert [row["cache"] for row in rows] == ["full", *study.CACHES]
    assert len({row["answer_nats"] for row in rows}) == len(rows)
    study.run(options)
    assert read_csv(path) == rows, "measured once"


def test_check_quality_fails_on_an_exceeded_bound(articles, words_model, tmp_path, monkeypatch,
                                                  capsys):
    with benchmark_modules("check_quality") as modules:
        gate = modules.check_quality
        for name, value in {"SCORED": 6, "LENGTHS": {"short": 16, "long": 40}, "LONG_TEXTS": 2,
                            "TOP": 20, "GENERATED": 3}.items():
            monkeypatch.setattr(gate, name, value)
        monkeypatch.setattr(gate, "fetched", lambda name, into: words_model)
        strict = gate.Mode("cache-4", {"cache_bits": 4}, {"full": {gate.SMOLLM2: 0.5}})
        for modes, status, held in ((gate.modes(), 0, ["", "yes", "", "", ""]),
                                    ([gate.Mode("full", long=True), strict], 2, ["", "no", ""])):
            monkeypatch.setattr(gate, "modes", lambda modes=modes: modes)
            names = ["weights-8", "h2o-20"] if status == 0 else ["cache-4"]
            monkeypatch.setattr(sys, "argv", [
                "check_quality", "--models", gate.SMOLLM2, "--input-path", articles, "--articles",
                "2", "--csv", str(tmp_path / "rows.csv"), "--modes", *names])
            assert exit_status(gate.main) == status
            assert [row["held"] for row in read_csv(tmp_path / "rows.csv")] == held
    assert "cache-4" in capsys.readouterr().err


def test_plots_of_the_kept_results(tmp_path, monkeypatch):
    monkeypatch.chdir(RESULTS / "quality")
    with benchmark_modules("plots") as modules:
        modules.plots.main(["quality", "--csv", "quality.csv", "quality_options.csv", "--out",
                            str(tmp_path / "figure.svg")])
    assert (tmp_path / "figure.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.full
def test_listed_gpu_kernels_are_those_that_compile(tmp_path):
    """In a subprocess, because this process interprets Triton kernels."""
    pytest.importorskip("triton")
    path, text = tmp_path / "gpu_static.csv", (RESULTS / "gpu_static.csv").read_text()
    path.write_text(text.replace(text.splitlines(keepends=True)[1], ""))
    for listed, sample, status in ((RESULTS / "gpu_static.csv", "9", 0), (path, "0", 1)):
        done = subprocess.run(
            [sys.executable, "benchmarks/studies/gpu_static.py", "--check", "--csv", str(listed),
             "--sample", sample], cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr


@pytest.mark.full
def test_lm_eval_budgets(load, words_model, tmp_path, monkeypatch):
    bench = load("studies/lm_eval_budgets")
    for name in ("HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")  # so that what the script sets is restored
    articles = tmp_path / "in.jsonl"
    articles.write_text("".join(json.dumps({
        "article": " ".join(f"w{3 + (number * 7 + i) % 100}" for i in range(30)),
        "summary_gt": " ".join(f"w{3 + (number * 5 + i) % 100}" for i in range(6))}) + "\n"
        for number in range(10)))
    bench.run(bench.parse_args([
        "--model", words_model, "--dtype", "float32", "--input-path", str(articles), "--items",
        "6", "--words", "20", "--budgets", "20", "--shots", "0", "--evict-prompt", "true", "false",
        "--prompt-chunk", "5", "--batch-size", "8", "--csv", str(tmp_path / "out.csv")]))
    rows = read_csv(tmp_path / "out.csv")
    assert {row["policy"] for row in rows} == {"full", "h2o", "window", "recall"}
