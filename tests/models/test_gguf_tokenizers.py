"""Tokenizers of GGUF files: ends, BOS, merges and spaces as in llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter
from helpers.gguf_cases import make

from flexgen_h2o.engine.tokenizer import load_tokenizer
from flexgen_h2o.models.gguf.conversion import describe_gguf, save_tokenizer
from flexgen_h2o.models.gguf.header import read_header

CONTROL, NORMAL, BYTE = (int(kind) for kind in (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL,
                                                gguf.TokenType.BYTE))


def saved(folder: Path, tokens: list[tuple[str, int]], *, kind: str = "gpt2",
          split: str | None = "qwen2", merges: list[str] | None = None, bos: int | None = 0,
          eos: int | None = 1, **values: object) -> list[int]:
    """Write the tokenizer of a GGUF file into a folder; returns the end tokens."""
    path = folder / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([each for _, each in tokens])
    writer.add_token_scores([-float(place) for place in range(len(tokens))])
    if merges is not None:
        writer.add_token_merges(merges)
    if bos is not None:
        writer.add_bos_token_id(bos)
    if eos is not None:
        writer.add_eos_token_id(eos)
    for name, value in values.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return save_tokenizer(read_header(path), folder)


def byte_level(*control: str, words: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    from tokenizers.pre_tokenizers import ByteLevel

    plain = [*sorted(ByteLevel.alphabet()), "he", *words]
    return [*((text, CONTROL) for text in control), *((text, NORMAL) for text in plain)]


# Ends of a text


@pytest.mark.parametrize("control, values, ends", [
    (["<|begin|>", "<|endoftext|>", "<|end|>"], {}, [1, 2]),  # Phi-3
    (["<s>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start|>"], {}, [1, 2, 3]),
    (["<s>", "<x>", "<|im_end|>", "<y>"], {"eot_token_id": 3}, [1, 3, 2]),
    (["<s>", "<x>", "<y>"], {"eom_token_id": 2, "fim_sep_token_id": 0}, [1, 2, 0]),
    (["<s>", "<|return|>", "<|end|>", "<|call|>"], {"eot_token_id": 2}, [1, 3]),  # gpt-oss
    (["<s>", "<|flush|>", "<|end|>", "<|calls|>"], {}, [1, 3]),
    (["<s>", "<turn|>", "</s>", "<|tool_response>"], {}, [1, 3]),
    (["<s>", "<x>", "<|file_sep|>", "<|repo_name|>", "<|fim_prefix|>"], {}, [1, 2, 3]),
    (["<s>", "</s>"], {"eot_token_id": 1}, [1])])
def test_known_control_tokens_end_a_text(tmp_path, control, values, ends):
    assert saved(tmp_path, byte_level(*control), merges=["h e"], **values) == ends


def test_normal_tokens_are_no_end_tokens(tmp_path):
    tokens = [*byte_level("<s>", "</s>"), ("<|im_end|>", NORMAL), ("<EOT>", NORMAL)]
    assert saved(tmp_path, tokens, merges=["h e"]) == [1]


def test_gguf_end_and_suppressed_tokens_are_defaults(tmp_path, monkeypatch):
    def add(writer):
        tokens = byte_level("<s>", "</s>", "<|im_end|>")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list([text for text, _ in tokens])
        writer.add_token_types([kind for _, kind in tokens])
        writer.add_token_merges(["h e"])
        writer.add_eos_token_id(1)
        writer.add_array("tokenizer.ggml.suppress_tokens", [5, 9])

    monkeypatch.setattr("helpers.gguf_cases.add_tokenizer", add)
    _, source = make("granite", tmp_path)
    given = json.loads((describe_gguf(read_header(source)) / "generation_config.json").read_text())
    assert given == {"eos_token_id": [1, 2], "suppress_tokens": [5, 9]}


# Tokens of a text


@pytest.mark.parametrize("split, values, first", [
    ("llama-bpe", {}, [0]), ("llama3", {}, [0]), ("tekken", {}, [0]), ("falcon3", {}, [0]),
    ("llama-bpe", {"add_bos_token": False}, []), ("qwen2", {}, []),
    ("qwen2", {"add_bos_token": True}, [0]), ("default", {}, []), ("llama-bpe", {"bos": None}, [])])
def test_bos_comes_first_where_llama_cpp_puts_it(tmp_path, split, values, first):
    tokens = byte_level("<s>", "</s>")
    saved(tmp_path, tokens, split=split, merges=["h e"], **values)
    he = [text for text, _ in tokens].index("he")
    assert load_tokenizer(tmp_path)("he").input_ids == [*first, he]


@pytest.mark.parametrize("split, count", [("llama-bpe", 1), ("tekken", 1), ("qwen2", 4)])
def test_words_without_merges(tmp_path, split, count):
    saved(tmp_path, byte_level("<s>", "</s>", words=("hello",)), split=split, merges=["h e"])
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer("hello", add_special_tokens=False).input_ids) == count
    assert tokenizer.decode(tokenizer("hello", add_special_tokens=False).input_ids) == "hello"


@pytest.mark.parametrize("values, pieces", [
    ({}, ["\u2581he"]), ({"add_space_prefix": True}, ["\u2581he"]),
    ({"add_space_prefix": False}, ["he"])])
def test_space_prefix_follows_the_file(tmp_path, values, pieces):
    tokens = [("<s>", CONTROL), ("</s>", CONTROL), ("<unk>", CONTROL),
              *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
              *((text, NORMAL) for text in ("\u2581", "h", "e", "he", "\u2581he"))]
    saved(tmp_path, tokens, kind="llama", split=None, **values)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer("he").input_ids
    assert ids[0] == 0 and tokenizer.convert_ids_to_tokens(ids[1:]) == pieces
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he"
    if values.get("add_space_prefix") is False:
        spaced = tokenizer(" he \u00e9", add_special_tokens=False).input_ids
        assert tokenizer.convert_ids_to_tokens(spaced)[0] == "\u2581he"
        assert tokenizer.decode(spaced) == " he \u00e9"
