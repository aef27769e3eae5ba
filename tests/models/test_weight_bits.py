"""Weights in 12, 8 and 4 bits and activations in 8, end to end; and the cache of weights."""

import copy
import errno
import os
import shutil
import types
from functools import partial

import pytest
import torch
from helpers import generation
from helpers.error_cases import refused
from helpers.generation import make_prompts, transformers_tokens
from helpers.internals import quantize_in_a_new_way, weight_sizes, weights_of
from helpers.tiny_models import TINY

from flexgen_h2o import LLM, Placement, Policy
from flexgen_h2o.config.weight_layout import MatrixLayout, WeightOptions
from flexgen_h2o.engine import source
from flexgen_h2o.engine.args import EngineArgs
from flexgen_h2o.engine.weight_files import PersistentOffloadFile
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.disk_cache import CacheFolder, build_once
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.arguments import QuantizedMatrix
from flexgen_h2o.kernels.reference import matrix as reference_matrix
from flexgen_h2o.kernels.reference.matrix import quantize_activations
from flexgen_h2o.models import quantized
from flexgen_h2o.models.checkpoint_files import DummyCheckpoint
from flexgen_h2o.models.quantization import Quantization, mixed_options, weight_options
from flexgen_h2o.models.registry import from_transformers, published, read_config
from flexgen_h2o.storage.disk import Disk

NEW = 8
tokens = partial(generation.tokens, new=NEW, weight_bits=4, weight_cache="auto")
FEW = ("opt_350m_style", "llama_untied_bias", "gemma2")
LENGTHS = [9, 4, 1, 12]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache, an empty one for each test."""
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


class Rounded:
    """A tiny model whose matrices are what quantization makes of them, in transformers' hands."""

    def __init__(self, tiny, bits: int):
        self.model = copy.deepcopy(tiny.model)
        model = from_transformers(read_config(tiny.folder), "tiny")
        options = weight_options(WeightOptions(), bits, model, None, on_gpu=False)
        self.groups = {}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.dim() == 2:
                    if tiny.config.model_type == "gpt_neox":
                        name = name.replace("lm_head.", "embed_out.")
                    layout = options.layout(tuple(parameter.shape), name)
                    self.groups[id(parameter)] = layout.group
                    data = ops.quantize_matrix(parameter, layout, search=True)
                    parameter.copy_(reference_matrix.unpack_rows(
                        data, layout, torch.arange(len(parameter)), torch.float32))


@pytest.mark.parametrize("bits", [4, 8, 12])
@pytest.mark.parametrize("key", [
    key if key in FEW else pytest.param(key, marks=pytest.mark.full) for key in TINY])
def test_tokens_equal_the_rounded_model(tiny_model, key, bits):
    tiny = tiny_model(key)
    prompts = make_prompts(tiny.model.config.vocab_size, LENGTHS)
    expected = transformers_tokens(Rounded(tiny, bits), prompts, NEW)
    assert tokens(tiny.folder, prompts, weight_bits=bits) == expected
    if bits == 4:
        assert expected != transformers_tokens(tiny, prompts, NEW), "nothing was rounded"


def test_sensitive_matrices_have_six_bits():
    model = published("meta-llama/Llama-3.2-1B")  # 16 layers, tied
    layouts = mixed_options(model).layouts
    wide = {name for name, layout in layouts.items() if layout.bits == 6}
    assert wide == {"model.embed_tokens.weight", *(
        f"model.layers.{layer}.self_attn.{name}_proj.weight"
        for layer in range(16) for name in "vo"), *(
        f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1, 14, 15))}
    assert all(layout.compact and layout.group == 32 for name, layout in layouts.items()
               if name not in wide)
    assert len(layouts) == 1 + 7 * 16
    # A GPU's kernels, and checkpoints with 4-bit values of their own, have 4 bits throughout.
    awq = Quantization("awq", bits=(4,), group_size=128)
    for stored, on_gpu in ((None, True), (awq, False)):
        assert weight_options(WeightOptions(), 4, model, stored, on_gpu=on_gpu) == WeightOptions(4)
    fp8 = Quantization("fp8")
    assert weight_options(WeightOptions(), 4, model, fp8, on_gpu=False).layouts == layouts


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_dummy_weights_match_their_distribution(bits):
    layout, results = MatrixLayout(48, 256, bits), []
    for seed in (1, 1, 2):
        checkpoint = DummyCheckpoint({"w": (48, 256)}, torch.bfloat16, seed)
        data = torch.empty(layout.nbytes, dtype=torch.uint8)
        assert checkpoint.read_quantized("w", layout, data)
        matrix = QuantizedMatrix(data, layout)
        results.append(ops.unpack_rows(matrix, torch.arange(48), torch.float32))
        assert abs(results[-1].mean()) < 1e-3 and 0.018 < results[-1].std() < 0.023
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert not checkpoint.read_quantized("w", layout, data, range(48))


