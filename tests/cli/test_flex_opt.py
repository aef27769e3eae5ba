"""The command line with a fake engine: flags, prompts, files, exit statuses."""

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import fake_llm
from helpers.error_cases import command_refused

from flexgen_h2o.cli import launch, results
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands import generate
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.errors import UserError
from flexgen_h2o.outputs import Output


class FakeLLM(fake_llm.FakeLLM):
    """Continues each prompt with its first words, or raises `error`."""

    error: BaseException | None = None
    vocab_size = 50
    device = torch.device("cpu")

    def __init__(self, model, **options):
        self.model, self.options, self.calls, self.closed = model, options, [], False
        self.opened.append(self)

    def __exit__(self, *exception):
        self.closed = True

    def generate(self, prompts, **options):
        self.calls.append((prompts, options))
        if FakeLLM.error is not None:
            raise FakeLLM.error
        self.options["trace"].add("layer 0", "compute", 1.0, 2.0)
        self.options["trace"].add("prefill", "phases", 1.0, 2.25)
        return [Output(prompt, [1, 2, 3], [4, 5], f"continuation of {prompt[:9]}", "length")
                if isinstance(prompt, str) else Output(None, [1, 2, 3], [4, 5], None, "length")
                for prompt in prompts]

    @property
    def stats(self):
        count = len(self.calls[-1][0])
        return fake_llm.run_stats(model=self.model, num_prompts=count, prompt_tokens=3 * count,
                                  gpu_batch_size=4, generated_tokens=2 * count, prefill_seconds=1.0,
                                  decode_seconds=1.0, step_seconds=[1.0])


@pytest.fixture(autouse=True)
def llm(monkeypatch, tmp_path):
    """Replace the engine, and run in an empty folder."""
    module = types.ModuleType("flexgen_h2o.llm")
    module.LLM = FakeLLM
    monkeypatch.setitem(sys.modules, "flexgen_h2o.llm", module)
    monkeypatch.setattr(FakeLLM, "opened", [])
    monkeypatch.setattr(FakeLLM, "error", None)
    monkeypatch.chdir(tmp_path)
    return FakeLLM


def refused(capsys, *argv: str) -> str:
    """The one line on stderr of a command that exits with 2 and loads no model."""
    message = command_refused(generate.main, capsys, argv)
    assert not FakeLLM.opened
    return message


# Flags


@pytest.mark.parametrize(("argv", "expected"), [
    (["--overlap", "false"], {"overlap": False}), (["--overlap"], {"overlap": True}),
    (["--pin-weight", "0", "--no-log"], {"pin_weight": False, "no_log": True}),
    (["--percent", "0", "12.5", "100", "0"], {"percent": (0, 12.5, 100, 0, 100, 0)}),
    (["--prompt", "a", "--prompt", "b c"], {"prompt": ("a", "b c")}),
    (["--verbose"], {"verbose": 3}), (["--verbose", "0"], {"verbose": 0}),
    (["--do-sample", "--top-p", "0.9", "--min-p", "0.1"],
     {"do_sample": True, "top_p": 0.9, "min_p": 0.1}),
    (["--hh-ratio", ".1", "0.25", "1", "--recent-ratio", "0.5", "--hh-all", "false"],
     {"hh_ratio": (0.1, 0.25, 1.0), "recent_ratio": 0.5, "hh_all": False}),
    (["--model", "opt-125m", "--path", "_DUMMY_", "--device", "cuda:1", "--dtype", "float16"],
     {"model": "opt-125m", "path": "_DUMMY_", "device": "cuda:1", "dtype": "float16"})])
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


@pytest.mark.parametrize(("argv", "words"), [
    (["--gen-len", "ten"], "expected an integer"),
    (["--gen-lem", "3"], "--gen-lem: did you mean --gen-len?"),
    (["--gen_lem=3"], "--gen_lem: did you mean --gen-len?"),
    (["--max-new-tokens", "3"], "did you mean --gen-len?"), (["--xyzzy"], "see --help"),
    (["stray"], "'stray' belongs to no flag"), (["--overlap", "maybe"], "expected true or false"),
    (["--prompt", "a\udcff"], r"--prompt is not text in UTF-8: character 1 is '\udcff'"),
    (["--prompt", "a", "--prompt", "\ud800"], "--prompt 2 is not text in UTF-8"),
    (["--percent"], "expected at least one argument"), (["--weight-bits", "four"], "16, 12, 8, 4"),
    (["--compress-weight", "--weight-bits", "auto"], "contradict"),
    (["--hh-ratio", "none.yaml"], "--hh-ratio none.yaml: No such file"),
    (["--key-bits", "8"], "use 16 for both"),
    (["--key-bits", "8", "--value-bits", "4", "--attn-sparsity", "0.5"], "attn_sparsity"),
    (["--num-prompts", "3", "--prompt", "a"], "--num-prompts"),
    (["--config", "missing.yaml"], "No such file")])
