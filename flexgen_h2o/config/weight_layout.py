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

CODED_BITS = (8, 4)
"""Values of `weight_bits` with quantized integers: these allow quantized activations, and keep the
quantized values of a checkpoint."""

MATRIX_BITS = (12, 8, 6, 4)
"""Bit widths of a `MatrixLayout`. 6 bits hold the 5- and 6-bit values of GGUF files."""

_LAYER_NUMBER = re.compile(r"\.([0-9]+)\.")


@dataclass(frozen=True)
class MatrixLayout:
    """The storage layout of a quantized matrix [outputs, inputs]: block by block, as products read
    it.

    A block holds `MATRIX_TILE` outputs by one group of inputs, and blocks lie by tile, then by
    group. Both the outputs and the last group are filled up. Of a block, byte by byte:

    =======================  ====================================================================
    ``32``                   float16 scales, one for each output
    ``32``                   float16 zero points
    ``64 * words``           uint32 codes [words, TILE]
    =======================  ====================================================================

    Each word holds the codes of 32 / bits consecutive inputs of one output: input 2 * t + side of
    these in the bits from 16 * side + bits * t on. So a shift and a mask make pairs of neighbours
    out of it. An element is ``zero + scale * code``; every block starts at a multiple of 64 bytes.

    With 6 bits, three words hold 16 inputs: the four words that would hold them in 8 bits. Bytes of
    the first three words keep their place in the lower 6 bits; bits 0-1, 2-3 and 4-5 of each byte
    of the fourth word lie in the upper 2 bits of the same byte of words 0, 1 and 2.

    Compact blocks, with 4 bits alone, begin with 16 bytes of scales and 16 of zero points. Byte b
    is the scale ``(1 + b % 16 / 16) * 2 ** (b // 16 - 14)``, byte z the zero point
    ``-scale * z / 16``.

    In MXFP4 (OCP Microscaling Formats (MX) Specification 1.0) a block begins with 16 bytes in place
    of scales and zero points: the exponent of each output, plus 127. An element is ``number(code) *
    2 ** exponent``, where the codes from 0 to 7 stand for 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and those
    from 8 on for their negatives; blocks start at multiples of 16 bytes.

    With 12 bits an element is a bfloat16 whose exponent has four bits: how far it is below that of
    the largest of its group, which stands at the block's beginning as in MXFP4. A code has the
    bfloat16's sign in bit 15 and its mantissa in bits 0 to 6; bits 7 to 10 are its exponent less
    that of the largest, plus 15. A code of nothing but a sign is 0. Eight inputs lie in three
    words, input 2 * t + side in the half `side`: the first three t in these places of word t, and
    of the last t bits 7 to 10 in bits 11 to 14 of word 0, the sign and bits 4 to 6 in bits 14 and
    11 to 13 of word 1, bits 0 to 3 in bits 11 to 14 of word 2.

    Parameters
    ----------
    outputs, inputs : int
    bits : int
        4, 6, 8 or 12.
    group : int
        Inputs that share a scale and a zero point; a multiple of 8, with 6 bits of 16.
    mxfp4 : bool
        Whether elements are MXFP4's: 4 bits in groups of 32.
    compact : bool
        Whether scales and zero points have 8 bits each; with 4 bits alone.

    Raises
    ------
    UserError
        For other bits or groups, and for a matrix without elements.
    """

    outputs: int
    inputs: int
    bits: int
    group: int = GROUP_SIZE
    mxfp4: bool = False
    compact: bool = False

    def __post_init__(self):
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
        """True if a group has a scale and a zero point, False if it has an exponent."""
        return not self.mxfp4 and self.bits != 12

    @property
    def tiles(self) -> int:
        """Tiles of outputs, the last one filled up."""
        return -(-self.outputs // MATRIX_TILE)

    @property
    def groups(self) -> int:
        """Groups of inputs, the last one filled up."""
        return -(-self.inputs // self.group)

    @property
    def words(self) -> int:
        """Words of a group of one output."""
        return self.group * self.bits // 32

    @property
    def head_bytes(self) -> int:
        """Bytes of a block before its codes."""
        if not self.has_zeros:
            return MATRIX_TILE
        return (2 if self.compact else 4) * MATRIX_TILE

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.head_bytes + 4 * MATRIX_TILE * self.words

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile: `MATRIX_TILE` whole rows."""
        return self.groups * self.block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.tiles * self.tile_bytes


@dataclass(frozen=True)
class WeightOptions:
    """Storage options of the matrices of a model. Vectors stay in the run's dtype.

    Attributes
    ----------
    bits : int
        16 (the run's dtype), 12, 8 or 4.
    group : int
        Inputs that share a scale, unless `bits` is 16.
    mxfp4 : frozenset of (outputs, inputs)
        Shapes of the matrices that are in MXFP4, with 4 bits.
    activation_bits : int
        16: products take activations as they are. 8: they round them, for matrices of codes.
    kept : mapping of str to MatrixLayout
        By name the matrices that have layouts of their own; if there are any, the others stay in
        the run's dtype. With 16 `bits`: those of the values of a GGUF file.
    plain : tuple of (outputs, inputs)
        Shapes of these others.
    """

    bits: int = 16
    group: int = GROUP_SIZE
    mxfp4: frozenset[tuple[int, ...]] = frozenset()
    activation_bits: int = 16
    kept: Mapping[str, MatrixLayout] = field(default_factory=dict, hash=False)
    plain: tuple[tuple[int, int], ...] = ()

    @property
    def asked_bits(self) -> int | str:
        """The `weight_bits` by which a user asks for these options."""
        return AUTO if self.kept and self.bits == 16 else self.bits

    @property
    def quantizes(self) -> bool:
        """True if any matrix is not in the run's dtype."""
        return self.bits != 16 or bool(self.kept)

    def layout(self, shape: tuple[int, int], name: str = "") -> MatrixLayout | None:
        """Return the layout of a matrix (outputs, inputs), or of some outputs of the matrix of a
        name; None for the run's dtype."""
        if self.kept:
            own = self.kept.get(name)
            return own if own is None or own.outputs == shape[0] else replace(own, outputs=shape[0])
        if self.bits == 16:
            return None
        if tuple(shape) in self.mxfp4:
            return MatrixLayout(*shape, bits=self.bits, group=MXFP4_GROUP, mxfp4=True)
        return MatrixLayout(*shape, bits=self.bits, group=self.group)

    def matrix_bytes(self, shape: tuple[int, int], itemsize: int) -> int:
        """Return the bytes at rest of a matrix (outputs, inputs): a mean over those of this shape,
        rounded up, where they differ. Of some outputs of a matrix, in proportion."""
        if self.kept:
            bytes_each = self._element_bytes(itemsize).get(tuple(shape))
            if bytes_each is None:  # some outputs
                same = [each for (_, inputs), each in self._element_bytes(itemsize).items()
                        if inputs == shape[1]]
                bytes_each = max(same, default=itemsize)
            return math.ceil(shape[0] * shape[1] * bytes_each)
        layout = self.layout(shape)
        return shape[0] * shape[1] * itemsize if layout is None else layout.nbytes

    @cached_property
    def widest(self) -> WeightOptions:
        """These options with the largest layout of each shape for all matrices of the shape."""
        largest: dict[tuple[int, int], MatrixLayout] = {}
        for layout in self.kept.values():
            shape = layout.outputs, layout.inputs
            held = largest.get(shape)
            if shape not in self.plain and (held is None or held.nbytes < layout.nbytes):
                largest[shape] = layout
        return replace(self, kept={str(shape): layout for shape, layout in largest.items()}
                       or self.kept)

    @property
    def groups(self) -> frozenset[int]:
        """Inputs of a group, in all layouts."""
        if self.kept:
            return frozenset(layout.group for layout in self.kept.values())
        return frozenset({self.group, MXFP4_GROUP} if self.mxfp4 else {self.group})

    @cached_property
    def shares(self) -> Mapping[int, float]:
        """The share of the matrices' elements by bits, of those in `WEIGHT_BITS`. No rates are
        measured for 6 bits: they count half as 4 and half as 8."""
        if not self.kept:
            return {self.bits: 1.0}
        elements: dict[int, float] = defaultdict(float)
        for layout in self.kept.values():
            for bits in (4, 8) if layout.bits == 6 else (layout.bits, layout.bits):
                elements[bits] += layout.outputs * layout.inputs / 2
        for outputs, inputs in self.plain:
            elements[16] += outputs * inputs
        total = sum(elements.values())
        return {bits: count / total for bits, count in elements.items()}

    def part(self, first: int, last: int) -> WeightOptions:
        """Return the options of the decoder layers first:last, and of what is outside of layers."""
        def inside(name: str) -> bool:
            number = _LAYER_NUMBER.search(name)
            return number is None or first <= int(number[1]) < last

        kept = {name: layout for name, layout in self.kept.items() if inside(name)}
        return replace(self, kept=kept) if kept else self

    def _element_bytes(self, itemsize: int) -> Mapping[tuple[int, int], float]:
        """Bytes of an element by shape, a mean over all matrices of the shape."""
        found = self._means.get(itemsize)
        if found is None:
            nbytes: Counter[tuple[int, int]] = Counter()
            counts: Counter[tuple[int, int]] = Counter(self.plain)
            for shape, count in counts.items():
                nbytes[shape] += count * math.prod(shape) * itemsize
            for layout in self.kept.values():
                counts[layout.outputs, layout.inputs] += 1
                nbytes[layout.outputs, layout.inputs] += layout.nbytes
            found = {shape: nbytes[shape] / counts[shape] / math.prod(shape) for shape in counts}
            self._means[itemsize] = found
        return found

    @cached_property
    def _means(self) -> dict[int, Mapping[tuple[int, int], float]]:
        return {}


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
