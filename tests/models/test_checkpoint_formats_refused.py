"""Quantized checkpoints that are wrong, or of a kind that is not read: one line each."""

import json
from collections.abc import Callable

import pytest
import torch
from helpers import packings
from helpers.error_cases import refused
from models.test_checkpoint import read
from models.test_checkpoint_formats import FORMATS, MXFP4, PACK, ct, save

from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.formats import FORMATS as FINDERS
from flexgen_h2o.models.quantization import METHODS, quantization
from flexgen_h2o.models.registry import from_transformers

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
FP8 = {"quant_method": "fp8", "weight_block_size": [24, 40]}
GROUP = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}


def settings_refused(settings: object, *words: str) -> None:
    config = {"model_type": "llama", "quantization_config": settings}
    message = refused(lambda: from_transformers(config, "tiny"), "tiny: ", *words)
    assert refused(lambda: quantization(config, "tiny")) == message


def test_each_method_has_a_reader_and_a_finder():
    assert METHODS.keys() == FINDERS.keys()


def test_other_methods_are_refused_by_name():
    settings_refused({"quant_method": "hqq", "bits": 4}, "'hqq'", "compressed-tensors",
                     "--weight-bits")


@pytest.mark.parametrize("settings, words", [
    ({"load_in_4bit": True}, ["quantized by 'bitsandbytes'"]), ({"bits": 4}, ["quantized by None"]),
    ("gptq", ["quantized by"]), (GPTQ | {"bits": 3}, ["bits = 3 (supported: 2, 4, 8)"]),
    (GPTQ | {"bits": True}, ["bits = True"]),
    (GPTQ | {"checkpoint_format": "marlin"}, ["checkpoint_format = 'marlin'", "gptq_v2"]),
    (GPTQ | {"is_marlin_format": True}, ["is_marlin_format = True"]),
    (GPTQ | {"group_size": -2}, ["group_size must be at least -1, got -2"]),
    (GPTQ | {"group_size": 10**400}, ["group_size must be"]),
    (AWQ | {"version": "gemv"}, ["version = 'gemv' (supported: gemm)"]),
    (AWQ | {"bits": 8}, ["bits = 8"]), (AWQ | {"zero_point": False}, ["zero_point = False"]),
    (FP8 | {"weight_block_size": [128]}, ["weight_block_size must be two sizes, got [128]"]),
    (FP8 | {"weight_block_size": [0, 128]}, ["weight_block_size", ">= 1"]),
    (FP8 | {"weight_block_size": 128}, ["weight_block_size", "array"]),
    (FP8 | {"expert_dtype": "fp4"}, ["expert_dtype = 'fp4'"]),
    ({"quant_method": "compressed-tensors"}, ["no config_groups"]),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, ["without quantized"]),
    ({"quant_method": "compressed-tensors", "config_groups": []}, ["config_groups", "object"]),
    (ct("marlin-24", **GROUP), ["format = 'marlin-24' (supported: pack-quantized"]),
    (ct("pack-quantized", **GROUP | {"num_bits": 3}), ["num_bits = 3"]),
    (ct("pack-quantized", **GROUP | {"strategy": "token"}), ["strategy = 'token'"]),
    (ct("float-quantized", **GROUP | {"type": "float"}), ["num_bits = 4 (supported: 8)"]),
    (PACK() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparse-24-bitmask"]),
    (PACK() | {"transform_config": {"config_groups": {"u": {}}}}, ["transform_config"])])
def test_unsupported_settings_are_errors(settings, words):
    settings_refused(settings, *words)


def drop(part: str) -> Callable:
    return lambda parts: parts.pop(part)


def put(part: str, change: Callable) -> Callable:
    return lambda parts: parts.update({part: change(parts[part])})


def scalar_nan(tensor):
    flat = tensor.clone()
    flat.view(-1)[-1] = float("nan")
    return flat


def indexed(value: int) -> Callable:
    return put("g_idx", lambda t: torch.full_like(t, value))


