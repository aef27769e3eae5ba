"""Mixtures of experts: the tokens of transformers for every policy, and the counts of experts."""

import itertools
import json
import random
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import generation, kernel_cases, selection
from helpers.error_cases import refused
from helpers.generation import make_prompts, token_ids, transformers_tokens
from helpers.internals import (
    before,
    before_reads,
    experts_in_slots,
    hold_first_expert,
    scratch_bytes,
    slots_of_experts,
    watch_arrivals,
    weight_sizes,
    weights_of,
)
from helpers.mixture_cases import MIXTURES
from helpers.planning_cases import machine
from safetensors.torch import load_file, save_file

from flexgen_h2o import LLM, Placement, Policy
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.layers import ExpertChoices
from flexgen_h2o.config.limits import SHARED_PREFIX
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.config.sampling import SamplingParams
from flexgen_h2o.engine import expert_counts, expert_slots, source
from flexgen_h2o.errors import UserError
from flexgen_h2o.planning.cost import estimate
from flexgen_h2o.planning.memory_plan import MemoryPlan
from flexgen_h2o.planning.memory_rows import moe_scratch
from flexgen_h2o.planning.planned_run import PlannedRun

NEW = 6
run = partial(generation.run, new=NEW, gpu_batch_size=4, num_gpu_batches=1)
HERE, HOST, DISK, MIXED = (Placement(*shares) for shares in (
    (100, 0, 0), (0, 100, 0), (0, 0, 100), (30, 30, 40)))


@pytest.fixture
def wanted(tiny_model):
    """A function from a model's key to prompts and what transformers continues them with."""
    prompts = make_prompts(97, [9, 4, 1, 12, 7])
    return lambda key: (prompts, transformers_tokens(tiny_model(key), prompts, NEW))


# Where the experts are, their slots, sequences of a batch, batches, overlap.
POLICIES = [(None, None, 2, 2, True), (HOST, None, 5, 1, True), (DISK, None, 2, 3, True),
            (DISK, 1, 2, 2, True), (DISK, 3, 1, 1, True), (DISK, 2, 3, 2, False),
            (MIXED, 4, 1, 5, True), (Placement(90, 0, 10), 1, 2, 2, True),
            (MIXED, None, 2, 2, False)]


@pytest.mark.parametrize("key", MIXTURES)
def test_tokens_of_transformers_for_every_policy(tiny_model, wanted, tmp_path, key):
    """Each mixture with one of the policies; with --all, with every one."""
    prompts, expected = wanted(key)
    one = [*MIXTURES].index(key) % len(POLICIES)
    policies = POLICIES if selection.every_case else POLICIES[one : one + 1]
    for experts, slots, size, count, overlap in policies:
        got, stats = run(tiny_model(key).folder, prompts, experts=experts, expert_slots=slots,
                         gpu_batch_size=size, num_gpu_batches=count, overlap=overlap,
                         offload_dir=tmp_path)
        assert got == expected, (experts, slots, size, count, overlap)
        fetched = stats.expert_hits + stats.expert_loads
        assert stats.expert_touches >= fetched
        in_place = (None, HOST) if stats.device == "cpu" else (None,)
        assert (fetched > 0) == (experts not in in_place), "resident experts are not loaded"
        assert overlap or stats.expert_prefetches == 0


def test_a_fitted_batch_size_keeps_a_mixtures_tokens(tiny_model, wanted):
    prompts, expected = wanted("mixtral")
    with LLM(str(tiny_model("mixtral").folder), dtype="float32", weight_cache=None) as llm:
        assert llm.fit_batch(prompt_len=12, gen_len=NEW, max_batch_size=3) == 3
        outputs = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
        assert [out.token_ids for out in outputs] == expected


