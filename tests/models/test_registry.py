"""Configs: both spellings, transformers' defaults, published shapes, and errors."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.error_cases import refused
from helpers.tiny_models import LINEAR_ROPE, LLAMA3_ROPE, TINY

from flexgen_h2o.config.layers import AttentionVariant
from flexgen_h2o.errors import UserError
from flexgen_h2o.models import FAMILIES, family
from flexgen_h2o.models.registry import from_transformers, published
from flexgen_h2o.models.shapes import PUBLISHED

FIRST = {shape["model_type"]: name for name, shape in reversed(PUBLISHED.items())}
PUBLISHED_NAMES = [name if name in FIRST.values() else pytest.param(name, marks=pytest.mark.full)
                   for name in PUBLISHED]


def known_type(model_type: str) -> str:
    """Return a model type with the same config that transformers has."""
    return {"kimi_k2": "deepseek_v3"}.get(model_type, model_type)


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_published_shapes_equal_transformers(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = copy.deepcopy(PUBLISHED[name])  # transformers fills the dicts that it is given
    config = AutoConfig.for_model(known_type(shape.pop("model_type")), **shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    cfg = published(name)
    corrections = sum(buffer.numel() for name, buffer in model.named_buffers()
                      if name.endswith(("correction_bias", "layer_scalar")))
    assert cfg.num_parameters() == model.num_parameters() + corrections
    assert cfg == from_transformers(config, name)


CONFIGS = [*TINY, *PUBLISHED_NAMES]


def config_of(key: str):
    """The config of a tiny or a published model."""
    return from_transformers(TINY[key](), key) if key in TINY else published(key)


@pytest.mark.parametrize("key", CONFIGS)
def test_shapes_are_those_of_the_tensors(key):
    """Each part has its family's matrices and vectors; a tied table is the embeddings' alone."""
    cfg = config_of(key)
    specs = family(cfg).weights(cfg)
    tied = {spec.name for spec in specs.embed.values()}
    head = {name: spec for name, spec in specs.head.items() if spec.name not in tied}
    parts = [(cfg.embed_shapes(), specs.embed), (cfg.head_shapes(), head)]
    parts += [(cfg.layer_shapes(place), layer) for place, layer in enumerate(specs.layers)]
    parts += [(cfg.expert_shapes(), expert) for layer in specs.experts for expert in layer[-2:]]
    for part, tensors in parts:
        shapes = [spec.shape for spec in tensors.values() if not spec.float32]
        plain = [shape for shape in shapes if len(shape) != 2 or shape in cfg.never_quantized]
        assert sorted(part.matrices) == sorted(shape for shape in shapes if shape not in plain)
        assert part.vectors == sum(map(math.prod, plain))
        assert part.parameters == sum(math.prod(spec.shape) for spec in tensors.values())


def test_published_names():
    assert published("OPT-30B").num_layers == published("facebook/opt-30b").num_layers == 48
    assert published("meta-llama/meta-llama-3.1-8b").rope.rope_type == "llama3"
    assert not published("mistral-7b-v0.3").attention
    assert published("opt-350m").embed_dim == 512 and not published("opt-350m").final_norm
    assert published("someone/opt-30b") is None
    assert published("opt-31b") is None
    assert published("") is None


# Of a default config that transformers cannot make a model of either.
REQUIRED = {"glm4_moe": {"head_dim": 128}, "deepseek_v2": {"num_experts_per_tok": 6},
            "gemma4_text": {"hidden_size_per_layer_input": 0},
            "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_missing_keys_take_the_defaults_of_transformers(model_type):
    from transformers import AutoConfig

    required = REQUIRED.get(model_type, {})
    wanted = from_transformers(AutoConfig.for_model(known_type(model_type), **required), "x")
    actual = from_transformers({"model_type": model_type, **required}, "x")
    assert replace(actual, dtype=None) == replace(wanted, dtype=None)


@pytest.mark.parametrize("key", TINY)
def test_saved_config_equals_the_object(tmp_path, key):
    config = TINY[key]()
    config.eos_token_id, config.dtype = None, torch.float32
    config.save_pretrained(tmp_path)
    cfg = from_transformers(json.loads((tmp_path / "config.json").read_text()), key)
    assert cfg == from_transformers(config, key)
    assert cfg.dtype == "float32" and cfg.eos_token_ids == ()


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8}
GEMMA4 = {"model_type": "gemma4_text", "num_hidden_layers": 6, "hidden_size_per_layer_input": 0}
QWEN_MOE = {"model_type": "qwen3_moe", "num_key_value_heads": 2}
NEOX = {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4}
LLAMA3_OLD = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}


@pytest.mark.parametrize("old, new", [
    (LLAMA | {"rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "float16"},
     LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "dtype": "float16"}),
    (LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
     LLAMA | {"rope_parameters": LINEAR_ROPE}),
    (LLAMA | {"rope_theta": 500.0, "rope_scaling": LLAMA3_OLD},
     LLAMA | {"rope_parameters": LLAMA3_ROPE}),
    (NEOX | {"rotary_pct": 0.5, "rotary_emb_base": 77},
     NEOX | {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0,
                                 "partial_rotary_factor": 0.5}}),
    (NEOX | {"rotary_emb_base": 77, "rope_scaling": {"type": "linear", "factor": 2.0}},
     NEOX | {"rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.0,
                                 "partial_rotary_factor": 0.25}})])
def test_config_keys_of_transformers_4(old, new):
    from transformers import AutoConfig

    cfg = from_transformers(old, "x")
    assert cfg == from_transformers(new, "x")
    # And as transformers itself reads the old one.
    theirs = from_transformers(AutoConfig.for_model(**copy.deepcopy(old)), "x")
    assert cfg.rope == theirs.rope


def test_end_tokens():
    def ends(**options):
        return from_transformers(LLAMA | options, "x").eos_token_ids

    assert ends() == (2,)
    assert ends(eos_token_id=None) == ()
    assert ends(eos_token_id=7) == (7,)
    assert ends(eos_token_id=[7, 9]) == (7, 9)
    assert from_transformers(LLAMA | {"bos_token_id": None}, "x").bos_token_id is None


def test_sliding_window():
    def window(**options):
        config = from_transformers({"model_type": "mistral", **options}, "x")
        variants = {config.attention_variant(layer) for layer in range(config.num_layers)}
        return next(iter(variants)).window if len(variants) == 1 else variants

    assert window() == 4096
    assert window(sliding_window=None) is None
    assert window(sliding_window=4096, max_position_embeddings=4096) is None
    assert window(max_position_embeddings=4096, rope_scaling=LINEAR_ROPE | {
        "rope_type": "dynamic"}) == 4096, "the context is longer then"
    assert from_transformers(LLAMA | {"sliding_window": 8}, "x").attention_variant(0).window is None


def test_null_soft_caps():
    def caps(**options):
        config = from_transformers({"model_type": "gemma2", **options}, "x")
        return config.attention_variant(0).softcap, config.logit_softcap

    assert caps() == (50.0, 30.0)
    assert caps(attn_logit_softcapping=None, final_logit_softcapping=None) == (0.0, 0.0)


@pytest.mark.parametrize("model_type, keys", [
    ("qwen2", ["num_key_value_heads"]), ("seed_oss", ["num_key_value_heads", "head_dim"])])
def test_null_head_sizes(model_type, keys):
    """They come from the other sizes, whatever the default of a missing key is."""
    from transformers import AutoConfig

    given = {"model_type": model_type, "hidden_size": 96, "num_attention_heads": 6,
             **dict.fromkeys(keys)}
    config = from_transformers(given, "x")
    assert (config.num_kv_heads, config.head_dim) == (6, 16)
    theirs = from_transformers(AutoConfig.for_model(**copy.deepcopy(given)), "x")
    assert config == replace(theirs, dtype=None)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_biases_that_config_json_does_not_choose(model_type):
    """transformers ignores these keys, which converters may leave behind."""
    keys = {"attention_out_bias": True, "mlp_bias": True}
    if model_type != "qwen3":
        keys["attention_bias"] = model_type == "mistral"
    plain, given = (from_transformers({"model_type": model_type, **extra}, "x")
                    for extra in ({}, keys))
    assert given == plain and given.attention_bias == (model_type == "qwen2")


def test_forms_of_attention_go_with_their_layers():
    config = replace(from_transformers(LLAMA | {"num_hidden_layers": 3}, "x"), attention=tuple(
        AttentionVariant(window=window) for window in (3, 4, 5)))
    assert [config.slice_layers(1, 3).attention_variant(layer).window for layer in (0, 1)] == [4, 5]
    refused(lambda: replace(config, num_layers=2), match="3 variants of attention for 2 layers")


@pytest.mark.parametrize("options, words", [
    ({"model_type": "bert"}, ["'bert'", "docs/families.md"]),
    ({"model_type": "dbrx", "num_local_experts": 32}, ["mixture of experts"]),
    (MIXTRAL | {"num_experts_per_tok": 9}, ["num_experts_per_tok", "8 experts, got 9"]),
    (MIXTRAL | {"num_local_experts": 10**5}, ["num_local_experts must be at most 1024"]),
    (MIXTRAL | {"num_local_experts": 1000, "num_hidden_layers": 66}, ["66000 experts"]),
    ({"model_type": "llama4_text", "num_experts_per_tok": 2}, ["num_experts_per_tok = 2"]),
    (QWEN_MOE | {"mlp_only_layers": "1"}, ["mlp_only_layers"]),
    (QWEN_MOE | {"decoder_sparse_step": -1}, ["decoder_sparse_step must be", "got -1"]),
    ({"num_experts": 4}, ["mixture of experts", "num_experts"]),
    ({"model_type": "bloom", "alibi": True}, ["ALiBi"]),
    ({"model_type": "mpt", "attn_config": {"alibi": True}}, ["ALiBi"]),
    ({"quantization_config": {"quant_method": "hqq"}}, ["quantized by 'hqq'", "gptq"]),
    ({"hidden_act": "mish"}, ["'mish'", "gelu_new"]),
    ({"rope_scaling": {"type": "axial", "factor": 2.0}}, ["'axial'", "linear"]),
    ({"rope_scaling": {"type": "dynamic"}}, ["rope factor must be", "got None"]),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}, ["beta_fast"]),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, ["short_factor"]),
    ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
     ["short_factor must have 4 numbers, got 1"]),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["flat"]),
    ({"rope_scaling": "linear"}, ["rope parameters"]),
    ({"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": None}}, ["low_freq_factor"]),
    ({"rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 0.5}}, ["high_freq_factor"]),
    ({"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 0}}, ["original_max"]),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}},
     ["rope of type yarn can't be computed with rope_theta 1 and", "'factor': 2.0"]),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 1e308}},
     ["rope of type dynamic can't be"]),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4,
                          "long_factor": [2.0] * 4, "original_max_position_embeddings": 1}},
     ["rope of type longrope can't be"]),
    ({"rope_theta": 0}, ["rope_theta must be", "got 0"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ({"num_attention_heads": 7}, ["hidden_size must be a multiple of", "= 7, got 64"]),
    ({"num_key_value_heads": 3}, ["8 attention heads", "3 key/value heads"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers must be", "got 0"]),
    ({"vocab_size": 1.5}, ["vocab_size must be", "got 1.5"]),
    ({"vocab_size": True}, ["vocab_size must be", "got True"]),
    ({"attention_bias": "no"}, ["attention_bias must be", "got 'no'"]),
    ({"rms_norm_eps": -1.0}, ["rms_norm_eps"]), ({"eos_token_id": [1, -1]}, ["eos_token_id"]),
    ({"head_dim": 9}, ["9 rotary dimensions"]),
    (NEOX | {"rotary_pct": 0.33}, ["rotary dimensions"]),
    (NEOX | {"rotary_pct": 2.0}, ["partial_rotary_factor must be", "got 2.0"]),
    ({"num_hidden_layers": 10**9}, ["num_hidden_layers must be at most 4096", "got 1000000"]),
    ({"hidden_size": 10**12}, ["hidden_size", "at most 1048576"]),
    ({"max_position_embeddings": 10**15}, ["max_position_embeddings", "at most 1073741824"]),
    ({"rope_theta": 10**400}, ["rope_theta must be", "got 1000"]),
    ({"model_type": "mistral", "sliding_window": 0}, ["sliding_window must be", "got 0"]),
    ({"model_type": "opt", "activation_function": "tanh"}, ["'tanh'"]),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, ["use_bidirectional"]),
    ({"model_type": "gemma3", "text_config": 3}, ["text_config must be an object"]),
    ({"model_type": "gemma4", "text_config": {}}, ["per-layer embeddings", "E2B and E4B"]),
    (GEMMA4 | {"num_kv_shared_layers": 2}, ["share keys and values", "= 2"]),
    (GEMMA4 | {"use_bidirectional_attention": "all"}, ["use_bidirectional"]),
    (GEMMA4 | {"per_layer_config": {"0": {"head_dim": 8}}}, ["per_layer_config with other layers"]),
    (GEMMA4 | {"per_layer_config": {"5": {"sliding_window": 8}}}, ["per_layer_config"]),
    (GEMMA4 | {"num_global_key_value_heads": 3, "attention_k_eq_v": True}, ["3 key/value heads"]),
    ({"model_type": "qwen3", "layer_types": ["chunked_attention"]}, ["layer_types must say"]),
    ({"model_type": "qwen2", "rope_scaling": {"type": "mrope"}}, ["'mrope'"])])
def test_unsupported_configs_are_errors(options, words):
    with pytest.raises(UserError) as refusal:
        from_transformers(LLAMA | options, "some/model")
    message = str(refusal.value)
    assert message.startswith("some/model: ") and "\n" not in message and len(message) < 300
    assert all(word in message for word in words), message


@pytest.mark.parametrize("config", [None, [], "llama", 3])
def test_config_that_is_no_object_is_an_error(config):
    refused(lambda: from_transformers(config, "some/model"), match="must hold an object")
