"""Types of the tensors in GGUF files: how many elements a block holds, in how many bytes. No torch.

Source: ggml.h and ggml-common.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Kind:
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


KINDS: Mapping[int, Kind] = MappingProxyType({
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    20: Kind("IQ4_NL", 32, 18),
    23: Kind("IQ4_XS", 256, 136),
    30: Kind("BF16", 1, 2),
    39: Kind("MXFP4", 32, 17),
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
