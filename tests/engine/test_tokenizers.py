"""Tokenizers as the engine loads them: transformers' own, without what only training needs."""

import json
import logging

import pytest
from helpers.error_cases import refused
from helpers.tiny_tokenizers import with_words

from flexgen_h2o import LLM
from flexgen_h2o.engine.tokenizer import load_tokenizer

TEXT = "w1 w2 ### w118"


@pytest.mark.parametrize("class_name", ["PreTrainedTokenizerFast", "TokenizersBackend",
                                        "LlamaTokenizerFast", "NoSuchTokenizer", None])
@pytest.mark.parametrize("key", ["llama", "opt"])
def test_tokenizers_equal_those_of_transformers(tiny_model, tmp_path, key, class_name):
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


# BOS


def with_bos(folder, target, *, adds=True):
    """A model whose tokenizer has the BOS w1, and puts it in front of texts."""
    from tokenizers.processors import TemplateProcessing

    with_words(folder, target)
    tokenizer = load_tokenizer(target)
    tokenizer.bos_token = "w1"
    if adds:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="w1 $A", special_tokens=[("w1", 1)])
    tokenizer.save_pretrained(target)
    return str(target)


@pytest.mark.parametrize("text, special, ids", [
    ("w5 w6", True, [1, 5, 6]), ("w5 w6", False, [5, 6]), ("w1 w5", True, [1, 5]),
    ("w1 w5", False, [1, 5]), ("w1 w1 w5", True, [1, 1, 5]), ("w5 w1 w1", True, [1, 5, 1, 1])])
def test_a_text_gets_one_bos(tiny_model, tmp_path, text, special, ids):
    folder = with_bos(tiny_model("llama").folder, tmp_path / "model")
    with LLM(folder, dtype="float32", device="cpu") as llm:
        out, = llm.generate([text], max_new_tokens=1, add_special_tokens=special)
        assert out.prompt_token_ids == ids and out.prompt == text
        blocks = llm.generate_in_blocks([text], max_new_tokens=1, add_special_tokens=special)
        assert next(iter(blocks))[0].prompt_token_ids == ids
        assert llm.encode(text, add_special_tokens=special) == ids
        with llm.stream(max_tokens=20) as stream:
            assert stream.generate(text, max_new_tokens=1).prompt_token_ids == (
                ids if special else llm.encode(text))
        assert "add_special_tokens" in refused(
            lambda: llm.generate([text], add_special_tokens="no"))


def test_tokenizers_that_add_no_bos_keep_both(tiny_model, tmp_path):
    folder = with_bos(tiny_model("llama").folder, tmp_path / "model", adds=False)
    with LLM(folder, dtype="float32", device="cpu") as llm:
        assert llm.encode("w1 w1 w5") == [1, 1, 5]


# Folders


def test_a_sentencepiece_model_needs_its_package(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    monkeypatch.setattr("flexgen_h2o.engine.tokenizer.find_spec", lambda name: None)
    refused(lambda: load_tokenizer(tmp_path), "SentencePiece", "flexgen-h2o[sentencepiece]")


def test_tokenizers_with_own_code_are_read_from_json(tiny_model, tmp_path):
    folder = tmp_path / "model"
    with_words(tiny_model("llama").folder, folder)
    path = folder / "tokenizer_config.json"
    expected = load_tokenizer(folder)(TEXT).input_ids
    path.write_text(json.dumps(json.loads(path.read_text()) | {
        "tokenizer_class": "OwnTokenizer", "eos_token": "w3",
        "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}))
    (folder / "tokenization_own.py").write_text("raise SystemExit('it ran')")
    tokenizer = load_tokenizer(folder)
    assert tokenizer(TEXT).input_ids == expected and tokenizer.eos_token_id == 3
    (folder / "tokenizer.json").unlink()
    refused(lambda: load_tokenizer(folder), "the model's own code", "tokenizer.json")


def test_a_short_limit_of_a_tokenizer_is_no_warning(tiny_model, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "model"
    with_words(tiny_model("llama").folder, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 4}))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    text = "w1 w2 w3 w4 w5 w6 w7"
    with LLM(str(folder), device="cpu", progress=False) as llm:
        assert llm.tokenizer.model_max_length == 4
        llm.generate([text], max_new_tokens=1, eos_token_id=-1)
        llm.loglikelihood([(text, " w1")])
        assert "longer than" not in caplog.text
        llm.tokenizer(text)
        assert "longer than" in caplog.text, "transformers itself warns"
