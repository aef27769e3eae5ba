"""The batch command on a tiny model: whole jobs, stops, kills, resumption, errors."""

from __future__ import annotations

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
from flexgen_h2o.cli.command import ALL_FAILED, StopRequest
from flexgen_h2o.commands import batch
from flexgen_h2o.commands.batch import job, progress
from flexgen_h2o.commands.batch.progress import JobProgress
from flexgen_h2o.errors import InsufficientMemory, NonFiniteLogits, UserError
from flexgen_h2o.outputs import Output
from flexgen_h2o.requests import results
from flexgen_h2o.requests.input import JobInput
from flexgen_h2o.requests.request import derive_seed
from flexgen_h2o.requests.results import ResultsFile


class Runs:
    """A folder with a job, and the command on it."""

    def __init__(self, folder: Path, model: str, capsys):
        self.folder, self.model, self.capsys = folder, model, capsys
        self.output = folder / "out.jsonl"

    def argv(self, *flags: str) -> list[str]:
        return job_flags(self.folder, self.model, "out.jsonl", *flags)

    def __call__(self, *flags: str, status: int = 0) -> str:
        """Run it; returns what it prints."""
        self.capsys.readouterr()
        assert batch.main(self.argv(*flags)) == status, self.capsys.readouterr().err
        return "".join(self.capsys.readouterr())

    def input(self, lines: list[object]) -> None:
        write_lines(self.folder / "in.jsonl", lines)

    def answered(self) -> int:
        """How many lines of results there are."""
        return len(read_jsonl(self.output))

    def texts(self, path: Path | None = None) -> dict[str, list]:
        """The choices of each request that has been answered; no id is there twice."""
        lines = [line for line in read_jsonl(path or self.output)
                 if line["response"] and line["response"]["status_code"] == 200]
        found = {line["custom_id"]: line["response"]["body"]["choices"] for line in lines}
        assert len(found) == len(lines)
        return found


@pytest.fixture
def runs(tmp_path, words_model, capsys, monkeypatch) -> Runs:
    """A folder with a job, on a machine whose rates need not be measured."""
    monkeypatch.setattr("flexgen_h2o.planning.calibrate.load_or_calibrate",
                        lambda *_, **__: planning_cases.CPU)
    made = Runs(tmp_path, words_model, capsys)
    made.input(requests())
    return made


# --- whole jobs


def test_answers_equal_those_of_single_calls(runs, words_model):
    chat = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": {
        "model": Path(words_model).name, "messages": [{"role": "user", "content": "w5 w6"}],
        "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 2}}
    tokens = {"custom_id": "ids", "method": "POST", "url": "/v1/completions", "body": {
        "prompt": [[5, 6], [7]], "max_tokens": 3, "seed": 9, "n": 2, "logprobs": 1}}
    runs.input([chat, tokens, {"prompt": "w8 w9", "temperature": 0, "max_tokens": 6, "id": "free"}])
    told = runs("--seed", "3")
    assert "finished; 3 of 3 requests answered, 0 of them failed; 22 tokens" in told
    found = {line["custom_id"]: line["response"]["body"] for line in read_jsonl(runs.output)}
    with LLM(words_model, dtype="float32", device="cpu") as llm:
        (one,) = llm.generate(["w1 w5 w6 w2"], max_new_tokens=4)
        assert found["chat"]["choices"][0]["message"]["content"] == one.text
        for place, entry in enumerate(found["chat"]["choices"][0]["logprobs"]["content"]):
            assert entry["token"] == " " + llm.tokenizer.decode([one.token_ids[place]])
            assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] > -99
            assert len(entry["top_logprobs"]) == 2
        (free,) = llm.generate(["w8 w9"], max_new_tokens=6)
        assert found["free"]["choices"][0]["text"] == free.text
        stop = free.text.split()[2]
    assert found["chat"]["usage"] == {"prompt_tokens": 4, "completion_tokens": 4,
                                      "total_tokens": 8}
    texts = [choice["text"] for choice in found["ids"]["choices"]]
    assert len({*texts}) == 4  # each choice has random numbers of its own
    assert found["ids"]["usage"]["prompt_tokens"] == 3
    assert found["ids"]["choices"][3]["index"] == 3
    # A stop string ends the text before it.
    runs.input([{"prompt": "w8 w9", "temperature": 0, "max_tokens": 6, "id": "s", "stop": stop}])
    runs("--overwrite")
    (stopped,) = runs.texts()["s"]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"].split() == free.text.split()[:2]


