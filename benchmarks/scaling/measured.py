"""Ranks and replicas on this machine, one thread each: the commands of `batch`, and their rates."""

from __future__ import annotations

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

from scaling.simulated import PIPELINE, REPLICAS

from flexgen_h2o.errors import UserError
from flexgen_h2o.metrics.provenance import cpu_model, origin

ONE = "one process"
_FLAGS = {ONE: (), PIPELINE: ("--pipeline-parallel", "{}"), REPLICAS: ("--data-parallel",)}
_SENT = re.compile(r"^sent to next rank +([\d.]+) GB", re.MULTILINE)


@dataclass(frozen=True)
class MeasuredJob:
    """The job that all ways do: `requests` of `prompt_len` random tokens, `gen_len` new ones each.

    A block is of `gpu_batch_size` x `num_gpu_batches` sequences.
    """

    model: str = "opt-125m"
    requests: int = 64
    prompt_len: int = 32
    gen_len: int = 32
    gpu_batch_size: int = 4
    num_gpu_batches: int = 4

    def write(self, path: Path, repeat: int) -> None:
        """Its requests, others for each repeat."""
        draw = random.Random(repeat)
        with path.open("w", encoding="utf-8") as file:
            for number in range(self.requests):
                prompt = [draw.randrange(5, 40_000) for _ in range(self.prompt_len)]
                body = {"prompt": prompt, "max_tokens": self.gen_len, "temperature": 0}
                file.write(json.dumps({"custom_id": str(number), "method": "POST",
                                       "url": "/v1/completions", "body": body}) + "\n")


@dataclass(frozen=True)
class Rate:
    """Generated tokens per second since loading, and bytes that the first rank sent for each."""

    tokens_per_second: float
    sent_bytes: float


def run(job: MeasuredJob, way: str, processes: int, repeat: int) -> Rate:
    """Do the job in so many processes of one thread each. Raises `UserError` if that fails."""
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
    """One process, and pipelines and replicas of 2 and 4 where there are as many CPUs."""
    return [(ONE, 1), *((way, count) for count in (2, 4) if count <= cpus
                        for way in (PIPELINE, REPLICAS))]


def rows(job: MeasuredJob, repeats: int, conditions: str, *, cpus: int,
         run: Callable[[MeasuredJob, str, int, int], Rate] = run) -> Iterator[dict[str, object]]:
    """A row for each way: medians of repeats, which take turns, and the share of the ideal."""
    order: Sequence[tuple[str, int]] = ways(cpus)
    found: dict[tuple[str, int], list[Rate]] = {each: [] for each in order}
    for repeat in range(repeats):
        for each in order:
            found[each].append(run(job, *each, repeat))
            print(f"{each[0]} x {each[1]}: {found[each][-1].tokens_per_second:.1f} tokens/s",
                  file=sys.stderr, flush=True)
    alone = statistics.median(rate.tokens_per_second for rate in found[ONE, 1])
    for (way, processes), all_rates in found.items():
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
