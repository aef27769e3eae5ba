"""Throughput of replicas and pipelines over several processes or machines.

    python benchmarks/studies/machines.py

Measured rows are of the commands in docs/several-machines.md on this machine, with one thread for
each process, compared with linear scaling. Simulated rows are of clusters of configs/hardware/ by
the planner's cost model; each row has its assumptions.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import check_header, write_csv
from flexgen_h2o.files.writing import check_folder
from flexgen_h2o.metrics.provenance import ORIGIN, cpu_model, origin
from flexgen_h2o.models.registry import published
from flexgen_h2o.planning.hardware import load_hardware
from flexgen_h2o.planning.pipeline import Network, search_pipeline
from flexgen_h2o.planning.search import PlanCandidate, PlanRequest, search
from flexgen_h2o.storage.free_memory import MemoryLimits

KINDS = ("measured", "simulated")
COLUMNS = (
    "kind", *ORIGIN, "cpu", "cpus", "threads", "repeats", "conditions", "hardware",
    "network_gb_per_s", "network_latency_us", "way", "processes", "model", "cache", "prompts",
    "prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches", "weights_gpu", "weights_cpu",
    "weights_disk", "cache_gpu", "cache_cpu", "cache_disk", "bound_prefill", "bound_decode",
    "tokens_per_s", "least_tokens_per_s", "most_tokens_per_s", "ideal_tokens_per_s",
    "share_of_ideal", "sent_bytes_per_token", "times_the_other", "wins", "reason", "assumed")


HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"
PIPELINE, REPLICAS = "pipeline", "replicas"
CACHES = {"full": CacheOptions(),
          "H2O 20 %": CacheOptions(H2OConfig(heavy_ratio=0.1, recent_ratio=0.1))}
ASSUMED = ("each machine is a GPU and a host of its own as in the hardware file; hidden states "
           "have the network for themselves and travel while ranks compute; weights and cache in "
           "16 bits; replicas share the prompts equally; loading is left out")


@dataclass(frozen=True)
class Cluster:
    """Machines of a hardware file, connected by an assumed network."""

    hardware: str
    machines: int
    network: Network


CLUSTERS = (Cluster("t4", 4, Network(1.25e9, 100e-6)),  # 10 Gbit/s Ethernet
            Cluster("a100", 8, Network(12.5e9, 30e-6)))  # 100 Gbit/s
MODELS = ("facebook/opt-30b", "facebook/opt-175b")
LENGTHS = (512, 128)
PROMPTS = (32, 256, 2048)
"""Prompts of the whole job; a few do not fill a block of each replica."""


def simulated_rows(clusters: Sequence[Cluster] = CLUSTERS, models: Sequence[str] = MODELS,
                   prompts: Sequence[int] = PROMPTS, lengths: tuple[int, int] = LENGTHS
                   ) -> Iterator[dict[str, object]]:
    """Yield rows of the pipeline and of replicas for each cluster, model, cache and job."""
    for cluster in clusters:
        for model in models:
            for cache in CACHES:
                for count in prompts:
                    yield from pair(cluster, model, cache, count, lengths)


def pair(cluster: Cluster, model: str, cache: str, prompts: int, lengths: tuple[int, int]
         ) -> list[dict[str, object]]:
    """Return the rows of both ways to run a job; the faster one `wins`."""
    hardware = load_hardware(HARDWARE / f"{cluster.hardware}.yaml")
    limits = MemoryLimits(hardware.gpu_bytes, hardware.cpu_bytes, hardware.disk_bytes)
    shape = published(model)
    if shape is None:
        raise UserError(f"{model} is no published shape")

    def request(count: int) -> PlanRequest:
        return PlanRequest(model=shape, prompt_len=lengths[0], gen_len=lengths[1], itemsize=2,
                           prompts=count, caches=(CACHES[cache],))

    def best(way: str) -> PlanCandidate:
        if way == PIPELINE:
            return search_pipeline(hardware, request(prompts), cluster.machines, limits,
                                cluster.network)[0].choice
        return search(hardware, request(-(-prompts // cluster.machines)), limits)[0]

    rows = []
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
            # Hidden states of the prompt and of all new tokens except the last, for each rank
            # but the last; tokens to all other ranks.
            positions = lengths[0] + lengths[1] - 1
            row["sent_bytes_per_token"] = (cluster.machines - 1) * (
                shape.hidden_size * 2 * positions / lengths[1] + 8)
        rows.append(row)
    rates = [row.get("tokens_per_s", 0) for row in rows]
    for row, rate, other in zip(rows, rates, reversed(rates), strict=True):
        row["wins"] = str(rate > other).lower()
        row["times_the_other"] = rate / other if rate and other else None
    return rows


def _figures(choice: PlanCandidate, prompts: int) -> dict[str, object]:
    """Return the columns of the best policy: its rate and placement."""
    policy = choice.run.policy
    return {"tokens_per_s": prompts * choice.run.workload.gen_len / choice.seconds,
            "gpu_batch_size": policy.gpu_batch_size, "num_gpu_batches": policy.num_gpu_batches,
            **{f"{kind}_{tier}": getattr(getattr(policy, kind), tier)
               for kind in ("weights", "cache") for tier in ("gpu", "cpu", "disk")},
            "bound_prefill": choice.estimate.prefill.binding,
            "bound_decode": choice.estimate.step.binding}


ONE = "one process"
_FLAGS = {ONE: (), PIPELINE: ("--pipeline-parallel", "{}"), REPLICAS: ("--data-parallel",)}
_SENT = re.compile(r"^sent to next rank +([\d.]+) GB", re.MULTILINE)


@dataclass(frozen=True)
class MeasuredJob:
    """The measured job: `requests` of `prompt_len` random tokens, `gen_len` new ones each.

    A block has `gpu_batch_size` x `num_gpu_batches` sequences.
    """

    model: str = "opt-125m"
    requests: int = 64
    prompt_len: int = 32
    gen_len: int = 32
    gpu_batch_size: int = 4
    num_gpu_batches: int = 4

    def write(self, path: Path, repeat: int) -> None:
        """Write the requests, with new prompts for each repeat."""
        draw = random.Random(repeat)
        with path.open("w", encoding="utf-8") as file:
            for number in range(self.requests):
                prompt = [draw.randrange(5, 40_000) for _ in range(self.prompt_len)]
                body = {"prompt": prompt, "max_tokens": self.gen_len, "temperature": 0}
                file.write(json.dumps({"custom_id": str(number), "method": "POST",
                                       "url": "/v1/completions", "body": body}) + "\n")


@dataclass(frozen=True)
class Rate:
    """Generated tokens per second after loading, and bytes that the first rank sends for each."""

    tokens_per_second: float
    sent_bytes: float


def run_job(job: MeasuredJob, way: str, processes: int, repeat: int) -> Rate:
    """Run the job in processes of one thread each. Raises `UserError` on failure."""
    with tempfile.TemporaryDirectory(prefix="machines-") as folder:
        requests, progress = Path(folder) / "requests.jsonl", Path(folder) / "progress.json"
        job.write(requests, repeat)
        start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                 str(processes)) if processes > 1 else ()
        command = [sys.executable, *start, "-m", "flexgen_h2o.batch", "-i", str(requests),
                   "-o", f"{folder}/results.jsonl", "--model", job.model, "--path", "_DUMMY_",
                   "--device", "cpu", "--progress-file", str(progress),
                   "--gpu-batch-size", str(job.gpu_batch_size),
                   "--num-gpu-batches", str(job.num_gpu_batches),
                   *(word.format(processes) for word in _FLAGS[way])]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
                              capture_output=True, timeout=300)
        if done.returncode:
            raise UserError(f"{way} of {processes} failed: {done.stderr[-400:]}")
        state = json.loads(progress.read_text(encoding="utf-8"))
    if state["failed"] or state["left"]:
        raise UserError(f"{way} of {processes}: {state['failed']} requests failed")
    sent = _SENT.search(done.stdout)
    return Rate(state["tokens_per_second"],
                float(sent[1]) * 1e9 / state["generated_tokens"] if sent else 0)


def ways(cpus: int) -> list[tuple[str, int]]:
    """Return one process, and pipelines and replicas of 2 and 4 if there are enough CPUs."""
    return [(ONE, 1), *((way, count) for count in (2, 4) if count <= cpus
                        for way in (PIPELINE, REPLICAS))]


def measured_rows(job: MeasuredJob, repeats: int, conditions: str, *, cpus: int,
                  run: Callable[[MeasuredJob, str, int, int], Rate] = run_job
                  ) -> Iterator[dict[str, object]]:
    """Yield a row for each way: medians of alternating repeats, and the share of the ideal."""
    order: Sequence[tuple[str, int]] = ways(cpus)
    rates_by_place: dict[tuple[str, int], list[Rate]] = {place: [] for place in order}
    for repeat in range(repeats):
        for place in order:
            rates_by_place[place].append(run(job, *place, repeat))
            rate = rates_by_place[place][-1].tokens_per_second
            print(f"{place[0]} x {place[1]}: {rate:.1f} tokens/s",
                  file=sys.stderr, flush=True)
    alone = statistics.median(rate.tokens_per_second for rate in rates_by_place[ONE, 1])
    for (way, processes), all_rates in rates_by_place.items():
        rates = [rate.tokens_per_second for rate in all_rates]
        median = statistics.median(rates)
        yield origin() | {
            "kind": "measured", "way": way, "processes": processes, "model": job.model,
            "cache": "full", "prompts": job.requests, "prompt_len": job.prompt_len,
            "gen_len": job.gen_len, "gpu_batch_size": job.gpu_batch_size,
            "num_gpu_batches": job.num_gpu_batches, "cpu": cpu_model(), "cpus": cpus,
            "threads": 1, "repeats": repeats, "conditions": conditions, "tokens_per_s": median,
            "least_tokens_per_s": min(rates), "most_tokens_per_s": max(rates),
            "ideal_tokens_per_s": processes * alone, "share_of_ideal": median / processes / alone,
            "sent_bytes_per_token": statistics.median(rate.sent_bytes for rate in all_rates)}


def kept(path: Path, kinds: Sequence[str]) -> list[dict[str, object]]:
    """Return the rows of a file of other kinds. Raises `UserError` for other columns."""
    if not path.exists():
        return []
    check_header(path, COLUMNS, flag="--out")
    with path.open(newline="", encoding="utf-8") as file:
        return [dict(row) for row in csv.DictReader(file) if row["kind"] not in kinds]


def shown(row: dict[str, object]) -> str:
    """Return a row as a line of text."""
    rate = row.get("tokens_per_s")
    words = f"{rate:9.2f} tokens/s" if rate else str(row["reason"])
    where = row.get("hardware") or "measured"
    return (f"{where:24} {row['model']:18} {row['cache']:9} {row['prompts']:5} prompts  "
            f"{row['way']:11} x {row['processes']}  {words}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/machines.csv"))
    parser.add_argument("--only", choices=KINDS, help="measure only these rows and keep the others")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--conditions", default="", help="text for the measured rows")
    args = parser.parse_args(argv)
    check_int("--repeats", args.repeats, ge=1)
    check_folder("--out", str(args.out.parent), [str(args.out)])
    kinds = (args.only,) if args.only else KINDS
    table = kept(args.out, kinds)
    if "measured" in kinds:
        for row in measured_rows(MeasuredJob(), args.repeats, args.conditions,
                                 cpus=len(os.sched_getaffinity(0))):
            table.append(row)
            print(shown(row), flush=True)
    if "simulated" in kinds:
        print(f"assumed: {ASSUMED}")
        for row in simulated_rows():
            table.append(origin() | row)
            print(shown(row), flush=True)
    table.sort(key=lambda row: KINDS.index(str(row["kind"])))
    write_csv(args.out, COLUMNS, table)


if __name__ == "__main__":
    sys.exit(exit_status(main))
