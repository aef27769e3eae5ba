"""The plot of `tasks.summarize`: ROUGE-2 and ROUGE-L against the tokens that stay cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexgen_h2o.metrics.figures import LINES, new_figure, save

_POLICIES = ("h2o", "window", "sink-window")
_LEAD = {"color": "#999999", "linestyle": (0, (5, 1, 1, 1, 1, 1))}
_PANELS = (("rouge2", "ROUGE-2"), ("rougeL", "ROUGE-L"))


def draw(rows: Sequence[Mapping], path: str) -> None:
    """Draw rows of `summary_rows` into a file, which is there whole or not at all.

    Bars are 95 % intervals over articles; those of different caches are of the same articles.
    OSError if the file cannot be written.
    """
    figure = new_figure(11, 4.6)
    panels = figure.subplots(1, 2)
    for axes, (column, title) in zip(panels, _PANELS, strict=True):
        _curves(axes, rows, column)
        axes.set(xlabel="KV cache budget, tokens a sequence (log scale)", ylabel=f"{title} F1",
                 title=f"{title}: higher is better",
                 ylim=(0, 1.08 * max(0.01, *(row[f"{column}_high"] for row in rows))))
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  frameon=False, fontsize=9)
    measured = next((row for row in rows if row["dtype"]), rows[0])
    figure.suptitle(f"{measured['model']}, {measured['dtype']}, {measured['articles']:.0f} "
                    "articles; bars and bands: 95 % interval over articles", fontsize=10)
    save(figure, path)


def _curves(axes, rows: Sequence[Mapping], column: str) -> None:
    """A line for each policy over its budgets, and across for what has none."""
    budgets = sorted({row["budget_tokens"] for row in rows if row["budget_tokens"] is not None})
    if budgets:
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [f"{budget:.0f}" for budget in budgets])
        axes.minorticks_off()
        axes.set_xlim(budgets[0] / 1.2, budgets[-1] * 1.2)
    else:
        axes.set_xticks([])
    for policy in _POLICIES:
        points = sorted((row for row in rows if row["policy"] == policy),
                        key=lambda row: row["budget_tokens"])
        if not points:
            continue
        values = [row[column] for row in points]
        bars = [[max(value - row[f"{column}_low"], 0) for value, row in
                 zip(values, points, strict=True)],
                [max(row[f"{column}_high"] - value, 0) for value, row in
                 zip(values, points, strict=True)]]
        axes.errorbar([row["budget_tokens"] for row in points], values, yerr=bars, capsize=2,
                      markersize=5, linewidth=1.6, elinewidth=0.8, label=policy, **LINES[policy])
    for policy, label, style in (
            ("full", "full cache", {key: LINES["full"][key] for key in ("color", "linestyle")}),
            ("lead-1", "lead-1, the first sentence", _LEAD)):
        for row in (row for row in rows if row["policy"] == policy):
            axes.axhline(row[column], linewidth=1.2, label=label, **style)
            axes.axhspan(row[f"{column}_low"], row[f"{column}_high"], linewidth=0, alpha=0.08,
                         color=style["color"])
