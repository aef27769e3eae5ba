"""Validation of the configuration: each error is one line."""

import dataclasses
import math
from pathlib import Path

import pytest
import yaml
from helpers.error_cases import refused
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import load_yaml
from flexgen_h2o.commands import generate
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.placement import Placement, parse_percent
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.errors import UserError

# Placement and --percent


@pytest.mark.parametrize("shares", [(50, 40, 0), (50, 50, 1), (-1, 101, 0), (math.nan, 0, 100),
                                    (math.inf, 0, 0), ("100", 0, 0), (True, 99, 0), (None, 0, 100)])
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


@pytest.mark.parametrize(("values", "match"), [
    ([100, 0, 100], "4 or 6 numbers"), (["half", 0, 100, 0], "half"),
    (["nan", 0, 100, 0], "finite"), ([-1, 0, 100, 0], "at least 0"),
    ([60, 50, 100, 0], "weights 60 \\+ 50"), ([100, 0, 100, 0, 99, 2], "activations 99 \\+ 2"),
    ([True, 0, 100, 0], "finite number")])
def test_percent_refusals(values, match):
    assert "--percent" in refused(lambda: parse_percent(values), match=match)


# What is refused


def run_config(**values):
    return RunConfig.from_mapping(values)


REFUSED = {
    Policy: [({"gpu_batch_size": 0}, "gpu_batch_size must be at least 1"),
             ({"num_gpu_batches": 1.5}, "integer"), ({"overlap": 1}, "true or false"),
             ({"prefill_chunk": 0}, "prefill_chunk must be at least 1")],
    H2OConfig: [
        ({"heavy_ratio": 0}, "greater than 0"), ({"recent_ratio": 1.01}, "at most 1"),
        ({"heavy_ratio": 0.1, "heavy_tokens": 4}, "not both"), ({"heavy_tokens": -1}, "at least 0"),
        ({"sink_tokens": 4}, "no effect on the full cache: give heavy_ratio"),
        ({"heavy_ratio": 0.1, "budget_of": "words"}, "budget_of must be one of prompt, text"),
        ({"heavy_tokens": 4, "budget_of": "text"}, "no effect without a ratio"),
        ({"budget_of": "text"}, "no effect without a ratio"),
        ({"heavy_ratio": 0.1, "budget_of": "text", "evict_generated": False}, "only the prompt"),
        ({"heavy_ratio": 0.1, "budget_of": "text", "prompt_chunk": 8}, "prompt_chunk .* out"),
        ({"heavy_tokens": 0}, "give recent_tokens or recent_ratio"),
        ({"heavy_ratio": "0.1"}, "heavy_ratio must be a finite number"),
        ({"heavy_ratio": []}, "one per decoder layer"),
        ({"heavy_ratio": [0.1, 0]}, "heavy_ratio of layer 1 must be greater than 0"),
        ({"heavy_ratio": [0.1] * 3, "recent_ratio": [0.1] * 2}, "3 numbers and recent_ratio 2"),
        ({"score": "max"}, "sum, mean, decay"), ({"decay": 0}, "greater than 0"),
        ({"positions": "absolute"}, "original, rolling"), ({"drop_positions": 1}, "true or false")],
    SamplingParams: [({"max_new_tokens": 0}, "at least 1"),
                     ({"min_new_tokens": 33}, "at most the 32"),
                     ({"temperature": 0}, "greater than 0"),
                     ({"temperature": 0.8}, "no effect on greedy decoding: give do_sample=True"),
                     ({"top_k": -1}, "at least 0"), ({"eos_token_id": [1, -1]}, "at least 0"),
                     ({"eos_token_id": []}, "integer"), ({"seed": -1}, "at least 0")],
    run_config: [
        ({"gen_len": 0}, "--gen-len must be at least 1"),
        ({"cut_gen_len": 33}, "at most --gen-len 32"), ({"cut_gen_len": 1}, "no decode step"),
        ({"model": ""}, "--model must be text"), ({"device": "cuda:x"}, "auto, cpu, cuda"),
        ({"dtype": "int8"}, "float16, bfloat16, float32"),
        ({"percent": [50, 60, 0, 0]}, "weights 50 \\+ 60"), ({"percent": 100}, "4 or 6 numbers"),
        ({"prompt": ["a"], "prompts": "b.txt"}, "not both"),
        ({"prompts": "b.csv"}, ".txt or .jsonl"),
        ({"prompts": "b.txt", "prompt_len": 64}, "--prompt-len is of synthetic prompts"),
        ({"output": "x", "csv": "./x"}, "--output and --csv name the same file"),
        ({"plan_only": True, "log_file": "l.log"}, "--log-file has no effect with --plan-only"),
        ({"no_log": True, "log_file": "l.log"}, "give --log-file or --no-log, not both"),
        ({"temperature": 0.5}, "--temperature has no effect: add --do-sample"),
        ({"do_sample": True, "top_p": 2.0}, "--top-p must be at most 1"),
        ({"min_new_tokens": 64}, "--min-new-tokens"),
        ({"attn_sparsity": 0.5, "hh_ratio": 0.1}, "leave it or --hh-ratio out"),
        ({"attn_sparsity": 0.5, "num_window_length": 9, "eviction": "sink-window"},
         "leave it or --num-window-length out"),
        # Quantized weights
        ({"weight_bits": 5}, "--weight-bits must be one of auto, 16, 12, 8, 4"),
        ({"compress_weight": True, "weight_bits": 16}, "contradict"),
        ({"weight_bits": 4, "weight_cache": ""}, "--weight-cache must be text"),
        ({"weight_bits": 4, "weight_cache": "dir", "no_weight_cache": True}, "not both"),
        ({"weight_bits": 12, "calibration": "text.txt"}, "--calibration has no effect"),
        ({"model": "some.gguf", "calibration": "text.txt"}, "--calibration has no effect"),
        ({"weight_bits": 4, "calibration": "a.txt", "prompts": "a.txt"}, "name the same file"),
        ({"prompts": "a.txt", "output": "../" + Path.cwd().name + "/a.txt"}, "name the same file"),
        ({"weight_cache": "dir"}, "^--weight-cache has no effect"),
        ({"no_weight_cache": True}, "^--no-weight-cache has no effect"),
        ({"activation_bits": 8}, "^--activation-bits has no effect"),
        ({"calibration": "text.txt"}, "^--calibration has no effect"),
        # What stays cached
        ({"hh_ratio": [0.1, math.nan]}, "--hh-ratio must be a finite number"),
        ({"hh_ratio": []}, "--hh-ratio is empty"),
        ({"hh_ratio": "a tenth"}, "--hh-ratio .* got 'a'"),
        ({"recent_ratio": ["0.1", "x.yaml"]}, "--recent-ratio .* got 'x.yaml'"),
        ({"hh_ratio": [0.1, 0.2], "recent_ratio": [0.1] * 3}, "different counts"),
        ({"recent_ratio": 0.2}, "give --hh-ratio below 1 too, or --eviction window"),
        ({"hh_ratio": 0.1, "num_window_length": 8}, "--hh-ratio or --num-window-length, not both"),
        ({"num_heavy_hitter_tokens": 0}, "leaves no recent tokens"),
        ({"num_window_length": 8, "num_heavy_hitter_tokens": 8}, "leaves no recent tokens"),
        ({"num_window_length": 4, "eviction": "sink-window"}, "no recent tokens beside 0 heavy"),
        ({"num_window_length": 8, "num_heavy_hitter_tokens": 2, "eviction": "window"},
         "--num-heavy-hitter-tokens has no effect"),
        ({"hh_ratio": 0.1, "eviction": "window", "sink_tokens": 4}, "give --eviction sink-window"),
        ({"hh_ratio": 0.1, "eviction": "full"}, "--eviction full keeps all: leave --hh-ratio out"),
        ({"num_window_length": 8, "budget_of": "text"}, "on --num-window-length"),
        ({"budget_of": "text"}, "on the full cache"),
        ({"recall": True}, "--recall has no effect on the full cache"),
        ({"hh_ratio": 0.1, "index_bits": 2}, "--index-bits has no effect: add --recall"),
        ({"hh_ratio": 0.1, "recall": True, "hot_set": 0.5}, "--hot-set has no effect"),
        ({"hh_ratio": 0.1, "selective_fetch": True}, "no effect: add --recall"),
        ({"hh_ratio": 0.1, "recall": True, "selective_fetch": True}, "on a cache in memory"),
        ({"hh_ratio": 0.1, "recall": True, "score": "mean"}, "leave --score out"),
        ({"hh_ratio": 0.1, "recall": True, "eviction": "window"}, "leave --eviction window out"),
        ({"hh_ratio": 0.1, "recall": True, "prefill_chunk": 8, "evict_while_prefilling": True},
         "leave --evict-while-prefilling out"),
        ({"hh_ratio": 0.1, "score_decay": 0.5}, "--score-decay has no effect: add --score decay"),
        ({"hh_ratio": 0.1, "eviction": "window", "score": "mean"}, "--score has no effect without"),
        ({"num_window_length": 8, "num_heavy_hitter_tokens": 0, "score": "mean"}, "--score has no"),
        ({"compress_cache": True, "cache_bits": 16}, "--compress-cache and --cache-bits 16"),
        ({"hh_ratio": 0.1, "evict_while_prefilling": True}, "such as --prefill-chunk 256"),
        ({"eviction": "sink-window"}, "^--eviction sink-window has no effect"),
        ({"score": "decay", "score_decay": 0.5}, "^--score has no effect"),
        ({"sink_tokens": 4}, "^--sink-tokens has no effect"),
        ({"sink_tokens": 4, "eviction": "full"}, "leave it out"),
        ({"enable_position_rolling": True}, "^--enable-position-rolling has no effect"),
        ({"hh_all": False}, "^--hh-all false has no effect"),
        ({"evict_while_prefilling": True, "prefill_chunk": 64}, "has no effect")]}


