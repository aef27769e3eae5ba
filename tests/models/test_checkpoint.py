"""Checkpoints: read values equal the written ones; damaged files are errors in one line."""

import json
import os
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.error_cases import refused
from safetensors.torch import load_file, save_file

from flexgen_h2o.models import checkpoint_files
from flexgen_h2o.models.checkpoint import Checkpoint, resolve
from flexgen_h2o.models.checkpoint_files import (
    BinCheckpoint,
    DummyCheckpoint,
    SafetensorsCheckpoint,
    open_checkpoint,
)
from flexgen_h2o.models.safetensors_io import write_safetensors

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    floats = {
        f"w_{str(dtype).removeprefix('torch.')}": torch.randn(7, 5, generator=generator).to(dtype)
        for dtype in FLOATS}
    return floats | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4),
                     "ids": torch.arange(3)}


def read(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    info = checkpoint.info(name)
    out = torch.full(info.shape, float("nan"), dtype=dtype or info.dtype)
    checkpoint.read(name, out)
    return out


def save_sharded(folder: Path, kind: str = "model.safetensors") -> dict[str, torch.Tensor]:
    stem, suffix = kind.rsplit(".", 1)
    save = save_file if suffix == "safetensors" else torch.save
    weights, shards = {}, {}
    for number in (1, 2):
        shard = f"{stem}-0000{number}-of-00002.{suffix}"
        part = {f"layer.{number}.w": torch.randn(4, 3), f"layer.{number}.b": torch.randn(3)}
        save(part, folder / shard)
        weights |= part
        shards |= dict.fromkeys(part, shard)
    write_index(folder, shards, kind)
    return weights


def write_index(folder: Path, shards: dict[str, str], kind: str = "model.safetensors") -> None:
    (folder / f"{kind}.index.json").write_text(json.dumps({"weight_map": shards}))


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("chunk_bytes", [8, 4 << 20])
def test_safetensors_reads_and_converts(tmp_path, monkeypatch, out_dtype, chunk_bytes):
    monkeypatch.setattr(checkpoint_files, "_CONVERT_BYTES", chunk_bytes)
    save_file(tensors(), tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == set(tensors())
        for name, tensor in tensors().items():
            assert checkpoint.info(name).dtype == tensor.dtype
            assert checkpoint.info(name).shape == tuple(tensor.shape)
            if tensor.is_floating_point():
                assert torch.equal(read(checkpoint, name, out_dtype), tensor.to(out_dtype))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_tensor_data_at_odd_offsets(tmp_path, out_dtype):
    weight = torch.randn(33, 3).bfloat16()
    data = b"x" + weight.view(torch.uint8).numpy().tobytes()
    header = {"pad": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
              "w": {"dtype": "BF16", "shape": [33, 3], "data_offsets": [1, len(data)]}}
    text = json.dumps(header)
    text = (text + " " * (len(text) % 2)).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.info("w").extent.offset % 2 == 1
        assert torch.equal(read(checkpoint, "w", out_dtype), weight.to(out_dtype))


def test_read_checks_its_output_tensor(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        for out in (torch.empty(5, 7), torch.empty(5, 7).t(), torch.empty(7, 5, dtype=torch.int32),
                    torch.empty(7, 5, device="meta")):
            with pytest.raises(ValueError, match="w_float32"):
                checkpoint.read("w_float32", out)
        with pytest.raises(KeyError):
            checkpoint.read("nothing", torch.empty(1))
        refused(lambda: checkpoint.read("ids", torch.empty(3)), "ids", "int64", "float32")


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_sharded(tmp_path, kind):
    weights = save_sharded(tmp_path, kind)
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == set(weights)
        for name in [*reversed(weights), *weights]:  # back and forth between shards
            assert torch.equal(read(checkpoint, name), weights[name])


@pytest.mark.parametrize("keep", [0, 5, 20, -1, -30])
def test_truncated_shard(tmp_path, keep):
    save_sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:keep])
    missing = {0: 8, 5: 3, -1: 1, -30: 30}.get(keep)
    words = f"{missing} bytes" if missing else "bytes are missing"
    refused(lambda: SafetensorsCheckpoint(tmp_path), shard.name, "truncated", words)


def test_shard_truncated_after_it_was_opened(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        with open(tmp_path / "model.safetensors", "r+b") as file:
            file.truncate(checkpoint.info("w_float32").extent.offset + 100)
        refused(lambda: read(checkpoint, "w_float32"), "model.safetensors", "40 bytes")


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_missing_shard(tmp_path, kind):
    save_sharded(tmp_path, kind)
    shard = next(tmp_path.glob("*-00002-of-*"))
    shard.unlink()
    refused(lambda: open_checkpoint(tmp_path), "missing shard", shard.name)


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("place", ["../{}", "/tmp/{}", "a/../../{}", "..\\{}", "C:\\{}",
                                   "\\\\host\\{}", "{}\0y", ""])
def test_index_naming_a_shard_outside_the_folder(tmp_path, kind, place):
    folder = tmp_path / "model"
    folder.mkdir()
    save = save_file if kind.endswith("safetensors") else torch.save
    save({"w": torch.ones(1)}, tmp_path / kind)
    write_index(folder, {"w": place.format(kind)}, kind)
    refused(lambda: open_checkpoint(folder), "outside", "index.json")


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_tensor_missing_from_its_shard_is_an_error(tmp_path, kind):
    save_sharded(tmp_path, kind)
    shard = next(tmp_path.glob("*-00001-of-*")).name
    write_index(tmp_path, {"layer.1.w": shard, "ghost": shard}, kind)
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == {"layer.1.w"}
        ghost = SimpleNamespace(name="ghost", shape=(1,))
        refused(lambda: resolve(checkpoint, [ghost], lambda name: (name,)), "ghost", shard, "index")


def test_written_file_is_read_by_safetensors_and_aligned(tmp_path):
    written = {name: tensor for name, tensor in tensors().items() if name != "ids"}
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in written.items()}
    calls = []
    write_safetensors(tmp_path / "model.safetensors", layout,
                      lambda name: written[name].reshape(-1).split(4), progress=lambda done,
                      total: calls.append((done, total)))
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in written.items())
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == set(written)
        assert min(checkpoint.info(name).extent.offset for name in written) % 64 == 0
    assert calls[-1][0] == calls[-1][1] == sum(t.nbytes for t in written.values())
    with pytest.raises(ValueError, match="off"):
        write_safetensors(tmp_path / "short", layout, lambda name: written[name].reshape(-1)[:3])


