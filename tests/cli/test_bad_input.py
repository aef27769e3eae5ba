"""Bad input on the command line: one error line, status 2, no files left; and one good run.

What the flags and prompt files alone refuse, before any model is looked for, is in test_flex_opt.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from helpers.error_cases import command_refused
from helpers.internals import before_logits
from helpers.read_back import read_csv, read_jsonl
from helpers.tiny_tokenizers import with_words
from safetensors.torch import load_file, save_file

from flexgen_h2o import LLM
from flexgen_h2o.cli import launch
from flexgen_h2o.cli.results import CSV_COLUMNS
from flexgen_h2o.commands import generate
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.engine import source
from flexgen_h2o.errors import UserError
from flexgen_h2o.files import readers
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.planning import memory_plan as memory_check
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.planned_run import PlannedRun, kv_entry_bytes
from flexgen_h2o.storage.free_memory import MemoryLimits

RESULTS = ("--output", "o.jsonl", "--csv", "r.csv", "--trace", "t.json", "--log-file", "l.log")
OF_TEXTS = ("--gen-len", "4", "--gpu-batch-size", "2", "--dtype", "float32", "--device", "cpu")
SHORT = ("--prompt-len", "6", *OF_TEXTS)
DISK = ("--percent", "0", "0", "0", "0", "0", "0")
MEMORY = ("--percent", "100", "0", "100", "0")
LONG = "a" * 300  # more than a file system takes
PLACES = pytest.mark.parametrize("percent", [MEMORY, DISK], ids=["memory", "disk"])


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch) -> Path:
    """An empty current folder; home, caches and temporary files go below tmp_path too."""
    for name in ("workdir", "home", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "workdir")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "home" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # otherwise the cached folder stays
    return tmp_path / "workdir"


@pytest.fixture
def model(tiny_model, workdir) -> Path:
    """A copy of a tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model("llama_untied_bias").folder, workdir / "model"))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content; folders count only by what is in them.

    The lock of a conversion is an empty file that stays, so that no two processes hold two of it.
    """
    files = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {path: held for path, held in files.items() if held or not path.endswith(".lock")}


def short(argv: Sequence[str]) -> tuple[str, ...]:
    """Flags of a short run of what `argv` says: synthetic prompts alone have a length."""
    return OF_TEXTS if {"--prompt", "--prompts"} & {*argv} else SHORT


def refused(capfd, workdir, *argv: str) -> str:
    """The message of a command that ends with status 2, one line, and no file or thread left."""
    before, threads = tree(workdir.parent), set(threading.enumerate())
    message = command_refused(generate.main, capfd,
                              [*short(argv), *RESULTS, "--offload-dir", "offload", *argv])
    assert tree(workdir.parent) == before and no_leftovers(threads)
    return message


def no_leftovers(threads: set[threading.Thread]) -> bool:
    """Whether the offload folder is empty, and there are only these threads and tqdm's."""
    offload = Path("offload")
    return (not offload.is_dir() or not [*offload.iterdir()]) and not [
        thread for thread in {*threading.enumerate()} - threads if "tqdm" not in repr(thread)]


def change_config(model: Path, **values) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | values))


# The checkpoint


MATRIX = "model.layers.1.mlp.up_proj.weight"