@pytest.mark.parametrize(("make", "values", "match"), [
    (make, *case) for make, cases in REFUSED.items() for case in cases])
def test_bad_values_are_refused(make, values, match):
    refused(lambda: make(**values), match=match)


# Policy, H2OConfig, SamplingParams


@pytest.mark.parametrize(("values", "full", "scored"), [
    ({}, True, False), ({"simulate": True}, True, False), ({"heavy_ratio": 1}, True, False),
    ({"heavy_ratio": 1, "sink_tokens": 4}, True, False),
    ({"heavy_ratio": [1, 1], "recent_ratio": 1}, True, False),
    ({"heavy_ratio": [1, 0.5]}, False, True),
    ({"heavy_ratio": 1, "recent_ratio": [1, 0.5]}, False, True),
    ({"heavy_ratio": 0.5}, False, True), ({"recent_ratio": 1.0}, False, False),
    ({"recent_tokens": 4, "sink_tokens": 2}, False, False),
    ({"heavy_ratio": 1, "recent_tokens": 4}, False, True), ({"heavy_tokens": 3}, False, True),
    ({"heavy_tokens": 0, "recent_tokens": 8}, False, False)])
def test_h2o_is_full_and_scored(values, full, scored):
    h2o = H2OConfig(**values)
    assert (h2o.is_full, h2o.scored) == (full, scored)


