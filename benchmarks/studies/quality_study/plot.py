"""The quality task's plot: perplexity and equal greedy tokens against the cache's budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexgen_h2o.metrics.figures import LINES, log_scale, new_figure, save
from quality_study.configurations import RECALL, SPARSE, USUAL

_POLICIES = ("h2o", RECALL, SPARSE, "window", "sink-window")
_MARKERS = {"8-bit": "D", "4-bit": "v", "mean": "P", "decay": "X", "caote": "d", "rolling": "*",
            "of the text": "^", "chunks of 16": "<", "chunks of 64": ">"}
_STEP = 1.6  # percent on the axis between variants, which all have the same budget


def draw(rows: Sequence[dict], path: str) -> None:
    """Draw rows of the quality task into a file, which is there whole or not at all.

    `rows` are by column name, numbers as numbers, one of them of the plain full cache. Rows with
    quantized weights are left out. OSError if the file cannot be written.
    """
    figure = new_figure(11, 4.8)
    left, right = figure.subplots(1, 2)
    full = _full(rows)
    _curves(left, rows, "perplexity", scale=1.0)
    _curves(right, rows, "greedy_equal_share", scale=100.0)
    left.axhline(full["perplexity"], color="black", linewidth=1, linestyle=":", label="full cache")
    left.set(ylabel="perplexity of the second half (log scale)",
             title="Perplexity: lower is better")
    log_scale(left, [row["perplexity"] for row in rows])
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
    save(figure, path)


def _full(rows: Sequence[dict]) -> dict:
    return next(row for row in rows if row["policy"] == "full" and not row["variant"])


def _curves(axes, rows: Sequence[dict], column: str, *, scale: float) -> None:
    """A line for each policy, and the variants of h2o beside its point at the usual budget."""
    full = _full(rows)
    for policy in _POLICIES:
        style = LINES[policy]
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
        axes.errorbar(at, [scale * value for value in values], yerr=bars, capsize=2, markersize=5,
                      linewidth=1.6, elinewidth=0.8, label=policy, **style)
    for place, row in enumerate(_shown(rows), 1):
        axes.plot([USUAL + place * _STEP], [scale * row[column]], linestyle="none",
                  marker=_MARKERS[row["variant"]], markersize=7, markerfacecolor="white",
                  markeredgecolor="black", label=f"h2o {USUAL} % {row['variant']}")


def _shown(rows: Sequence[dict]) -> list[dict]:
    """The variants at the usual budget, in the order of their markers."""
    order = list(_MARKERS)
    return sorted((row for row in rows if row["variant"] in order
                   and row["policy"] != RECALL and row["budget_percent"] == USUAL),
                  key=lambda row: order.index(row["variant"]))


def _legend(axes) -> tuple[list, list[str]]:
    """Handles and labels, column by column: the lines first, as they come, then the points."""
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [name for name in (*_POLICIES, "full cache") if name in named]
    order += [name for name in named if name not in order]
    return [named[name] for name in order], order
