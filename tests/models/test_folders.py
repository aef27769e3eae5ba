"""What lies in a model's folder: GGUF files of any name, git-LFS pointers, adapters."""

import json
import logging
import shutil

import pytest
from helpers.error_cases import refused
from helpers.gguf_cases import make
from helpers.tiny_tokenizers import with_words

from flexgen_h2o import LLM
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.models.sources import checkpoint_folder, gguf_of

PROMPT = [[5, 6, 7]]
POINTER = ("version https://git-lfs.github.com/spec/v1\n"
           "oid sha256:4665a5ea423c2713d436b5ee50593a9640e0018c1550b5a0002f74190d6caea8\n"
           "size 268099072\n")


def tokens(model) -> list[int]:
    with LLM(str(model), dtype="float32", device="cpu") as llm:
        return llm.generate(PROMPT, max_new_tokens=4, eos_token_id=-1)[0].token_ids


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make("qwen2", tmp_path_factory.mktemp("gguf"))[1]


def test_a_gguf_is_known_by_its_first_bytes(source, tmp_path):
    expected = tokens(source)
    blob = tmp_path / "sha256-1a2b3c"
    shutil.copyfile(source, blob)
    assert tokens(blob) == expected
    assert gguf_of(str(blob)) == blob
    assert RunConfig(model=str(blob), prompt_len=4).resolved_weight_bits == "auto"


def test_a_folder_that_holds_only_a_gguf(source, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").write_text("words")
    (folder / "mmproj-f16.gguf").write_bytes(b"GGUF")  # the encoder of images
    shutil.copyfile(source, folder / "weights")
    assert tokens(folder) == tokens(source)
    assert RunConfig(model=str(folder), prompt_len=4).resolved_weight_bits == "auto"
    assert (checkpoint_folder(str(folder)) / "model.safetensors").exists()
    shutil.copyfile(source, folder / "other.gguf")
    refused(lambda: tokens(folder), "several GGUF files", "other.gguf")


def test_safetensors_come_before_gguf(source, tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama").folder, folder)
    shutil.copyfile(source, folder / "model.gguf")
    assert checkpoint_folder(str(folder)) == folder
    assert tokens(folder) == tokens(tiny_model("llama").folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_git_lfs_pointer_in_place_of_a_file(tiny_model, tmp_path, name):
    folder = tmp_path / "model"
    with_words(tiny_model("llama").folder, folder)
    (folder / name).write_text(POINTER)
    refused(lambda: tokens(folder), name, "git-LFS pointer", "git lfs pull")


def test_unused_lfs_pointers_are_ignored(tiny_model, tmp_path):
    folder = tmp_path / "model"
    with_words(tiny_model("llama").folder, folder)
    (folder / "pytorch_model.bin").write_text(POINTER)
    (folder / "model.onnx").write_text(POINTER)
    assert len(tokens(folder)) == 4
    gguf = tmp_path / "model.gguf"
    gguf.write_text(POINTER)
    refused(lambda: tokens(gguf), "git lfs pull")
    refused(lambda: tokens(folder / "model.onnx"), "git lfs pull")


def test_adapter_in_the_folder_warns(tiny_model, tmp_path, caplog):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama").folder, folder)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with caplog.at_level(logging.WARNING):
        tokens(folder)
    message, = [record.getMessage() for record in caplog.records]
    assert "LoRA adapter" in message and "not applied" in message
    (folder / "config.json").unlink()
    refused(lambda: tokens(folder), "LoRA adapter", "no model", "merge_and_unload")


def test_index_may_name_unused_tensors(tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama").folder, folder)
    path = folder / "model.safetensors"
    from flexgen_h2o.models.checkpoint_files import SafetensorsCheckpoint

    with SafetensorsCheckpoint(path) as checkpoint:
        names = [*checkpoint.names()]
    path.rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys([*names, "mtp.layers.0.weight"],
                                         "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tokens(folder) == tokens(tiny_model("llama").folder)