@pytest.mark.parametrize("key", ["qwen2_moe", "mixtral"])
def test_experts_in_host_memory_run_on_the_cpu(tiny_model, wanted, tmp_path, device, key):
    """Beside a GPU none of them is copied, and those on disk are loaded; without one it is the
    same. Chunks bring more rows with each pass."""
    prompts, expected = wanted(key)
    for experts, overlap, chunk in ((HOST, True, 4), (MIXED, False, None), (MIXED, True, None)):
        got, stats = run(tiny_model(key).folder, prompts, experts=experts, gpu_batch_size=2,
                         num_gpu_batches=2, cpu_expert_compute=True, overlap=overlap,
                         prefill_chunk=chunk, offload_dir=tmp_path)
        assert got == expected
        assert (stats.expert_hits + stats.expert_loads > 0) == (experts is MIXED)
        in_pool = device == "poisoned" and experts is MIXED
        assert (stats.expert_touches == stats.expert_hits + stats.expert_loads) == in_pool


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_are_quantized_and_the_router_is_not(tiny_model, tmp_path, bits):
    folder = tiny_model("qwen2_moe").folder
    prompts = make_prompts(97, [9, 4])
    expected, stats = run(folder, prompts, weight_bits=bits)
    for experts, slots in ((DISK, 2), (MIXED, None)):
        got, _ = run(folder, prompts, weight_bits=bits, experts=experts, expert_slots=slots,
                     gpu_batch_size=1, num_gpu_batches=2, offload_dir=tmp_path)
        assert got == expected
    with LLM(str(folder), weight_bits=bits, dtype="float32", weight_cache=None) as llm:
        first = weights_of(llm).units[1].resident
        saved = load_file(folder / "model.safetensors")
        assert torch.equal(first["router"].cpu(), saved["model.layers.0.mlp.gate.weight"])
        assert not isinstance(first["q"], torch.Tensor)
        assert not isinstance(weights_of(llm).experts[0, 0].resident["up"], torch.Tensor)


@pytest.mark.parametrize("key", ["mixtral", "gpt_oss", "glm4_moe", "minimax_m2", "phimoe",
                                 "llama4", "afmoe", "gemma4_moe"])
def test_bfloat16_is_close_for_every_policy(tiny_model, tmp_path, key):
    """Sums in float32: the order in which experts arrive is less than a rounding."""
    folder, prompts = tiny_model(key).folder, make_prompts(97, [9, 4, 6])
    pairs = [(prompt[:-2], prompt[-2:]) for prompt in prompts]
    results = []
    for experts, slots in ((None, None), (DISK, 2), (MIXED, 3)):
        with LLM(str(folder), dtype="bfloat16", offload_dir=tmp_path,
                 policy=Policy(experts=experts, expert_slots=slots)) as llm:
            results.append(torch.tensor(llm.loglikelihood(pairs)))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=0.05, rtol=0.05)


@pytest.mark.parametrize("key", ["qwen3_moe", "mixtral", "minimax_m2", "phimoe",
                                 "granitemoeshared"])
def test_stacked_experts_are_read_singly(tiny_model, wanted, tmp_path, key):
    """Checkpoints with one tensor for all experts of a layer, as transformers 5 holds them."""
    tiny = tiny_model(key)
    prompts, expected = wanted(key)
    stacked = tmp_path / "stacked"
    tiny.model.config.save_pretrained(stacked)
    state = {name: tensor.contiguous() for name, tensor in tiny.model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file(state, stacked / "model.safetensors", {"format": "pt"})
    for experts in (None, DISK):
        got, stats = run(stacked, prompts, experts=experts, offload_dir=tmp_path / "offload")
        assert got == expected
    assert stats.expert_bytes > 0
    assert not (tmp_path / "offload").exists(), "read from the checkpoint's own bytes"


def test_layers_for_further_tokens_are_left_out(tiny_model, wanted, tmp_path, caplog):
    prompts, expected = wanted("glm4_moe")
    folder = shutil.copytree(tiny_model("glm4_moe").folder, tmp_path / "model")
    saved = load_file(folder / "model.safetensors")
    saved |= {f"model.layers.4.{name}.weight": torch.ones(40)
              for name in ("enorm", "input_layernorm")}
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    assert run(folder, prompts)[0] == expected
    assert "multi-token prediction" in caplog.text
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    refused(lambda: run(folder, prompts), match="config.json calls for 4 layers")


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_routers_with_a_correction_stay_in_float32(tiny_model, tmp_path, monkeypatch, stored, bits):
    """Beside weights in bfloat16, which are read from the checkpoint's own bytes."""
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "SMALL_SHARE", 0.1)  # of a tiny model
    folder, routers = _with_routers(tiny_model("glm4_moe").folder, tmp_path, torch.bfloat16, stored)
    pairs, results = [(prompt, prompt[:3]) for prompt in make_prompts(97, [9, 4])], []
    for weights in (HERE, DISK):
        with LLM(str(folder), dtype="bfloat16", weight_bits=bits, offload_dir=tmp_path,
                 policy=Policy(weights=weights)) as llm:
            resident = weights_of(llm).units[3].resident
            if weights is HERE:
                for short, name in (("router", "weight"),
                                    ("router_correction", "e_score_correction_bias")):
                    wanted = routers[f"model.layers.1.mlp.gate.{name}"].float()
                    assert torch.equal(resident[short], wanted)
            results.append(torch.tensor(llm.loglikelihood(pairs)))
    torch.testing.assert_close(*results, atol=0.05, rtol=0.05)
    assert not (tmp_path / "cache" / "converted").exists()


