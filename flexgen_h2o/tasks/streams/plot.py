"""The plot of a stream: perplexity and time per token against position."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flexgen_h2o.metrics.figures import LINES, log_scale, new_figure, save
from flexgen_h2o.tasks.streams.segments import by_policy

_MARKS = 12  # markers on the longest line, however many pieces it has


def draw(rows: Sequence[dict], path: str) -> None:
    """Draw rows of `segments` into a file, which is there whole or not at all.

    A cache that stopped early ends in a cross. OSError if the file cannot be written.
    """
    figure = new_figure(11, 4.8)
    left, right = figure.subplots(1, 2)
    trained, end = rows[0]["trained_positions"], max(row["position"] for row in rows)
    policies = by_policy(rows)
    every = max(1, max(map(len, policies.values())) // _MARKS)
    for axes, column in ((left, "perplexity"), (right, "ms_per_token_median")):
        for policy, its in policies.items():
            _line(axes, policy, its, column=column, every=every)
        if trained <= end:  # further away it would leave no room for the lines
            axes.axvline(trained, color="0.4", linewidth=1, linestyle=(0, (6, 3)),
                         label=f"trained context, {trained:.0f} tokens")
        axes.set(xlabel="position, tokens", xlim=(0, None))
        axes.grid(color="0.9", which="both")
        axes.set_axisbelow(True)
    tokens = max(row["tokens"] for row in rows)
    left.set(ylabel=f"perplexity of {tokens:.0f} tokens (log scale)",
             title="Perplexity: lower is better")
    log_scale(left, [row["perplexity"] for row in rows if row["perplexity"] is not None])
    right.set(ylabel="ms/token, median of a piece", title="Time: lower is better",
              ylim=(0, 1.05 * right.get_ylim()[1]))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  frameon=False, fontsize=9)
    # A cache that was refused has a row that knows no model.
    told = next((row for row in rows if row["tokens"]), None)
    model = "" if told is None else f"{told['model']}, {told['dtype']}, "
    figure.suptitle(f"{model}one text token by token{_budget(rows)}; x: stopped early",
                    fontsize=10)
    save(figure, path)


def _line(axes, policy: str, rows: Sequence[dict], *, column: str, every: int) -> None:
    """One cache's figures, with a marker at every so many of them."""
    points = [(row["position"], row[column]) for row in rows
              if row[column] is not None and math.isfinite(row[column])]
    if not points:
        return
    style = LINES[policy]
    axes.plot(*zip(*points, strict=True), markersize=5, linewidth=1.6, label=policy,
              markevery=every, **style)
    if rows[-1]["reason"]:
        axes.plot(*points[-1], linestyle="none", marker="x", markersize=10, markeredgewidth=2,
                  color=style["color"])


def _budget(rows: Sequence[dict]) -> str:
    """The caches' size, where those that evict have one in common."""
    sizes = {row["budget_tokens"] for row in rows} - {None}
    return f", {sizes.pop():.0f} tokens cached" if len(sizes) == 1 else ""
