"""The cost of a decode step that recalls: what it reads, and how fast that comes. No torch.

Neither attention nor a disk is as fast over tokens that lie apart as over a cache that is read in
order: `RecallRates` says by how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexgen_h2o.config.cache_layout import CacheOptions, IndexLayout, PageLayout
from flexgen_h2o.config.limits import INDEX_TILE, NEAR
from flexgen_h2o.h2o.budget import cached, hot_slots, recalled
from flexgen_h2o.planning.hardware import ComputeRates, HostAttentionRates, RecallRates
from flexgen_h2o.planning.planned_run import PlannedRun, kv_entry_bytes

LEAST_RATIO = 0.1
"""The least that noise leaves of a ratio that is fit_recall_rates."""


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


def recall_seconds(rates: ComputeRates | HostAttentionRates, recall: RecallRates,
                   tokens: RecalledTokens, *, index: IndexLayout, cache: CacheOptions) -> float:
    """Seconds of a new token's attention by recall, for one sequence in one layer, on a CPU.

    Parameters
    ----------
    rates : ComputeRates or HostAttentionRates
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


def seconds_per_byte(rates: ComputeRates | HostAttentionRates, cache: CacheOptions) -> float:
    """Seconds of decode attention for a byte of a cache, keys and values in proportion."""
    bits = cache.kind_bits
    return sum(each / rates.decode_attention[each] for each in bits) / sum(bits)


def fit_recall_rates(rates: ComputeRates | HostAttentionRates,
           times: Sequence[tuple[RecalledTokens, float]], *, index: IndexLayout) -> RecallRates:
    """The rates of attention by which `recall_seconds` takes as long as was measured.

    Parameters
    ----------
    rates : ComputeRates or HostAttentionRates
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


def disk_read_ratio(recall: RecallRates, tokens: RecalledTokens) -> float:
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


# The cached tokens that decode steps attend to: how many, and what reading them takes. No torch.
#
# All is a mean over the steps of a run.


class CachedTokens:
    """The cached tokens of one sequence of a run.

    Parameters
    ----------
    run : PlannedRun
    recall : RecallRates
    """

    def __init__(self, run: PlannedRun, recall: RecallRates):
        self._run = run
        self._recall = recall
        self._record = kv_entry_bytes(run.cache, run.model, run.itemsize)

    def attention_seconds(self, rates: ComputeRates | HostAttentionRates, *, recalls: bool
                          ) -> float:
        """Seconds of a new token's attention, a mean over layers; `recalls`: with the kernels that
        recall, where that is configured."""
        run, model, total = self._run, self._run.model, 0.0
        for layer in range(model.num_layers):
            tokens = self._recalled(layer) if recalls else None
            if tokens is not None:
                index = IndexLayout(model.head_dim, run.cache.h2o.index_bits)
                total += recall_seconds(rates, self._recall, tokens, index=index,
                                        cache=run.cache)
                continue
            read = self._attended(layer) * self._record
            total += (read * seconds_per_byte(rates, run.cache)
                      + model.num_kv_heads * rates.head_seconds)
        return total / model.num_layers

    def disk_reads(self) -> tuple[float, float]:
        """Bytes that a disk reads in order in the time in which a step reads what it chooses, and
        those of them for which attention waits: a mean over layers."""
        total, awaited, layers = 0.0, 0.0, self._run.model.num_layers
        for layer in range(layers):
            whole, tokens = self._attended(layer) * self._record, self._recalled(layer)
            if tokens is None:
                total += whole
                continue
            read = whole * disk_read_ratio(self._recall, tokens)
            total, awaited = total + read, awaited + read
        return total / layers, awaited / layers

    def read_in_place(self) -> tuple[float, float]:
        """Bytes of a cache in host memory that come to a GPU in a step that reads what it chooses
        where it lies, and those of them for which attention waits: a mean over layers."""
        total, awaited, layers = 0.0, 0.0, self._run.model.num_layers
        for layer in range(layers):
            tokens = self._recalled(layer)
            if tokens is None:
                total += self._attended(layer) * self._record
                continue
            read = tokens.chosen * self._record
            if self._run.has_hot_set:
                read = min(read, missing_tokens(self._recall, tokens) * self._record)
            total, awaited = total + read, awaited + read
        return total / layers, awaited / layers

    def _recalled(self, layer: int) -> RecalledTokens | None:
        """The tokens of a layer in the middle of the text; None where a new one attends to all."""
        run = self._run
        if run.cache.simulated:
            return None
        load, attended = run.workload, self._attended(layer)
        chosen = recalled(run.cache.h2o, layer, load.prompt_len, load.gen_len // 2)
        held = hot_slots(run.cache.h2o, layer, load.prompt_len + load.gen_len - 1,
                          run.policy.fast_set)
        return None if chosen is None else RecalledTokens(
            min(chosen, attended), attended, run.model.num_kv_heads, self._record, held)

    def _attended(self, layer: int) -> float:
        """Tokens that are cached for a new one, itself too."""
        h2o, load = self._run.cache.h2o, self._run.workload
        steps = max(load.gen_len - 1, 1)
        first, last = (cached(h2o, layer, load.prompt_len, new) for new in (0, steps - 1))
        if h2o is not None and h2o.budget_of == "text":
            return (first + last) / 2 + 1
        growing = last - first  # a token each step, up to the budget
        total = (growing + 1) * (first + last) / 2 + (steps - 1 - growing) * last
        return total / steps + 1
