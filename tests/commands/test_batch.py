"""The batch command on a tiny model: whole jobs, stops, kills, resumption, errors."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import planning_cases, selection
from helpers.batch_jobs import job_flags, requests, write_lines
from helpers.error_cases import command_refused, refused
from helpers.fake_llm import run_stats
from helpers.read_back import read_csv, read_jsonl
from helpers.subprocesses import environment
from helpers.tiny_tokenizers import with_words

from flexgen_h2o import LLM
from flexgen_h2o.cli import commands
from flexgen_h2o.cli.entry_point import ALL_FAILED, StopRequest
from flexgen_h2o.commands import batch
from flexgen_h2o.commands.batch import job
from flexgen_h2o.commands.batch.job import JobProgress
from flexgen_h2o.errors import InsufficientMemory, NonFiniteLogits, UserError
from flexgen_h2o.outputs import Output
from flexgen_h2o.requests import results
from flexgen_h2o.requests.input import JobInput
from flexgen_h2o.requests.results import ResultsFile


class Runs:
    """A folder with a job, and the command on it."""

    def __init__(self, folder: Path, model: str, capsys):
        self.folder, self.model, self.capsys = folder, model, capsys
        self.output = folder / "out.jsonl"

    def argv(self, *flags: str) -> list[str]:
        return job_flags(self.folder, self.model, "out.jsonl", *flags)

    def __call__(self, *flags: str, status: int = 0) -> str:
        """Run the command, and return its output."""
        self.capsys.readouterr()
        assert batch.main(self.argv(*flags)) == status, self.capsys.readouterr().err
        return "".join(self.capsys.readouterr())

    def input(self, lines: list[object]) -> None:
        write_lines(self.folder / "in.jsonl", lines)

    def answered(self) -> int:
        """Return the number of result lines."""
        return len(read_jsonl(self.output))

    def texts(self, path: Path | None = None) -> dict[str, list]:
        """The choices of each request that has been answered; no id is there twice."""
        lines = [line for line in read_jsonl(path or self.output)
                 if line["response"] and line["response"]["status_code"] == 200]
        choices = {line["custom_id"]: line["response"]["body"]["choices"] for line in lines}
        assert len(choices) == len(lines)
        return choices


@pytest.fixture
def runs(tmp_path, words_model, capsys, monkeypatch) -> Runs:
    """A folder with a job, on a machine whose rates need not be measured."""
    monkeypatch.setattr("flexgen_h2o.planning.calibrate.load_or_calibrate",
                        lambda *_, **__: planning_cases.CPU)
    job = Runs(tmp_path, words_model, capsys)
    job.input(requests())
    return job


# --- whole jobs


def test_answers_equal_those_of_single_calls(runs, words_model):
    chat = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": {
        "model": Path(words_model).name, "messages": [{"role": "user", "content": "w5 w6"}],
        "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 2}}
    tokens = {"custom_id": "ids", "method": "POST", "url": "/v1/completions", "body": {
        "prompt": [[5, 6], [7]], "max_tokens": 3, "seed": 9, "n": 2, "logprobs": 1}}
    runs.input([chat, tokens, {"prompt": "w8 w9", "temperature": 0, "max_tokens": 6, "id": "free"}])
    assert "3 of 3 requests answered, 0 of them failed; 22 tokens" in runs("--seed", "3")
    bodies = {line["custom_id"]: line["response"]["body"] for line in read_jsonl(runs.output)}
    with LLM(words_model, dtype="float32", device="cpu") as llm:
        (one,) = llm.generate(["w1 w5 w6 w2"], max_new_tokens=4)
        (free,) = llm.generate(["w8 w9"], max_new_tokens=6)
        names = [" " + llm.tokenizer.decode([token]) for token in one.token_ids]
    (choice,) = bodies["chat"]["choices"]
    assert choice["message"]["content"] == one.text
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == names
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] > -99
               for entry in choice["logprobs"]["content"])
    assert bodies["chat"]["usage"] == {"prompt_tokens": 4, "completion_tokens": 4,
                                       "total_tokens": 8}
    assert bodies["free"]["choices"][0]["text"] == free.text
    assert len({choice["text"] for choice in bodies["ids"]["choices"]}) == 4, "seeds of their own"
    assert [choice["index"] for choice in bodies["ids"]["choices"]] == [0, 1, 2, 3]
    # A stop string ends the text before it.
    runs.input([{"prompt": "w8 w9", "temperature": 0, "max_tokens": 6, "id": "s",
                 "stop": free.text.split()[2]}])
    runs("--overwrite")
    (stopped,) = runs.texts()["s"]
    assert (stopped["finish_reason"], stopped["text"].split()) == ("stop", free.text.split()[:2])


def test_fields_of_vllm_reach_the_engine(runs, words_model):
    greedy = {"prompt": "w8 w9", "temperature": 0, "max_tokens": 6}
    with LLM(words_model, dtype="float32", device="cpu") as llm:
        whole = llm.generate(["w8 w9"], max_new_tokens=6)[0]
        third = whole.token_ids[2]
        (banned,) = llm.generate(["w8 w9"], max_new_tokens=6, logit_bias={third: -100})
        chats = llm.generate(["w5 w6", "w5 w6 w7", "w5 w8"], max_new_tokens=3)
    fields = [{}, {"reasoning_effort": "w7"}, {"chat_template_kwargs": {"extra": "w8"}}]
    runs.input([
        *({"id": name, "messages": [{"role": "user", "content": "w5"}], "temperature": 0,
           "max_tokens": 3, **extra} for name, extra in zip("abc", fields, strict=True)),
        {**greedy, "id": "stop", "stop_token_ids": [third]},
        {**greedy, "id": "least", "stop_token_ids": [third], "min_tokens": 6},
        {**greedy, "id": "bias", "logit_bias": {str(third): -100}},
        {**greedy, "id": "echo", "prompt": ["w8 w9", [8, 9]], "echo": True},
        {**greedy, "id": "far", "logit_bias": {"120": 1}},
        {**greedy, "id": "far stop", "stop_token_ids": [120]}])
    template = ["--chat-template", str(runs.folder / "template")]
    (runs.folder / "template").write_text(
        "{% for m in messages %}{{ m.content }} {% endfor %}{{ extra }} {{ reasoning_effort }}")
    printed = runs(*template, "--chat-template-kwargs", '{"extra": "w6"}')
    assert "9 of 9 requests answered, 2 of them failed" in printed
    texts = runs.texts()
    assert [texts[name][0]["message"]["content"] for name in "abc"] == [out.text for out in chats]
    stopped = texts["stop"][0]
    assert (stopped["finish_reason"], stopped["text"].split()) == ("stop", whole.text.split()[:2])
    assert third not in [int(word[1:]) for word in texts["least"][0]["text"].split()]
    assert texts["bias"][0]["text"] == banned.text != whole.text
    assert [choice["text"] for choice in texts["echo"]] == ["w8 w9" + whole.text] * 2
    assert runs.output.read_text().count("token id 120 is not below the vocabulary's 120") == 2
    # Fields for the whole job are those that a request does not give; they decide the texts.
    flags = ["--request-defaults", f'{{"stop_token_ids": [{third}]}}', "--top-k", "1"]
    assert "was made with request_defaults" in runs(*template, *flags, status=2)
    runs.input([{**greedy, "id": "job", "temperature": 1}, {**greedy, "id": "own",
                                                            "stop_token_ids": []}])
    runs(*flags, "--overwrite")
    assert runs.texts()["job"] == [stopped] and runs.texts()["own"][0]["text"] == whole.text
    for defaults, words in (('{"top_k": 2}', "both give top_k"), ("[]", "JSON object"),
                            ('{"model": "x"}', "unknown key 'model'")):
        assert words in runs("--top-k", "1", "--request-defaults", defaults, status=2)


def test_a_request_without_a_length_ends_with_the_positions(runs):
    near = " ".join(["w4"] * 250)
    runs.input([{"id": "clamped", "prompt": [near, "w4"], "ignore_eos": True},
                {"id": "named", "prompt": near, "max_tokens": 32},
                {"id": "least", "prompt": near, "min_tokens": 8}])
    assert "3 requests answered, 2 of them failed" in runs()
    bodies = {line["custom_id"]: line["response"]["body"] for line in read_jsonl(runs.output)}
    assert [len(choice["text"].split()) for choice in bodies["clamped"]["choices"]] == [7, 32]
    assert "generate at most 7" in bodies["named"]["error"]["message"]
    assert "min_tokens 8 is more than the 7" in bodies["least"]["error"]["message"]
    runs.capsys.readouterr()
    assert batch.main([*runs.argv()[:2], "--model", runs.model, "--dry-run"]) == 0
    assert "at most 39, 32 of one sequence" in "".join(runs.capsys.readouterr())


def test_a_job_with_only_failures_has_its_own_exit_status(runs):
    runs.input(["{broken\n", {"id": "t", "prompt": "w3", "tools": [1]}])
    for _ in range(2):  # going on, too
        assert "2 of 2 requests answered, 2 of them failed" in runs(status=ALL_FAILED)
        assert runs.answered() == 2
    assert commands.main(["batch", *runs.argv()]) == ALL_FAILED
    assert batch.main([*runs.argv()[:2], "--model", runs.model, "--dry-run"]) == ALL_FAILED
    runs.input(["{broken\n", {"id": "t", "prompt": "w3"}])
    runs("--overwrite")


def test_failed_requests_do_not_stop_the_job(runs):
    bad = [{"id": "r0", "prompt": "w3"}, "{broken\n", {"id": "t", "prompt": "w3", "tools": [1]},
           {"id": "long", "prompt": " ".join(["w4"] * 400)},
           {"id": "much", "prompt": "w3", "max_tokens": 300},
           {"id": "big", "prompt": [5, 4000]}, {"id": "m", "prompt": "w3", "model": "gpt-4"}]
    runs.input([*requests(2), *bad])
    errors = runs.folder / "errors.jsonl"
    argv, summary = ("--errors", str(errors)), "9 of 9 requests answered, 7 of them failed"
    assert summary in runs(*argv) and {*runs.texts()} == {"r0", "r1"}
    failures = {line["custom_id"]: (line["error"] or line["response"]["body"]["error"])["message"]
                for line in read_jsonl(errors)}
    for name, words in {"r0": "line 3: 'r0' is the id of an earlier line", None: "line 4: the line",
                        "t": "line 5: tools", "m": "line 9: there is no model 'gpt-4' here",
                        "long": "line 6: prompt of line 6 has", "big": "token id 4000 is not below",
                        "much": "300 new ones exceed the model's 256 positions"}.items():
        assert words in failures[name]
    # Neither file is run again; without --errors the lines go to the one file.
    before = runs.output.read_bytes(), errors.read_bytes()
    assert summary in runs(*argv)
    assert (runs.output.read_bytes(), errors.read_bytes()) == before
    # A failure in both files that is retried without --errors counts once.
    runs()
    assert summary in runs(*argv)
    runs("--overwrite")
    assert len(read_jsonl(runs.output)) == 9
    # Without results and their settings it is the file of failures that is another job's.
    for path in (runs.output, f"{runs.output}.config.yaml"):
        os.unlink(path)
    assert f"--errors {errors} has lines of another" in runs(*argv, status=2)


def test_a_strict_job_runs_all_or_nothing(runs):
    runs.input(requests(2))
    assert "2 of 2 requests answered" in runs("--strict")
    before = runs.output.read_bytes()
    runs.input([*requests(2), {"prompt": " ".join(["w4"] * 400)}])
    printed = runs("--strict", "--overwrite", status=2)
    assert "1 of 3 requests" in printed and "line 3: prompt of line 3 has 400" in printed
    assert runs.output.read_bytes() == before
    runs.output.unlink()
    runs("--strict", status=2)
    assert not runs.output.exists()


@pytest.mark.parametrize("flags", [
    ["--percent", "0", "50", "0", "50", "--window", "5", "--gpu-batch-size", "3",
     "--num-gpu-batches", "2"], *selection.full(["--window", "1"])])
def test_texts_do_not_depend_on_policy_grouping_or_order(runs, flags, tmp_path):
    runs()
    first = runs.texts()
    runs.input(requests()[::-1])
    runs("--overwrite", "--offload-dir", str(tmp_path / "offload"), *flags)
    assert runs.texts() == first and len(first) == 12


class InstantLLM:
    """An engine that answers at once, with a token of a single prompt each; it keeps the sizes of
    its calls."""

    tokenizer = None
    vocab_size = 120

    def __init__(self):
        self.calls: list[int] = []
        self.stats = None

    def encode(self, prompt, **_) -> list[int]:
        return list(prompt)

    def clamp_new_tokens(self, tokens: int, most: int) -> int:
        return most

    def generate_in_blocks(self, prompts, params):
        self.calls.append(len(prompts))
        for key in range(len(prompts)):
            yield {key: Output(None, prompts[key], [1], None, "length")}


def run_job(llm: InstantLLM, path: str, *flags: str) -> tuple[job.Job, JobProgress]:
    """Run a job on a fake engine; results go into the file `out` beside its input."""
    output = str(Path(path).with_name("out"))
    options = batch.parse_args(["-i", path, "-o", output, *flags])
    with JobInput(path) as lines, ResultsFile("--output", output) as file:
        progress = JobProgress(len(lines), 0, 0, None)
        work = job.Job(llm, lines, options, results=file, errors=file, progress=progress,
                       should_end=lambda: False)
        work.run(range(len(lines)))
    progress.end()
    return work, progress


def test_memory_does_not_grow_with_the_number_of_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(results.os, "fsync", lambda descriptor: None)
    most = {}
    for count in (200, 600):
        path = write_lines(tmp_path / "in.jsonl", [{"prompt": [7] * 300, "n": 1 + number % 2}
                                             for number in range(count)])
        llm = InstantLLM()
        tracemalloc.start()
        _, progress = run_job(llm, path, "--window", "128")
        most[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        (tmp_path / "out").unlink()
        assert progress.answered == count and max(llm.calls) <= 129 < sum(llm.calls)
    assert most[600] < 1.5 * most[200]


class SmallLLM(InstantLLM):
    """An engine of limited memory: a call is refused, or fails at its second block."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity

    def generate_in_blocks(self, prompts, params):
        largest = max(map(len, prompts))
        if largest > self.capacity:
            raise InsufficientMemory("the run does not fit")
        for place, outputs in enumerate(super().generate_in_blocks(prompts, params)):
            self.stats = run_stats()
            if place and largest * len(prompts) > 2 * self.capacity:
                raise InsufficientMemory("there is too little memory")
            yield outputs


