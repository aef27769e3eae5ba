"""Types of the tensors in GGUF files: blocks of consecutive elements, and the layout that keeps
their codes. No torch.

Source: ggml.h and ggml-common.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from flexgen_h2o.config.formats import MatrixLayout


@dataclass(frozen=True)
class BlockType:
    """A type of tensor: consecutive elements of a row in blocks of one size.

    Attributes
    ----------
    name : str
        llama.cpp's name, such as "Q4_K".
    elements, nbytes : int
        Elements and bytes of a block.
    bits, group : int
        The narrowest `MatrixLayout` that holds the codes; 16 and 0 for types without codes.
    number : int
        The number of the type in a file.
    """

    name: str
    elements: int
    nbytes: int
    bits: int = 16
    group: int = 0
    number: int = 0

    def layout(self, outputs: int, inputs: int) -> MatrixLayout | None:
        """Return the layout that keeps the codes of a matrix; None for a type without codes."""
        if self.bits == 16:
            return None
        return MatrixLayout(outputs, inputs, self.bits, self.group, mxfp4=self.name == "MXFP4")

    def fits(self, layout: MatrixLayout) -> bool:
        """Return True if a layout holds the codes: no fewer bits, and groups that divide these."""
        if self.bits == 16 or layout.bits == 12 or layout.mxfp4:
            return layout.mxfp4 and self.name == "MXFP4"
        bits = 8 if self.name == "MXFP4" else self.bits  # its numbers are evenly spaced codes then
        return bits <= layout.bits and self.group % layout.group == 0


_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18, 4, 32),
    3: BlockType("Q4_1", 32, 20, 4, 32),
    6: BlockType("Q5_0", 32, 22, 6, 32),
    7: BlockType("Q5_1", 32, 24, 6, 32),
    8: BlockType("Q8_0", 32, 34, 8, 32),
    10: BlockType("Q2_K", 256, 84, 4, 16),
    11: BlockType("Q3_K", 256, 110, 4, 16),
    12: BlockType("Q4_K", 256, 144, 4, 32),
    13: BlockType("Q5_K", 256, 176, 6, 32),
    14: BlockType("Q6_K", 256, 210, 6, 16),
    20: BlockType("IQ4_NL", 32, 18, 8, 32),
    23: BlockType("IQ4_XS", 256, 136, 8, 32),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17, 4, 32),
}

KINDS: Mapping[int, BlockType] = MappingProxyType(
    {number: replace(kind, number=number) for number, kind in _TYPES.items()})
"""The supported types by their number in a file."""

OTHERS: Mapping[int, str] = MappingProxyType({
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
})
"""Names of the types that are not supported, for messages."""
