"""Time decode steps with the cache on disk, read whole or by recall.

    python benchmarks/studies/recall_disk.py --prompt-len 4096 --batch 2

A real model continues a real text (this repository's pages) with a different seed for each
sequence. Reads are O_DIRECT and bypass the page cache. With `overlap` the engine tries speculative
prefetch and keeps it if steps are faster. `read_gb_per_s` is the rate of long reads of the same
disk in the same run, and `roofline_step_s` the full cache's bytes over it. `disk_overlapped` is the
share of disk seconds that compute did not wait for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from cache_study import (
    RUN_COLUMNS,
    full_first,
    offload_read_rate,
    parsed,
    parser,
    run_columns,
    write_rows,
)

from flexgen_h2o import LLM, H2OConfig, Placement, Policy, SamplingParams
from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.errors import UserError

PAGES = Path(__file__).parents[2] / "docs"
CACHES = {
    "full": (None, None),
    "recall 20 %": (H2OConfig(heavy_ratio=0.1, recall=True), None),
    "recall 20 %, 60 % in memory": (H2OConfig(heavy_ratio=0.1, recall=True), 0.6),
    "recall 10 %": (H2OConfig(heavy_ratio=0.05, recall=True), None),
    "recall 5 %": (H2OConfig(heavy_ratio=0.025, recall=True), None),
    "recall 5 %, 20 % in memory": (H2OConfig(heavy_ratio=0.025, recall=True), 0.2),
}
"""The cache, and the share of it that `Policy.fast_set` keeps in memory."""
COLUMNS = (*RUN_COLUMNS, "fast_set", "overlap", "kv_cache_mb", "prefill_s", "decode_step_s",
           "disk_read_mb_per_step", "recall_hit_rate", "recall_wait_s_per_step",
           "disk_overlapped", "read_gb_per_s", "roofline_step_s", "decode_speedup_over_full")


def measure(args, name: str, overlap: bool) -> dict[str, object]:
    """Measure one run of a cache."""
    h2o, fast_set = CACHES[name]
    policy = Policy(gpu_batch_size=args.batch, cache=Placement(0, 0, 100), overlap=overlap,
                    fetch_chosen=h2o is not None, fast_set=fast_set)
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
    with LLM(args.model, policy=policy, h2o=h2o, progress=False,
             offload_dir=args.offload_dir) as llm:
        prompt = llm.tokenizer(text)["input_ids"][: args.prompt_len]
        if len(prompt) < args.prompt_len:
            raise UserError(f"the pages of docs/ have {len(prompt)} tokens: lower --prompt-len "
                            f"{args.prompt_len}")
        llm.generate([prompt[:16]] * args.batch, max_new_tokens=2, eos_token_id=-1)
        llm.generate([prompt] * args.batch, [
            SamplingParams(max_new_tokens=args.gen_len, do_sample=True, seed=seed, eos_token_id=-1)
            for seed in range(args.batch)])
        stats, steps = llm.stats, args.gen_len - 1
        nbytes, busy = stats.links.get("disk->cpu", (0, 0.0))
        wait = stats.recall_wait_seconds
        return {
            "cache": name, "fast_set": fast_set, "overlap": overlap, "dtype": stats.dtype,
            "kv_cache_mb": stats.full_kv_cache_bytes / 1e6, "prefill_s": stats.prefill_seconds,
            "decode_step_s": statistics.median(stats.step_seconds),
            "disk_read_mb_per_step": nbytes / 1e6 / steps,
            "recall_hit_rate": stats.recall_hit_rate,
            "recall_wait_s_per_step": wait / steps if h2o else None,
            "disk_overlapped": max(0.0, 1 - wait / busy) if h2o and busy else None,
        }


def rows(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield a row for each cache; with and without speculative prefetch for recall."""
    rate, full = offload_read_rate(args.offload_dir), None
    about = run_columns(args) | {"read_gb_per_s": rate / 1e9}
    for name in full_first(args.caches):
        for overlap in (True, False) if CACHES[name][0] else (True,):
            row = measure(args, name, overlap)
            full = row["decode_step_s"] if name == "full" else full
            yield row | about | {
                "roofline_step_s": row["kv_cache_mb"] * 1e6 / rate,
                "decode_speedup_over_full": full and full / row["decode_step_s"]}


def main() -> None:
    args = parsed(parser(__doc__, CACHES, model="smollm2-135m", prompt_len=8160, gen_len=25,
                         batch=4, csv="benchmarks/results/recall_disk.csv"))
    write_rows(args, COLUMNS, rows(args))


if __name__ == "__main__":
    sys.exit(exit_status(main))