@pytest.mark.parametrize("capacity", [4, 100, 1000])
def test_requests_that_do_not_fit_together_run_apart(tmp_path, caplog, capacity):
    lengths = [3, 9, 30, 1, 12, 2, 21, 5, 4, 1]
    path = write_lines(tmp_path / "in.jsonl", [
        {"prompt": [7] * length, "id": number, "n": 1 + number % 2}
        for number, length in enumerate(lengths)])
    work, progress = run_job(SmallLLM(capacity), path)
    lines = {line["custom_id"]: line["response"] for line in read_jsonl(tmp_path / "out")}
    fitting = {str(number) for number, length in enumerate(lengths) if length <= capacity}
    assert {name for name, line in lines.items() if line["status_code"] == 200} == fitting
    assert {line["body"]["error"]["code"] for name, line in lines.items() if name not in fitting
            } <= {"insufficient_memory"}
    assert len(lines) == progress.answered == 10 and progress.failed == 10 - len(fitting)
    assert work.stats is not None and bool(caplog.text) == (capacity < 1000)
    # Where none fits, it is the job that does not.
    (tmp_path / "out").unlink()
    refused(lambda: run_job(SmallLLM(0), path), "does not fit")
    assert not (tmp_path / "out").exists()


class DamagedLLM(InstantLLM):
    """An engine whose logits are NaN for prompts with the token 9."""

    def generate_in_blocks(self, prompts, params):
        for key, prompt in enumerate(prompts):
            if 9 in prompt:
                raise NonFiniteLogits(f"the model's logits of prompt {key} are not finite (nan)",
                                      key)
            yield {key: Output(None, prompt, [1], None, "length")}