def test_fields_of_vllm_reach_the_engine(runs, words_model):
    chats = [{"id": name, "messages": [{"role": "user", "content": "w5"}], "temperature": 0,
              "max_tokens": 3, **more} for name, more in {
                  "plain": {}, "job": {"reasoning_effort": "w7"},
                  "own": {"chat_template_kwargs": {"extra": "w8"}}}.items()]
    greedy = {"prompt": "w8 w9", "temperature": 0, "max_tokens": 6}
    template = runs.folder / "template"
    template.write_text(
        "{% for m in messages %}{{ m.content }} {% endfor %}{{ extra }} {{ reasoning_effort }}")
    with LLM(words_model, dtype="float32", device="cpu") as llm:
        (whole, other) = llm.generate(["w8 w9", "w7"], max_new_tokens=6)
        third = whole.token_ids[2]
        (banned,) = llm.generate(["w8 w9"], max_new_tokens=6, logit_bias={third: -100})
        want = {name: out.text for name, out in zip(
            ("plain", "job", "own"), llm.generate(["w5 w6", "w5 w6 w7", "w5 w8"], max_new_tokens=3),
            strict=True)}
    runs.input([
        *chats, {**greedy, "id": "stop", "stop_token_ids": [third]},
        {**greedy, "id": "least", "stop_token_ids": [third], "min_tokens": 6},
        {**greedy, "id": "bias", "logit_bias": {str(third): -100}},
        {**greedy, "id": "echo", "prompt": ["w8 w9", [8, 9]], "echo": True},
        {**greedy, "id": "far", "logit_bias": {"120": 1}},
        {**greedy, "id": "far stop", "stop_token_ids": [120]}])
    told = runs("--chat-template", str(template), "--chat-template-kwargs", '{"extra": "w6"}')
    assert "9 of 9 requests answered, 2 of them failed" in told
    found = runs.texts()
    assert {name: found[name][0]["message"]["content"] for name in want} == want
    stopped = found["stop"][0]
    assert (stopped["finish_reason"], stopped["text"].split()) == ("stop", whole.text.split()[:2])
    assert third not in [int(word[1:]) for word in found["least"][0]["text"].split()]
    assert found["bias"][0]["text"] == banned.text != whole.text
    assert [choice["text"] for choice in found["echo"]] == [
        "w8 w9" + whole.text, "w8 w9" + whole.text]
    assert runs.output.read_text().count("token id 120 is not below the vocabulary's 120") == 2
    # Fields for the whole job are those that a request does not give; they decide the texts.
    flags = ["--request-defaults", f'{{"stop_token_ids": [{third}]}}', "--top-k", "1"]
    told = runs("--chat-template", str(template), *flags, status=2)
    assert "was made with request_defaults {'chat_template_kwargs'" in told
    runs.input([{**greedy, "id": "job", "temperature": 1}, {**greedy, "id": "own",
                                                            "stop_token_ids": []}])
    runs(*flags, "--overwrite")
    assert runs.texts()["job"] == [stopped] and runs.texts()["own"][0]["text"] == whole.text
    for words, given in (("both give top_k", ["--top-k", "1", "--request-defaults",
                                               '{"top_k": 2}']),
                          ("JSON object", ["--request-defaults", "[]"]),
                          ("unknown key 'model'", ["--request-defaults", '{"model": "x"}'])):
        assert words in runs(*given, status=2)


