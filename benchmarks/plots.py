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
from collections.abc import Iterable, Sequence

import plot_quality
from plotting import GREY, Row, chosen, positive, read_rows, slide_style
from processes import OK

from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.writing import catch_write_errors, check_writable
from flexgen_h2o.metrics.figures import COLOURS, check_plot, new_figure, save

COMPARED = ("system", "model", "prompt_len", "gen_len", "memory_gb", "batch", "status",
            "tokens_per_s")
GGUF = ("file", "system", "sequences", "tokens_per_second")
QUALITY = ("model", "mode", "factor")
"""Columns of the three files of `summary`."""
SYSTEMS = {
    "deepspeed-nvme": ("DeepSpeed ZeRO-Inference, NVMe", "full"),
    "accelerate-disk": ("Accelerate, layers on disk", "full"),
    "full": ("flexgen_h2o, full cache", "full"),
    "h2o": ("flexgen_h2o, H2O 20 %", "h2o-20"),
}
"""Systems of a comparison from top to bottom: label, and mode of the quality check."""
GGUF_SYSTEMS = {"llama.cpp": ("llama.cpp", "full"), "flexgen_h2o": ("flexgen_h2o", "weights-auto")}
"""The same of the runs of a GGUF file."""

Bar = tuple[str, float, float]
"""Label, tokens per second, perplexity factor."""


def factors(rows: Sequence[Row], model: str) -> dict[str, float]:
    """Return the perplexity factor of each mode of a model. Raises `UserError`."""
    by_mode = {row["mode"]: positive(row, "factor") for row in rows if row["model"] == model}
    if not by_mode:
        raise UserError(f"--quality has no rows of {model}")
    return by_mode


def bars(rows: Iterable[Row], systems: dict[str, tuple[str, str]], quality: dict[str, float], *,
         rate: str, batch: str) -> list[Bar]:
    """Return a bar for each system that has rows: the fastest of them."""
    by_label: dict[str, tuple[float, str]] = {}
    for row in rows:
        if row["system"] in systems and row.get("status", OK) == OK:
            by_label[row["system"]] = max(by_label.get(row["system"], (0.0, "")),
                                          (positive(row, rate), row[batch]))
    missing = [mode for _, mode in systems.values() if mode not in quality]
    if missing:
        raise UserError(f"--quality has no row of {missing[0]}")
    return [(f"{label}, batch {by_label[name][1]}", by_label[name][0], quality[mode])
            for name, (label, mode) in systems.items() if name in by_label]


def draw_summary(compared: Sequence[Row], gguf: Sequence[Row], quality: Sequence[Row], model: str):
    """Return the figure: a row of panels for `compare.py`'s rows, one for a GGUF file's."""
    by_mode, first = factors(quality, model), compared[0]
    sequences = max((row["sequences"] for row in gguf), key=int)
    panels = [
        (f"{first['model'].upper()}'s shape in {first['memory_gb']} GB of memory "
         f"({first['prompt_len']} + {first['gen_len']} tokens)",
         bars(compared, SYSTEMS, by_mode, rate="tokens_per_s", batch="batch")),
        (f"{gguf[0]['file']} (Q4_K_M) in memory",
         bars([row for row in gguf if row["sequences"] == sequences], GGUF_SYSTEMS, by_mode,
              rate="tokens_per_second", batch="sequences"))]
    figure = new_figure(10, 4.6)
    grid = figure.subplots(2, 2, width_ratios=[2, 1], squeeze=False,
                           height_ratios=[len(panel_bars) + 1 for _, panel_bars in panels])
    for (left, right), (title, panel_bars) in zip(grid, panels, strict=True):
        _panel(left, [(label, rate) for label, rate, _ in panel_bars], "{:.3g}")
        _panel(right, [("", factor) for *_, factor in panel_bars], "{:.2f}")
        right.set_xlim(0, 1.8)
        right.set_xticks([0, 1])
        left.set_title(title, loc="left", fontsize=12, fontweight="bold")
    grid[-1][0].set_xlabel("generated tokens/s")
    grid[-1][1].set_xlabel("perplexity factor")
    figure.supxlabel(f"Perplexity factor: over that of the same weights in 16 bits with the full "
                     f"cache, on {model}; lower is better.",
                     fontsize=9, color=GREY, x=0.01, ha="left")
    return figure


def _panel(axes, values: Sequence[tuple[str, float]], form: str) -> None:
    """Draw horizontal bars with their values; labels of this engine are bold."""
    names, ends = zip(*values, strict=True)
    ours = [name.startswith("flexgen_h2o") for name in names] if any(names) else [False] * len(ends)
    colours = [COLOURS["blue"] if is_ours else COLOURS["orange"] for is_ours in ours]
    bars_drawn = axes.barh(range(len(ends)), ends, height=0.66,
                           color=colours if any(names) else "0.6")
    axes.bar_label(bars_drawn, [form.format(end) for end in ends], padding=4, fontsize=11)
    axes.set_yticks(range(len(ends)), names)
    for label, is_ours in zip(axes.get_yticklabels(), ours, strict=True):
        label.set_fontweight("bold" if is_ours else "normal")
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.15)
    axes.invert_yaxis()


def summary(args: argparse.Namespace):
    """Throughput and perplexity factor by system."""
    return draw_summary(chosen(read_rows(args.csv, COMPARED), args.only),
                        read_rows(args.gguf, GGUF), read_rows(args.quality, QUALITY), args.model)


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
