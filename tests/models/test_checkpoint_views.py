"""Stacked and fused tensors: every view is what indexing gives, from any kind of checkpoint."""

import pytest
import torch
from helpers.error_cases import refused
from hypothesis import given
from hypothesis import strategies as st
from models.test_checkpoint import read
from safetensors.torch import save_file

from flexgen_h2o.models import checkpoint as checkpoints
from flexgen_h2o.models.checkpoint import StackedCheckpoint, View, unstacked
from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.convert import converted_folder

HIDDEN, FFN, EXPERTS = 6, 5, 3


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Stacks as Qwen3-MoE (halves) and gpt-oss (transposed, rows in turn) ship them."""
    shapes = {"halves": (EXPERTS, 2 * FFN, HIDDEN), "turned": (EXPERTS, HIDDEN, 2 * FFN),
            "turns_bias": (EXPERTS, 2 * FFN), "qkv": (4 + 2 + 2, HIDDEN),
            "heads": (5 * (2 + 3), HIDDEN), "plain": (7,)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype)
            for name, shape in shapes.items()}


def views() -> dict[str, tuple[View, ...]]:
    table = {"q": View("qkv", rows=range(4)), "k": View("qkv", rows=range(4, 6)),
             "v": View("qkv", rows=range(6, 8)),
             "of_heads": View("qkv", row_ranges=(range(1, 3), range(5, 8, 2), range(4, 5))),
             "of_bias": View("turns_bias", 1, row_ranges=(range(2), range(4, 6))),
             "of_keys": View("heads", rows=range(2), blocks=5, transposed=True),
             "of_values": View("heads", rows=range(2, 5), blocks=5)}
    for e in range(EXPERTS):
        table[f"{e}.gate"] = View("halves", e, rows=range(FFN))
        table[f"{e}.up"] = View("halves", e, rows=range(FFN, 2 * FFN))
        for offset, part in enumerate(("gate", "up")):
            rows = range(offset, 2 * FFN, 2)
            table[f"{e}.{part}_in_turn"] = View("turned", e, transposed=True, rows=rows)
            table[f"{e}.{part}_bias"] = View("turns_bias", e, rows=rows)
    return {name: (view,) for name, view in table.items()}


def expected(all_tensors: dict[str, torch.Tensor], view: View) -> torch.Tensor:
    whole = all_tensors[view.tensor]
    if view.blocks:
        blocks = whole.unflatten(0, (view.blocks, -1))[:, list(view.rows)]
        return blocks.transpose(1, 2) if view.transposed else blocks
    entry = whole if view.entry is None else whole[view.entry]
    entry = entry.T if view.transposed else entry
    if view.row_ranges:
        return torch.cat([entry[list(rows)] for rows in view.row_ranges])
    return entry if view.rows is None else entry[list(view.rows)]


def save(folder, kind: str, stored: dict[str, torch.Tensor]) -> None:
    if kind == "safetensors":
        save_file(stored, folder / "model.safetensors")
    else:
        torch.save(stored, folder / "pytorch_model.bin")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("scratch", [1, 13, 1 << 20])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_views_equal_indexing(tmp_path, monkeypatch, kind, scratch, out_dtype):
    monkeypatch.setattr(checkpoints, "_SCRATCH_ELEMENTS", scratch)
    stored = tensors()
    save(tmp_path, kind, stored)
    with unstacked(open_checkpoint(tmp_path), views()) as checkpoint:
        assert set(checkpoint.names()) == {"plain", *views()}
        for name, (view,) in views().items():
            assert checkpoint.info(name).shape == expected(stored, view).shape
            assert torch.equal(read(checkpoint, name, out_dtype),
                               expected(stored, view).to(out_dtype)), name
        assert torch.equal(read(checkpoint, "plain"), stored["plain"])


def test_consecutive_rows_have_an_extent(tmp_path):
    stored = tensors()
    save(tmp_path, "safetensors", stored)
    with StackedCheckpoint(open_checkpoint(tmp_path), views()) as checkpoint:
        for name, (view,) in views().items():
            extent = checkpoint.info(name).extent
            assert (extent is None) == (view.transposed or view.blocks > 0 or bool(view.row_ranges)
                                        or view.rows.step > 1), name
            if extent is not None:
                raw = extent.path.read_bytes()[extent.offset : extent.offset + extent.nbytes]
                part = expected(stored, view).contiguous().view(torch.uint8)
                assert raw == part.numpy().tobytes()


def test_views_with_alternative_tensors(tmp_path):
    stored = tensors()
    save(tmp_path, "safetensors", stored)
    places = {"a": (View("elsewhere"), View("qkv", rows=range(1))), "b": (View("elsewhere"),),
              "plain": (View("qkv"),)}
    with StackedCheckpoint(open_checkpoint(tmp_path), places) as checkpoint:
        assert torch.equal(read(checkpoint, "a"), stored["qkv"][:1])
        assert torch.equal(read(checkpoint, "plain"), stored["plain"])
        assert "b" not in checkpoint.names() and "qkv" not in checkpoint.names()
    with open_checkpoint(tmp_path) as checkpoint:
        assert unstacked(checkpoint, {"b": (View("elsewhere"),)}) is checkpoint


@pytest.mark.parametrize("view", [
    View("halves"), View("halves", EXPERTS), View("halves", -1), View("halves", 0, rows=range(11)),
    View("halves", 0, rows=range(-1, 2)), View("halves", 0, rows=range(3, 0, -1)),
    View("plain", 0), View("plain", transposed=True), View("qkv", rows=range(9)),
    View("heads", rows=range(2), blocks=4), View("heads", rows=range(6), blocks=5),
    View("plain", blocks=7)])
def test_invalid_views_are_errors(tmp_path, view):
    save(tmp_path, "safetensors", tensors())
    with StackedCheckpoint(open_checkpoint(tmp_path), {"part": (view,)}) as checkpoint:
        refused(lambda: checkpoint.info("part"), f"tensor {view.tensor} has shape", "no part")


def test_a_converted_copy_holds_single_matrices(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    stored = tensors()
    folder = tmp_path / "model"
    folder.mkdir()
    save(folder, "safetensors", stored)
    (folder / "config.json").write_text("{}")
    copy = converted_folder(folder, "float32", views=views())
    with unstacked(open_checkpoint(copy), views()) as checkpoint:
        assert set(checkpoint.names()) == {"plain", *views()}
        for name, (view,) in views().items():
            info = checkpoint.info(name)
            assert info.extent is not None and info.dtype == torch.float32
            assert torch.equal(read(checkpoint, name), expected(stored, view).float())


@given(data=st.data(), shape=st.tuples(*[st.integers(1, 9)] * 3), turned=st.booleans())
def test_any_view(tmp_path_factory, data, shape, turned):
    folder = tmp_path_factory.mktemp("any")
    whole = torch.arange(shape[0] * shape[1] * shape[2]).view(shape).float()
    save(folder, "safetensors", {"whole": whole})
    height = shape[2] if turned else shape[1]
    start = data.draw(st.integers(0, height - 1))
    stop, step = data.draw(st.integers(start, height)), data.draw(st.integers(1, 3))
    view = View("whole", data.draw(st.integers(0, shape[0] - 1)), turned, range(start, stop, step))
    with StackedCheckpoint(open_checkpoint(folder), {"part": (view,)}) as checkpoint:
        assert torch.equal(read(checkpoint, "part"), expected({"whole": whole}, view))
