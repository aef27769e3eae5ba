"""Time decode steps alone and beside busy processes, by OpenMP wait policy.

    python benchmarks/studies/spinning.py

Each wait policy has its own process, since OpenMP reads its settings once. They take turns
`--repeats` times, beside 0 to 3 processes that only compute. A sample is the median step of a short
generation. It is repeated if other processes used more than `--quiet` CPUs meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

import psutil

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import write_csv
from flexgen_h2o.files.writing import check_folder
from flexgen_h2o.kernels.cpu.wait_policy import busy_seconds

WAYS: dict[str, dict[str, str]] = {
    "as it comes": {},  # chosen by kernels/cpu/library.py
    "spinning": {"GOMP_SPINCOUNT": "300000"},  # libgomp's own default
    "asleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
COLUMNS = ("date", "commit", "host", "cpu", "cpus", "torch", "model", "batch", "gen_len", "busy",
           "waiting", "repeats", "step_ms", "least_ms", "most_ms", "over_alone")


def serve(model: str, batch: int) -> None:
    """Serve one wait policy: for each length on stdin, print the median step in seconds."""
    from flexgen_h2o import LLM, H2OConfig, Policy

    with LLM(model, h2o=H2OConfig(heavy_ratio=0.2), policy=Policy(gpu_batch_size=batch),
             progress=False) as llm:
        prompts = [[5 + row] * 20 for row in range(batch)]
        llm.generate(prompts, max_new_tokens=4, eos_token_id=-1)
        print("ready", flush=True)
        for length in sys.stdin:
            llm.generate(prompts, max_new_tokens=int(length), eos_token_id=-1)
            print(statistics.median(llm.stats.step_seconds), flush=True)


def measure(args) -> dict[tuple[int, str], list[float]]:
    """Return step seconds by (busy processes, wait policy), one sample a repeat."""
    with ExitStack() as opened:
        def start(*command: str, **options) -> subprocess.Popen:
            process = subprocess.Popen([sys.executable, *command], **options)
            opened.callback(process.wait)
            opened.callback(process.kill)
            return process

        workers = {way: start(__file__, "--serve", "--model", args.model, "--batch",
                              str(args.batch), env=os.environ | options, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                   for way, options in WAYS.items()}
        for worker in workers.values():
            if worker.stdout.readline() != "ready\n":
                raise UserError("a process of the benchmark did not start; see above")
        load = [start("-c", "while True: pass") for _ in range(max(args.busy))]
        for process in load:
            process.send_signal(signal.SIGSTOP)
        rates: dict[tuple[int, str], list[float]] = {}
        processes = [psutil.Process(process.pid) for process in (*workers.values(), *load)]
        for _ in range(args.repeats):
            for busy in args.busy:
                for process in load[:busy]:
                    process.send_signal(signal.SIGCONT)
                for way, worker in workers.items():
                    step = sample(worker, processes, args)
                    rates.setdefault((busy, way), []).append(step)
                    print(f"{busy} busy, {way}: {step * 1e3:.1f} ms", flush=True)
                for process in load:
                    process.send_signal(signal.SIGSTOP)
        return rates


def sample(worker: subprocess.Popen, processes: list[psutil.Process], args) -> float:
    """Return the seconds of a step measured while other processes are idle."""
    def others() -> float:
        used = [process.cpu_times() for process in processes]
        return busy_seconds() - sum(times.user + times.system for times in used)

    while True:
        before, began = others(), time.monotonic()
        time.sleep(0.6)  # until the last process's threads sleep
        print(args.gen_len, file=worker.stdin, flush=True)
        step = float(worker.stdout.readline())
        if (others() - before) / (time.monotonic() - began) <= args.quiet:
            return step


def write(args, rates: dict[tuple[int, str], list[float]]) -> None:
    """Write and print the medians; `over_alone` is relative to spinning threads without load."""
    import torch

    from flexgen_h2o.metrics.provenance import cpu_model, source_commit

    alone = statistics.median(rates[min(args.busy), "spinning"])
    rows = []
    for (busy, way), seconds in rates.items():
        step = statistics.median(seconds)
        rows.append({
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": source_commit(), "host": platform.node(), "cpu": cpu_model(),
            "cpus": len(os.sched_getaffinity(0)), "torch": torch.__version__,
            "model": args.model, "batch": args.batch, "gen_len": args.gen_len, "busy": busy,
            "waiting": way, "repeats": len(seconds), "step_ms": f"{step * 1e3:.1f}",
            "least_ms": f"{min(seconds) * 1e3:.1f}", "most_ms": f"{max(seconds) * 1e3:.1f}",
            "over_alone": f"{step / alone:.2f}"})
        print(f"{busy} busy, {way:12} {step * 1e3:7.1f} ms  {step / alone:5.2f}")
    write_csv(args.csv, COLUMNS, rows, flag="--csv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--gen-len", type=int, default=65)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quiet", type=float, default=0.2)
    parser.add_argument("--csv", default="benchmarks/results/spinning.csv")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.model, args.batch)
        return
    for name, low in (("batch", 1), ("gen_len", 2), ("repeats", 1)):
        check_int(flag_name(name), getattr(args, name), ge=low)
    for busy in args.busy:
        check_int("--busy", busy, ge=0)
    check_folder("--csv", os.path.dirname(args.csv) or ".", [args.csv])
    write(args, measure(args))


if __name__ == "__main__":
    sys.exit(exit_status(main))
