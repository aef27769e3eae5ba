"""A GGUF of each architecture becomes the folder of the model that it was made from."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from helpers.error_cases import refused
from helpers.generation import transformers_tokens
from helpers.gguf_cases import CASES, add_tokenizer, make
from helpers.selection import full
from safetensors.torch import load_file

from flexgen_h2o import LLM
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.engine.tokenizer import load_tokenizer
from flexgen_h2o.models.gguf.checkpoint import mapped
from flexgen_h2o.models.gguf.config import config_of, header_options
from flexgen_h2o.models.gguf.conversion import describe_gguf, save_tokenizer
from flexgen_h2o.models.gguf.header import read_header
from flexgen_h2o.models.registry import FAMILIES, read_config
from flexgen_h2o.models.sources import checkpoint_folder

# Keys that GGUF files lack: current models keep their defaults, or only training uses them.
UNKNOWN = {"initializer_range", "use_cache", "_name_or_path", "transformers_version", "dtype",
           "attention_dropout", "resid_pdrop", "embd_pdrop", "router_aux_loss_coef",
           "output_router_logits", "max_window_layers", "hidden_dropout", "classifier_dropout",
           "residual_dropout", "router_jitter_noise", "architectures", "pretraining_tp",
           "initial_context_length", "use_bidirectional_attention", "attention_probs_dropout_prob"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", CASES)
def test_config_and_tensors_equal_the_model(tmp_path, name):
    from transformers import AutoConfig

    model, source = make(name, tmp_path)
    folder = checkpoint_folder(str(source))
    actual = AutoConfig.from_pretrained(folder).to_dict()
    expected = model.config.to_dict()
    assert read_config(folder)["architectures"] == [type(model).__name__]
    different = {key: (actual.get(key), value) for key, value in expected.items()
                 if key not in UNKNOWN and actual.get(key) != value}
    assert different == {}
    original = {key: tensor for key, tensor in
                load_file(tmp_path / "original" / "model.safetensors").items()
                if not key.endswith((".act_fn.beta", ".act_fn.eps"))}  # constants of xIELU
    converted = load_file(folder / "model.safetensors")
    layer = "model.layers.2."  # for multi-token prediction, in a family that reads it
    predicting = {f"{layer}eh_proj.weight", f"{layer}input_layernorm.weight"}
    assert set(converted) == set(original) | (predicting if name == "glm4moe" else set())
    for key, tensor in original.items():
        error = 1e-6 if key.endswith("A_log") else 0  # the file has its exponential
        torch.testing.assert_close(converted[key], tensor, rtol=0, atol=error, msg=key)
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 0, "eos_token_id": 1}


# Where transformers reads the architecture itself; its experts of gpt-oss have names of their own.
ITS_OWN = ("llama", "gemma3", "qwen2moe",
           *full("qwen2", "qwen3", "phi3", "gemma2", "stablelm", "qwen3moe"))


FEW = ("llama", "gptneox", "gemma3", "qwen2moe", "deepseek2")
"""Architectures whose tokens are compared; with --all, each one's are."""