def test_bin(tmp_path):
    weights = {**tensors(), "strided": torch.arange(12.0).view(3, 4).t(), "note": "not a tensor"}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        assert isinstance(checkpoint, BinCheckpoint)
        assert set(checkpoint.names()) == set(weights) - {"note"}
        for name in set(checkpoint.names()) - {"ids"}:
            assert checkpoint.info(name).extent is None
            assert torch.equal(read(checkpoint, name, torch.bfloat16), weights[name].bfloat16())


def test_cut_bin_is_an_error_and_not_a_signal(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.randn(200, 50), "strided": torch.randn(200, 50).t()}, path)
    with open_checkpoint(tmp_path) as checkpoint:
        read(checkpoint, "w")  # from now on the file is mapped
        os.truncate(path, 4096)
        for name in checkpoint.names():
            refused(lambda name=name: read(checkpoint, name), path.name, "has been cut")
            refused(lambda name=name: checkpoint.read_part(name, 5000, torch.empty(100)),
                    path.name, "has been cut")


class Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_hostile_pickle_is_not_run(tmp_path, zipped, sharded):
    mark = tmp_path / "executed"
    file = tmp_path / ("pytorch_model-00001-of-00001.bin" if sharded else "pytorch_model.bin")
    if zipped:
        torch.save({"w": Hostile(mark)}, file)
    else:
        file.write_bytes(pickle.dumps({"w": Hostile(mark)}))
    if sharded:
        write_index(tmp_path, {"w": file.name}, "pytorch_model.bin")
    refused(lambda: open_checkpoint(tmp_path), file.name, "not loaded")
    assert not mark.exists()


