"""Tokenizers as the engine loads them: transformers' own, without what only training needs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from word_models import with_words

from flexgen_h2o.engine.loader import load_tokenizer

TEXT = "w1 w2 ### w118"
INFERENCE_HAS_NO_USE_FOR = ("torch._dynamo", "torch._inductor", "sympy", "triton", "accelerate",
                            "scipy", "matplotlib")


@pytest.mark.parametrize("class_name", ["PreTrainedTokenizerFast", "TokenizersBackend",
                                        "LlamaTokenizerFast", "NoSuchTokenizer", None])
@pytest.mark.parametrize("key", ["llama", "opt"])
def test_a_tokenizer_is_what_transformers_makes_of_it(tiny_model, tmp_path, key, class_name):
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    with_words(tiny_model(key).folder, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["tokenizer_class"]
    path.write_text(json.dumps(settings | ({"tokenizer_class": class_name} if class_name else {})))
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    assert type(ours) is type(theirs) and ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert ours.get_vocab() == theirs.get_vocab()


def test_generating_loads_nothing_that_inference_has_no_use_for(tiny_model, tmp_path):
    folder = with_words(tiny_model("llama").folder, tmp_path / "model")
    code = f"""
import sys
from flexgen_h2o import LLM, H2OConfig
with LLM({folder!r}, h2o=H2OConfig(heavy_ratio=0.2), device="cpu", progress=False) as llm:
    llm.generate([{TEXT!r}], max_new_tokens=2, do_sample=True, temperature=0.5, top_k=9)
print(*[name for name in {INFERENCE_HAS_NO_USE_FOR} if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "\n", ran.stdout
