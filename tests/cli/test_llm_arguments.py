"""Each command passes the run's configuration to `LLM`."""

import inspect
import json
import sys
import types
from pathlib import Path

import pytest
from helpers.programs import benchmark_modules

from flexgen_h2o import LLM, H2OConfig, Policy
from flexgen_h2o.cli.launch import llm_arguments
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands import generate, stream
from flexgen_h2o.config.placement import Placement
from flexgen_h2o.integrations.lm_eval import arguments

OF_A_CALL = {"workload", "texts", "implementations", "pipeline", "bounds", "progress", "trace",
             "verbose"}
"""Options of `LLM` that are not part of a configuration."""

# Flags of `RunConfig`, and what becomes of them: the keyword of `LLM` and its value.
FIELDS = [
    ({"model": "n"}, "model", "n"), ({"path": "folder"}, "path", "folder"),
    ({"device": "cpu"}, "device", "cpu"), ({"dtype": "float32"}, "dtype", "float32"),
    ({"weight_bits": 8}, "weight_bits", 8),
    ({"weight_bits": 4, "activation_bits": 8}, "activation_bits", 8),
    ({"weight_bits": 4, "weight_cache": "kept"}, "weight_cache", "kept"),
    ({"weight_bits": 4, "no_weight_cache": True}, "weight_cache", None),
    ({"weight_bits": 8, "calibration": "text.txt"}, "calibration", "text.txt"),
    ({"cache_bits": 4}, "cache_bits", 4), ({"cache_bits": 4, "key_bits": 8}, "key_bits", 8),
    ({"cache_bits": 8, "value_bits": 4}, "value_bits", 4),
    ({"attn_sparsity": 0.25}, "attn_sparsity", 0.25),
    ({"offload_dir": "there"}, "offload_dir", "there"),
    ({"verify": True, "percent": (0, 0, 100, 0, 100, 0)}, "verify", True),
    ({"no_generation_config": True}, "generation_config", False), ({"seed": 5}, "seed", 5),
    ({"batch_invariant": True}, "batch_invariant", True),
    ({"memory_limit": 9 << 30}, "memory_limit", 9 << 30),
    ({"device_memory_limit": 1 << 30}, "device_memory_limit", 1 << 30),
    ({"percent": (0, 100, 100, 0, 100, 0)}, "policy",
     Policy(weights=Placement(0, 100, 0), gpu_batch_size=1)),
    ({"num_window_length": 8, "num_heavy_hitter_tokens": 3}, "h2o",
     H2OConfig(heavy_tokens=3, recent_tokens=5))]


class Opened(Exception):
    """Raised in place of opening an LLM, with its arguments."""


@pytest.fixture
def no_llm(monkeypatch, tmp_path) -> None:
    def open_llm(**options):
        raise Opened(options)

    monkeypatch.setitem(sys.modules, "flexgen_h2o.llm", types.SimpleNamespace(LLM=open_llm))
    monkeypatch.chdir(tmp_path)


def typed(given: dict[str, object]) -> list[str]:
    """A configuration as a command line."""
    line = []
    for name, value in given.items():
        words = value if isinstance(value, tuple) else () if value is True else (value,)
        line += [f"--{name.replace('_', '-')}", *map(str, words)]
    return line


def through_generate(given):
    generate.main([*typed({"model": "m", "gpu_batch_size": 1} | given), "--no-log"])


def through_a_task(given):
    Path("in.jsonl").write_text(json.dumps({"turns": ["Hi."]}))
    evicts = ["--enable-h2o-generation"] if "num_window_length" in given else []
    stream.main([*typed({"model": "m"} | given), "--input-path", "in.jsonl", *evicts])


def through_the_harness(given):
    given = {"pretrained": "m"} | given
    given["pretrained"] = given.pop("model", given["pretrained"])
    raise Opened(arguments.parse(given).for_llm())


def through_the_benchmarks(given):
    with benchmark_modules("baselines.ours") as bench:
        ours = object.__new__(bench.ours.Ours)
        ours.settings = None
        ours.config = lambda *_: RunConfig(**{"model": "m", "gpu_batch_size": 1} | given)
        ours.prepare(Path("m"))


@pytest.mark.parametrize("front_end", [
    through_generate, through_a_task, through_the_harness, through_the_benchmarks])
@pytest.mark.parametrize(("given", "keyword", "value"), FIELDS,
                         ids=["-".join(given) for given, *_ in FIELDS])
def test_each_option_reaches_llm_from_every_command(no_llm, front_end, given, keyword, value):
    with pytest.raises(Opened) as caught:
        front_end(given)
    (options,) = caught.value.args
    default = llm_arguments(RunConfig(model="m", gpu_batch_size=1))
    assert options[keyword] == value != default[keyword]
    changed = {keyword, *({"percent": "policy"}.get(name, name) for name in given)}
    assert {name: options[name] for name in options.keys() & default.keys() - changed} == {
        name: default[name] for name in options.keys() & default.keys() - changed}


def test_run_config_sets_every_llm_option():
    taken = {*inspect.signature(LLM).parameters}
    assert set(llm_arguments(RunConfig())) == taken - OF_A_CALL
    assert {keyword for _, keyword, _ in FIELDS} == taken - OF_A_CALL
