"""Quantized checkpoints in the formats that models are shipped in, against independent packings."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import generation, packings
from helpers.generation import make_prompts, transformers_tokens
from hypothesis import given
from hypothesis import strategies as st
from models.test_checkpoint import read
from safetensors.torch import load_file, save_file
from torch import Tensor

from flexgen_h2o import Placement
from flexgen_h2o.config.limits import GROUP_SIZE
from flexgen_h2o.config.weight_layout import MatrixLayout, WeightOptions
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.reference import matrix as reference_matrix
from flexgen_h2o.models import checkpoint as checkpoints
from flexgen_h2o.models.checkpoint import StackedCheckpoint, View
from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.formats import base
from flexgen_h2o.models.quantization import quantization, weight_options
from flexgen_h2o.models.quantized import QuantizingCheckpoint, WeightFormat
from flexgen_h2o.models.registry import from_transformers, read_config
from flexgen_h2o.models.tensors import TensorSpec

NEW = 4
tokens = partial(generation.tokens, new=NEW)


def ct(form: str, **weights) -> dict:
    """quantization_config of compressed-tensors, all linear layers alike."""
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


PACK = partial(ct, "pack-quantized", type="int", num_bits=4)
FORMATS: dict[str, tuple[Callable[[Tensor], packings.Parts], dict]] = {
    "awq": (packings.awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm",
                           "zero_point": True, "modules_to_not_convert": ["lm_head"]}),
    "awq_whole": (partial(packings.awq, group=1 << 20),
                  {"quant_method": "awq", "bits": 4, "group_size": -1}),
    "gptq": (packings.gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "gptq_v2_8bit": (partial(packings.gptq, bits=8, below=False, with_index=False),
                     {"quant_method": "gptq", "bits": 8, "group_size": 32,
                      "checkpoint_format": "gptq_v2"}),
    "gptq_act_order": (partial(packings.gptq, act_order=True),
                       {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}),
    "gptq_2bit": (partial(packings.gptq, bits=2, group=16),
                  {"quant_method": "gptq", "bits": 2, "group_size": 16}),
    "fp8": (packings.fp8, {"quant_method": "fp8", "weight_block_size": [24, 40],
                           "activation_scheme": "dynamic", "fmt": "e4m3"}),
    "fp8_tensor": (partial(packings.fp8, block=None),
                   {"quant_method": "fp8", "weight_block_size": None}),
    "ct_group": (packings.compressed, PACK(symmetric=True, strategy="group", group_size=32)),
    "ct_asymmetric": (partial(packings.compressed, symmetric=False, group=16),
                      PACK(symmetric=False, strategy="group", group_size=16)),
    "ct_channel": (partial(packings.compressed, group=None), PACK(strategy="channel")),
    "ct_act_order": (partial(packings.compressed, act_order=True),
                     PACK(strategy="group", group_size=32, actorder="group")),
    "ct_8bit": (partial(packings.compressed, bits=8, symmetric=False),
                ct("pack-quantized", type="int", num_bits=8, strategy="group", group_size=32)),
    "ct_int8": (packings.int8, ct("int-quantized", type="int", num_bits=8, strategy="channel")),
    "ct_int8_tensor": (partial(packings.int8, per="tensor", symmetric=False),
                       ct("int-quantized", type="int", num_bits=8, strategy="tensor")),
    "ct_fp8": (partial(packings.fp8, block=(1, 1 << 20), suffix="weight_scale",
                       dtype=torch.bfloat16),
               ct("float-quantized", type="float", num_bits=8, strategy="channel")),
    "ct_fp8_block": (partial(packings.fp8, suffix="weight_scale"),
                     ct("float-quantized", type="float", num_bits=8, strategy="block",
                        block_structure=[24, 40]))}
# bits of our layout that hold the codes of a format
KEPT = {"awq": (4, 8), "awq_whole": (4, 8), "gptq": (4, 8), "gptq_v2_8bit": (8,),
        "gptq_2bit": (4, 8), "ct_group": (4, 8), "ct_asymmetric": (4, 8), "ct_channel": (4, 8),
        "ct_8bit": (8,), "ct_int8": (8,), "ct_int8_tensor": (8,)}


def make(key: str, folder: Path) -> SimpleNamespace:
    """A tiny LLaMA checkpoint in a format, and transformers' model with the same values."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    pack, settings = FORMATS[key]
    config = LlamaConfig(vocab_size=120, hidden_size=64, num_hidden_layers=1, eos_token_id=None,
                         num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
                         max_position_embeddings=256, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3, generator=generator)
            if ".layers." not in name or parameter.dim() != 2:
                tensors[name] = parameter.clone()
                continue
            parts, values = pack(parameter)
            parameter.copy_(values)
            tensors |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    given = {**config.to_dict(), "dtype": "float32", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(given))
    return SimpleNamespace(folder=folder, model=model, settings=quantization(given, "tiny"))


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    """A function from a key of `FORMATS` to its checkpoint, each made once."""
    saved: dict[str, SimpleNamespace] = {}

    def get(key: str) -> SimpleNamespace:
        if key not in saved:
            saved[key] = make(key, tmp_path_factory.mktemp("formats") / key)
        return saved[key]

    return get