def test_a_request_without_a_length_ends_with_the_positions(runs):
    near = " ".join(["w4"] * 250)
    runs.input([{"id": "clamped", "prompt": [near, "w4"], "ignore_eos": True},
                {"id": "named", "prompt": near, "max_tokens": 32},
                {"id": "most", "prompt": near, "max_tokens": 7, "ignore_eos": True},
                {"id": "least", "prompt": near, "min_tokens": 8}])
    assert "4 requests answered, 2 of them failed" in runs()
    found = {line["custom_id"]: line["response"]["body"] for line in read_jsonl(runs.output)}
    assert [len(choice["text"].split()) for choice in found["clamped"]["choices"]] == [7, 32]
    assert found["most"]["usage"]["completion_tokens"] == 7
    assert "generate at most 7" in found["named"]["error"]["message"]
    assert "min_tokens 8 is more than the 7 new tokens" in found["least"]["error"]["message"]
    runs.capsys.readouterr()
    assert batch.main([*runs.argv()[:2], "--model", runs.model, "--dry-run"]) == 0
    assert "at most 46, 32 of one sequence" in "".join(runs.capsys.readouterr())


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
    long = " ".join(["w4"] * 400)
    bad = [{"id": "r0", "prompt": "w3"}, "{broken\n", {"id": "t", "prompt": "w3", "tools": [1]},
           {"id": "long", "prompt": long}, {"id": "much", "prompt": "w3", "max_tokens": 300},
           {"id": "big", "prompt": [5, 4000]}, {"id": "m", "prompt": "w3", "model": "gpt-4"}]
    runs.input([*requests(2), *bad])
    errors = runs.folder / "errors.jsonl"
    told = runs("--errors", str(errors))
    assert "9 of 9 requests answered, 7 of them failed" in told
    assert [*runs.texts()] and {*runs.texts()} == {"r0", "r1"}
    found = {(line["custom_id"], (line["error"] or line["response"]["body"]["error"])["message"])
             for line in read_jsonl(errors)}
    for name, words in {"r0": "line 3: 'r0' is the id of an earlier line", None: "line 4: the line",
                        "t": "line 5: tools", "m": "line 9: there is no model 'gpt-4' here",
                        "long": "line 6: prompt of line 6 has", "big": "token id 4000 is not below",
                        "much": "300 new ones exceed the model's 256 positions"}.items():
        assert any(name == custom_id and words in message for custom_id, message in found), words
    # Neither file is run again; without --errors the lines go to the one file.
    before = runs.output.read_bytes(), errors.read_bytes()
    assert "9 of 9" in runs("--errors", str(errors))
    assert (runs.output.read_bytes(), errors.read_bytes()) == before
    # A failure in both files that is retried without --errors counts once.
    runs()
    assert "9 of 9 requests answered, 7 of them failed" in runs("--errors", str(errors))
    runs("--overwrite")
    assert len(read_jsonl(runs.output)) == 9
    # Without results and their settings it is the file of failures that is another job's.
    for path in (runs.output, f"{runs.output}.config.yaml"):
        os.unlink(path)
    assert f"--errors {errors} has lines of another" in runs("--errors", str(errors), status=2)


def test_a_strict_job_runs_all_or_nothing(runs):
    runs()
    before = runs.output.read_bytes()
    runs.input([*requests(), {"prompt": " ".join(["w4"] * 400)}])
    told = runs("--strict", "--overwrite", status=2)
    assert "1 of 13 requests" in told and "line 13: prompt of line 13 has 400 tokens" in told
    assert runs.output.read_bytes() == before
    runs.output.unlink()
    runs("--strict", status=2)
    assert not runs.output.exists()
    runs.input(requests(2))
    assert "2 of 2 requests answered" in runs("--strict")


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
    with JobInput(path) as found, ResultsFile("--output", output) as file:
        progress = JobProgress(len(found), 0, 0, None)
        work = job.Job(llm, found, options, results=file, errors=file, progress=progress,
                       should_end=lambda: False)
        work.run(range(len(found)))
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

    def __init__(self, room: int):
        super().__init__()
        self.room = room

    def generate_in_blocks(self, prompts, params):
        largest = max(map(len, prompts))
        if largest > self.room:
            raise InsufficientMemory("the run does not fit")
        for place, outputs in enumerate(super().generate_in_blocks(prompts, params)):
            self.stats = run_stats()
            if place and largest * len(prompts) > 2 * self.room:
                raise InsufficientMemory("there is too little memory")
            yield outputs