def test_converted_copies_keep_routers_in_float32(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    folder, routers = _with_routers(tiny_model("glm4_moe").folder, tmp_path, torch.float16,
                                    torch.float32)
    with LLM(str(folder), dtype="bfloat16", weight_bits=16, offload_dir=tmp_path,
             policy=Policy(weights=DISK)):
        (copy,) = (tmp_path / "cache" / "converted").glob("[!.]*")
    converted = load_file(copy / "model.safetensors")
    assert all(torch.equal(converted.pop(name), tensor) for name, tensor in routers.items())
    assert {tensor.dtype for tensor in converted.values()} == {torch.bfloat16}


def _with_routers(folder, target, dtype, router_dtype):
    """Return a copy of a folder, whose tensors have a dtype and routers another, and the routers.
    """
    folder = shutil.copytree(folder, target / "model")
    saved = {name: tensor.to(router_dtype if ".mlp.gate." in name else dtype)
             for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    return folder, {name: tensor for name, tensor in saved.items() if ".mlp.gate." in name}


def test_experts_are_computed_in_order_of_arrival(tiny_model, wanted, tmp_path, monkeypatch):
    """The first requested expert arrives only after another one has been computed."""
    prompts, expected = wanted("mixtral")
    with LLM(str(tiny_model("mixtral").folder), dtype="float32", offload_dir=tmp_path,
             policy=Policy(experts=DISK, expert_slots=14, gpu_batch_size=5)) as llm:
        order = hold_first_expert(monkeypatch, llm)
        assert token_ids(llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)) == expected
    assert order[0] != (0, 0) in order


def test_slots_keep_experts_across_calls(tiny_model, wanted, tmp_path):
    """With slots for all, each expert comes once, across calls; prefetches change no token."""
    prompts, expected = wanted("qwen3_moe")
    policy = Policy(experts=DISK, expert_slots=33, gpu_batch_size=5)
    with LLM(str(tiny_model("qwen3_moe").folder), dtype="float32", policy=policy,
             offload_dir=tmp_path) as llm:
        outputs = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
        once = llm.stats
        assert token_ids(outputs) == expected
        assert once.expert_loads + once.expert_prefetches <= 33
        assert once.expert_hits + once.expert_loads == once.expert_touches
        assert once.expert_hit_rate > 0.5
        llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
        assert llm.stats.expert_bytes <= once.expert_bytes
        assert llm.stats.expert_loads + once.expert_loads + once.expert_prefetches <= 33
    alone, stats = run(tiny_model("qwen3_moe").folder, prompts[:1], experts=DISK, expert_slots=12,
                       gpu_batch_size=1, offload_dir=tmp_path)
    assert alone == expected[:1]
    assert stats.expert_prefetches > 0
    assert 0 < stats.expert_prefetch_hits <= stats.expert_prefetches


def test_slots_are_filled_by_counts_of_earlier_runs(tiny_model, wanted, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(expert_counts, "MIN_TOKENS", 1)
    prompts, expected = wanted("qwen3_moe")

    def run_once(**options):
        with LLM(str(tiny_model("qwen3_moe").folder), dtype="float32", offload_dir=tmp_path,
                 policy=Policy(experts=DISK, expert_slots=7), **options) as llm:
            held = experts_in_slots(llm)
            assert token_ids(llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)) == expected
            return held, llm.stats

    run_once(weight_cache=None)
    cold, stats = run_once()
    (file,) = (tmp_path / "cache").rglob("experts/*.json")
    warm, _ = run_once()
    assert warm == set(stats.expert_choices.ranked[:7]) != cold
    assert sum(map(sum, json.loads(file.read_text()))) == 2 * sum(
        map(sum, stats.expert_choices.counts))
    file.write_text("[[1, 2")
    assert run_once()[0] == cold, "a damaged file is ignored"


def test_loaded_experts_are_one_group(tiny_model, tmp_path, monkeypatch):
    """Once slots have every expert, a layer is one group, of those that stay and those in slots."""
    prompts = make_prompts(97, [9, 4, 7])
    with LLM(str(tiny_model("qwen3_moe").folder), dtype="bfloat16", offload_dir=tmp_path,
             policy=Policy(experts=MIXED, expert_slots=33, gpu_batch_size=3)) as llm:
        steps = watch_arrivals(monkeypatch, llm)
        first = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
        assert steps and llm.stats.expert_loads > 0
        steps.clear()
        again = llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
        assert steps and all(len(groups) == 1 for groups in steps)
        assert llm.stats.expert_bytes == llm.stats.expert_loads == 0
    assert token_ids(first) == token_ids(again)


@pytest.mark.parametrize("key", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("coming", [1, 3])
def test_pending_loads_are_limited(tiny_model, tmp_path, monkeypatch, key, coming):
    """At most `MAX_EXPERT_LOADS` are loaded and not computed, with prefetches; the same tokens."""
    monkeypatch.setattr(expert_slots, "MAX_EXPERT_LOADS", coming)
    most = []

    def watched(self, key, slot):
        load(self, key, slot)
        most.append(len(self._loading))

    load = expert_slots.ExpertSlots._load
    monkeypatch.setattr(expert_slots.ExpertSlots, "_load", watched)
    prompts, results = make_prompts(97, [9, 4, 7, 2]), []
    for experts, slots, size, count in ((HERE, None, 4, 1), (DISK, 14, 1, 1), (MIXED, 4, 4, 1),
                                        (DISK, 1, 2, 2)):
        got, _ = run(tiny_model(key).folder, prompts, dtype="bfloat16", experts=experts,
                     expert_slots=slots, gpu_batch_size=size, num_gpu_batches=count,
                     offload_dir=tmp_path)
        results.append(got)
    assert all(got == results[0] for got in results)
    assert max(most) == coming


@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt])
def test_engine_works_after_a_failed_expert_load(tiny_model, wanted, tmp_path, monkeypatch, error):
    """A read fails, or Ctrl-C comes when the slot still holds the expert before."""
    prompts, expected = wanted("mixtral")
    calls = itertools.count()

    def fail(*_) -> None:
        if next(calls) > 20:
            raise error("check the disk")

    with LLM(str(tiny_model("mixtral").folder), dtype="float32", offload_dir=tmp_path,
             policy=Policy(experts=DISK, expert_slots=3, gpu_batch_size=5)) as llm:
        with monkeypatch.context() as patched:
            if error is UserError:
                before_reads(patched, fail)
            else:
                before(patched, expert_slots.ExpertSlots, "_load", fail)
            with pytest.raises(error, match="check the disk"):
                llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
        assert token_ids(llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)) == expected


