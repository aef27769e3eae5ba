"""The plots of the analyze task, one of each part: curves by layer, rank, budget."""

from __future__ import annotations

from collections.abc import Sequence

from attention_study.columns import FIT
from attention_study.table import mean_by
from flexgen_h2o.metrics.figures import LINES, log_scale, new_figure, save

# The policies' own looks, then more of Okabe and Ito's colours, for what has no policy.
_POLICIES = {**LINES, "best": LINES["full"]}
_KINDS = {"heavy": LINES["h2o"], "random": LINES["window"], "lowest": LINES["sink-window"],
          "heavy but sinks": {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1)), "marker": "v"}}
_LOOKS = (*(LINES[name] for name in ("h2o", "window", "sink-window")),
          {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
          {"color": "#E69F00", "linestyle": (0, (3, 1)), "marker": "P"})
_USUAL = 20  # percent: the budget that is drawn by layer, or the one next to it


def draw(name: str, rows: Sequence[dict], path: str) -> None:
    """Draw the rows of one part into a file, which is there whole or not at all.

    Parameters
    ----------
    name : str
        One of `columns.NAMES`.
    rows : sequence of dict
        By column name; at least one.
    path : str
        Its suffix is the format. OSError if it cannot be written.
    """
    figure = new_figure(11, 4.8)
    title = {"sparsity": _sparsity, "scores": _scores, "local": _local, "frequency": _frequency,
             "misses": _misses, "evicted": _evicted}[name](figure, rows)
    for axes in figure.axes:
        axes.grid(color="0.9", which="both")
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=9)
    one = rows[0]
    figure.suptitle(f"{title}\n{one['model']}, {one['dtype']}, texts: {one['articles']}, of "
                    f"{one['tokens_mean']:.0f} tokens", fontsize=10)
    save(figure, path)


def _line(axes, points: dict, label: str, look: dict, *, scale: float = 1.0) -> None:
    axes.plot(list(points), [scale * value for value in points.values()], label=label,
              markersize=4, linewidth=1.6, **look)


def _layers(axes, rows: Sequence[dict]) -> None:
    """A horizontal axis of layers."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="layer", xlim=(-0.5, max(row["layer"] for row in rows) + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _sparsity(figure, rows: Sequence[dict]) -> str:
    axes = figure.subplots()
    layers = mean_by(rows, "layer", "sparsity")
    heads = [[row["sparsity"] * 100 for row in rows if row["layer"] == layer] for layer in layers]
    axes.fill_between(list(layers), [min(head) for head in heads], [max(head) for head in heads],
                      color=LINES["h2o"]["color"], alpha=0.2, label="lowest to highest head")
    _line(axes, layers, "mean over heads", LINES["h2o"], scale=100)
    _layers(axes, rows)
    axes.set(ylabel="entries below 1 % of their row's maximum, %", ylim=(0, 101))
    return "Attention sparsity, of the entries that a causal row can see"


def _scores(figure, rows: Sequence[dict]) -> str:
    from matplotlib.ticker import FuncFormatter

    curves, slopes, fits = figure.subplots(1, 3)
    layers = sorted({row["layer"] for row in rows})
    shown = sorted({layers[round(part * (len(layers) - 1) / 4)] for part in range(5)})
    for layer, look in zip(shown, _LOOKS, strict=False):
        some = (row for row in rows if row["layer"] == layer and row["score"] > 0)
        _line(curves, {row["relative_rank"] * 100: row["score"] for row in some},
              f"layer {layer}", look)
    curves.set(xscale="log", yscale="log", xlabel="rank, % of the tokens (log scale)",
               ylabel="accumulated score, in means over tokens (log scale)")
    for axis in (curves.xaxis, curves.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axes, column, label in ((slopes, "slope", "slope in log-log"), (fits, "r2", "R2 of it")):
        _line(axes, mean_by(rows, "layer", column), "", LINES["h2o"])
        _layers(axes, rows)
        axes.set(ylabel=label)
    fits.set(ylim=(None, 1.01))
    return ("Accumulated attention by rank, and its power law over ranks of "
            f"{FIT[0]:.0%} to {FIT[1]:.0%}")


def _local(figure, rows: Sequence[dict]) -> str:
    left, right = figure.subplots(1, 2)
    percents = sorted({row["budget_percent"] for row in rows})
    for place, percent in enumerate(percents):
        look = _LOOKS[place % len(_LOOKS)]
        some = [row for row in rows if row["budget_percent"] == percent]
        _line(left, mean_by(some, "seen_percent", "overlap"), f"top {percent:g} %", look, scale=100)
        left.axhline(percent, color=look["color"], linewidth=0.8, linestyle=":")
        half = [row for row in some if row["seen_percent"] == 50]
        _line(right, mean_by(half, "layer", "overlap"), f"top {percent:g} %", look, scale=100)
    left.set(xlabel="seen of the text, %", title="Mean over layers; dotted: by chance")
    right.set(title="After half of the text")
    _layers(right, rows)
    for axes in (left, right):
        axes.set(ylabel="heavy hitters that are so in the end, %", ylim=(0, 101))
    return "Heavy hitters by local statistics against those of the whole text"


def _frequency(figure, rows: Sequence[dict]) -> str:
    axes = figure.subplots()
    for name, look in zip(("pearson", "spearman"), _LOOKS, strict=False):
        _line(axes, mean_by(rows, "layer", name), name.capitalize(), look)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(ylabel="correlation, mean over texts", ylim=(-1.02, 1.02))
    _layers(axes, rows)
    return "Mean accumulated score of a token against its count in the text"


def _misses(figure, rows: Sequence[dict]) -> str:
    left, right = figure.subplots(1, 2)
    usual = min({row["budget_percent"] for row in rows}, key=lambda at: (abs(at - _USUAL), at))
    for policy in dict.fromkeys(row["policy"] for row in rows):
        some = [row for row in rows if row["policy"] == policy]
        at_usual = [row for row in some if row["budget_percent"] == usual]
        for axes, part, key in ((left, some, "budget_percent"), (right, at_usual, "layer")):
            label = "best possible" if policy == "best" else policy
            _line(axes, mean_by(part, key, "miss_rate"), label, _POLICIES[policy], scale=100)
    left.set(xlabel="KV cache budget, % of the first half", xlim=(0, None),
             title="Mean over layers")
    right.set(title=f"At {usual:g} %")
    _layers(right, rows)
    for axes in (left, right):
        axes.set(ylabel="attention on tokens that are not cached, %", ylim=(0, None))
    return "Attention lost in the second half: lower is better"


def _evicted(figure, rows: Sequence[dict]) -> str:
    axes = figure.subplots()
    (full,) = (row["perplexity"] for row in rows if row["evicted"] == "none")
    for kind, look in _KINDS.items():
        some = [row for row in rows if row["evicted"] == kind]
        _line(axes, {row["evicted_percent"]: row["perplexity"] for row in some}, kind, look)
    axes.axhline(full, color="black", linewidth=1, linestyle=":", label="none")
    axes.set(xlabel="keys of the first half that are not seen, % (in each layer and KV head)",
             ylabel="perplexity of the second half (log scale)", xlim=(0, None))
    log_scale(axes, [row["perplexity"] for row in rows])
    return "Perplexity without the heavy hitters, and without as many other keys"
