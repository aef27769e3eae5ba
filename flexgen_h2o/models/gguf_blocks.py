"""Blocks of a GGUF file as groups of quantized matrices: the same values, packed differently."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from flexgen_h2o.config.formats import MatrixLayout
from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.errors import UserError
from flexgen_h2o.kernels.reference_matrix import assembled
from flexgen_h2o.models.gguf_dequantize import five_bits
from flexgen_h2o.models.gguf_kinds import KEPT, KEPT_GROUP
from flexgen_h2o.models.gguf_reader import read_gguf
from flexgen_h2o.models.gguf_tensors import GgufTensor

# The code of 0, where a block has no zero point of its own.
_MIDDLES = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}
_CHUNK_ELEMENTS = 1 << 18  # repacked at a time: a few MB


class GgufBlocks:
    """Matrices of a GGUF file whose blocks become groups of a quantized matrix, value for value.

    A block holds 32 elements of a row, and starts with a float16 scale d:

    ========  =================================================================================
    ``Q4_0``  16 bytes: element j in the low half of byte j, element j + 16 in its high half;
              d * (code - 8)
    ``Q4_1``  float16 m, then 16 bytes likewise; d * code + m
    ``Q5_0``  the codes' highest bits in 4 bytes, the others as in Q4_0; d * (code - 16)
    ``Q5_1``  float16 m, then likewise; d * code + m
    ``Q8_0``  32 int8; d * code
    ========  =================================================================================

    So a group's scale is d, of either sign, and its zero point m, or -8, -16 or -128 * d with
    codes from 0 on. Source: ggml-common.h and ggml-quants.c of llama.cpp.

    Parameters
    ----------
    source : Path
        A `.gguf` file of an architecture that is known.
    bits : int
        4 (Q4_0 and Q4_1) or 8 (Q5_0, Q5_1 and Q8_0).

    Raises
    ------
    UserError
        If the file is damaged or of another architecture.
    """

    GROUP = KEPT_GROUP

    def __init__(self, source: Path, bits: int):
        self.source = Path(source).resolve()
        self.bits = bits
        _, tensors = read_gguf(self.source)
        self._tensors = {name: tensor for name, tensor in tensors.items()
                         if isinstance(tensor, GgufTensor) and len(tensor.shape) == 2
                         and tensor.kind.name in KEPT[bits]}

    @cached_property
    def names(self) -> frozenset[str]:
        """Hugging Face names of the matrices that `read` gives.

        Not among them is a matrix with a scale or zero point that is infinite or, as float16,
        too large: -8 * d and its like. To know, every block is looked at, once.
        """
        return frozenset(name for name, tensor in self._tensors.items()
                         if all(_is_finite(packed, tensor.kind.name)
                                for packed in _chunks(tensor)))

    def read(self, name: str, layout: MatrixLayout, out: torch.Tensor) -> None:
        """Write a matrix into `out`, in chunks of some rows.

        The rows of query and key projections come in the order of the Hugging Face checkpoint.

        Parameters
        ----------
        name : str
            One of `names`.
        layout : MatrixLayout
            Of the matrix, with this object's bits and `GROUP`.
        out : uint8 Tensor [layout.nbytes]
            On the host.

        Raises
        ------
        UserError
            If the file's matrix is not of layout's outputs and inputs.
        """
        if (layout.bits, layout.group) != (self.bits, self.GROUP):
            raise ValueError(f"blocks of {self.bits} bits in groups of {self.GROUP} do not fit "
                             f"{layout}")
        tensor = self._tensors[name]
        if tensor.shape != (layout.outputs, layout.inputs):
            raise UserError(f"{self.source}: {name} is of shape {list(tensor.shape)}, not "
                            f"{[layout.outputs, layout.inputs]} as its configuration says")
        end = 0
        for packed in _chunks(tensor):
            part = MatrixLayout(len(packed), layout.inputs, layout.bits, layout.group)
            begin, end = end, end + part.nbytes
            out[begin:end] = _repacked(packed, tensor.kind.name, part)


def _chunks(tensor: GgufTensor) -> Iterator[np.ndarray]:
    """Whole tiles of rows (the last may be less), uint8 [rows, groups, bytes of a block]."""
    rows, inputs = tensor.shape
    step = max(1, _CHUNK_ELEMENTS // inputs // MATRIX_TILE) * MATRIX_TILE
    for start in range(0, rows, step):
        packed = tensor.packed(slice(start, start + step))
        yield packed.reshape(len(packed), inputs // GgufBlocks.GROUP, -1)


def _scales_and_zeros(packed: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """float16 [rows, groups] each; a zero point that float16 cannot hold is infinite."""
    scales = packed[..., :2].view(np.float16)[..., 0]
    if kind in ("Q4_1", "Q5_1"):
        return scales, packed[..., 2:4].view(np.float16)[..., 0]
    with np.errstate(over="ignore"):
        return scales, np.float16(-_MIDDLES[kind]) * scales  # exact: a power of two


def _is_finite(packed: np.ndarray, kind: str) -> bool:
    return all(bool(np.isfinite(part).all()) for part in _scales_and_zeros(packed, kind))


def _repacked(packed: np.ndarray, kind: str, layout: MatrixLayout) -> torch.Tensor:
    """Rows of blocks as the bytes of a matrix, uint8 [layout.nbytes]."""
    rows = layout.outputs
    halves = torch.zeros(2, layout.tiles * MATRIX_TILE, layout.groups, dtype=torch.float16)
    halves[:, :rows] = torch.from_numpy(np.stack(_scales_and_zeros(packed, kind)))
    codes = torch.zeros(layout.tiles * MATRIX_TILE, layout.groups, layout.group, dtype=torch.int32)
    if kind == "Q8_0":
        codes[:rows] = torch.from_numpy(packed[..., 2:] ^ 0x80)  # int8 + 128
    elif kind in ("Q5_0", "Q5_1"):
        blocks = torch.from_numpy(np.array(packed)).flatten(0, 1)
        codes[:rows] = five_bits(blocks, 4 if kind == "Q5_1" else 2).view(rows, -1, layout.group)
    else:
        pairs = packed[..., -layout.group // 2 :]
        low, high = codes[:rows].tensor_split(2, dim=-1)
        low.copy_(torch.from_numpy(pairs & 0x0F))
        high.copy_(torch.from_numpy(pairs >> 4))
    return assembled(codes.flatten(1), *halves, layout)
