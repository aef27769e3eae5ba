"""The quality task's plot: perplexity and equal greedy tokens against the cache's budget.

matplotlib, an extra, is loaded when a plot is drawn. Lines differ in dash and marker as well as in
colour, so that a grey print can be read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from flexgen_h2o.errors import UserError
from flexgen_h2o.tasks.configurations import USUAL

_FORMATS = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which colour-blind eyes tell apart: policy to colour, dash, marker.
_LINES = {"h2o": ("#0072B2", "-", "o"), "window": ("#D55E00", "--", "s"),
          "sink-window": ("#009E73", "-.", "^")}
_MARKERS = {"8-bit": "D", "4-bit": "v", "mean": "P", "decay": "X", "rolling": "*"}
_STEP = 1.6  # percent on the axis between variants, which all have the same budget


def check_name(path: str) -> None:
    """Raise `UserError` unless the name ends in a format that can be drawn."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise UserError(f"--plot must name a {', '.join(_FORMATS)} file, got {path!r}")


def draw(rows: Sequence[dict], path: str) -> None:
    """Draw rows of the quality task into a file, which is there whole or not at all.

    `rows` are by column name, numbers as numbers, one of them of the plain full cache. Rows with
    quantized weights are left out. OSError if the file cannot be written.
    """
    from matplotlib.figure import Figure  # no pyplot: it holds state, and wants a screen

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    full = _full(rows)
    _curves(left, rows, "perplexity", scale=1.0)
    _curves(right, rows, "greedy_equal_share", scale=100.0)
    left.axhline(full["perplexity"], color="black", linewidth=1, linestyle=":", label="full cache")
    left.set(ylabel="perplexity of the second half (log scale)",
             title="Perplexity: lower is better")
    _log_scale(left, [row["perplexity"] for row in rows])
    right.axhline(100, color="black", linewidth=1, linestyle=":")
    right.set(ylabel=f"greedy tokens equal to the full cache's, % of {full['gen_len']:.0f}",
              title="Greedy tokens: higher is better", ylim=(0, 104))
    for axes in (left, right):
        axes.set(xlabel="KV cache budget, % of the prompt", xlim=(0, None))
        axes.grid(color="0.9", which="both")
        axes.set_axisbelow(True)
    figure.legend(*_legend(left), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    aside = f"; variants of h2o at {USUAL} % stand to its right" if _shown(rows) else ""
    figure.suptitle(
        f"{full['model']}, {full['dtype']}, {full['articles']:.0f} articles, prompts of "
        f"{full['prompt_tokens_mean']:.0f} tokens; bars: 95 % interval of the difference to full"
        f"{aside}", fontsize=10)
    _save(figure, Path(path))


def _full(rows: Sequence[dict]) -> dict:
    return next(row for row in rows if row["policy"] == "full" and not row["variant"])


def _curves(axes, rows: Sequence[dict], column: str, *, scale: float) -> None:
    """A line for each policy, and the variants of h2o beside its point at the usual budget."""
    full = _full(rows)
    for policy, (color, dash, marker) in _LINES.items():
        points = sorted((row for row in rows if row["policy"] == policy and not row["variant"]),
                        key=lambda row: row["budget_percent"])
        if not points:
            continue
        at, values = [row["budget_percent"] for row in points], [row[column] for row in points]
        bars = None
        if column == "perplexity":
            low, high = ([full[column] * math.exp(row[f"delta_nats_{end}"]) for row in points]
                         for end in ("low", "high"))
            # A skewed sample may leave the estimate outside; a bar has no negative length.
            bars = [[max(value - end, 0) for value, end in zip(values, low, strict=True)],
                    [max(end - value, 0) for value, end in zip(values, high, strict=True)]]
        axes.errorbar(at, [scale * value for value in values], yerr=bars, color=color, capsize=2,
                      linestyle=dash, marker=marker, markersize=5, linewidth=1.6, elinewidth=0.8,
                      label=policy)
    for place, row in enumerate(_shown(rows), 1):
        axes.plot([USUAL + place * _STEP], [scale * row[column]], linestyle="none",
                  marker=_MARKERS[row["variant"]], markersize=7, markerfacecolor="white",
                  markeredgecolor="black", label=f"h2o {USUAL} % {row['variant']}")


def _shown(rows: Sequence[dict]) -> list[dict]:
    """The variants at the usual budget, in the order of their markers."""
    order = list(_MARKERS)
    return sorted((row for row in rows if row["variant"] in order
                   and row["budget_percent"] == USUAL), key=lambda row: order.index(row["variant"]))


def _legend(axes) -> tuple[list, list[str]]:
    """Handles and labels, column by column: the lines first, as they come, then the points."""
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [name for name in (*_LINES, "full cache") if name in named]
    order += [name for name in named if name not in order]
    return [named[name] for name in order], order


def _log_scale(axes, values: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers at 1, 2 and 5, or closer where the values are close."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    finite = [value for value in values if math.isfinite(value)]
    close = not finite or max(finite) < 4 * min(finite)
    axes.yaxis.set_major_locator(LogLocator(subs=range(1, 10) if close else (1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _save(figure, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=150)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
