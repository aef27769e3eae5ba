"""Memory, decode time and disk traffic of smaller caches, compared with the full cache.

    python benchmarks/studies/cache.py

The model has OPT-125M's shape and random weights. Caches take turns `--repeats` times, each after a
short warm-up; figures are medians. The roofline of a decode step is the bytes of weights and cache
over the memory rate of the same run or, with the cache on disk, its bytes over the raw O_DIRECT
rate of the same run. Disk writes of a step exclude those of the prefill, which a run that ends
after the prefill measures.
"""

from __future__ import annotations

import random
import statistics
import sys

from cache_study import RUN_COLUMNS, offload_read_rate, parsed, parser, run_columns

from flexgen_h2o import LLM, H2OConfig, Placement, Policy
from flexgen_h2o.cache import tiers
from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.config.limits import CACHE_GROWTH
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.files.rows import write_csv
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.storage.links import memory_read_rate

DISK = Placement(0, 0, 100)
CACHES = {
    "full": {},
    "h2o 20 %": {"h2o": H2OConfig(heavy_ratio=0.1)},
    "window 20 %": {"h2o": H2OConfig(recent_ratio=0.2)},
    "h2o 20 %, 8 bits": {"h2o": H2OConfig(heavy_ratio=0.1), "cache_bits": 8},
    "h2o 20 %, 4 bits": {"h2o": H2OConfig(heavy_ratio=0.1), "cache_bits": 4},
    "full, 4 bits": {"cache_bits": 4},
    "full, on disk": {"place": DISK},
    "full, on disk, empty slots too": {"place": DISK, "growth": 1 << 20},
    "h2o 20 %, on disk": {"place": DISK, "h2o": H2OConfig(heavy_ratio=0.1)},
}
COLUMNS = (
    *RUN_COLUMNS, "repeats", "kv_cache_mb", "of_full", "prefill_s", "decode_step_s",
    "roofline_step_s", "step_over_roofline", "decode_speedup_over_full", "disk_read_mb_per_step",
    "disk_written_mb_per_step",
)


def measure(args, name: str) -> dict[str, float]:
    """Measure one run of a cache."""
    options = dict(CACHES[name])
    tiers.CACHE_GROWTH = options.pop("growth", CACHE_GROWTH)
    policy = Policy(gpu_batch_size=args.batch,
                    cache=options.pop("place", Placement(100, 0, 0)))
    draw = random.Random(0)
    with LLM(args.model, path="_DUMMY_", policy=policy, progress=False,
             offload_dir=args.offload_dir, **options) as llm:
        prompts = [[draw.randrange(5, llm.vocab_size) for _ in range(args.prompt_len)]
                   for _ in range(args.batch)]
        llm.generate([prompt[:16] for prompt in prompts], max_new_tokens=2, eos_token_id=-1)
        outputs = llm.generate(prompts, max_new_tokens=args.gen_len, eos_token_id=-1)
        stats, steps, by_prefill = llm.stats, args.gen_len - 1, 0
        if policy.cache.disk:  # run again, ending with the first tokens
            ends = [output.token_ids[0] for output in outputs]
            llm.generate(prompts, max_new_tokens=args.gen_len, eos_token_id=ends)
            by_prefill = written_bytes(llm.stats)
        return {
            "kv_cache_mb": stats.kv_cache_bytes / 1e6,
            "prefill_s": stats.prefill_seconds,
            "decode_step_s": statistics.median(stats.step_seconds),
            "weights": stats.num_parameters * 2,
            "disk_read_mb_per_step": stats.links.get("disk->cpu", (0,))[0] / 1e6 / steps,
            "disk_written_mb_per_step": (written_bytes(stats) - by_prefill) / 1e6 / steps,
            "dtype": stats.dtype,
        }


def written_bytes(stats: RunStats) -> int:
    """Return the bytes that a run has written to disk."""
    return stats.links.get("cpu->disk", (0,))[0]


def main() -> None:
    flags = parser(__doc__, CACHES, model="facebook/opt-125m", prompt_len=512, gen_len=33,
                   batch=32, csv="benchmarks/results/cache.csv")
    flags.add_argument("--repeats", type=int, default=3)
    args = parsed(flags)
    needed = {"full", *("full, on disk" for name in args.caches if "disk" in name)}
    if missing := sorted(needed - {*args.caches}):
        flags.error(f"--caches needs {missing[0]!r}, which others are compared with")
    check_int("--repeats", args.repeats, ge=1)
    runs: dict[str, list[dict]] = {name: [] for name in args.caches}
    for _ in range(args.repeats):
        for name in args.caches:
            row = measure(args, name)
            runs[name].append(row)
            print(name, {k: round(v, 4) for k, v in row.items() if k != "dtype"}, flush=True)
    disk_rate = offload_read_rate(args.offload_dir)
    write(args, runs, memory_read_rate(), disk_rate)


def write(args, runs, memory_rate: float, disk_rate: float) -> None:
    """Write medians, rooflines and ratios as CSV, and print them."""
    middle = {name: {key: statistics.median(row[key] for row in rows) for key in rows[0]
                     if key != "dtype"} for name, rows in runs.items()}
    rows = []
    for name, row in middle.items():
        here = 0 if "disk" in name else row["kv_cache_mb"]
        roofline = max((row["weights"] + here * 1e6) / memory_rate,
                       row["kv_cache_mb"] * 1e6 / disk_rate if "disk" in name else 0)
        rows.append(row | run_columns(args) | {
            "dtype": runs[name][0]["dtype"], "cache": name, "repeats": args.repeats,
            "of_full": row["kv_cache_mb"] / middle["full"]["kv_cache_mb"],
            "roofline_step_s": roofline, "step_over_roofline": row["decode_step_s"] / roofline,
            "decode_speedup_over_full": (
                middle["full, on disk" if "disk" in name else "full"]["decode_step_s"]
                / row["decode_step_s"]),
        })
    write_csv(args.csv, COLUMNS, rows, flag="--csv")
    shown = ("cache", "kv_cache_mb", "of_full", "prefill_s", "decode_step_s", "step_over_roofline",
             "decode_speedup_over_full")
    for row in [dict(zip(shown, shown, strict=True)), *rows]:
        print("  ".join(f"{row[c]:>18.4g}" if isinstance(row[c], float) else f"{row[c]:>18}"
                        for c in shown))


if __name__ == "__main__":
    sys.exit(exit_status(main))
