"""Storage layouts of the KV cache and of the key index of recall, and cache options. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flexgen_h2o.config.h2o import INDEX_BITS, H2OConfig
from flexgen_h2o.config.limits import (
    GROUP_SIZE,
    INDEX_TILE,
    MAX_READ_GAP,
    NEWEST_PAGES,
    PAGE,
    READ_BYTES,
)
from flexgen_h2o.config.validation import check_number
from flexgen_h2o.errors import UserError

CACHE_BITS = (16, 8, 4)
"""Bits of a cached element: 16 is the run's dtype, 8 and 4 are quantized in groups."""


@dataclass(frozen=True)
class GroupLayout:
    """The layout of a quantized vector: codes, then a scale and a zero point for each group.

    The bytes of a vector are contiguous, so storage can move and overwrite vectors without knowing
    that they are quantized. They are:

    ===================================  ===================================================
    ``code_bytes``                       uint8 codes; with 4 bits, element i is the low half
                                         of byte i and element i + length / 2 its high half
    ``2 * groups``                       float16 scales
    ``2 * groups``                       float16 zero points
    ===================================  ===================================================

    An element is ``zero + scale * code``.

    Raises `UserError` if the length is odd, or `bits` is not 4 or 8.
    """

    length: int  # elements of the vector; even
    bits: int  # 4 or 8

    def __post_init__(self) -> None:
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
        """Elements per group."""
        return self.length // self.groups

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes, rounded up to align the float16 part."""
        used = self.length * self.bits // 8
        return used + used % 2

    @property
    def nbytes(self) -> int:
        """Bytes of a quantized vector."""
        return self.code_bytes + 4 * self.groups


@dataclass(frozen=True)
class CacheLayout:
    """The layout of keys and values of a quantized cache.

    If keys and values have the same layout, slots are ``[2, ..., slots, width]``, as in a cache of
    plain vectors. Otherwise a slot holds both, the key first: ``[1, ..., slots, width]``. Code
    that moves slots needs no knowledge of their contents.

    Without `values`, the cache is of latent attention: slots ``[1, ..., slots, width]`` hold keys
    only, and a value is the last elements of its key. Plain slots of one kind are alike.
    """

    keys: GroupLayout
    values: GroupLayout | None

    @classmethod
    def from_bits(cls, length: int, key_bits: int, value_bits: int | None = None, *,
                  latent: bool = False) -> CacheLayout | None:
        """Return the layout of vectors of `length` elements; None for 16 bits.

        `value_bits` is `key_bits` by default. A `latent` cache holds keys only.
        """
        value_bits = key_bits if value_bits is None else value_bits
        if key_bits == value_bits == 16:
            return None
        values = None if latent else GroupLayout(length, value_bits)
        return cls(GroupLayout(length, key_bits), values)

    @cached_property
    def mixed(self) -> bool:
        """Whether key and value have different layouts, and lie side by side in a slot."""
        return self.values is not None and self.keys != self.values

    @cached_property
    def kinds(self) -> int:
        """The size of the first axis of slots."""
        return 2 if self.keys == self.values else 1

    @cached_property
    def width(self) -> int:
        """Bytes of a slot: the size of its last axis."""
        if self.values is None or not self.mixed:
            return self.keys.nbytes
        return self.keys.nbytes + self.values.nbytes


def split_slots(slots: Any, layout: CacheLayout | None) -> tuple[Any, ...]:
    """Return views of the keys of slots, and of the values unless they are part of the keys.

    A layout of None means plain vectors.
    """
    if layout is None or not layout.mixed:
        return tuple(slots)
    return slots[0][..., : layout.keys.nbytes], slots[0][..., layout.keys.nbytes :]


@dataclass(frozen=True)
class CacheOptions:
    """Storage options of the cache.

    Raises `UserError` if values are out of range, or options cannot be combined.
    """

    h2o: H2OConfig | None = None  # None: the full cache
    bits: int = 16
    """Bits of keys and values: 16 (the run's dtype), 8 or 4. If `key_bits` and `value_bits` differ,
    it becomes their mean."""
    attn_sparsity: float = 1.0  # the fraction of values that a new token reads
    # None: `bits`.
    key_bits: int | None = None
    value_bits: int | None = None

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            value = getattr(self, name)
            bits = self.bits if value is None else value
            if bits not in CACHE_BITS:
                raise UserError(f"{'cache_bits' if value is None else name} must be 16, 8 or 4, "
                                f"got {bits!r}")
            object.__setattr__(self, name, bits)
        keys, values = self.kind_bits
        if keys != values and 16 in (keys, values):
            raise UserError(f"key_bits {keys} with value_bits {values} is not supported: use 16 "
                            "for both, or 8 or 4 for each")
        object.__setattr__(self, "bits", (keys + values) // 2)
        if self.bits != 16 and self.h2o is not None and self.h2o.simulate:
            raise UserError("simulate masks an exact cache: leave cache_bits at 16")
        check_number("attn_sparsity", self.attn_sparsity, gt=0, le=1)
        if self.attn_sparsity < 1 and keys != values:
            raise UserError("attn_sparsity reads keys without their values: give key_bits and "
                            "value_bits the same number, or leave it out")
        if (self.h2o is not None and self.attn_sparsity < 1 and self.evicts
                and self.h2o.without_windows().is_full):
            raise UserError("attn_sparsity selects among all earlier tokens, and layers of this "
                            "model attend to a window: leave it out")
        if self.attn_sparsity < 1 and self.recalls:
            raise UserError("recall chooses what a new token reads: leave attn_sparsity out")
        if self.attn_sparsity < 1 and (self.evicts or self.h2o is not None and self.h2o.simulate):
            raise UserError("attn_sparsity selects among all earlier tokens, so nothing may "
                            "be evicted: leave it or h2o out")

    @property
    def kind_bits(self) -> tuple[int, int]:
        """Bits of keys, and bits of values."""
        assert self.key_bits is not None and self.value_bits is not None
        return self.key_bits, self.value_bits

    def layout(self, head_dim: int, *, latent: bool = False) -> CacheLayout | None:
        """Return the layout of slots; None for 16 bits. See `CacheLayout` for `latent`."""
        return CacheLayout.from_bits(head_dim, *self.kind_bits, latent=latent)

    @property
    def evicts(self) -> bool:
        """Whether tokens are evicted, or masked by the simulation of eviction."""
        return self.h2o is not None and not self.h2o.is_full

    @property
    def quantizes_keys(self) -> bool:
        """Whether keys are quantized, in the cache or in the index of recall."""
        return self.bits != 16 or self.recalls

    @property
    def recalls(self) -> bool:
        """Whether nothing is evicted, and a new token attends to selected tokens."""
        return self.h2o is not None and self.h2o.recall

    @property
    def evicts_chunks(self) -> bool:
        """Whether chunked prefill evicts after each chunk."""
        return self.h2o is not None and self.h2o.evicts_chunks(
            compressed=self.bits != 16)

    @property
    def simulated(self) -> bool:
        """Whether eviction or recall is simulated by a mask over a full cache."""
        return self.h2o is not None and (self.evicts or self.recalls) and self.h2o.simulate

    @property
    def is_unquantized_full(self) -> bool:
        """Whether the cache holds all tokens, unquantized."""
        return not self.evicts and self.bits == 16


@dataclass(frozen=True)
class IndexLayout:
    """The layout of the quantized key index of recall: tiles of `INDEX_TILE` tokens of a KV head.

    In a tile the elements of all tokens are adjacent, so a SIMD lane computes with one key, and
    there are no reductions across lanes. The bytes of a tile are:

    =============================  ===========================================================
    ``length * bits / 8`` rows     of `INDEX_TILE` bytes, one a token: row i holds elements
                                   ``per_byte * i`` and those behind it, the first in the lowest
                                   bits
    ``groups`` rows                of `INDEX_TILE` float16 scales
    ``groups`` rows                of `INDEX_TILE` float16 zero points
    =============================  ===========================================================

    An element is ``zero + scale * code``. Groups are as in `GroupLayout`.

    Raises `UserError` if `bits` is not 4 or 2, or groups do not fill whole bytes.
    """

    length: int  # elements of a key
    bits: int  # 4 or 2

    def __post_init__(self) -> None:
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
        """Codes per byte."""
        return 8 // self.bits

    @property
    def groups(self) -> int:
        """Groups of a key."""
        return GroupLayout(self.length, 4).groups

    @property
    def group(self) -> int:
        """Elements per group."""
        return self.length // self.groups

    @property
    def code_rows(self) -> int:
        """Rows of codes per tile."""
        return self.length // self.per_byte

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return INDEX_TILE * (self.code_rows + 4 * self.groups)

    def tiles(self, tokens: int) -> int:
        """Return the number of tiles for a number of tokens."""
        return -(-tokens // INDEX_TILE)

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of the index of one KV head for a number of tokens."""
        return self.tiles(tokens) * self.tile_bytes


@dataclass(frozen=True)
class PageLayout:
    """The layout on disk of a layer's cache with recall: pages [sequences, kv_heads, head_pages].

    A page holds the keys and values of adjacent tokens of one KV head, padded to a multiple of
    `PAGE` bytes; key and value of a token are adjacent. The pages of a head are contiguous in token
    order, because the misses of a head are often close together.
    """

    kv_heads: int
    token_bytes: int  # bytes of key and value of a token of one head
    slots: int  # maximum tokens of a sequence

    @property
    def page_tokens(self) -> int:
        """Tokens per page."""
        return max(1, PAGE // self.token_bytes)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return -(-self.page_tokens * self.token_bytes // PAGE) * PAGE

    @property
    def head_pages(self) -> int:
        """Pages per KV head of a sequence."""
        return -(-self.slots // self.page_tokens)

    @property
    def gap(self) -> int:
        """Maximum number of unneeded pages between two that one request reads."""
        return MAX_READ_GAP // self.page_bytes

    @property
    def max_read_pages(self) -> int:
        """Maximum pages per read request."""
        return max(1, READ_BYTES // self.page_bytes)

    @property
    def sequence_bytes(self) -> int:
        """Bytes per sequence."""
        return self.kv_heads * self.head_pages * self.page_bytes

    @property
    def newest(self) -> int:
        """Maximum number of newest tokens that are also in memory."""
        return NEWEST_PAGES * self.page_tokens

    def first_recent_token(self, cached: int) -> int:
        """Return the first of the newest tokens, for a number of cached tokens."""
        return max(0, (cached // self.page_tokens - NEWEST_PAGES + 1) * self.page_tokens)