@pytest.mark.parametrize("name", ITS_OWN)
def test_tensors_equal_transformers_gguf_reader(tmp_path, name):
    """The config is ours: its own leaves out the sizes of heads and of experts."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    _, source = make(name, tmp_path, kind=Kind.Q8_0)
    folder = checkpoint_folder(str(source))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    theirs = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=empty)
    expected = theirs["tensors"]
    results = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert set(results) - {"lm_head.weight"} == set(expected) - {"lm_head.weight"}
    assert [key for key in expected if not torch.equal(results[key], expected[key])] == []


def test_experts_in_mxfp4_stay_as_they_are(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    _, source = make("gpt-oss", tmp_path, kind=Kind.MXFP4)
    folder = checkpoint_folder(str(source), dtype="bfloat16")
    assert read_config(folder)["quantization_config"]["quant_method"] == "mxfp4"
    converted = load_file(folder / "model.safetensors")
    stored = {tensor.name: dequantize(tensor.data, tensor.tensor_type)
              for tensor in GGUFReader(source).tensors}
    for layer in range(2):
        parts = [stored[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")]
        turned = [torch.from_numpy(part).transpose(1, 2) for part in parts]
        fused = torch.stack(turned[:2], dim=-1).flatten(2)
        for name, values in (("gate_up_proj", fused), ("down_proj", turned[2])):
            called = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales = converted[f"{called}_blocks"], converted[f"{called}_scales"]
            assert blocks.dtype == scales.dtype == torch.uint8
            results = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert torch.equal(results, values)
            assert converted[f"{called}_bias"].dtype == torch.bfloat16
    header = read_header(source)
    for bits, group in ((12, 64), (8, 32), (4, 64)):
        with LLM(str(source), dtype="bfloat16", weight_bits=bits, weight_cache=None) as llm:
            options = header_options(header, llm.model_config, bits)
            assert llm.weight_options == options and options.group == group
            assert bool(options.mxfp4) == (bits == 4)
    results = []
    for bits in (AUTO, 16):  # all matrices of this file are in MXFP4, which is exact
        with LLM(str(source), dtype="float32", weight_bits=bits) as llm:
            results.append(torch.tensor(llm.loglikelihood([([5, 6, 7], [8, 9, 10])])))
            kept = llm.weight_options.layouts.values()
            assert len(kept) == (2 * (5 * 3 + 4) + 2 if bits == AUTO else 0)
            assert all(layout.mxfp4 for layout in kept)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_parts_of_matrices_keep_their_quantized_values(tmp_path):
    """Queries and gates alternate by head; values of the DeltaNet's output are in another order."""
    _, source = make("qwen35", tmp_path, {"head_dim": 16, "linear_value_head_dim": 16},
                     kind=Kind.Q8_0)
    scores = []
    for bits in (AUTO, 16):
        with LLM(str(source), dtype="float32", weight_bits=bits) as llm:
            scores.append(torch.tensor(llm.loglikelihood([([5, 6, 7], [8, 9, 10])])))
            kept = llm.weight_options.layouts
            for name in ("self_attn.q_proj.query", "self_attn.q_proj.gate",
                         "linear_attn.in_proj_qkv", "linear_attn.in_proj_z"):
                assert any(name in key for key in kept) == (bits == AUTO), name
            assert not any("out_proj" in key for key in kept)
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", [
    *((name, None) if name in FEW else pytest.param((name, None), marks=pytest.mark.full)
      for name, case in CASES.items() if case.model_type in FAMILIES),
    ("deepseek2", "glm4_moe_lite")], ids=str)  # GLM-4.7-Flash
def test_tokens_equal_transformers(tmp_path, case):
    """In float32, past the window where there is one."""
    name, model_type = case
    model, source = make(name, tmp_path, model_type=model_type)
    prompts = [[int(token) for token in torch.randint(2, 260, (length,))] for length in (21, 7)]
    expected = transformers_tokens(SimpleNamespace(model=model), prompts, 5)
    with LLM(str(source), dtype="float32", device="cpu") as llm:
        results = llm.generate(prompts, max_new_tokens=5, eos_token_id=-1)
    assert [result.token_ids for result in results] == expected


@pytest.mark.parametrize(("name", "experts", "kept"), [("deepseek2", 256, 4),
                                                       ("deepseek2 lite", 160, 3)])
def test_older_deepseek_has_its_published_groups(tmp_path, name, experts, kept):
    header = read_header(make(name, tmp_path)[1])
    values = {key: value for key, value in header.values.items() if "expert_group" not in key}
    config = config_of(replace(header, values={**values, "deepseek2.expert_count": experts}))
    assert (config["n_group"], config["topk_group"]) == (8, kept)
    assert config.get("topk_method") in (None, "group_limited_greedy")


@pytest.mark.parametrize("name, tensor", [("qwen3next", "attn_gate"), ("deepseek2", "attn_v_b"),
                                          ("gpt-oss", "ffn_up_exps")])
def test_fused_tensors_need_all_their_parts(tmp_path, name, tensor):
    header = read_header(make(name, tmp_path)[1])
    tensors = {key: value for key, value in header.tensors.items()
               if key != f"blk.0.{tensor}.weight"}
    refused(lambda: mapped(replace(header, tensors=tensors)), match=tensor)


def tokenizer_of(tmp_path, monkeypatch, split: str):
    from transformers import AutoTokenizer

    monkeypatch.setattr("helpers.gguf_cases.add_tokenizer",
                        lambda writer: add_tokenizer(writer, split))
    _, source = make("granite", tmp_path)
    return AutoTokenizer.from_pretrained(checkpoint_folder(str(source)))


@pytest.mark.parametrize(("split", "words"), [
    ("refact", ["he", "Ġ", "1", "2"]), ("qwen2", ["he", "Ġ", "1", "2"]),
    ("llama-bpe", ["he", "Ġ", "12"]), ("default", ["he", "Ġ12"])])
