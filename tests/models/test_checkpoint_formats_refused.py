"""Quantized checkpoints that are wrong, or of a kind that is not read: one line each."""

from __future__ import annotations

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
    ({"load_in_4bit": True}, ["quantized by 'bitsandbytes'"]),
    ({"bits": 4}, ["quantized by None"]), ("gptq", ["quantized by"]),
    (GPTQ | {"bits": 3}, ["bits = 3 (supported: 2, 4, 8)"]),
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
    (PACK() | {"transform_config": {"config_groups": {"u": {}}}}, ["transform_config"]),
])
def test_settings_that_are_not_read(settings, words):
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


DAMAGE = {
    "gptq no scales": ("gptq", drop("scales"), ["has no tensor w.scales"]),
    "gptq no zeros": ("gptq", drop("qzeros"), ["has no tensor w.qzeros"]),
    "gptq scales of another group size": ("gptq", put("scales", lambda t: t[:1]),
                                          ["tensor w.scales has shape [1, 40], not [2, 40]"]),
    "gptq index beyond": ("gptq", indexed(2), ["w.g_idx names group 2, but there are 2"]),
    "gptq index below": ("gptq", indexed(-1), ["w.g_idx names group -1"]),
    "gptq index of floats": ("gptq", put("g_idx", torch.Tensor.float), ["is stored as float32"]),
    "gptq vector": ("gptq", put("qweight", lambda t: t[0]), ["w.qweight has shape [40]"]),
    "gptq empty": ("gptq", put("qweight", lambda t: t[:0]), ["which is no quantized weight"]),
    "gptq NaN": ("gptq", put("scales", scalar_nan), ["tensor w.weight", "not finite"]),
    "awq zeros": ("awq", put("qzeros", lambda t: t[:1]), ["tensor w.qzeros has shape [1, 5]"]),
    "awq scales": ("awq", put("scales", lambda t: t[:, :8]), ["tensor w.scales has shape"]),
    "awq infinite": ("awq", put("scales", lambda t: t / 0), ["not finite"]),
    "awq both": ("awq", lambda parts: parts.update(weight=torch.zeros(40, 64)),
                 ["a tensor w.weight and its quantized parts"]),
    "fp8 scales": ("fp8", put("weight_scale_inv", lambda t: t[:, :1]),
                   ["has shape [2, 1], which holds no scales of a weight [40, 64] in blocks"]),
    "fp8 scales of a stack": ("fp8", put("weight_scale_inv", lambda t: t[None]), ["holds no"]),
    "fp8 NaN": ("fp8", put("weight_scale_inv", scalar_nan), ["not finite"]),
    "fp8 NaN weight": ("fp8", put("weight", lambda t: (t.float() + float("nan")).to(t.dtype)),
                       ["not finite"]),
    "fp8 vector": ("fp8", put("weight", lambda t: t[0]), ["which is no quantized weight"]),
    "ct no shape": ("ct_group", drop("weight_shape"), ["has no tensor w.weight_shape"]),
    "ct no scales": ("ct_group", drop("weight_scale"), ["has no tensor w.weight_scale"]),
    "ct huge": ("ct_group", put("weight_shape", lambda t: t << 40), ["holds no weight"]),
    "ct no columns": ("ct_group", put("weight_shape", lambda t: t * 0), ["holds no weight"]),
    "ct one number": ("ct_group", put("weight_shape", lambda t: t[:1]), ["has shape [1]"]),
    "ct scales": ("ct_group", put("weight_scale", lambda t: t[:, :0]), ["holds no scales"]),
    "ct odd scales": ("ct_group", put("weight_scale", lambda t: t[:, [0, 1, 1]]), ["holds no"]),
    "ct zeros": ("ct_asymmetric", put("weight_zero_point", lambda t: t[:2]),
                 ["tensor w.weight_zero_point has shape [2, 4], not [5, 4]"]),
    "ct index": ("ct_act_order", put("weight_g_idx", lambda t: t + 1), ["names group 2"]),
    "ct int8 no scales": ("ct_int8", drop("weight_scale"), ["has no tensor w.weight_scale"]),
    "ct int8 zeros": ("ct_int8_tensor", put("weight_zero_point", lambda t: t.repeat(2)),
                      ["holds no scales"]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_weights(tmp_path, case):
    key, change, words = DAMAGE[case]
    pack, settings = FORMATS[key]
    generator = torch.Generator().manual_seed(0)
    parts, _ = pack(torch.randn(40, 64, generator=generator))
    change(parts)
    save(tmp_path, {f"w.{name}": t.contiguous() for name, t in parts.items()}, settings)

    def load():
        with open_checkpoint(tmp_path) as checkpoint:
            read(checkpoint, "w.weight")

    refused(load, str(tmp_path), *words)


@pytest.mark.parametrize("change, words", [
    (drop("_scales"), ["has no tensor w_scales"]),
    (put("_scales", lambda t: t[:1]), ["tensor w_scales has shape [1, 3, 2], not [2, 3, 2]"]),
    (put("_scales", lambda t: t * 0 + 255), ["scales that are no numbers"]),
    (put("_scales", lambda t: t * 0 + 254), ["not finite"]),
    (put("_blocks", lambda t: t[..., :15]), ["tensor w_blocks has shape [2, 3, 2, 15]"]),
    (put("_blocks", torch.Tensor.float), ["is stored as float32, not uint8"]),
    (put("_blocks", lambda t: t[0, 0]), ["is no matrix of blocks"]),
    (put("_blocks", lambda t: t[:0]), ["is no quantized weight"]),
])
def test_damaged_mxfp4(tmp_path, change, words):
    generator = torch.Generator().manual_seed(0)
    parts, _ = packings.mxfp4(torch.randn(2, 3, 64, generator=generator) * 6)
    parts["_blocks"] |= 7  # the greatest of numbers
    change(parts)
    save(tmp_path, {f"w{name}": t.contiguous() for name, t in parts.items()}, MXFP4)

    def load():
        with open_checkpoint(tmp_path) as checkpoint:
            read(checkpoint, "w_blocks")

    refused(load, str(tmp_path), *words)


def test_pickles_are_not_quantized(tmp_path):
    parts, _ = packings.gptq(torch.randn(8, 32))
    torch.save({f"w.{name}": t for name, t in parts.items()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    refused(lambda: open_checkpoint(tmp_path), "quantized", "model.safetensors")