def test_verify_detects_a_changed_expert(tiny_model, tmp_path):
    prompts = make_prompts(97, [9, 4])
    with LLM(str(tiny_model("mixtral").folder), dtype="bfloat16", offload_dir=tmp_path,
             weight_bits=4, weight_cache=None, verify=True,
             policy=Policy(experts=DISK, expert_slots=1)) as llm:
        llm.generate(prompts, max_new_tokens=2, eos_token_id=-1)
        (file,) = tmp_path.glob("*/weights.bin")
        content = bytearray(file.read_bytes())
        content[5::64] = bytes(byte ^ 1 for byte in content[5::64])
        file.write_bytes(content)
        with pytest.raises(UserError, match="has changed"):
            llm.generate(prompts, max_new_tokens=2, eos_token_id=-1)


ONE_OF_TWO = ExpertChoices(((5, 5),) * 3, 1, source="counts.json")


@pytest.mark.parametrize(("key", "policy", "words"), [
    ("llama", {"experts": HERE}, "no experts: leave --expert-percent out"),
    ("llama", {"expert_slots": 3}, "no experts: leave --expert-slots out"),
    ("llama", {"cpu_expert_compute": True}, "no experts: leave --cpu-expert-compute out"),
    ("llama", {"expert_choices": ONE_OF_TWO}, "no experts: leave --expert-counts out"),
    ("qwen3_moe", {"expert_choices": ONE_OF_TWO}, "counts.json is of another model"),
    (None, {"expert_choices": {"counts": []}}, "ExpertChoices"),
    (None, {"expert_slots": 0}, "expert_slots")])