def test_tokenizers_split_texts_as_their_own_do(tmp_path, monkeypatch, split, words):
    tokenizer = tokenizer_of(tmp_path, monkeypatch, split)
    results = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("he 12")
    assert [word for word, _ in results] == words
    ids = tokenizer("hello 12</s>", add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == "hello 12</s>"


def test_unsupported_pre_tokenizer_is_an_error(tmp_path, monkeypatch):
    refused(lambda: tokenizer_of(tmp_path, monkeypatch, "seed-coder"), "'seed-coder'",
            "Hugging Face folder")


def changed(path, *pairs):
    """A GGUF with bytes exchanged for as many others."""
    raw = path.read_bytes()
    for old, new in pairs:
        assert len(old) == len(new) and old in raw
        raw = raw.replace(old, new)
    path.write_bytes(raw)
    return lambda: checkpoint_folder(str(path))


def test_unsupported_gguf_contents_are_errors(tmp_path):
    def file(name):
        (tmp_path / name).mkdir()
        return make(name, tmp_path / name)[1]

    refused(changed(file("qwen2"), (b"yarn", b"yawn")), "rope scaling 'yawn'", "qwen2")
    refused(changed(file("qwen3"), (b"blk.0.attn_q_norm", b"blk.0.attn_x_norm")),
            "tensor blk.0.attn_x_norm.weight is no part of the qwen3 architecture")
    refused(changed(file("seed_oss"), (b"seed_oss", b"seed_new")), "'seed_new'",
            "did you mean seed_oss")
    refused(changed(file("gpt-oss"), (b"blk.0.ffn_up_exps.bias", b"blk.1.ffn_ux_exps.bias")),
            "ffn_ux_exps")
    refused(changed(file("phi3"), (b"rope_factors_long.weight", b"rope_factors_lung.weight")),
            "rope_factors_lung.weight is no part of the phi3")


@pytest.mark.parametrize("name", ["llama 3", "qwen3", "gemma3", "gpt-oss"])
def test_partial_rotary_in_gguf_is_an_error(tmp_path, name):
    """llama.cpp goes by this value in models of every architecture."""
    header = read_header(make(name, tmp_path)[1])
    key = f"{header.values['general.architecture']}.rope.dimension_count"
    whole = config_of(header)
    size = whole["head_dim"]
    assert config_of(replace(header, values={**header.values, key: size})) == whole
    refused(lambda: config_of(replace(header, values={**header.values, key: size // 2})),
            f"{size // 2} of a head's {size} dimensions rotate")


@pytest.mark.parametrize(("values", "words"), [
    ({"expert_count": 8}, "GGUF files of Gemma 4's mixture are not supported"),
    ({"rope.dimension_count_swa": 6}, "rope factors differ from Gemma 4's"),
    ({"attention.key_length": 20}, "rope factors differ from Gemma 4's")])
def test_other_gemma4_in_gguf_is_an_error(tmp_path, values, words):
    header = read_header(make("gemma4", tmp_path)[1])
    changes = {f"gemma4.{key}": value for key, value in values.items()}
    refused(lambda: config_of(replace(header, values={**header.values, **changes})), words)


@pytest.mark.parametrize(("name", "layers", "scale"), [("gemma2", 46, 8), ("gemma3", 62, 8),
                                                       ("gemma2", 26, 12)])
def test_query_scale_of_large_gemmas(tmp_path, name, layers, scale):
    """Of a file with as many layers; its tensors don't matter."""
    _, source = make(name, tmp_path)
    header = read_header(source)
    values = {**header.values, f"{name}.block_count": layers}
    tensors = {**header.tensors, **{f"blk.{n}.x": next(iter(header.tensors.values()))
                                    for n in range(layers)}}
    config = config_of(replace(header, values=values, tensors=tensors))
    assert config["query_pre_attn_scalar"] == scale and len(config["layer_types"]) == layers


# Tokenizers: ends, BOS, merges and spaces as in llama.cpp

CONTROL, NORMAL, BYTE = (int(kind) for kind in (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL,
                                                gguf.TokenType.BYTE))


def saved(folder: Path, tokens: list[tuple[str, int]], *, kind: str = "gpt2",
          split: str | None = "qwen2", merges: list[str] | None = None, bos: int | None = 0,
          eos: int | None = 1, architecture: str = "llama", **values: object) -> list[int]:
    """Write the tokenizer of a GGUF file into a folder; returns the end tokens."""
    path = folder / "tiny.gguf"
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([token_type for _, token_type in tokens])
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


def test_gemma4_merges_pieces_after_bos(tmp_path):
    tokens = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", CONTROL),
              *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
              *((text, NORMAL) for text in ("\u2581", "h", "e", "l", "he", "hel", "\u2581h"))]
    assert saved(tmp_path, tokens, kind="gemma4", split=None, architecture="gemma4", bos=2,
                 merges=["\u2581 h", "h e", "he l"]) == [1]
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer("hel he\u00e9").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<bos>", "hel", "\u2581h", "e", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hel he\u00e9"


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
