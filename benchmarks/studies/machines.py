"""Replicas and a pipeline over several processes or machines: measured here, and simulated.

    python benchmarks/studies/machines.py

Measured: the commands of docs/several-machines.md on this machine, one thread to a process, beside
as many times one process. Simulated: clusters of configs/hardware/ by the planner's cost model,
with an assumed network; all that is assumed stands in the rows. `plots.py machines` draws both.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scaling import measured, simulated  # noqa: E402

from flexgen_h2o.cli.command import exit_status  # noqa: E402
from flexgen_h2o.cli.parser import Parser  # noqa: E402
from flexgen_h2o.config.validation import check_int  # noqa: E402
from flexgen_h2o.files.rows import (
    check_header,  # noqa: E402
    write_csv,  # noqa: E402
)
from flexgen_h2o.files.writing import check_folder  # noqa: E402
from flexgen_h2o.metrics.provenance import ORIGIN, origin  # noqa: E402

KINDS = ("measured", "simulated")
COLUMNS = (
    "kind", *ORIGIN, "cpu", "cpus", "threads", "repeats", "conditions", "hardware",
    "network_gb_per_s", "network_latency_us", "way", "processes", "model", "cache", "prompts",
    "prompt_len", "gen_len", "gpu_batch_size", "num_gpu_batches", "weights_gpu", "weights_cpu",
    "weights_disk", "cache_gpu", "cache_cpu", "cache_disk", "bound_prefill", "bound_decode",
    "tokens_per_s", "least_tokens_per_s", "most_tokens_per_s", "ideal_tokens_per_s",
    "share_of_ideal", "sent_bytes_per_token", "times_the_other", "wins", "reason", "assumed")


def kept(path: Path, kinds: Sequence[str]) -> list[dict[str, object]]:
    """The rows of a file that are of none of these kinds. `UserError` if it has other columns."""
    if not path.exists():
        return []
    check_header(path, COLUMNS, flag="--out")
    with path.open(newline="", encoding="utf-8") as file:
        return [dict(row) for row in csv.DictReader(file) if row["kind"] not in kinds]


def shown(row: dict[str, object]) -> str:
    """A row as a line."""
    rate = row.get("tokens_per_s")
    words = f"{rate:9.2f} tokens/s" if rate else str(row["reason"])
    where = row.get("hardware") or "measured"
    return (f"{where:24} {row['model']:18} {row['cache']:9} {row['prompts']:5} prompts  "
            f"{row['way']:11} x {row['processes']}  {words}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0],
                    formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/machines.csv"))
    parser.add_argument("--only", choices=KINDS, help="leave the other rows as they are")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--conditions", default="", help="words for the rows that are measured")
    args = parser.parse_args(argv)
    check_int("--repeats", args.repeats, low=1)
    check_folder("--out", str(args.out.parent), [str(args.out)])
    kinds = (args.only,) if args.only else KINDS
    table = kept(args.out, kinds)
    if "measured" in kinds:
        for row in measured.rows(measured.MeasuredJob(), args.repeats, args.conditions,
                                 cpus=len(os.sched_getaffinity(0))):
            table.append(row)
            print(shown(row), flush=True)
    if "simulated" in kinds:
        print(f"assumed: {simulated.ASSUMED}")
        for row in simulated.rows():
            table.append(origin() | row)
            print(shown(row), flush=True)
    table.sort(key=lambda row: KINDS.index(str(row["kind"])))
    write_csv(args.out, COLUMNS, table)


if __name__ == "__main__":
    sys.exit(exit_status(main))