@pytest.mark.parametrize("change", [
    lambda raw: b"", lambda raw: b"junk", lambda raw: b"PK\x03\x04junk", lambda raw: raw[:1000]])
def test_damaged_bin(tmp_path, change):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.ones(500)}, path)
    path.write_bytes(change(path.read_bytes()))
    refused(lambda: open_checkpoint(tmp_path), "pytorch_model.bin", "safetensors")
    torch.save([torch.ones(1)], path)
    refused(lambda: open_checkpoint(tmp_path), "pytorch_model.bin", "list")


def test_open_checkpoint_chooses(tmp_path):
    refused(lambda: open_checkpoint(tmp_path), "model.safetensors", "pytorch_model.bin")
    refused(lambda: open_checkpoint(tmp_path / "none"), "no such folder")
    torch.save({"w": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with open_checkpoint(path) as checkpoint:
            assert read(checkpoint, "w").item() == 1
    with open_checkpoint(tmp_path / "pytorch_model.bin") as checkpoint:
        assert read(checkpoint, "w").item() == 0


def test_files_are_closed(tmp_path):
    save_sharded(tmp_path)

    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    with open_checkpoint(tmp_path):
        assert count() == before + 2
    assert count() == before
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"")
    refused(lambda: open_checkpoint(tmp_path), "truncated")
    assert count() == before


def test_dummy_does_not_depend_on_order_threads_or_blocks(monkeypatch):
    shapes = {"a.weight": (301, 257), "b.weight": (70_001,), "b.bias": (5,), "none": (0, 3)}
    shapes |= {f"layer.{i}.weight": (64, 67) for i in range(6)}
    first = {
        name: read(DummyCheckpoint(shapes, torch.float32, 7), name) for name in reversed(shapes)}
    checkpoint, threaded = DummyCheckpoint(shapes, torch.float32, 7), {}
    threads = [
        threading.Thread(target=lambda n=name: threaded.update({n: read(checkpoint, n)}))
        for name in shapes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(checkpoint_files, "_BLOCK", 48)
    for name in shapes:
        assert torch.equal(first[name], threaded[name])
        assert torch.equal(first[name], read(checkpoint, name))
    other = DummyCheckpoint(shapes, torch.float32, 8)
    assert not torch.equal(read(other, "b.bias"), first["b.bias"])
    assert not torch.equal(first["layer.0.weight"], first["layer.1.weight"])


def test_dummy_distribution_and_rounding():
    shapes = {"x.weight": (400, 500), "norm.weight": (200_000,), "x.bias": (200_000,)}
    exact = DummyCheckpoint(shapes, torch.float32, -1)
    rounded = DummyCheckpoint(shapes, torch.bfloat16, -1)
    for name, mean in (("x.weight", 0.0), ("norm.weight", 1.0), ("x.bias", 0.0)):
        values = read(exact, name)
        assert abs(values.mean().item() - mean) < 3e-4
        assert abs(values.std().item() - 0.02) < 3e-4
        assert rounded.info(name).dtype == torch.bfloat16
        assert torch.equal(read(rounded, name, torch.float32), values.bfloat16().float())
        assert torch.equal(read(rounded, name), values.bfloat16())
        assert torch.equal(read(rounded, name, torch.float16), values.bfloat16().to(torch.float16))


def test_resolve():
    checkpoint = DummyCheckpoint({"model.w": (2, 3), "v": (4,)}, torch.float32, 0)

    def wanted(**shapes):
        return [SimpleNamespace(name=name, shape=shape) for name, shape in shapes.items()]

    def aliases(name):
        return name, f"model.{name}"

    actual = resolve(checkpoint, wanted(w=(2, 3), v=(4,)), aliases)
    assert actual == {"w": "model.w", "v": "v"}
    refused(lambda: resolve(checkpoint, wanted(u=(1,)), aliases), "tensor u", "model.u")
    refused(lambda: resolve(checkpoint, wanted(w=(3, 2)), aliases), "model.w", "[2, 3]", "[3, 2]")