FEW = [key if key in ("awq", "gptq_act_order", "fp8", "ct_group", "ct_int8")
       else pytest.param(key, marks=pytest.mark.full) for key in FORMATS]


@pytest.mark.parametrize("key", FEW)
def test_tokens_equal_the_dequantized_model(checkpoint_of, key, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    tiny = checkpoint_of(key)
    prompts = make_prompts(120, [5, 9])
    expected = transformers_tokens(tiny, prompts, new=NEW)
    assert tokens(tiny.folder, prompts, weights=Placement(30, 30, 40),
                  offload_dir=tmp_path) == expected
    (copy,) = (tmp_path / "cache" / "converted").glob("[!.]*")
    assert "quantization_config" not in json.loads((copy / "config.json").read_text())


@pytest.mark.parametrize("key", FORMATS)
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_dequantized_values_are_exact(checkpoint_of, key, chunk, monkeypatch):
    monkeypatch.setattr(checkpoints, "_SCRATCH_ELEMENTS", chunk)
    tiny = checkpoint_of(key)
    state = tiny.model.state_dict()
    with open_checkpoint(tiny.folder) as checkpoint:
        assert set(checkpoint.names()) == set(state)
        for name, tensor in state.items():
            assert torch.equal(read(checkpoint, name), tensor), name
            assert torch.equal(read(checkpoint, name, torch.bfloat16), tensor.bfloat16()), name
        tensor, part = state["model.layers.0.mlp.down_proj.weight"].view(-1), torch.empty(131)
        checkpoint.read_part("model.layers.0.mlp.down_proj.weight", 57, part)
        assert torch.equal(part, tensor[57 : 57 + 131])


@pytest.mark.parametrize("key", FORMATS)
@pytest.mark.parametrize("bits", [4, 8, 12])
def test_codes_are_kept(checkpoint_of, key, bits, monkeypatch, tmp_path):
    """What our layout can hold of a format is not rounded a second time."""
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(base, "_CHUNK_ELEMENTS", 40 * 64)  # tiles in several goes
    tiny, quantized = checkpoint_of(key), []
    whole = ops.quantize_matrix
    monkeypatch.setattr(ops, "quantize_matrix",
                        lambda weight, *a, **k: quantized.append(1) or whole(weight, *a, **k))
    model = from_transformers(read_config(tiny.folder), key)
    form = WeightFormat(torch.float32, weight_options(WeightOptions(), bits, model, tiny.settings,
                                                      on_gpu=False))
    state = tiny.model.state_dict()
    kept = {}
    with QuantizingCheckpoint(open_checkpoint(tiny.folder), {n: n for n in state}, form) as inner:
        for name, tensor in state.items():
            layout = form.layout(TensorSpec(name, tuple(tensor.shape)))
            if layout is None:
                kept[name] = tensor
                continue
            out = torch.empty(layout.nbytes, dtype=torch.uint8)
            inner.read(name, out)
            kept[name] = reference_matrix.unpack_rows(out, layout, torch.arange(len(tensor)),
                                                      torch.float32)
            if bits in KEPT.get(key, ()) and ".layers." in name:
                # a zero point is rounded to float16: by 2^-11 of at most 255 steps
                assert torch.allclose(kept[name], tensor, rtol=0, atol=2**-10 * tensor.abs().max())
    outer = sum(".layers." not in name for name in state if state[name].dim() == 2)
    assert len(quantized) == (outer if bits in KEPT.get(key, ()) else 2 + 7)
    twin = SimpleNamespace(model=type(tiny.model)(tiny.model.config).eval())
    twin.model.load_state_dict(kept)
    prompts = make_prompts(120, [6, 9])
    assert tokens(tiny.folder, prompts, weight_bits=bits, weights=Placement(0, 50, 50),
                  offload_dir=tmp_path) == transformers_tokens(twin, prompts, new=NEW)


@pytest.mark.parametrize("size, bits, expected", [
    (128, 4, 64), (64, 4, 64), (32, 4, 32), (16, 4, 16), (96, 8, 48), (40, 4, 40),
    (12, 4, GROUP_SIZE), (-1, 4, GROUP_SIZE), (32, 16, GROUP_SIZE), (32, 12, GROUP_SIZE)])
def test_group_sizes_divide_the_checkpoints(size, bits, expected):
    settings = {"quant_method": "gptq", "bits": 4, "group_size": size}
    assert quantization({"quantization_config": settings}, "m").group(bits) == expected


def test_scales_below_float16_are_requantized(tmp_path):
    parts, values = packings.compressed(torch.randn(16, 64) * 1e-6, dtype=torch.bfloat16)
    folder = save(tmp_path, {f"w.{name}": t for name, t in parts.items()},
                  PACK(strategy="group", group_size=32))
    layout = MatrixLayout(16, 64, bits=4, group=32)
    with open_checkpoint(folder) as checkpoint:
        assert not checkpoint.read_quantized("w.weight", layout, torch.empty(layout.nbytes,
                                                                             dtype=torch.uint8))
        assert torch.equal(read(checkpoint, "w.weight"), values)


def save(folder: Path, tensors: dict[str, Tensor], settings: dict) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return folder


# MXFP4, stacked

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def test_mxfp4_experts_one_by_one_and_kept(tmp_path):
    experts, rows, columns = 3, 20, 64
    parts, values = packings.mxfp4(torch.randn(experts, rows, columns))
    bias = torch.randn(experts, rows)
    folder = save(tmp_path, {f"e.gate_up{name}": t for name, t in parts.items()}
                  | {"e.gate_up_bias": bias}, MXFP4)
    name = "e.gate_up_blocks"
    views = {f"{e}.{part}": (View("e.gate_up"), View(name, e, rows=range(first, rows, 2)))
             for e in range(experts) for first, part in enumerate(("gate", "up"))}
    layouts = (MatrixLayout(rows // 2, columns, bits=8, group=32),
               MatrixLayout(rows // 2, columns, bits=4, group=32, mxfp4=True))
    with StackedCheckpoint(open_checkpoint(folder), views) as checkpoint:
        assert set(checkpoint.names()) == {*views, "e.gate_up_bias"}
        for e in range(experts):
            for first, part in enumerate(("gate", "up")):
                expected = values[e, first::2]
                assert torch.equal(read(checkpoint, f"{e}.{part}"), expected)
                for layout in layouts:
                    out = torch.empty(layout.nbytes, dtype=torch.uint8)
                    assert checkpoint.read_quantized(f"{e}.{part}", layout, out)
                    actual = reference_matrix.unpack_rows(out, layout, torch.arange(rows // 2),
                                                         torch.float32)
                    assert torch.equal(actual, expected)
        assert not checkpoint.read_quantized("0.gate",
                                             MatrixLayout(rows // 2, columns, bits=4, group=32),
                                             out)
    assert quantization({"quantization_config": MXFP4}, "m").group(8) == 32
    assert quantization({"quantization_config": MXFP4}, "m").group(4) == GROUP_SIZE


def test_mxfp4_as_transformers(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(90, 160, (2, 6, 3), dtype=torch.uint8, generator=generator)
    folder = save(tmp_path, {"e_blocks": blocks, "e_scales": scales}, MXFP4)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)  # [experts, columns, rows]
        with open_checkpoint(folder) as checkpoint:
            assert torch.equal(read(checkpoint, "e_blocks", dtype), theirs.transpose(1, 2))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("shape, scales", [((48, 80), (2, 2)), ((2, 48, 80), (2, 2, 2)),
                                           ((48, 80), ())])
def test_fp8_as_transformers(tmp_path, scale_dtype, shape, scales):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = torch.randn(shape).mul(100).to(torch.float8_e4m3fn)
    scale = torch.rand(scales).add(0.1).to(scale_dtype)
    folder = save(tmp_path, {"w.weight": weight, "w.weight_scale_inv": scale}, {
        "quant_method": "fp8", "weight_block_size": [24, 40] if scales else None})
    for dtype in (torch.float32, torch.bfloat16):
        grid = scale if scales else scale.reshape(1, 1)
        theirs = Fp8Dequantize(None)._dequantize_one(weight, grid, dtype)
        with open_checkpoint(folder) as checkpoint:
            assert torch.equal(read(checkpoint, "w.weight", dtype), theirs)


@pytest.mark.parametrize("key, matrix", [("minimax_m2", "experts.6.w2"),
                                         ("deepseek_v3", "self_attn.kv_b_proj"),
                                         ("qwen3_next", "linear_attn.in_proj_qkvz"),
                                         ("qwen3_5_moe", "self_attn.q_proj")])
def test_fp8_matrices_and_float32_routers(tiny_model, tmp_path, key, matrix):
    """In the published layouts of MiniMax M2, DeepSeek V3, Qwen3-Next and Qwen3.5."""
    from transformers import AutoModelForCausalLM

    folder = tiny_model(key).folder
    config = json.loads((folder / "config.json").read_text())
    stored, values = {}, load_file(folder / "model.safetensors")
    for name, tensor in list(values.items()):
        stored[name] = tensor
        if ".layers." in name and tensor.dim() == 2 and ".gate." not in name:
            parts, values[name] = packings.fp8(tensor)
            stored |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
    assert any(name.endswith(f"{matrix}.weight_scale_inv") for name in stored)
    save(tmp_path / "plain", values, {})
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    save(tmp_path / "fp8", stored, {})
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config | {"quantization_config": {
        "quant_method": "fp8", "weight_block_size": [24, 40], "activation_scheme": "dynamic",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    prompts = make_prompts(97, [5, 9])
    expected = transformers_tokens(SimpleNamespace(model=model), prompts, new=NEW)
    assert tokens(tmp_path / "fp8", prompts, weights=Placement(100, 0, 0),
                  offload_dir=tmp_path) == expected


# Any shape

ROWS = st.integers(1, 40)


def roundtrip(folder: Path, parts, values, settings) -> None:
    save(folder, {f"w.{name}": t for name, t in parts.items()}, settings)
    with open_checkpoint(folder) as checkpoint:
        assert torch.equal(read(checkpoint, "w.weight"), values)


def weight(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))


@given(rows=ROWS, groups=st.integers(1, 3), group=st.integers(1, 33), bits=st.sampled_from([4, 8]),
       symmetric=st.booleans())
def test_compressed_of_any_shape(tmp_path_factory, rows, groups, group, bits, symmetric):
    packed = packings.compressed(weight(rows, groups * group), bits=bits, group=group,
                               symmetric=symmetric)
    roundtrip(tmp_path_factory.mktemp("ct"), *packed, ct(
        "pack-quantized", type="int", num_bits=bits, strategy="group", group_size=group))


@given(rows=ROWS, columns=st.integers(1, 60), high=st.integers(1, 50), wide=st.integers(1, 70))
def test_fp8_of_any_shape(tmp_path_factory, rows, columns, high, wide):
    packed = packings.fp8(weight(rows, columns), block=(high, wide))
    roundtrip(tmp_path_factory.mktemp("fp8"), *packed,
              {"quant_method": "fp8", "weight_block_size": [high, wide]})


@given(eighths=st.integers(1, 5), words=st.integers(1, 8), group=st.sampled_from([4, 8, 24, -1]),
       form=st.sampled_from(["awq", "gptq", "gptq_v2"]))
def test_awq_and_gptq_of_any_shape(tmp_path_factory, eighths, words, group, form):
    rows, columns = 8 * eighths, 8 * words
    settings = {"quant_method": form.split("_")[0], "bits": 4, "group_size": group}
    size = columns if group == -1 else group
    if form == "awq":
        packed = packings.awq(weight(rows, columns), group=size)
    else:
        settings["checkpoint_format"] = form
        packed = packings.gptq(weight(rows, columns), group=size, below=form == "gptq")
    roundtrip(tmp_path_factory.mktemp(form), *packed, settings)


@given(experts=st.integers(1, 3), rows=st.integers(1, 9), blocks=st.integers(1, 3))
def test_mxfp4_of_any_shape(tmp_path_factory, experts, rows, blocks):
    parts, values = packings.mxfp4(weight(experts * rows, blocks * 32).view(experts, rows, -1))
    folder = save(tmp_path_factory.mktemp("mxfp4"), {f"w{k}": t for k, t in parts.items()}, MXFP4)
    with open_checkpoint(folder) as checkpoint:
        assert torch.equal(read(checkpoint, "w_blocks"), values)
