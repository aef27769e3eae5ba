"""Types of the tensors in GGUF files: how many elements a block holds, in how many bytes. No torch.

Source: ggml.h and ggml-common.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class BlockType:
    """A type of tensor: consecutive elements of a row in blocks of one size.

    Attributes
    ----------
    name : str
        As llama.cpp has it, such as "Q4_K".
    elements, nbytes : int
        Of a block.
    """

    name: str
    elements: int
    nbytes: int


KINDS: Mapping[int, BlockType] = MappingProxyType({
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
})
"""The types that are read, by the number that stands in the file."""

OTHERS: Mapping[int, str] = MappingProxyType({
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
})
"""Names of the types that are not, for messages."""

KEPT: Mapping[int, frozenset[str]] = MappingProxyType({
    4: frozenset({"Q4_0", "Q4_1"}),
    8: frozenset({"Q8_0", "Q5_0", "Q5_1"}),
})
"""Types whose codes are kept in quantized weights, by the bits of these. Their groups are of
`KEPT_GROUP` elements."""

KEPT_GROUP = 32