def test_h2o_ratios_per_layer():
    h2o = H2OConfig(heavy_ratio=[0.1, 0.2], recent_ratio=0.5)
    assert hash(h2o) == hash(H2OConfig(heavy_ratio=(0.1, 0.2), recent_ratio=0.5))
    assert [h2o.ratios(layer) for layer in range(2)] == [(0.1, 0.5), (0.2, 0.5)]
    assert H2OConfig(heavy_ratio=[0.1, 0.2]).ratios(1) == (0.2, 0.2)
    assert H2OConfig(heavy_ratio=[0.1, 0.2], recent_tokens=3).ratios(1) == (0.2, None)
    assert H2OConfig(heavy_tokens=3).ratios(1) == (None, None)
    h2o = H2OConfig(heavy_ratio=[1, 1, 0.5, 1], recent_ratio=[1, 0.5, 1, 1])
    assert [h2o.is_full_at(layer) for layer in range(4)] == [True, False, False, True]
    h2o.check_layers(4)
    H2OConfig(heavy_ratio=0.1, recent_ratio=0.2).check_layers(3)
    refused(lambda: h2o.check_layers(12), "4 numbers but the model has 12 decoder")


def test_sampling_takes_several_eos_tokens():
    params = SamplingParams(eos_token_id=[1, 2])
    assert params.eos_token_id == (1, 2)
    assert hash(params) == hash(SamplingParams(eos_token_id=(1, 2)))