def test_bad_flags(capsys, argv, words):
    assert words in refused(capsys, *argv)


def test_flags_override_the_config_file(tmp_path):
    def parsed(text: str, *argv: str) -> RunConfig:
        (tmp_path / "c.yaml").write_text(text)
        return replace(generate.parse_args(["--config", "c.yaml", *argv]), config=None)

    config = parsed("model: opt-125m\ngen_len: 7\npercent: 0 100 100 0\nprompts: a.txt\n",
                    "--gen-len", "9", "--prompt", "x")
    assert config == RunConfig(model="opt-125m", gen_len=9, percent="0 100 100 0", prompt=("x",))
    assert parsed("prompt_len: 64\nnum_prompts: 3\n", "--prompt", "x") == RunConfig(prompt=("x",))
    assert parsed("log_file: l.log\n", "--no-log") == RunConfig(no_log=True)
    assert parsed("no_log: true\n", "--log-file", "l.log") == RunConfig(log_file="l.log")
    (tmp_path / "ratios.yaml").write_text("[0.1, 0.2, 0.3]")
    config = parsed("hh_ratio: ratios.yaml\nrecent_ratio: [0.3, 0.2, 0.1]\n", "--recent-ratio",
                    "0.5")
    assert config.h2o() == H2OConfig(heavy_ratio=(0.1, 0.2, 0.3), recent_ratio=0.5)


# Prompts


@pytest.mark.parametrize(("name", "content", "words"), [
    ("p.txt", None, "No such file"), ("p.txt", b"", "no prompts"), ("p.txt", b"c\xe9", "not UTF-8"),
    ("p.jsonl", b'{"prompt": "a"}\nnot json\n', "line 2 is not JSON"),
    ("p.jsonl", b'{"prompt": "a"}\n\n{"text": "b"}\n', "line 3 has no text"),
    ("p.jsonl", b'["prompt"]\n', "line 1 has no text"),
    ("p.jsonl", b'{"prompt": 5}\n', "line 1 has no text"),
    ("p.jsonl", b'{"prompt": " "}\n', "line 1 has no text"),
    ("p.txt", b"a\n\xed\xa0\x80\n", "not UTF-8"), ("p.csv", b"a\n", ".txt or .jsonl")])
