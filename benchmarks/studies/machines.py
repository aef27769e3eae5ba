"""Throughput of replicas and pipelines over several processes of this machine.

    python benchmarks/studies/machines.py

A job of `batch` runs in one process, and as pipelines and replicas of 2 (and 4, on as many CPUs),
with one thread for each process. Time starts when the first process has loaded.
"""

from __future__ import annotations

import argparse
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
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.writing import check_folder
from flexgen_h2o.metrics.provenance import ORIGIN, cpu_model, origin

sys.path.insert(0, str(Path(__file__).parents[1]))
from csv_files import write_csv

COLUMNS = (
    "kind", *ORIGIN, "cpu", "cpus", "threads", "repeats", "conditions", "hardware",
    "network_gb_per_s", "network_latency_us", "way", "processes", "model", "cache", "prompts",
    "prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches", "weights_gpu", "weights_cpu",
    "weights_disk", "cache_gpu", "cache_cpu", "cache_disk", "bound_prefill", "bound_decode",
    "tokens_per_s", "least_tokens_per_s", "most_tokens_per_s", "ideal_tokens_per_s",
    "share_of_ideal", "sent_bytes_per_token", "times_the_other", "wins", "reason", "assumed")
"""Of these, `ideal_tokens_per_s` is the rate of one process times their number. `hardware`,
`network_*`, placements, bounds, `wins` and `assumed` are empty."""

ONE, PIPELINE, REPLICAS = "one process", "pipeline", "replicas"
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/machines.csv"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--conditions", default="", help="other load of the machine")
    args = parser.parse_args(argv)
    check_int("--repeats", args.repeats, ge=1)
    check_folder("--out", str(args.out.parent), [str(args.out)])
    rows = measured_rows(MeasuredJob(), args.repeats, args.conditions,
                         cpus=len(os.sched_getaffinity(0)))
    write_csv(args.out, COLUMNS, rows)


if __name__ == "__main__":
    sys.exit(exit_status(main))
