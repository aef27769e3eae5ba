"""Replicas and a pipeline on the same machines, by the planner's cost model. Nothing is run.

Machines are those of configs/hardware/, one GPU and a host of its own each; how they are joined is
assumed, and stands in each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.models.registry import published
from flexgen_h2o.planning.hardware import load_hardware
from flexgen_h2o.planning.pipeline import Network, search_pipeline
from flexgen_h2o.planning.search import Choice, PlanRequest, search
from flexgen_h2o.storage.free_memory import MemoryLimits

HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"
PIPELINE, REPLICAS = "pipeline", "replicas"
CACHES = {"full": CacheOptions(),
          "H2O 20 %": CacheOptions(H2OConfig(heavy_ratio=0.1, recent_ratio=0.1))}
ASSUMED = ("each machine is a GPU and a host of its own as in the hardware file; hidden states "
           "have the network for themselves and travel while ranks compute; weights and cache in "
           "16 bits; replicas share the prompts equally; loading is left out")


@dataclass(frozen=True)
class Cluster:
    """So many machines of a hardware file, joined by an assumed network."""

    hardware: str
    machines: int
    network: Network


CLUSTERS = (Cluster("t4", 4, Network(1.25e9, 100e-6)),  # 10 Gbit/s Ethernet
            Cluster("a100", 8, Network(12.5e9, 30e-6)))  # 100 Gbit/s
MODELS = ("facebook/opt-30b", "facebook/opt-175b")
LENGTHS = (512, 128)
PROMPTS = (32, 256, 2048)
"""Of the whole job: a few of them fill no block of each replica."""


def rows(clusters: Sequence[Cluster] = CLUSTERS, models: Sequence[str] = MODELS,
         prompts: Sequence[int] = PROMPTS, lengths: tuple[int, int] = LENGTHS
         ) -> Iterator[dict[str, object]]:
    """Two rows, of the pipeline and of the replicas, for each cluster, model, cache and job."""
    for cluster in clusters:
        for model in models:
            for cache in CACHES:
                for count in prompts:
                    yield from pair(cluster, model, cache, count, lengths)


def pair(cluster: Cluster, model: str, cache: str, prompts: int, lengths: tuple[int, int]
         ) -> list[dict[str, object]]:
    """Both ways to run a job; the faster one `wins`."""
    hardware = load_hardware(HARDWARE / f"{cluster.hardware}.yaml")
    limits = MemoryLimits(hardware.gpu_bytes, hardware.cpu_bytes, hardware.disk_bytes)
    shape = published(model)
    if shape is None:
        raise UserError(f"{model} is no published shape")

    def request(count: int) -> PlanRequest:
        return PlanRequest(model=shape, prompt_len=lengths[0], gen_len=lengths[1], itemsize=2,
                           prompts=count, caches=(CACHES[cache],))

    def best(way: str) -> Choice:
        if way == PIPELINE:
            return search_pipeline(hardware, request(prompts), cluster.machines, limits,
                                cluster.network)[0].choice
        return search(hardware, request(-(-prompts // cluster.machines)), limits)[0]

    found = []
    for way in (PIPELINE, REPLICAS):
        row = {"kind": "simulated", "way": way, "processes": cluster.machines, "model": model,
               "cache": cache, "prompts": prompts, "prompt_len": lengths[0],
               "gen_len": lengths[1], "hardware": hardware.name,
               "network_gb_per_s": cluster.network.bytes_per_second / 1e9,
               "network_latency_us": cluster.network.latency * 1e6, "assumed": ASSUMED}
        try:
            row |= _figures(best(way), prompts)
        except UserError as error:
            row["reason"] = str(error)
        if way == PIPELINE:
            # Hidden states of the prompt and of all new tokens but the last, for each rank that
            # has a next one; tokens to all others.
            positions = lengths[0] + lengths[1] - 1
            row["sent_bytes_per_token"] = (cluster.machines - 1) * (
                shape.hidden_size * 2 * positions / lengths[1] + 8)
        found.append(row)
    rates = [row.get("tokens_per_s", 0) for row in found]
    for row, rate, other in zip(found, rates, reversed(rates), strict=True):
        row["wins"] = str(rate > other).lower()
        row["times_the_other"] = rate / other if rate and other else None
    return found


def _figures(choice: Choice, prompts: int) -> dict[str, object]:
    """Columns of the best policy: its rate for all prompts, and what it keeps where."""
    policy = choice.run.policy
    return {"tokens_per_s": prompts * choice.run.workload.gen_len / choice.seconds,
            "gpu_batch_size": policy.gpu_batch_size, "num_gpu_batches": policy.num_gpu_batches,
            **{f"{kind}_{tier}": getattr(getattr(policy, kind), tier)
               for kind in ("weights", "cache") for tier in ("gpu", "cpu", "disk")},
            "bound_prefill": choice.estimate.prefill.binding,
            "bound_decode": choice.estimate.step.binding}