def test_options_that_do_not_fit_the_model_raise(tiny_model, key, policy, words):
    with pytest.raises(UserError, match=words):
        LLM(str(tiny_model(key).folder), policy=Policy(**policy)) if key else Policy(**policy)


def test_number_of_expert_slots(tiny_model, tmp_path):
    def held(**policy):
        with LLM(str(tiny_model("qwen3_moe").folder), dtype="float32", offload_dir=tmp_path,
                 device="cpu", policy=Policy(**policy)) as llm:
            return len(slots_of_experts(llm))

    assert held(experts=HERE) == held(experts=HOST, expert_slots=5) == 0
    assert held(experts=DISK, expert_slots=5) == 5
    assert held(experts=DISK, gpu_batch_size=1) == 2 * 3
    assert held(experts=DISK, gpu_batch_size=4) == 2 * 11
    assert held(experts=DISK, expert_slots=100) == 33


@pytest.mark.parametrize("bits", [16, 4])
def test_the_memory_plan_counts_experts_and_slots(tiny_model, tmp_path, bits):
    policy = Policy(experts=Placement(0, 40, 60), expert_slots=4, gpu_batch_size=2)
    with LLM(str(tiny_model("qwen3_moe").folder), dtype="bfloat16", weight_bits=bits,
             weight_cache=None, policy=policy, offload_dir=tmp_path) as llm:
        plan = MemoryPlan(PlannedRun(llm.model_config, policy, Workload(8, 4, 2, 1), itemsize=2,
                                     writes_weights=True, weights=llm.weight_options))
        rows = {row.name: row for row in plan.rows}
        sizes, tiers = weight_sizes(llm), weights_of(llm).tiers
        largest = max(sum(sizes[spec.name] for spec in unit.specs.values())
                      for unit in weights_of(llm).experts.values())
        for tier in ("cpu", "disk"):
            nbytes = sum(sizes[name] for name in sizes
                        if ".experts." in name and tiers[name] == tier)
            assert abs(nbytes - getattr(rows["experts"], tier)) <= largest
        held = sum(buffer.device.nbytes for buffer in slots_of_experts(llm))
        assert 0 < held <= rows["expert slots"].cpu
        assert llm.model_config.num_parameters() == tiny_model("qwen3_moe").model.num_parameters()


@kernel_cases.BUILT
def test_the_memory_plan_counts_outputs_that_batch_invariance_keeps(tiny_model):
    rows, held, planned_bytes = 50, [], []
    for invariant in (False, True):
        with LLM(str(tiny_model("qwen3_moe").folder), dtype="float32", device="cpu",
                 batch_invariant=invariant) as llm:
            llm.generate([list(range(3, 3 + rows))], max_new_tokens=1, eos_token_id=-1)
            held.append(scratch_bytes(llm))
            planned_bytes.append(moe_scratch(PlannedRun(
                llm.model_config, Policy(), Workload(rows, 1, 1, 1), itemsize=4,
                batch_invariant=invariant)))
    sums_of_a_chunk = rows * 40 * 8  # planned in both cases
    assert held[1] - held[0] == planned_bytes[1] - planned_bytes[0] + sums_of_a_chunk


PROMPT = 12
LAYERS, DRAWN = (6, 40) if selection.every_case else (3, 20)


