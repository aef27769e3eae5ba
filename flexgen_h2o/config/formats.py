"""Number formats, and storage formats of quantized vectors and matrices. No torch."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.limits import MATRIX_TILE, MXFP4_GROUP
from flexgen_h2o.config.validation import check_number
from flexgen_h2o.errors import UserError

DTYPES = ("float16", "bfloat16", "float32")
"""Formats in which a run computes, by PyTorch's names."""

GROUP = 64
"""The most elements that share a scale and a zero point, unless said otherwise."""

_LAYER_NUMBER = re.compile(r"\.([0-9]+)\.")

WEIGHT_BITS = (16, 12, 8, 4)
"""Of a number in matrices of weights: as a run's dtype is, `MatrixLayout`'s floats, its codes."""

AUTO = "auto"
"""Leaves a choice to the engine. As the bits of weights it keeps a GGUF file's own codes, and is 16
for other checkpoints."""

CODED_BITS = (8, 4)
"""Those of codes: products with these may round activations, and a checkpoint's own may be kept."""

MATRIX_BITS = (12, 8, 6, 4)
"""Bit widths of a `MatrixLayout`. 6 bits hold the 5- and 6-bit values of GGUF files."""

CACHE_BITS = (16, 8, 4)
"""Bits of a cached number: 16 as a run's dtype is, 8 and 4 in groups."""


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
        """The fewest equal groups of an even number of elements, at most `GROUP` each. Vectors of
        64 elements in 4 bits have two, as one would double the error of small models."""
        if self.bits == 4 and self.length == GROUP:
            return 2
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


@dataclass(frozen=True)
class CacheLayout:
    """The records of a compressed cache: those of its keys and those of its values.

    Records of one layout lie in slots ``[keys and values, ..., slots, width]``, as plain vectors
    do. Where keys and values differ in bits, a slot holds both in one record, the key's first:
    ``[1, ..., slots, width]``. So whatever moves slots need not know what is in them.
    """

    keys: GroupLayout
    values: GroupLayout

    @classmethod
    def of(cls, length: int, key_bits: int, value_bits: int | None = None) -> CacheLayout | None:
        """Return the layout of vectors of `length` elements, whose values have the keys' bits
        unless `value_bits` says otherwise; None for 16 bits."""
        value_bits = key_bits if value_bits is None else value_bits
        if key_bits == value_bits == 16:
            return None
        return cls(GroupLayout(length, key_bits), GroupLayout(length, value_bits))

    @cached_property
    def mixed(self) -> bool:
        """True if a slot holds key and value in one record."""
        return self.keys != self.values

    @cached_property
    def kinds(self) -> int:
        """The leading size of slots."""
        return 1 if self.mixed else 2

    @cached_property
    def width(self) -> int:
        """Bytes of a record of a slot: the last size of slots."""
        return self.keys.nbytes + self.values.nbytes if self.mixed else self.keys.nbytes


def split_slots(slots, layout: CacheLayout | None):
    """Return views of the keys and of the values in slots; without a layout, of plain vectors."""
    if layout is None or not layout.mixed:
        return slots[0], slots[1]
    return slots[0][..., : layout.keys.nbytes], slots[0][..., layout.keys.nbytes :]


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
    group: int = GROUP
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
    group: int = GROUP
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
class CacheOptions:
    """Storage options of the cache.

    Attributes
    ----------
    h2o : H2OConfig or None
        None: the full cache.
    bits : int
        Of keys and values: 16 (the run's dtype), 8 or 4. Where `key_bits` and `value_bits` differ
        it becomes their mean.
    attn_sparsity : float
        The share of the values that a new token reads.
    key_bits, value_bits : int or None
        None becomes `bits`.

    Raises
    ------
    UserError
        For values out of range, and for what cannot go together.
    """

    h2o: H2OConfig | None = None
    bits: int = 16
    attn_sparsity: float = 1.0
    key_bits: int | None = None
    value_bits: int | None = None

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            given = getattr(self, name)
            bits = self.bits if given is None else given
            if bits not in CACHE_BITS:
                raise UserError(f"{'cache_bits' if given is None else name} must be 16, 8 or 4, "
                                f"got {bits!r}")
            object.__setattr__(self, name, bits)
        keys, values = self.kind_bits
        if keys != values and 16 in (keys, values):
            raise UserError(f"key_bits {keys} with value_bits {values} is not supported: use 16 "
                            "for both, or 8 or 4 for each")
        object.__setattr__(self, "bits", (keys + values) // 2)
        if self.bits != 16 and self.h2o is not None and self.h2o.simulate:
            raise UserError("simulate masks an exact cache: leave cache_bits at 16")
        check_number("attn_sparsity", self.attn_sparsity, above=0, high=1)
        if self.attn_sparsity < 1 and keys != values:
            raise UserError("attn_sparsity reads keys without their values: give key_bits and "
                            "value_bits the same number, or leave it out")
        if self.attn_sparsity < 1 and self.evicts and self.h2o.of_user().is_full:
            raise UserError("attn_sparsity chooses among all that came before, and layers of this "
                            "model attend to a window: leave it out")
        if self.attn_sparsity < 1 and self.recalls:
            raise UserError("recall chooses what a new token reads: leave attn_sparsity out")
        if self.attn_sparsity < 1 and (self.evicts or self.h2o is not None and self.h2o.simulate):
            raise UserError("attn_sparsity chooses among all that came before, and so nothing may "
                            "be evicted: leave it or h2o out")

    @property
    def kind_bits(self) -> tuple[int, int]:
        """Bits of keys and of values."""
        assert self.key_bits is not None and self.value_bits is not None
        return self.key_bits, self.value_bits

    def layout(self, head_dim: int) -> CacheLayout | None:
        """Return the layout of records; None with 16 bits."""
        return CacheLayout.of(head_dim, *self.kind_bits)

    @property
    def evicts(self) -> bool:
        """True if any token ever goes, if only behind the mask of a simulation."""
        return self.h2o is not None and not self.h2o.is_full

    @property
    def quantizes_keys(self) -> bool:
        """True if keys are stored in fewer bits, in the cache or in the index of recall."""
        return self.bits != 16 or self.recalls

    @property
    def recalls(self) -> bool:
        """True if everything stays, and a new token attends to what it chooses of it."""
        return self.h2o is not None and self.h2o.recall

    @property
    def evicts_chunks(self) -> bool:
        """True if prompts that come in chunks are evicted from after each of them."""
        return self.h2o is not None and self.h2o.evicts_chunks(
            compressed=self.bits != 16)

    @property
    def simulated(self) -> bool:
        """True if eviction, or recall, masks a full cache."""
        return (self.evicts or self.recalls) and self.h2o.simulate

    @property
    def plain(self) -> bool:
        """True if it holds every token just as attention computed it."""
        return not self.evicts and self.bits == 16
