"""Blocks of GGUF files: values are bit for bit those of the gguf package, and a quantized matrix of
the same codes differs from them by the rounding of scales and zero points to float16 alone."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as reference
from helpers.gguf_cases import SCALE_PLACES, random_blocks
from helpers.kernel_cases import SETS

from flexgen_h2o.config.weight_layout import BLOCK_TYPES, UNSUPPORTED_TYPES, MatrixLayout
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.reference import blocks as reference_blocks
from flexgen_h2o.kernels.reference import matrix as reference_matrix
from flexgen_h2o.kernels.reference.blocks import dequantize

CODED = {kind.name: kind for kind in BLOCK_TYPES.values() if kind.bits != 16}
EXACT = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"}
NAMES = [kind.name for kind in BLOCK_TYPES.values()]


def test_block_types_equal_those_of_gguf():
    for kind in GGMLQuantizationType:
        known = BLOCK_TYPES.get(int(kind))
        if known is None:
            assert UNSUPPORTED_TYPES[int(kind)] == kind.name
        else:
            assert (known.name, (known.elements, known.nbytes)) == (kind.name,
                                                                    GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes(name):
    """Every byte occurs at every place; infinite and undefined scales are among them."""
    kind = next(kind for kind in BLOCK_TYPES.values() if kind.name == name)
    packed = np.random.default_rng(0).integers(0, 256, (700, 3 * kind.nbytes), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        expected = reference(packed, GGMLQuantizationType[name])
    actual = dequantize(torch.from_numpy(packed), kind)
    assert actual.dtype == torch.float32 and tuple(actual.shape) == (700, 3 * kind.elements)
    exact = actual.view(torch.int32).numpy() == expected.view(np.int32)
    assert np.all(exact | np.isnan(expected) & np.isnan(actual.numpy()))


def test_every_scale_of_mxfp4():
    packed = np.tile(np.arange(17, dtype=np.uint8) * 15, (256, 1))
    packed[:, 0] = np.arange(256)
    expected = reference(packed, GGMLQuantizationType.MXFP4)
    assert np.array_equal(dequantize(torch.from_numpy(packed), BLOCK_TYPES[39]).numpy(), expected)


def unpacked(data: torch.Tensor, layout: MatrixLayout) -> torch.Tensor:
    return reference_matrix.unpack_rows(data, layout, torch.arange(layout.outputs), torch.float32)


def repacked(packed: np.ndarray, name: str, layout: MatrixLayout, order=None) -> torch.Tensor:
    """Return the bytes of a matrix; each differs from the initial ones."""
    results = []
    for fill in (0, 255):
        out = torch.full((layout.nbytes,), fill, dtype=torch.uint8)
        assert ops.repack(packed, CODED[name], layout, out, order)
        results.append(out)
    assert torch.equal(*results)
    return results[0]


@pytest.mark.parametrize("name", CODED)
def test_repacking_keeps_the_codes(name):
    packed = random_blocks(name, 37, 512)
    expected = torch.from_numpy(reference(packed, GGMLQuantizationType[name]))
    layout = CODED[name].layout(37, 512)
    data = repacked(packed, name, layout)
    assert torch.equal(data, reference_blocks.repack(torch.from_numpy(packed), CODED[name], layout))
    actual = unpacked(data, layout)
    if name in EXACT:
        assert torch.equal(actual, expected)
    # |scale * code| + |zero| is at most three times the largest element of a group.
    largest = expected.view(37, -1, layout.group).abs().amax(-1).repeat_interleave(layout.group, 1)
    assert ((actual - expected).abs() <= 2.0**-11 * 3 * largest + 2.0**-19).all()
    assert actual.abs().mean() > 0.05, "nothing to see"


@pytest.mark.parametrize("chosen", SETS)
def test_repacking_is_identical_with_every_isa(chosen, monkeypatch):
    monkeypatch.setenv("FLEXGEN_H2O_ISA", chosen)
    for name, kind in CODED.items():
        packed, layout = random_blocks(name, 19, 256), kind.layout(19, 256)
        assert torch.equal(repacked(packed, name, layout), reference_blocks.repack(
            torch.from_numpy(packed), kind, layout)), name


@pytest.mark.parametrize("name", CODED)
def test_repacking_permuted_rows_and_wider_layouts(name):
    packed, order = random_blocks(name, 24, 256), torch.arange(23, -1, -2)
    layout = CODED[name].layout(12, 256)
    data = repacked(packed, name, layout, order)
    assert torch.equal(data, repacked(packed[order], name, layout))
    wide = MatrixLayout(12, 256, 8, 16)
    assert CODED[name].fits(wide) and not CODED[name].fits(MatrixLayout(12, 256, 8, 64))
    assert CODED[name].fits(MatrixLayout(12, 256, 4, 16)) == (CODED[name].bits == 4
                                                             and name != "MXFP4")
    assert torch.equal(unpacked(repacked(packed, name, wide, order), wide), unpacked(data, layout))


@pytest.mark.parametrize("name", CODED)
def test_padding_is_zeros(name):
    layout = CODED[name].layout(3, 256)
    blocks = repacked(random_blocks(name, 3, 256), name, layout).view(-1, layout.block_bytes)
    halves, head = (2 if layout.has_zeros else 1), layout.head_bytes
    parts = blocks[:, :head].view(len(blocks), halves, 16, -1), blocks[:, head:].view(
        len(blocks), 1, -1, 16, 4).transpose(2, 3)
    for part in parts:
        assert not part[:, :, 3:].any() and part[:, :, :3].any()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 65504.0])
@pytest.mark.parametrize(("name", "place"), [
    (name, place) for name in CODED for place in SCALE_PLACES.get(name, (None,))])
def test_scales_beyond_float16_are_not_repacked(name, place, value):
    """One block of many decides; what its own scale multiplies may still be finite."""
    kind, packed = CODED[name], random_blocks(name, 18, 512)
    block = packed[17, -kind.nbytes :]
    if place is None:
        block[0] = 255  # MXFP4's exponent that is no number
    else:
        block[place : place + 2] = np.array([value], np.float16).view(np.uint8)
    layout = kind.layout(18, 512)
    expected = reference_blocks.repack(torch.from_numpy(packed), kind, layout)
    out = torch.empty(layout.nbytes, dtype=torch.uint8)
    assert ops.repack(packed, kind, layout, out) == (expected is not None)
    assert expected is None or name in ("Q4_1", "Q5_1") and value == 65504.0
