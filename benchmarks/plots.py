r"""Draw figures of what the benchmarks and the engine have written. Nothing is measured here.

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

`systems` reads rows of compare.py; `summary`, the figure of README.md, also rows of
studies/gguf_decode.py and check_quality.py; `batch` and `budget` rows of sweep.py or of
`flex_opt --csv`; `quality` rows of the quality study; `breakdown` and `memory` files of
`flex_opt --trace`. The suffix of --out chooses the format: .png, .svg or .pdf.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import plot_quality
import plot_summary
import plot_sweeps
import plot_systems
import plot_traces
from comparison import BEST, EQUAL
from plotting import chosen, read_rows, slide_style

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.values import parse_size
from flexgen_h2o.files.writing import catch_write_errors, check_writable
from flexgen_h2o.metrics.figures import check_plot, save


def systems(args: argparse.Namespace):
    """Throughput by system, with rooflines."""
    rows = chosen(read_rows(args.csv, plot_systems.NEEDED), args.only)
    return plot_systems.draw(rows, scenarios=args.scenario, at=args.at)


def summary(args: argparse.Namespace):
    """Throughput by system, and the perplexity factor beside it."""
    return plot_summary.draw(chosen(read_rows(args.csv, plot_summary.NEEDED), args.only),
                             read_rows(args.gguf, plot_summary.GGUF_NEEDED),
                             read_rows(args.quality, plot_summary.QUALITY_NEEDED), args.model)


def batch(args: argparse.Namespace):
    """Throughput and latency against batch size."""
    return plot_sweeps.draw_batch(chosen(read_rows(args.csv, plot_sweeps.NEEDED), args.only))


def budget(args: argparse.Namespace):
    """Throughput against KV budget."""
    return plot_sweeps.draw_budget(chosen(read_rows(args.csv, plot_sweeps.NEEDED), args.only))


def quality(args: argparse.Namespace):
    """Perplexity against cache bytes in memory and against bytes read for a token."""
    rows = [row for path in args.csv for row in read_rows(path, plot_quality.NEEDED)]
    return plot_quality.draw(chosen(rows, args.only))


def breakdown(args: argparse.Namespace):
    """Time of a prefill and of a decode step, by link and compute."""
    return plot_traces.draw_breakdown(args.trace)


def memory(args: argparse.Namespace):
    """Memory over time."""
    limit = None if args.limit is None else parse_size("--limit", args.limit)
    return plot_traces.draw_memory(args.trace, limit=limit)


FIGURES = {draw.__name__: draw
           for draw in (systems, summary, batch, budget, quality, breakdown, memory)}
"""Subcommand to the function that returns a matplotlib figure. They raise `UserError`."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags; `figure` is the subcommand. Raises `UserError`."""
    parser = Parser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(title="figures", required=True, dest="figure")
    added = {name: commands.add_parser(name, help=draw.__doc__, description=draw.__doc__)
             for name, draw in FIGURES.items()}
    for name, command in added.items():
        command.add_argument("--out", required=True, metavar="FILE.png",
                             help="the figure (or .svg, .pdf)")
        if name in ("breakdown", "memory"):
            command.add_argument("--trace", required=True, metavar="FILE.json",
                                 nargs="+" if name == "breakdown" else None,
                                 help="trace of a run; several runs are drawn side by side"
                                 if name == "breakdown" else "trace of a run")
            continue
        command.add_argument("--csv", required=True, metavar="FILE", help="result rows",
                             nargs="+" if name == "quality" else None)
        command.add_argument("--only", action="append", default=[], metavar="COLUMN=VALUE",
                             help="draw only rows with this value; may be repeated")
    added["systems"].add_argument("--scenario", nargs="+", default=[], metavar="NAME",
                                  help="only these scenarios, in this order")
    added["systems"].add_argument(
        "--at", choices=(BEST, EQUAL), help="each system at its own best batch size, or all at the "
        "same one (default: best where it was measured)")
    added["summary"].add_argument("--gguf", required=True, metavar="FILE",
                                  help="rows of studies/gguf_decode.py")
    added["summary"].add_argument("--quality", required=True, metavar="FILE",
                                  help="rows of check_quality.py")
    added["summary"].add_argument("--model", default="qwen2.5-coder-1.5b", metavar="NAME",
                                  help="model of --quality (qwen2.5-coder-1.5b)")
    added["memory"].add_argument("--limit", metavar="SIZE",
                                 help="draw a line at the run's memory limit")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw a figure into the file of ``--out``. Raises `UserError`."""
    args = parse_args(argv)
    check_plot("--out", args.out)
    check_writable("--out", args.out)
    with slide_style():
        figure = FIGURES[args.figure](args)
        with catch_write_errors("--out", args.out):
            save(figure, args.out)


if __name__ == "__main__":
    sys.exit(exit_status(main))
