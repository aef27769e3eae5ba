"""The cost of a layer step: what it takes of each resource, by shares of placements. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexgen_h2o.config.limits import GROWTH, TURNS, WRITE_BACK_TOKENS
from flexgen_h2o.config.placement import PLACED, TIERS
from flexgen_h2o.h2o.budget import budget
from flexgen_h2o.metrics.trace import LINKS
from flexgen_h2o.planning.hardware import Hardware
from flexgen_h2o.planning.planned_run import PlannedRun, kv_entry_bytes, layer_slots
from flexgen_h2o.planning.recall_cost import CachedTokens

COMPUTE, HOST = "compute", "cpu attention"
RESOURCES = (COMPUTE, HOST, *LINKS)
TERMS = (None, *((kind, tier) for kind in PLACED for tier in TIERS))
"""The variables in which seconds are affine: a constant, and the share (1: all) of each kind on
each tier. The weights of a mixture that count here are the experts; the others lie as they do."""


@dataclass(frozen=True)
class LayerStepCost:
    """One layer step of the schedule, for all batches of a block.

    Attributes
    ----------
    count : float
        How often it comes in its phase.
    lanes : float array [lanes, TERMS]
        Seconds of what runs side by side, and is disturbed by the others: the layer step takes as
        long as the largest.
    seconds : float array [RESOURCES, TERMS]
        Seconds of each resource alone.
    """

    count: float
    lanes: np.ndarray
    seconds: np.ndarray

    def elapsed(self, shares: np.ndarray) -> np.ndarray:
        """Seconds in the phase, for `shares` [TERMS] or, of many placements, [TERMS, n]."""
        return self.count * (self.lanes @ shares).max(axis=0)


class CostAccumulator:
    """Sums up what a layer step takes of each resource, by `TERMS`."""

    def __init__(self, hardware: Hardware):
        self._hardware = hardware
        self.seconds = np.zeros((len(RESOURCES), len(TERMS)))

    def add(self, resource: str, seconds: float, term: tuple[str, str] | None = None) -> None:
        """Seconds of a resource, whatever the placements are or times the share of a term."""
        self.seconds[RESOURCES.index(resource), TERMS.index(term)] += seconds

    def link(self, name: str, nbytes: float, term: tuple[str, str]) -> None:
        """Bytes times the share of a term over a link."""
        self.add(name, nbytes / self._hardware.links[name], term)

    def bring(self, kind: str, nbytes: float, tiers: tuple[str, ...] = TIERS[1:]) -> None:
        """Bytes of which the shares on `tiers` come to compute memory."""
        for tier in tiers:
            if tier == "disk":
                self.link("disk->cpu", nbytes, (kind, tier))
            if self._hardware.has_gpu:
                self.link("cpu->gpu", nbytes, (kind, tier))

    def bring_fixed(self, tier: str, nbytes: float) -> None:
        """Bytes that come to compute memory from a tier, whatever the placements are."""
        for link, passed in (("disk->cpu", tier == "disk"),
                             ("cpu->gpu", tier != "gpu" and self._hardware.has_gpu)):
            if passed:
                self.add(link, nbytes / self._hardware.links[link])

    def send(self, kind: str, nbytes: float, tiers: tuple[str, ...] = TIERS[1:]) -> None:
        """Bytes of which the shares on `tiers` leave compute memory."""
        for tier in tiers:
            if tier == "disk":
                self.link("cpu->disk", nbytes, (kind, tier))
            if self._hardware.has_gpu:
                self.link("gpu->cpu", nbytes, (kind, tier))


# The cost of the cache: attention, and what of the cache is moved between tiers. No torch.


class CacheCosts:
    """The cache of a mean decoder layer in a mean forward pass.

    Parameters
    ----------
    hardware : Hardware
    run : PlannedRun
    """

    def __init__(self, hardware: Hardware, run: PlannedRun):
        self._hardware = hardware
        self._run = run
        self._sequences = run.group_batches * run.workload.gpu_batch_size
        self._prompt = run.workload.prompt_len
        self._record = kv_entry_bytes(run.cache, run.model, run.itemsize)
        self._tokens = CachedTokens(run, hardware.recall)

    def prompt_attention_seconds(self) -> float:
        """Causal attention over a whole prompt, with scores in the layers that need them."""
        run, model = self._run, self._run.model
        compute, heads = self._hardware.compute, model.num_heads
        rates, each = compute.prefill_attention, compute.query_seconds
        seconds = 0.0
        for layer in range(model.num_layers):
            # Of each query with the keys that it sees.
            seen = min(self._prompt, model.form(layer).window or self._prompt)
            pairs = seen * (seen + 1) / 2 + (self._prompt - seen) * seen
            size = budget(run.cache.h2o, layer, run.workload.prompt_len)
            scored = size is not None and size.heavy > 0
            kind = "scored" if scored else "plain"
            seconds += 4 * model.head_dim * heads * pairs / rates[kind]
            seconds += heads * self._prompt * each.get(kind, 0.0)
        return seconds / model.num_layers

    def add_prompt(self, cost: CostAccumulator) -> None:
        """The cut cache is written once. Until then, prompts in chunks go to and fro whole."""
        run, passes = self._run, self._run.passes
        if not run.attends_on_host:
            each = sum(self._hardware.compute.caching.get(bits, 0.0) / 1e9
                       for bits in run.cache.kind_bits)
            kept = self._sequences * self._slots(self._prompt) * run.model.kv_size
            cost.add(COMPUTE, kept * each / passes)
        plain = self._sequences * 2 * run.model.kv_size * run.itemsize
        cut = self._sequences * self._slots(self._prompt + GROWTH) * self._record
        fetched = ("cpu", "disk")
        if run.attends_on_host:
            fetched = ("disk",)
            # There whole prompts go down to be cut.
            cost.link("gpu->cpu", plain * self._prompt / passes, ("cache", "cpu"))
        if run.gathers_prompts:
            cost.bring("cache", plain * self._prompt * (passes - 1) / passes)
            cost.send("cache", plain * self._prompt * (passes - 1) / passes)
            cost.send("cache", cut / passes, fetched)
        else:
            cost.bring("cache", cut * (passes - 1) / passes, fetched)
            cost.send("cache", cut, fetched)

    def add_token(self, cost: CostAccumulator) -> None:
        """Attention where the cache is brought or lies, and the new records on their way back."""
        run, model, hardware = self._run, self._run.model, self._hardware
        new = self._sequences * self._record
        for tier in TIERS:
            host = tier == "cpu" and run.attends_on_host
            by = hardware.host_attention if host else hardware.compute
            # Recall on a GPU counts as if all were read: an H200 takes 0.93 to 1.24 of that for
            # 8,192 tokens, as choosing costs what it saves.
            each = self._tokens.attention_seconds(by, recalls=host or not run.has_gpu)
            cost.add(HOST if host else COMPUTE, self._sequences * each, ("cache", tier))
        mean = self._prompt + (run.workload.gen_len + GROWTH) / 2
        whole = self._sequences * self._slots(mean) * self._record
        if run.attends_on_host:
            rows = self._sequences * run.itemsize
            cost.link("gpu->cpu", rows * (model.q_size + 2 * model.kv_size), ("cache", "cpu"))
            cost.link("cpu->gpu", rows * model.q_size, ("cache", "cpu"))
        elif run.has_gpu:
            # All keys, and of the values those that are chosen; by recall what it chooses.
            brought = whole * (1 + run.cache.attn_sparsity) / 2
            if run.recalls_in_place:
                brought = self._sequences * self._tokens.read_in_place()[0]
            cost.bring("cache", brought, ("cpu",))
            cost.send("cache", new, ("cpu",))
        written = whole / WRITE_BACK_TOKENS
        fetching = (run.group_batches * hardware.fetch_seconds
                    + self._sequences * model.num_kv_heads * hardware.fetch_head_seconds)
        if run.recalls_from_disk:
            whole, written = self._sequences * self._tokens.disk_reads()[0], new
            each = hardware.recall.fetching * hardware.compute.layer_seconds
            fetching = run.group_batches * each
        cost.add(COMPUTE, fetching, ("cache", "disk"))
        cost.bring("cache", whole, ("disk",))
        if run.has_gpu:
            cost.link("gpu->cpu", new, ("cache", "disk"))
        cost.link("cpu->disk", written, ("cache", "disk"))

    def awaited(self) -> np.ndarray | None:
        """Seconds [TERMS] for which attention waits for what it has chosen.

        From disk that comes in turns: while those of some sequences come, others choose or attend.
        """
        run, cost = self._run, CostAccumulator(self._hardware)
        if run.recalls_from_disk:
            cost.bring("cache", self._sequences * self._tokens.disk_reads()[1], ("disk",))
            each = self._tokens.attention_seconds(self._hardware.compute, recalls=True)
            beside = 1 - 1 / min(TURNS, run.workload.gpu_batch_size)
            cost.add(COMPUTE, -beside * self._sequences * each, ("cache", "disk"))
        elif run.recalls_in_place:
            cost.bring("cache", self._sequences * self._tokens.read_in_place()[1], ("cpu",))
        else:
            return None
        return cost.seconds.sum(axis=0)

    def _slots(self, grown: float) -> float:
        """Slots of a sequence that travel, a mean over layers: with nothing evicted, `grown`."""
        run, model = self._run, self._run.model
        evicting = {*run.evicting_layers}
        return sum(most if layer in evicting else min(most, grown) for layer, most in enumerate(
            layer_slots(run.cache, model, run.workload))) / model.num_layers
