"""Weights quantized by a calibration text: the means that are measured, what they improve, what is
kept and what is refused."""

import json
import random
from collections import defaultdict

import pytest
import torch
from helpers.error_cases import refused
from helpers.internals import source_of
from helpers.selection import full
from helpers.tiny_tokenizers import WORDS, with_words
from safetensors.torch import load_file, save_file

from flexgen_h2o import LLM
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.engine import prepare
from flexgen_h2o.engine import source as loader
from flexgen_h2o.engine.args import EngineArgs
from flexgen_h2o.engine.prepare import calibrate
from flexgen_h2o.engine.source import find_model
from flexgen_h2o.engine.tokenizer import InputProcessor
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels.reference import matrix as reference_matrix
from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.quantization import weight_options
from flexgen_h2o.models.registry import from_transformers, read_config
from flexgen_h2o.storage.device import Device

IDS = random.Random(0).choices(range(1, 97), k=600)
WINDOW = 256  # the positions of the tiny models


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache, an empty one for each test."""
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def text_file(path, ids=IDS):
    path.write_text(" ".join(WORDS[token] for token in ids))
    return path


@pytest.fixture
def text(tmp_path):
    return text_file(tmp_path / "text.txt")


def names(cache):
    return {path.name for path in cache.iterdir() if not path.name.startswith(".")}


def load(folder, text, **options):
    return LLM(str(folder), calibration=text, progress=False,
               **{"weight_bits": 4, "dtype": "float32", **options})


def transformers_means(model, weights, ids):
    """Mean squares of the inputs of transformers' matrices, by our canonical names."""
    sums, rows = defaultdict(float), defaultdict(int)
    head = weights.head["lm_head"].name

    def add(name, x):
        x = x.detach().reshape(-1, x.shape[-1])
        sums[name], rows[name] = sums[name] + x.double().square().sum(0), rows[name] + len(x)

    def experts(layer, module, x, chosen):
        for number, specs in enumerate(weights.experts[layer]):
            routed = x[(chosen == number).any(-1)]
            gate, up = (routed @ module.gate_up_proj[number].T).chunk(2, -1)
            for short, given in (("gate", routed), ("up", routed),
                                 ("down", module.act_fn(gate) * up)):
                add(specs[short].name, given)

    hooks = []
    for name, module in model.named_modules():
        key = head if name in ("lm_head", "embed_out") else f"{name}.weight"
        if isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_pre_hook(
                lambda module, args, key=key: add(key, args[0])))
        elif hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, torch.Tensor):
            layer = int(name.split(".")[2])
            hooks.append(module.register_forward_pre_hook(
                lambda module, args, layer=layer: experts(layer, module, *args[:2])))
    with torch.no_grad():
        for start in range(0, len(ids), WINDOW):
            model(torch.tensor([ids[start : start + WINDOW]]))
    for hook in hooks:
        hook.remove()
    return {name: sums[name] / rows[name] for name in sums if rows[name]}


@pytest.mark.parametrize("options", [{}, {"memory_limit": 1}], ids=["memory", "disk"])
@pytest.mark.parametrize("key", [
    "llama", "opt_350m_style", "neox", "qwen2_moe", "qwen3_moe_dense",
    *full("opt", "neox_sequential", "phi3", "gemma2", "qwen3_moe", "mixtral")])
def test_calibration_means_equal_transformers(tiny_model, tmp_path, text, key, options):
    tiny = tiny_model(key)
    folder = with_words(tiny.folder, tmp_path / "model")
    with load(folder, text, weight_cache=None, **options) as llm:
        source = source_of(llm)
        results, weights = source.measure(), source.weights
    expected = transformers_means(tiny.model, weights, IDS)
    assert set(results) == set(expected) - {
        spec.name for layer in weights.layers for short, spec in layer.items()
        if short in ("router", "shared_router")}
    for name, mean in results.items():
        torch.testing.assert_close(mean, expected[name].float(), rtol=1e-3, atol=1e-7, msg=name)


