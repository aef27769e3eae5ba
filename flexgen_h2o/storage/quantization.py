"""How quantized vectors lie at rest: one record each, codes and scales together. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.errors import UserError

GROUP = 64
"""The most elements that share a scale and a zero point."""


@dataclass(frozen=True)
class GroupLayout:
    """The record of one vector: its codes, then a scale and a zero point for each group.

    A record is contiguous, so that storage may move, write and overwrite vectors without
    knowing that they are quantized. Byte by byte:

    ===================================  ===================================================
    ``code_bytes``                       uint8 codes; with 4 bits, element i is the low half
                                         of byte i and element i + length / 2 its high half
    ``2 * groups``                       float16 scales
    ``2 * groups``                       float16 zero points
    ===================================  ===================================================

    An element is ``zero + scale * code``.

    Parameters
    ----------
    length : int
        Elements of a vector; even.
    bits : int
        4 or 8.

    Raises
    ------
    UserError
        For any other length or number of bits.
    """

    length: int
    bits: int

    def __post_init__(self):
        if self.bits not in (4, 8):
            raise UserError(f"cannot quantize to {self.bits} bits: use 4 or 8")
        if self.length < 2 or self.length % 2:
            raise UserError(f"cannot quantize vectors of {self.length} elements: an even number "
                            "is needed")

    @property
    def levels(self) -> int:
        """The highest code."""
        return 2**self.bits - 1

    @property
    def groups(self) -> int:
        """The fewest equal groups of an even number of elements, at most `GROUP` each."""
        groups = -(-self.length // GROUP)
        while self.length % (2 * groups):
            groups += 1
        return groups

    @property
    def group(self) -> int:
        """Elements of a group."""
        return self.length // self.groups

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes, rounded up so that the float16 part is aligned."""
        used = self.length * self.bits // 8
        return used + used % 2

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return self.code_bytes + 4 * self.groups


TILE = 16
"""Outputs of a quantized matrix that lie together: the lanes of a vector."""


@dataclass(frozen=True)
class MatrixLayout:
    """How a quantized matrix [outputs, inputs] lies at rest: block by block, as products read it.

    A block holds `TILE` outputs by one group of inputs, and blocks lie by tile, then by group. Both
    the outputs and the last group are filled up. Of a block, byte by byte:

    =======================  ====================================================================
    ``32``                   float16 scales, one for each output
    ``32``                   float16 zero points
    ``64 * words``           uint32 codes [words, TILE]
    =======================  ====================================================================

    Each word holds the codes of 32 / bits consecutive inputs of one output: input 2 * t + side of
    these in the bits from 16 * side + bits * t on. So a shift and a mask make pairs of neighbours
    out of it. An element is ``zero + scale * code``; every block starts at a multiple of 64 bytes.

    Parameters
    ----------
    outputs, inputs : int
    bits : int
        4 or 8.
    group : int
        Inputs that share a scale and a zero point; a multiple of 8.

    Raises
    ------
    UserError
        For other bits or groups, and for a matrix without elements.
    """

    outputs: int
    inputs: int
    bits: int
    group: int = GROUP

    def __post_init__(self):
        if self.bits not in (4, 8):
            raise UserError(f"cannot quantize to {self.bits} bits: use 4 or 8")
        if self.group < 8 or self.group % 8:
            raise UserError(f"cannot quantize groups of {self.group}: use a multiple of 8")
        if self.outputs < 1 or self.inputs < 1:
            raise UserError(f"cannot quantize a matrix of {self.outputs} x {self.inputs}")

    @property
    def levels(self) -> int:
        """The highest code."""
        return 2**self.bits - 1

    @property
    def tiles(self) -> int:
        """Tiles of outputs, the last one filled up."""
        return -(-self.outputs // TILE)

    @property
    def groups(self) -> int:
        """Groups of inputs, the last one filled up."""
        return -(-self.inputs // self.group)

    @property
    def words(self) -> int:
        """Words of a group of one output."""
        return self.group * self.bits // 32

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return 4 * TILE + 4 * TILE * self.words

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile: `TILE` whole rows."""
        return self.groups * self.block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.tiles * self.tile_bytes
