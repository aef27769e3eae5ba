"""Blocks of GGUF files as values: bit for bit what the gguf package makes of the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as reference

from flexgen_h2o.config.block_types import KINDS, OTHERS
from flexgen_h2o.kernels.reference_blocks import dequantize

NAMES = [kind.name for kind in KINDS.values()]


def test_the_table_is_that_of_gguf():
    for kind in GGMLQuantizationType:
        known = KINDS.get(int(kind))
        if known is None:
            assert OTHERS[int(kind)] == kind.name
        else:
            assert (known.name, (known.elements, known.nbytes)) == (kind.name,
                                                                    GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes(name):
    """Every byte occurs at every place; infinite and undefined scales are among them."""
    kind = next(kind for kind in KINDS.values() if kind.name == name)
    packed = np.random.default_rng(0).integers(0, 256, (700, 3 * kind.nbytes), dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        expected = reference(packed, GGMLQuantizationType[name])
    found = dequantize(torch.from_numpy(packed), kind)
    assert found.dtype == torch.float32 and tuple(found.shape) == (700, 3 * kind.elements)
    exact = found.view(torch.int32).numpy() == expected.view(np.int32)
    assert np.all(exact | np.isnan(expected) & np.isnan(found.numpy()))


def test_every_scale_of_mxfp4():
    packed = np.tile(np.arange(17, dtype=np.uint8) * 15, (256, 1))
    packed[:, 0] = np.arange(256)
    expected = reference(packed, GGMLQuantizationType.MXFP4)
    assert np.array_equal(dequantize(torch.from_numpy(packed), KINDS[39]).numpy(), expected)
