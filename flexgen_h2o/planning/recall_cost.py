"""The cost of a decode step that recalls: what it reads, and how fast that comes. No torch.

Neither attention nor a disk is as fast over tokens that lie apart as over a cache that is read in
order: `RecallRates` says by how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexgen_h2o.config.formats import CacheOptions
from flexgen_h2o.config.index_layout import IndexLayout
from flexgen_h2o.config.limits import INDEX_TILE, NEAR
from flexgen_h2o.config.page_layout import PageLayout
from flexgen_h2o.planning.hardware import Compute, HostAttentionRates, RecallRates

LEAST_RATIO = 0.1
"""The least that noise leaves of a ratio that is fitted."""


@dataclass(frozen=True)
class RecalledTokens:
    """The tokens of a sequence in one layer.

    Attributes
    ----------
    chosen, cached : float
        How many a new token attends to, and of how many it chooses them.
    kv_heads : int
    record : float
        Bytes of a token's key and value in all KV heads.
    held : float
        Tokens of a KV head that memory holds of a cache on disk.
    """

    chosen: float
    cached: float
    kv_heads: int
    record: float
    held: float = 0.0


def recall_seconds(rates: Compute | HostAttentionRates, recall: RecallRates,
                   tokens: RecalledTokens, *, index: IndexLayout, cache: CacheOptions) -> float:
    """Seconds of a new token's attention by recall, for one sequence in one layer, on a CPU.

    Parameters
    ----------
    rates : Compute or HostAttentionRates
    recall : RecallRates
    tokens : RecalledTokens
    index : IndexLayout
        Of one KV head.
    cache : CacheOptions
    """
    heads, in_order = tokens.kv_heads, rates.decode_attention[16]
    scanned = recall.index_work * heads * tokens.cached * index.tile_bytes / INDEX_TILE
    chosen = tokens.chosen * tokens.record
    return (recall.calls * heads * rates.head_seconds
            + (scanned + (recall.apart - 1) * chosen) / in_order
            + chosen * seconds_per_byte(rates, cache))


def seconds_per_byte(rates: Compute | HostAttentionRates, cache: CacheOptions) -> float:
    """Seconds of decode attention for a byte of a cache, keys and values in proportion."""
    bits = cache.kind_bits
    return sum(each / rates.decode_attention[each] for each in bits) / sum(bits)


def fitted(rates: Compute | HostAttentionRates,
           times: Sequence[tuple[RecalledTokens, float]], *, index: IndexLayout) -> RecallRates:
    """The rates of attention by which `recall_seconds` takes as long as was measured.

    Parameters
    ----------
    rates : Compute or HostAttentionRates
        Of the same machine.
    times : three of (RecalledTokens, float)
        Tokens of a cache of 16 bits, and seconds: few of few cached ones; few of many; more of
        these.
    index : IndexLayout

    Returns
    -------
    RecallRates
        Those of a disk are the default.
    """
    (short, first), (long, second), (most, third) = times
    in_order = rates.decode_attention[16]
    apart = _sensible((third - second) * in_order / ((most.chosen - long.chosen) * most.record))
    scanned = (long.cached - short.cached) * long.kv_heads * index.tile_bytes / INDEX_TILE
    scan = (second - first) * in_order - apart * (long.chosen - short.chosen) * long.record
    found = RecallRates(index_work=_sensible(scan / scanned), apart=apart, calls=0)
    rest = first - recall_seconds(rates, found, short, index=index, cache=CacheOptions())
    return replace(found, calls=_sensible(rest / (short.kv_heads * rates.head_seconds)))


def _sensible(ratio: float) -> float:
    """A ratio that was measured, and noise has not made nothing of."""
    return max(ratio, LEAST_RATIO)


def recalled_reads(recall: RecallRates, tokens: RecalledTokens) -> float:
    """The time of a step's reads from disk, for the tokens that it chooses (`Policy.fetch_chosen`),
    over that of reading the whole cache in order. Attention waits for it: nothing is guessed, since
    the engine guesses only where that is faster."""
    return sum(read_shares(*missing_groups(recall, tokens)))


def missing_tokens(recall: RecallRates, tokens: RecalledTokens) -> float:
    """Chosen tokens of a KV head that fast memory has not.

    They are in proportion to what is chosen; the larger the share that fast memory holds, the
    fewer, and none where that is all.
    """
    share = min(max(tokens.held, 1) / tokens.cached, 1)
    return recall.missed * tokens.chosen * (1 - share) ** 1.5 / math.sqrt(share)


def missing_groups(recall: RecallRates, tokens: RecalledTokens) -> tuple[float, float]:
    """Records with chosen tokens that memory has not, in `NEAR` bytes of the cache on average;
    and the length of a record, over `NEAR`."""
    missing = missing_tokens(recall, tokens)
    layout = PageLayout(tokens.kv_heads, int(tokens.record / tokens.kv_heads), slots=0)
    near = NEAR / layout.token_bytes  # tokens of a head that take so many bytes
    return missing * near / tokens.cached, layout.record_bytes / NEAR


def read_shares(groups: float, length: float) -> tuple[float, float]:
    """Bytes that are read, and requests of `NEAR` bytes each, over the bytes of the whole cache.

    Groups of missing tokens begin anywhere, so many of them in `NEAR` bytes on average, and each
    has `length` times `NEAR` bytes of records. What lies between the end of one and the next is
    longer than `NEAR` with a probability of exp(-groups * (1 + length)), and is read if it is not.
    A longer gap begins another request, which takes as long as reading `NEAR` bytes.
    """
    longer = math.exp(-groups * (1 + length))
    return 1 - (1 + groups) * longer, groups * longer
