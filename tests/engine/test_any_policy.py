"""Tokens do not depend on the policy: pairs of all that a policy sets, on all kinds of caches."""

from __future__ import annotations

import pytest
from helpers import selection
from helpers.fakes import LazyDevice, PoisonedDevice
from helpers.generation import PLACES, make_prompts
from helpers.internals import open_devices

from flexgen_h2o import LLM, H2OConfig, Placement, Policy, SamplingParams
from flexgen_h2o.cache import tiers
from flexgen_h2o.engine import decoder as decoder_layers
from flexgen_h2o.models import decoder
from flexgen_h2o.storage import placement

H2O = {"heavy_ratio": 0.2}
DISK, MIXED = Placement(0, 0, 100), Placement(30, 30, 40)
# By name: a model, options of `LLM`, and parts of the policy beside those that are varied.
WORKLOADS: dict[str, tuple[str, dict, dict]] = {
    "opt": ("opt", {}, {}),
    "opt-350m, h2o": ("opt_350m_style", {"h2o": H2OConfig(**H2O)}, {}),
    "8 and 4 bits": ("llama", {"key_bits": 8, "value_bits": 4}, {}),
    "rolling, 4 bits": ("llama", {"h2o": H2OConfig(**H2O, positions="rolling"),
                                  "cache_bits": 4}, {}),
    "by layer": ("llama", {"h2o": H2OConfig(heavy_ratio=(1, 0.2, 0.3))}, {}),
    "of the text": ("llama", {"h2o": H2OConfig(**H2O, budget_of="text")}, {}),
    "inside prompts": ("llama", {"h2o": H2OConfig(**H2O, prompt_chunk=5)}, {}),
    "recall": ("llama", {"h2o": H2OConfig(**H2O, recall=True)}, {}),
    "sparse": ("llama", {"attn_sparsity": 0.3, "cache_bits": 4}, {}),
    "4-bit weights": ("llama", {"weight_bits": 4, "h2o": H2OConfig(**H2O)}, {}),
    "8-bit activations": ("llama", {"weight_bits": 4, "activation_bits": 8}, {}),
    "neox, 4 bits": ("neox_sequential", {"h2o": H2OConfig(**H2O), "cache_bits": 4}, {}),
    "windows, h2o, 4 bits": ("mistral_window", {"h2o": H2OConfig(heavy_tokens=2),
                                                "cache_bits": 4}, {}),
    "experts": ("qwen2_moe", {}, {"experts": DISK, "expert_slots": 3}),
    "experts, h2o": ("gpt_oss", {"h2o": H2OConfig(**H2O)}, {
        "experts": MIXED, "cpu_expert_compute": True}),
    "latent, h2o": ("deepseek_v3", {"h2o": H2OConfig(**H2O)}, {}),
}
AXES: dict[str, list] = {
    "workload": [*WORKLOADS], "weights": PLACES, "cache": PLACES,
    "activations": PLACES, "growth": [4, 5], "weight_cache": ["auto", None],
    "batches": [(3, 2), (1, 4), (5, 1), (2, 3)], "prefill_chunk": [None, 4],
    "overlap": [True, False], "cpu_cache_compute": [True, False], "sep_layer": [False, True],
    "refill_share": [0.3, 1.0], "device": [LazyDevice, PoisonedDevice]}
LENGTHS = [14, 9, 1, 11, 6]
NEW = [8, 2, 5, 1, 7]

_expected: dict[str, list[list[int]]] = {}


def is_supported(case: dict) -> bool:
    """Whether `LLM` takes a case; it may lack axes."""
    return not (case.get("workload") == "inside prompts" and case.get("prefill_chunk"))


def tokens(tiny_model, workload: str, weight_cache: str | None = None, **policy
           ) -> list[list[int]]:
    """Return the tokens of prompts whose answers have different lengths, some of them sampled."""
    model, options, _ = WORKLOADS[workload]
    prompts = make_prompts(96, LENGTHS)
    params = [SamplingParams(max_new_tokens=new, eos_token_id=-1, do_sample=number % 3 == 0,
                             seed=number, presence_penalty=number % 2)
              for number, new in enumerate(NEW)]
    with LLM(str(tiny_model(model).folder), policy=Policy(**policy), dtype="float32",
             weight_cache=weight_cache, progress=False, **options) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats.generated_tokens == sum(NEW)
        return [out.token_ids for out in outputs]


@pytest.mark.parametrize("case", selection.pairwise(
    AXES, is_supported, arrays=6 if selection.every_case else 1),
    ids=lambda case: f"{case['workload']}, {case['batches']}")
def test_tokens_do_not_depend_on_the_policy(tiny_model, tmp_path, monkeypatch, case):
    """Tiny caches grow and are written back often; tiny matrices and prompts come in parts."""
    monkeypatch.setattr(tiers, "WRITE_BACK_TOKENS", 4)
    monkeypatch.setattr(placement, "MIN_SHARD_BYTES", 1)
    monkeypatch.setattr(decoder, "ROW_BLOCK", 16)
    monkeypatch.setitem(decoder_layers.CHUNK_ROWS, "cpu", 24)
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    policy = dict(case)
    monkeypatch.setattr(tiers, "CACHE_GROWTH", policy.pop("growth"))
    workload, (size, count), device = map(policy.pop, ("workload", "batches", "device"))
    open_devices(monkeypatch, PoisonedDevice)
    if workload not in _expected:
        _expected[workload] = tokens(tiny_model, workload, gpu_batch_size=1, refill_share=1.0)
    open_devices(monkeypatch, device)
    assert tokens(tiny_model, workload, gpu_batch_size=size, num_gpu_batches=count,
                  **WORKLOADS[workload][2], **policy) == _expected[workload]