def change_matrix(model: Path, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Replace a matrix of a model, or remove it for None."""
    tensors = load_file(model / "model.safetensors")
    changed = change(tensors.pop(MATRIX))
    if changed is not None:
        tensors[MATRIX] = changed.contiguous()
    save_file(tensors, model / "model.safetensors")


def write_config(text: str) -> Callable[[Path], object]:
    return lambda model: (model / "config.json").write_text(text)


DAMAGES = {
    "truncated": (lambda model: os.truncate(model / "model.safetensors", 1000), "is truncated"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "no checkpoint"),
    "shape": (lambda model: change_matrix(model, torch.t), f"{MATRIX} has shape [48, 80]"),
    "no tensor": (lambda model: change_matrix(model, lambda tensor: None), MATRIX),
    "dtype": (lambda model: change_matrix(model, lambda tensor: tensor.to(torch.int8)), "int8"),
    "no config": (lambda model: (model / "config.json").unlink(), "config.json"),
    "no JSON": (write_config("{"), "not JSON"),
    "no object": (write_config("[]"), "not a JSON object"),
    "unsupported": (write_config('{"model_type": "bloom"}'), "bloom")}


@PLACES
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoint_is_refused(model, workdir, capfd, percent, name):
    damage, words = DAMAGES[name]
    damage(model)
    assert words in refused(capfd, workdir, "--model", "model", *percent)


@pytest.mark.parametrize(("key", "value", "words"), [
    ("num_hidden_layers", 10**400, "at most 4096"),
    ("num_hidden_layers", 4, "has no tensor model.layers.3."),
    ("num_hidden_layers", 2, "has a tensor model.layers.2."),
    ("hidden_size", 48 * 2**10, "[120, 49152]"), ("vocab_size", 10**7, "[10000000, 48]")])
def test_config_of_other_sizes_than_the_checkpoint(model, workdir, capfd, monkeypatch, key, value,
                                                   words):
    """It shows before the memory plan, which would give advice on batches, and without work."""
    monkeypatch.setattr(memory_check.MemoryCheck, "check_fits",
                        lambda *_, **__: pytest.fail("planned"))
    change_config(model, **{key: value})
    assert words in refused(capfd, workdir, "--model", "model")


def test_output_matrix_of_a_tied_model_must_be_equal(model, workdir, capfd, monkeypatch):
    """To the last number: `.bin` files have both."""
    monkeypatch.setattr(source, "_COMPARED", 1000)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors")
    change_config(model, tie_word_embeddings=True)
    assert generate.main([*SHORT, "--model", "model", "--no-log", "--offload-dir", "o"]) == 0
    capfd.readouterr()
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, model / "model.safetensors")
    assert "tie_word_embeddings" in refused(capfd, workdir, "--model", "model")


@pytest.mark.parametrize("name", [
    "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "tokenizer.json", "merges.txt", "generation_config.json"])
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_pipes_and_devices_are_refused(model, workdir, capfd, name, kind):
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
        message = refused(capfd, workdir, "--model", "model", "--prompt", "some text")
    assert f"{name} is {kind}" in message


def test_prompts_may_come_through_a_pipe(model, workdir, capfd):
    os.mkfifo(workdir / "prompts.jsonl")
    writer = threading.Thread(
        target=lambda: (workdir / "prompts.jsonl").write_text('{"prompt": ""}'))
    writer.start()
    with time_limit(20):
        message = refused(capfd, workdir, "--model", "model", "--prompts", "prompts.jsonl")
    writer.join()
    assert "prompts.jsonl line 1 has no text" in message


@contextlib.contextmanager
def time_limit(seconds: float):
    """Fail after a number of seconds."""
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
def test_nonfinite_weights_are_an_error(model, workdir, capfd, value, argv):
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"].fill_(value)
    save_file(tensors, model / "model.safetensors")
    message = refused(capfd, workdir, "--model", "model", *argv)
    assert "logits of prompt" in message and "not finite" in message


# The model


@pytest.mark.parametrize(("argv", "words"), [
    (("--model", LONG), "File name too long"), (("--path", f"{LONG}/model.gguf"), "too long"),
    (("--path", LONG, "--device", "auto", "--plan-only", "--hardware", "t4.yaml"), "too long"),
    (("--weight-bits", "4", "--weight-cache", LONG), "cannot write"),
    (("--offload-dir", LONG, *DISK), f"offload folder {LONG} can't be used"),
    (("--config", "~no-user/a.yaml"), "--config ~no-user/a.yaml: No such file")])
def test_paths_that_cannot_be_accessed(model, workdir, capfd, argv, words):
    """A name that is too long replaces a path in a folder without permission: root may
    enter all. A user may have no home folder."""
    shutil.copy(Path(__file__).parents[2] / "configs" / "hardware" / "t4.yaml", workdir)
    given = [*SHORT, "--no-log", "--model", "model", *argv]
    assert words in command_refused(generate.main, capfd, given)


# What stays cached


def test_position_flags_the_model_cannot_use(tiny_model, model, workdir, capfd):
    for folder, flag in (("model", "--hh-long-seq"),
                         (str(tiny_model("opt").folder), "--enable-position-rolling")):
        assert "positions" in refused(capfd, workdir, "--model", folder, "--hh-ratio", "0.5", flag)


# The prompts


@pytest.mark.parametrize("flags", [(), ("--plan-only",)])
def test_too_long_prompt_is_refused_by_token_count(model, workdir, capfd, monkeypatch, flags):
    """And not for its memory, which is lacking, too."""
    monkeypatch.setattr(memory_check, "free_memory", lambda *_: MemoryLimits(None, 10**9, 10**9))
    words = with_words(model, workdir / "words")
    argv = [*OF_TEXTS, "--model", words, "--prompts", "p.txt", "--gen-len", "8", *flags]
    for count, message in ((2_500_000, r"about \d{7} tokens, more than the model's 256 positions"),
                           (300, "has 300 tokens, more than the model's 256 positions"),
                           (250, "250 tokens and 8 new ones exceed the model's 256 positions")):
        (workdir / "p.txt").write_text("w1\n" + "w23 " * count)
        assert re.search(message, command_refused(generate.main, capfd, argv))


@pytest.mark.parametrize(("read", "keys"), [
    (launch.read_prompts, "prompt"), (readers.read_summary_tasks, "article summary_gt stop"),
    (readers.read_conversations, "turns")])
def test_lone_surrogates_in_files_are_refused(workdir, read, keys):
    """In each text that is read, and a whole pair is none."""
    for key in keys.split():
        lines = [{name: ["w1 " + text] if name in ("stop", "turns") else "w1 " + text
                  for name in keys.split() if (text := "\ud800" if name == bad else "\U0001f600")}
                 for bad in ("none", key)]
        (workdir / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
        with pytest.raises(UserError, match=r"p.jsonl line 2 is not text in UTF-8.*'\\ud800'"):
            read("p.jsonl")
        (workdir / "p.jsonl").write_text(json.dumps(lines[0]))
        assert len(read("p.jsonl")) == 1


def test_text_without_a_usable_tokenizer(model, workdir, capfd):
    assert "no tokenizer" in refused(capfd, workdir, "--model", "model", "--prompt", "some text")
    (model / "tokenizer.json").write_text("{")
    assert "tokenizer" in refused(capfd, workdir, "--model", "model", "--prompt", "some text")


# The disk


def failing(number: int, after: int = 0):
    """Return a wrapper of a system call that fails after its first `after` calls."""
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
def test_disk_full_while_offloading(model, workdir, capfd, monkeypatch, call, after, number):
    monkeypatch.setattr(os, call, failing(number, after)(getattr(os, call)))
    message = refused(capfd, workdir, "--model", "model", *DISK, "--gen-len", "40")
    assert re.search("the disk of .* is full: free some space.*--offload-dir", message)


@pytest.mark.parametrize(("call", "flags", "words"), [
    ("pwritev", ("--path", "_DUMMY_"), "is full"), ("fsync", ("--dtype", "bfloat16"), "No space"),
], ids=["dummy weights", "converted copy"])
def test_disk_full_while_writing_weights(model, workdir, capfd, monkeypatch, call, flags, words):
    monkeypatch.setattr(os, call, failing(errno.ENOSPC)(getattr(os, call)))
    assert words in refused(capfd, workdir, "--model", "model", *flags, *DISK)


@pytest.mark.parametrize("after", [0, 30])
def test_disk_that_cannot_be_read(model, workdir, capfd, monkeypatch, after):
    monkeypatch.setattr(os, "preadv", failing(errno.EIO, after)(os.preadv))
    message = refused(capfd, workdir, "--model", "model", *DISK)
    assert "Input/output error" in message


# A process of its own


# And what works


ALL_TIERS = ("--model", "model", "--percent", "30", "30", "50", "0", "50", "0", "--gen-len", "5",
             "--num-gpu-batches", "2", "--seed", "4")


def test_a_good_run_writes_all_results(model, workdir, capfd):
    argv = [*SHORT, *RESULTS, "--offload-dir", "offload", *ALL_TIERS]
    assert generate.main(argv) == 0
    out, err = capfd.readouterr()
    assert err == "" and "total throughput" in out
    assert list((workdir / "offload").iterdir()) == []
    files = {path.name for path in workdir.iterdir() if path.is_file()}
    assert files == {"o.jsonl", "r.csv", "t.json", "l.log", "o.jsonl.config.yaml",
                     "r.csv.config.yaml", "l.log.config.yaml"}

    with LLM("model", dtype="float32", device="cpu") as llm:
        prompts = launch.synthetic_prompts(generate.parse_args(argv), llm.vocab_size)
        expected = llm.generate(prompts, max_new_tokens=5, eos_token_id=-1)
    assert read_jsonl("o.jsonl") == [
        {"prompt": None, "prompt_tokens": 6, "token_ids": output.token_ids, "text": None,
         "finish_reason": "length"} for output in expected]
    assert "total throughput" in (workdir / "l.log").read_text()

    (row,) = read_csv(workdir / "r.csv")
    assert tuple(row) == CSV_COLUMNS
    wanted = {"model": "model", "weights_gpu": "30", "weights_disk": "40", "cache_disk": "50",
              "activations_disk": "50", "gpu_batch_size": "2", "num_gpu_batches": "2",
              "num_prompts": "4", "prompt_tokens": "24", "generated_tokens": "20",
              "gen_len": "5", "dtype": "float32", "device": "cpu", "projected": "false"}
    assert {name: row[name] for name in wanted} == wanted
    for name in ("total_tokens_per_second", "disk_to_cpu_gb", "cpu_to_disk_gb", "prefill_seconds",
                 "kv_cache_bytes", "peak_process_bytes"):
        assert float(row[name]) > 0, name

    trace = json.loads((workdir / "t.json").read_text())
    events = trace["traceEvents"]
    assert trace["otherData"]["decode_steps"] == 4 and set(CSV_COLUMNS) < set(trace["otherData"])
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"compute", "disk->cpu", "cpu->disk"} <= tracks
    computed = [event["name"] for event in events if event.get("cat") == "compute"]
    assert len(computed) == 5 * (3 + 2) * 2  # tokens, layers with embedding and head, batches

    assert generate.main(["--config", "o.jsonl.config.yaml", "--output", "again.jsonl",
                          "--verbose", "0"]) == 0
    assert capfd.readouterr() == ("", "")
    assert (workdir / "again.jsonl").read_text() == (workdir / "o.jsonl").read_text()
    assert len(read_csv(workdir / "r.csv")) == 2


@pytest.mark.parametrize("argv", [
    ("--hh-ratio", "0.1", "0.2", "1", "--prefill-chunk", "16"),
    ("--hh-ratio", "0.1", "--hh-all", "false", "--score", "mean", "--cache-bits", "8"),
    ("--num-window-length", "16", "--eviction", "sink-window", "--key-bits", "8",
     "--value-bits", "4")])
def test_planned_cache_bytes_equal_the_run(model, workdir, argv):
    argv = [*SHORT, "--model", "model", "--prompt-len", "40", "--gen-len", "9", "--csv", "r.csv",
            "--no-log", "--verbose", "0", *argv]
    assert generate.main(argv) == 0
    (row,) = read_csv(workdir / "r.csv")
    config = generate.parse_args(argv)
    sizes = from_transformers(json.loads((model / "config.json").read_text()), "model")
    cache = config.cache()
    run = PlannedRun(sizes, config.policy(), Workload(40, 9, 2, 1), itemsize=4, cache=cache)
    plan = MemoryPlan(run)
    (planned,) = (row.cpu for row in plan.rows if row.name == "cache")
    assert int(row["kv_cache_bytes"]) == planned
    assert int(row["full_kv_cache_bytes"]) == 2 * 48 * sizes.kv_bytes_per_token(4)
    assert int(row["kv_bytes_per_token"]) == 3 * kv_entry_bytes(cache, sizes, 4)


@pytest.mark.parametrize(("stdout", "status", "err"), [
    ("full", 2, "error: cannot print to stdout: No space left on device\n"), ("head", 0, ""),
    ("closed", 0, "")])
def test_results_are_written_though_stdout_fails(model, workdir, capfd, monkeypatch, stdout, status,
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
    assert len((workdir / "o.jsonl").read_text().splitlines()) == 2
    assert len(read_csv(workdir / "r.csv")) == 1 and (workdir / "l.log").exists()


@PLACES
def test_ctrl_c_leaves_no_files(model, workdir, capfd, monkeypatch, percent):
    modes = []

    def interrupt(step):
        # In the middle: files are on disk and transfers under way.
        modes.extend(path.stat().st_mode & 0o777 for path in Path("offload").glob("*"))
        if step.forward_pass == 2:
            raise KeyboardInterrupt

    before_logits(monkeypatch, interrupt)
    before, threads = tree(workdir.parent), set(threading.enumerate())
    argv = [*SHORT, *RESULTS, "--model", "model", "--offload-dir", "offload", *percent]
    assert generate.main(argv) == 130
    assert capfd.readouterr() == ("", "interrupted\n")
    assert bool(modes) == (percent == DISK) and set(modes) <= {0o700}
    assert tree(workdir.parent) == before and no_leftovers(threads)
