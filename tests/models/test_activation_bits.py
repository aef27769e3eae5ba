"""Activations of 8 bits before quantized weights, end to end on tiny random models."""

from __future__ import annotations

import types

import pytest
import torch
from helpers.error_cases import refused
from helpers.generation import make_prompts
from models.test_weight_bits import Rounded

from flexgen_h2o import LLM
from flexgen_h2o.engine import source
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels.reference.matrix import quantize_activations


def rounding(tiny, bits):
    """The model with rounded weights, whose products round what they are given."""
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
        found = model(torch.tensor([text])).logits.log_softmax(-1)[0, 3:-1]
    return found.gather(-1, torch.tensor(text[4:])[:, None])[:, 0]


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
    errors, distances = ([(torch.tensor(each.log_probs) - log_probs(model, text)).abs().max()
                          for each, text in zip(scored, texts, strict=True)]
                         for model in (rounded, plain))
    assert sorted(errors)[2] < 1e-5 < 1e-3 < min(distances)
    assert max(errors) < max(distances)


@pytest.mark.parametrize(("options", "words"), [
    ({"activation_bits": 7, "weight_bits": 4}, "activation_bits must be 16 or 8, got 7"),
    ({"activation_bits": 8}, "no effect on weights of 16 bits: add weight_bits 4"),
    ({"activation_bits": 8, "weight_bits": 12}, "no effect on weights of 12 bits: use weight_bits"),
])
def test_what_is_refused(tiny_model, options, words):
    refused(lambda: LLM(str(tiny_model("llama").folder), **options), match=words)


def test_a_gpu_is_refused():
    device = types.SimpleNamespace(torch_device=torch.device("cuda"))
    with pytest.raises(UserError, match="works on a CPU only"):
        source.find_model("gpt2", path=None, dtype="auto", bits=4, activation_bits=8, device=device)
