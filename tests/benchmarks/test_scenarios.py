"""benchmarks/scenarios.py: rooflines from few layers, what a trace says, limits of memory."""

import signal
import subprocess
import sys

import pytest
from helpers.programs import ROOT, benchmark_modules
from helpers.subprocesses import environment

from flexgen_h2o.errors import UserError
from flexgen_h2o.models.registry import from_transformers


@pytest.fixture
def scenarios():
    with benchmark_modules("scenarios") as found:
        yield found.scenarios


@pytest.fixture
def memory_group():
    with benchmark_modules("processes") as found:
        yield found.processes


def test_the_time_of_all_layers_follows_from_few(scenarios):
    assert scenarios.extended((2, 6), (5.0, 13.0), 48) == 5 + 46 * 2
    assert scenarios.extended((1, 4), (3.0, 3.0), 32) == 3, "no time a layer, only the rest"
    assert scenarios.extended((2, 2), (3.0, 3.1), 2) == 3


def test_the_first_layers_of_a_model_are_a_model(scenarios):
    config = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 8, "num_hidden_layers": 6,
              "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
              "intermediate_size": 8, "layer_types": ["full_attention"] * 6}
    assert from_transformers(scenarios.with_layers(config, 2), "few").num_layers == 2
    del config["layer_types"]
    assert from_transformers(scenarios.with_layers(config, 2), "few").num_layers == 2
    assert scenarios.with_layers({"text_config": config}, 2)["text_config"][
        "num_hidden_layers"] == 2


def test_a_file_that_cannot_take_the_row_is_told_before_the_run(scenarios, tmp_path, monkeypatch):
    monkeypatch.setattr(scenarios, "MemoryScenario", None)  # nothing is run
    out = tmp_path / "other.csv"
    out.write_text("a,b\n")
    for path, words in ((out, "has other columns"), (tmp_path / "no" / "o.csv", "cannot write")):
        with pytest.raises(UserError, match=words):
            scenarios.main(["--config", "c.yaml", "--path", "m", "--out", str(path)])


def test_raw_reads_are_of_parts_that_were_not_read(scenarios, tmp_path, monkeypatch):
    ranges = []

    class Raw:
        def __init__(self, path, start, nbytes, buffer, *, write):
            assert not write
            ranges.append((start, start + nbytes))

        def sweep(self, request, threads):
            assert (request, threads) in scenarios.RAW

        def close(self):
            pass

    monkeypatch.setattr(scenarios, "RawFile", Raw)
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.truncate(1 << 20)
    assert scenarios.raw_rate(path) > 0
    assert len(ranges) == scenarios.RAW_RUNS * len(scenarios.RAW)
    ranges.sort()
    assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False))
    assert ranges[-1][1] <= 1 << 20


def test_a_folder_without_weights_is_refused(scenarios, tmp_path):
    with pytest.raises(UserError, match="no safetensors file"):
        scenarios.MemoryScenario(tmp_path / "c.yaml", tmp_path, scratch=tmp_path, memory=None)


def test_a_group_limits_a_child_and_goes(memory_group):
    """Where cgroups may be made, a child in one sees its limit; elsewhere that is one line."""
    try:
        with memory_group.MemoryGroup(256 << 20) as group:
            done = subprocess.run(
                [sys.executable, "-c", "from flexgen_h2o.storage.free_memory import cgroup_free;"
                 "print(cgroup_free())"], preexec_fn=group.enter, capture_output=True, text=True,
                cwd=ROOT, check=True, env=environment())
            peak, folder, kills = group.peak(), group._folder, group.kills()
    except UserError as error:
        assert "no memory cgroup can be made" in str(error)
        pytest.skip(str(error))
    assert 0 < int(done.stdout) < 256 << 20 and 0 < peak <= 256 << 20
    assert not folder.exists() and kills == 0


def test_a_group_counts_what_was_killed_for_want_of_memory(memory_group):
    try:
        with memory_group.MemoryGroup(64 << 20) as group:
            done = subprocess.run([sys.executable, "-c", "bytearray(256 << 20)"],
                                  preexec_fn=group.enter)
            kills = group.kills()
    except UserError as error:
        pytest.skip(str(error))
    assert (done.returncode, kills) == (-signal.SIGKILL, 1)
