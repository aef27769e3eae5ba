"""Storage layouts of weight matrices, and the block types of GGUF files. No torch."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from flexgen_h2o.config.limits import GROUP_SIZE, MATRIX_TILE, MXFP4_GROUP
from flexgen_h2o.errors import UserError

DTYPES = ("float16", "bfloat16", "float32")
"""Compute dtypes, by PyTorch's names."""

AUTO = "auto"
"""Value of an option that the engine chooses. As `weight_bits` it keeps the quantized values of a
GGUF file, and means 16 for other checkpoints."""

WEIGHT_BITS = (16, 12, 8, 4)
"""Values of `weight_bits`: 16 is the run's dtype, 12 the floats of `MatrixLayout`, 8 and 4 are
quantized."""

INTEGER_BITS = (8, 4)
"""Values of `weight_bits` that quantize to integers. They allow quantized activations, and can keep
the quantized values of a checkpoint."""

MATRIX_BITS = (12, 8, 6, 4)
"""Bit widths of a `MatrixLayout`. 6 bits hold the 5- and 6-bit values of GGUF files."""

_LAYER_NUMBER = re.compile(r"\.([0-9]+)\.")


@dataclass(frozen=True)
class MatrixLayout:
    """The storage layout of a quantized matrix [outputs, inputs], in the order matmuls read it.

    A block holds `MATRIX_TILE` outputs by one group of inputs. Blocks are ordered by tile, then by
    group. The last tile and the last group are padded. The bytes of a block are:

    =======================  ====================================================================
    ``32``                   float16 scales, one for each output
    ``32``                   float16 zero points
    ``64 * words``           uint32 codes [words, TILE]
    =======================  ====================================================================

    A word holds the codes of 32 / bits consecutive inputs of one output. The code of input
    2 * t + side is in the bits from 16 * side + bits * t on, so a shift and a mask extract a pair
    of neighbours. An element is ``zero + scale * code``. Blocks start at multiples of 64 bytes.

    With 6 bits, three words hold 16 inputs. Take the four words that hold them in 8 bits: the bytes
    of the first three are in the lower 6 bits of the three words. Bits 0-1, 2-3 and 4-5 of each
    byte of the fourth are in the upper 2 bits of the same byte of words 0, 1 and 2.

    Compact blocks (4 bits only) begin with 16 bytes of scales and 16 bytes of zero points. Byte b
    is the scale ``(1 + b % 16 / 16) * 2 ** (b // 16 - 14)``, byte z the zero point
    ``-scale * z / 16``.

    In MXFP4 (OCP Microscaling Formats (MX) Specification 1.0) a block begins with 16 bytes in place
    of scales and zero points: the exponent of each output, plus 127. An element is ``number(code) *
    2 ** exponent``. Codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, codes 8 to 15 their negatives.
    Blocks start at multiples of 16 bytes.

    With 12 bits an element is a bfloat16 with an exponent of four bits, relative to the largest
    exponent of its group, which begins the block as in MXFP4. Bit 15 of a code is the sign, bits 0
    to 6 are the mantissa, and bits 7 to 10 the exponent minus the largest one, plus 15. A code with
    no other bit than the sign is 0. Three words hold eight inputs; the code of input 2 * t + side
    is in half `side`. For t < 3 it is in word t. For t = 3 its bits 7 to 10 are in bits 11 to 14 of
    word 0, its sign and bits 4 to 6 in bits 14 and 11 to 13 of word 1, and its bits 0 to 3 in bits
    11 to 14 of word 2.

    Raises `UserError` if bits or group are not supported, or the matrix is empty.
    """

    outputs: int
    inputs: int
    bits: int  # 4, 6, 8 or 12
    group: int = GROUP_SIZE
    """Inputs that share a scale and a zero point; a multiple of 8, with 6 bits of 16."""
    mxfp4: bool = False  # whether elements are MXFP4: 4 bits in groups of 32
    compact: bool = False  # whether scales and zero points have 8 bits each; 4 bits only

    def __post_init__(self) -> None:
        if self.compact and (self.bits != 4 or self.mxfp4):
            raise UserError("cannot quantize with compact scales: use 4 bits")
        if self.mxfp4 and (self.bits, self.group) != (4, MXFP4_GROUP):
            raise UserError(f"cannot quantize to MXFP4 with {self.bits} bits in groups of "
                            f"{self.group}: use 4 and {MXFP4_GROUP}")
        if self.bits not in MATRIX_BITS:
            raise UserError(f"cannot quantize to {self.bits} bits: use 4, 6, 8 or 12")
        step = 16 if self.bits == 6 else 8
        if self.group < step or self.group % step:
            raise UserError(f"cannot quantize groups of {self.group}: use a multiple of {step}")
        if self.outputs < 1 or self.inputs < 1:
            raise UserError(f"cannot quantize a matrix of {self.outputs} x {self.inputs}")

    @property
    def levels(self) -> int:
        """The highest code."""
        return 2**self.bits - 1

    @property
    def has_zeros(self) -> bool:
        """Whether a group has a scale and a zero point, instead of an exponent."""
        return not self.mxfp4 and self.bits != 12

    @property
    def tiles(self) -> int:
        """Tiles of outputs; the last one is padded."""
        return -(-self.outputs // MATRIX_TILE)

    @property
    def groups(self) -> int:
        """Groups of inputs; the last one is padded."""
        return -(-self.inputs // self.group)

    @property
    def words(self) -> int:
        """Words per group of one output."""
        return self.group * self.bits // 32

    @property
    def head_bytes(self) -> int:
        """Bytes of a block that precede its codes."""
        if not self.has_zeros:
            return MATRIX_TILE
        return (2 if self.compact else 4) * MATRIX_TILE

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.head_bytes + 4 * MATRIX_TILE * self.words

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile, which is `MATRIX_TILE` rows."""
        return self.groups * self.block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.tiles * self.tile_bytes


@dataclass(frozen=True)
class WeightOptions:
    """Storage options of a model's matrices. Vectors have the run's dtype."""

    bits: int = 16  # 16 (the run's dtype), 12, 8 or 4
    group: int = GROUP_SIZE  # inputs that share a scale, unless `bits` is 16
    mxfp4: frozenset[tuple[int, ...]] = frozenset()  # shapes of the matrices in MXFP4, with 4 bits
    activation_bits: int = 16
    """Bit width of activations in matmuls with 8- and 4-bit weights: 16 (not quantized) or 8."""
    layouts: Mapping[str, MatrixLayout] = field(default_factory=dict, hash=False)
    """Layouts of single matrices by name. If there are any, the other matrices have the run's
    dtype. With `bits` of 16 these are the layouts of the values of a GGUF file."""
    unquantized_shapes: tuple[tuple[int, int], ...] = ()  # shapes of the other matrices

    @property
    def weight_bits(self) -> int | str:
        """The value of `weight_bits` that leads to these options."""
        return AUTO if self.layouts and self.bits == 16 else self.bits

    @property
    def quantizes(self) -> bool:
        """Whether any matrix is quantized."""
        return self.bits != 16 or bool(self.layouts)

    def layout(self, shape: tuple[int, int], name: str = "") -> MatrixLayout | None:
        """Return the layout of a matrix (outputs, inputs); None for the run's dtype.

        The shape may have a part of the outputs of the matrix `name`.
        """
        if self.layouts:
            layout = self.layouts.get(name)
            if layout is None or layout.outputs == shape[0]:
                return layout
            return replace(layout, outputs=shape[0])
        if self.bits == 16:
            return None
        if tuple(shape) in self.mxfp4:
            return MatrixLayout(*shape, bits=self.bits, group=MXFP4_GROUP, mxfp4=True)
        return MatrixLayout(*shape, bits=self.bits, group=self.group)

    def matrix_bytes(self, shape: tuple[int, int], itemsize: int) -> int:
        """Return the stored bytes of a matrix (outputs, inputs), or of a part of its outputs.

        If matrices of this shape differ, it is their mean, rounded up.
        """
        if self.layouts:
            element_bytes = self._element_bytes(itemsize)
            per_element = element_bytes.get((shape[0], shape[1]))
            if per_element is None:  # a part of the outputs
                per_element = max((nbytes for (_, inputs), nbytes in element_bytes.items()
                                   if inputs == shape[1]), default=itemsize)
            return math.ceil(shape[0] * shape[1] * per_element)
        layout = self.layout(shape)
        return shape[0] * shape[1] * itemsize if layout is None else layout.nbytes

    @cached_property
    def with_largest_layouts(self) -> WeightOptions:
        """The same options, where all matrices of a shape have the largest of their layouts."""
        largest: dict[tuple[int, int], MatrixLayout] = {}
        for layout in self.layouts.values():
            shape = layout.outputs, layout.inputs
            other = largest.get(shape)
            if shape not in self.unquantized_shapes and (
                    other is None or other.nbytes < layout.nbytes):
                largest[shape] = layout
        return replace(self, layouts={str(shape): layout for shape, layout in largest.items()}
                       or self.layouts)

    @property
    def groups(self) -> frozenset[int]:
        """The group sizes of all layouts."""
        if self.layouts:
            return frozenset(layout.group for layout in self.layouts.values())
        return frozenset({self.group, MXFP4_GROUP} if self.mxfp4 else {self.group})

    @cached_property
    def shares(self) -> Mapping[int, float]:
        """The fraction of the matrices' elements by bits, of `WEIGHT_BITS`.

        6 bits, for which no rates are measured, count half as 4 and half as 8.
        """
        if not self.layouts:
            return {self.bits: 1.0}
        elements: dict[int, float] = defaultdict(float)
        for layout in self.layouts.values():
            for bits in (4, 8) if layout.bits == 6 else (layout.bits, layout.bits):
                elements[bits] += layout.outputs * layout.inputs / 2
        for outputs, inputs in self.unquantized_shapes:
            elements[16] += outputs * inputs
        total = sum(elements.values())
        return {bits: count / total for bits, count in elements.items()}

    def slice_layers(self, first: int, last: int) -> WeightOptions:
        """Return the options of decoder layers first:last, and of tensors outside of layers."""
        def inside(name: str) -> bool:
            number = _LAYER_NUMBER.search(name)
            return number is None or first <= int(number[1]) < last

        kept = {name: layout for name, layout in self.layouts.items() if inside(name)}
        return replace(self, layouts=kept) if kept else self

    def _element_bytes(self, itemsize: int) -> Mapping[tuple[int, int], float]:
        """Return the mean bytes per element of the matrices of each shape."""
        means = self._means.get(itemsize)
        if means is None:
            nbytes: Counter[tuple[int, int]] = Counter()
            counts: Counter[tuple[int, int]] = Counter(self.unquantized_shapes)
            for shape, count in counts.items():
                nbytes[shape] += count * math.prod(shape) * itemsize
            for layout in self.layouts.values():
                counts[layout.outputs, layout.inputs] += 1
                nbytes[layout.outputs, layout.inputs] += layout.nbytes
            means = {shape: nbytes[shape] / counts[shape] / math.prod(shape) for shape in counts}
            self._means[itemsize] = means
        return means

    @cached_property
    def _means(self) -> dict[int, Mapping[tuple[int, int], float]]:
        return {}


@dataclass(frozen=True)
class GGMLType:
    """A tensor type of GGUF files: a row is a sequence of blocks of consecutive elements.

    Source: ggml.h and ggml-common.h of llama.cpp. The gguf package has the same sizes, but imports
    numpy.
    """

    name: str  # llama.cpp's name, such as "Q4_K"
    # Elements and bytes of a block.
    elements: int
    nbytes: int
    # The narrowest `MatrixLayout` that holds the codes; 16 and 0 for types without codes.
    bits: int = 16
    group: int = 0
    number: int = 0  # the number of the type in a file

    def layout(self, outputs: int, inputs: int) -> MatrixLayout | None:
        """Return the layout that keeps the codes of a matrix; None for a type without codes."""
        if self.bits == 16:
            return None
        return MatrixLayout(outputs, inputs, self.bits, self.group, mxfp4=self.name == "MXFP4")

    def fits(self, layout: MatrixLayout) -> bool:
        """Return True if a layout holds the codes: enough bits, and groups within the type's."""
        if self.bits == 16 or layout.bits == 12 or layout.mxfp4:
            return layout.mxfp4 and self.name == "MXFP4"
        bits = 8 if self.name == "MXFP4" else self.bits  # as evenly spaced values
        return bits <= layout.bits and self.group % layout.group == 0


_TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18, 4, 32),
    3: GGMLType("Q4_1", 32, 20, 4, 32),
    6: GGMLType("Q5_0", 32, 22, 6, 32),
    7: GGMLType("Q5_1", 32, 24, 6, 32),
    8: GGMLType("Q8_0", 32, 34, 8, 32),
    10: GGMLType("Q2_K", 256, 84, 4, 16),
    11: GGMLType("Q3_K", 256, 110, 4, 16),
    12: GGMLType("Q4_K", 256, 144, 4, 32),
    13: GGMLType("Q5_K", 256, 176, 6, 32),
    14: GGMLType("Q6_K", 256, 210, 6, 16),
    20: GGMLType("IQ4_NL", 32, 18, 8, 32),
    23: GGMLType("IQ4_XS", 256, 136, 8, 32),
    30: GGMLType("BF16", 1, 2),
    39: GGMLType("MXFP4", 32, 17, 4, 32),
}

BLOCK_TYPES: Mapping[int, GGMLType] = MappingProxyType(
    {number: replace(kind, number=number) for number, kind in _TYPES.items()})
"""Supported types, by their number in a file."""

UNSUPPORTED_TYPES: Mapping[int, str] = MappingProxyType({
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
})
"""Names of types that are not supported, for error messages."""