# RunConfig


@pytest.mark.parametrize(("values", "bits"), [
    ({}, 16), ({"compress_weight": True}, 4), ({"compress_weight": True, "weight_bits": 8}, 8),
    ({"compress_cache": True}, 16), ({"weight_bits": "auto"}, 16),
    ({"model": "a/b-Q4_K_M.GGUF"}, "auto"), ({"model": "opt-125m", "path": "m.gguf"}, "auto"),
    ({"model": "m.gguf", "path": "folder"}, 16), ({"model": "m.gguf", "weight_bits": 16}, 16),
    ({"model": "smollm2-135m", "weight_bits": "auto", "activation_bits": 8}, "auto"),
    ({"model": "m.gguf", "compress_weight": True}, 4)])
def test_weight_bits(values, bits):
    assert RunConfig(**values).resolved_weight_bits == bits


@pytest.mark.parametrize(("values", "folder"), [
    ({}, "auto"), ({"weight_cache": "~/folder"}, "/somewhere/folder"),
    ({"weight_cache": "auto", "no_weight_cache": True}, None)])
def test_weight_cache(monkeypatch, tmp_path, values, folder):
    monkeypatch.setenv("HOME", "/somewhere")
    config = RunConfig(weight_bits=8, **values)
    assert config.resolved_weight_cache == folder
    config.save(tmp_path / "c.yaml")
    assert RunConfig.from_mapping(load_yaml(tmp_path / "c.yaml")) == config


@pytest.mark.parametrize(("words", "folders"), [
    (["~/a"], "/somewhere/a"), (["a", "~/b", "c"], ("a", "/somewhere/b", "c"))])
def test_offload_folders(monkeypatch, tmp_path, words, folders):
    monkeypatch.setenv("HOME", "/somewhere")
    config = generate.parse_args(["--offload-dir", *words])
    assert config.offload_dir == folders
    config.save(tmp_path / "c.yaml")
    assert RunConfig.from_mapping(load_yaml(tmp_path / "c.yaml")) == config
    refused(lambda: RunConfig(offload_dir=[]), "--offload-dir is empty")
    refused(lambda: RunConfig(offload_dir=["a", ""]), "--offload-dir must be text")