DAMAGE = [
    ("gptq", drop("scales"), "w.scales"), ("gptq", drop("qzeros"), "w.qzeros"),
    ("gptq", put("scales", lambda t: t[:1]), "w.scales"), ("gptq", indexed(2), "group 2"),
    ("gptq", indexed(-1), "group -1"), ("gptq", put("g_idx", torch.Tensor.float), "float32"),
    ("gptq", put("qweight", lambda t: t[0]), "w.qweight"),
    ("gptq", put("qweight", lambda t: t[:0]), "no quantized weight"),
    ("gptq", put("scales", scalar_nan), "finite"),
    ("awq", put("qzeros", lambda t: t[:1]), "w.qzeros"),
    ("awq", put("scales", lambda t: t[:, :8]), "w.scales"),
    ("awq", put("scales", lambda t: t / 0), "finite"),
    ("awq", lambda parts: parts.update(weight=torch.zeros(40, 64)), "w.weight"),
    ("fp8", put("weight_scale_inv", lambda t: t[:, :1]), "holds no scales"),
    ("fp8", put("weight_scale_inv", lambda t: t[None]), "holds no"),
    ("fp8", put("weight_scale_inv", scalar_nan), "finite"),
    ("fp8", put("weight", lambda t: (t.float() + float("nan")).to(t.dtype)), "finite"),
    ("fp8", put("weight", lambda t: t[0]), "no quantized weight"),
    ("ct_group", drop("weight_shape"), "w.weight_shape"),
    ("ct_group", drop("weight_scale"), "w.weight_scale"),
    ("ct_group", put("weight_shape", lambda t: t << 40), "holds no weight"),
    ("ct_group", put("weight_shape", lambda t: t * 0), "holds no weight"),
    ("ct_group", put("weight_shape", lambda t: t[:1]), "shape [1]"),
    ("ct_group", put("weight_scale", lambda t: t[:, :0]), "holds no scales"),
    ("ct_group", put("weight_scale", lambda t: t[:, [0, 1, 1]]), "holds no"),
    ("ct_asymmetric", put("weight_zero_point", lambda t: t[:2]), "w.weight_zero_point"),
    ("ct_act_order", put("weight_g_idx", lambda t: t + 1), "group 2"),
    ("ct_int8", drop("weight_scale"), "w.weight_scale"),
    ("ct_int8_tensor", put("weight_zero_point", lambda t: t.repeat(2)), "holds no scales"),
    ("mxfp4", drop("_scales"), "w_scales"), ("mxfp4", put("_scales", lambda t: t[:1]), "w_scales"),
    ("mxfp4", put("_scales", lambda t: t * 0 + 255), "no numbers"),
    ("mxfp4", put("_scales", lambda t: t * 0 + 254), "finite"),
    ("mxfp4", put("_blocks", lambda t: t[..., :15]), "w_blocks"),
    ("mxfp4", put("_blocks", torch.Tensor.float), "float32"),
    ("mxfp4", put("_blocks", lambda t: t[0, 0]), "no matrix of blocks"),
    ("mxfp4", put("_blocks", lambda t: t[:0]), "no quantized weight")]


@pytest.mark.parametrize("key, change, word", DAMAGE)
def test_damaged_weights(tmp_path, key, change, word):
    generator = torch.Generator().manual_seed(0)
    if key == "mxfp4":
        parts, _ = packings.mxfp4(torch.randn(2, 3, 64, generator=generator) * 6)
        parts["_blocks"] |= 7  # the greatest of numbers
        name, dot, settings = "w_blocks", "", MXFP4
    else:
        pack, settings = FORMATS[key]
        parts, _ = pack(torch.randn(40, 64, generator=generator))
        name, dot = "w.weight", "."
    change(parts)
    save(tmp_path, {f"w{dot}{part}": t.contiguous() for part, t in parts.items()}, settings)

    def load():
        with open_checkpoint(tmp_path) as checkpoint:
            read(checkpoint, name)

    refused(load, str(tmp_path), word)


def test_pickles_are_not_quantized(tmp_path):
    parts, _ = packings.gptq(torch.randn(8, 32))
    torch.save({f"w.{name}": t for name, t in parts.items()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    refused(lambda: open_checkpoint(tmp_path), "quantized", "model.safetensors")
