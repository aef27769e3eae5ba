"""Tokens do not depend on the policy: pairs of all that a policy sets, on all kinds of caches.

The prompts of a run share beginnings, their answers have different lengths, and sequences continue
in later blocks.
"""

import pytest
from helpers import selection
from helpers.fakes import LazyDevice, PoisonedDevice
from helpers.generation import PLACES, make_prompts, token_ids
from helpers.internals import open_devices

from flexgen_h2o import LLM, H2OConfig, Placement, Policy, SamplingParams
from flexgen_h2o.cache import tiers
from flexgen_h2o.config import placement
from flexgen_h2o.config.limits import SHARED_PREFIX
from flexgen_h2o.engine import decoder as decoder_layers
from flexgen_h2o.engine import experts
from flexgen_h2o.models import decoder
from flexgen_h2o.storage.run_folder import RUN_PREFIX

DISK, MIXED = Placement(0, 0, 100), Placement(30, 30, 40)


def h2o(**options) -> dict:
    """Return options of `LLM` for an evicting cache, of a fifth of each prompt by default."""
    return {"h2o": H2OConfig(**{"heavy_ratio": 0.2} | options)}


def sized(heavy: int, recent: int | None = None, **options) -> dict:
    """Return options of `LLM` for a cache of this many tokens."""
    return {"h2o": H2OConfig(heavy_tokens=heavy, recent_tokens=recent, **options)}


# By name: a model, options of `LLM`, and parts of the policy beside those that are varied.
WORKLOADS: dict[str, tuple[str, dict, dict]] = {
    "opt": ("opt", {}, {}),
    "opt-350m, h2o": ("opt_350m_style", h2o(), {}),
    "8 and 4 bits": ("llama", {"key_bits": 8, "value_bits": 4}, {}),
    "rolling, 4 bits": ("llama", {**h2o(positions="rolling"), "cache_bits": 4}, {}),
    "rolling, some evict": ("llama", sized(8, 7, positions="rolling"), {}),
    "mean, sinks": ("llama", sized(6, 5, sink_tokens=2, score="mean"), {}),
    "decay, 8 bits": ("llama", {**h2o(score="decay", decay=0.9), "cache_bits": 8}, {}),
    "caote": ("mistral", h2o(score="caote"), {}),
    "prompts only": ("llama", h2o(evict_generated=False), {}),
    "simulated": ("llama", h2o(simulate=True), {}),
    "by layer": ("llama", h2o(heavy_ratio=(1, 0.2, 0.3)), {}),
    "of the text": ("llama", h2o(budget_of="text"), {}),
    "inside prompts": ("llama", h2o(prompt_chunk=5), {}),
    "recent, inside prompts": ("llama", sized(0, 5, prompt_chunk=6), {}),
    "recall": ("llama", h2o(recall=True), {}),
    "recall, 4 bits": ("llama", {**h2o(recall=True), "cache_bits": 4}, {}),
    "recall, 8 and 4 bits": ("llama", {**h2o(recall=True), "key_bits": 8, "value_bits": 4}, {}),
    "sparse": ("llama", {"attn_sparsity": 0.3, "cache_bits": 4}, {}),
    "4-bit weights": ("llama", {"weight_bits": 4, **h2o()}, {}),
    "8-bit activations": ("llama", {"weight_bits": 4, "activation_bits": 8}, {}),
    "neox, 4 bits": ("neox_sequential", {**h2o(), "cache_bits": 4}, {}),
    "windows": ("mistral_window", {}, {}),
    "windows, h2o, 4 bits": ("mistral_window", {**sized(2), "cache_bits": 4}, {}),
    "windows, rolling": ("mistral_window", sized(2, positions="rolling"), {}),
    "windows, inside prompts": ("mistral_window", sized(2, 2, prompt_chunk=3), {}),
    "experts": ("qwen2_moe", {}, {"experts": DISK, "expert_slots": 3}),
    "experts, h2o": ("gpt_oss", h2o(), {"experts": MIXED, "cpu_expert_compute": True}),
    "latent, h2o": ("deepseek_v3", h2o(), {}),
    "recurrent": ("qwen3_5", {}, {}),
    "recurrent, by layer": ("qwen3_5", {**h2o(heavy_ratio=(0.5, 0.1, 0.5, 0.5, 0.2)),
                                        "cache_bits": 4}, {}),
    "recurrent, rolling": ("qwen3_5", sized(5, 4, positions="rolling"), {}),
    "recurrent, recall": ("qwen3_5", h2o(recall=True), {}),
    "recurrent, inside prompts": ("qwen3_5", h2o(prompt_chunk=6), {})}
SOME_PLACES = PLACES if selection.every_case else PLACES[2:]
AXES: dict[str, list] = {
    "workload": [*WORKLOADS], "weights": SOME_PLACES, "cache": SOME_PLACES,
    "activations": SOME_PLACES, "growth": [4, 5], "weight_cache": ["auto", None],
    "batches": [(3, 2), (1, 4), *([(6, 1), (2, 2)] if selection.every_case else [])],
    "prefill_chunk": [None, 4], "overlap": [True, False], "cpu_cache_compute": [True, False],
    "sep_layer": [False, True], "refill_share": [0.3, 1.0], "device": [LazyDevice, PoisonedDevice]}
NEW = [8, 2, 5, 1, 7, 4]

_expected: dict[str, list[list[int]]] = {}


def is_supported(case: dict) -> bool:
    """Whether `LLM` takes a case; it may lack axes."""
    return not ("inside prompts" in case.get("workload", "") and case.get("prefill_chunk"))


def prompts_with_prefixes() -> list[list[int]]:
    """Return six prompts, of which three share a prefix and two of these are equal."""
    first, second, one, prefix = make_prompts(96, [14, 9, 1, SHARED_PREFIX + 2])
    return [first, prefix + second, second, one, prefix + first[:3], prefix + second]


def tokens(tiny_model, workload: str, weight_cache: str | None = None, **policy) -> list[list[int]]:
    """Return the tokens of prompts whose answers have different lengths, some of them sampled."""
    model, options, _ = WORKLOADS[workload]
    params = [SamplingParams(max_new_tokens=new, eos_token_id=-1, do_sample=number % 3 == 0,
                             seed=number, presence_penalty=number % 2)
              for number, new in enumerate(NEW)]
    with LLM(str(tiny_model(model).folder), policy=Policy(**policy), dtype="float32",
             weight_cache=weight_cache, progress=False, **options) as llm:
        outputs = llm.generate(prompts_with_prefixes(), params)
        assert llm.stats.generated_tokens == sum(NEW)
        return token_ids(outputs)


@pytest.mark.parametrize("case", selection.pairwise(
    AXES, is_supported, arrays=6 if selection.every_case else 1),
    ids=lambda case: f"{case['workload']}, {case['batches']}")
def test_tokens_do_not_depend_on_the_policy(tiny_model, tmp_path, monkeypatch, case):
    """Tiny caches grow and are written back often; tiny matrices and prompts come in parts."""
    monkeypatch.setattr(tiers, "WRITE_BACK_TOKENS", 4)
    monkeypatch.setattr(placement, "MIN_SHARD_BYTES", 1)
    monkeypatch.setattr(decoder, "ROW_BLOCK", 16)
    monkeypatch.setattr(experts, "ROW_BLOCK", 3)
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
    left = [path for path in tmp_path.rglob("*") if path.name.startswith(RUN_PREFIX)]
    assert left == []