def save_skewed(folder, skew):
    """A mixture of many small experts with random weights, whose routers prefer some."""
    from transformers import AutoModelForCausalLM

    config = MIXTURES["qwen3_moe"]()
    config.num_experts, config.num_experts_per_tok, config.num_hidden_layers = 64, 4, LAYERS
    generator = torch.Generator().manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(parameter.dim() == 1, 0.2, generator=generator)
        if name.endswith("embed_tokens.weight"):  # what all inputs have in common
            parameter.data += skew
    model.save_pretrained(folder)


def drawn(folder, sequences, *, seed=0, offload_dir=None, **policy):
    """Return the stats of prompts and tokens that are drawn almost at random, after others."""
    rng = random.Random(seed)
    with LLM(str(folder), policy=Policy(gpu_batch_size=sequences, **policy), dtype="float32",
             offload_dir=offload_dir, weight_cache=None) as llm:
        for turn in range(2):
            prompts = [[rng.randrange(3, 97) for _ in range(PROMPT)] for _ in range(sequences)]
            llm.generate(prompts, max_new_tokens=DRAWN, eos_token_id=-1, do_sample=True,
                         temperature=50.0, seed=seed + turn)
        return llm.stats, llm.model_config


def test_expert_choices_are_counted(tiny_model):
    """Each token that goes through a layer chooses three; layers without experts choose none."""
    prompts = make_prompts(97, [9, 4, 1, 12, 7])
    tokens = sum(map(len, prompts)) + len(prompts) * (NEW - 1)
    for key, layers in (("qwen3_moe", [True] * 3), ("qwen3_moe_dense", None)):
        with LLM(str(tiny_model(key).folder), dtype="float32",
                 policy=Policy(gpu_batch_size=2, num_gpu_batches=2)) as llm:
            llm.generate(prompts, max_new_tokens=NEW, eos_token_id=-1)
            choices, config = llm.stats.expert_choices, llm.model_config
            llm.generate(prompts, max_new_tokens=1, eos_token_id=-1)
            short = llm.stats.expert_choices
        layers = layers or [config.has_experts(layer) for layer in range(config.num_layers)]
        assert choices.per_token == config.experts.per_token
        assert [sum(layer) for layer in choices.counts] == [
            choices.per_token * tokens * has for has in layers]
        assert [len(layer) for layer in choices.counts] == [
            config.experts.count * has for has in layers]
        assert (choices.texts, choices.text_tokens) == (len(prompts) * sum(layers),
                                                    sum(map(len, prompts)) * sum(layers))
        assert replace(choices, counts=()) == replace(short, counts=()), "texts are prompts"
        with LLM(str(tiny_model(key).folder), dtype="float32",
                 policy=Policy(gpu_batch_size=1)) as llm:
            touches = 0
            for prompt in prompts:
                llm.generate([prompt], max_new_tokens=1, eos_token_id=-1)
                touches += llm.stats.expert_touches
        assert choices.text_experts == touches


@pytest.mark.parametrize("chunk", [None, 4])
def test_ended_sequences_are_not_counted(tiny_model, chunk):
    prompts = make_prompts(97, [9, 4, 1, 12, 7, 3])
    params = [SamplingParams(max_new_tokens=1 + 2 * number, eos_token_id=-1)
              for number in range(len(prompts))]
    policy = Policy(gpu_batch_size=2, num_gpu_batches=2, prefill_chunk=chunk)
    with LLM(str(tiny_model("qwen3_moe").folder), dtype="float32", policy=policy) as llm:
        llm.generate(prompts, params)
        choices = llm.stats.expert_choices
    tokens = sum(len(prompt) + options.max_new_tokens - 1
                 for prompt, options in zip(prompts, params, strict=True))
    assert [sum(layer) for layer in choices.counts] == [3 * tokens] * 3
    assert choices.texts == 3 * len(prompts)
    whole = 3 * sum(map(len, prompts))
    assert choices.text_tokens == whole if chunk is None else 3 * 6 <= choices.text_tokens < whole


