"""Storage layouts of the KV cache and of the key index of recall, and cache options. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flexgen_h2o.config.h2o import INDEX_BITS, H2OConfig
from flexgen_h2o.config.limits import (
    GROUP_SIZE,
    INDEX_TILE,
    NEAR,
    NEWEST_RECORDS,
    PAGE,
    READ_BYTES,
)
from flexgen_h2o.config.validation import check_number
from flexgen_h2o.errors import UserError

CACHE_BITS = (16, 8, 4)
"""Bits of a cached element: 16 is the run's dtype, 8 and 4 are quantized in groups."""


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
        """The fewest equal groups of an even number of elements, at most `GROUP_SIZE` each.

        Vectors of 64 elements in 4 bits have two: one would double the error of small models.
        """
        if self.bits == 4 and self.length == GROUP_SIZE:
            return 2
        groups = -(-self.length // GROUP_SIZE)
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


@dataclass(frozen=True)
class IndexLayout:
    """The layout of an index: tiles of `INDEX_TILE` neighbouring tokens of a KV head.

    In a tile the numbers of all tokens lie side by side, so that a query meets as many keys as a
    vector has lanes and nothing is added up across lanes. Byte by byte:

    =============================  ===========================================================
    ``length * bits / 8`` rows     of `INDEX_TILE` bytes, one a token: row i holds elements
                                   ``per_byte * i`` and those behind it, the first in the lowest
                                   bits
    ``groups`` rows                of `INDEX_TILE` float16 scales
    ``groups`` rows                of `INDEX_TILE` float16 zero points
    =============================  ===========================================================

    An element is ``zero + scale * code``. Groups are those of `GroupLayout`.

    Parameters
    ----------
    length : int
        Elements of a key.
    bits : int
        4 or 2.

    Raises
    ------
    UserError
        For other bits, and for keys whose groups do not fill bytes.
    """

    length: int
    bits: int

    def __post_init__(self):
        if self.bits not in INDEX_BITS:
            raise UserError(f"an index has 4 or 2 bits, not {self.bits}")
        if self.group % self.per_byte:
            raise UserError(f"cannot index keys of {self.length} elements in {self.bits} bits: "
                            "groups would not fill bytes; index_bits 4 has smaller ones")

    @property
    def levels(self) -> int:
        """The highest code."""
        return 2**self.bits - 1

    @property
    def per_byte(self) -> int:
        """Codes in a byte."""
        return 8 // self.bits

    @property
    def groups(self) -> int:
        """Groups of a key, each with a scale and a zero point."""
        return GroupLayout(self.length, 4).groups

    @property
    def group(self) -> int:
        """Elements of a group."""
        return self.length // self.groups

    @property
    def code_rows(self) -> int:
        """Rows of codes in a tile."""
        return self.length // self.per_byte

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return INDEX_TILE * (self.code_rows + 4 * self.groups)

    def tiles(self, tokens: int) -> int:
        """Tiles that hold so many tokens."""
        return -(-tokens // INDEX_TILE)

    def nbytes(self, tokens: int) -> int:
        """Bytes of the index of so many tokens of one KV head."""
        return self.tiles(tokens) * self.tile_bytes


@dataclass(frozen=True)
class PageLayout:
    """The layout of a layer's cache: [sequences, kv_heads, rows] records of whole pages.

    A record holds key and value of some neighbouring tokens of one KV head, those of a token side
    by side; what is left of its last page is empty. Those of a head lie together, in the order of
    its tokens: what a head misses has neighbours that it misses too, other heads miss others.

    Attributes
    ----------
    kv_heads : int
    token_bytes : int
        Key and value of a token in one head.
    slots : int
        Tokens of a sequence, at most.
    """

    kv_heads: int
    token_bytes: int
    slots: int

    @property
    def tokens(self) -> int:
        """Tokens of a record."""
        return max(1, PAGE // self.token_bytes)

    @property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return -(-self.tokens * self.token_bytes // PAGE) * PAGE

    @property
    def rows(self) -> int:
        """Records of a KV head of a sequence."""
        return -(-self.slots // self.tokens)

    @property
    def gap(self) -> int:
        """Records between two that are read with them, at most."""
        return NEAR // self.record_bytes

    @property
    def most(self) -> int:
        """Records that one request reads, at most."""
        return max(1, READ_BYTES // self.record_bytes)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of a sequence."""
        return self.kv_heads * self.rows * self.record_bytes

    @property
    def newest(self) -> int:
        """The newest tokens that memory holds, at most."""
        return NEWEST_RECORDS * self.tokens

    def first_newest(self, cached: int) -> int:
        """The first of the newest tokens, if so many are cached."""
        return max(0, (cached // self.tokens - NEWEST_RECORDS + 1) * self.tokens)
