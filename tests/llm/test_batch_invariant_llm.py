"""Batch invariance: tokens and log-probabilities of a prompt alone and in any batch, bit by bit."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.error_cases import refused
from helpers.generation import make_prompts
from helpers.internals import hold_first_expert, reorder_experts
from helpers.kernel_cases import AVAILABLE, BUILT, threads, using
from helpers.selection import examples, full, full_cases
from helpers.tiny_models import make_tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o import LLM, H2OConfig, Placement, Policy, SamplingParams
from flexgen_h2o.models.mixture import MixtureDecoder

pytestmark = BUILT
NEW = 10
MODES = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "4-bit weights": {"weight_bits": 4},
    "8-bit weights": {"weight_bits": 8},
    "12-bit weights": {"weight_bits": 12},
    "8-bit activations, quantized cache": {
        "weight_bits": 4, "activation_bits": 8, "key_bits": 8, "value_bits": 4},
    "h2o": {"h2o": H2OConfig(heavy_ratio=0.15)},
    "h2o, quantized": {"weight_bits": 4, "cache_bits": 4, "h2o": H2OConfig(heavy_ratio=0.15)},
    "h2o, decay": {"h2o": H2OConfig(heavy_ratio=0.15, sink_tokens=1, score="decay")},
    "h2o inside prompts": {"h2o": H2OConfig(heavy_ratio=0.15, prompt_chunk=8)},
    "recall": {"h2o": H2OConfig(heavy_ratio=0.15, recall=True)},
    "recall, quantized": {"cache_bits": 4, "h2o": H2OConfig(heavy_ratio=0.15, recall=True)},
}
RARE = ("8-bit weights", "12-bit weights", "h2o, decay", "recall, quantized")
MODELS = ("opt_no_bias", "opt_350m_style", "llama_dynamic", "gemma2", "granite", "apertus",
          "cohere", "neox", "stablelm_12b", "qwen2_windows", "phi3_longrope")
DEEP_MODELS = ("deepseek_v3", "qwen3_next")
"""Mixtures of experts with latent attention, and with recurrent layers."""
MORE_MODELS = ("qwen3_moe", "gpt_oss", "deepseek_v2_groups", "deepseek_v3_dense", "qwen3_5",
               "phimoe", "granitemoeshared", "afmoe", "gemma4_moe", "llama4", "ernie4_5_moe",
               "qwen2_moe")
POLICIES = {
    "one batch": Policy(gpu_batch_size=12),
    "small batches": Policy(gpu_batch_size=3, num_gpu_batches=2),
    "on disk": Policy(gpu_batch_size=5, weights=Placement(0, 0, 100), cache=Placement(0, 50, 50)),
}


def prompts_of(vocab: int) -> list[list[int]]:
    """Prompts of several lengths; some are equal, and some have a common prefix."""
    prompts = make_prompts(vocab, [150, 34, 7, 1, 60, 21, 90])
    return [*prompts, prompts[1], prompts[4][:40] + prompts[5], prompts[4][:40]]


def params_of(count: int) -> list[SamplingParams]:
    """Parameters of each prompt: greedy, or sampled with a seed of its own."""
    return [SamplingParams(max_new_tokens=NEW - key % 3, eos_token_id=-1, do_sample=key % 2 == 1,
                           seed=key, logprobs=2) for key in range(count)]


def answers(llm: LLM, order: list[int]) -> list[tuple]:
    """Return tokens and log-probabilities of each prompt, which come in an order."""
    prompts = prompts_of(llm.vocab_size)
    params = params_of(len(prompts))
    results = llm.generate([prompts[index] for index in order], [params[index] for index in order])
    by_index = dict(zip(order, results, strict=True))
    return [(by_index[index].token_ids, by_index[index].log_probs) for index in range(len(order))]


def alone(folder: str, **options) -> list[tuple]:
    with LLM(folder, policy=Policy(gpu_batch_size=1), progress=False, **options) as llm:
        prompts = prompts_of(llm.vocab_size)
        results = [llm.generate([prompt], [params])[0]
                 for prompt, params in zip(prompts, params_of(len(prompts)), strict=True)]
    return [(out.token_ids, out.log_probs) for out in results]


def check_invariant(folder: str, policies: list[Policy], tmp_path, **options) -> None:
    options = {"dtype": "bfloat16", "device": "cpu", "batch_invariant": True,
               "offload_dir": tmp_path / "offload", "weight_cache": None} | options
    expected = alone(folder, **options)
    for number, policy in enumerate(policies):
        order = list(range(len(expected)))[:: (1, -1)[number % 2]]
        with LLM(folder, policy=policy, progress=False, **options) as llm, threads(2 - number % 2):
            assert answers(llm, order) == expected


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in RARE] + full(*RARE))
def test_answers_do_not_depend_on_the_batch(tiny_model, tmp_path, mode):
    check_invariant(str(tiny_model("llama").folder), list(POLICIES.values()), tmp_path,
                    **MODES[mode])


@pytest.fixture(scope="module", params=[5, 16])
def opened(request, tiny_model):
    """An LLM with a batch size, and the answer to each prompt alone."""
    options = {"dtype": "bfloat16", "device": "cpu", "batch_invariant": True, "weight_bits": 4,
               "weight_cache": None, "h2o": H2OConfig(heavy_ratio=0.15)}
    folder = str(tiny_model("llama").folder)
    policy = Policy(gpu_batch_size=request.param, refill_share=0.3)
    with LLM(folder, policy=policy, progress=False, **options) as llm:
        yield llm, alone(folder, **options)


@given(chosen=st.lists(st.integers(0, 9), min_size=1, max_size=20))
@settings(max_examples=examples(10))
def test_answers_of_any_choice_of_prompts(opened, chosen):
    llm, expected = opened
    prompts, params = prompts_of(llm.vocab_size), params_of(10)
    outputs = llm.generate(*([values[index] for index in chosen] for values in (prompts, params)))
    assert [(out.token_ids, out.log_probs) for out in outputs] == [
        expected[index] for index in chosen]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["bfloat16", *full("float32", "4-bit weights")])
def test_answers_of_other_models(tiny_model, tmp_path, name, mode):
    check_invariant(str(tiny_model(name).folder), [POLICIES["one batch"]], tmp_path,
                    **MODES[mode])


EXPERT_POLICIES = [
    POLICIES["one batch"],
    Policy(gpu_batch_size=3, num_gpu_batches=2, prefill_chunk=13),
    replace(POLICIES["on disk"], expert_slots=4),
]


@pytest.mark.parametrize("name", DEEP_MODELS)
@pytest.mark.parametrize("mode", ["bfloat16", *full(
    "float32", "float16", "4-bit weights", "8-bit weights", "12-bit weights")])
def test_answers_of_experts_latents_and_states(tiny_model, tmp_path, name, mode):
    check_invariant(str(tiny_model(name).folder), EXPERT_POLICIES, tmp_path, **MODES[mode])


@pytest.mark.parametrize("mode", ["h2o, quantized", *full("h2o inside prompts",
                                                          "recall, quantized")])
def test_answers_with_evicted_latents(tiny_model, tmp_path, mode):
    check_invariant(str(tiny_model("deepseek_v3").folder), [POLICIES["on disk"]], tmp_path,
                    **MODES[mode])


@pytest.mark.parametrize("name", full(*MORE_MODELS))
def test_answers_of_other_mixtures(tiny_model, tmp_path, name):
    for mode in ("bfloat16", "4-bit weights"):
        check_invariant(str(tiny_model(name).folder),
                        [POLICIES["one batch"], POLICIES["on disk"]], tmp_path, **MODES[mode])


def test_outputs_of_experts_add_up_in_one_order(tiny_model, monkeypatch):
    def sums(order) -> list[torch.Tensor]:
        added = []

        def add_experts(self, cfg, w, x, inputs, sums, ops):
            added.append(sums.clone())
            add(self, cfg, w, x, inputs, sums, ops)

        with LLM(str(tiny_model("qwen3_moe").folder), dtype="bfloat16", device="cpu",
                 batch_invariant=True, progress=False) as llm, monkeypatch.context() as patch:
            reorder_experts(patch, llm, order)
            patch.setattr(MixtureDecoder, "add_experts", add_experts)
            llm.generate(prompts_of(llm.vocab_size)[:2], max_new_tokens=2)
        return added

    add = MixtureDecoder.add_experts
    for ascending, descending in zip(sums(sorted), sums(partial(sorted, reverse=True)),
                                     strict=True):
        assert torch.equal(ascending, descending)


def test_answers_of_offloaded_experts_of_a_wide_model(tmp_path, monkeypatch):
    """In a model so wide that quantized matmuls otherwise depend on the number of rows."""
    folder = str(make_tiny("qwen3_moe", tmp_path / "wide", hidden_size=256, num_experts=16,
                           num_experts_per_tok=8, moe_intermediate_size=200,
                           num_hidden_layers=2).folder)
    options = {"dtype": "bfloat16", "device": "cpu", "batch_invariant": True, "weight_cache": None,
               "weight_bits": 4, "offload_dir": tmp_path}
    policy = Policy(gpu_batch_size=12, experts=Placement(0, 0, 100), expert_slots=14)
    with LLM(folder, policy=policy, progress=False, **options) as llm:
        order = hold_first_expert(monkeypatch, llm)
        assert answers(llm, list(range(10))) == alone(folder, **options)
    assert order[0] != (0, 0) in order


@pytest.mark.parametrize("name", AVAILABLE)
def test_answers_with_other_instruction_sets(tiny_model, tmp_path, name):
    with using(name):
        for mode in ("bfloat16", "4-bit weights"):
            check_invariant(str(tiny_model("llama").folder), [POLICIES["one batch"]], tmp_path,
                            **MODES[mode])


@pytest.mark.parametrize("name, bits", [("llama", 16), ("llama", 4), ("deepseek_v3", 4),
                                        ("qwen3_next", 16)])
def test_answers_depend_on_the_batch_otherwise(tiny_model, name, bits):
    folder = str(tiny_model(name).folder)
    options = {"dtype": "float32", "device": "cpu", "weight_cache": None, "weight_bits": bits}
    with LLM(folder, policy=POLICIES["one batch"], progress=False, **options) as llm:
        assert answers(llm, list(range(10))) != alone(folder, **options)


@pytest.mark.parametrize("name, mode", [
    ("llama", "bfloat16"), ("llama", "h2o"), ("llama", "8-bit activations, quantized cache"),
    *full_cases(("deepseek_v3", "h2o")), ("qwen3_next", "bfloat16")])
def test_answers_of_a_session_do_not_depend_on_the_block(tiny_model, name, mode):
    folder = str(tiny_model(name).folder)
    options = {"dtype": "bfloat16", "device": "cpu", "weight_cache": None} | MODES[mode]

    def of_session(size: int, together: int) -> dict[int, tuple]:
        policy, results = Policy(gpu_batch_size=size, prefill_chunk=32), {}
        with LLM(folder, policy=policy, progress=False, batch_invariant=True, **options) as llm:
            prompts = prompts_of(llm.vocab_size)
            with llm.open_session(max_model_len=200) as session:
                waiting = list(enumerate(zip(prompts, params_of(len(prompts)), strict=True)))
                while waiting or session.unfinished:
                    for index, (prompt, params) in waiting[:together]:
                        keys[session.add(prompt, params)] = index
                    waiting = waiting[together:]
                    results |= session.step()
        return {keys[key]: (out.token_ids, out.log_probs) for key, out in results.items()}

    keys: dict[int, int] = {}
    expected = of_session(1, 1)
    assert of_session(4, 3) == of_session(12, 12) == expected


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_speculation_and_its_drafts_change_nothing(tiny_model, name):
    prompt = make_prompts(96, [6])[0] * 8
    results = []
    for policy in (Policy(), Policy(speculate="ngram", num_speculative_tokens=5)):
        with LLM(str(tiny_model(name).folder), policy=policy, dtype="bfloat16", device="cpu",
                 batch_invariant=True, progress=False) as llm:
            (out,) = llm.generate([prompt], max_new_tokens=30, eos_token_id=-1, logprobs=1)
            results.append((out.token_ids, out.log_probs))
    assert results[0] == results[1]


REFUSALS = {
    "attn_sparsity": ("llama", {"attn_sparsity": 0.5}, "with attn_sparsity"),
    "simulation": ("llama", {"h2o": H2OConfig(heavy_ratio=0.1, simulate=True)}, "a simulation"),
    "rolling": ("llama", {"h2o": H2OConfig(heavy_ratio=0.1, positions="rolling")},
                "with rolling positions"),
    "caote": ("llama", {"h2o": H2OConfig(heavy_ratio=0.1, score="caote")}, "the score caote"),
    "windows in chunks": ("mistral_window", {"policy": Policy(prefill_chunk=8)},
                          "with prompts in chunks"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_invariant_is_refused(tiny_model, name):
    model, options, said = REFUSALS[name]
    folder = str(tiny_model(model).folder)
    refused(lambda: LLM(folder, device="cpu", batch_invariant=True, **options),
            match=f"batch_invariant does not work .*{said}")


def test_missing_kernels_are_refused(tiny_model, monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_KERNELS", "reference")
    refused(lambda: LLM(str(tiny_model("llama").folder), device="cpu", batch_invariant=True),
            match="batch_invariant does not work without the C\\+\\+ kernels")
