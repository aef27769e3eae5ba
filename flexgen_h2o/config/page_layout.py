"""The layout on disk of a cache that is recalled. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.config.limits import NEAR, NEWEST_RECORDS, PAGE, READ_BYTES


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
