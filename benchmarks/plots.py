r"""Draw figures of what the benchmarks and the engine have written. Nothing is measured here.

    python benchmarks/plots.py summary --csv benchmarks/results/xeon-amx/compare_limited.csv \
        --gguf benchmarks/results/xeon-amx/gguf_decode.csv \
        --quality benchmarks/results/quality/check_quality.csv --out docs/images/speed.png
    python benchmarks/plots.py quality --csv benchmarks/results/quality/quality.csv --out q.png

`summary`, the figure of README.md, reads rows of compare.py, studies/gguf_decode.py and
check_quality.py; `quality` rows of studies/quality.py. The suffix of --out chooses the format:
.png, .svg or .pdf.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import plot_quality
import plot_summary
from plotting import chosen, read_rows, slide_style

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.files.writing import catch_write_errors, check_writable
from flexgen_h2o.metrics.figures import check_plot, save


def summary(args: argparse.Namespace):
    """Throughput and perplexity factor by system."""
    return plot_summary.draw(chosen(read_rows(args.csv, plot_summary.NEEDED), args.only),
                             read_rows(args.gguf, plot_summary.GGUF_NEEDED),
                             read_rows(args.quality, plot_summary.QUALITY_NEEDED), args.model)


def quality(args: argparse.Namespace):
    """Perplexity against cache bytes in memory and against bytes read for a token."""
    rows = [row for path in args.csv for row in read_rows(path, plot_quality.NEEDED)]
    return plot_quality.draw(chosen(rows, args.only))


FIGURES = {draw.__name__: draw for draw in (summary, quality)}
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
        command.add_argument("--csv", required=True, metavar="FILE", help="result rows",
                             nargs="+" if name == "quality" else None)
        command.add_argument("--only", action="append", default=[], metavar="COLUMN=VALUE",
                             help="draw only rows with this value; may be repeated")
    added["summary"].add_argument("--gguf", required=True, metavar="FILE",
                                  help="rows of studies/gguf_decode.py")
    added["summary"].add_argument("--quality", required=True, metavar="FILE",
                                  help="rows of check_quality.py")
    added["summary"].add_argument("--model", default="qwen2.5-coder-1.5b", metavar="NAME",
                                  help="model of --quality (qwen2.5-coder-1.5b)")
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