def test_unused_experts_get_the_layer_mean(tiny_model, tmp_path):
    """Of one word alone, all tokens choose the same experts."""
    tiny = tiny_model("qwen3_moe")
    folder = with_words(tiny.folder, tmp_path / "model")
    text = text_file(tmp_path / "text.txt", [7] * 200)
    with load(folder, text, weight_cache=None) as llm:
        source = source_of(llm)
        results, weights = source.measure(), source.weights
    expected = transformers_means(tiny.model, weights, [7] * 200)
    for layer in weights.experts:
        names = [specs["down"].name for specs in layer]
        had = [name for name in names if name in expected]
        assert 0 < len(had) < len(names)
        mean = sum(expected[name] for name in had) / len(had)  # of as many tokens each
        for name in names:
            torch.testing.assert_close(results[name], expected.get(name, mean).float(), rtol=1e-3,
                                       atol=1e-7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("key", ["llama", "gpt_oss", *full("olmoe")])
def test_calibration_in_16_bits(tiny_model, tmp_path, text, key, dtype):
    folder = with_words(tiny_model(key).folder, tmp_path / "model")
    means = []
    for options in ({"dtype": dtype}, {"dtype": dtype, "memory_limit": 1}, {}):
        with load(folder, text, weight_cache=None, **options) as llm:
            means.append(source_of(llm).measure())
    for name, mean in means[-1].items():
        if "expert" not in name:  # rounding can change which experts a token chooses
            torch.testing.assert_close(means[0][name], means[1][name], rtol=1e-3, atol=1e-7)
            assert (means[0][name] - mean).norm() < 0.05 * mean.norm()


@pytest.mark.parametrize("bits", [4, 8])
def test_calibration_reduces_the_error_of_outliers(tiny_model, tmp_path, text, cache, bits):
    """On another text, as it shows in the outputs of each layer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama").folder, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter[3::16] *= 20.0
    model.save_pretrained(tmp_path / "outliers")
    folder = with_words(tmp_path / "outliers", tmp_path / "model")
    inputs = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(
                lambda module, args, name=name: inputs.update({name: (module.weight, args[0][0])}))
    with torch.no_grad():
        model(torch.tensor([random.Random(1).choices(range(1, 97), k=200)]))
    errors = []
    shape = from_transformers(read_config(folder), "tiny")
    options = weight_options(WeightOptions(), bits, shape, None, on_gpu=False)
    for calibrated in (None, text):
        before = names(cache) if cache.exists() else set()
        load(folder, calibrated, weight_bits=bits).close()
        (added,) = names(cache) - before
        with open_checkpoint(cache / added) as checkpoint, torch.no_grad():
            errors.append([output_error(checkpoint, name, options.layout(
                tuple(given[0].shape), f"{name}.weight"), *given)
                for name, given in inputs.items()])
    plain, calibrated = map(torch.tensor, errors)
    assert calibrated.sum() < 0.6 * plain.sum() and (calibrated < plain).float().mean() > 0.8


def output_error(checkpoint, name, layout, weight, x):
    """Return the relative mean squared error of the outputs of a quantized weight."""
    data = torch.empty(layout.nbytes, dtype=torch.uint8)
    checkpoint.read(f"{name}.weight", data)
    quantized = reference_matrix.unpack_rows(data, layout, torch.arange(len(weight)), torch.float32)
    return float((x @ (quantized - weight).T).square().mean() / (x @ weight.T).square().mean())


# The weight cache


def test_calibrated_weights_are_cached_per_text(words_model, tmp_path, text, cache, monkeypatch):
    measured, measure = [], prepare._measure
    monkeypatch.setattr(prepare, "_measure", lambda *args: measured.append(1) or measure(*args))
    prompts = [(IDS[:20], IDS[20:50])]

    def scores(text, **options):
        with load(words_model, text, **options) as llm:
            return llm.loglikelihood(prompts)

    other = text_file(tmp_path / "other.txt", IDS[::-1])
    plain, first, second = scores(None), scores(text), scores(other)
    assert len({str(score) for score in (plain, first, second)}) == 3
    assert len(names(cache)) == 3 and len(measured) == 2
    assert scores(text) == first and scores(None) == plain and len(measured) == 2
    assert scores(text, weight_cache=None) == first and len(measured) == 3
    copy = text_file(tmp_path / "copy.txt", IDS)
    assert scores(copy) == first and len(measured) == 3


def test_bit_widths_share_the_measured_means(words_model, tmp_path, text, cache, monkeypatch):
    monkeypatch.setattr(loader, "MIN_KEPT_SECONDS", 0.0)
    load(words_model, text).close()
    monkeypatch.setattr(prepare, "_measure", lambda *args: pytest.fail("measured again"))
    load(words_model, text, weight_bits=8).close()
    assert sum("importance" in name for name in names(cache)) == 1


@pytest.mark.parametrize("key", ["text", "article", "prompt"])
def test_lines_of_json_are_one_text(words_model, tmp_path, text, cache, key):
    words = [WORDS[token] for token in IDS]
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"id": n, key: " ".join(words[start : start + 100])}) + "\n"
                             for n, start in enumerate(range(0, 600, 100))))
    for file in (text, lines):
        load(words_model, file).close()
    assert len(names(cache)) == 1


# What is refused


@pytest.mark.parametrize(("options", "message"), [
    ({"weight_bits": 16}, "calibration has no effect on weights of 16 bits: add weight_bits 4"),
    ({"weight_bits": 12}, "calibration has no effect on weights of 12 bits: use weight_bits 4"),
    ({"weight_bits": "auto"}, "calibration has no effect on weights of 16 bits"),
    ({"path": "_DUMMY_"}, "calibration has no effect on random weights: leave it out"),
    ({"calibration": "missing.txt"}, "cannot read calibration missing.txt: No such file")])
def test_invalid_options_are_errors(words_model, tmp_path, text, options, message):
    model = "facebook/opt-125m" if "path" in options else words_model
    refused(lambda: LLM(model, **{"weight_bits": 4, "calibration": str(text), **options}),
            match=message)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("text.txt", " \n", "is empty: give a text"), ("text.jsonl", "", "is empty: give texts"),
    ("text.jsonl", '{"body": "w1"}', "line 1 has no text under any of the keys text, article, pro"),
    ("text.jsonl", '{"text": " "}', "line 1 has no text"),
    ("text.txt", "w1 " * 127, "has 127 tokens: give a text of at least 128, better of 8192")])
def test_invalid_calibration_texts(words_model, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    refused(lambda: load(words_model, tmp_path / name), match=message)


def test_a_model_without_a_tokenizer_is_refused(tiny_model, text):
    with pytest.raises(UserError, match="has no tokenizer here, and calibration is text"):
        load(tiny_model("llama").folder, text)


def test_nonfinite_activations_are_errors(tiny_model, tmp_path, text):
    folder = with_words(tiny_model("llama").folder, tmp_path / "model")
    tensors = load_file(f"{folder}/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"].fill_(1e30)
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
    refused(lambda: load(folder, text), match="activations of .* are not finite in the calibration")


def test_ranks_use_cached_calibrated_weights(words_model, tmp_path, text):
    args = EngineArgs(model=words_model, dtype="float32", weight_bits=4, progress=False,
                      offload_dir=str(tmp_path), calibration=text, pipeline=object())
    source = find_model(args, Device())
    with pytest.raises(UserError, match="calibration runs on one rank: load the model once"):
        calibrate(source, InputProcessor(source, words_model, None), Device(), args)
    load(words_model, text).close()
    calibrate(source, InputProcessor(source, words_model, None), Device(), args)


def test_bos_begins_each_calibration_sequence(tiny_model, tmp_path):
    """Where the tokenizer puts it in front of texts."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    folder = with_words(tiny_model("llama").folder, tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, bos_token="w1")
    source = find_model(EngineArgs(model=folder, dtype="float32", weight_bits=4, progress=False),
                        Device())
    results = []
    for front in ("", "w1 "):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{front}$A", special_tokens=[("w1", 1)])
        tokenizer.save_pretrained(folder)
        inputs = InputProcessor(source, folder, None)
        results.append(inputs.windows("w5 " * 30, "text", count=2, length=12))
    assert results == [[[5] * 12] * 2, [[1] + [5] * 11] * 2]
