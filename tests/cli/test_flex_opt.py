"""The command line with a fake engine: flags, prompts, files, exit statuses."""

from __future__ import annotations

import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.error_cases import command_refused
from helpers.fake_llm import run_stats

from flexgen_h2o.cli import launch, results
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands import generate
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.errors import UserError


class FakeLLM:
    """Continues each prompt with its own first words; remembers what it was asked."""

    made: list[FakeLLM] = []
    fail: BaseException | None = None
    vocab_size = 50
    device = torch.device("cpu")

    def __init__(self, model, **options):
        self.model, self.options, self.closed = model, options, False
        FakeLLM.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.closed = True

    def generate(self, prompts, **options):
        self.prompts, self.sampling = prompts, options
        if FakeLLM.fail is not None:
            raise FakeLLM.fail
        self.options["trace"].add("layer 0", "compute", 1.0, 2.0)
        self.options["trace"].add("prefill", "phases", 1.0, 2.25)
        return [self._output(prompt) for prompt in prompts]

    def _output(self, prompt):
        text = isinstance(prompt, str)
        return types.SimpleNamespace(
            prompt=prompt if text else None, prompt_token_ids=[1, 2, 3], token_ids=[4, 5],
            text=f"continuation of {prompt[:9]}" if text else None, finish_reason="length",
            content=None)

    @property
    def stats(self):
        return run_stats(
            model=self.model, num_prompts=len(self.prompts), prompt_tokens=3 * len(self.prompts),
            generated_tokens=2 * len(self.prompts), gpu_batch_size=4, prefill_seconds=1.0,
            decode_seconds=1.0, step_seconds=[1.0])


@pytest.fixture(autouse=True)
def llm(monkeypatch, tmp_path):
    """Replace the engine, and run in an empty folder."""
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(FakeLLM, "fail", None)
    module = types.ModuleType("flexgen_h2o.llm")
    module.LLM = FakeLLM
    monkeypatch.setitem(sys.modules, "flexgen_h2o.llm", module)
    monkeypatch.chdir(tmp_path)
    return FakeLLM


def refused(capsys, *argv: str) -> str:
    """The one line on stderr of a command that exits with 2 and loads no model."""
    message = command_refused(generate.main, capsys, argv)
    assert not FakeLLM.made
    return message


# Flags


@pytest.mark.parametrize(("argv", "expected"), [
    (["--overlap", "false"], {"overlap": False}),
    (["--overlap"], {"overlap": True}),
    (["--pin-weight", "0", "--no-log"], {"pin_weight": False, "no_log": True}),
    (["--percent", "0", "12.5", "100", "0"], {"percent": (0, 12.5, 100, 0, 100, 0)}),
    (["--prompt", "a", "--prompt", "b c"], {"prompt": ("a", "b c")}),
    (["--verbose"], {"verbose": 3}),
    (["--verbose", "0"], {"verbose": 0}),
    (["--do-sample", "--top-p", "0.9", "--min-p", "0.1"],
     {"do_sample": True, "top_p": 0.9, "min_p": 0.1}),
    (["--hh-ratio", ".1", "0.25", "1", "--recent-ratio", "0.5", "--hh-all", "false"],
     {"hh_ratio": (0.1, 0.25, 1.0), "recent_ratio": 0.5, "hh_all": False}),
    (["--model", "opt-125m", "--path", "_DUMMY_", "--device", "cuda:1", "--dtype", "float16"],
     {"model": "opt-125m", "path": "_DUMMY_", "device": "cuda:1", "dtype": "float16"}),
])
def test_flags(argv, expected):
    config = generate.parse_args(argv)
    assert {name: getattr(config, name) for name in expected} == expected


def test_flags_have_other_spellings(tmp_path):
    """Underscores, names of the H2O repository, and names of columns; also in YAML."""
    names = ["--model_name", "m", "--batch-size=2", "--gen_len", "3", "--recall", "--hh_ratio=0.1",
             "--percent", "100", "0", "0", "0", "--fetch-chosen", "--fast_set", "0.5"]
    config = generate.parse_args(names)
    assert (config.model, config.gpu_batch_size, config.gen_len) == ("m", 2, 3)
    assert config.selective_fetch and config.hot_set == 0.5
    file = tmp_path / "c.yaml"
    file.write_text("hh_ratio: 0.1\nrecall: true\npercent: 100 0 0 0\nfetch_chosen: true\n"
                    "fast_set: 0.4\n")
    saved = generate.parse_args(["--config", str(file), "--hot-set", "0.6"])
    assert saved.selective_fetch and saved.hot_set == 0.6