@pytest.mark.parametrize(("shared", "texts", "tokens"), [
    (SHARED_PREFIX - 1, 4, 4 * SHARED_PREFIX), (SHARED_PREFIX, 1, SHARED_PREFIX + 4)])
def test_a_shared_prefix_counts_once_if_computed_once(tiny_model, shared, texts, tokens):
    beginning, = make_prompts(97, [shared])
    with LLM(str(tiny_model("qwen3_moe").folder), dtype="float32",
             policy=Policy(gpu_batch_size=4)) as llm:
        llm.generate([[*beginning, number] for number in range(4)], max_new_tokens=1,
                     eos_token_id=-1)
        choices = llm.stats.expert_choices
    assert choices.texts == 3 * texts
    assert [sum(layer) for layer in choices.counts] == [3 * tokens] * 3


@pytest.fixture(scope="module", params=[0.03, *selection.full(0.0, 0.1)])
def skewed(request, tmp_path_factory):
    """The folder of a skewed model, and the expert choices of a run."""
    folder = tmp_path_factory.mktemp("skewed")
    save_skewed(folder, request.param)
    return folder, drawn(folder, 16, seed=1)[0].expert_choices


def planned(config, sequences, **policy):
    """Return the planned run of `drawn`."""
    return PlannedRun(config, Policy(gpu_batch_size=sequences, **policy),
                      Workload(PROMPT, DRAWN, sequences, 1), 4, False, False, CacheOptions())


def test_planned_touched_experts_equal_a_run(skewed):
    """By counts of another run of the same model, within 15 %."""
    folder, choices = skewed
    for sequences in (1, 16):
        stats, config = drawn(folder, sequences, seed=2)
        plan = planned(config, sequences, expert_choices=choices)
        foreseen = plan.touched(sequences, PROMPT) + (DRAWN - 1) * plan.touched(sequences, 1)
        assert abs(foreseen / (stats.expert_touches / LAYERS) - 1) < 0.15, sequences


@pytest.mark.full
@pytest.mark.parametrize("slots", [80, 60])
def test_planned_expert_loads_equal_a_run(skewed, tmp_path, slots):
    """By counts of another run, within 15 %; without prefetches, some of which are wrong."""
    folder, choices = skewed
    policy = {"weights": HERE, "experts": Placement(20, 0, 80), "expert_slots": slots,
              "expert_choices": choices}
    stats, config = drawn(folder, 16, seed=2, offload_dir=tmp_path, overlap=False, **policy)
    run = planned(config, 16, **policy)
    cost = estimate(machine(gpu=False, read=1.0), run)
    prefill, step = (phase.resources["disk->cpu"] / run.expert_bytes
                     for phase in (cost.prefill, cost.step))
    assert abs((prefill + (DRAWN - 1) * step) / stats.expert_loads - 1) < 0.15


def test_popular_experts_are_placed_in_faster_memory(skewed, tmp_path):
    folder, _ = skewed
    prompts = make_prompts(97, [9, 4, 1, 12, 7])
    expected, counted = run(folder, prompts)
    choices = counted.expert_choices
    with LLM(str(folder), dtype="float32", offload_dir=tmp_path,
             policy=Policy(experts=Placement(30, 70, 0), expert_choices=choices)) as llm:
        tiers = {key: weights_of(llm).tiers[next(iter(unit.specs.values())).name]
                 for key, unit in weights_of(llm).experts.items()}
    ranked = [tiers[key] for key in choices.ranked]
    fastest = round(0.3 * 64 * LAYERS)
    assert ranked == ["gpu"] * fastest + ["cpu"] * (len(ranked) - fastest)
    places, loads = Placement(30, 20, 50), []
    with LLM(str(folder), dtype="float32", offload_dir=tmp_path, device="cpu",
             policy=Policy(experts=places, expert_slots=6, expert_choices=choices)) as llm:
        assert experts_in_slots(llm) == set(choices.ranked[: 64 * LAYERS // 2 + 6])
    for known in (choices, None):
        tokens, stats = run(folder, prompts, experts=places, expert_slots=6, overlap=False,
                            expert_choices=known, offload_dir=tmp_path)
        assert tokens == expected
        loads.append(stats.expert_loads)
    assert loads[0] < 0.7 * loads[1], "fewer have to come"
