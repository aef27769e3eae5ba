"""Time prefill and decode of the engine and of transformers, in memory and from disk.

    python benchmarks/make_checkpoint.py --model facebook/opt-1.3b --out /tmp/opt-1.3b
    python benchmarks/throughput.py --model /tmp/opt-1.3b --batches 1 4 16

Each system runs in a separate process with the same weights, prompts, lengths and threads. After a
warm-up of 2 tokens on shorter prompts, the systems take turns `--repeats` times; figures are
medians. transformers also runs with a tuned glibc allocator (huge pages, nothing returned to the
system); the engine needs no tuning, as its loop hardly allocates. Each figure has its roofline:
bytes over the measured read rate or FLOPs over the matmul rate, whichever is longer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from comparison import random_prompts
from processes import TUNED
from rooflines import ITEMSIZES, Load, WorkAmount, measure_rates, work

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import CsvWriter, report_partial_rows
from flexgen_h2o.files.writing import check_writable, open_atomic

SYSTEMS = ("engine", "engine h2o", "engine disk", "engine 8-bit", "engine 4-bit",
           "engine 4-bit h2o", "transformers", "transformers tuned")
COLUMNS = (
    "date", "commit", "host", "cpu", "threads", "torch", "transformers", "model", "dtype",
    "prompt_len", "gen_len", "batch", "system", "repeats", "prefill_s", "decode_step_s",
    "tokens_per_s", "load_s", "load_gb_per_s", "peak_rss_gb", "gb_read_per_step",
    "disk_gb_per_s", "prefill_roofline_s", "decode_roofline_s", "prefill_over_roofline",
    "decode_over_roofline",
    "prefill_speedup_over_transformers", "decode_speedup_over_transformers",
    "prefill_speedup_over_tuned", "decode_speedup_over_tuned", "prefill_speedup_over_engine",
    "decode_speedup_over_engine",
)


def run_engine(args) -> list[dict]:
    """Run the engine with all weights in memory or on disk (O_DIRECT, without page cache).

    "h2o" keeps heavy hitters and recent tokens, `--hh-ratio` of the prompt each. Quantized weights
    come from the weight cache, which is filled first.
    """
    from flexgen_h2o import LLM, H2OConfig, Placement, Policy

    weights = Placement(0, 0, 100) if args.worker == "engine disk" else Placement(100, 0, 0)
    policy = Policy(gpu_batch_size=args.batch, weights=weights)
    h2o = H2OConfig(heavy_ratio=args.hh_ratio) if "h2o" in args.worker else None
    options = {"policy": policy, "h2o": h2o, "dtype": args.dtype, "progress": False,
               "weight_bits": weight_bits(args.worker)}
    if options["weight_bits"] != 16:
        LLM(args.model, **options).close()
    rows = []
    with LLM(args.model, **options) as llm:
        tokens = random_prompts(args.batch, args.prompt_len, llm.vocab_size)
        llm.generate(random_prompts(args.batch, args.warm_len, llm.vocab_size), max_new_tokens=2,
                     eos_token_id=-1)
        for _ in range(args.inner):
            llm.generate(tokens, max_new_tokens=args.gen_len, eos_token_id=-1)
            stats = llm.stats
            moved = stats.links.get("disk->cpu", (0, 0.0))[0]
            rows.append({"prefill": stats.prefill_seconds,
                         "step": statistics.mean(stats.step_seconds),
                         "read": moved / args.gen_len, "rss": stats.peak_process_bytes,
                         "load": stats.load_seconds})
    return rows


def weight_bits(system: str) -> int:
    """Return the weight bits of a system of `SYSTEMS`."""
    return next((bits for bits in (12, 8, 4) if f"{bits}-bit" in system), 16)


def run_transformers(args) -> list[dict]:
    """Run transformers' generate with its default attention (SDPA) and cache."""
    import torch
    from baselines.huggingface import timed_generate
    from transformers import AutoModelForCausalLM

    from flexgen_h2o.metrics.provenance import peak_process_bytes

    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    load = time.perf_counter() - began
    vocab = model.config.vocab_size
    timed_generate(model, random_prompts(args.batch, args.warm_len, vocab), 2)
    tokens, rows = random_prompts(args.batch, args.prompt_len, vocab), []
    for _ in range(args.inner):
        timing = timed_generate(model, tokens, args.gen_len)
        rows.append({"prefill": timing.prefill, "step": statistics.mean(timing.steps),
                     "read": 0, "rss": peak_process_bytes(), "load": load})
    return rows