@pytest.mark.parametrize(("argv", "match"), [
    (["--gen-len", "ten"], "expected an integer"),
    (["--gen-lem", "3"], r"unknown flag --gen-lem: did you mean --gen-len\?"),
    (["--gen_lem=3"], r"unknown flag --gen_lem: did you mean --gen-len\?"),
    (["--max-new-tokens", "3"], r"unknown flag --max-new-tokens: did you mean --gen-len\?"),
    (["--xyzzy"], "unknown flag --xyzzy: see --help for the names"),
    (["stray"], "'stray' belongs to no flag"),
    (["--prompt", "a\udcff"], r"--prompt is not text in UTF-8: character 1 is '\\udcff'"),
    (["--prompt", "a", "--prompt", "\ud800"], "--prompt 2 is not text in UTF-8"),
    (["--overlap", "maybe"], "expected true or false"),
    (["--percent"], "expected at least one argument"),
    (["--weight-bits", "four"], "--weight-bits must be one of auto, 16, 12, 8, 4"),
    (["--compress-weight", "--weight-bits", "auto"], "auto contradict"),
    (["--hh-ratio", "none.yaml"], "cannot read --hh-ratio none.yaml: No such file"),
    (["--key-bits", "8"], "key_bits 8 with value_bits 16 is not supported: use 16 for both"),
    (["--key-bits", "8", "--value-bits", "4", "--attn-sparsity", "0.5"],
     "attn_sparsity reads keys without their values"),
    (["--num-prompts", "3", "--prompt", "a"], "--num-prompts counts synthetic prompts"),
    (["--config", "missing.yaml"], "No such file"),
])
def test_bad_flags(capsys, argv, match):
    assert re.search(match, refused(capsys, *argv))


def test_flags_override_the_config_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: opt-125m\ngen_len: 7\npercent: 0 100 100 0\nprompts: a.txt\n")
    config = generate.parse_args(["--config", str(path), "--gen-len", "9", "--prompt", "x"])
    assert (config.model, config.gen_len, config.prompts) == ("opt-125m", 9, None)
    assert config.percent == (0, 100, 100, 0, 100, 0)
    path.write_text("prompt_len: 64\nnum_prompts: 3\n")
    assert generate.parse_args(["--config", str(path), "--prompt", "x"]) == RunConfig(
        config=str(path), prompt=("x",))
    path.write_text("log_file: l.log\n")
    assert generate.parse_args(["--config", str(path), "--no-log"]) == RunConfig(
        config=str(path), no_log=True)
    path.write_text("no_log: true\n")
    assert generate.parse_args(["--config", str(path), "--log-file", "l.log"]) == RunConfig(
        config=str(path), log_file="l.log")


def test_ratios_of_layers_from_files(tmp_path):
    (tmp_path / "ratios.yaml").write_text("[0.1, 0.2, 0.3]")
    (tmp_path / "c.yaml").write_text("hh_ratio: ratios.yaml\nrecent_ratio: [0.3, 0.2, 0.1]\n")
    config = generate.parse_args(["--config", "c.yaml", "--recent-ratio", "0.5"])
    assert config.h2o() == H2OConfig(heavy_ratio=(0.1, 0.2, 0.3), recent_ratio=0.5)


# Prompts


@pytest.mark.parametrize(("name", "content", "match"), [
    ("p.txt", None, "No such file"),
    ("p.txt", b"", "no prompts"),
    ("p.txt", b"caf\xe9\n", "not UTF-8"),
    ("p.jsonl", b'{"prompt": "a"}\nnot json\n', "line 2 is not JSON"),
    ("p.jsonl", b'{"prompt": "a"}\n\n{"text": "b"}\n', "line 3 has no text"),
    ("p.jsonl", b'["prompt"]\n', "line 1 has no text"),
    ("p.jsonl", b'{"prompt": 5}\n', "line 1 has no text"),
    ("p.jsonl", b'{"prompt": " "}\n', "line 1 has no text"),
    ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\\ud800 hi"}\n', r"line 2 is not text .*'\\ud800'"),
    ("p.txt", b"a\n\xed\xa0\x80\n", "not UTF-8"),
    ("p.csv", b"a\n", ".txt or .jsonl"),
])
def test_bad_prompt_files(capsys, tmp_path, name, content, match):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert re.search(match, refused(capsys, "--prompts", name))


