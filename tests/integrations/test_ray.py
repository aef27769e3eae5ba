"""Ray Data on this machine: replicas, kills, rows that fail, resumption."""

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers.batch_jobs import answers, job_flags, requests, write_lines
from helpers.error_cases import command_refused, refused
from helpers.programs import ROOT
from helpers.read_back import read_jsonl

from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.cli.launch import PROCESS_BYTES, ReplicaResources
from flexgen_h2o.commands import batch
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.distributed import ray_cluster as clusters
from flexgen_h2o.distributed.ray_cluster import ray_cluster
from flexgen_h2o.requests.results import ResultsFile

ENGINE = {"dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def ray():
    """The package, whose import takes seconds."""
    return pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster(ray) -> Iterator[None]:
    """A cluster of this machine alone, whose processes and files go with it."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with ray_cluster(None, cpus=2) as session:
        assert session.cluster_resources()["CPU"] == 2
        folder = Path(session._private.worker._global_node.get_temp_dir_path())
        assert folder.is_dir()
        yield
    assert not folder.exists() and not session.is_initialized()
    gc.collect()  # a generator's processes go with it, and it may be part of a cycle
    left = [process for process in psutil.Process().children(recursive=True)
            if process.pid not in before]
    # Python's own tracker of shared memory stays as long as the process that has started it.
    lines = [line for line in map(command_line, psutil.wait_procs(left, timeout=60)[1])
             if "resource_tracker" not in line]
    assert not any(lines), lines


def command_line(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def flags(model: str, folder: Path, output: str, *extra: str) -> list[str]:
    return job_flags(folder, model, output, "--memory-limit", "192MiB", *extra)


def replicas() -> list[psutil.Process]:
    """Processes of replicas of the batch command."""
    return [process for process in psutil.Process().children(recursive=True)
            if "JobReplica" in command_line(process)]


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
def test_results_after_a_replica_was_killed(
        cluster, words_model, tmp_path, monkeypatch, capsys, count):
    """The same as those of one process without Ray, of which the job continues some."""
    write_lines(tmp_path / "in.jsonl", [*requests(6), "{broken\n", {"id": "r0", "prompt": "w3"},
                     {"id": "long", "prompt": " ".join(["w4"] * 400)},
                     {"id": "chat", "messages": [{"role": "user", "content": "w5 w6"}]}])
    assert batch.main(flags(words_model, tmp_path, "one.jsonl")) == 0
    one = answers(tmp_path / "one.jsonl")
    assert len(one) == 10
    start = (tmp_path / "one.jsonl").read_text().splitlines(keepends=True)[:3]
    (tmp_path / "two.jsonl").write_text("".join(start))
    settings = (tmp_path / "one.jsonl.config.yaml").read_text()
    (tmp_path / "two.jsonl.config.yaml").write_text(settings)
    killed: list[int] = []
    add = ResultsFile.add

    def add_and_kill(self, lines):
        add(self, lines)
        if not killed and lines:
            victim = replicas()[0]
            killed.append(victim.pid)
            victim.kill()

    monkeypatch.setattr(ResultsFile, "add", add_and_kill)
    capsys.readouterr()
    status = batch.main(flags(words_model, tmp_path, "two.jsonl", "--ray", "--replicas", str(count),
                              "--window", "2"))
    out, err = capsys.readouterr()
    assert status == 0, err
    assert "finished; 10 of 10 requests answered, 3 of them failed" in out
    assert killed and not psutil.pid_exists(killed[0])
    assert answers(tmp_path / "two.jsonl") == one
    assert (tmp_path / "two.jsonl").read_text().startswith("".join(start))


@pytest.mark.full
def test_a_killed_job_leaves_no_process_and_resumes(ray, words_model, tmp_path, capsys):
    write_lines(tmp_path / "in.jsonl", requests())
    argv = flags(words_model, tmp_path, "out.jsonl", "--window", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "flexgen_h2o.batch", *argv, "--ray", "--replicas", "1"], cwd=ROOT,
        stderr=subprocess.PIPE, text=True)
    output, started = tmp_path / "out.jsonl", psutil.Process(process.pid)
    until = time.monotonic() + 90
    while not (output.exists() and output.stat().st_size) and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert process.poll() is None, process.stderr.read()
    children = started.children(recursive=True)
    (folder,) = {Path(child.cmdline()[-1]) for child in children
                 if "ray_cluster" in str(child.cmdline())}
    assert folder.is_dir()
    process.kill()
    assert process.stderr.read() == ""  # Ray prints nothing
    process.wait()
    process.stderr.close()
    assert not psutil.wait_procs(children, timeout=30)[1] and not folder.exists()
    assert 0 < len(read_jsonl(output)) < 12
    assert batch.main(argv) == 0
    assert "12 of 12 requests answered, 0 of them failed" in capsys.readouterr().out
    assert len(answers(output)) == 12


@pytest.mark.full
def test_a_processor_answers_rows_and_reports_bad_ones(ray, cluster, words_model, tmp_path):
    from flexgen_h2o.integrations.ray import ProcessorConfig, build_processor

    rows = [{"id": number, "question": text, "sampling_params": {
        "max_tokens": 3 + number % 3, "temperature": float(number % 2)}}
        for number, text in enumerate(["w5 w6 w7", "w8", "w9 w10", "w8 w9", " ".join(["w4"] * 400),
                                       "w11 w12", "w13", "w14 w15"])]
    config = ProcessorConfig(
        model_source=words_model, batch_size=2, concurrency=2, should_continue_on_error=True,
        engine_kwargs=ENGINE | {"workload": Workload(16, 8, gpu_batch_size=2, num_gpu_batches=1)})
    processor = build_processor(
        config, preprocess=lambda row: {"prompt": row["question"]},
        postprocess=lambda row: {name: row[name] for name in (
            "id", "generated_tokens", "generated_text", "num_input_tokens",
            "num_generated_tokens", "finish_reason")})
    answered = {row["id"]: row for row in processor(
        ray.data.from_items(rows, override_num_blocks=4)).take_all()}
    assert [*sorted(answered)] == [*range(8)]
    bad = answered.pop(4)
    assert "400 tokens" in bad["__inference_error__"] and bad["generated_text"] == ""
    assert bad["question"] == rows[4]["question"]  # it has passed by postprocess
    with LLM(words_model, **ENGINE) as llm:
        greedy = [number for number in answered if number % 2 == 0]
        outputs = llm.generate([rows[number]["question"] for number in greedy], [
            SamplingParams(max_new_tokens=3 + number % 3) for number in greedy])
    for number, output in zip(greedy, outputs, strict=True):
        row = answered[number]
        assert list(row["generated_tokens"]) == output.token_ids
        assert row["generated_text"] == output.text and row["finish_reason"] == "length"
        assert row["num_input_tokens"] == len(output.prompt_token_ids)
        assert row["num_generated_tokens"] == len(output.token_ids) and not row[
            "__inference_error__"]
    assert config.resources().memory > PROCESS_BYTES + (128 << 20)


def test_generator_takes_all_kinds_of_columns(words_model):
    from flexgen_h2o.integrations.ray import BatchGenerator

    generator = BatchGenerator({"model": words_model, "progress": False, **ENGINE},
                               should_continue_on_error=True)
    chat = [{"role": "user", "content": "w5 w6"}]
    columns = generator({"prompt": [None, [5, 6], "w7", None, "w7", "w7"],
                       "messages": [chat, None, chat, None, None, None],
                       "sampling_params": [None, {"max_tokens": 2, "stop": None}, None, None,
                                           {"warmth": 1}, {"temperature": 1.0, "max_tokens": 4}],
                       "more": [*"abcdef"]})
    assert columns["more"] == [*"abcdef"]
    errors = dict(enumerate(columns["__inference_error__"]))
    assert [row for row in errors if errors[row]] == [2, 3, 4]
    assert "one of the two" in errors[2] and "no option 'warmth'" in errors[4]
    assert columns["num_generated_tokens"].tolist() == [32, 2, 0, 0, 0, 4]
    assert columns["num_input_tokens"].tolist() == [4, 2, 0, 0, 0, 1]
    with LLM(words_model, **ENGINE) as llm:
        (output,) = llm.generate(["w1 w5 w6 w2"], max_new_tokens=32)
    assert columns["generated_text"][0] == output.text
    again = generator({"prompt": ["w7"], "sampling_params": [{"temperature": 1.0,
                                                              "max_tokens": 4}]})
    assert again["generated_tokens"][0].tolist() == columns["generated_tokens"][5].tolist()
    strict = BatchGenerator({"model": words_model, "progress": False, **ENGINE})
    refused(lambda: strict({"prompt": ["w7", None]}), "needs a prompt")
    missing = BatchGenerator({"model": str(Path(words_model) / "none"), "progress": False})
    refused(lambda: missing({"prompt": ["w7"]}), "none")


@pytest.mark.parametrize(("given", "words"), [
    ({}, "give the memory or the workload of a replica"),
    ({"memory": 1, "concurrency": (2, 1)}, "concurrency must be from 1 up"),
    ({"memory": 1, "concurrency": 2.0}, "concurrency must be an integer, got 2.0"),
    ({"memory": 1, "engine_kwargs": None}, "engine_kwargs must be a mapping, got None"),
    ({"engine_kwargs": {"memory_limit": "2GB"}}, "memory_limit of engine_kwargs must be"),
    ({"memory": 1, "batch_size": 0}, "batch_size must be at least 1"),
    ({"memory": 1, "num_gpus": 2}, "num_gpus must be 0 or 1"),
    ({"memory": 1, "engine_kwargs": {"model": "m"}}, "it is model_source")])
def test_wrong_processor_configurations_raise(given, words):
    from flexgen_h2o.integrations.ray import ProcessorConfig

    refused(lambda: ProcessorConfig(model_source="m", **given), words)


def test_replicas_share_the_cpus_of_a_host():
    host = {"CPU": 16.0, "memory": 40e9, "GPU": 2.0}
    replica = ReplicaResources(10_000_000_000)
    assert [replica.fitted([host] * 3, n).num_cpus for n in (1, 3, 4, 6, 7, 12)] == [
        16, 16, 8, 8, 5, 4]
    refused(lambda: replica.fitted([host] * 3, 13), "place 12 replicas of 1 CPU, 10.0 GB of host")
    on_gpus = ReplicaResources(10_000_000_000, num_gpus=1, accelerator_type="T4")
    assert on_gpus.fitted([host, {"CPU": 64.0, "memory": 99e9}], 2).num_cpus == 8
    refused(lambda: on_gpus.fitted([host], 3), "1 GPU each")
    assert on_gpus.arguments() == {"memory": 10_000_000_000, "num_cpus": 1, "num_gpus": 1,
                                   "accelerator_type": "T4"}
    refused(lambda: replica.fitted([], 1), "place 0 replicas")


@pytest.mark.full
def test_arguments_of_the_replica_pool(ray):
    options = clusters._replica_pool(ray, 3)
    assert options["compute"].max_size == 3 and options["max_restarts"] > 0
    assert clusters._replica_pool(ray, (1, 3))["compute"].min_size == 1


def test_without_ray_the_error_says_what_to_install(words_model, tmp_path, monkeypatch, capsys):
    write_lines(tmp_path / "in.jsonl", requests(2))
    monkeypatch.setitem(sys.modules, "ray", None)
    command_refused(batch.main, capsys, flags(words_model, tmp_path, "out.jsonl", "--ray"),
                    "pip install 'flexgen_h2o[ray]'")
    assert not (tmp_path / "out.jsonl").exists()
