"""The storage layout of the index of keys that recall chooses by. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.config.formats import GroupLayout
from flexgen_h2o.config.h2o import INDEX_BITS
from flexgen_h2o.config.limits import INDEX_TILE, NEAR, NEWEST_RECORDS, PAGE, READ_BYTES
from flexgen_h2o.errors import UserError


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


# The layout on disk of a cache that is recalled. No torch.


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
