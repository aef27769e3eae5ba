"""Figures for a slide, of what the benchmarks and the engine have written.

RESULTS is the folder of a machine, such as benchmarks/results/epyc-avx512bf16:

    python benchmarks/plots.py systems --csv RESULTS/compare_cpu.csv --out systems.png
    python benchmarks/plots.py summary --csv benchmarks/results/xeon-amx/compare_limited.csv \
        --gguf benchmarks/results/xeon-amx/gguf_decode.csv \
        --quality benchmarks/results/quality/check_quality.csv --out docs/images/speed.png
    python benchmarks/plots.py batch --csv RESULTS/sweep_batch.csv --out batch.png
    python benchmarks/plots.py budget --csv RESULTS/sweep_budget.csv --out budget.png
    python benchmarks/plots.py quality --csv benchmarks/results/quality/quality.csv --out q.png
    python benchmarks/plots.py breakdown --trace run.json --out breakdown.png
    python benchmarks/plots.py memory --trace run.json --limit 2.5GB --out memory.png
    python benchmarks/plots.py machines --csv RESULTS/machines.csv --out machines.png

systems reads rows of `compare.py`; summary, the figure of README.md, also those of
`studies/gguf_decode.py` and `check_quality.py`; batch and budget those of `sweep.py` (or
`flex_opt --csv`); machines those of `studies/machines.py`; quality those of the quality study;
breakdown and memory what `flex_opt --trace` has written.
The ending of --out is the format: .png, .svg or .pdf. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from comparison.rows import BEST, EQUAL
from plotting import (
    batch,
    breakdown,
    budget,
    machines,
    memory,
    quality,
    summary,
    sweeps,
    systems,
)
from plotting.looks import slide_style
from plotting.rows import chosen, read_rows

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.values import parse_size
from flexgen_h2o.files.writing import check_writable, writing
from flexgen_h2o.metrics.figures import check_plot, save


def of_systems(args: argparse.Namespace):
    """Throughput by system, with rooflines."""
    rows = chosen(read_rows(args.csv, systems.NEEDED), args.only)
    return systems.draw(rows, scenarios=args.scenario, at=args.at)


def of_summary(args: argparse.Namespace):
    """Throughput by system, and the perplexity factor beside it."""
    return summary.draw(chosen(read_rows(args.csv, summary.NEEDED), args.only),
                        read_rows(args.gguf, summary.GGUF_NEEDED),
                        read_rows(args.quality, summary.QUALITY_NEEDED), args.model)


def of_batch(args: argparse.Namespace):
    """Throughput and latency against batch."""
    return batch.draw(chosen(read_rows(args.csv, sweeps.NEEDED), args.only))


def of_budget(args: argparse.Namespace):
    """Throughput against KV budget."""
    return budget.draw(chosen(read_rows(args.csv, sweeps.NEEDED), args.only))


def of_quality(args: argparse.Namespace):
    """Perplexity against the cache's bytes in memory, and against those read for a token."""
    rows = [row for path in args.csv for row in read_rows(path, quality.NEEDED)]
    return quality.draw(chosen(rows, args.only))


def of_breakdown(args: argparse.Namespace):
    """Time of a prefill and of a decode step, by link and compute."""
    return breakdown.draw(args.trace)


def of_memory(args: argparse.Namespace):
    """Memory over time."""
    limit = None if args.limit is None else parse_size("--limit", args.limit)
    return memory.draw(args.trace, limit=limit)


def of_machines(args: argparse.Namespace):
    """Replicas and pipelines, measured and simulated."""
    return machines.draw(chosen(read_rows(args.csv, machines.NEEDED), args.only))


FIGURES = {"systems": of_systems, "summary": of_summary, "batch": of_batch, "budget": of_budget,
           "quality": of_quality, "breakdown": of_breakdown, "memory": of_memory,
           "machines": of_machines}
"""Sub-command to what makes its matplotlib Figure of the flags. They raise `UserError`."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags; `figure` is the sub-command. Raises `UserError`."""
    parser = Parser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(title="figures", required=True, dest="figure")
    made = {name: commands.add_parser(name, help=draw.__doc__, description=draw.__doc__)
            for name, draw in FIGURES.items()}
    for each in made.values():
        each.add_argument("--out", required=True, metavar="FILE.png",
                          help="the figure (or .svg, .pdf)")
    for name in ("systems", "summary", "batch", "budget", "machines"):
        made[name].add_argument("--csv", required=True, metavar="FILE", help="rows of results")
        made[name].add_argument("--only", action="append", default=[], metavar="COLUMN=VALUE",
                                help="draw rows with this value alone; may be repeated")
    made["quality"].add_argument("--csv", required=True, nargs="+", metavar="FILE",
                                 help="rows of the quality task")
    made["quality"].add_argument("--only", action="append", default=[], metavar="COLUMN=VALUE",
                                 help="draw rows with this value alone; may be repeated")
    made["systems"].add_argument("--scenario", nargs="+", default=[], metavar="NAME",
                                 help="only these, in this order")
    made["systems"].add_argument(
        "--at", choices=(BEST, EQUAL), help="each system at its own best batch, or all at the same "
        "one (default: best where it was measured)")
    made["summary"].add_argument("--gguf", required=True, metavar="FILE",
                                 help="rows of studies/gguf_decode.py")
    made["summary"].add_argument("--quality", required=True, metavar="FILE",
                                 help="rows of check_quality.py")
    made["summary"].add_argument("--model", default="qwen2.5-coder-1.5b", metavar="NAME",
                                 help="model of --quality (qwen2.5-coder-1.5b)")
    made["breakdown"].add_argument("--trace", required=True, nargs="+", metavar="FILE.json",
                                   help="of runs to set side by side")
    made["memory"].add_argument("--trace", required=True, metavar="FILE.json", help="of a run")
    made["memory"].add_argument("--limit", metavar="SIZE",
                                help="draw a line at the memory that the run was allowed")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw what the flags ask for into the file of ``--out``. Raises `UserError`."""
    args = parse_args(argv)
    check_plot("--out", args.out)
    check_writable("--out", args.out)
    with slide_style():
        figure = FIGURES[args.figure](args)
        with writing("--out", args.out):
            save(figure, args.out)


if __name__ == "__main__":
    sys.exit(exit_status(main))
