"""GPU kernels without a GPU: every Triton kernel compiled, and ptxas' report of each.

    python benchmarks/studies/gpu_static.py

All variants (dtypes, head sizes, bits, and the configurations that the tuner tries) for the cards
of `kernel_timing.gpu_cards`. A row has registers, spills and shared memory as ptxas reports them,
the occupancy that follows, and bytes per FLOP of the main loop. The file is gone on with: only what
is new, or whose kernel has changed, is compiled. Ends with status 1 if a kernel does not compile,
spills, does not fit, or has the fault of `kernel_timing.gpu_hazards`. `--check` compiles nothing
but `--sample` of the variants, and fails if the file is not what all others would write.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # Triton reads it when it is imported
sys.path.insert(0, str(Path(__file__).parents[1]))

import triton  # noqa: E402
from kernel_timing.gpu_cards import CARDS, Card  # noqa: E402
from kernel_timing.gpu_compiler import KernelLaunch, compiled, identity, launches  # noqa: E402
from kernel_timing.gpu_variants import variants  # noqa: E402

from flexgen_h2o.cli.command import exit_status  # noqa: E402
from flexgen_h2o.files.rows import (  # noqa: E402
    cell,
    check_header,  # noqa: E402
    write_csv,
)

COLUMNS = ("architecture", "card", "kernel", "operation", "dtype", "size", "bits", "constants",
           "triton", "source", "registers", "spill_stores", "spill_loads", "shared",
           "shared_limit", "programs", "occupancy", "bytes_per_flop", "left_under_way")
KEY = COLUMNS[:8]
"""Columns that tell a row from the others."""
SAVED_EVERY = 60.0
"""Seconds after which what is compiled is saved."""


def key(row: dict) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEY)


def read(path: Path) -> dict[tuple[str, ...], dict]:
    """Rows of a file by their keys; none if there is no file. `UserError` for other columns."""
    if not path.exists():
        return {}
    check_header(path, COLUMNS, flag="--csv")
    with path.open(newline="", encoding="utf-8") as file:
        return {key(row): row for row in csv.DictReader(file)}


def stale(row: dict | None, wanted: dict) -> bool:
    """True if a row is missing, or is of another kernel or compiler than here."""
    return row is None or any(row[name] != wanted[name] for name in ("triton", "source"))


def faults(row: dict) -> str:
    """The faults of a row in words; empty if it has none."""
    found = []
    if int(row["spill_stores"]) or int(row["spill_loads"]):
        found.append(f"spills {row['spill_stores']} + {row['spill_loads']} bytes")
    if int(row["shared"]) > int(row["shared_limit"]):
        found.append(f"takes {row['shared']} of {row['shared_limit']} bytes of shared memory")
    if int(row["left_under_way"]):
        found.append("may write registers that a product has not read yet")
    return ", ".join(found)


def compile_all(wanted: list[tuple[Card, KernelLaunch]], path: Path) -> int:
    """Write a file with a row for each; the number of faults."""
    held = read(path)
    rows: dict[tuple[str, ...], dict] = {}
    saved, wrong = time.monotonic(), 0
    for number, (card, launch) in enumerate(wanted, 1):
        row = identity(card, launch)
        place = key(row)
        found = held.get(place)
        rows[place] = row = compiled(card, launch) if stale(found, row) else found
        if fault := faults(row):
            wrong += 1
            print(f"{number}/{len(wanted)} {' '.join(place)}: {fault}", flush=True)
        if time.monotonic() - saved > SAVED_EVERY:
            write_csv(path, COLUMNS, (held | rows).values(), digits=6)
            saved = time.monotonic()
    write_csv(path, COLUMNS, rows.values(), digits=6)
    return wrong


def check(wanted: list[tuple[Card, KernelLaunch]], path: Path, sample: int) -> list[str]:
    """Differences of a file from what would be written; `sample` rows are compiled to compare."""
    held = read(path)
    expected = {key(row): (row, card, launch) for card, launch in wanted
                for row in [identity(card, launch)]}
    found = [f"missing: {' '.join(place)}" for place in expected.keys() - held.keys()]
    found += [f"not a variant: {' '.join(place)}" for place in held.keys() - expected.keys()]
    found += [f"{' '.join(place)}: {fault}" for place, row in held.items()
              if (fault := faults(row))]
    both = [place for place in expected if place in held]
    found += [f"of an older kernel: {' '.join(place)}" for place in both
              if held[place]["source"] != expected[place][0]["source"]]
    alike = all(row["triton"] == triton.__version__ for row in held.values())
    for place in both[:: max(1, len(both) // sample)] if sample else ():
        _, card, launch = expected[place]
        row = {name: str(cell(value)) for name, value in compiled(card, launch).items()}
        if alike and any(row[name] != held[place][name] for name in COLUMNS):
            found.append(f"compiles to something else: {' '.join(place)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/gpu_static.csv"))
    parser.add_argument("--architectures", nargs="+", type=int, default=list(CARDS),
                        choices=list(CARDS), help="only these; the others' rows are not kept")
    parser.add_argument("--check", action="store_true", help="compare the file, write nothing")
    parser.add_argument("--sample", type=int, default=6, help="rows that --check compiles")
    args = parser.parse_args()
    wanted = [(CARDS[one], launch) for one in args.architectures
              for launch in launches(CARDS[one], variants())]
    if args.check:
        found = check(wanted, args.csv, args.sample)
        print("\n".join(found[:20]) or f"{len(wanted)} variants, as {args.csv} has them")
        sys.exit(bool(found))
    wrong = compile_all(wanted, args.csv)
    print(f"{len(wanted)} variants, {wrong} with a fault; {args.csv}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    sys.exit(exit_status(main))
