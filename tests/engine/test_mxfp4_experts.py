"""gpt-oss in MXFP4 as on the hub: transformers' tokens, and codes that are kept."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.generation import tokens, transformers_tokens
from helpers.internals import weight_sizes, weights_of
from helpers.mixture_cases import MIXTURES, limit_as_configured
from safetensors.torch import save_file

from flexgen_h2o import LLM, Placement
from flexgen_h2o.config.weight_layout import MatrixLayout, WeightOptions
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import QuantizedMatrix
from flexgen_h2o.models.quantization import quantization
from flexgen_h2o.models.registry import from_transformers, published, published_quantization
from flexgen_h2o.planning.planned_run import bytes_at_rest

NEW = 6
HERE, DISK, MIXED = (Placement(*shares) for shares in ((100, 0, 0), (0, 0, 100), (30, 30, 40)))
SHAPES = frozenset({(32, 64), (64, 32)})


@dataclass
class Hub:
    """A checkpoint, the model in transformers' hands, and the values of its experts by name."""

    folder: Path
    model: Any
    kept: dict[str, torch.Tensor]
    prompts: list[list[int]]


@pytest.fixture
def hub(tmp_path):
    from helpers import packings
    from transformers import GptOssForCausalLM

    torch.default_generator.manual_seed(0)
    config = MIXTURES["gpt_oss"](hidden_size=64, intermediate_size=32, eos_token_id=None)
    model = GptOssForCausalLM(config).eval()
    model.set_experts_implementation("eager")
    limit_as_configured(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False).normal_(0.0, 0.2)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    kept = {}
    for name in [name for name in state if name.endswith("_proj") and ".experts." in name]:
        parts, kept[name] = packings.mxfp4(state.pop(name).transpose(1, 2))
        model.get_parameter(name).copy_(kept[name].transpose(1, 2))
        state |= {f"{name}{end}": part for end, part in parts.items()}
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(tmp_path / "m")
    save_file(state, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 97) for _ in range(length)] for length in (9, 14, 5)]
    return Hub(tmp_path / "m", model, kept, prompts)


def run(hub, **options):
    return tokens(hub, hub.prompts, new=NEW, offload_dir=hub.folder.parent / "offload", **options)


def test_mxfp4_equals_transformers(hub):
    """Dequantized in 16 bits, wherever it rests."""
    expected = transformers_tokens(hub, hub.prompts, NEW)
    for experts in (HERE, DISK):
        assert run(hub, weight_bits=16, experts=experts) == expected


def unpacked(matrix):
    """All of a quantized matrix in float32, on the host."""
    rows = torch.arange(len(matrix), device=matrix.data.device)
    return ops.unpack_rows(matrix, rows, torch.float32).cpu()


@pytest.mark.parametrize(("bits", "options"), [(8, WeightOptions(8, 32)),
                                               (4, WeightOptions(4, 64, SHAPES))])
def test_quantized_experts_keep_their_values(hub, bits, options):
    with LLM(str(hub.folder), weight_bits=bits, dtype="float32", weight_cache=None) as llm:
        assert llm.weight_options == options
        one = weights_of(llm).experts[1, 3].resident
        every = hub.kept["model.layers.1.mlp.experts.gate_up_proj"][3]
        down = hub.kept["model.layers.1.mlp.experts.down_proj"][3]
        for name, wanted in (("gate", every[::2]), ("up", every[1::2]), ("down", down)):
            assert torch.equal(unpacked(one[name]), wanted)
            assert bits == 8 or one[name].data.nbytes * 8 == wanted.numel() * 4.25


def round_others(model):
    """Have transformers' model hold what 4 bits make of the matrices that are not experts'."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and not name.endswith("bias") and ".router." not in name:
            layout = MatrixLayout(*parameter.shape, 4)
            matrix = QuantizedMatrix(ops.quantize_matrix(parameter, layout, search=True), layout)
            parameter.copy_(unpacked(matrix))


def test_tokens_with_4_bits_for_every_policy(hub, tmp_path):
    round_others(hub.model)
    expected, cache = transformers_tokens(hub, hub.prompts, NEW), tmp_path / "cache"
    for policy, kept in (({}, None), ({"experts": DISK, "expert_slots": 3}, None),
                         ({"experts": DISK, "weights": MIXED, "gpu_batch_size": 2,
                           "num_gpu_batches": 2}, cache),
                         ({"experts": MIXED, "cache": MIXED, "overlap": False}, cache)):
        assert run(hub, weight_bits=4, weight_cache=kept, **policy) == expected
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    assert "4bit-64-mxfp4" in folder.name, "no cache of another layout is taken for this one"


def test_bfloat16_is_near_float32(hub):
    """Experts of few tokens are one call then, and those of many products of their own."""
    pairs = [(prompt[:2], prompt[2:]) for prompt in hub.prompts]
    pairs.append(([5], [token % 97 for token in range(3, 250)]))
    scores = []
    for dtype in ("float32", "bfloat16"):
        with LLM(str(hub.folder), weight_bits=4, dtype=dtype, weight_cache=None) as llm:
            scores.append([torch.tensor(values).mean() for values in llm.loglikelihood(pairs)])
    torch.testing.assert_close(torch.stack(scores[1]), torch.stack(scores[0]), rtol=0.02, atol=0.02)


def test_random_weights_have_the_layout_of_the_checkpoint(hub):
    with LLM(str(hub.folder), path="_DUMMY_", weight_bits=4, weight_cache=None) as llm:
        assert llm.weight_options == WeightOptions(4, 64, SHAPES)
        one = weights_of(llm).experts[0, 0].resident
        assert 0.015 < unpacked(one["gate"]).std() < 0.03
        sizes = weight_sizes(llm)
        expert = sum(sizes[spec.name] for spec in weights_of(llm).experts[0, 0].specs.values())
        assert bytes_at_rest(llm.weight_options, llm.model_config.expert_shapes(), 2) == expert


def test_published_models_have_mxfp4_layouts():
    config, stored = published("openai/gpt-oss-120b"), published_quantization("openai/gpt-oss-120b")
    assert stored.weights(4, config).matrix_bytes((2880, 2880), 2) * 8 == 2880 * 2880 * 4.25
    assert stored.weights(4, config).layout((4096, 2880)).group == 64
    assert stored.weights(8, config) == WeightOptions(8, 32)
    assert published_quantization("facebook/opt-30b") is None


def test_ambiguous_shapes_are_not_mxfp4():
    """Nothing tells an expert's matrix from one of attention then."""
    config = from_transformers(MIXTURES["gpt_oss"](
        hidden_size=60, intermediate_size=32, head_dim=10).to_dict(), "m")
    stored = quantization({"quantization_config": {"quant_method": "mxfp4"}}, "m")
    assert config.layer_shapes().matrices[0] == (60, 60)
    assert stored.weights(4, config).mxfp4 == {(32, 60), (60, 32)}
    same = replace(config, experts=replace(config.experts, ffn_size=60))
    assert not stored.weights(4, same).mxfp4