@pytest.mark.parametrize("room", [4, 100, 1000])
def test_requests_that_do_not_fit_together_run_apart(tmp_path, caplog, room):
    lengths = [3, 9, 30, 1, 12, 2, 21, 5, 4, 1]
    path = write_lines(tmp_path / "in.jsonl", [
        {"prompt": [7] * length, "id": number, "n": 1 + number % 2}
        for number, length in enumerate(lengths)])
    work, progress = run_job(SmallLLM(room), path)
    lines = {line["custom_id"]: line["response"] for line in read_jsonl(tmp_path / "out")}
    fitting = {str(number) for number, length in enumerate(lengths) if length <= room}
    assert {name for name, line in lines.items() if line["status_code"] == 200} == fitting
    assert {line["body"]["error"]["code"] for name, line in lines.items() if name not in fitting
            } <= {"insufficient_memory"}
    assert len(lines) == progress.answered == 10 and progress.failed == 10 - len(fitting)
    assert work.stats is not None and ("in smaller groups" in caplog.text) == (room < 1000)
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
    lines = {int(line["custom_id"]): line["response"] for line in read_jsonl(tmp_path / "out")}
    assert {number for number, line in lines.items() if line["status_code"] != 200} == damaged
    assert {lines[number]["body"]["error"]["code"] for number in damaged} == {"logits_not_finite"}
    assert (len(lines), progress.answered, progress.failed) == (5, 5, len(damaged))