def test_bad_prompt_files(capsys, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert words in refused(capsys, "--prompts", name)


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


def test_the_workload_estimates_the_tokens_of_text():
    config = RunConfig(prompt=("a" * 30, "bb"), gen_len=7, gpu_batch_size=4, num_gpu_batches=3)
    assert launch.workload(config, config.prompt) == Workload(11, 7, 2, 1)
    assert launch.workload(RunConfig(), ()) == Workload(512, 32, 4, 1)


# A run


def test_a_run_prints_texts_and_the_table(capsys, llm):
    argv = ["--model", "m", "--prompt", "one  two\nthree", "--prompt", "four", "--no-log",
            "--percent", "0", "100", "100", "0", "--gen-len", "2", "--offload-dir", "/tmp/x"]
    assert generate.main(argv) == 0
    out = capsys.readouterr().out
    assert out.index("[0] one two three") < out.index("continuation of four") < out.index(
        "total throughput")
    (engine,) = llm.opened
    assert engine.closed and engine.options["policy"].weights.cpu == 100
    assert engine.options["offload_dir"] == "/tmp/x" and not engine.options["trace"].enabled
    assert engine.options["workload"].gpu_batch_size == 2
    prompts, sampling = engine.calls[0]
    assert prompts == ["one  two\nthree", "four"]
    assert (sampling["max_new_tokens"], sampling["eos_token_id"], sampling["cut_gen_len"]) == (
        2, None, None)
    assert list(Path().iterdir()) == []
    assert generate.main(["--prompt-len", "6", "--no-log", "--gen-len", "4", "--cut-gen-len",
                          "2"]) == 0
    out = capsys.readouterr().out
    assert "[0]" in out and "[3]" in out and "[1]" not in out
    prompts, sampling = llm.opened[1].calls[0]
    assert (len(prompts), len(prompts[0])) == (4, 6)
    assert (sampling["eos_token_id"], sampling["cut_gen_len"]) == (-1, 2)


@pytest.mark.parametrize(("device", "flags", "tokens"), [
    ("cpu", (), 2), ("cpu", ("--gen-len", "1"), 1), ("cuda", (), 32),
    ("cuda", ("--cut-gen-len", "9"), 9),  # more tokens would be other kernels
])
def test_a_warm_up_comes_first_and_leaves_no_trace(llm, monkeypatch, device, flags, tokens):
    monkeypatch.setattr(llm, "device", torch.device(device))
    assert generate.main(["--warm-up", "--num-prompts", "5", "--gpu-batch-size", "2", "--no-log",
                          "--trace", "t.json", "--verbose", "0", *flags]) == 0
    assert [(len(prompts), options["max_new_tokens"])
            for prompts, options in llm.opened[0].calls] == [
        (2, tokens), (5, 1 if "--gen-len" in flags else 32)]
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    assert sum(event["name"] == "prefill" for event in events) == 1, "of the second call alone"


@pytest.mark.parametrize("verbose", [0, 1, 2, 3])
def test_verbose(capsys, llm, verbose):
    argv = ["--prompt", "a", "--log-file", "l.log", "--debug-mode", "breakdown"]
    assert generate.main([*argv, "--verbose", str(verbose)]) == 0
    out, log = capsys.readouterr().out, Path("l.log").read_text()
    assert ("continuation" in out, "total throughput" in out, "bound by" in out) == (
        verbose > 1, verbose > 0, verbose > 0)
    assert log.index("total throughput") < log.index("prefill, s") < log.index("bound by")
    options = llm.opened[0].options
    assert options["trace"].enabled and options["verbose"] == (verbose == 3)
    assert options["progress"] == (None if verbose else False)


@pytest.mark.parametrize(("argv", "suffix"), [
    (["--hh-ratio", "1"], ""), (["--key-bits", "8", "--value-bits", "4"], "-k8v4"),
    (["--hh-ratio", "0.1", "--recent-ratio", "0.25", "--eviction", "window", "--weight-bits", "8"],
     "-w8-window-hh0.1-recent0.25"),
    (["--hh-ratio", "0.1", "0.2", "--score", "decay", "--score-decay", "0.9"],
     "-h2o-hh-by-layer-decay0.9"),
    (["--num-window-length", "64", "--eviction", "sink-window", "--hh-all", "false",
      "--enable-position-rolling"], "-sink-window-window64-sinks4-rolling-prompt-only"),
    (["--attn-sparsity", "0.1", "--cache-bits", "8"], "-sparse0.1-kv8"),
    (["--hh-ratio", "0.1", "--prefill-chunk", "64", "--evict-while-prefilling"],
     "-h2o-hh0.1-chunk64"),
    (["--hh-ratio", "0.1", "--recall", "--percent", "100", "0", "0", "0", "100", "0",
      "--selective-fetch", "--hot-set", "0.6"], "-recall0.1-index4-fetch-chosen-fast0.6")])
def test_the_log_is_named_after_weights_and_cache(argv, suffix):
    files = results.result_files(generate.parse_args(argv))
    shares = "100-0-0-0" if "--selective-fetch" in argv else "100-0-100-0"
    assert files == {"log_file": "flexgen_h2o-opt-6.7b-gbs4-ngbs1-prompt512-gen32-percent-"
                                 f"{shares}-100-0{suffix}.log"}


@pytest.mark.parametrize("flag", ["--output", "--csv", "--trace", "--log-file"])
def test_unwritable_results_are_refused_before_loading(capsys, tmp_path, flag):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("date,speed\n")
    # A file has a longer name until it is whole.
    for path, words in (("none/x", flag), ("folder", "not a regular file"), ("file/x", flag),
                        ("/dev/null", "not a regular file"), ("x" * 240, "File name too long"),
                        *([("file", "other columns")] if flag == "--csv" else [])):
        assert words in refused(capsys, flag, path)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}


def test_user_errors_of_the_engine_are_one_line(capsys, llm, tmp_path, monkeypatch):
    monkeypatch.setattr(llm, "error", UserError("the disk\nis full"))
    assert generate.main(["--prompt", "a", "--output", "o.jsonl"]) == 2
    assert capsys.readouterr().err == "error: the disk is full\n"
    assert llm.opened[0].closed and list(tmp_path.iterdir()) == []


def test_results_that_cannot_be_written_late_are_one_line(capsys, monkeypatch, tmp_path):
    """The table is printed, and the other files are written."""
    def full(*_):
        raise OSError(28, "No space left on device")

    for name in ("append_csv", "write_outputs"):
        monkeypatch.setattr(results, name, full)
    files = [word for name in ("output", "csv", "trace") for word in (f"--{name}", name)]
    assert generate.main(["--prompt", "a", *files, "--log-file", "log"]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and "--output output" in err and "--csv csv" in err
    assert "total throughput" in out
    assert {path.name for path in tmp_path.iterdir()} == {"trace", "log", "log.config.yaml"}


# The files that ship


@pytest.mark.parametrize("name", ["demo", "opt30b_t4"])
def test_shipped_configs_are_valid(name, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    config = generate.parse_args(["--config", f"configs/{name}.yaml"])
    if config.prompts:
        assert len(launch.read_prompts(config.prompts)) == 3