def test_dummy_weights_on_disk_are_kept(cache, tmp_path, monkeypatch):
    """Each is written once, whatever the placement, and read again by later runs."""
    results, written, write = [], [], Disk.write
    monkeypatch.setattr(Disk, "write", lambda disk, extent, buffer: (
        written.append(extent), write(disk, extent, buffer)))
    counts = []
    for weights in (Placement(0, 0, 100), Placement(0, 30, 70)):
        with LLM("facebook/opt-125m", path="_DUMMY_", weight_bits=4, dtype="float32",
                 policy=Policy(weights=weights), offload_dir=str(tmp_path / "offload")) as llm:
            results.append(llm.generate([[5, 6, 7]], max_new_tokens=2)[0].token_ids)
        counts.append(len(written))
    assert results[0] == results[1] and 0 < counts[0] == counts[1] == len(set(written))
    (file,) = cache.rglob("weights.bin")
    assert file.parent.name.startswith("facebook--opt-125m-dummy-4bit-")
    with LLM("facebook/opt-125m", path="_DUMMY_", weight_bits=4, dtype="float32",
             policy=Policy(weights=Placement(70, 0, 30)), offload_dir=str(tmp_path / "offload"),
             weight_cache=None) as llm:
        assert llm.generate([[5, 6, 7]], max_new_tokens=2)[0].token_ids == results[0]
    assert len(written) > counts[-1], "without a cache they are the run's own"


@pytest.fixture
def three_tensors(tmp_path):
    """A file that keeps tensors of 4 KB each, and the names of those that a run has to write."""
    kept = PersistentOffloadFile(CacheFolder(tmp_path, ""), "model", "seed 0",
                                 dict.fromkeys("abc", 4096))

    def write(names):
        with kept.writing(names) as offload:
            for name in offload.missing:
                path, offset = offload.extents[name].path, offload.extents[name].offset
                with open(path, "r+b") as file:
                    file.seek(offset)
                    file.write(name.encode() * 4096)
            return list(offload.missing)

    return tmp_path, write


def test_truncated_dummy_weights_are_written_again(three_tensors):
    root, write = three_tensors
    assert write("ab") == ["a", "b"] and write("abc") == ["c"]
    (file,) = root.rglob("weights.bin")
    whole = file.read_bytes()
    os.truncate(file, 6000)
    assert write("a") == [] and write("c") == ["c"] and write("abc") == ["b"]
    assert file.read_bytes() == whole


def test_a_full_disk_is_left_as_it_was(three_tensors, monkeypatch):
    root, write = three_tensors
    write("a")
    reserve = os.posix_fallocate

    def full(descriptor, offset, nbytes):
        if offset >= 8192:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        refused(lambda: write("bc"), match="No space left on device")
    (file,) = root.rglob("weights.bin")
    assert file.stat().st_size == 4096
    assert write("abc") == ["b", "c"]


def test_percentages_are_of_quantized_bytes(tiny_model):
    with LLM(str(tiny_model("opt_untied").folder), weight_bits=4, dtype="float32",
             policy=Policy(weights=Placement(50, 50, 0))) as llm:
        store, sizes = weights_of(llm), weight_sizes(llm)
        on_gpu = sum(n for name, n in sizes.items() if store.tiers[name] == "gpu")
        assert abs(on_gpu - sum(sizes.values()) / 2) <= max(sizes.values())
        assert sum(n for name, n in sizes.items() if "norm" not in name and "bias" not in name
                   ) == sum(layout.nbytes for layout in llm.weight_options.layouts.values())


# The cache


def names(cache):
    return sorted(path.name for path in cache.iterdir() if not path.name.startswith("."))


def test_weights_are_quantized_once(tiny_model, cache, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_model("llama").folder, tmp_path / "llama")
    prompts = [[3, 4, 5]]
    first = tokens(folder, prompts)
    assert len(names(cache)) == 1 and names(cache)[0].startswith(
        "llama-4bit-32-mixed-float32-v")
    with monkeypatch.context() as patch:
        patch.setattr(quantized.QuantizingCheckpoint, "read", None)  # nothing is quantized again
        assert tokens(folder, prompts) == first
        assert tokens(folder, prompts, weights=Placement(0, 50, 50)) == first
    tokens(folder, prompts, weight_bits=8)
    assert len(names(cache)) == 2
    weights = folder / "model.safetensors"
    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    tokens(folder, prompts)
    assert len(names(cache)) == 2, "the content is the same"
    quantize_in_a_new_way(monkeypatch)
    tokens(folder, prompts)
    assert len(names(cache)) == 3