def test_prompt_files(tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufefffirst\r\n\n  second \x85 still\n".encode())
    assert launch.read_prompts("p.txt") == ["first", "  second \x85 still"]
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\\nb", "id": 1}\n\n{"prompt": "é\u2028"}\n')
    assert launch.read_prompts("p.jsonl") == ["a\nb", "é\u2028"]


def test_synthetic_prompts_are_seeded_and_in_range(llm):
    config = RunConfig(prompt_len=5, gpu_batch_size=4, num_gpu_batches=2, num_prompts=6, seed=1)
    prompts = launch.synthetic_prompts(config, 11)
    assert len(prompts) == 6 and all(len(ids) == 5 for ids in prompts)
    assert all(0 <= token < 11 for ids in prompts for token in ids)
    assert prompts == launch.synthetic_prompts(config, 11)
    assert prompts != launch.synthetic_prompts(replace(config, seed=2), 11)
    load = launch.workload(config, ())
    assert (load.gpu_batch_size, load.num_gpu_batches) == (4, 2)
    load = launch.workload(replace(config, num_prompts=3), ())
    assert (load.gpu_batch_size, load.num_gpu_batches) == (3, 1)


def test_workload_estimates_text():
    config = RunConfig(prompt=("a" * 30, "bb"), gen_len=7, gpu_batch_size=4, num_gpu_batches=3)
    load = launch.workload(config, config.prompt)
    assert (load.prompt_len, load.gen_len) == (11, 7)
    assert (load.gpu_batch_size, load.num_gpu_batches) == (2, 1)
    assert launch.workload(RunConfig(), ()) == Workload(512, 32, 4, 1)


# A run


def test_a_run_prints_texts_and_the_table(capsys, llm):
    argv = ["--model", "m", "--prompt", "one  two\nthree", "--prompt", "four", "--no-log",
            "--percent", "0", "100", "100", "0", "--gen-len", "2", "--offload-dir", "/tmp/x"]
    assert generate.main(argv) == 0
    out = capsys.readouterr().out
    assert "[0] one two three" in out and "continuation of four" in out
    assert "total throughput" in out and out.index("continuation") < out.index("total throughput")
    made = llm.made[0]
    assert made.closed and made.options["policy"].weights.cpu == 100
    assert made.options["offload_dir"] == "/tmp/x" and not made.options["trace"].enabled
    assert made.options["workload"].gpu_batch_size == 2
    assert made.prompts == ["one  two\nthree", "four"]
    assert made.sampling["max_new_tokens"] == 2 and made.sampling["eos_token_id"] is None
    assert made.sampling["cut_gen_len"] is None
    assert list(Path().iterdir()) == []


def test_without_prompts_it_measures_random_ones(capsys, llm):
    assert generate.main(["--prompt-len", "6", "--no-log", "--gen-len", "4", "--cut-gen-len",
                          "2"]) == 0
    out = capsys.readouterr().out
    assert "[0]" in out and "[3]" in out and "[1]" not in out
    made = llm.made[0]
    assert len(made.prompts) == 4 and len(made.prompts[0]) == 6
    assert made.sampling["eos_token_id"] == -1 and made.sampling["cut_gen_len"] == 2


@pytest.mark.parametrize(("device", "flags", "tokens"), [
    ("cpu", (), 2), ("cpu", ("--gen-len", "1"), 1), ("cuda", (), 32),
    ("cuda", ("--cut-gen-len", "9"), 9),  # room for more would be other kernels
])
def test_a_warm_up_comes_first_and_leaves_nothing(llm, monkeypatch, device, flags, tokens):
    asked, work = [], llm.generate
    monkeypatch.setattr(llm, "device", torch.device(device))

    def told(self, prompts, **options):
        asked.append((len(prompts), options.get("max_new_tokens")))
        return work(self, prompts, **options)

    monkeypatch.setattr(llm, "generate", told)
    assert generate.main(["--warm-up", "--num-prompts", "5", "--gpu-batch-size", "2", "--no-log",
                          "--trace", "t.json", "--verbose", "0", *flags]) == 0
    assert asked == [(2, tokens), (5, 1 if "--gen-len" in flags else 32)]
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert sum(event["name"] == "prefill" for event in events) == 1, "of the second call alone"


@pytest.mark.parametrize(("verbose", "texts", "figures"), [
    ("0", False, False), ("1", False, True), ("2", True, True), ("3", True, True),
])
def test_verbose(capsys, llm, verbose, texts, figures):
    assert generate.main(["--prompt", "a", "--no-log", "--verbose", verbose]) == 0
    out = capsys.readouterr().out
    assert ("continuation" in out, "throughput" in out) == (texts, figures)
    assert llm.made[0].options["verbose"] == (verbose == "3")
    assert llm.made[0].options["progress"] == (False if verbose == "0" else None)


@pytest.mark.parametrize(("verbose", "shown"), [("0", False), ("1", True)])
def test_the_breakdown_follows_the_table_and_goes_into_the_log(capsys, llm, verbose, shown):
    argv = ["--prompt", "a", "--log-file", "l.log", "--debug-mode", "breakdown"]
    assert generate.main([*argv, "--verbose", verbose]) == 0
    assert llm.made[0].options["trace"].enabled
    out, log = capsys.readouterr().out, Path("l.log").read_text()
    assert ("bound by: prefill compute (80.0 %)" in out) == shown
    assert log.index("total throughput") < log.index("prefill, s") < log.index("bound by")
    assert out in ("", "".join(log.splitlines(keepends=True)[1:-1]))


@pytest.mark.parametrize(("argv", "suffix"), [
    (["--hh-ratio", "1"], ""),
    (["--hh-ratio", "0.1", "--recent-ratio", "0.25", "--eviction", "window", "--cache-bits", "8"],
     "-window-hh0.1-recent0.25-kv8"),
    (["--hh-ratio", "0.1", "0.2", "--score", "mean"], "-h2o-hh-by-layer-mean"),
    (["--num-window-length", "64", "--eviction", "sink-window", "--hh-all", "false",
      "--enable-position-rolling"], "-sink-window-window64-sinks4-rolling-prompt-only"),
    (["--hh-ratio", "0.1", "--score", "decay", "--score-decay", "0.9"], "-h2o-hh0.1-decay0.9"),
    (["--key-bits", "8", "--value-bits", "4"], "-k8v4"),
    (["--attn-sparsity", "0.1", "--cache-bits", "8"], "-sparse0.1-kv8"),
    (["--weight-bits", "8", "--hh-ratio", "0.1", "--cache-bits", "4"], "-w8-h2o-hh0.1-kv4"),
    (["--hh-ratio", "0.1", "--prefill-chunk", "64", "--evict-while-prefilling"],
     "-h2o-hh0.1-chunk64"),
    (["--hh-ratio", "0.1", "--recall", "--percent", "100", "0", "0", "0", "100", "0",
      "--fetch-chosen", "--fast-set", "0.6"], "-recall0.1-index4-fetch-chosen-fast0.6"),
])
def test_the_log_is_named_after_weights_and_cache(argv, suffix):
    files = results.result_files(generate.parse_args(argv))
    assert set(files) == {"log_file"}
    shares = "100-0-0-0" if "--fetch-chosen" in argv else "100-0-100-0"
    assert files["log_file"] == (f"flexgen_h2o-opt-6.7b-gbs4-ngbs1-prompt512-gen32-percent-{shares}"
                                 f"-100-0{suffix}.log")


@pytest.mark.parametrize("flag", ["--output", "--csv", "--trace", "--log-file"])
def test_results_that_cannot_be_written_show_before_loading(capsys, tmp_path, flag):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert flag in refused(capsys, flag, "none/x")
    assert "not a regular file" in refused(capsys, flag, "folder")
    assert "not a regular file" in refused(capsys, flag, "/dev/null")
    assert flag in refused(capsys, flag, "file/x")
    if flag == "--csv":
        (tmp_path / "file").write_text("date,speed\n")
        assert "other columns" in refused(capsys, "--csv", "file", "--no-log")
    # A file grows under a longer name, until it is whole.
    assert "File name too long" in refused(capsys, flag, "x" * 240)
    assert {p.name for p in tmp_path.iterdir()} == {"folder", "file"}


def test_user_errors_of_the_engine_are_one_line(capsys, llm, tmp_path):
    llm.fail = UserError("the disk\nis full")
    assert generate.main(["--prompt", "a", "--output", "o.jsonl"]) == 2
    assert capsys.readouterr().err == "error: the disk is full\n"
    assert llm.made[0].closed and list(tmp_path.iterdir()) == []


def test_a_result_that_fails_late_is_one_line(capsys, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results, "append_csv", full)
    assert generate.main(["--prompt", "a", "--csv", "r.csv", "--no-log"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: cannot write --csv r.csv: No space left on device\n"
    assert "total throughput" in captured.out, "what was measured is not lost"
    # Nor is what other files take; each that fails is told.
    monkeypatch.setattr(results, "write_outputs", full)
    files = [word for name in ("output", "csv", "trace") for word in (f"--{name}", name)]
    assert generate.main(["--prompt", "a", *files, "--log-file", "log"]) == 2
    assert capsys.readouterr().err == (
        "error: cannot write --output output: No space left on device; "
        "cannot write --csv csv: No space left on device\n")
    assert {p.name for p in tmp_path.iterdir()} == {"trace", "log", "log.config.yaml"}


# The files that ship


@pytest.mark.parametrize("name", ["demo", "opt30b_t4"])
def test_shipped_configs_are_valid(name, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    config = generate.parse_args(["--config", f"configs/{name}.yaml"])
    if config.prompts:
        assert len(launch.read_prompts(config.prompts)) == 3
