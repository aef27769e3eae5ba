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