@pytest.mark.parametrize("damaged", [{0}, {4}, {1, 3, 4}])
def test_requests_whose_logits_are_not_finite_fail_alone(tmp_path, damaged):
    path = write_lines(tmp_path / "in.jsonl", [
        {"prompt": [9 if number in damaged else 7], "id": number, "n": 1 + number % 2}
        for number in range(5)])
    _, progress = run_job(DamagedLLM(), path)
    errors = {int(line["custom_id"]): line["response"]["body"]["error"]["code"]
              for line in read_jsonl(tmp_path / "out") if line["response"]["status_code"] != 200}
    assert errors == dict.fromkeys(damaged, "logits_not_finite")
    assert (progress.answered, progress.failed) == (5, len(damaged))


def test_a_model_whose_logits_are_not_finite_ends_the_job(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": [9], "id": name} for name in range(9)])
    refused(lambda: run_job(DamagedLLM(), path), "logits of prompt 0 are not finite")
    assert len(read_jsonl(tmp_path / "out")) == 1


def test_job_writes_progress_csv_and_plot(runs, tmp_path):
    runs.input([*requests(), "{broken\n"])
    files = {name: tmp_path / name for name in ("p.json", "r.csv", "p.png")}
    printed = runs("--progress-file", str(files["p.json"]), "--csv", str(files["r.csv"]), "--plot",
                   str(files["p.png"]))
    usages = [line["response"]["body"]["usage"] for line in read_jsonl(runs.output)
              if line["response"]]
    expected = {"state": "finished", "requests": 13, "answered": 13, "failed": 1, "left": 0,
                "generated_tokens": sum(usage["completion_tokens"] for usage in usages),
                "prompt_tokens": sum(usage["prompt_tokens"] for usage in usages)}
    assert json.loads(files["p.json"].read_text()).items() >= expected.items()
    (row,) = read_csv(files["r.csv"])
    assert row["generated_tokens"] == str(expected["generated_tokens"])
    assert row["num_prompts"] == "13" and files["p.png"].read_bytes().startswith(b"\x89PNG")
    assert "total throughput" in printed and f"{expected['generated_tokens']} tokens in" in printed


def test_progress_counts_by_a_clock_of_its_own(tmp_path, monkeypatch):
    now, path = [100.0], tmp_path / "p.json"
    progress = JobProgress(10, 4, 1, str(path), clock=lambda: now[0])
    assert json.loads(path.read_text())["seconds_left"] is None
    now[0] += 50
    progress.begin()
    now[0] += 2
    monkeypatch.setattr(time, "time", lambda: -5.0)
    progress.add(answered=2, failed=1, prompt_tokens=3, generated_tokens=8)
    record = json.loads(path.read_text())
    assert {name: record[name] for name in ("seconds", "seconds_left", "tokens_per_second",
                                            "answered", "failed", "left", "updated")} == {
        "seconds": 52, "seconds_left": 4, "tokens_per_second": 4, "answered": 6, "failed": 2,
        "left": 4, "updated": -5}
    assert [progress.is_over(hours) for hours in (None, 1, 52 / 3600)] == [False, False, True]
    progress.end()
    assert json.loads(path.read_text())["state"] == "stopped"
    progress = JobProgress(10, 0, 0, None, clock=lambda: now[0])
    for _ in range(9000):
        now[0] += 1
        progress.add(answered=0, generated_tokens=1)
    assert 2048 < len(progress.samples) <= 4096 and progress.samples[0].seconds == 0


def test_a_dry_run_counts_and_predicts(runs):
    runs.input([*requests(), "{broken\n"])
    argv = [flag for flag in runs.argv() if flag not in ("-o", str(runs.output))]
    for flags, status in (([], 0), (["--percent", "auto"], 0), (["--strict"], 2)):
        runs.capsys.readouterr()
        assert batch.main([*argv, "--dry-run", *flags]) == status
        printed = runs.capsys.readouterr().out
        assert "13, of which 1 cannot run" in printed and "line 13: the line is not JSON" in printed
        assert "sequences      13" in printed and "at most 57, 6 of one sequence" in printed
        assert "predicted" in printed and "hours, each to its most tokens" in printed
    assert not runs.output.exists()


def test_a_planned_job_runs(runs):
    printed = runs("--percent", "auto")
    assert "plan " in printed and "12 of 12 requests answered" in printed
    runs.input(["{broken\n", "[]\n"])
    printed = runs("--percent", "auto", "--overwrite", status=ALL_FAILED)
    assert "2 of 2 requests answered, 2 of them failed" in printed


# --- jobs that are stopped


@pytest.fixture
def after_blocks(monkeypatch) -> Callable[[int, Callable[[], object]], None]:
    """Return a function that calls another after a number of written blocks."""
    def watch(count: int, call: Callable[[], object]) -> None:
        add, blocks = JobProgress.add, []

        def counted(self, **counts) -> None:
            add(self, **counts)
            blocks.append(True)
            if len(blocks) == count:
                call()

        monkeypatch.setattr(JobProgress, "add", counted)

    return watch


@pytest.mark.parametrize("number", [signal.SIGTERM, *selection.full(signal.SIGINT, signal.SIGHUP)])
def test_a_signal_ends_the_job_after_the_block(runs, after_blocks, monkeypatch, number):
    runs()
    whole = runs.texts()
    before = signal.getsignal(number)
    after_blocks(2, lambda: signal.raise_signal(number))
    printed = runs("--overwrite")
    done = runs.answered()
    assert f"stopped, {12 - done} left" in printed and f"{done} of 12 requests" in printed
    assert 2 < done < 5 and signal.getsignal(number) == before
    printed = runs("--gpu-batch-size", "3")
    assert f"resuming: {done} of 12 requests" in printed and "finished; 12 of 12" in printed
    assert runs.texts() == whole


def test_a_second_signal_stops_at_once(runs, after_blocks):
    def twice() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    after_blocks(1, twice)
    printed = runs(status=130)
    assert 0 < runs.answered() < 3
    assert f"interrupted ({runs.answered()} of 12 requests are answered; run the same" in printed


def test_a_signal_while_the_model_loads_stops_at_once(runs, monkeypatch):
    monkeypatch.setattr(batch, "open_on_ranks",
                        lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    assert "interrupted (0 of 12 requests are answered" in runs(status=143)
    assert not runs.output.exists()


def test_signals_are_handled_in_the_main_thread_alone():
    requests, handlers = [], []
    with StopRequest(lambda: requests.append(1)) as stop_request:
        signal.raise_signal(signal.SIGINT)
        assert stop_request.requested and requests == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def in_another_thread() -> None:
        with StopRequest(lambda: None):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=in_another_thread)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_a_job_ends_when_its_hours_are_over(runs):
    printed = runs("--max-hours", "1e-9")
    assert f"stopped, {12 - runs.answered()} left" in printed and 0 < runs.answered() < 3
    assert "12 of 12" in runs("--max-hours", "1")


def engine_fails(runs: Runs, patch: pytest.MonkeyPatch) -> None:
    def full(*_):
        raise UserError("the offload disk is full")

    patch.setattr(LLM, "generate_in_blocks", full)


def progress_cannot_be_written(runs: Runs, patch: pytest.MonkeyPatch) -> None:
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(job, "open_atomic", full)


@pytest.mark.parametrize(("fault", "message"), [
    (engine_fails, "the offload disk is full"),
    (progress_cannot_be_written, "cannot write --progress-file")])
def test_a_fault_is_one_line_and_the_job_resumes(runs, after_blocks, monkeypatch, fault, message):
    runs()
    whole = runs.texts()
    flags = ["--window", "4", "--progress-file", str(runs.folder / "p.json")]
    with monkeypatch.context() as patch:
        after_blocks(2, lambda: fault(runs, patch))
        printed = runs("--overwrite", *flags, status=2)
        assert message in printed and printed.count("error: ") == 1
        assert "of 12 requests are answered; run the same command to resume)" in printed
        if runs.output.exists():
            assert {*runs.texts()} < {*whole}
    assert "finished; 12 of 12" in runs(*flags) and runs.texts() == whole


KILLER = """
import os, random, signal, sys, torch
from transformers import AutoTokenizer
from flexgen_h2o.engine.tokenizer import load_tokenizer
from flexgen_h2o.llm import LLM
from flexgen_h2o.commands import batch
from flexgen_h2o.requests.results import ResultsFile

def job(draw):
    # A job that is killed before, within or after a write of the first or second block.
    torch.set_num_threads(1)
    left, share, add = draw.randrange(2), draw.choice([0, draw.random(), 1]), ResultsFile.add
    def killed(file, lines):
        nonlocal left
        left -= 1
        if left < 0 and share < 1:
            data = b"".join(line + b"\\n" for line in lines)
            with open(file.path, "ab") as part:
                part.write(data[: int(len(data) * share)])
        else:
            add(file, lines)
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    ResultsFile.add = killed
    os._exit(batch.main(sys.argv[1:]))

model = sys.argv[sys.argv.index("--model") + 1]
AutoTokenizer.from_pretrained(model)  # what is imported here, the children need not import
draw = random.Random(1)
codes = []
for moment in range(int(sys.argv.pop())):
    child = os.fork()
    if child == 0:
        job(random.Random(draw.random()))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("ended", *codes)
"""


@pytest.mark.full
def test_killed_job_resumes_with_the_same_answers(runs):
    moments = 20
    runs.input(["{broken\n", *requests(90)])
    done = subprocess.run([sys.executable, "-c", KILLER, *runs.argv("--window", "7"), str(moments)],
                          capture_output=True, text=True, env=environment())
    assert done.stdout.endswith(f"ended {' '.join(['-9'] * moments)}\n"), done.stdout + done.stderr
    assert "resuming: " in runs()
    disturbed = runs.texts(), runs.answered()
    runs("--overwrite")
    assert disturbed == (runs.texts(), 91) and len(disturbed[0]) == 90


def test_a_resumed_job_with_other_batches_has_the_same_answers(runs):
    flags = ["--dtype", "bfloat16", "--batch-invariant"]
    runs.input([request | {"logprobs": 2} for request in requests(20)])
    runs(*flags, "--gpu-batch-size", "20")
    whole, lines = runs.texts(), runs.output.read_text().splitlines(keepends=True)
    runs.output.write_text("".join(lines[:7]))
    assert "resuming: " in runs(*flags, "--gpu-batch-size", "3", "--num-gpu-batches", "2")
    assert runs.texts() == whole
    assert "was made with batch_invariant True" in runs("--dtype", "bfloat16", status=2)


# --- errors


def test_results_of_another_job_are_refused(runs, words_model, tmp_path, tiny_model):
    runs.input(requests(3))
    runs()
    other = with_words(tiny_model("llama_head_dim").folder, tmp_path / "other")
    for flags, name in ((["--model", other], "model"), (["--seed", "4"], "seed 0, now it is 4"),
                        (["--temperature", "0"], "temperature 1"), (["--gen-len", "8"], "gen_len"),
                        (["--hh-ratio", "0.2"], "h2o"), (["--dtype", "bfloat16"], "dtype"),
                        (["--cache-bits", "4", "--key-bits", "8"], "16, now it is [8, 4]")):
        printed = runs(*flags, status=2)
        assert "was made with" in printed and name in printed
    runs.input([*requests(2), {"id": "r2", "prompt": "w9"}])
    assert "answers a request that --input" in runs(status=2)
    runs.input(requests(5))  # more than before
    assert "finished; 5 of 5" in runs()
    os.unlink(f"{runs.output}.config.yaml")
    assert "cannot be resumed" in runs(status=2)


@pytest.mark.parametrize(("flags", "words"), [
    ([], "give --input"), (["-i", "a.txt", "-o", "b"], "--input must name a .jsonl file"),
    *((["-i", "a.jsonl", "-o", "b", *flags], words) for flags, words in (
        (["--errors", "b"], "--output and --errors name the same file"),
        (["--temperature", "3"], "--temperature must be at most 2"),
        (["--plot", "p.txt"], "--plot must name"), (["--do-sample"], "unknown flag --do-sample"),
        (["--dry-run"], "--output has no effect with --dry-run"),
        (["--hardware", "h.yaml"], "add --dry-run"),
        (["--chat-template", "no"], "cannot read --chat-template no"),
        (["--data-parallel", "--ray"], "give one of them"),
        (["--data-parallel", "--plot", "p.png"], "leave it out with --data-parallel"),
        (["--data-parallel"], "torchrun --nproc-per-node 2 -m flexgen_h2o.batch"),
        (["--replicas", "2"], "--replicas has no effect without --ray"),
        (["--ray", "--ray-address", "ray://host:1"], "is a client's"),
        (["--ray", "--csv", "c.csv"], "--csv shows one process"),
        (["--ray", "--percent", "auto"], "--percent auto plans for one process"),
        (["--ray", "--device", "cuda:1"], "is one GPU of this machine")))])
def test_bad_flags_are_refused(refuses_flags, monkeypatch, flags, words):
    monkeypatch.delenv("RANK", raising=False)
    refuses_flags(batch.main, flags, words)


def test_a_config_file_gives_flags_that_have_an_effect(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("input: a.jsonl\noutput: b.jsonl\nwindow: 5\nhh_ratio: 0.2\n")
    options = batch.parse_args(["--config", str(path), "--window", "6"])
    assert (options.input, options.window, options.run.hh_ratio) == ("a.jsonl", 6, 0.2)
    path.write_text("input: a.jsonl\noutput: b.jsonl\nprompt_len: 5\n")
    command_refused(commands.main, capsys, ["batch", "--config", str(path)],
                    "--prompt-len has no effect on batch")
