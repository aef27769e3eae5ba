"""Model names become folders: found, fetched (no network here) or converted."""

import fcntl
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from helpers.error_cases import refused
from helpers.gguf_cases import make
from safetensors.torch import load_file, save_file

from flexgen_h2o.files.disk_cache import cache_dir
from flexgen_h2o.models import convert
from flexgen_h2o.models.checkpoint_files import SafetensorsCheckpoint
from flexgen_h2o.models.convert import converted_folder
from flexgen_h2o.models.registry import read_config
from flexgen_h2o.models.sources import checkpoint_folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


def folders(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.is_dir()] if cache.exists() else []


def hf_folder(folder: Path, *, kind: str = "safetensors") -> dict[str, torch.Tensor]:
    folder.mkdir()
    weights = {f"layers.{layer}.{name}": torch.randn(6, 5)
               for layer in range(12) for name in ("w", "v")}
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


@pytest.mark.parametrize("name", ["", "nowhere", "/no/where", "a/b/c", "~nobody/x", "x/y.gguf"])
def test_no_such_folder(name):
    refused(lambda: checkpoint_folder(name), "no such folder", repr(name))


def test_file_that_is_not_gguf_is_an_error(tmp_path):
    (tmp_path / "model.safetensors").touch()
    refused(lambda: checkpoint_folder(str(tmp_path / "model.safetensors")), "not GGUF")
    os.mkfifo(tmp_path / "model.gguf")
    refused(lambda: checkpoint_folder(str(tmp_path / "model.gguf")), "model.gguf is a pipe")


def test_cache_dir(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("FLEXGEN_H2O_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    for base in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert cache_dir() == tmp_path / ".cache" / "flexgen_h2o"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "flexgen_h2o"


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


def test_hub_failures_are_one_line(monkeypatch):
    from huggingface_hub import errors

    for error, word in ((http_error("ConnectError"), "check the network"),
                        (http_error("ConnectTimeout"), "check the network"),
                        (http_error("RepositoryNotFoundError"), "no such model"),
                        (http_error("GatedRepoError"), "HF_TOKEN"),
                        (http_error("HfHubHTTPError"), "404"),
                        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
                        (errors.HFValidationError("bad name"), "bad name"),
                        (OSError(28, "No space left on device"), "No space left")):
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
def test_offline_uses_the_downloaded_snapshot(monkeypatch, tmp_path, kind):
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
        refused(lambda: converted_folder(tmp_path / "mine", "bfloat16"), "No space left",
                "FLEXGEN_H2O_CACHE")
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


def test_killed_conversion_is_repeated(tmp_path, cache):
    hf_folder(tmp_path / "mine")
    child = os.fork()
    if child == 0:
        converted_folder(tmp_path / "mine", "float16", lambda *_: os.kill(os.getpid(), 9))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
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


def test_concurrent_conversions_build_once(tmp_path, cache):
    hf_folder(tmp_path / "mine")
    calls, converted = [], []

    def convert_it():
        converted.append(converted_folder(tmp_path / "mine", "float16",
                                     lambda *call: calls.append(call)))

    threads = [threading.Thread(target=convert_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(converted) == 4 and len(set(converted)) == 1
    assert len(calls) == 25
    assert folders(cache) == [converted[0].name]


# GGUF


def test_gguf_in_another_dtype(tmp_path):
    _, source = make("llama", tmp_path, kind=Kind.Q8_0)
    exact = load_file(checkpoint_folder(str(source)) / "model.safetensors")
    folder = checkpoint_folder(str(source), dtype="bfloat16")
    converted = load_file(folder / "model.safetensors")
    assert all(torch.equal(converted[name], exact[name].bfloat16()) for name in exact)
    assert read_config(folder)["dtype"] == "bfloat16"
    refused(lambda: checkpoint_folder(str(source), dtype="int4"), "int4")


def test_truncated_gguf_leaves_no_files(tmp_path, cache):
    _, source = make("llama", tmp_path)
    raw = source.read_bytes()
    for cut in (b"", raw[:3], raw[:40], raw[:3000], raw[:-4000], b"junk" * 100):
        source.write_bytes(cut)
        refused(lambda: checkpoint_folder(str(source)), source.name)
    assert folders(cache) == []


def test_unknown_rope_factors_are_errors(tmp_path):
    _, source = make("llama 3", tmp_path)
    factors = next(x for x in GGUFReader(source).tensors if x.name == "rope_freqs.weight")
    for wrong in (np.arange(factors.n_elements), 3 * factors.data[::-1]):
        with open(source, "r+b") as file:
            file.seek(int(factors.data_offset))
            file.write(wrong.astype(np.float32).tobytes())
        refused(lambda: checkpoint_folder(str(source)), "rope factors")
