"""Random weights of any shape, for measurements without a checkpoint."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import torch

from flexgen_h2o.config.limits import MATRIX_TILE
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.models.checkpoint import Checkpoint, TensorInfo

# Elements generated at a time: these fit in the L2 cache. Any multiple of 16 gives the same values,
# because torch's normal_ converts uniform numbers in groups of 16.
_BLOCK = 1 << 16
_GROUP = 16
_STD = 0.02
_EXPONENT = 127 - 7  # scales MXFP4's numbers, of standard deviation 2.9, to about _STD


class DummyCheckpoint(Checkpoint):
    """Seeded random weights of any shapes, generated when read.

    Values depend on the seed, the tensor's name and `dtype` only, not on the order of reads, the
    thread or the dtype of the destination. Matrices and biases are N(0, 0.02), weights of norms
    1 + N(0, 0.02). Values are drawn in float32 and rounded to `dtype`. 8- and 4-bit matrices are
    drawn as codes of the same mean and deviation, because quantizing 30 billion values would take
    most of an hour.

    Parameters
    ----------
    tensors : mapping of str to tuple of int
        Names and shapes.
    dtype : torch.dtype
        The stored dtype of the tensors.
    seed : int
        Any integer.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int
    ) -> None:
        self.source = "dummy weights"
        self._dtype, self._seed = dtype, seed
        self._infos = {
            name: TensorInfo(dtype, tuple(shape), None) for name, shape in tensors.items()
        }

    def _fill(self, name: str, info: TensorInfo, out: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(self._seed_of(name))
        is_norm = len(info.shape) == 1 and not name.endswith("bias")
        flat = out.view(-1)
        size = min(_BLOCK, _rounded_up(len(flat)))
        scratch = torch.empty(size, dtype=torch.float32)
        for start in range(0, len(flat), max(1, size)):
            # Draw whole groups and drop the rest: normal_ draws a shorter tail differently, and
            # values would depend on where a block ends.
            count = min(size, len(flat) - start)
            block = scratch[: _rounded_up(count)]
            block.normal_(float(is_norm), _STD, generator=generator)
            drawn = block[:count]
            if out.dtype != self._dtype:
                drawn = drawn.to(self._dtype)
            flat[start : start + count].copy_(drawn)

    def _seed_of(self, name: str) -> int:
        # Python's hash() of a string differs between processes.
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        return int.from_bytes(digest[:7], "little")

    def read_quantized(self, name: str, layout: MatrixLayout, out: torch.Tensor,
                       rows: range | None = None) -> bool:
        if rows is not None or layout.bits == 12:
            return False
        generator = np.random.Generator(np.random.SFC64(self._seed_of(name)))
        drawn = generator.integers(0, 2**64 - 1, layout.nbytes // 8, np.uint64, endpoint=True)
        out.copy_(torch.from_numpy(drawn.view(np.uint8)))
        if layout.mxfp4:
            out.view(-1, layout.block_bytes)[:, : layout.head_bytes] = _EXPONENT
            return True
        # Codes from 0 to `levels` have a deviation of about levels / sqrt(12).
        scale = _STD * math.sqrt(12) / layout.levels
        if layout.compact:
            mantissa, exponent = math.frexp(scale)
            heads = out.view(-1, layout.block_bytes)[:, : layout.head_bytes]
            heads[:, :MATRIX_TILE] = 16 * (exponent - 1 + 14) + round(32 * mantissa - 16)
            heads[:, MATRIX_TILE:] = 8 * layout.levels  # in sixteenths: half of the levels
            return True
        factors = out.view(-1, layout.block_bytes)[:, : 4 * MATRIX_TILE].view(torch.float16)
        factors[:, :MATRIX_TILE] = scale
        factors[:, MATRIX_TILE:] = -scale * layout.levels / 2
        return True


def _rounded_up(count: int) -> int:
    return math.ceil(count / _GROUP) * _GROUP
