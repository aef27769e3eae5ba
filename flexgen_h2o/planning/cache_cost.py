"""The cost of the KV cache, and the accumulator of the seconds of a unit. No torch.

Seconds are counted by resource (compute, the host's attention, or a link between two tiers) and are
affine in the placement shares, so that placements can be solved for as a linear program.

Recall reads scattered tokens, which is slower than reading a cache sequentially, both for attention
and for a disk. `RecallRates` has the slowdown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexgen_h2o.config.cache_layout import CacheOptions, IndexLayout, PageLayout
from flexgen_h2o.config.limits import (
    CACHE_GROWTH,
    INDEX_TILE,
    MAX_READ_GAP,
    RECALL_GROUPS,
    WRITE_BACK_TOKENS,
)
from flexgen_h2o.config.placement import PLACED, TIERS
from flexgen_h2o.h2o.budget import budget, num_cached, num_hot_slots, num_selected
from flexgen_h2o.metrics.trace import LINKS
from flexgen_h2o.planning.hardware import ComputeRates, Hardware, HostAttentionRates, RecallRates
from flexgen_h2o.planning.planned_run import PlannedRun, kv_entry_bytes, layer_slots

COMPUTE, HOST = "compute", "cpu attention"
RESOURCES = (COMPUTE, HOST, *LINKS)
TERMS = (None, *((kind, tier) for kind in PLACED for tier in TIERS))
"""Variables of the affine cost: a constant (None), then the share, 0 to 1, of each kind of data on
each tier. For a mixture of experts, "weights" means the experts; its other weights are part of
the constant."""


@dataclass(frozen=True)
class UnitCost:
    """One type of unit of the schedule, for all batches of a block."""

    count: float  # number of these units in a phase
    path_seconds: np.ndarray
    """Seconds of each path. Paths run in parallel, so that the unit takes as long as the slowest
    one. Interference between paths is included."""
    seconds: np.ndarray  # seconds of each resource without interference

    def elapsed(self, shares: np.ndarray) -> np.ndarray:
        """Return the seconds in the phase for `shares` [TERMS], or [TERMS, n] for n placements."""
        return self.count * (self.path_seconds @ shares).max(axis=0)


class CostAccumulator:
    """Accumulator of the seconds of one unit."""

    def __init__(self, hardware: Hardware):
        self._hardware = hardware
        self.seconds = np.zeros((len(RESOURCES), len(TERMS)))

    def add(self, resource: str, seconds: float, term: tuple[str, str] | None = None) -> None:
        """Add seconds to a resource: constant, or multiplied by the share of `term`."""
        self.seconds[RESOURCES.index(resource), TERMS.index(term)] += seconds

    def transfer(self, name: str, nbytes: float, term: tuple[str, str]) -> None:
        """Add a transfer over a link of `nbytes` times the share of `term`."""
        self.add(name, nbytes / self._hardware.links[name], term)

    def load(self, kind: str, nbytes: float, tiers: tuple[str, ...] = TIERS[1:]) -> None:
        """Add a load into compute memory, from each of `tiers`, of `nbytes` times its share."""
        for tier in tiers:
            if tier == "disk":
                self.transfer("disk->cpu", nbytes, (kind, tier))
            if self._hardware.has_gpu:
                self.transfer("cpu->gpu", nbytes, (kind, tier))

    def load_fixed(self, tier: str, nbytes: float) -> None:
        """Add a load into compute memory of `nbytes` from `tier`, independent of the placement."""
        for link, passed in (("disk->cpu", tier == "disk"),
                             ("cpu->gpu", tier != "gpu" and self._hardware.has_gpu)):
            if passed:
                self.add(link, nbytes / self._hardware.links[link])

    def store(self, kind: str, nbytes: float, tiers: tuple[str, ...] = TIERS[1:]) -> None:
        """Add a store from compute memory, to each of `tiers`, of `nbytes` times its share."""
        for tier in tiers:
            if tier == "disk":
                self.transfer("cpu->disk", nbytes, (kind, tier))
            if self._hardware.has_gpu:
                self.transfer("gpu->cpu", nbytes, (kind, tier))


MIN_RATIO = 0.1
"""Smallest ratio that a fit of `RecallRates` returns, in spite of noise in the measurements."""


@dataclass(frozen=True)
class RecalledTokens:
    """Cached and selected tokens of a sequence in one layer."""

    selected: float  # tokens that a new token attends to
    cached: float  # tokens that they are selected from
    kv_heads: int
    record: float  # bytes of a token's key and value, all KV heads together
    held: float = 0.0  # tokens per KV head in the hot set, for a cache on a slower tier


def recall_seconds(rates: ComputeRates | HostAttentionRates, recall: RecallRates,
                   tokens: RecalledTokens, *, index: IndexLayout, cache: CacheOptions) -> float:
    """Return the seconds of one new token's recalled attention on a CPU, in one layer.

    `index`: the key index of one KV head.
    """
    heads, rate = tokens.kv_heads, rates.decode_attention[16]
    scanned = recall.index_cost * heads * tokens.cached * index.tile_bytes / INDEX_TILE
    selected = tokens.selected * tokens.record
    return (recall.call_overhead * heads * rates.head_seconds
            + (scanned + (recall.gather_cost - 1) * selected) / rate
            + selected * seconds_per_byte(rates, cache))


def seconds_per_byte(rates: ComputeRates | HostAttentionRates, cache: CacheOptions) -> float:
    """Return the seconds of decode attention per byte of cache, weighted over keys and values."""
    bits = cache.kind_bits
    return sum(width / rates.decode_attention[width] for width in bits) / sum(bits)


def fit_recall_rates(rates: ComputeRates | HostAttentionRates,
                     times: Sequence[tuple[RecalledTokens, float]], *, index: IndexLayout
                     ) -> RecallRates:
    """Fit recall rates so that `recall_seconds` gives the measured times.

    `rates`: rates of the same machine. `times`: tokens of a 16-bit cache, and seconds: few selected
    of few cached tokens, few of many, and more of as many.

    Returns
    -------
    RecallRates
        The rates of a disk keep their defaults.
    """
    (short, first), (long, second), (longest, third) = times
    rate = rates.decode_attention[16]
    more_bytes = (longest.selected - long.selected) * longest.record
    gather_cost = max(MIN_RATIO, (third - second) * rate / more_bytes)
    scanned = (long.cached - short.cached) * long.kv_heads * index.tile_bytes / INDEX_TILE
    scan = (second - first) * rate - gather_cost * (long.selected - short.selected) * long.record
    fitted = RecallRates(max(MIN_RATIO, scan / scanned), gather_cost, call_overhead=0)
    remainder = first - recall_seconds(rates, fitted, short, index=index, cache=CacheOptions())
    overhead = remainder / (short.kv_heads * rates.head_seconds)
    return replace(fitted, call_overhead=max(MIN_RATIO, overhead))


def disk_read_ratio(recall: RecallRates, tokens: RecalledTokens) -> float:
    """Return the time of a step's selective reads, over reading the whole cache sequentially.

    Attention waits for these reads: speculative prefetch is ignored, since the engine only uses it
    where it is faster.
    """
    return sum(read_shares(*missing_groups(recall, tokens)))


def missing_tokens(recall: RecallRates, tokens: RecalledTokens) -> float:
    """Return the selected tokens of a KV head that are not in the hot set.

    They are proportional to the selected tokens. They decrease with the share of tokens in the hot
    set, and are 0 where it holds all.
    """
    share = min(max(tokens.held, 1) / tokens.cached, 1)
    return recall.miss_factor * tokens.selected * (1 - share) ** 1.5 / math.sqrt(share)


def missing_groups(recall: RecallRates, tokens: RecalledTokens) -> tuple[float, float]:
    """Return the density of missing tokens on disk, and the length of their records.

    The density is the number of records to be read per `MAX_READ_GAP` bytes of the cache; the
    length is in units of `MAX_READ_GAP` bytes.
    """
    missing = missing_tokens(recall, tokens)
    layout = PageLayout(tokens.kv_heads, int(tokens.record / tokens.kv_heads), slots=0)
    near = MAX_READ_GAP / layout.token_bytes  # tokens of a head in `MAX_READ_GAP` bytes
    return missing * near / tokens.cached, layout.page_bytes / MAX_READ_GAP


def read_shares(groups: float, length: float) -> tuple[float, float]:
    """Return bytes read, and requests of `MAX_READ_GAP` bytes, over the bytes of the whole cache.

    Records begin anywhere: on average there are `groups` in `MAX_READ_GAP` bytes, each `length`
    times `MAX_READ_GAP` bytes long. A gap between two of them is longer than `MAX_READ_GAP` with
    probability exp(-groups * (1 + length)). Shorter gaps are read too. A longer gap begins another
    request, which takes as long as reading `MAX_READ_GAP` bytes.
    """
    longer = math.exp(-groups * (1 + length))
    return 1 - (1 + groups) * longer, groups * longer


class CacheCosts:
    """Cost of the cache in an average decoder layer of an average forward pass."""

    def __init__(self, hardware: Hardware, run: PlannedRun):
        self._hardware = hardware
        self._run = run
        self._sequences = run.group_batches * run.workload.gpu_batch_size
        self._prompt = run.workload.prompt_len
        self._record = kv_entry_bytes(run.cache, run.model, run.itemsize)

    def prompt_attention_seconds(self) -> float:
        """Return the seconds of causal attention over a prompt, with scores where needed."""
        run, model = self._run, self._run.model
        compute, heads = self._hardware.compute, model.num_heads
        rates, query_seconds = compute.prefill_attention, compute.query_seconds
        seconds = 0.0
        for layer in range(model.num_layers):
            # Pairs of a query and a key that it attends to.
            seen = min(self._prompt, model.attention_variant(layer).window or self._prompt)
            pairs = seen * (seen + 1) / 2 + (self._prompt - seen) * seen
            size = budget(run.cache.h2o, layer, run.workload.prompt_len)
            scored = size is not None and size.heavy > 0
            kind = "scored" if scored else "plain"
            seconds += 4 * model.head_dim * heads * pairs / rates[kind]
            seconds += heads * self._prompt * query_seconds.get(kind, 0.0)
        return seconds / model.num_layers

    def add_prompt(self, cost: CostAccumulator) -> None:
        """Add the cache's part of the prefill.

        The cut cache is stored once. With chunked prefill, whole prompts are loaded and stored in
        each pass until the cut.
        """
        run, passes = self._run, self._run.passes
        if not run.attends_on_host:
            token_seconds = sum(self._hardware.compute.caching.get(bits, 0.0) / 1e9
                                for bits in run.cache.kind_bits)
            elements = self._sequences * self._slots(self._prompt) * run.model.cached_size / 2
            cost.add(COMPUTE, elements * token_seconds / passes)
        plain = self._sequences * run.model.cached_size * run.itemsize
        cut = self._sequences * self._slots(self._prompt + CACHE_GROWTH) * self._record
        fetched: tuple[str, ...] = ("cpu", "disk")
        if run.attends_on_host:
            fetched = ("disk",)
            # Prompts are cut on the host, which needs them whole.
            cost.transfer("gpu->cpu", plain * self._prompt / passes, ("cache", "cpu"))
        if run.gathers_prompts:
            cost.load("cache", plain * self._prompt * (passes - 1) / passes)
            cost.store("cache", plain * self._prompt * (passes - 1) / passes)
            cost.store("cache", cut / passes, fetched)
        else:
            cost.load("cache", cut * (passes - 1) / passes, fetched)
            cost.store("cache", cut, fetched)

    def add_token(self, cost: CostAccumulator) -> None:
        """Add the cache's part of a decode step: attention, loads, and stores of new entries."""
        run, model, hardware = self._run, self._run.model, self._hardware
        new = self._sequences * self._record
        for tier in TIERS:
            host = tier == "cpu" and run.attends_on_host
            by = hardware.host_attention if host else hardware.compute
            # Recall on a GPU costs the same as full attention: selecting takes the time it saves
            # (0.93 to 1.24 of full attention on an H200, 8,192 tokens).
            batch_seconds = self._attention_seconds(by, recalls=host or not run.has_gpu)
            cost.add(HOST if host else COMPUTE, self._sequences * batch_seconds, ("cache", tier))
        mean = self._prompt + (run.workload.gen_len + CACHE_GROWTH) / 2
        nbytes = self._sequences * self._slots(mean) * self._record
        if run.attends_on_host:
            rows = self._sequences * run.itemsize
            cost.transfer("gpu->cpu", rows * (model.q_size + 2 * model.kv_size), ("cache", "cpu"))
            outputs = model.num_heads * model.value_dim
            cost.transfer("cpu->gpu", rows * outputs, ("cache", "cpu"))
        elif run.has_gpu:
            # Sparse attention loads all keys and the selected values.
            loaded = nbytes * (1 + run.cache.attn_sparsity) / 2
            if run.recalls_in_place:
                loaded = self._sequences * self._selective_reads()[0]
            cost.load("cache", loaded, ("cpu",))
            cost.store("cache", new, ("cpu",))
        written = nbytes / WRITE_BACK_TOKENS
        fetching = (run.group_batches * hardware.fetch_seconds
                    + self._sequences * model.num_kv_heads * hardware.fetch_head_seconds)
        if run.recalls_from_disk:
            nbytes, written = self._sequences * self._selective_reads()[0], new
            batch_seconds = hardware.recall.fetch_overhead * hardware.compute.layer_seconds
            fetching = run.group_batches * batch_seconds
        cost.add(COMPUTE, fetching, ("cache", "disk"))
        cost.load("cache", nbytes, ("disk",))
        if run.has_gpu:
            cost.transfer("gpu->cpu", new, ("cache", "disk"))
        cost.transfer("cpu->disk", written, ("cache", "disk"))

    def stall_seconds(self) -> np.ndarray | None:
        """Return the seconds [TERMS] for which attention waits for selective reads; None without
        any.

        Reads from disk take turns: while some sequences read, others select or attend.
        """
        run, cost = self._run, CostAccumulator(self._hardware)
        if run.recalls_from_disk:
            cost.load("cache", self._sequences * self._selective_reads()[1], ("disk",))
            batch_seconds = self._attention_seconds(self._hardware.compute, recalls=True)
            beside = 1 - 1 / min(RECALL_GROUPS, run.workload.gpu_batch_size)
            cost.add(COMPUTE, -beside * self._sequences * batch_seconds, ("cache", "disk"))
        elif run.recalls_in_place:
            cost.load("cache", self._sequences * self._selective_reads()[1], ("cpu",))
        else:
            return None
        return cost.seconds.sum(axis=0)

    def _slots(self, grown: float) -> float:
        """Return the slots of a sequence that are transferred, averaged over layers.

        Without eviction there are `grown` of them.
        """
        run, model = self._run, self._run.model
        evicting = {*run.evicting_layers}
        max_slots = layer_slots(run.cache, model, run.workload)
        return sum(slots if layer in evicting else min(slots, grown)
                   for layer, slots in enumerate(max_slots)) / model.num_layers

    def _attention_seconds(self, rates: ComputeRates | HostAttentionRates, *, recalls: bool
                           ) -> float:
        """Return the seconds of a new token's attention, averaged over layers.

        With `recalls`, layers that are configured to recall use the recall kernels.
        """
        run, model, total = self._run, self._run.model, 0.0
        for layer in range(model.num_layers):
            tokens = self._recalled(layer) if recalls else None
            if tokens is not None:
                index = IndexLayout(model.head_dim, run.cache.h2o.index_bits)
                total += recall_seconds(rates, self._hardware.recall, tokens, index=index,
                                        cache=run.cache)
                continue
            read = self._attended(layer) * self._record
            total += (read * seconds_per_byte(rates, run.cache)
                      + model.num_kv_heads * rates.head_seconds)
        return total / model.num_layers

    def _selective_reads(self) -> tuple[float, float]:
        """Return the bytes that a decode step reads of a recalled cache, averaged over layers.

        The second value is the part that attention waits for. Bytes from disk are those that take
        as long to read sequentially.
        """
        run, total, awaited = self._run, 0.0, 0.0
        for layer in range(run.model.num_layers):
            all_bytes, tokens = self._attended(layer) * self._record, self._recalled(layer)
            if tokens is None:
                total += all_bytes
                continue
            if run.recalls_from_disk:
                read = all_bytes * disk_read_ratio(self._hardware.recall, tokens)
            else:
                read = tokens.selected * self._record
                if run.has_hot_set:
                    missing = missing_tokens(self._hardware.recall, tokens)
                    read = min(read, missing * self._record)
            total, awaited = total + read, awaited + read
        return total / run.model.num_layers, awaited / run.model.num_layers

    def _recalled(self, layer: int) -> RecalledTokens | None:
        """Return the tokens of a layer halfway through the generation; None without recall."""
        run = self._run
        if run.cache.simulated:
            return None
        load, attended = run.workload, self._attended(layer)
        selected = num_selected(run.cache.h2o, layer, load.prompt_len, load.gen_len // 2)
        hot_slots = num_hot_slots(run.cache.h2o, layer, load.prompt_len + load.gen_len - 1,
                                  run.policy.hot_set)
        return None if selected is None else RecalledTokens(
            min(selected, attended), attended, run.model.num_kv_heads, self._record, hot_slots)

    def _attended(self, layer: int) -> float:
        """Return the tokens that a new token attends to, including itself."""
        h2o, load = self._run.cache.h2o, self._run.workload
        steps = max(load.gen_len - 1, 1)
        first, last = (num_cached(h2o, layer, load.prompt_len, new) for new in (0, steps - 1))
        if h2o is not None and h2o.budget_of == "text":
            return (first + last) / 2 + 1
        growing = last - first  # a token each step, up to the budget
        total = (growing + 1) * (first + last) / 2 + (steps - 1 - growing) * last
        return total / steps + 1