def test_a_model_whose_logits_are_not_finite_ends_the_job(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": [9], "id": name} for name in range(9)])
    refused(lambda: run_job(DamagedLLM(), path), "logits of prompt 0 are not finite")
    assert len(read_jsonl(tmp_path / "out")) == 1


def test_job_writes_progress_csv_and_plot(runs, tmp_path):
    """A progress file, a CSV row, a picture, and the settings beside the results."""
    runs.input([*requests(), "{broken\n"])
    files = {name: tmp_path / name for name in ("p.json", "r.csv", "p.png")}
    told = runs("--progress-file", str(files["p.json"]), "--csv", str(files["r.csv"]), "--plot",
                str(files["p.png"]))
    progress = json.loads(files["p.json"].read_text())
    bodies = [line["response"]["body"]["usage"] for line in read_jsonl(runs.output)
              if line["response"]]
    generated = sum(usage["completion_tokens"] for usage in bodies)
    assert {name: progress[name] for name in (
        "state", "requests", "answered", "failed", "left", "generated_tokens", "prompt_tokens")
    } == {"state": "finished", "requests": 13, "answered": 13, "failed": 1, "left": 0,
          "generated_tokens": generated,
          "prompt_tokens": sum(usage["prompt_tokens"] for usage in bodies)}
    (row,) = read_csv(files["r.csv"])
    assert row["generated_tokens"] == str(generated) and row["num_prompts"] == "13"
    assert files["p.png"].read_bytes().startswith(b"\x89PNG")
    assert "total throughput" in told and f"{generated} tokens in" in told


def test_progress_counts_by_a_clock_of_its_own(tmp_path, monkeypatch):
    now = [100.0]
    path = tmp_path / "p.json"
    found = JobProgress(10, 4, 1, str(path), clock=lambda: now[0])
    assert json.loads(path.read_text())["seconds_left"] is None
    now[0] += 50
    found.begin()
    now[0] += 2
    monkeypatch.setattr(time, "time", lambda: -5.0)
    found.add(answered=2, failed=1, prompt_tokens=3, generated_tokens=8)
    record = json.loads(path.read_text())
    assert (record["seconds"], record["seconds_left"], record["tokens_per_second"]) == (52, 4, 4)
    assert (record["answered"], record["failed"], record["left"], record["updated"]) == (6, 2, 4,
                                                                                         -5)
    assert not found.is_over(None) and not found.is_over(1) and found.is_over(52 / 3600)
    found.end()
    assert json.loads(path.read_text())["state"] == "stopped"
    found = JobProgress(10, 0, 0, None, clock=lambda: now[0])
    for _ in range(9000):
        now[0] += 1
        found.add(answered=0, generated_tokens=1)
    assert 2048 < len(found.samples) <= 4096 and found.samples[0].seconds == 0


def test_a_dry_run_counts_and_predicts(runs):
    runs.input([*requests(), "{broken\n"])
    argv = [flag for flag in runs.argv() if flag not in ("-o", str(runs.output))]
    for flags, status in (([], 0), (["--percent", "auto"], 0), (["--strict"], 2)):
        runs.capsys.readouterr()
        assert batch.main([*argv, "--dry-run", *flags]) == status
        told = runs.capsys.readouterr().out
        assert "13, of which 1 cannot run" in told and "line 13: the line is not JSON" in told
        assert "sequences      13" in told and "at most 57, 6 of one sequence" in told
        assert "predicted" in told and "hours, each to its most tokens" in told
    assert not runs.output.exists()


def test_a_planned_job_runs(runs):
    told = runs("--percent", "auto")
    assert "plan " in told and "12 of 12 requests answered" in told
    runs.input(["{broken\n", "[]\n"])
    told = runs("--percent", "auto", "--overwrite", status=ALL_FAILED)
    assert "2 of 2 requests answered, 2 of them failed" in told


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


@pytest.mark.parametrize("number", [
    signal.SIGTERM, *selection.full(signal.SIGINT, signal.SIGHUP)])
def test_a_signal_ends_the_job_after_the_block(runs, after_blocks, monkeypatch, number):
    runs()
    whole = runs.texts()
    before = signal.getsignal(number)
    after_blocks(2, lambda: signal.raise_signal(number))
    told = runs("--overwrite")
    done = runs.answered()
    assert f"stopped, {12 - done} left" in told and f"{done} of 12 requests" in told
    assert 2 < done < 5 and signal.getsignal(number) == before
    told = runs("--gpu-batch-size", "3")
    assert f"resuming: {done} of 12 requests are answered" in told and "finished; 12 of 12" in told
    assert runs.texts() == whole


def test_a_second_signal_stops_at_once(runs, after_blocks):
    def twice() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    after_blocks(1, twice)
    told = runs(status=130)
    assert 0 < runs.answered() < 3
    assert f"interrupted ({runs.answered()} of 12 requests are answered; run the same" in told


def test_a_signal_while_the_model_loads_stops_at_once(runs, monkeypatch):
    monkeypatch.setattr(batch, "open_on_ranks",
                        lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    assert "interrupted (0 of 12 requests are answered" in runs(status=143)
    assert not runs.output.exists()


def test_signals_come_to_the_main_thread_alone():
    told = []
    with StopRequest(lambda: told.append(1)) as stop_request:
        signal.raise_signal(signal.SIGINT)
        assert stop_request.requested and told == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    handlers = []

    def elsewhere() -> None:
        with StopRequest(lambda: None):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_a_job_ends_when_its_hours_are_over(runs):
    told = runs("--max-hours", "1e-9")
    assert f"stopped, {12 - runs.answered()} left" in told and 0 < runs.answered() < 3
    assert "12 of 12" in runs("--max-hours", "1")


def engine_fails(runs: Runs, patch: pytest.MonkeyPatch) -> None:
    def full(*_):
        raise UserError("the offload disk is full")

    patch.setattr(LLM, "generate_in_blocks", full)


def progress_cannot_be_written(runs: Runs, patch: pytest.MonkeyPatch) -> None:
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(progress, "open_atomic", full)


@pytest.mark.parametrize(("fault", "message"), [
    (engine_fails, "the offload disk is full"),
    (progress_cannot_be_written, "cannot write --progress-file"),
])
def test_a_fault_is_one_line_and_the_job_resumes(
        runs, after_blocks, monkeypatch, fault, message):
    runs()
    whole = runs.texts()
    flags = ["--window", "4", "--progress-file", str(runs.folder / "p.json")]
    with monkeypatch.context() as patch:
        after_blocks(2, lambda: fault(runs, patch))
        told = runs("--overwrite", *flags, status=2)
        assert message in told and told.count("error: ") == 1
        assert "of 12 requests are answered; run the same command to resume)" in told
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
    done = subprocess.run([sys.executable, "-c", KILLER, *runs.argv("--window", "7"),
                           str(moments)],
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


# --- what is refused


def test_results_of_another_job_are_refused(runs, words_model, tmp_path, tiny_model):
    runs.input(requests(3))
    runs()
    other = with_words(tiny_model("llama_head_dim").folder, tmp_path / "other")
    for flags, words in ((["--model", other], "was made with model"),
                          (["--seed", "4"], "was made with seed 0, now it is 4"),
                          (["--temperature", "0"], "was made with temperature 1.0"),
                          (["--hh-ratio", "0.2"], "was made with h2o None"),
                          (["--dtype", "bfloat16"], "was made with dtype 'float32'"),
                          (["--cache-bits", "4", "--key-bits", "8"],
                           "was made with cache_bits 16, now it is [8, 4]"),
                          (["--gen-len", "8"], "was made with gen_len 32")):
        assert words in runs(*flags, status=2)
    runs.input([*requests(2), {"id": "r2", "prompt": "w9"}])
    assert "line" in runs(status=2) and "answers a request that --input" in runs(status=2)
    runs.input(requests(5))  # more than before
    assert "finished; 5 of 5" in runs()
    os.unlink(f"{runs.output}.config.yaml")
    assert "cannot be resumed" in runs(status=2)


@pytest.mark.parametrize(("flags", "words"), [
    ([], "give --input"),
    (["-i", "a.txt", "-o", "b"], "--input must name a .jsonl file"),
    (["-i", "a.jsonl", "-o", "b", "--errors", "b"], "--output and --errors name the same file"),
    (["-i", "a.jsonl", "-o", "b", "--temperature", "3"], "--temperature must be at most 2"),
    (["-i", "a.jsonl", "-o", "b", "--plot", "p.txt"], "--plot must name"),
    (["-i", "a.jsonl", "-o", "b", "--dry-run"], "--output has no effect with --dry-run"),
    (["-i", "a.jsonl", "-o", "b", "--hardware", "h.yaml"], "add --dry-run"),
    (["-i", "a.jsonl", "-o", "b", "--do-sample"], "unknown flag --do-sample"),
    (["-i", "a.jsonl", "-o", "b", "--chat-template", "no"], "cannot read --chat-template no"),
])
def test_bad_flags_are_told_in_a_line(refuses_flags, flags, words):
    refuses_flags(batch.main, flags, words)


def test_a_config_file_gives_flags_that_have_an_effect(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("input: a.jsonl\noutput: b.jsonl\nwindow: 5\nhh_ratio: 0.2\n")
    options = batch.parse_args(["--config", str(path), "--window", "6"])
    assert (options.input, options.window, options.run.hh_ratio) == ("a.jsonl", 6, 0.2)
    path.write_text("input: a.jsonl\noutput: b.jsonl\nprompt_len: 5\n")
    command_refused(commands.main, capsys, ["batch", "--config", str(path)],
                    "--prompt-len has no effect on batch")


def test_seeds_depend_on_the_job_and_the_id():
    assert derive_seed(0, "a") == derive_seed(0, "a") != derive_seed(1, "a")
    assert derive_seed(1, "2") != derive_seed(12, "")