def spawn(args, system: str, batch: int) -> list[dict]:
    """Run a system in a separate process and return its rows. Raises `UserError`."""
    command = [sys.executable, __file__, "--worker", system, "--batch", str(batch)]
    for name in ("model", "prompt_len", "warm_len", "gen_len", "dtype", "threads", "inner",
                 "hh_ratio"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    if system.endswith("tuned"):
        environment["GLIBC_TUNABLES"] = TUNED
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{system} at batch {batch} failed, status {done.returncode}: "
                        f"{done.stderr[-2000:].removeprefix('error: ')}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def amounts(config, batch: int, system: str, args) -> WorkAmount:
    """Return the bytes and FLOPs of a system's workload."""
    cached = args.prompt_len + args.gen_len / 2
    if "h2o" in system:
        cached = 2 * int(args.hh_ratio * args.prompt_len)
    return work(config, Load(batch, args.prompt_len, args.gen_len, cached, ITEMSIZES[args.dtype],
                             weight_bits(system)))


def rates_of(args) -> dict[str, float]:
    """Measure this machine's rates."""
    files = list(Path(args.model).glob("*.safetensors"))
    if not files:
        raise UserError(f"no safetensors file in --model {args.model}: make_checkpoint.py writes "
                        "such a folder")
    largest = max(files, key=lambda p: p.stat().st_size)
    return measure_rates(str(largest), args.dtype)


def rooflines(system: str, amount: WorkAmount, read: float, rates: dict, compute_alone: float
              ) -> tuple[float, float]:
    """Return the least seconds of the prefill and of a decode step.

    With weights on disk (`read` bytes a step), compute alone is the engine's step in memory.
    """
    prefill = amount.prefill_flops / rates["gemm"]
    from_memory = (amount.weight_bytes + amount.cache_bytes) / rates["memory"]
    decode = max(from_memory, amount.step_flops / rates["gemm"])
    if system == "engine disk":
        from_disk = read / rates["disk"]
        return max(prefill, from_disk), max(from_disk, compute_alone)
    return prefill, decode


def describe(args) -> dict[str, object]:
    """Return the columns that all rows share."""
    from importlib.metadata import version

    from flexgen_h2o.metrics.provenance import cpu_model, source_commit

    return {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": source_commit(), "host": platform.node(), "cpu": cpu_model(),
            "threads": args.threads, "torch": version("torch"),
            "transformers": version("transformers"), "model": Path(args.model).name,
            "dtype": args.dtype, "prompt_len": args.prompt_len, "gen_len": args.gen_len,
            "repeats": args.repeats * args.inner}


def compare(args):
    """Measure all systems in turn at each batch size; yield a row of medians for each."""
    from flexgen_h2o.models.registry import from_transformers, read_config

    config = from_transformers(read_config(Path(args.model)), args.model)
    for batch in args.batches:
        runs: dict[str, list[dict]] = {system: [] for system in args.systems}
        rates: list[dict[str, float]] = []
        for repeat in range(args.repeats):
            rates.append(rates_of(args))
            for system in args.systems:
                runs[system] += spawn(args, system, batch)
                print(f"batch {batch} repeat {repeat} {system}: {runs[system][-1]}",
                      file=sys.stderr, flush=True)
        middle = {system: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
                  for system, rows in runs.items()}
        typical = {key: statistics.median(r[key] for r in rates) for key in rates[0]}
        for system in args.systems:
            yield row_of(args, config, batch, system, middle, typical)


def row_of(args, config, batch: int, system: str, middle: dict, rates: dict) -> dict:
    """Return a row from the medians of all systems at one batch size."""
    run = middle[system]
    amount = amounts(config, batch, system, args)
    prefill_roofline, decode_roofline = rooflines(system, amount, run["read"], rates,
                                                  middle["engine"]["step"])
    row = {
        "batch": batch, "system": system, "prefill_s": run["prefill"],
        "decode_step_s": run["step"],
        "tokens_per_s": batch * args.gen_len / (
            run["prefill"] + (args.gen_len - 1) * run["step"]),
        "load_s": run["load"], "load_gb_per_s": amount.all_bytes / run["load"] / 1e9,
        "peak_rss_gb": run["rss"] / 1e9, "gb_read_per_step": run["read"] / 1e9,
        "disk_gb_per_s": rates["disk"] / 1e9,
        "prefill_roofline_s": prefill_roofline, "decode_roofline_s": decode_roofline,
        "prefill_over_roofline": run["prefill"] / prefill_roofline,
        "decode_over_roofline": run["step"] / decode_roofline,
    }
    for name, baseline in (("transformers", "transformers"), ("tuned", "transformers tuned"),
                           ("engine", "engine")):
        for stage, key in (("prefill", "prefill"), ("decode", "step")):
            if baseline in middle:
                row[f"{stage}_speedup_over_{name}"] = middle[baseline][key] / run[key]
    return describe(args) | row


def show(table: list[dict]) -> str:
    """Return the main figures as a Markdown table."""
    head = ("batch", "system", "load s", "prefill s", "decode step s", "tokens/s", "peak RSS GB",
            "prefill / roofline", "step / roofline", "decode vs transformers", "vs tuned",
            "vs engine")
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for row in table:
        cells = (row["batch"], row["system"], f"{row['load_s']:.1f}", f"{row['prefill_s']:.2f}",
                 f"{row['decode_step_s']:.3f}", f"{row['tokens_per_s']:.2f}",
                 f"{row['peak_rss_gb']:.1f}", f"{row['prefill_over_roofline']:.2f}",
                 f"{row['decode_over_roofline']:.2f}",
                 *(f"{row[f'decode_speedup_over_{baseline}']:.2f}x"
                   if f"decode_speedup_over_{baseline}" in row else "-"
                   for baseline in ("transformers", "tuned", "engine")))
        lines.append(" | ".join(map(str, cells)))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder with config.json and safetensors")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens")
    parser.add_argument("--warm-len", type=int, default=128, help="tokens of warm-up prompts")
    parser.add_argument("--gen-len", type=int, default=16, help="tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3, help="rounds over all systems")
    parser.add_argument("--inner", type=int, default=1, help="measurements in each process")
    parser.add_argument("--csv", default="benchmarks/results/throughput.csv")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS),
                        help="must include 'engine', which others are compared with")
    parser.add_argument("--hh-ratio", type=float, default=0.1, help="for 'engine h2o'")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        import torch

        torch.set_num_threads(args.threads)
        run = run_engine if args.worker.startswith("engine") else run_transformers
        print(json.dumps(run(args)))
        return
    if "engine" not in args.systems:
        parser.error("--systems needs 'engine'")
    for name, low in (("repeats", 1), ("inner", 1), ("gen_len", 2), ("prompt_len", 1),
                      ("warm_len", 1), ("threads", 1)):
        check_int(flag_name(name), getattr(args, name), ge=low)
    for batch in args.batches:
        check_int("--batches", batch, ge=1)
    beside_rows = Path(args.csv).with_suffix(".md")
    check_writable("--csv", args.csv, beside=(str(beside_rows),))
    table, file = [], CsvWriter(args.csv, COLUMNS, end="\r\n")
    with report_partial_rows(file):
        for row in compare(args):
            table.append(row)
            file.write(dict.fromkeys(COLUMNS) | row)
    file.finish()
    text = show(table)
    with open_atomic(beside_rows) as beside:
        beside.write(text + "\n")
    print(text)


if __name__ == "__main__":
    sys.exit(exit_status(main))
