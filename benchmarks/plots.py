"""Figures for a slide, of what the benchmarks and the engine have written.

    python benchmarks/plots.py systems --csv benchmarks/results/compare_cpu.csv --out systems.png
    python benchmarks/plots.py batch --csv benchmarks/results/sweep_batch.csv --out batch.png
    python benchmarks/plots.py budget --csv benchmarks/results/sweep_budget.csv --out budget.png
    python benchmarks/plots.py breakdown --trace run.json --out breakdown.png
    python benchmarks/plots.py memory --trace run.json --limit 2.5GB --out memory.png

systems reads rows of `compare.py`, batch and budget those of `sweep.py` (or `flex_opt --csv`),
breakdown and memory what `flex_opt --trace` has written. The ending of --out is the format: .png,
.svg or .pdf. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from comparison.rows import BEST, EQUAL
from plotting import batch, breakdown, budget, memory, sweeps, systems
from plotting.looks import slide_style
from plotting.rows import chosen, read_rows

from flexgen_h2o.cli import Parser, exit_status, writing
from flexgen_h2o.flag_values import parse_size
from flexgen_h2o.tasks.shared.figures import check_plot, save
from flexgen_h2o.tasks.shared.files import check_writable


def of_systems(args: argparse.Namespace):
    rows = chosen(read_rows(args.csv, systems.NEEDED), args.only)
    return systems.draw(rows, scenarios=args.scenario, at=args.at)


def of_batch(args: argparse.Namespace):
    return batch.draw(chosen(read_rows(args.csv, sweeps.NEEDED), args.only))


def of_budget(args: argparse.Namespace):
    return budget.draw(chosen(read_rows(args.csv, sweeps.NEEDED), args.only))


def of_breakdown(args: argparse.Namespace):
    return breakdown.draw(args.trace)


def of_memory(args: argparse.Namespace):
    return memory.draw(args.trace, limit=args.limit)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, and as `draw` what makes the figure of them. Raises `UserError`."""
    parser = Parser(description=__doc__.splitlines()[0])
    figures = parser.add_subparsers(title="figures", required=True, dest="figure")
    made = {}
    for draw, text in ((of_systems, "throughput by system, with floors"),
                       (of_batch, "throughput and latency against batch"),
                       (of_budget, "throughput against KV budget"),
                       (of_breakdown, "time of a prefill and a decode step, by link and compute"),
                       (of_memory, "memory over time")):
        name = draw.__name__.removeprefix("of_")
        made[name] = figures.add_parser(name, help=text, description=f"Draw {text}.")
        made[name].add_argument("--out", required=True, metavar="FILE.png",
                                help="the figure (or .svg, .pdf)")
        made[name].set_defaults(draw=draw)
    for name in ("systems", "batch", "budget"):
        made[name].add_argument("--csv", required=True, metavar="FILE", help="rows of results")
        made[name].add_argument("--only", action="append", default=[], metavar="COLUMN=VALUE",
                                help="draw rows with this value alone; may be repeated")
    made["systems"].add_argument("--scenario", nargs="+", default=[], metavar="NAME",
                                 help="only these, in this order")
    made["systems"].add_argument(
        "--at", choices=(BEST, EQUAL), help="each system at its own best batch, or all at the same "
        "one (default: best where it was measured)")
    made["breakdown"].add_argument("--trace", required=True, nargs="+", metavar="FILE.json",
                                   help="of runs to set side by side")
    made["memory"].add_argument("--trace", required=True, metavar="FILE.json", help="of a run")
    made["memory"].add_argument("--limit", metavar="SIZE",
                                help="draw a line at the memory that the run was allowed")
    args = parser.parse_args(argv)
    if args.figure == "memory" and args.limit is not None:
        args.limit = parse_size("--limit", args.limit)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Draw what the flags ask for into the file of ``--out``. Raises `UserError`."""
    args = parse_args(argv)
    check_plot("--out", args.out)
    check_writable("--out", args.out)
    with slide_style():
        figure = args.draw(args)
        with writing("out", args.out):
            save(figure, args.out)


if __name__ == "__main__":
    sys.exit(exit_status(main))