SIZES = [
    # The full cache
    ({}, None), ({"hh_ratio": [1, 1.0]}, None), ({"eviction": "full"}, None),
    ({"key_bits": 8, "value_bits": 4}, None),
    # Ratios
    ({"hh_ratio": 0.1}, H2OConfig(heavy_ratio=0.1)),
    ({"hh_ratio": 0.1, "recent_ratio": 0.3}, H2OConfig(heavy_ratio=0.1, recent_ratio=0.3)),
    ({"hh_ratio": [0.1, 1]}, H2OConfig(heavy_ratio=(0.1, 1.0))),
    ({"hh_ratio": "0.1 0.2", "recent_ratio": 1},
     H2OConfig(heavy_ratio=(0.1, 0.2), recent_ratio=1.0)),
    ({"hh_ratio": 0.1, "eviction": "window"}, H2OConfig(recent_ratio=0.2)),
    ({"hh_ratio": 0.7, "recent_ratio": 0.1, "eviction": "window"}, H2OConfig(recent_ratio=0.8)),
    ({"hh_ratio": [0.1, 0.3], "recent_ratio": 0.2, "eviction": "window"},
     H2OConfig(recent_ratio=(0.3, 0.5))),
    ({"hh_ratio": 0.1, "eviction": "sink-window"}, H2OConfig(recent_ratio=0.2, sink_tokens=4)),
    ({"hh_ratio": 0.1, "eviction": "sink-window", "sink_tokens": 1},
     H2OConfig(recent_ratio=0.2, sink_tokens=1)),
    ({"hh_ratio": 0.1, "budget_of": "text", "eviction": "window"},
     H2OConfig(recent_ratio=0.2, budget_of="text")),
    ({"hh_ratio": 0.1, "recall": True, "index_bits": 2},
     H2OConfig(heavy_ratio=0.1, recall=True, index_bits=2)),
    ({"num_window_length": 9, "recall": True},
     H2OConfig(heavy_tokens=4, recent_tokens=5, recall=True)),
    # Counts
    ({"num_window_length": 9}, H2OConfig(heavy_tokens=4, recent_tokens=5)),
    ({"num_window_length": 1}, H2OConfig(heavy_tokens=0, recent_tokens=1)),
    ({"num_window_length": 9, "sink_tokens": 2},
     H2OConfig(heavy_tokens=4, recent_tokens=3, sink_tokens=2)),
    ({"num_window_length": 9, "num_heavy_hitter_tokens": 6},
     H2OConfig(heavy_tokens=6, recent_tokens=3)),
    ({"num_heavy_hitter_tokens": 6}, H2OConfig(heavy_tokens=6, recent_tokens=6)),
    ({"num_heavy_hitter_tokens": 6, "sink_tokens": 3},
     H2OConfig(heavy_tokens=6, recent_tokens=6, sink_tokens=3)),
    ({"num_window_length": 9, "eviction": "window"}, H2OConfig(heavy_tokens=0, recent_tokens=9)),
    ({"num_window_length": 9, "eviction": "sink-window"},
     H2OConfig(heavy_tokens=0, recent_tokens=5, sink_tokens=4)),
    ({"num_heavy_hitter_tokens": 6, "eviction": "sink-window", "sink_tokens": 2},
     H2OConfig(heavy_tokens=0, recent_tokens=10, sink_tokens=2)),
    # The rest
    ({"hh_ratio": 0.1, "hh_all": False}, H2OConfig(heavy_ratio=0.1, evict_generated=False)),
    ({"hh_ratio": 0.1, "prefill_chunk": 64, "evict_while_prefilling": True},
     H2OConfig(heavy_ratio=0.1, prompt_chunk=64)),
    ({"hh_ratio": 0.1, "score": "decay", "score_decay": 0.5},
     H2OConfig(heavy_ratio=0.1, score="decay", decay=0.5)),
    ({"hh_ratio": 0.1, "enable_position_rolling": True},
     H2OConfig(heavy_ratio=0.1, positions="rolling")),
    ({"hh_long_seq": True}, H2OConfig(drop_positions=True))]


@pytest.mark.parametrize(("values", "expected"), SIZES)
def test_cache_flags_become_h2o_config(values, expected):
    assert RunConfig.from_mapping(values).h2o() == expected


layers = st.lists(st.integers(1, 20).map(lambda n: n / 20), min_size=1, max_size=6)


@given(layers, st.none() | layers, st.sampled_from(["h2o", "window", "sink-window"]))
def test_ratios_of_layers_map_or_are_refused_in_one_line(heavy, recent, eviction):
    try:
        config = RunConfig(hh_ratio=heavy, recent_ratio=recent, eviction=eviction)
    except UserError as error:
        counts = {len(heavy), len(recent or [1])} - {1}
        full = set(heavy) == {1}
        assert "\n" not in str(error) and (full or len(counts) == 2), error
        return
    h2o = config.h2o()
    assert h2o is None or (h2o.heavy_ratio is None) == (eviction != "h2o")
    assert RunConfig.from_mapping(config.to_dict()).h2o() == h2o


@given(st.none() | st.integers(1, 40), st.none() | st.integers(0, 40), st.integers(0, 9),
       st.sampled_from(["h2o", "window", "sink-window"]))
def test_counts_keep_the_total_or_are_refused_in_one_line(total, heavy, sinks, eviction):
    values = {"num_window_length": total, "num_heavy_hitter_tokens": heavy, "sink_tokens": sinks,
              "eviction": eviction}
    try:
        h2o = RunConfig(**values).h2o()
    except UserError as error:
        assert "\n" not in str(error)
        return
    if h2o is not None:
        kept = h2o.heavy_tokens + h2o.recent_tokens + h2o.sink_tokens
        assert kept == (total or 2 * heavy + (sinks if eviction == "h2o" else 0))


