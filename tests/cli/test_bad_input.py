"""Bad input on the command line: one error line, status 2, no files left; and one good run.

What the flags and prompt files alone refuse, before any model is looked for, is in test_flex_opt.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from helpers.error_cases import command_refused, error_line
from helpers.internals import before_logits
from helpers.read_back import read_csv
from helpers.subprocesses import environment
from helpers.tiny_tokenizers import with_words
from safetensors.torch import load_file, save_file

from flexgen_h2o import LLM
from flexgen_h2o.cli import launch
from flexgen_h2o.cli.results import CSV_COLUMNS
from flexgen_h2o.commands import generate
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.engine import source
from flexgen_h2o.errors import UserError
from flexgen_h2o.files import articles
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.planning import memory_plan as memory_check
from flexgen_h2o.planning.memory_plan import memory_plan
from flexgen_h2o.planning.planned_run import kv_entry_bytes
from flexgen_h2o.storage.free_memory import MemoryLimits

RESULTS = ("--output", "o.jsonl", "--csv", "r.csv", "--trace", "t.json", "--log-file", "l.log")
OF_TEXTS = ("--gen-len", "4", "--gpu-batch-size", "2", "--dtype", "float32", "--device", "cpu")
SHORT = ("--prompt-len", "6", *OF_TEXTS)
DISK = ("--percent", "0", "0", "0", "0", "0", "0")
MEMORY = ("--percent", "100", "0", "100", "0")
LONG = "a" * 300  # more than a file system takes
PLACES = pytest.mark.parametrize("percent", [MEMORY, DISK], ids=["memory", "disk"])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """An empty current folder; home, caches and temporary files go below tmp_path too."""
    for name in ("here", "home", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "home" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # or it would stay what it was found to be
    return tmp_path / "here"


@pytest.fixture
def model(tiny_model, here) -> Path:
    """A copy of a tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model("llama_untied_bias").folder, here / "model"))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content; folders count only by what is in them.

    The lock of a conversion is an empty file that stays, so that no two processes hold two of it.
    """
    files = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {path: held for path, held in files.items() if held or not path.endswith(".lock")}


def short(argv: Sequence[str]) -> tuple[str, ...]:
    """Flags of a short run of what `argv` says: synthetic prompts alone have a length."""
    return OF_TEXTS if {"--prompt", "--prompts"} & {*argv} else SHORT


def refused(capfd, here, *argv: str) -> str:
    """The message of a command that ends with status 2, one line, and nothing left of it."""
    before, threads = tree(here.parent), set(threading.enumerate())
    message = command_refused(generate.main, capfd,
                              [*short(argv), *RESULTS, "--offload-dir", "offload", *argv])
    assert tree(here.parent) == before
    offload = Path("offload")
    assert not offload.is_dir() or list(offload.iterdir()) == []
    assert not {t.name for t in set(threading.enumerate()) - threads if "tqdm" not in repr(t)}
    return message


def plan_refused(capfd, here, *argv: str) -> str:
    """The message of a run that is only planned."""
    return command_refused(generate.main, capfd, [*short(argv), "--plan-only", *argv])


def change_config(model: Path, **values) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | values))


# The checkpoint


def change_tensor(change) -> Callable[[Path], None]:
    """Return a function that replaces a matrix of a model, or removes it for None."""
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        changed = change(tensors.pop(MATRIX))
        if changed is not None:
            tensors[MATRIX] = changed.contiguous()
        save_file(tensors, model / "model.safetensors")

    return damage


def write_config(text: str | None) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        (model / "config.json").unlink()
        if text is not None:
            (model / "config.json").write_text(text)

    return damage


MATRIX = "model.layers.1.mlp.up_proj.weight"
DAMAGES = {
    "truncated": (lambda model: os.truncate(model / "model.safetensors", 1000), "is truncated"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "no checkpoint in model"),
    "shape": (change_tensor(torch.t), f"{MATRIX} has shape [48, 80]"),
    "no tensor": (change_tensor(lambda tensor: None), f"has no tensor {MATRIX}"),
    "dtype": (change_tensor(lambda tensor: tensor.to(torch.int8)), f"{MATRIX} is stored as int8"),
    "no config": (write_config(None), "config.json"),
    "no JSON": (write_config("{"), "not JSON"),
    "no object": (write_config("[]"), "not a JSON object"),
    "no type": (write_config("{}"), "model type"),
}


@PLACES
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoint_is_refused(model, here, capfd, percent, name):
    damage, words = DAMAGES[name]
    damage(model)
    assert words in refused(capfd, here, "--model", "model", *percent)


@pytest.mark.parametrize(("key", "value", "words"), [
    ("num_hidden_layers", 10**400, "at most 4096"),
    ("num_hidden_layers", 4, "has no tensor model.layers.3."),
    ("num_hidden_layers", 2, "has a tensor model.layers.2."),
    ("hidden_size", 48 * 2**10, "has shape [120, 48], but config.json calls for [120, 49152]"),
    ("vocab_size", 10**7, "has shape [120, 48], but config.json calls for [10000000, 48]"),
])
def test_config_of_other_sizes_than_the_checkpoint(model, here, capfd, monkeypatch, key, value,
                                                   words):
    """It shows before the memory plan, which would give advice on batches, and without work."""
    monkeypatch.setattr(memory_check.MemoryCheck, "check_fits",
                        lambda *_, **__: pytest.fail("planned"))
    change_config(model, **{key: value})
    assert words in refused(capfd, here, "--model", "model")


def test_a_tied_model_with_an_output_matrix(model, here, capfd, monkeypatch):
    """One of the same values is welcome, as `.bin` files have it: the last number counts."""
    monkeypatch.setattr(source, "_COMPARED", 1000)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors")
    change_config(model, tie_word_embeddings=True)
    assert generate.main([*SHORT, "--model", "model", "--no-log", "--offload-dir", "o"]) == 0
    capfd.readouterr()
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, model / "model.safetensors")
    message = refused(capfd, here, "--model", "model")
    assert "tensor lm_head.weight differs from model.embed_tokens.weight" in message
    assert "tie_word_embeddings" in message


@pytest.mark.parametrize("name", [
    "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "tokenizer.json", "merges.txt", "generation_config.json"])
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_pipes_and_devices_are_refused(model, here, capfd, name, kind):
    path = model / name
    if "model" in name:
        (model / "model.safetensors").unlink()
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    (model / "vocab.json").write_text("{}")  # so that there is a tokenizer to read
    with time_limit(20):
        message = refused(capfd, here, "--model", "model", "--prompt", "some text")
    assert f"{name} is {kind}" in message


def test_prompts_may_come_through_a_pipe(model, here, capfd):
    os.mkfifo(here / "prompts.jsonl")
    writer = threading.Thread(
        target=lambda: (here / "prompts.jsonl").write_text('{"prompt": ""}'))
    writer.start()
    with time_limit(20):
        message = refused(capfd, here, "--model", "model", "--prompts", "prompts.jsonl")
    writer.join()
    assert "prompts.jsonl line 1 has no text" in message


@contextlib.contextmanager
def time_limit(seconds: float):
    """Turns what would wait without end into a failure."""
    def fail(*_):
        raise AssertionError(f"no end in {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("value", "argv"), [
    (float("nan"), ()), (3e38, ("--prompt-len", "40", "--num-window-length", "8", *DISK))])
def test_weights_that_are_not_finite(model, here, capfd, value, argv):
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"].fill_(value)
    save_file(tensors, model / "model.safetensors")
    message = refused(capfd, here, "--model", "model", *argv)
    assert "logits of prompt" in message and "not finite" in message


# The model


@pytest.mark.parametrize(("values", "words"), [
    ({"model_type": "bloom"}, "'bloom' is not supported"),
    ({"model_type": "hunyuan_v1_moe", "num_experts": 60}, "mixture of experts"),
    ({"rope_parameters": {"rope_type": "ntk", "factor": 4.0}}, "rope type 'ntk'"),
    ({"quantization_config": {"bits": 4}}, "quantized"),
])
def test_unsupported_architecture_is_named(model, here, capfd, values, words):
    change_config(model, **values)
    assert words in refused(capfd, here, "--model", "model")


@pytest.mark.parametrize("local", [False, True])
def test_unknown_model_without_network(here, capfd, monkeypatch, local):
    import huggingface_hub as hub

    def no_network(*_, **__):
        raise ConnectionError("[Errno -2] Name or service not known")

    def not_local(*_, **options):
        assert options.get("local_files_only"), "nothing may be downloaded"
        raise hub.errors.LocalEntryNotFoundError("not\nhere")

    monkeypatch.setattr(hub.HfApi, "model_info", no_network)
    monkeypatch.setattr(hub, "snapshot_download", not_local)
    if local:
        assert "no such folder" in refused(capfd, here, "--model", "./nobody/nothing")
    else:
        message = refused(capfd, here, "--model", "nobody/nothing")
        assert "nobody/nothing" in message and "check the network" in message


@pytest.mark.parametrize(("argv", "words"), [
    (("--model", LONG), f"cannot read {LONG}: File name too long"),
    (("--path", f"{LONG}/model.gguf"), "File name too long"),
    (("--path", LONG, "--device", "auto", "--plan-only", "--hardware", "t4.yaml"),
     "File name too long"),
    (("--weight-bits", "4", "--weight-cache", LONG), "cannot write a converted copy"),
    (("--offload-dir", LONG, *DISK), f"offload folder {LONG} can't be used: File name too long"),
    (("--config", "~no-user/a.yaml"), "cannot read --config ~no-user/a.yaml: No such file"),
])
def test_paths_that_cannot_be_looked_at(model, here, capfd, argv, words):
    """A name that is too long replaces a path in a folder without permission: root may
    enter all. A user may have no home folder."""
    shutil.copy(Path(__file__).parents[2] / "configs" / "hardware" / "t4.yaml", here)
    given = [*SHORT, "--no-log", "--model", "model", *argv]
    assert words in command_refused(generate.main, capfd, given)


# What stays cached


def test_ratios_for_another_number_of_layers(model, here, capfd):
    (here / "ratios.yaml").write_text("[0.1, 0.2]")
    message = refused(capfd, here, "--model", "model", "--hh-ratio", "ratios.yaml")
    assert "2 numbers" in message and "3 decoder layers" in message


def test_position_flags_the_model_cannot_use(tiny_model, model, here, capfd):
    message = refused(capfd, here, "--model", "model", "--hh-ratio", "0.5", "--hh-long-seq")
    assert "rotary positions" in message and "--hh-long-seq" in message
    message = refused(capfd, here, "--model", str(tiny_model("opt").folder), "--hh-ratio", "0.5",
                      "--enable-position-rolling")
    assert "learned positions" in message


# The prompts


def test_prompt_longer_than_the_positions(model, here, capfd):
    message = refused(capfd, here, "--model", "model", "--prompt-len", "5000")
    assert "5000 tokens, more than the model's 256 positions" in message
    message = refused(capfd, here, "--model", "model", "--prompt-len", "250", "--gen-len", "8")
    assert "generate at most 7" in message


@pytest.mark.parametrize("refused", [refused, plan_refused])
def test_too_long_prompt_is_refused_by_token_count(model, here, capfd, monkeypatch, refused):
    """And not for the memory that so many would take, which is not there either."""
    monkeypatch.setattr(memory_check, "free_memory", lambda *_: MemoryLimits(None, 10**9, 10**9))
    words = with_words(model, here / "words")
    (here / "p.txt").write_text("w1\n" + "w23 " * 2_500_000)
    message = refused(capfd, here, "--model", words, "--prompts", "p.txt")
    assert re.search(r"prompt 1 has about \d{7} tokens, more than the model's 256 pos", message)
    (here / "p.txt").write_text("w1\n" + "w23 " * 300)
    message = refused(capfd, here, "--model", words, "--prompts", "p.txt")
    assert "prompt 1 has 300 tokens, more than the model's 256 positions" in message
    (here / "p.txt").write_text("w1\n" + "w23 " * 250)
    message = refused(capfd, here, "--model", words, "--prompts", "p.txt", "--gen-len", "8")
    assert "prompt 1 of 250 tokens and 8 new ones exceed the model's 256 positions" in message


@pytest.mark.parametrize(("read", "keys"), [
    (launch.read_prompts, "prompt"),
    (articles.read_summary_tasks, "article summary_gt stop"),
    (articles.read_conversations, "turns")])
def test_lone_surrogates_in_files_are_refused(here, read, keys):
    """In each text that is read, and a whole pair is none."""
    for key in keys.split():
        lines = [{name: ["w1 " + text] if name in ("stop", "turns") else "w1 " + text
                  for name in keys.split() if (text := "\ud800" if name == bad else "\U0001f600")}
                 for bad in ("none", key)]
        (here / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
        with pytest.raises(UserError, match=r"p.jsonl line 2 is not text in UTF-8.*'\\ud800'"):
            read("p.jsonl")
        (here / "p.jsonl").write_text(json.dumps(lines[0]))
        assert len(read("p.jsonl")) == 1


def test_text_without_a_usable_tokenizer(model, here, capfd):
    assert "no tokenizer" in refused(capfd, here, "--model", "model", "--prompt", "some text")
    (model / "tokenizer.json").write_text("{")
    assert "tokenizer" in refused(capfd, here, "--model", "model", "--prompt", "some text")


@pytest.mark.parametrize("flag", ["--output", "--csv", "--trace", "--log-file"])
def test_a_result_that_would_replace_an_input(model, here, capfd, flag):
    (here / "p.txt").write_text("a prompt\n")
    (here / "c.yaml").write_text("gen_len: 3\n")
    message = refused(capfd, here, "--model", "model", "--prompts", "p.txt", flag, "../here/p.txt")
    assert f"--prompts and {flag} name the same file" in message
    message = refused(capfd, here, "--model", "model", "--config", "c.yaml", flag, "c.yaml")
    assert f"--config and {flag} name the same file" in message


# The disk


@pytest.mark.parametrize("place", ["taken", "taken/below"])
def test_offload_folder_that_cannot_be(model, here, capfd, place):
    (here / "taken").write_text("a file")
    message = refused(capfd, here, "--model", "model", "--offload-dir", place, *DISK)
    assert "--offload-dir" in message and "taken" in message


def failing(number: int, after: int = 0):
    """A system call that fails; the first `after` calls of it do what they should."""
    left = [after]

    def wrap(real):
        def call(*arguments):
            if left[0] > 0:
                left[0] -= 1
                return real(*arguments)
            raise OSError(number, os.strerror(number))

        return call

    return wrap


@pytest.mark.parametrize(("call", "after", "number"), [
    ("posix_fallocate", 0, errno.ENOSPC), ("posix_fallocate", 1, errno.EDQUOT),
    ("pwritev", 0, errno.EDQUOT), ("pwritev", 25, errno.ENOSPC)])
def test_disk_full_while_offloading(model, here, capfd, monkeypatch, call, after, number):
    monkeypatch.setattr(os, call, failing(number, after)(getattr(os, call)))
    message = refused(capfd, here, "--model", "model", *DISK, "--gen-len", "40")
    assert re.search("the disk of .* is full: free some space.*--offload-dir", message)


@pytest.mark.parametrize(("call", "flags", "words"), [
    ("pwritev", ("--path", "_DUMMY_"), "is full"), ("fsync", ("--dtype", "bfloat16"), "No space"),
], ids=["dummy weights", "converted copy"])
def test_disk_full_while_writing_weights(model, here, capfd, monkeypatch, call, flags, words):
    monkeypatch.setattr(os, call, failing(errno.ENOSPC)(getattr(os, call)))
    assert words in refused(capfd, here, "--model", "model", *flags, *DISK)


@pytest.mark.parametrize("after", [0, 30])
def test_disk_that_cannot_be_read(model, here, capfd, monkeypatch, after):
    monkeypatch.setattr(os, "preadv", failing(errno.EIO, after)(os.preadv))
    message = refused(capfd, here, "--model", "model", *DISK)
    assert "Input/output error" in message


def test_disk_too_small_by_the_plan(model, here, capfd, monkeypatch):
    limits = MemoryLimits(None, 8 * 10**9, 10_000)
    monkeypatch.setattr(memory_check, "free_memory", lambda *_: limits)
    message = refused(capfd, here, "--model", "model", *DISK)
    assert "disk space: needs" in message and "--percent 100 0 100 0 100 0 would fit" in message


# A process of its own


def test_a_process_refuses_bytes_that_are_no_text(model, here):
    before = tree(here)
    done = subprocess.run(
        [sys.executable, "-m", "flexgen_h2o.flex_opt", *SHORT, *RESULTS, "--offload-dir", "offload",
         "--model", "model", "--prompt", b"caf\xe9"], capture_output=True, text=True,
        env=environment())
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    error_line(done.stderr, "--prompt is not text in UTF-8: character 3")
    assert tree(here) == before and tree(here.parent / "tmp") == {}


@pytest.mark.full
def test_repeated_signals_leave_no_files(model, here):
    sent = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    work = subprocess.Popen(
        [sys.executable, "-m", "flexgen_h2o.flex_opt", *SHORT, *RESULTS, *DISK, "--model", "model",
         "--gen-len", "240", "--offload-dir", "offload"], stderr=subprocess.PIPE, text=True,
        env=environment())
    while work.poll() is None and not list(here.glob("offload/*")):
        time.sleep(0.001)
    while work.poll() is None:
        for number in sent:
            work.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            work.wait(0.005)
    # Signals of one moment reach several threads, so that any may be the first that Python sees.
    assert work.returncode in {128 + number for number in sent}
    assert work.stderr.read() == "interrupted\n"
    assert list((here / "offload").iterdir()) == [] and not (here / "o.jsonl").exists()


# And what works


ALL_TIERS = ("--model", "model", "--percent", "30", "30", "50", "0", "50", "0", "--gen-len", "5",
             "--num-gpu-batches", "2", "--seed", "4")


def test_a_good_run_writes_all_results(model, here, capfd):
    assert generate.main([*SHORT, *RESULTS, "--offload-dir", "offload", *ALL_TIERS]) == 0
    out, err = capfd.readouterr()
    assert err == "" and "total throughput" in out
    assert list((here / "offload").iterdir()) == []
    files = {path.name for path in here.iterdir() if path.is_file()}
    assert files == {"o.jsonl", "r.csv", "t.json", "l.log", "o.jsonl.config.yaml",
                     "r.csv.config.yaml", "l.log.config.yaml"}

    config = generate.parse_args([*SHORT, *RESULTS, "--offload-dir", "offload", *ALL_TIERS])
    with LLM("model", dtype="float32", device="cpu") as llm:
        prompts = launch.synthetic_prompts(config, llm.vocab_size)
        expected = llm.generate(prompts, max_new_tokens=5, eos_token_id=-1)
    lines = (here / "o.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"prompt": None, "prompt_tokens": 6, "token_ids": o.token_ids, "text": None,
         "finish_reason": "length"} for o in expected]
    assert len(lines) == 4 and "total throughput" in (here / "l.log").read_text()

    (row,) = read_csv(here / "r.csv")
    assert tuple(row) == CSV_COLUMNS
    wanted = {"model": "model", "weights_gpu": "30", "weights_disk": "40", "cache_disk": "50",
              "activations_disk": "50", "gpu_batch_size": "2", "num_gpu_batches": "2",
              "num_prompts": "4", "prompt_tokens": "24", "generated_tokens": "20",
              "gen_len": "5", "dtype": "float32", "device": "cpu", "projected": "false"}
    assert {name: row[name] for name in wanted} == wanted
    for name in ("total_tokens_per_second", "disk_to_cpu_gb", "cpu_to_disk_gb", "prefill_seconds",
                 "kv_cache_bytes", "peak_process_bytes"):
        assert float(row[name]) > 0, name

    trace = json.loads((here / "t.json").read_text())
    events, about = trace["traceEvents"], trace["otherData"]
    assert about["decode_steps"] == 4 and set(CSV_COLUMNS) < set(about)
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"compute", "disk->cpu", "cpu->disk"} <= lanes
    computed = [event["name"] for event in events if event.get("cat") == "compute"]
    assert len(computed) == 5 * (3 + 2) * 2  # tokens, layers with embedding and head, batches
    saved = yaml.safe_load((here / "o.jsonl.config.yaml").read_text(encoding="utf-8"))
    assert saved["percent"] == [30, 30, 50, 0, 50, 0] and saved["seed"] == 4


def test_the_saved_config_repeats_the_run(model, here, capfd):
    assert generate.main([*SHORT, *RESULTS, "--offload-dir", "offload", *ALL_TIERS]) == 0
    capfd.readouterr()
    assert generate.main(["--config", "o.jsonl.config.yaml", "--output", "again.jsonl",
                          "--verbose", "0"]) == 0
    assert capfd.readouterr() == ("", "")
    assert (here / "again.jsonl").read_text() == (here / "o.jsonl").read_text()
    assert len(read_csv(here / "r.csv")) == 2


@pytest.mark.parametrize("argv", [
    ("--hh-ratio", "0.1", "0.2", "1", "--prefill-chunk", "16"),
    ("--hh-ratio", "0.1", "--hh-all", "false", "--score", "mean", "--cache-bits", "8"),
    ("--num-window-length", "16", "--eviction", "sink-window", "--key-bits", "8",
     "--value-bits", "4"),
])
def test_the_plan_counts_what_is_cached(model, here, argv):
    argv = [*SHORT, "--model", "model", "--prompt-len", "40", "--gen-len", "9", "--csv", "r.csv",
            "--no-log", "--verbose", "0", *argv]
    assert generate.main(argv) == 0
    (row,) = read_csv(here / "r.csv")
    config = generate.parse_args(argv)
    sizes = from_transformers(json.loads((model / "config.json").read_text()), "model")
    cache = config.cache()
    plan = memory_plan(sizes, config.policy(), Workload(40, 9, 2, 1), itemsize=4, cache=cache)
    (planned,) = (row.cpu for row in plan.rows if row.name == "cache")
    assert int(row["kv_cache_bytes"]) == planned
    assert int(row["full_kv_cache_bytes"]) == 2 * 48 * sizes.kv_bytes_per_token(4)
    assert int(row["kv_bytes_per_token"]) == 3 * kv_entry_bytes(cache, sizes, 4)


@pytest.mark.parametrize(("stdout", "status", "err"), [
    ("full", 2, "error: cannot print to stdout: No space left on device\n"), ("head", 0, ""),
    ("closed", 0, "")])
def test_results_are_written_though_stdout_fails(model, here, capfd, monkeypatch, stdout, status,
                                                 err):
    with contextlib.ExitStack() as stack:
        target = None
        if stdout == "full":
            target = stack.enter_context(open("/dev/full", "w"))
        elif stdout == "head":
            reader, writer = os.pipe()
            os.close(reader)
            target = stack.enter_context(open(writer, "w"))
        monkeypatch.setattr(sys, "stdout", target)
        assert generate.main([*SHORT, *RESULTS, "--model", "model"]) == status
        monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    assert capfd.readouterr().err == err
    assert len((here / "o.jsonl").read_text().splitlines()) == 2
    assert len(read_csv(here / "r.csv")) == 1 and (here / "l.log").exists()


@PLACES
def test_ctrl_c(model, here, capfd, monkeypatch, percent):
    seen = []

    def interrupt(step):
        # In the middle: files are on disk and transfers under way.
        seen.extend(path.stat().st_mode & 0o777 for path in Path("offload").glob("*"))
        if step.forward_pass == 2:
            raise KeyboardInterrupt

    before_logits(monkeypatch, interrupt)
    before, threads = tree(here.parent), set(threading.enumerate())
    argv = [*SHORT, *RESULTS, "--model", "model", "--offload-dir", "offload", *percent]
    assert generate.main(argv) == 130
    out, err = capfd.readouterr()
    assert (out, err) == ("", "interrupted\n")
    assert bool(seen) == (percent == DISK) and set(seen) <= {0o700}
    assert tree(here.parent) == before
    assert not Path("offload").exists() or list(Path("offload").iterdir()) == []
    assert not {t.name for t in set(threading.enumerate()) - threads if "tqdm" not in repr(t)}
