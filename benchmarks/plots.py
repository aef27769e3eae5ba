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
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from plotting import (
    GREY,
    Row,
    beside,
    chosen,
    distinct,
    entitle,
    measured_where,
    positive,
    read_rows,
    slide_style,
)
from processes import OK

from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.config.cache_layout import GroupLayout, IndexLayout
from flexgen_h2o.config.limits import GROUP_SIZE, INDEX_TILE
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


def log_scale(axes: Any, values: Sequence[float]) -> None:
    """Set a logarithmic y axis with plain numbers at 1, 2 and 5, or denser for close values."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    finite = [value for value in values if math.isfinite(value)]
    close = not finite or max(finite) < 4 * min(finite)
    axes.yaxis.set_major_locator(LogLocator(subs=range(1, 10) if close else (1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


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


BY_BUDGET = ("date", "commit", "host", "model", "dtype", "articles", "prompt_tokens_mean", "policy",
             "variant", "budget_percent", "cache_bits", "cached_tokens_mean",
             "kv_cache_bytes_per_sequence", "perplexity_over_full")
"""Columns of the files of `quality`."""
FULL = "full", ""
MODES = {
    FULL: ("full cache", "black", "D", "none"),
    ("window", ""): ("window", "vermillion", "s", "--"),
    ("sink-window", ""): ("window and 4 first tokens", "green", "^", "-."),
    ("h2o", ""): ("h2o", "blue", "o", "-"),
    ("h2o", "mean"): ("h2o, mean", "blue", "v", "--"),
    ("h2o", "decay"): ("h2o, decay", "blue", "x", ":"),
    ("h2o", "caote"): ("h2o, caote", "purple", "P", "--"),
    ("h2o", "of the text"): ("h2o, of the text so far", "blue", "<", "-."),
    ("h2o", "8-bit"): ("h2o, cache of 8 bits", "black", "X", "none"),
    ("h2o", "4-bit"): ("h2o, cache of 4 bits", "black", "*", "none"),
    ("sparse-values", ""): ("sparse values", "orange", "p", "--"),
    ("recall", ""): ("recall", "sky", "o", "-"),
    ("recall", "of the text"): ("recall, of the text so far", "sky", "<", "-."),
    ("recall", "2-bit index"): ("recall, index of 2 bits", "sky", "d", "none"),
}
"""Policy and variant of drawn rows: label, colour, marker, line."""
_HALF, _WIDE = 2, {"float32": 4}
_GOOD = 1.005
"""Smallest factor on the logarithmic axis; the full cache is drawn there."""


@dataclass(frozen=True)
class QualityPoint:
    """A cache in percent of the full one's bytes, 16 bits a number: bytes in memory, and bytes read
    for a token (keys, values, index). `over` is the perplexity over the full cache's."""

    held: float
    read: float
    over: float


def points(rows: Sequence[Row]) -> dict[tuple[str, str], list[QualityPoint]]:
    """Return the points of each mode of `MODES`, by budget.

    Raises `UserError` for rows of several models or lengths, or without the full cache.
    """
    for name in ("model", "dtype", "articles", "prompt_tokens_mean"):
        if len(distinct(rows, name)) > 1:
            raise UserError(f"--csv has rows of several values of {name}: add --only {name}=VALUE")
    full = next((row for row in rows if (row["policy"], row["variant"]) == FULL), None)
    if full is None:
        raise UserError("--csv has no row of the full cache, which the others are shares of")
    points_by_policy: dict[tuple[str, str], dict[float, QualityPoint]] = {}
    for row in rows:
        mode = row["policy"], row["variant"]
        if mode in MODES:
            points_by_policy.setdefault(mode, {}).setdefault(positive(row, "budget_percent"),
                                                             _point(row, full))
    return {mode: [policy_points[budget] for budget in sorted(policy_points)]
            for mode, policy_points in sorted(points_by_policy.items(),
                                              key=lambda item: list(MODES).index(item[0]))}


def _point(row: Row, full: Row) -> QualityPoint:
    cached, read = _shares(row, full)
    return QualityPoint(100 * cached, 100 * read, positive(row, "perplexity_over_full"))


def _shares(row: Row, full: Row) -> tuple[float, float]:
    """Return the shares of the full cache's bytes: in memory at the end, read for a token."""
    bits = int(positive(row, "cache_bits"))
    kept_bytes, tokens = (positive(row, name) / positive(full, name)
                          for name in ("kv_cache_bytes_per_sequence", "cached_tokens_mean"))
    if bits < 16:
        # Caches of 16 bits had the run's dtype; packed ones have their size.
        kept_bytes *= _WIDE.get(row["dtype"], _HALF) / _HALF
        return kept_bytes, tokens * GroupLayout(GROUP_SIZE, bits).nbytes / (_HALF * GROUP_SIZE)
    budget = positive(row, "budget_percent") / 100
    if row["policy"] == "sparse-values":
        return kept_bytes, (1 + budget) / 2
    if row["policy"] != "recall":
        return kept_bytes, tokens
    index = IndexLayout(GROUP_SIZE, 2 if row["variant"] == "2-bit index" else 4)
    part = index.tile_bytes / INDEX_TILE / (2 * GROUP_SIZE * _HALF)
    if row["variant"] != "of the text":
        budget *= positive(row, "prompt_tokens_mean") / positive(full, "cached_tokens_mean")
    return kept_bytes + part, part + budget


def draw_quality(rows: Sequence[Row]):
    """Return the figure of quality by bytes of the cache. Raises `UserError` as `points` does."""
    by_policy = points(rows)
    figure = new_figure(16, 6.8)
    panels = figure.subplots(1, 2, sharey=True)
    over = [max(point.over, _GOOD) - 1 for policy_points in by_policy.values()
            for point in policy_points]
    for axes, name, label in zip(panels, ("held", "read"),
                                 ("bytes in memory, % of the full cache's",
                                  "bytes that a token reads, % of the full cache's"), strict=True):
        for mode, policy_points in by_policy.items():
            called, colour, marker, line = MODES[mode]
            axes.plot([getattr(point, name) for point in policy_points],
                      [100 * (max(point.over, _GOOD) - 1) for point in policy_points], label=called,
                      color=COLOURS[colour], marker=marker, linestyle=line)
        axes.set(xlabel=label, xlim=(0, None))
        axes.grid(color="0.9")
    panels[0].set_ylabel("perplexity over the full cache's, % more")
    log_scale(panels[0], [100 * ratio for ratio in over])
    beside(figure, *panels[0].get_legend_handles_labels())
    first = rows[0]
    notes = ["In numbers of 16 bits but where fewer are named; keys, values and index, without "
             "weights and scores. The full cache, which loses nothing, is at the bottom."]
    if any(mode[0] == "recall" for mode in by_policy):
        notes.append("Recall holds everything and an index: what it saves is reading.")
    entitle(figure, "Quality against the bytes of the cache\n"
            f"{first['model']}, {float(first['articles']):.0f} articles, prompts of "
            f"{float(first['prompt_tokens_mean']):.0f} tokens", notes, where=measured_where(rows))
    return figure


def summary(args: argparse.Namespace):
    """Throughput and perplexity factor by system."""
    return draw_summary(chosen(read_rows(args.csv, COMPARED), args.only),
                        read_rows(args.gguf, GGUF), read_rows(args.quality, QUALITY), args.model)


def quality(args: argparse.Namespace):
    """Perplexity against cache bytes in memory and against bytes read for a token."""
    rows = [row for path in args.csv for row in read_rows(path, BY_BUDGET)]
    return draw_quality(chosen(rows, args.only))


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