@pytest.mark.parametrize(("content", "match"), [
    (None, "No such file"), (b"0.2\n", "list of numbers"), (b"- 0.1\n- [\n", "YAML at line 3"),
    (b"- 0.1\n- many\n", "got 'many'"), (b"- 0.1\n- 7\n", "at most 1")])
def test_ratio_file_refusals(tmp_path, content, match):
    path = tmp_path / "ratios.yaml"
    if content is not None:
        path.write_bytes(content)
    assert "--recent-ratio" in refused(lambda: RunConfig(recent_ratio=str(path)), match=match)


def test_ratios_of_a_file_are_saved_as_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "r.yaml").write_text("# by layer\n- 0.1\n- 2e-1\n- 1\n")
    refused(lambda: RunConfig(hh_ratio="~/r.yaml", output=str(tmp_path / "r.yaml")), "same file")
    config = RunConfig(hh_ratio="~/r.yaml", recent_ratio=["~/r.yaml"], cache_bits=4)
    assert config.hh_ratio == config.recent_ratio == (0.1, 0.2, 1.0)
    config.save(tmp_path / "c.yaml")
    (tmp_path / "r.yaml").unlink()
    assert RunConfig.from_mapping(load_yaml(tmp_path / "c.yaml")) == config


@pytest.mark.parametrize(("values", "bits"), [
    ({}, (16, 16)), ({"compress_cache": True}, (4, 4)), ({"compress_cache": True, "cache_bits": 8},
                                                         (8, 8)),
    ({"key_bits": 8, "value_bits": 4}, (8, 4)), ({"compress_cache": True, "key_bits": 8}, (8, 4)),
    ({"cache_bits": 8, "key_bits": 4}, (4, 8))])
def test_bits_of_keys_and_values(values, bits):
    assert RunConfig(**values).cache().kind_bits == bits


@pytest.mark.parametrize(("key", "words"), [
    ("gen_lem", "did you mean gen_len?"), ("gen-len", "did you mean gen_len?"), ("zzz", "--help"),
    (7, "unknown key 7")])
def test_unknown_keys_get_a_suggestion(key, words):
    refused(lambda: RunConfig.from_mapping({key: 3}), words)


def test_real_prompts_stop_at_the_models_end():
    assert RunConfig().synthetic and RunConfig().sampling().eos_token_id == -1
    assert RunConfig(prompt=("a",)).sampling().eos_token_id is None
    assert RunConfig(prompt=("a",), ignore_eos=True).sampling().eos_token_id == -1


def test_policy_and_sampling_carry_the_flags():
    config = RunConfig(percent="0 50 20 30", gpu_batch_size=8, num_gpu_batches=2, overlap=False,
                       pin_weight=False, prefill_chunk=64, cpu_cache_compute=True, sep_layer=True,
                       hh_ratio=0.1, recall=True, selective_fetch=True, hot_set=0.5,
                       refill_share=0.25, do_sample=True, top_k=7, temperature=0.5, gen_len=9,
                       seed=3)
    assert config.policy() == Policy(8, 2, Placement(0, 50, 50), Placement(20, 30, 50),
                                     Placement(100, 0, 0), overlap=False, pin_weight=False,
                                     prefill_chunk=64, cpu_cache_compute=True, sep_layer=True,
                                     refill_share=0.25, selective_fetch=True, hot_set=0.5)
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
    (b"- a\n- b\n", "name: value"), (b"", "name: value"), (b"a: [1\nb: 2\n", "YAML at line 2"),
    (b"model: \xff\xfe\n", "not UTF-8"), (b"config: other.yaml\n", "another config"),
    (b"a: !!python/object/apply:os.system [true]\n", "not valid YAML"), (None, "No such file")])
def test_yaml_refusals(tmp_path, content, match):
    path = tmp_path / "c.yaml"
    if content is not None:
        path.write_bytes(content)
    assert str(path) in refused(lambda: load_yaml(path), match=match)
    refused(lambda: load_yaml(tmp_path), "cannot read")
