"""Multi-head latent attention: the engine against transformers and against its simulation."""

import pytest
import torch
from helpers.error_cases import refused
from helpers.generation import NEW, PLACES, prompts_of, tokens, transformers_tokens
from helpers.mixture_cases import LATENT

from flexgen_h2o import LLM, H2OConfig, Placement, Policy
from flexgen_h2o.config.cache_layout import CacheOptions, GroupLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.registry import from_transformers
from flexgen_h2o.planning.planned_run import kv_entry_bytes

H2O = H2OConfig(heavy_ratio=0.1)
WIDTH = 6 + 14  # rotated elements and latent


@pytest.mark.parametrize("key", LATENT)
def test_tokens_equal_transformers(tiny_model, key):
    """Ragged batches on all tiers, and batches of one with weights on disk."""
    tiny = tiny_model(key)
    prompts = prompts_of(tiny)
    wanted = transformers_tokens(tiny, prompts, NEW)
    assert tokens(tiny, prompts, None, cache=PLACES[3], prefill_chunk=4) == wanted
    disk = Placement(0, 0, 100)
    assert tokens(tiny, prompts, None, weights=disk, gpu_batch_size=1, num_gpu_batches=5) == wanted


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_token_is_cached_once(tiny_model, bits):
    tiny = tiny_model("deepseek_v2")
    width = WIDTH * 4 if bits == 16 else GroupLayout(WIDTH, bits).nbytes
    with LLM(str(tiny.folder), dtype="float32", cache_bits=bits) as llm:
        llm.generate(prompts_of(tiny, [9]), max_new_tokens=3, eos_token_id=-1)
        assert llm.stats.kv_bytes_per_token == 3 * width
        planned = kv_entry_bytes(CacheOptions(bits=bits), llm.model_config, 4)
    assert planned == width


@pytest.mark.parametrize("options", [{"cache_bits": 8}, {"cache_bits": 8, "h2o": H2O},
                                     {"cache_bits": 8, "policy": Policy(prefill_chunk=4)},
                                     {"dtype": "bfloat16"}, {"dtype": "bfloat16", "h2o": H2O},
                                     {"dtype": "bfloat16", "cache_bits": 8}])
def test_rounded_caches_and_steps_stay_near(tiny_model, options):
    """In bfloat16, decode steps are captured and replayed."""
    tiny = tiny_model("deepseek_v3")
    pairs = [(prompt, prompts_of(tiny, [12], seed)[0])
             for seed, prompt in enumerate(prompts_of(tiny, [9, 3, 21]), 1)]

    def scores(**options):
        options = {"dtype": "float32", "policy": Policy(gpu_batch_size=4)} | options
        with LLM(str(tiny.folder), **options) as llm:
            return torch.tensor(llm.loglikelihood(pairs))

    wanted = scores(h2o=options.get("h2o"))
    assert wanted.std() > 0.5
    assert (scores(**options) - wanted).abs().mean() < 0.15 * wanted.std()


def test_options_without_separate_values_are_refused(tiny_model):
    folder = str(tiny_model("deepseek_v2").folder)
    for options in ({"attn_sparsity": 0.5}, {"key_bits": 8, "value_bits": 4}):
        with pytest.raises(UserError, match="key and value in one"):
            LLM(folder, **options)


def test_kimi_k2_is_a_deepseek_v3():
    values = {"num_hidden_layers": 3, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
              "rope_scaling": {"type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                               "original_max_position_embeddings": 4096}}
    kimi, deepseek = (from_transformers(values | {"model_type": kind}, "x")
                      for kind in ("kimi_k2", "deepseek_v3"))
    assert kimi == deepseek
    assert kimi.kv_bytes_per_token(2) == 3 * (512 + 64) * 2
    assert kimi.attention_variant(0).scale == pytest.approx(
        192 ** -0.5 * (0.1 * torch.tensor(32.0).log().item() + 1) ** 2)


@pytest.mark.parametrize("model_type, values, words", [
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ("deepseek_v3", {"qk_rope_head_dim": 63}, "rotary")])
def test_unsupported_configs_are_errors(model_type, values, words):
    refused(lambda: from_transformers({"model_type": model_type, **values}, "x"), match=words)
