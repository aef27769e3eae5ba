"""Every value of the configuration is checked, and every refusal is one line."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.config import (
    H2OConfig,
    Placement,
    Policy,
    SamplingParams,
    parse_percent,
)
from flexgen_h2o.errors import UserError
from flexgen_h2o.run_config import GROUPS, RunConfig, load_yaml


def refused(make, match: str | None = None) -> str:
    """The one line with which `make` is refused."""
    with pytest.raises(UserError, match=match) as caught:
        make()
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def test_light_imports():
    code = (
        "import sys, flexgen_h2o, flexgen_h2o.flex_opt, flexgen_h2o.results\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names():
    import flexgen_h2o

    assert {"LLM", "Policy", "Placement", "H2OConfig", "__version__"} <= set(dir(flexgen_h2o))
    assert flexgen_h2o.H2OConfig is H2OConfig
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = flexgen_h2o.Nonsense


# Placement and --percent


@given(st.floats(0, 100), st.floats(0, 1))
def test_placement_takes_what_sums_to_100(gpu, part):
    cpu = (100 - gpu) * part
    placement = Placement(gpu, cpu, 100 - gpu - cpu if gpu + cpu < 100 else 0)
    assert math.isclose(sum(placement.fractions()), 1)
    assert all(0 <= fraction <= 1 for fraction in placement.fractions())


@given(st.tuples(*[st.floats(-50, 150)] * 3).filter(lambda p: abs(sum(p) - 100) > 1e-3))
def test_placement_refuses_other_sums(shares):
    refused(lambda: Placement(*shares))


@pytest.mark.parametrize("shares", [
    (-1, 101, 0), (math.nan, 0, 100), (math.inf, 0, 0), ("100", 0, 0), (True, 99, 0),
    (None, 0, 100),
])
def test_placement_refuses_odd_shares(shares):
    refused(lambda: Placement(*shares))


pair = st.tuples(st.integers(0, 1000), st.integers(0, 1000)).filter(lambda p: sum(p) <= 1000).map(
    lambda p: (p[0] / 10, p[1] / 10))


@given(st.lists(pair, min_size=2, max_size=3), st.booleans())
def test_percent_reads_shares_and_gives_the_rest_to_disk(pairs, as_text):
    values = [share for p in pairs for share in p]
    placements = parse_percent([str(v) for v in values] if as_text else values)
    for placement, (gpu, cpu) in zip(placements, [*pairs, (100, 0)], strict=False):
        assert (placement.gpu, placement.cpu) == (gpu, cpu)
        assert placement.disk == pytest.approx(100 - gpu - cpu, abs=1e-6)
        assert placement.disk >= 0
    assert len(placements) == 3


@given(st.lists(st.one_of(st.floats(), st.integers(), st.text(max_size=5)), max_size=8))
def test_percent_takes_or_refuses_anything_in_one_line(values):
    try:
        for placement in parse_percent(values):
            assert placement.gpu + placement.cpu + placement.disk == pytest.approx(100)
    except UserError as error:
        assert "--percent" in str(error)


@pytest.mark.parametrize(("values", "match"), [
    ([100, 0, 100], "4 or 6 numbers"),
    ([100, 0, 100, 0, 100], "4 or 6 numbers"),
    ([], "4 or 6 numbers"),
    (["half", 0, 100, 0], "half"),
    (["nan", 0, 100, 0], "finite"),
    ([-1, 0, 100, 0], "at least 0"),
    ([101, 0, 100, 0], "at most 100"),
    ([60, 50, 100, 0], "weights 60 \\+ 50"),
    ([100, 0, 60, 50], "cache 60 \\+ 50"),
    ([100, 0, 100, 0, 99, 2], "activations 99 \\+ 2"),
    ([True, 0, 100, 0], "finite number"),
])
def test_percent_refusals(values, match):
    assert "--percent" in refused(lambda: parse_percent(values), match)


# Policy, H2OConfig, SamplingParams


@pytest.mark.parametrize(("values", "match"), [
    ({"gpu_batch_size": 0}, "gpu_batch_size must be at least 1"),
    ({"num_gpu_batches": 1.5}, "whole number"),
    ({"gpu_batch_size": True}, "whole number"),
    ({"overlap": 1}, "true or false"),
    ({"weights": (100, 0, 0)}, "Placement"),
    ({"pin_weight": "yes"}, "true or false"),
])
def test_policy_refusals(values, match):
    refused(lambda: Policy(**values), match)


@pytest.mark.parametrize(("values", "match"), [
    ({"heavy_ratio": 0}, "greater than 0"),
    ({"recent_ratio": 1.01}, "at most 1"),
    ({"heavy_ratio": math.nan}, "finite"),
    ({"heavy_ratio": 0.1, "heavy_tokens": 4}, "not both"),
    ({"recent_ratio": 0.1, "recent_tokens": 4}, "not both"),
    ({"heavy_tokens": -1}, "at least 0"),
    ({"recent_tokens": 0}, "at least 1"),
    ({"sink_tokens": -1}, "at least 0"),
    ({"score": "max"}, "sum, mean, decay"),
    ({"decay": 0}, "greater than 0"),
    ({"positions": "absolute"}, "original, rolling"),
    ({"simulate": "no"}, "true or false"),
])
def test_h2o_refusals(values, match):
    refused(lambda: H2OConfig(**values), match)


@pytest.mark.parametrize(("values", "full"), [
    ({}, True),
    ({"sink_tokens": 4}, True),
    ({"heavy_ratio": 1}, True),
    ({"heavy_ratio": 1.0, "recent_ratio": 1.0}, True),
    ({"heavy_ratio": 0.5}, False),
    ({"recent_ratio": 1.0}, False),
    ({"heavy_ratio": 1, "recent_tokens": 4}, False),
    ({"heavy_tokens": 0, "recent_tokens": 8}, False),
])
def test_h2o_is_full(values, full):
    assert H2OConfig(**values).is_full is full


@pytest.mark.parametrize(("values", "match"), [
    ({"max_new_tokens": 0}, "at least 1"),
    ({"min_new_tokens": 33}, "at most the 32"),
    ({"temperature": 0}, "greater than 0"),
    ({"top_k": -1}, "at least 0"),
    ({"top_p": 1.5}, "at most 1"),
    ({"min_p": -0.1}, "at least 0"),
    ({"repetition_penalty": 0.0}, "greater than 0"),
    ({"no_repeat_ngram_size": -1}, "at least 0"),
    ({"eos_token_id": -2}, "at least -1"),
    ({"eos_token_id": [1, -1]}, "at least 0"),
    ({"eos_token_id": []}, "whole number"),
    ({"eos_token_id": "2"}, "whole number"),
    ({"seed": -1}, "at least 0"),
    ({"seed": 1.0}, "whole number"),
    ({"do_sample": 1}, "true or false"),
])
def test_sampling_refusals(values, match):
    refused(lambda: SamplingParams(**values), match)


def test_sampling_takes_several_ends():
    params = SamplingParams(eos_token_id=[1, 2])
    assert params.eos_token_id == (1, 2)
    assert hash(params) == hash(SamplingParams(eos_token_id=(1, 2)))


# RunConfig


def test_every_flag_is_described():
    for spec in dataclasses.fields(RunConfig):
        assert spec.metadata["group"] in GROUPS
        assert spec.metadata["help"] and "\n" not in spec.metadata["help"]


@pytest.mark.parametrize(("values", "match"), [
    ({"gen_len": 0}, "--gen-len must be at least 1"),
    ({"prompt_len": 0}, "--prompt-len must be at least 1"),
    ({"gpu_batch_size": 0}, "--gpu-batch-size must be at least 1"),
    ({"num_gpu_batches": -1}, "--num-gpu-batches must be at least 1"),
    ({"cut_gen_len": 0}, "--cut-gen-len must be at least 1"),
    ({"cut_gen_len": 33}, "at most --gen-len 32"),
    ({"cut_gen_len": 1}, "no decode step"),
    ({"gen_len": "many"}, "whole number"),
    ({"gen_len": None}, "whole number"),
    ({"gen_len": 3.0}, "whole number"),
    ({"temperature": math.inf}, "finite"),
    ({"overlap": "on"}, "true or false"),
    ({"model": ""}, "--model must be text"),
    ({"model": 3}, "--model must be text"),
    ({"prompt": [""]}, "--prompt must be text"),
    ({"prompt": 5}, "--prompt must be text"),
    ({"device": "tpu"}, "auto, cpu, cuda"),
    ({"device": "cuda:x"}, "auto, cpu, cuda"),
    ({"dtype": "int8"}, "float16, bfloat16, float32"),
    ({"percent": [50, 60, 0, 0]}, "weights 50 \\+ 60"),
    ({"percent": 100}, "4 or 6 numbers"),
    ({"prompt": ["a"], "prompts": "b.txt"}, "not both"),
    ({"prompts": "b.csv"}, ".txt or .jsonl"),
    ({"output": "x", "csv": "./x"}, "--output and --csv name the same file"),
    ({"temperature": 0.5}, "--temperature has no effect: add --do-sample"),
    ({"top_k": 3}, "--top-k has no effect"),
    ({"min_p": 0.1}, "--min-p has no effect"),
    ({"do_sample": True, "top_p": 2.0}, "top_p must be at most 1"),
    ({"min_new_tokens": 64}, "min_new_tokens"),
    ({"seed": -1}, "seed"),
    ({"verbose": -1}, "--verbose"),
])
def test_run_config_refusals(values, match):
    refused(lambda: RunConfig.from_mapping(values), match)


@pytest.mark.parametrize("values", [
    {"sep_layer": True}, {"cpu_cache_compute": True}, {"compress_weight": True},
    {"compress_cache": True}, {"attn_sparsity": 0.5}, {"hh_ratio": 0.2}, {"hh_all": False},
    {"hh_long_seq": True}, {"debug_mode": "breakdown"}, {"percent": ["auto"]}, {"percent": "auto"},
])
def test_what_is_to_come_is_refused(values):
    message = refused(lambda: RunConfig.from_mapping(values), "not yet")
    assert "--" + next(iter(values)).replace("_", "-") in message


@pytest.mark.parametrize("values", [
    {"hh_ratio": 1}, {"attn_sparsity": 1}, {"hh_all": True}, {"sep_layer": False},
])
def test_neutral_values_of_what_is_to_come_are_taken(values):
    RunConfig.from_mapping(values)


def test_unknown_keys_get_a_suggestion():
    assert "did you mean gen_len?" in refused(lambda: RunConfig.from_mapping({"gen_lem": 3}))
    assert "did you mean gen_len?" in refused(lambda: RunConfig.from_mapping({"gen-len": 3}))
    assert "--help" in refused(lambda: RunConfig.from_mapping({"zzz": 3}))
    refused(lambda: RunConfig.from_mapping({7: 3}), "unknown key 7")


def test_defaults_are_flexgens():
    config = RunConfig()
    assert (config.model, config.prompt_len, config.gen_len) == ("facebook/opt-6.7b", 512, 32)
    assert (config.gpu_batch_size, config.num_gpu_batches) == (4, 1)
    assert config.policy() == Policy()
    assert config.synthetic and config.sampling().eos_token_id == -1


def test_real_prompts_stop_at_the_models_end():
    assert RunConfig(prompt=("a",)).sampling().eos_token_id is None
    assert RunConfig(prompt=("a",), ignore_eos=True).sampling().eos_token_id == -1


def test_policy_and_sampling_carry_the_flags():
    config = RunConfig(percent="0 50 20 30", gpu_batch_size=8, num_gpu_batches=2, overlap=False,
                       pin_weight=False, do_sample=True, top_k=7, temperature=0.5, gen_len=9,
                       seed=3)
    assert config.policy() == Policy(8, 2, Placement(0, 50, 50), Placement(20, 30, 50),
                                     Placement(100, 0, 0), overlap=False, pin_weight=False)
    expected = SamplingParams(9, do_sample=True, top_k=7, temperature=0.5, eos_token_id=-1, seed=3)
    assert config.sampling() == expected


def test_saved_config_reads_back_as_the_same(tmp_path):
    config = RunConfig(model="opt-125m", prompt=("é \"quoted\"", "two\nlines"),
                       percent=(0, 33.3, 50, 0), cut_gen_len=4, do_sample=True, min_p=0.05,
                       csv=str(tmp_path / "r.csv"))
    config.save(tmp_path / "c.yaml")
    assert RunConfig.from_mapping(load_yaml(tmp_path / "c.yaml")) == config
    assert set(yaml.safe_load((tmp_path / "c.yaml").read_text(encoding="utf-8"))) == {
        spec.name for spec in dataclasses.fields(RunConfig)} - {"config"}


@pytest.mark.parametrize(("content", "match"), [
    (b"- a\n- b\n", "name: value"),
    (b"", "name: value"),
    (b"a: [1\nb: 2\n", "not valid YAML at line 2"),
    (b"model: \xff\xfe\n", "not UTF-8"),
    (b"config: other.yaml\n", "another config"),
    (b"a: !!python/object/apply:os.system [true]\n", "not valid YAML"),
])
def test_yaml_refusals(tmp_path, content, match):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    assert str(path) in refused(lambda: load_yaml(path), match)


def test_missing_yaml(tmp_path):
    refused(lambda: load_yaml(tmp_path / "none.yaml"), "No such file")
    refused(lambda: load_yaml(tmp_path), "cannot read")


def test_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert RunConfig(offload_dir="~/x").offload_dir == "/somewhere/x"
