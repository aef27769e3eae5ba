"""Machines and models for tests of the planner."""

from dataclasses import replace

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.placement import PLACED, parse_percent
from flexgen_h2o.config.policy import Policy, Workload
from flexgen_h2o.config.weight_layout import WeightOptions
from flexgen_h2o.metrics.trace import LINKS
from flexgen_h2o.models.registry import published
from flexgen_h2o.planning.hardware import ComputeRates, Hardware, HostAttentionRates
from flexgen_h2o.planning.planned_run import PlannedRun

OPT = published("opt-125m")  # 12 layers of 12 heads of 64, hidden size 768
ALL_HERE, ON_HOST, ON_DISK = (100, 0), (0, 100), (0, 0)
BITS = (16, 8, 4)

FREE = ComputeRates(linear={bits: {1: 1e-9, 1 << 30: 1e-9} for bits in BITS},
               prefill_attention={"plain": 1e30, "scored": 1e30},
               decode_attention=dict.fromkeys(BITS, 1e30),
               head_seconds=0.0, elementwise=0.0, layer_seconds=0.0, logit_seconds=0.0)
"""ComputeRates that takes next to no time."""


def machine(compute: ComputeRates = FREE, *, gpu: bool = True,
            host: HostAttentionRates | None = None, **links: float) -> Hardware:
    """A machine whose links move a byte a second unless `links` says more, as up, down, ..."""
    names = dict(zip(("read", "write", "up", "down"), LINKS, strict=True))
    rates = {name: links.get(short, 1.0) for short, name in names.items()
             if gpu or short in ("read", "write")}
    free_host = HostAttentionRates(dict.fromkeys(BITS, 1e30), 0.0)
    return Hardware("by hand", 10**12 if gpu else None, 10**12, 10**12, rates, compute,
                    (host or free_host) if gpu else None)


def roofline(tflops: float, bandwidth: float, **figures: object) -> ComputeRates:
    """Return `ComputeRates` with a memory bandwidth in GB/s and a peak in TFLOP/s."""
    linear = {bits: {rows: max(bits / 8 / bandwidth, 2e-3 * rows / tflops)
                     for rows in (1, 4, 16, 64, 256, 2048)} for bits in BITS}
    return ComputeRates(**{
        "linear": linear, "prefill_attention": {"plain": tflops * 4e11, "scored": tflops * 2e11},
        "decode_attention": {16: bandwidth * 8e8, 8: bandwidth * 6e8, 4: bandwidth * 4e8},
        "head_seconds": 1e-7, "elementwise": 5 / bandwidth, "layer_seconds": 1e-4,
        "logit_seconds": 0.05, **figures})


GPU = Hardware("a GPU", 16 * 10**9, 64 * 10**9, 10**12,
               {"disk->cpu": 2e9, "cpu->disk": 1e9, "cpu->gpu": 12e9, "gpu->cpu": 12e9},
               roofline(30, 300), HostAttentionRates({16: 20e9, 8: 15e9, 4: 8e9}, 1e-6))
CPU = Hardware("a CPU", None, 24 * 10**9, 10**12, {"disk->cpu": 1.5e9, "cpu->disk": 1e9},
               roofline(1.2, 20, head_seconds=1e-6))


def planned(weights=ALL_HERE, cache=ALL_HERE, activations=ALL_HERE, *, batch=(4, 1),
            lengths=(64, 9), gpu: bool = True, bits=(16, 16), h2o=None, model=OPT,
            **policy) -> PlannedRun:
    """A run: shares on gpu and cpu, (sequences, GPU batches), (prompt, generated) tokens, and
    (weight, cache) bits."""
    placements = dict(zip(PLACED, parse_percent((*weights, *cache, *activations)), strict=True))
    return PlannedRun(model, replace(Policy(*batch), **placements, **policy),
                      Workload(*lengths, *batch), 2, gpu, False, CacheOptions(h2o, bits[1]),
                      WeightOptions(bits[0]))