def test_files_that_change_while_converted_are_not_kept(tmp_path):
    path, keep = tmp_path / "model.safetensors", CacheFolder(tmp_path / "kept", "")
    path.write_bytes(bytes(100))
    with pytest.raises(UserError, match="has changed while it was converted: run it again"):
        build_once([path], "form", "title", lambda folder: path.write_bytes(bytes(60)), cache=keep)
    assert names(keep.root) == [] and not list(keep.root.glob("*.tmp"))


def test_weight_cache_folder_and_no_cache(tiny_model, cache, tmp_path):
    folder = tiny_model("llama").folder
    expected = tokens(folder, [[3, 4]], weight_cache=None)
    assert not cache.exists()
    cache_folder = tmp_path / "mine"
    assert tokens(folder, [[3, 4]], weight_cache=str(cache_folder)) == expected
    assert len(names(cache_folder)) == 1 and not cache.exists()


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_damaged_weight_cache_is_an_error(tiny_model, cache, damage):
    folder = tiny_model("llama").folder
    tokens(folder, [[3]])
    path = cache / names(cache)[0] / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes({"cut": raw[:-5], "header": b"\xff" * 8 + raw[8:], "empty": b""}[damage])
    with pytest.raises(UserError) as caught:
        tokens(folder, [[3]])
    assert str(path.parent) in str(caught.value) and "remove" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bits", [3, 32, "4", None])
def test_other_bits_are_refused(tiny_model, bits):
    words = "weight_bits must be (auto, 16, 12, 8 or 4|an int or text)"
    refused(lambda: LLM(str(tiny_model("llama").folder), weight_bits=bits), match=words)


# Activations of 8 bits


def rounding(tiny, bits):
    """Return the model with rounded weights that also rounds the inputs of its matmuls."""
    rounded = Rounded(tiny, bits)
    for module in rounded.model.modules():
        if isinstance(module, torch.nn.Linear):
            group = rounded.groups[id(module.weight)]
            module.register_forward_pre_hook(
                lambda _, given, group=group: (
                    quantize_activations(given[0].flatten(0, -2), group).view(given[0].shape),))
    return rounded


def log_probs(model, text):
    """Of the tokens of a text after its first four."""
    with torch.no_grad():
        actual = model(torch.tensor([text])).logits.log_softmax(-1)[0, 3:-1]
    return actual.gather(-1, torch.tensor(text[4:])[:, None])[:, 0]


@pytest.mark.parametrize("key", ["gemma2", "llama", "neox", "opt"])
def test_log_probs_equal_a_model_with_rounded_activations(tiny_model, key):
    """An activation in the middle between two codes may become either, by float32's own error: so
    some of the texts may differ by more than that."""
    tiny = tiny_model(key)
    texts = make_prompts(tiny.model.config.vocab_size, [12, 20, 14, 9, 17])
    with LLM(str(tiny.folder), weight_bits=4, activation_bits=8, dtype="float32",
             weight_cache=None, progress=False) as llm:
        scored = llm.score([(text[:4], text[4:]) for text in texts])
    plain, rounded = Rounded(tiny, 4).model, rounding(tiny, 4).model
    errors, distances = ([(torch.tensor(score.log_probs) - log_probs(model, text)).abs().max()
                          for score, text in zip(scored, texts, strict=True)]
                         for model in (rounded, plain))
    assert sorted(errors)[2] < 1e-5 < 1e-3 < min(distances)
    assert max(errors) < max(distances)


@pytest.mark.parametrize(("options", "words"), [
    ({"activation_bits": 7, "weight_bits": 4}, "activation_bits must be 16 or 8, got 7"),
    ({"activation_bits": 8}, "no effect on weights of 16 bits: add weight_bits 4"),
    ({"activation_bits": 8, "weight_bits": 12}, "no effect on weights of 12 bits: use weight_bits"),
])
def test_invalid_activation_bits_are_errors(tiny_model, options, words):
    refused(lambda: LLM(str(tiny_model("llama").folder), **options), match=words)


def test_a_gpu_is_refused():
    device = types.SimpleNamespace(torch_device=torch.device("cuda"))
    with pytest.raises(UserError, match="works on a CPU only"):
        source.find_model(EngineArgs(model="gpt2", weight_bits=4, activation_bits=8), device)
