"""`LLM.probe`: attention by a given function while a text is scored."""

import pytest
import torch
from helpers.error_cases import refused

from flexgen_h2o import LLM
from flexgen_h2o.kernels.reference import attention as reference

PAIRS = [([5, 9, 11, 4], [7, 3]), ([8], [1, 2, 3, 4, 5]), ([6, 7, 8, 9, 10], [2])]


@pytest.mark.parametrize("key", ["opt", "llama_untied_bias", "neox_partial"])
def test_reference_attention_gives_the_log_probabilities(tiny_model, key):
    tiny = tiny_model(key)
    seen = []

    def attend(layer, pair, q, k, v):
        seen.append((layer, pair, len(q)))
        return reference.prefill_attention(q, k, v, [len(q)])

    with LLM(str(tiny.folder), dtype="float32", device="cpu") as llm:
        probed = llm.probe(PAIRS, attend)
        expected = llm.loglikelihood(PAIRS)
        layers = llm.model_config.num_layers
    for one, other in zip(probed, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    lengths = [len(head) + len(tail) - 1 for head, tail in PAIRS]
    assert sorted(seen) == sorted((layer, pair, length) for layer in range(layers)
                                  for pair, length in enumerate(lengths))


def test_the_result_of_attend_is_used(tiny_model):
    with LLM(str(tiny_model("llama").folder), dtype="float32", device="cpu") as llm:
        blind = llm.probe(PAIRS, lambda layer, pair, q, k, v: torch.zeros_like(q))
        usual = llm.loglikelihood(PAIRS)
        assert blind[0] != pytest.approx(usual[0], abs=1e-3)
        assert llm.probe([], lambda *_: pytest.fail("there is no pair")) == []


def test_an_error_in_attend_is_raised_and_the_model_is_usable(tiny_model):
    def attend(layer, pair, q, k, v):
        raise ArithmeticError("mine")

    with LLM(str(tiny_model("llama").folder), dtype="float32", device="cpu") as llm:
        before = llm.loglikelihood(PAIRS)
        with pytest.raises(ArithmeticError, match="mine"):
            llm.probe(PAIRS, attend)
        assert llm.loglikelihood(PAIRS) == before
    refused(lambda: llm.probe(PAIRS, attend), match="has been closed")
